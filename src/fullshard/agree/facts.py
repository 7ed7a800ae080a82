"""Facts that must be equal on all ranks, as named texts: the structure of a model, and what a rank does to its shards.
Standard library only.

The structure is a list of items, compared once:

    settings                   prefetch 1, ...
    unit      layers.1         mesh cpu (2,) of ranks [0, 1], reshard_after_forward True, ...
    parameter layers.1.weight  unit layers.1, shape (5, 3), dtype float32, requires_grad True, ...

Values of a single rank (its rows, its device index) are left out.

What a rank does is in a `Ledger`, which belongs to the ranks of one mesh and one root. It holds current settings
("standing" facts) and, in order, the actions since the last comparison ("deeds"), with one digest of all:

    fact                                        taken        where it is taken
    settings of reductions (divide factor,      on change    the setters of `FSDPModule`
      sums, hooks, custom messages)
    values outside of units, and of replicas    first use,   before the first reduction of a backward; where nothing
                                                load, change sharded trains, some forwards (step_facts.py)
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

from ..peers.ranks import shown_ranks, variants

# ---- structure of a model --------------------------------------------------------------------------------------------

SETTINGS, UNIT, PARAMETER = "settings", "unit", "parameter"
# How many of the differing values an error shows.
_SHOWN = 4


class Item(NamedTuple):
    """One line: `kind` is SETTINGS, UNIT or PARAMETER, `name` is dotted, `facts` must be equal, in order."""

    kind: str
    name: str
    facts: Mapping[str, str]


class Difference(NamedTuple):
    """The first difference between ranks. `fact`: its name; "" if only some ranks have the item; "order" if ranks have
    it at different places. `values`: (ranks, their value), the majority first; None: no value."""

    item: Item
    fact: str
    values: tuple[tuple[tuple[int, ...], str | None], ...]

    @property
    def text(self) -> str:
        """The error text: expected, found on which ranks, what to do."""
        name, kind = self.item.name, self.item.kind
        found = [f"{value} on {shown_ranks(ranks)}" for ranks, value in self.values[:_SHOWN]]
        if self.fact == "order":
            (first, before), *others = self.values
            said = f"found it {before} on {shown_ranks(first)}"
            said += "".join(f" and {place} on {shown_ranks(ranks)}" for ranks, place in others[: _SHOWN - 1])
            return (
                f"{name}: expected the same order of {kind}s on every rank, {said}; build the same model on all of them"
            )
        if not self.fact:
            have = sorted(rank for ranks, value in self.values if value is not None for rank in ranks)
            miss = sorted(rank for ranks, value in self.values if value is None for rank in ranks)
            what = "a unit (fully_shard) of this name" if kind == UNIT else f"this {kind}"
            return (
                f"{name}: expected {what} on every rank, found it on {shown_ranks(have)} and not on "
                f"{shown_ranks(miss)}; build and shard the same model on all of them"
            )
        subject = f"{name}: " if name else ""
        return f"{subject}expected the same {self.fact} on every rank, found {' and '.join(found)}; {self._advice()}"

    def _advice(self) -> str:
        if self.item.kind == SETTINGS:
            return "set it to the same value on all ranks"
        if self.item.kind == UNIT:
            return "call fully_shard with the same arguments on all ranks"
        if self.fact == "requires_grad":
            return "freeze the same parameters on all ranks"
        if self.fact in ("unit", "placement"):
            return "call fully_shard on the same modules, with the same arguments, on all ranks"
        return "build the same model on all ranks"


def dumps_items(items: Sequence[Item]) -> str:
    """One line for each item."""
    return "\n".join(json.dumps([item.kind, item.name, dict(item.facts)], separators=(",", ":")) for item in items)


def loads_items(text: str) -> list[Item]:
    """The reverse of `dumps_items`.

    >>> loads_items(dumps_items([Item(UNIT, "head", {"mesh": "m"})]))
    [Item(kind='unit', name='head', facts={'mesh': 'm'})]
    """
    return [Item(*json.loads(line)) for line in text.splitlines()]


def first_difference(by_rank: Mapping[int, Sequence[Item]]) -> Difference | None:
    """The first item, in the majority's order, that is not the same on all ranks; None if all lists are equal."""
    texts = {rank: dumps_items(items) for rank, items in by_rank.items()}
    lists = [by_rank[ranks[0]] for ranks in variants(texts).values()]
    reference, *others = lists
    places = [place for other in others if (place := _differ_at(reference, other)) is not None]
    if not places:
        return None
    item = min(places, key=lambda place: place[0])[1]
    same = {rank: _find(items, item) for rank, items in by_rank.items()}
    if any(one is None for one in same.values()):
        return Difference(item, "", _grouped({rank: None if one is None else "" for rank, one in same.items()}))
    facts = {rank: one.facts for rank, one in same.items() if one is not None}
    names = dict.fromkeys(name for values in facts.values() for name in values)
    for name in names:
        values = {rank: known.get(name) for rank, known in facts.items()}
        if len(set(values.values())) > 1:
            return Difference(item, name, _grouped({r: "none" if v is None else v for r, v in values.items()}))
    return Difference(item, "order", _grouped({rank: _place(items, item) for rank, items in by_rank.items()}))


