"""What must be equal on all ranks: an ordered list of statements with one digest, and where those of several ranks
first differ. Standard library only.

A statement names a place and its facts: a unit of the model, a call of the program, what holds at a comparison. Values
of a single rank (its rows, its device index) are left out.

    statement                           entered                            compared
    structure: settings, units,         when a root forms                  then, through the store
      parameters
    tensors of `sync_module_states`     by each call                       then, through the store
    calls, in their order:                                                 as below
      optimizer: class, options of      after `optimizer.step()`; texts
        each group, parameters, state     are made of what changed
        and its counter, gradients
        written since their reduction
      `clip_grad_norm_`, `GradScaler`   by each call
      gradients that hooks changed      at the end of a backward
      loads of parameters               by hooks of `load_state_dict`
      values outside of units           at first use, after a load, and
                                          ever more seldom
      messages that nothing foretold    on a device alone, before they
        (elsewhere: actions.py)           are sent
    what holds now: settings of         when it changes                    as below
      reductions, the loaded state, how
      often parameters were written
    replicas of shards                  at first use, after a load         as below, among the ranks that hold them

Compared with the first reduction of a backward, before its gradients are handed over; on a device one step later. If no
reduction carries a digest: through the store, in the first, 2nd, 16th, 128th, ... training forward, and after a load or
a change of settings. On a device also at the end of a forward without gradients that sent what nothing foretold.

Equal ledgers have equal digests. If digests differ, ranks exchange the statements (`Sealed.text`), and `differences`
lists the differences, causes first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from ..peers.ranks import shown_ranks, variants

# Places of statements: of the structure, which are compared by their names, and of what a rank does.
OPTIONS, UNIT, PARAMETER, TENSOR = "settings", "unit", "parameter", "tensor"
CALL, NOW, REPLICAS = "call", "now", "replicas"
# The call of an optimizer's step.
STEP = "optimizer.step"
# If there are more calls since the last comparison, the older ones are folded into a digest.
_MOST_CALLS = 64
# How many of the differing values an error shows.
_SHOWN = 4
# The advice in an error, by the kind of a fact.
ADVICE = {
    OPTIONS: "set it to the same value on all ranks",
    UNIT: "call fully_shard with the same arguments on all ranks",
    PARAMETER: "build the same model on all ranks",
    TENSOR: "build the same model on all ranks",
    "frozen": "freeze the same parameters on all ranks",
    "sharding": "call fully_shard on the same modules, with the same arguments, on all ranks",
    "controls": "call the setters of FSDPModule with the same arguments on all ranks",
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
# Facts of the structure with an advice of their own.
_KINDS = {"requires_grad": "frozen", "unit": "sharding", "placement": "sharding"}


class Fact(NamedTuple):
    """One value that must be equal on all ranks. `kind` is a key of `ADVICE`."""

    kind: str
    name: str
    value: str


class Statement(NamedTuple):
    """What a rank states of one place, as facts in a fixed order. `among`: the ranks that must state the same, as text;
    "": all ranks of the ledger."""

    place: str
    name: str
    facts: tuple[Fact, ...]
    among: str = ""


def stated(place: str, name: str, values: Mapping[str, str]) -> Statement:
    """A statement of the structure, of values by name."""
    return Statement(place, name, tuple(Fact(_KINDS.get(fact, place), fact, value) for fact, value in values.items()))


def called(name: str, facts: Sequence[Fact]) -> Statement:
    """The statement of one call."""
    return Statement(CALL, name, tuple(facts))


# ---- a ledger --------------------------------------------------------------------------------------------------------


class Sealed(NamedTuple):
    """What is compared: the statements, a digest of those of all ranks, and of those of replicas only, 0 if there are
    none."""

    statements: tuple[Statement, ...]
    digest: int
    shared: int

    @property
    def text(self) -> str:
        """The statements, which ranks exchange only if digests differ."""
        return dumps(self.statements)


class Ledger:
    """What one rank did to the shards of a root on one mesh since its ranks last compared, and what holds now."""

    def __init__(self) -> None:
        self._now: dict[str, Fact] = {}
        self.calls: list[Statement] = []
        self._replicas: Statement | None = None
        # What holds now as one statement, and its digest; None after a change. A cache of the digests of calls, which
        # recur.
        self._holds: tuple[Statement, int] | None = None
        self._known: dict[Statement, int] = {}
        # The last content without replicas, and its calls.
        self._last: tuple[tuple[Statement, ...], Sealed] | None = None

    def stand(self, fact: Fact) -> None:
        """`fact` holds from now on, instead of the one of its name."""
        if self._now.get(fact.name) != fact:
            self._now[fact.name] = fact
            self._holds = None

    def stands(self, name: str) -> bool:
        """Whether a fact of this name holds."""
        return name in self._now

    def do(self, call: Statement) -> None:
        """Append `call`."""
        if len(self.calls) >= _MOST_CALLS:
            folded, self.calls = self.calls[: _MOST_CALLS // 2], self.calls[_MOST_CALLS // 2 :]
            before = Fact("calls", "digest of the calls before the last ones", f"{digest_of(dumps(folded)):016x}")
            self.calls.insert(0, called("calls before", [before]))
        self.calls.append(call)

    def share(self, among: str, facts: Sequence[Fact]) -> None:
        """Add, for the next comparison only, facts that must be equal among the ranks `among`."""
        self._replicas = Statement(REPLICAS, "", tuple(facts), among)

    def seal(self) -> Sealed:
        """Return the content and clear the calls. Returns the same object as the last time if nothing changed."""
        calls, self.calls = _in_one_order(self.calls), []
        replicas, self._replicas = self._replicas, None
        last, self._last = self._last, None
        if last is not None and self._holds is not None and replicas is None and calls == last[0]:
            self._last = last
            return last[1]
        if self._holds is None:
            now = Statement(NOW, "", tuple(sorted(self._now.values())))
            self._holds = now, digest_of(dumps([now]))
        now, digest = self._holds
        digest = digest_of(",".join(map(str, [digest, *map(self._digest, calls)])))
        if replicas is not None:
            return Sealed((*calls, now, replicas), digest, digest_of(dumps([replicas])))
        sealed = Sealed((*calls, now), digest, 0)
        self._last = calls, sealed
        return sealed

    def _digest(self, call: Statement) -> int:
        known = self._known.get(call)
        if known is None:
            if len(self._known) >= _MOST_CALLS:
                self._known.clear()
            known = self._known[call] = digest_of("\0".join([call.name, *chain.from_iterable(call.facts)]))
        return known

    def forget(self) -> None:
        """Drop all calls: after a failure ranks restart, and some had got further than others."""
        self.calls, self._replicas = [], None


def _in_one_order(calls: list[Statement]) -> tuple[Statement, ...]:
    """`calls`, with consecutive steps of several optimizers sorted: their order has no effect, because each optimizer
    has its own parameters."""
    if len(calls) < 2:
        return tuple(calls)
    runs = (list(run) for _, run in groupby(calls, key=lambda call: call.name == STEP))
    return tuple(call for run in runs for call in (sorted(run) if run[0].name == STEP else run))


def digest_of(text: str) -> int:
    """64 bits of `text`, of which the lowest is 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & ~1


