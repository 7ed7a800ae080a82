"""The plan of a save: every rank declares what it holds, and the plan says which rank writes which part to which of its
files.

Where all ranks declare the same, as with `fully_shard`, each computes the plan by itself: a function of what it holds
and of the number of ranks. Otherwise the first rank gets every different declaration (`merge`), and shares the plan.

    part        written by the rank of one replica; replicas of a rule share the tensors by their bytes
    volume      tensors that are in one file of each rank; a file has at most FILE_NBYTES, or one part

A plan is the same on all ranks, and a rank may use it again for the next save of the same layout: `Share` compares it
with what the rank has now. Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from ..layout import itemsize
from .errors import CheckpointError, CheckpointMismatch
from .manifest import TensorEntry, data_name, tables_from_json, tables_to_json
from .plan import (
    FLATTENED,
    MODULUS,
    REST,
    ROWS,
    Box,
    KeyPath,
    TensorSpec,
    coverage_problem,
    is_grouping,
    key_of,
    matches,
    uncollected,
    whole,
)
from .rules import Layout, Rule, boxes_of, compact, expanded, from_json, joined, listed, on, to_json
from .safetensors import FilePart, file_order

# A new file after this many bytes of a writer, at most; and from how many bytes on another replica takes its part.
FILE_NBYTES = 4 << 30
SHARED_NBYTES = 16 << 20

REMEDY = (
    "save the state of each rank under its own keys (with the rank in them); to save the first rank's state where "
    "ranks differ, name the keys in take_first"
)
Message = dict[str, Any]


class Own(NamedTuple):
    """A part of one tensor, as its rank knows it. `box`: None on ranks outside of the tensor's mesh; `rule`: None for a
    plain tensor; `around`: `state.Part.around`."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    rule: Rule | None
    around: tuple[tuple[int, int], tuple[int, ...]] | None

    @property
    def is_regular(self) -> bool:
        """Whether every rank of its rule knows from it what the others hold."""
        return self.around is None and (self.rule is not None or self.box == whole(self.shape))


# ---- what a rank declares --------------------------------------------------------------------------------------------


class Declaration(NamedTuple):
    """The state of one rank without its contents. `structure`: all but values; `rules`: those in it; `values`: (path,
    digest, whether the first rank's is taken)."""

    structure: Message
    rules: list[Rule]
    values: list[tuple[KeyPath, str, bool]]
    is_regular: bool
    # The same for ranks that declare the same structure.
    digest: str

    def message(self) -> Message:
        """The message for `merge`."""
        return {**self.structure, "values": self.values}