def _differ_at(reference: Sequence[Item], other: Sequence[Item]) -> tuple[int, Item] | None:
    """The first place where `other` differs, and the item to compare there."""
    for i, item in enumerate(reference):
        if i >= len(other):
            return i, item
        if item == other[i]:
            continue
        if (item.kind, item.name) == (other[i].kind, other[i].name) or _find(other, item) is None:
            return i, item
        # The other item there is either unknown to the majority or at another place.
        return i, other[i] if _find(reference, other[i]) is None else item
    return (len(reference), other[len(reference)]) if len(other) > len(reference) else None


def _find(items: Sequence[Item], like: Item) -> Item | None:
    return next((item for item in items if (item.kind, item.name) == (like.kind, like.name)), None)


def _place(items: Sequence[Item], like: Item) -> str:
    before: Item | None = None
    for item in items:
        if (item.kind, item.name) == (like.kind, like.name):
            break
        before = item if item.kind == like.kind else before
    return f"after {before.name}" if before is not None else "first"


def _grouped(by_rank: Mapping[int, str | None]) -> tuple[tuple[tuple[int, ...], str | None], ...]:
    return tuple((tuple(ranks), value) for value, ranks in variants(by_rank).items())


# ---- what a rank does ------------------------------------------------------------------------------------------------

# The deed of an optimizer's step.
STEP = "optimizer.step"
# If there are more since the last comparison, the older ones are folded into a digest.
_MOST_DEEDS = 64
# The advice in an error, by the kind of a fact.
ADVICE = {
    "settings": "call the setters of FSDPModule with the same arguments on all ranks",
    "outside": "no unit has it, so nothing averages its gradients: add it before fully_shard (adapters: get_peft_model "
    "first); or begin from equal values, average its gradients yourself, and name in ignored_params what is there by "
    "then; or freeze it; fullshard.find_drift(model) lists all that differ",
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


class FactDifference(NamedTuple):
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
    """What one rank did to the shards of a root on one mesh since its ranks last compared: facts that stand, and deeds
    in their order, with one digest of both."""

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

    def stands(self, name: str) -> bool:
        """Whether a standing fact has this name."""
        return name in self._standing

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


def differences(told: Mapping[int, str]) -> Iterator[FactDifference]:
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


def _unlike(by_rank: Mapping[int, Sequence[Fact]]) -> Iterator[FactDifference]:
    known = {fact.name: fact for facts in by_rank.values() for fact in facts}
    values = {rank: {fact.name: fact.value for fact in facts} for rank, facts in by_rank.items()}
    for name, fact in known.items():
        found = {rank: mine.get(name, "none") for rank, mine in values.items()}
        if len(set(found.values())) > 1:
            yield _difference(fact, found)


def _difference(fact: Fact, by_rank: Mapping[int, str]) -> FactDifference:
    return FactDifference(fact, tuple((value, tuple(ranks)) for value, ranks in variants(by_rank).items()))


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
