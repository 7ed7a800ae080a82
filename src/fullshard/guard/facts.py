"""Changes that a rank makes to its shards, as named texts and one digest that ranks compare. Standard library only.

A `Ledger` belongs to the ranks of one mesh and one root. It holds current settings ("standing" facts) and, in order,
the actions since the last comparison ("deeds"):

    fact                                        taken        where it is taken
    settings of reductions (divide factor,      on change    the setters of `FSDPModule`
      sums, hooks, custom messages)
    values outside of units, and of replicas    first use,   before the first reduction of a backward
                                                load, change
    optimizer: class, options of each group     each step    after `optimizer.step()`; texts are made of what changed
      (lr, weight_decay, ...), parameters
    optimizer: how much state there is, and     each step    after `optimizer.step()`
      its step counter; state replaced
    gradients written since their reduction     each step    after `optimizer.step()`, by version counters
    parameters written between steps            each step    before the first reduction of a backward, by version
                                                             counters
    `clip_grad_norm_`: arguments                each call    the call; its place among the deeds says before or after
    `GradScaler`: scale, growth                 each call    `unscale_`, or `step` without it
    gradients that tensor hooks changed         each time    the end of a backward
    loads of parameters                         each load    the hooks of `load_state_dict`
    messages of which no order is known yet     first step   on a device only: elsewhere they are compared before

Each optimizer step is one deed. Equal ledgers have equal digests. If digests differ, ranks exchange the ledgers
(`Sealed.text`), and `differences` lists the differences, causes first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from .structure import shown_ranks

# The deed of an optimizer's step.
STEP = "optimizer.step"
# If there are more since the last comparison, the older ones are folded into a digest.
_MOST_DEEDS = 64
# The advice in an error, by the kind of a fact.
ADVICE = {
    "settings": "call the setters of FSDPModule with the same arguments on all ranks",
    "outside": "give it to fully_shard, reduce its gradients yourself, or freeze it; fullshard.find_drift(model) lists "
    "all that differ",
    "ignored": "nothing where that is meant, as of experts of a rank's own; else seed and load it alike",
    "replicas": "seed and load the ranks that replicate alike; fullshard.find_drift(model) lists all that differ",
    "optimizer": "build the optimizer and its schedule from the same numbers on all ranks",
    "parameters": "build the optimizer from the same parameters in the same order on all ranks",
    "state": "load the optimizer's state on all ranks, or on none",
    "gradients": "change gradients on all ranks or on none, in the program or in a hook",
    "written": "change or load parameters on all ranks or on none",
    "clip": "call clip_grad_norm_ with the same arguments on all ranks",
    "scaler": "build the scaler with the same arguments on all ranks, and load its state on all of them",
    "hooks": "register hooks that change gradients on all ranks or on none",
    "load": "load the same checkpoint on all ranks",
    "order": "run the same modules in the same order on all ranks",
    "calls": "take the same calls in the same order on all ranks",
}


class Fact(NamedTuple):
    """One value that must be equal on all ranks. `kind` is a key of `ADVICE`."""

    kind: str
    name: str
    value: str


class Deed(NamedTuple):
    """One action, with its facts in a fixed order."""

    name: str
    facts: tuple[Fact, ...]


class Difference(NamedTuple):
    """A fact that differs: its values with their ranks, the most frequent first."""

    fact: Fact
    values: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def text(self) -> str:
        """The error, one or two lines."""
        found = " and ".join(f"{_shortened(value)} on {shown_ranks(ranks)}" for value, ranks in self.values[:4])
        more = f" and {len(self.values) - 4} more" if len(self.values) > 4 else ""
        return f"{self.fact.name}: expected the same on every rank, found {found}{more}; {ADVICE[self.fact.kind]}"

    @property
    def by_rank(self) -> dict[int, str]:
        return {rank: value for value, ranks in self.values for rank in ranks}


class Sealed(NamedTuple):
    """The compared content: deeds, standing facts, and for replicas their ranks and common facts."""

    deeds: tuple[Deed, ...]
    standing: tuple[Fact, ...]
    replicas: tuple[str, tuple[Fact, ...]] | None
    # The digest of the facts of all ranks; and of those of replicas only, 0 if there are none.
    digest: int
    shared: int

    @property
    def text(self) -> str:
        """The full content, which ranks exchange only if digests differ."""
        return _dumps([self.deeds, self.standing, self.replicas])


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self._standing: dict[str, Fact] = {}
        self.deeds: list[Deed] = []
        self._replicas: tuple[str, tuple[Fact, ...]] | None = None
        # Standing facts in order, and their digest; None after a change. A cache of deeds' digests, which recur.
        self._stands: tuple[tuple[Fact, ...], int] | None = None
        self._known: dict[Deed, int] = {}
        self._last: Sealed | None = None

    def stand(self, fact: Fact) -> None:
        """Set `fact`, replacing the standing fact of its name."""
        if self._standing.get(fact.name) != fact:
            self._standing[fact.name] = fact
            self._stands = None

    def do(self, deed: Deed) -> None:
        """Append `deed`."""
        if len(self.deeds) >= _MOST_DEEDS:
            folded, self.deeds = self.deeds[: _MOST_DEEDS // 2], self.deeds[_MOST_DEEDS // 2 :]
            before = Fact("calls", "digest of the calls before the last ones", f"{digest_of(_dumps(folded)):016x}")
            self.deeds.insert(0, Deed("calls before", (before,)))
        self.deeds.append(deed)

    def share(self, among: str, facts: Sequence[Fact]) -> None:
        """Add, for the next comparison only, facts that must be equal among the ranks `among`."""
        self._replicas = among, tuple(facts)

    def seal(self) -> Sealed:
        """Return the content and clear the deeds. Returns the same object as the last time if nothing changed."""
        deeds, self.deeds = _in_one_order(self.deeds), []
        last, replicas = self._last, self._replicas
        if last is not None and self._stands is not None and replicas is None and deeds == last.deeds:
            return last
        if self._stands is None:
            facts = tuple(sorted(self._standing.values()))
            self._stands = facts, digest_of(_dumps(facts))
        standing, digest = self._stands
        parts = [digest, *map(self._digest, deeds)]
        digest = digest_of(",".join(map(str, parts)))
        self._replicas = None
        shared = 0 if replicas is None else digest_of(_dumps(replicas[1]))
        sealed = Sealed(deeds, standing, replicas, digest, shared)
        self._last = sealed if replicas is None else None
        return sealed

    def _digest(self, deed: Deed) -> int:
        known = self._known.get(deed)
        if known is None:
            if len(self._known) >= _MOST_DEEDS:
                self._known.clear()
            text = "\0".join([deed.name, *chain.from_iterable(deed.facts)])
            known = self._known[deed] = digest_of(text)
        return known

    def forget(self) -> None:
        """Drop all deeds: after a failure ranks restart, and some had got further than others."""
        self.deeds, self._replicas = [], None


def _in_one_order(deeds: list[Deed]) -> tuple[Deed, ...]:
    """`deeds`, with consecutive steps of several optimizers sorted: their order has no effect, because each optimizer
    has its own parameters."""
    if len(deeds) < 2:
        return tuple(deeds)
    runs = (list(run) for _, run in groupby(deeds, key=lambda deed: deed.name == STEP))
    return tuple(deed for run in runs for deed in (sorted(run) if run[0].name == STEP else run))


def digest_of(text: str) -> int:
    """64 bits of `text`, of which the lowest is 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & ~1


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def differences(told: Mapping[int, str]) -> Iterator[Difference]:
    """The differences between the ranks' ledgers, causes before effects: deeds, then standing facts, then replicas."""
    ledgers = {rank: json.loads(text) for rank, text in sorted(told.items())}
    deeds = {rank: [Deed(name, _facts(facts)) for name, facts in done] for rank, (done, _, _) in ledgers.items()}
    for place in range(max(map(len, deeds.values()))):
        names = {rank: done[place].name if place < len(done) else "" for rank, done in deeds.items()}
        if len(set(names.values())) > 1:
            calls = {rank: ", ".join(map(_called, done)) or "nothing" for rank, done in deeds.items()}
            yield _difference(Fact("calls", "calls since the last comparison", ""), calls)
            break
        yield from _unlike({rank: done[place].facts for rank, done in deeds.items()})
    yield from _unlike({rank: _facts(standing) for rank, (_, standing, _) in ledgers.items()})
    groups: dict[str, dict[int, tuple[Fact, ...]]] = {}
    for rank, (_, _, replicas) in ledgers.items():
        if replicas is not None:
            groups.setdefault(replicas[0], {})[rank] = _facts(replicas[1])
    for by_rank in groups.values():
        yield from _unlike(by_rank)


