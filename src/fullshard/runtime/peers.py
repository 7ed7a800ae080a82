"""The other ranks of a root: connections to them that can be cut, and what they are told when a step fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from ..comm import Domain, PeerFailed, domain_of
from .optimizer_steps import optimizer_steps
from .unit import Unit, unit_of


class Peers:
    """The domains of `units`, whose root is run by `thread`. `open` connects them."""

    def __init__(self, units: Iterable[Unit], thread: int, *, silence_seconds: float) -> None:
        self.domains: list[Domain] = []
        for links in (links for unit in units for links in unit.links):
            domain = domain_of(links.everyone)
            if domain is not None and domain not in self.domains:
                domain.step = partial(_steps_since, optimizer_steps(thread), thread)
                domain.silence_seconds = silence_seconds
                self.domains.append(domain)

    def open(self, unit: Unit) -> None:
        """Connections for the groups of `unit` that have none yet; every rank of each of them makes this call."""
        for links in unit.links:
            domain = domain_of(links.everyone)
            if domain is not None:
                links.open(domain)

    def publish(self, error: BaseException | None, where: str) -> None:
        """Tell that this rank failed: the others raise when they wait for what it has not sent."""
        text = f"{where} ended with an exception" if error is None else f"{type(error).__name__}: {error}"
        # Of a backward that ended only that is known; where a wait of it was in vain, it is the peer that failed.
        waited = error is None and any(domain.failure is not None for domain in self.domains)
        kind = "followed" if waited or isinstance(error, PeerFailed) else "raised"
        for domain in self.domains:
            doing, domain.doing = domain.doing, domain.doing or where
            domain.publish(kind, text)
            domain.doing = doing

    def attempt_failed(self, error: BaseException, where: str) -> None:
        """`publish` for a block that all ranks enter equally often."""
        for domain in self.domains:
            domain.attempts += 1
        self.publish(error, where)

    def come_together(self, what: str) -> None:
        """Wait until all ranks are here. Raises `PeerFailed` when one of them will not come."""
        for domain in self.domains:
            doing, domain.doing = domain.doing, what
            domain.come_together(what)
            domain.doing = doing

    def compare(self, what: str, said: str, weight: Callable[[str], int]) -> dict[int, str]:
        """What every rank says of `what`, by rank. Of ranks in several domains the rest hears the heaviest. Every rank
        makes this call. Raises `PeerFailed` when one of them will not come."""
        found: dict[int, str] = {}
        # Twice, so that what is said in one domain comes to the ranks of the others.
        for domain in self.domains * min(len(self.domains), 2):
            answers = domain.agree(what, said) or dict.fromkeys(domain.ranks, said)
            found |= {rank: answer for rank, answer in answers.items() if weight(answer) >= weight(found.get(rank, ""))}
            said = max(found.values(), key=weight)
        return found

    def meet(self) -> bool:
        """After a failure all ranks come together before anything is sent. Whether they were not equally far."""
        for domain in self.domains:
            domain.refuse_failure()
        return any([domain.meet() for domain in self.domains if domain.must_meet])


def _steps_since(before: int, thread: int) -> int:
    return optimizer_steps(thread) - before


def peers_below(*models: nn.Module) -> Peers:
    """Those of all units of `models`: of roots that formed, and of units that did not run yet.

    Raises `ValueError` for a model without units.
    """
    units = []
    for model in models:
        below = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
        if not below:
            raise ValueError(
                f"expected a model that fully_shard was applied to, found a {type(model).__name__} without a sharded "
                f"module"
            )
        units += below
    roots = dict.fromkeys(unit.root for unit in units if unit.root is not None)
    found = Peers((), threading.get_ident(), silence_seconds=0)
    domains = [domain for root in roots for domain in root.peers.domains]
    if not domains:  # nothing ran yet
        domains = [domain for unit in units for links in unit.links if (domain := domain_of(links.everyone))]
    found.domains = list(dict.fromkeys(domains))
    return found
