"""Which messages were waited for and why, and which ranks keep the others waiting.

A message is hidden if it arrives before a wait for it begins. The cause of a wait that is not hidden is the first of:

    here      it had arrived: this process did not run (other threads, other programs on its cores), or copied what came
    peer      another rank sent its part after this rank needed the whole: no setting of messages helps
    first     the unit was gathered when it was needed, and nothing ran before it
    unplanned it was gathered when it was needed, because the order of units was not known (the first step)
    queue     it was queued: another message before it took most of the time
    limit     a reduction was waited for to make room for the next one
    end       a reduction was waited for at the end of the backward, where no compute is left
    lead      it was issued before it was needed, but took longer than that
    small     a message of the program's own calls between commands: the norm of gradients, a check
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from .record import Command, Message, RankRecord, Run, Step
from .timeline import Shares, State, milliseconds, shares, states

# Waits below this are no more than the call itself.
_LEAST = 50_000
GATHERS = ("unshard", "unshard_secondary")


class Exposure(NamedTuple):
    """What one unit's messages of one kind cost in a step of one rank. Of the message that was waited for longest:
    `lead`, from issue to need; `took`, from issue to arrival."""

    unit: int
    what: str
    phase: str
    nanoseconds: int
    lead: int
    took: int
    cause: str
    text: str


# ---- clocks ----------------------------------------------------------------------------------------------------------


def offsets(run: Run, number: int) -> dict[int, int]:
    """By rank: what to add to times of step `number` so that they are on the clock of the first rank's step.

    Ranks of one host share a clock. Others are put so that messages, which no rank has before the last one sent its
    part, arrive at the same time on both: the median over messages."""
    first = run.ranks[0]
    begun = _step(first, number).begin
    found = {}
    for rank in run.ranks:
        shift = _step(rank, number).begin - begun
        if rank.header.host != first.header.host:
            mine, theirs = _arrivals(rank, number), _arrivals(first, number)
            gaps = [theirs[key] - mine[key] for key in mine.keys() & theirs.keys()]
            shift = round(median(gaps)) if gaps else 0
        found[rank.header.rank] = shift
    return found


def _arrivals(rank: RankRecord, number: int) -> dict[tuple[str, int], int]:
    detail = _step(rank, number).detail
    messages = detail.messages if detail else ()
    return {(m.group, m.number): m.arrived for m in messages if m.arrived is not None}


def _step(rank: RankRecord, number: int) -> Step:
    step = rank.step(number)
    assert step is not None, f"rank {rank.header.rank} has no step {number}"
    return step


# ---- exposure --------------------------------------------------------------------------------------------------------


def exposures(run: Run, rank: RankRecord, number: int) -> list[Exposure]:
    """What `rank` waited for in step `number`, the longest first."""
    step = _step(rank, number)
    if step.detail is None:
        return []
    begun = states(step.detail)
    last_sent = _last_sent(run, rank, number)
    grouped: defaultdict[tuple[int, str, str], list[Message]] = defaultdict(list)
    for message in step.detail.messages:
        if message.exposed >= _LEAST and message.need is not None:
            phase = "backward" if _in_backward(begun, message.need) else "forward"
            if message.unit < 0:
                phase = ""
            grouped[message.unit, message.purpose, phase].append(message)
    found = []
    for (unit, purpose, phase), messages in grouped.items():
        worst = max(messages, key=lambda message: message.exposed)
        cause, text = _cause(rank, step, worst, last_sent.get((worst.group, worst.number)))
        need, ready = worst.need or 0, worst.arrived or 0
        total = sum(message.exposed for message in messages)
        what = "all-gather" if purpose in GATHERS else "gradients" if purpose == "reduce" else purpose
        found.append(Exposure(unit, what, phase, total, need - worst.issue, ready - worst.issue, cause, text))
    return sorted(found, key=lambda item: -item.nanoseconds)


def _in_backward(begun: Iterable[State], at: int) -> bool:
    phase = ""
    for state in begun:
        if state.at > at:
            break
        phase = state.phase
    return phase in ("backward", "recomputation", "optimizer and the rest")


def _last_sent(run: Run, rank: RankRecord, number: int) -> dict[tuple[str, int], tuple[int, int]]:
    """By message: the rank that sent its part last, and when, on the clock of `rank`'s step."""
    if rank.step(number) is None or any(other.step(number) is None for other in run.ranks):
        return {}
    shift = offsets(run, number)
    mine = shift[rank.header.rank]
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for other in run.ranks:
        detail = _step(other, number).detail
        for message in detail.messages if detail else ():
            at = message.issue + shift[other.header.rank] - mine
            key = message.group, message.number
            if key not in found or at > found[key][1]:
                found[key] = other.header.rank, at
    return found