def dumps(statements: Sequence[Statement]) -> str:
    """`statements` as JSON."""
    return json.dumps(statements, separators=(",", ":"))


def loads(text: str) -> list[Statement]:
    """The reverse of `dumps`.

    >>> loads(dumps([stated(UNIT, "head", {"mesh": "m"})]))
    [Statement(place='unit', name='head', facts=(Fact(kind='unit', name='mesh', value='m'),), among='')]
    """
    return [
        Statement(place, name, tuple(Fact(*fact) for fact in facts), among)
        for place, name, facts, among in json.loads(text)
    ]


def read(told: Mapping[int, str]) -> dict[int, list[Statement]]:
    """What each rank states, of its text. Ranks with equal texts have one list."""
    lists = {text: loads(text) for text in set(told.values())}
    return {rank: lists[text] for rank, text in told.items()}


# ---- where ranks differ ----------------------------------------------------------------------------------------------

# Names of what differs that is no fact.
_ORDER, _CALLS = "order", "calls since the last comparison"


class Difference(NamedTuple):
    """What differs between ranks. `fact`: one with an empty name if only some ranks have the statement. `values`:
    (ranks, their value), the most frequent first; None: no value."""

    statement: Statement
    fact: Fact
    values: tuple[tuple[tuple[int, ...], str | None], ...]

    @property
    def what(self) -> str:
        """The place and the fact, for programs."""
        return f"{self.statement.name} {self.fact.name}".strip()

    @property
    def by_rank(self) -> dict[int, str]:
        """The value of each rank."""
        return {rank: value or "" for ranks, value in self.values for rank in ranks}

    @property
    def text(self) -> str:
        """The error text: expected, found on which ranks, what to do."""
        place, name, fact = self.statement.place, self.statement.name, self.fact.name
        found = [f"{_shortened(value or '')} on {shown_ranks(ranks)}" for ranks, value in self.values[:_SHOWN]]
        found += [f"{len(self.values) - _SHOWN} more"] * (len(self.values) > _SHOWN)
        if place in (CALL, NOW, REPLICAS):
            return f"{fact}: expected the same on every rank, found {' and '.join(found)}; {ADVICE[self.fact.kind]}"
        if fact == _ORDER:
            found[0] = f"it {found[0]}"
            return (
                f"{name}: expected the same order of {place}s on every rank, found {' and '.join(found)}; build the "
                f"same model on all of them"
            )
        if not fact:
            have = [rank for ranks, value in self.values if value is not None for rank in ranks]
            miss = [rank for ranks, value in self.values if value is None for rank in ranks]
            what = "a unit (fully_shard) of this name" if place == UNIT else f"this {place}"
            return (
                f"{name}: expected {what} on every rank, found it on {shown_ranks(have)} and not on "
                f"{shown_ranks(miss)}; build and shard the same model on all of them"
            )
        subject = f"{name}: " if name else ""
        advice = ADVICE[self.fact.kind]
        return f"{subject}expected the same {fact} on every rank, found {' and '.join(found)}; {advice}"


