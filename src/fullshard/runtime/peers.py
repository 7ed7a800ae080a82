"""The other ranks of a root: connections to them that can be cut, and what they are told when a step fails."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ..comm import Domain, PeerFailed, domain_of
from .optimizer_steps import optimizer_steps
from .unit import Unit


class Peers:
    """The domains of `units`, whose root is run by `thread`. Every rank of each of them makes it."""

    def __init__(self, units: Iterable[Unit], thread: int) -> None:
        self.domains: list[Domain] = []
        self._thread = thread
        for unit in units:
            self.open(unit)

    def open(self, unit: Unit) -> None:
        """Connections for the groups of `unit` that have none yet."""
        for links in unit.links:
            domain = domain_of(links.everyone)
            if domain is None:
                continue
            links.open(domain)
            if domain not in self.domains:
                domain.step = partial(optimizer_steps, self._thread)
                self.domains.append(domain)

    def publish(self, error: BaseException | None, where: str) -> None:
        """Tell that this rank failed: the others raise when they wait for what it has not sent."""
        text = where if error is None else f"{type(error).__name__}: {error}"
        kind = "followed" if isinstance(error, PeerFailed) else "raised"
        for domain in self.domains:
            doing, domain.doing = domain.doing, domain.doing or where
            domain.publish(kind, text)
            domain.doing = doing

    def meet(self) -> None:
        """After a failure all ranks come together before anything is sent."""
        for domain in self.domains:
            if domain.must_meet:
                domain.meet()