def _cause(rank: RankRecord, step: Step, message: Message, last: tuple[int, int] | None) -> tuple[str, str]:
    need, exposed = message.need or 0, message.exposed
    lead, took = need - message.issue, (message.arrived or need) - message.issue
    if message.device_need is None and message.arrival is not None and message.arrival <= need:
        return "here", (
            f"it had arrived {milliseconds(need - message.arrival)} before it was needed: what took the time is this "
            f"process, which copied it or did not run (other threads, or other programs on its cores)"
        )
    if last is not None and last[0] != rank.header.rank and last[1] - need > exposed / 2:
        late = milliseconds(last[1] - need)
        return "peer", f"rank {last[0]} sent its part {late} after it was needed here: look at that rank"
    if message.purpose == "reduce":
        return _cause_of_reduction(step, message)
    if message.purpose not in GATHERS:
        return "small", "a message of a call between commands, which all ranks wait for: call it less often, or later"
    before = _before(step, message)
    if before is not None and (before.arrived or 0) - message.issue > took / 2:
        behind = milliseconds((before.arrived or 0) - message.issue)
        name = rank.name_of(before.unit)
        return (
            "queue",
            f"queued after {_named(before)} of {name}, which took {behind} more: fewer bytes, or a larger batch",
        )
    command = _issued_by(step, message)
    if command is not None and command.rule != "R3" and command.rule != "R9" and lead <= max(took / 10, _LEAST):
        if _is_first(step, message):
            return (
                "first",
                "gathered when it was needed, and nothing ran before it that could hide it: unshard() it earlier",
            )
        return (
            "unplanned",
            "gathered when it was needed: the order of units was not known yet, or this unit was not in it",
        )
    return "lead", (
        f"gathered {milliseconds(lead)} before it was needed, took {milliseconds(took)}: prefetch deeper "
        f"(set_memory_budget(prefetch=...), set_modules_to_forward_prefetch), or a larger batch"
    )


def _cause_of_reduction(step: Step, message: Message) -> tuple[str, str]:
    need = message.need or 0
    detail = step.detail
    waiting = [c for c in (detail.commands if detail else ()) if c.begin <= need <= c.end]
    if waiting and waiting[0].kind == "finish":
        return "end", "waited for at the end of the backward, where no compute is left that could hide it"
    return "limit", (
        "waited for to make room for the next reduction: the limit of reductions in flight, or "
        "set_memory_budget(gradients=...)"
    )


def _named(message: Message) -> str:
    return (
        "all-gather" if message.purpose in GATHERS else "gradients" if message.purpose == "reduce" else message.purpose
    )


def _before(step: Step, message: Message) -> Message | None:
    """The message of another unit that was in flight when this one was sent, and arrived last."""
    messages = step.detail.messages if step.detail else ()
    flying = [
        m
        for m in messages
        if m.unit != message.unit
        and m.issue < message.issue
        and (m.arrival is not None or m.exposed >= _LEAST)  # otherwise it arrived before it was needed, unknown when
        and (m.arrived or 0) > message.issue
    ]
    return max(flying, key=lambda m: m.arrived or 0, default=None)


def _issued_by(step: Step, message: Message) -> Command | None:
    commands = step.detail.commands if step.detail else ()
    return next((c for c in commands if c.unit == message.unit and c.begin <= message.issue <= c.end), None)


def _is_first(step: Step, message: Message) -> bool:
    """Whether no unit's forward had ended when it was issued."""
    events = step.detail.events if step.detail else ()
    return not any(event.kind == "post_forward" and event.at < message.issue for event in events)


# ---- ranks -----------------------------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """One rank beside the others. `steps`: median of all its steps but the first, in nanoseconds; `shares`: of the
    step shown; `last`: the part of messages to which it came last; `late`: how much later than the second, on average.
    """

    rank: int
    steps: int
    shares: Shares
    last: float
    late: int


def standings(run: Run, number: int) -> list[Standing]:
    """All ranks in step `number`."""
    shift = offsets(run, number)
    sent: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for rank in run.ranks:
        detail = _step(rank, number).detail
        for message in detail.messages if detail else ():
            sent[message.group, message.number].append((message.issue + shift[rank.header.rank], rank.header.rank))
    common = [sorted(parts) for parts in sent.values() if len(parts) > 1]
    found = []
    for rank in run.ranks:
        own = rank.header.rank
        late = [parts[-1][0] - parts[-2][0] for parts in common if parts[-1][1] == own]
        took = [step.nanoseconds for step in rank.steps[1:] or rank.steps if not step.failed]
        found.append(
            Standing(
                own,
                round(median(took)) if took else 0,
                shares(_step(rank, number)),
                len(late) / len(common) if common else 0.0,
                round(sum(late) / len(late)) if late else 0,
            )
        )
    return found


def stragglers(found: Sequence[Standing]) -> list[Standing]:
    """Ranks for which the others wait: last at more than half of the messages, and with waits that are shorter than the
    median rank's by a twentieth of the step."""
    if len(found) < 2:
        return []
    waits = median(each.shares.wait for each in found)
    return [each for each in found if each.last > 0.5 and waits - each.shares.wait > each.shares.total / 20]