def first_difference(by_rank: Mapping[int, Sequence[Statement]]) -> Difference | None:
    """The first of `differences`; None if all ranks state the same."""
    return next(differences(by_rank), None)


def differences(by_rank: Mapping[int, Sequence[Statement]]) -> Iterator[Difference]:
    """The differences between the statements of ranks, in their order, up to the first that only some ranks have; then
    those of replicas."""
    # Ranks that state the same may share a list (`read`).
    texts = {id(statements): dumps([one for one in statements if not one.among]) for statements in by_rank.values()}
    ranks_by_text = variants({rank: texts[id(statements)] for rank, statements in by_rank.items()})
    if len(ranks_by_text) > 1:
        yield from _between(list(ranks_by_text.values()), [loads(text) for text in ranks_by_text])
    groups: dict[str, dict[int, Statement]] = {}
    for rank, statements in by_rank.items():
        for one in statements:
            if one.among:
                groups.setdefault(one.among, {})[rank] = one
    for by_replica in groups.values():
        yield from _facts(next(iter(by_replica.values())), by_replica)


def _between(ranks: Sequence[Sequence[int]], lists: Sequence[Sequence[Statement]]) -> Iterator[Difference]:
    """The differences between `lists`, each of which `ranks` state; those of the majority first."""
    for place in range(max(map(len, lists))):
        here = [statements[place] if place < len(statements) else None for statements in lists]
        if any(_key(one) != _key(here[0]) for one in here):
            break
        by_rank = {rank: one for found, one in zip(ranks, here, strict=True) if one is not None for rank in found}
        yield from _facts(next(iter(by_rank.values())), by_rank)
    else:
        return
    if any(one is not None and one.place == CALL for one in here):
        made = [", ".join(map(_shown, (one for one in statements if one.place == CALL))) for statements in lists]
        fact = Fact("calls", _CALLS, "")
        yield Difference(Statement(CALL, "", (fact,)), fact, _grouped(ranks, [calls or "nothing" for calls in made]))
        return
    odd = next(at for at, one in enumerate(here) if _key(one) != _key(here[0]))
    usual, other = here[0], here[odd]
    # The other one there is either unknown to the majority or at another place.
    unknown = usual is None or (other is not None and _find(lists[odd], usual) and not _find(lists[0], other))
    one = other if unknown else usual
    assert one is not None
    same = [_find(statements, one) for statements in lists]
    if any(like is None for like in same):
        yield Difference(one, Fact(one.place, "", ""), _grouped(ranks, [like and like.place for like in same]))
        return
    by_rank = {rank: like for found, like in zip(ranks, same, strict=True) if like is not None for rank in found}
    yield from _facts(one, by_rank)
    yield Difference(one, Fact(one.place, _ORDER, ""), _grouped(ranks, [_before(each, one) for each in lists]))


def _key(statement: Statement | None) -> tuple[str, str] | None:
    return None if statement is None else statement[:2]


def _find(statements: Sequence[Statement], like: Statement) -> Statement | None:
    return next((one for one in statements if _key(one) == _key(like)), None)


def _before(statements: Sequence[Statement], like: Statement) -> str:
    """Where `like` is among those of its place, as text."""
    alike = [one.name for one in statements if one.place == like.place]
    at = alike.index(like.name)
    return f"after {alike[at - 1]}" if at else "first"


def _facts(statement: Statement, by_rank: Mapping[int, Statement]) -> Iterator[Difference]:
    """The facts that differ of one `statement`, which all ranks of `by_rank` make."""
    known = {fact.name: fact for one in by_rank.values() for fact in one.facts}
    values = {rank: {fact.name: fact.value for fact in one.facts} for rank, one in by_rank.items()}
    for name, fact in known.items():
        found = variants({rank: mine.get(name, "none") for rank, mine in values.items()})
        if len(found) > 1:
            yield Difference(statement, fact, tuple((tuple(ranks), value) for value, ranks in found.items()))


def _grouped(
    ranks: Sequence[Sequence[int]], values: Sequence[str | None]
) -> tuple[tuple[tuple[int, ...], str | None], ...]:
    by_rank = {rank: value for found, value in zip(ranks, values, strict=True) for rank in found}
    return tuple((tuple(found), value) for value, found in variants(by_rank).items())


def _shown(call: Statement) -> str:
    """`call` as text, with its object if no other text names that."""
    first = call.facts[0]
    if first.kind == "hooks":
        return f"{call.name} of {first.value}"
    return f"{call.name} ({first.name}, ...)" if first.kind in ("outside", "ignored") else call.name


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