@uncollected()
def declare(
    own: Sequence[Own],
    values: Iterable[tuple[KeyPath, str]],
    take_first: Sequence[str],
    apart: Iterable[str],
    world: int,
) -> Declaration:
    """The declaration of a rank of `world` that holds `own`. `apart`: keys of tensors that have files of their own."""
    apart, rules, tensors = frozenset(apart), dict[Rule, int](), list[list[Any]]()
    regular = True
    for key, one in sorted(((key_of(one.path), one) for one in own), key=itemgetter(0)):
        held: Any = None if one.rule is None else rules.setdefault(one.rule, len(rules))
        if not one.is_regular:
            held, regular = {"box": one.box, "around": one.around}, False
        tensors.append([one.path, one.dtype, one.shape, held, key in apart, matches(key, take_first)])
    structure = {"world": world, "rules": [to_json(rule) for rule in rules], "tensors": tensors}
    found = [(path, digest, matches(key_of(path), take_first)) for path, digest in values]
    found.sort(key=lambda one: key_of(one[0]))
    paths = [[path, first] for path, _, first in found]
    return Declaration(structure, list(rules), found, regular, _digest_of([structure, paths]))


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:32]


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The tensors, with who writes which part. `values`: path, and the ranks that have the same: all of them but for
    groups of parameters (`is_grouping`); the first of each sends it. `computed`: values that only all parts
    together tell. `first`: keys of which ranks may have different contents."""

    world: int
    entries: dict[str, TensorEntry]
    values: dict[str, tuple[KeyPath, list[tuple[int, ...]]]]
    computed: dict[str, tuple[KeyPath, list[tuple[int, int]]]] = field(default_factory=dict)
    first: frozenset[str] = frozenset()
    # The digest of the declaration from which each rank computes it.
    declared: str = ""

    @cached_property
    def id(self) -> str:
        """The same on two ranks only if the plan is."""
        return self.declared or _digest_of(self.to_json())

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    @cached_property
    def rules(self) -> dict[Layout, int]:
        """The rules of its tensors, numbered."""
        found: dict[Layout, int] = {}
        for entry in self.entries.values():
            found.setdefault(entry.rule, len(found))
        return found

    @cached_property
    def holders(self) -> dict[tuple[int, ...], list[str]]:
        """The keys of values by the ranks that have the same, without those of `first`."""
        found: dict[tuple[int, ...], list[str]] = {}
        for key, (_, groups) in self.values.items():
            for ranks in groups if key not in self.first else ():
                found.setdefault(ranks, []).append(key)
        return found

    @cached_property
    @uncollected()
    def files(self) -> set[str]:
        """The names of all data files."""
        # Which parts have elements depends on the sizes of the dims that are cut.
        filled: dict[tuple[Layout, tuple[int, ...]], list[int]] = {}
        written: dict[tuple[Layout, tuple[int, ...], int, int], None] = {}
        for entry in self.entries.values():
            rule, shape = entry.rule, entry.shape
            sizes = tuple(shape[cut.dim] for cut in rule.cuts) if isinstance(rule, Rule) else shape
            if entry.nbytes:
                if (rule, sizes) not in filled:
                    filled[rule, sizes] = [part for part, _ in boxes_of(rule, shape)]
                written[rule, sizes, entry.replica, entry.volume] = None
        places = {
            (rule.writer(part, replica), volume)
            for rule, sizes, replica, volume in written
            for part in filled[rule, sizes]
        }
        return {data_name(rank, volume) for rank, volume in places}

    def to_json(self) -> Message:
        values = [[path, [compact(ranks) for ranks in groups]] for path, groups in self.values.values()]
        return {
            "tables": tables_to_json(self.entries.values()),
            "values": values,
            "computed": [*self.computed.values()],
            "first": sorted(self.first),
        }

    @classmethod
    def from_json(cls, raw: Message, world: int) -> Plan:
        entries = tables_from_json(raw["tables"], world)
        ranks: dict[str, tuple[int, ...]] = {}

        def known(one: Any) -> tuple[int, ...]:
            return ranks.setdefault(str(one), expanded(one, world))

        values = {key_of(path): (tuple(path), [known(one) for one in groups]) for path, groups in raw["values"]}
        computed = {
            key_of(path): (tuple(path), [(first, last) for first, last in rows]) for path, rows in raw["computed"]
        }
        return cls(world, entries, values, computed, frozenset(raw["first"]))


@uncollected()
def plan_of(declaration: Declaration) -> Plan:
    """The plan where all ranks declare the same."""
    structure = declaration.structure
    world = structure["world"]
    everywhere = on(range(world))
    tensors = [
        (TensorSpec(path, dtype, shape), everywhere if held is None else declaration.rules[held], apart, first)
        for path, dtype, shape, held, apart, first in structure["tensors"]
    ]
    values = {key_of(path): (path, [everywhere.ranks]) for path, _, _ in declaration.values}
    firsts = {key_of(path) for path, _, first in declaration.values if first}
    firsts |= {spec.key for spec, _, _, first in tensors if first}
    return Plan(world, arranged(tensors), values, {}, frozenset(firsts), declaration.digest)


def arranged(tensors: Iterable[tuple[TensorSpec, Layout, bool, bool]]) -> dict[str, TensorEntry]:
    """The tensors (what they are, how they are cut, whether they are apart, whether the first rank's are taken) with
    the replica that writes each, and its volume.

    The replicas of a rule share its tensors: each takes neighbours in the order of the names, as many bytes as the
    others, and not less than SHARED_NBYTES. Those that are apart are in volumes of their own.

    >>> spec = [TensorSpec((name,), "uint8", (SHARED_NBYTES,)) for name in "abcd"]
    >>> [entry.replica for entry in arranged((one, on(range(2)), False, False) for one in spec).values()]
    [0, 0, 1, 1]
    """
    keyed = sorted(((one[2], one[0].key, one) for one in tensors), key=itemgetter(0, 1))
    keys, order = [key for _, key, _ in keyed], [one for _, _, one in keyed]
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    largest = []
    for spec, rule, _, _ in order:
        if (id(rule), spec.shape) not in sizes:
            sizes[id(rule), spec.shape] = rule.largest(spec.shape)
        largest.append(sizes[id(rule), spec.shape] * itemsize(spec.dtype))
    total: dict[tuple[Layout, bool], int] = {}
    for (_, rule, apart, _), nbytes in zip(order, largest, strict=True):
        if rule.num_replicas > 1:
            total[rule, apart] = total.get((rule, apart), 0) + nbytes
    before = dict.fromkeys(total, 0)
    found: dict[str, TensorEntry] = {}
    volume, kind = 0, False
    filled: dict[tuple[Layout, int], int] = {}  # bytes in this volume, of each replica of a rule
    most: dict[Layout, int] = {}  # of a rule, the most of one replica
    for key, (spec, rule, apart, first), nbytes in zip(keys, order, largest, strict=True):
        replica = 0
        if rule.num_replicas > 1 and total[rule, apart]:
            count = min(rule.num_replicas, -(-total[rule, apart] // SHARED_NBYTES))
            if not first:
                replica = min(count - 1, (2 * before[rule, apart] + nbytes) * count // (2 * total[rule, apart]))
            before[rule, apart] += nbytes
        here = filled.get((rule, replica), 0) + nbytes
        largest_file = sum(most.values()) + max(here - most.get(rule, 0), 0)
        if most and (apart != kind or (nbytes and largest_file > FILE_NBYTES)):
            volume, here = volume + 1, nbytes
            filled.clear()
            most.clear()
        kind = apart
        if nbytes:
            filled[rule, replica], most[rule] = here, max(here, most.get(rule, 0))
        found[key] = TensorEntry(*spec, rule, replica, volume)
    return dict(sorted(found.items()))


# ---- one rank's share ------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The work of one rank. Numbers are those of its parts.

    `write`: by volume, the parts of that file. `place`: of each part that it holds, where it is in the checkpoint.
    `replicated`: by (number of the rule, of the part), the parts of which other ranks hold the same."""

    write: dict[int, list[int]]
    place: dict[int, FilePart]
    replicated: dict[tuple[int, int], list[int]]

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return sum(self._sizes())

    @property
    def largest_file(self) -> int:
        """Bytes of the parts in the largest of its files."""
        return max(self._sizes(), default=0)

    @property
    def compare(self) -> list[int]:
        """The parts that it does not write, and compares."""
        written = {i for indices in self.write.values() for i in indices}
        return [i for indices in self.replicated.values() for i in indices if i not in written]

    @property
    def order(self) -> list[int]:
        """The parts that it writes, in the order of the files."""
        found = []
        for indices in self.write.values():
            found += [indices[i] for i in file_order([self.place[i] for i in indices])]
        return found

    def _sizes(self) -> list[int]:
        return [sum(self.place[i].entry.nbytes for i in indices) for indices in self.write.values()]


@uncollected()
def share_of(plan: Plan, own: Sequence[Own], rank: int) -> Share:
    """The work of `rank`, which holds `own`. Raises `CheckpointError` if that is not what the plan was made for."""
    write: dict[int, list[int]] = {}
    place: dict[int, FilePart] = {}
    replicated: dict[tuple[int, int], list[int]] = {}
    # Of each rule and shape: the replica and part that this rank has, its box, and how many ranks have the same.
    boxes: dict[tuple[int, tuple[int, ...]], tuple[int, int, Box, int] | None] = {}
    numbers = {key: number for number, key in enumerate(plan.entries)}
    keys = list(plan.entries)
    by_id = {id(rule): number for rule, number in plan.rules.items()}
    found: list[tuple[int, int, TensorEntry]] = []
    for index, one in enumerate(own):
        key = key_of(one.path)
        number = numbers.get(key)
        if number is None:
            number = numbers.get(f"{key}.{REST}")
        if number is not None:
            found.append((number, index, plan.entries[keys[number]]))
        elif one.box is not None and one.box.numel:
            raise _stale(key, None, one.box)
    for at_key, index, entry in sorted(found, key=itemgetter(0, 1)):
        key, one, rule = keys[at_key], own[index], entry.rule
        number = by_id.get(id(rule))
        if number is None:
            number = by_id[id(rule)] = plan.rules[rule]
        if (number, entry.shape) not in boxes:
            at = rule.place_of(rank)
            boxes[number, entry.shape] = at and (*at, rule.box(entry.shape, at[1]), len(rule.holders(at[1])))
        mine = boxes[number, entry.shape]
        expected = None if mine is None else mine[2]
        # Those inside of others, and what is left beside them, are at places that their rank does not know.
        exact = one.around is None and entry.path == one.path
        fits = expected == one.box if exact else (expected and expected.lengths) == (one.box and one.box.lengths)
        if not fits and not (_is_empty(expected) and _is_empty(one.box)):
            raise _stale(key, expected, one.box)
        if one.dtype != entry.dtype:
            raise CheckpointError(f"{key}: expected {entry.dtype} by the plan of this save, found {one.dtype}")
        if mine is None or expected is None or not expected.numel:
            continue
        _, part, _, holders = mine
        place[index] = FilePart(key, entry.dtype, itemsize(entry.dtype), entry.shape, expected)
        if rank == rule.writer(part, entry.replica):
            write.setdefault(entry.volume, []).append(index)
        if holders > 1 and key not in plan.first:
            replicated.setdefault((number, part), []).append(index)
    return Share(dict(sorted(write.items())), place, replicated)


def _is_empty(box: Box | None) -> bool:
    return box is None or not box.numel


def _stale(key: str, expected: Box | None, found: Box | None) -> CheckpointError:
    return CheckpointError(
        f"{key}: expected this rank to hold {expected or 'nothing'} by the plan of this save, found "
        f"{found or 'nothing'}: the plan is that of another layout; this is a fault of fullshard, please report it"
    )


# ---- sums that are 0 where ranks agree -------------------------------------------------------------------------------


def balance(plan: Plan, rank: int, holders: Sequence[int], what: object, digest: int) -> int:
    """This rank's summand for a fact that all `holders` have to know alike: over all of them the summands add up to 0
    modulo MODULUS if their digests are equal, and to 0 by chance alone (1 in 2**61) if not.

    Each rank's weight is the difference of two numbers drawn from the plan, that of the next holder and its own.
    """
    if len(holders) < 2:
        return 0
    at = holders.index(rank) if isinstance(holders, tuple) else list(holders).index(rank)
    one, other = (_drawn(plan.id, what, holders[(at + n) % len(holders)]) for n in (0, 1))
    return (other - one) * digest % MODULUS


def _drawn(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") % MODULUS


def number_of(data: bytes) -> int:
    """A digest of `data`, as a number."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") % MODULUS


def balance_of_values(plan: Plan, rank: int, digests: Mapping[str, str]) -> int:
    """This rank's summand for its values, given the digest of each."""
    total = 0
    for number, (ranks, keys) in enumerate(plan.holders.items()):
        if rank in ranks:
            said = number_of("\n".join(digests[key] for key in keys).encode())
            total += balance(plan, rank, ranks, ("values", number), said)
    return total % MODULUS


# ---- different declarations ------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """A tensor, as ranks declared it: the first of them, and what they hold of it."""

    spec: TensorSpec
    rank: int
    apart: bool
    first: bool
    rules: dict[Rule, set[int]] = field(default_factory=dict)  # with the ranks that declared it
    plain: set[int] = field(default_factory=set)
    boxes: list[tuple[int, Box]] = field(default_factory=list)

    def held(self) -> list[tuple[int, Box]]:
        """The box of each rank that declared one."""
        found = list(self.boxes)
        for rule, ranks in self.rules.items():
            for rank in sorted(ranks):
                if (at := rule.place_of(rank)) is not None:
                    found.append((rank, rule.box(self.spec.shape, at[1])))
        return found + [(rank, whole(self.spec.shape)) for rank in sorted(self.plain)]

    def layout(self) -> Layout:
        """A rule, if every rank of it declared it and nothing else is there; else a list."""
        rules = list(self.rules)
        if not self.boxes and all(set(rule.ranks) <= ranks for rule, ranks in self.rules.items()):
            found = joined([*rules, on(sorted(self.plain))] if self.plain else rules) if rules or self.plain else None
            if found is not None:
                return found
        return listed(self.held())


def merge(groups: Sequence[tuple[Sequence[int], Message]], world: int, what: str) -> Plan:
    """The plan for what ranks declared (`Declaration.message`), each declaration with its ranks.

    Raises `CheckpointMismatch` with all problems: a key of different shapes, dtypes, paths or values, and parts that
    leave gaps or overlap.
    """
    problems = list[str]()
    tensors, wrappers = dict[str, _Seen](), dict[str, _Wrapper]()
    # By key: path, and the ranks of each different digest, in order of the first of them.
    values: dict[str, tuple[KeyPath, dict[str, list[int]]]] = {}
    firsts = set[str]()
    for ranks, message in sorted(groups, key=lambda group: group[0][0]):
        rank, rules = ranks[0], [from_json(raw, world) for raw in message["rules"]]
        for path, dtype, shape, held, apart, first in message["tensors"]:
            spec = TensorSpec(tuple(path), dtype, tuple(shape))
            key, seen = spec.key, tensors.setdefault(spec.key, _Seen(spec, rank, apart, first))
            if seen.spec.path != spec.path:
                problems.append(f"{key}: at {list(seen.spec.path)} on rank {seen.rank}, at {list(path)} on rank {rank}")
            elif seen.spec != spec:
                one, other = f"{seen.spec.dtype} {seen.spec.shape}", f"{dtype} {spec.shape}"
                problems.append(f"{key}: {one} on rank {seen.rank}, {other} on rank {rank}")
            if key in values:
                problems.append(f"{key}: a value on rank {_first_of(values[key])}, a tensor on rank {rank}")
            if first:
                firsts.add(key)
            if held is None:
                seen.plain.update(ranks)
            elif isinstance(held, int):
                rule = rules[held]
                assert isinstance(rule, Rule)
                seen.rules.setdefault(rule, set()).update(ranks)
            else:
                box = held["box"] and Box(*map(tuple, held["box"]))
                if held["around"] is not None:
                    (start, stop), whole_shape = held["around"]
                    outer = tuple(path[:-1])
                    wrapper = wrappers.setdefault(key_of(outer), _Wrapper(outer, tuple(whole_shape)))
                    wrapper.inner.setdefault(key, []).extend((rank, box, (start, stop)) for rank in ranks)
                elif box is not None:
                    seen.boxes += [(rank, box) for rank in ranks]
        for path, digest, first in message["values"]:
            key = key_of(path)
            known = values.setdefault(key, (tuple(path), {}))
            if key in tensors:
                problems.append(f"{key}: a tensor on rank {tensors[key].rank}, a value on rank {rank}")
            if known[1] and digest not in known[1] and not first and not is_grouping(path):
                problems.append(f"{key}: one value on rank {_first_of(known)}, another on rank {rank}")
            if first:
                firsts.add(key)
            known[1].setdefault(digest, []).extend(ranks)
    computed = dict[str, tuple[KeyPath, list[tuple[int, int]]]]()
    for wrapper in wrappers.values():
        try:
            if rows := wrapper.place(tensors):
                computed[key_of((*wrapper.path, ROWS))] = (*wrapper.path, ROWS), rows
        except ValueError as error:
            problems.append(f"{key_of(wrapper.path)} {wrapper.shape}: {error}")
    layouts = dict[str, Layout]()
    for key, seen in list(tensors.items()):
        layout = layouts[key] = seen.layout()
        if f"{key}.{FLATTENED}" in values and not any(box.numel for _, box in seen.held()):
            del tensors[key]  # on one rank whole, on the others without elements
        elif problem := layout.problem(seen.spec.shape, world):
            problems.append(f"{key} {seen.spec.shape}: {problem}")
    if problems:
        raise CheckpointMismatch(f"{what}: expected consistent state on all ranks, found", problems, REMEDY)
    entries = arranged((seen.spec, layouts[key], seen.apart, seen.first) for key, seen in tensors.items())
    found = {
        key: (path, [tuple(sorted(ranks)) for ranks in by_digest.values()][: 1 if key in firsts else None])
        for key, (path, by_digest) in values.items()
    }
    return Plan(world, entries, dict(sorted(found.items())), computed, frozenset(firsts))


def _first_of(value: tuple[KeyPath, dict[str, list[int]]]) -> int:
    return next(iter(value[1].values()))[0]


class _Wrapper:
    """A tensor around others, of which each rank declares the rows of its part and, with offset 0, its inner tensors:
    they lie one after the other in the order of these rows. Ranks may hold other rows as a plain tensor."""

    def __init__(self, path: KeyPath, shape: tuple[int, ...]) -> None:
        self.path, self.shape = path, shape
        # Key of an inner tensor: (rank, its part, the rows of that).
        self.inner: dict[str, list[tuple[int, Box, tuple[int, int]]]] = {}

    def place(self, tensors: dict[str, _Seen]) -> list[tuple[int, int]]:
        """Give the inner tensors, and the plain rows, their places in whole ones. Returns the rows of the inner ones if
        there are others. Raises `ValueError` if they do not make up all rows."""
        seen = tensors.pop(key_of(self.path), None)
        plain = [(rank, box) for rank, box in seen.held() if box.numel] if seen is not None else []
        plain_boxes = sorted({box for _, box in plain})
        columns = (0,) * (len(self.shape) - 1), self.shape[1:]
        rows: list[tuple[int, int]] = []
        for key, found in self.inner.items():
            rows = sorted({rows for _, _, rows in found})
            parts = [Box((start, *columns[0]), (stop - start, *columns[1])) for start, stop in rows]
            if problem := coverage_problem(self.shape, [*parts, *plain_boxes]):
                raise ValueError(problem)
            before, inner = _before(rows), tensors[key]
            for rank, box, (start, stop) in found:
                per_row = Fraction(box.lengths[0], stop - start)
                inner.boxes.append((rank, Box((int(per_row * before[start]), *box.offsets[1:]), box.lengths)))
            total = max(box.offsets[0] + box.lengths[0] for _, box in inner.boxes)
            inner.spec = inner.spec._replace(shape=(total, *inner.spec.shape[1:]))
        if not plain or seen is None:
            return []
        before = _before(sorted({(box.offsets[0], box.offsets[0] + box.lengths[0]) for box in plain_boxes}))
        shape = (sum(box.lengths[0] for box in plain_boxes), *self.shape[1:])
        rest = TensorSpec((*self.path, REST), seen.spec.dtype, shape)
        tensors[rest.key] = _Seen(rest, seen.rank, seen.apart, seen.first)
        for rank, box in plain:
            moved = box._replace(offsets=(before[box.offsets[0]], *box.offsets[1:]))
            tensors[rest.key].boxes.append((rank, moved))
        return _joined(rows)


def _before(rows: Iterable[tuple[int, int]]) -> dict[int, int]:
    """How many of `rows`, ranges in order, are before each of them."""
    found, count = dict[int, int](), 0
    for start, stop in rows:
        found[start] = count
        count += stop - start
    return found


def _joined(rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """`rows`, with neighbours in one range."""
    made = list[tuple[int, int]]()
    for start, stop in rows:
        if made and made[-1][1] == start:
            start = made.pop()[0]
        made.append((start, stop))
    return made
