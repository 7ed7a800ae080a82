"""Recomputation as a change of the tape.

Without it, storages that a unit's forward made live until its backward read them. With it, they go when the forward
ends, but for its outputs and what it keeps; its inputs stay until its backward is over, and that backward begins with
the operations of the forward once more, up to the one that makes the last of what is missing.

A word names the way of a unit, which says what its forward keeps:

    none        everything: nothing is recomputed
    selective   what matrix products, convolutions and attention made
    alternate   the same without every second `aten.mm`: torchtitan's policy for single operations
    whole       nothing
    keep:A,B    what these operations made, as in `checkpoint_activations(save=[A, B])`
    ...+host    what autograd saves is on the host: with "none" everything, else the inputs of the forward that runs
                again (`checkpoint_activations(offload=True)`)

Everything on the host is recorded on the tape (`tape`); inputs on the host are a change of it. The copies are
operations, `TO_HOST` and `FROM_HOST`.

Torch holds a kept result until the forward that runs again comes to it, whether backward reads it or not. In the first
forward nothing else holds what is not kept: it is taken to go after its last read, and in truth goes when the forward's
local variables do. The forward that runs again holds as much and more, so peaks do not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .description import OUTSIDE, Kind, Line, Tape

NONE, SELECTIVE, ALTERNATE, WHOLE = "none", "selective", "alternate", "whole"
ALL_ON_HOST = "none+host"
RECOMPUTATIONS = (NONE, SELECTIVE, ALTERNATE, WHOLE)
_KEEP = "keep:"
_HOST = "+host"
TO_HOST, FROM_HOST = "to host", "from host"  # names of the copies
AGAIN = "again"  # name of operations that recomputation adds, before their own

_MATMULS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "conv")


def is_matmul(name: str) -> bool:
    """Whether an operation is a matrix product, a convolution or attention.

    >>> [is_matmul(name) for name in ("aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu", "aten.mul")]
    [True, True, False]
    """
    own = name.rpartition(".")[2]
    return (
        own in _MATMULS
        or "attention" in own
        or own.startswith(("convolution", "_grouped_mm", "_scaled_mm", "mkldnn_rnn"))
    )


def keeping(operations: Iterable[str]) -> str:
    """The way that keeps what `operations` made.

    >>> keeping(["aten.mm", "aten.bmm"])
    'keep:aten.mm,aten.bmm'
    """
    return _KEEP + ",".join(operations)


def is_way(text: str) -> bool:
    """
    >>> [is_way(text) for text in ("whole", "keep:aten.mm", "none+host", "half")]
    [True, True, True, False]
    """
    kept = without_host(text)
    return kept in RECOMPUTATIONS or kept.startswith(_KEEP)


def on_host(way: str) -> str:
    """The way that keeps the same, on the host.

    >>> on_host("whole"), on_host("none+host")
    ('whole+host', 'none+host')
    """
    return without_host(way) + _HOST


def is_on_host(way: str) -> bool:
    return way.endswith(_HOST)


def without_host(way: str) -> str:
    """
    >>> without_host("whole+host"), without_host("none")
    ('whole', 'none')
    """
    return way.removesuffix(_HOST)


def recorded_on_host(ways: str | Sequence[str], number: int) -> bool:
    """Whether the tape has to be recorded with all that autograd saves in unit `number` on the host. `ways`: as in
    `spans.steps_of`: one for all units but the root, or one for each.

    >>> [recorded_on_host("none+host", n) for n in (0, 1)], recorded_on_host(["none", "whole+host"], 1)
    ([False, True], False)
    """
    return number > 0 and ways == ALL_ON_HOST if isinstance(ways, str) else ways[number] == ALL_ON_HOST


def kept_by(way: str) -> Callable[[str, int], bool]:
    """Whether `way` keeps what an operation made: its name, and how many of that name ran before in the same forward.

    >>> [kept_by("alternate")("aten.mm", n) for n in range(3)], kept_by("alternate")("aten.bmm", 1)
    ([True, False, True], True)
    >>> kept_by("keep:aten.mm.default")("aten.mm", 1), kept_by("keep:aten.mm")("aten.bmm", 0)
    (True, False)
    """
    way = without_host(way)
    if way == SELECTIVE:
        return lambda name, number: is_matmul(name)
    if way == ALTERNATE:
        return lambda name, number: is_matmul(name) and (name != "aten.mm" or number % 2 == 0)
    if not way.startswith(_KEEP):
        return lambda name, number: False
    # Without their overloads. A tape has the attention of CPUs, whatever the device.
    names = {".".join(name.split(".")[:2]) for name in way.removeprefix(_KEEP).split(",")}
    attention = any("attention" in name for name in names)
    return lambda name, number: name in names or (attention and "attention" in name)


def recomputed(tape: Tape, ways: Sequence[str]) -> tuple[Line, ...]:
    """The lines of the tape with recomputation, in the way that each unit has."""
    ways = [NONE if way == ALL_ON_HOST else way for way in ways]
    chosen, units = _chosen_uses(tape, ways)
    born = {line.a: line.use for line in tape.lines if line.kind is Kind.ALLOCATE}
    hosted = {use for use in chosen if is_on_host(ways[units[use]])}
    until = _stay_until(tape, chosen - hosted)
    begins = {line.use: i for i, line in enumerate(tape.lines) if line.kind is Kind.BACKWARD}
    freed = {line.a: i for i, line in enumerate(tape.lines) if line.kind is Kind.FREE}
    segments: dict[int, _Segment] = {}
    consumed: set[int] = set()  # what the forward that runs again frees, instead of the first one
    for use, lines in _inside(tape, chosen).items():
        segment = segments[use] = _segment(lines, kept_by(ways[units[use]]), tape.outputs[use])
        for sid in segment.kept:
            if sid in segment.freed_again:
                consumed.add(sid)
            elif sid in freed and freed[sid] < begins[use]:
                until[sid] = use
    kept = {sid for segment in segments.values() for sid in segment.kept}
    inputs = _inputs_on_host(tape, chosen, hosted, {*until, *kept})
    out: list[Line] = []
    late: dict[int, list[Line]] = {}
    # Nothing keeps what is dropped from its last read on: in this forward autograd saves nothing.
    due: dict[int, list[int]] = {}
    for segment in segments.values():
        for sid in segment.dropped:
            due.setdefault(tape.last_read.get(sid, -1), []).append(sid)
    gone: set[int] = set()
    ran = 0
    for place, line in enumerate(tape.lines):
        out += inputs.before.get(place, ())
        if line.kind is Kind.FREE and line.a in until:
            late.setdefault(until[line.a], []).append(line)
            continue
        if line.kind is Kind.FREE and (line.a in consumed or line.a in inputs.leave):
            continue
        out.append(line)
        out += inputs.after.get(place, ())
        if line.kind is Kind.OP:
            gone.update(due.get(ran, ()))
            out += [Line(Kind.FREE, born[sid], sid) for sid in due.get(ran, ())]
            ran += 1
        elif line.kind is Kind.EXIT and line.use in segments:
            out += [Line(Kind.FREE, born[sid], sid) for sid in segments[line.use].dropped if sid not in gone]
        elif line.kind is Kind.BACKWARD and line.use in segments:
            out += segments[line.use].again
        elif line.kind is Kind.BACKWARD_END:
            out += late.pop(line.use, [])
    for rest in late.values():
        out += rest
    return tuple(out)


def _chosen_uses(tape: Tape, ways: Sequence[str]) -> tuple[set[int], dict[int, int]]:
    """The uses that are recomputed, the outermost of those inside each other, and the unit of each use. A use without a
    backward has nothing to recompute for."""
    units = {line.use: line.a for line in tape.lines if line.kind is Kind.ENTER}
    backwards = {line.use for line in tape.lines if line.kind is Kind.BACKWARD}
    chosen: set[int] = set()
    open_ = 0
    for line in tape.lines:
        if line.kind is Kind.ENTER and ways[line.a] != NONE and line.use in backwards:
            if not open_:
                chosen.add(line.use)
            open_ += 1
        elif line.kind is Kind.EXIT and ways[units[line.use]] != NONE and line.use in backwards:
            open_ -= 1
    return chosen, units


def _inside(tape: Tape, chosen: set[int]) -> dict[int, list[Line]]:
    """Returns what happens inside of the forward of each chosen use; uses inside of it included."""
    found: dict[int, list[Line]] = {use: [] for use in chosen}
    current = OUTSIDE
    for line in tape.lines:
        if line.kind is Kind.ENTER and line.use in chosen:
            current = line.use
        elif line.kind is Kind.EXIT and line.use == current:
            current = OUTSIDE
        elif current != OUTSIDE and line.kind in (Kind.OP, Kind.ALLOCATE, Kind.FREE):
            if line.kind is not Kind.OP or line.use != OUTSIDE:  # else a message that is sent once
                found[current].append(line)
    return found


def _stay_until(tape: Tape, chosen: set[int]) -> dict[int, int]:
    """The inputs that a recomputed use keeps alive, with the use whose backward ends last."""
    ends = {line.use: i for i, line in enumerate(tape.lines) if line.kind is Kind.BACKWARD_END}
    freed = {line.a: i for i, line in enumerate(tape.lines) if line.kind is Kind.FREE}
    until: dict[int, int] = {}
    for use in chosen:
        for sid in tape.inputs[use]:
            if sid in freed and freed[sid] < ends.get(use, -1):
                if sid not in until or ends[until[sid]] < ends[use]:
                    until[sid] = use
    return until


class _OnHost(NamedTuple):
    """Inputs on the host: lines that come before and after those of the tape, by place, and the storages that leave the
    device earlier than the tape says."""

    before: dict[int, list[Line]]
    after: dict[int, list[Line]]
    leave: set[int]


def _inputs_on_host(tape: Tape, chosen: set[int], hosted: set[int], stay: set[int]) -> _OnHost:
    """Each use of `hosted` copies its inputs to the host when it begins, and back when its backward does. On the device
    they go with the last such use, unless others hold them: uses in `stay`, or an operation outside of `chosen`."""
    found = _OnHost({}, {}, set())
    if not hosted:
        return found
    places = {(line.kind, line.use): i for i, line in enumerate(tape.lines)}
    sizes = tape.staying | {line.a: line.b for line in tape.lines if line.kind is Kind.ALLOCATE}
    freed = {line.a: i for i, line in enumerate(tape.lines) if line.kind is Kind.FREE}
    ran, counted = [], 0  # operations before each place
    for line in tape.lines:
        ran.append(counted)
        counted += line.kind is Kind.OP
    recomputes = {
        line.a
        for use, inside in _inside(tape, chosen).items()
        for line in inside
        if line.kind is Kind.ALLOCATE and use in chosen
    }
    number = max(sizes, default=0)
    leaving: dict[int, int] = {}  # storage -> the place after which it goes
    for use in sorted(hosted):
        enters, exits, begins, ends = (
            places[kind, use] for kind in (Kind.ENTER, Kind.EXIT, Kind.BACKWARD, Kind.BACKWARD_END)
        )
        for sid in sorted(tape.inputs[use]):
            number += 1
            copied = Line(Kind.OP, use, 0, sizes[sid], TO_HOST)
            found.after.setdefault(enters, []).append(copied)
            again = [Line(Kind.ALLOCATE, use, number, sizes[sid]), copied._replace(name=FROM_HOST)]
            found.after.setdefault(begins, []).extend(again)
            # The copy goes when the operation that needed the input last has run.
            last = freed.get(sid, ends)
            inside = begins < last < ends
            found.before.setdefault(last if inside else ends, []).append(Line(Kind.FREE, use, number))
            if sid in tape.staying or sid in stay or last < begins or (last > ends and sid not in recomputes):
                continue  # somebody else holds it
            read_later = tape.last_read.get(sid, -1) >= ran[exits]
            leaving[sid] = max(leaving.get(sid, -1), begins if read_later else exits)
    for sid, place in leaving.items():
        found.leave.add(sid)
        found.after.setdefault(place, []).append(Line(Kind.FREE, OUTSIDE, sid))
    return found


class _Segment(NamedTuple):
    """The forward of a use that is recomputed, in storages. `kept`: what it keeps by its way; `dropped`: what goes at
    its end, and comes again; `again`: the lines of the forward that runs again; `freed_again`: those of `kept` that it
    frees, because nothing in backward reads them."""

    kept: set[int]
    dropped: list[int]
    again: list[Line]
    freed_again: set[int]


def _segment(lines: Sequence[Line], keeps: Callable[[str, int], bool], outputs: frozenset[int]) -> _Segment:
    kept, places = _kept(lines, keeps)
    inside = {line.a for line in lines if line.kind is Kind.FREE}
    lasting = {line.a for line in lines if line.kind is Kind.ALLOCATE} - inside
    # What is an input of a use inside, and recomputed with it, is dropped as well.
    dropped = [line.a for line in lines if line.kind is Kind.ALLOCATE and line.a in lasting - kept - outputs]
    missing = lasting - outputs
    again: list[Line] = []
    # The run ends with the operation that makes the last of what is missing. By then it came to what `reached` has.
    stop, due = 0, False
    there: set[int] = set()
    met: set[int] = set()
    reached: set[int] = set()
    for place, line in enumerate(lines):
        if line.kind is Kind.OP:
            if place not in places:
                again.append(line._replace(name=f"{AGAIN} {line.name}"))
            if due:
                stop, due, reached = len(again), False, set(met)
        elif line.kind is Kind.ALLOCATE:
            due = due or line.a in missing
            if line.a in kept:
                met.add(line.a)
            if line.a not in kept and line.a not in outputs - inside:
                again.append(line)
                there.add(line.a)
        elif line.a in there or line.a in kept:
            # Numbers of storages that come and go inside are used a second time: they are free again by then.
            again.append(line)
    again = again[:stop]
    there = set()
    for line in again:
        if line.kind is Kind.ALLOCATE and line.a in inside:
            there.add(line.a)
        elif line.kind is Kind.FREE:
            there.discard(line.a)
    freed_again = {line.a for line in again if line.kind is Kind.FREE and line.a in kept}
    # What the run still has goes when it stops: the forward's local variables, kept results that it came to among them.
    there |= (kept & inside & reached) - freed_again
    freed_again |= there & kept
    again += [Line(Kind.FREE, OUTSIDE, sid) for sid in sorted(there)]
    return _Segment(kept, dropped, again, freed_again)


def _kept(lines: Sequence[Line], keeps: Callable[[str, int], bool]) -> tuple[set[int], set[int]]:
    """The storages that are kept, and the places in `lines` of the operations that made them. A storage comes before
    the line of the operation that made it."""
    kept: set[int] = set()
    places: set[int] = set()
    counts: Counter[str] = Counter()
    made: list[int] = []
    for place, line in enumerate(lines):
        if line.kind is Kind.ALLOCATE:
            made.append(line.a)
        elif line.kind is Kind.OP:
            if keeps(line.name, counts[line.name]):
                kept.update(made)
                places.add(place)
            counts[line.name] += 1
            made = []
    return kept, places