def _called(deed: Deed) -> str:
    """`deed` as text, with its object if no other text names that."""
    first = deed.facts[0]
    if first.kind == "hooks":
        return f"{deed.name} of {first.value}"
    return f"{deed.name} ({first.name}, ...)" if first.kind in ("outside", "ignored") else deed.name


def _facts(told: Sequence[Sequence[str]]) -> tuple[Fact, ...]:
    return tuple(Fact(*fact) for fact in told)


def _unlike(by_rank: Mapping[int, Sequence[Fact]]) -> Iterator[Difference]:
    known = {fact.name: fact for facts in by_rank.values() for fact in facts}
    values = {rank: {fact.name: fact.value for fact in facts} for rank, facts in by_rank.items()}
    for name, fact in known.items():
        found = {rank: mine.get(name, "none") for rank, mine in values.items()}
        if len(set(found.values())) > 1:
            yield _difference(fact, found)


def _difference(fact: Fact, by_rank: Mapping[int, str]) -> Difference:
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(by_rank.items()):
        groups.setdefault(value, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    return Difference(fact, tuple((value, tuple(ranks)) for value, ranks in ordered))


def _shortened(value: str) -> str:
    return value if len(value) <= 200 else f"{value[:197]}..."


def first_unlike(listed: Mapping[int, Sequence[str]]) -> str:
    """The error text for lists of names that differ: names that only some ranks have.

    >>> first_unlike({0: ["a", "b"], 1: ["a"]})
    'b (not on rank 1)'
    >>> first_unlike({0: ["a", "b"], 1: ["b", "a"]})
    'another order'
    """
    every = dict.fromkeys(name for names in listed.values() for name in names)
    sets = {rank: set(names) for rank, names in listed.items()}
    lacking = [(name, [rank for rank in listed if name not in sets[rank]]) for name in every]
    shown = [f"{name} (not on {shown_ranks(ranks)})" for name, ranks in lacking if ranks]
    if not shown:
        return "another order"
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
