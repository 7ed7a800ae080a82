"""Finds the messages that were waited for and why, and the ranks that keep the others waiting.

A message is hidden if it arrives before a wait for it begins. The cause of a wait that is not hidden is the first of:

    here      it had arrived: this process did not run (other threads, other programs on its cores), or copied what came
    peer      another rank sent its part after this rank needed the whole: no setting of messages helps
    unknown   a rank has no record here, or its clock cannot be put beside this one: whether it sent late is not known
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
from collections.abc import Iterable
from math import comb
from statistics import median
from typing import NamedTuple

from .record import Command, Message, RankRecord, Run, Step, ranks_named
from .timeline import Shares, State, milliseconds, shares, states

# Waits below this are no more than the call itself.
_LEAST = 50_000
GATHERS = ("unshard", "unshard_secondary")


class Exposure(NamedTuple):
    """The time that one unit's messages of one kind cost in a step of one rank. Of the message that was waited for
    longest: `lead`, from issue to need; `took`, from issue to arrival."""

    unit: int
    what: str
    phase: str
    nanoseconds: int
    lead: int
    took: int
    cause: str
    text: str


# ---- clocks ----------------------------------------------------------------------------------------------------------


def offsets(run: Run, number: int) -> dict[int, int | None]:
    """Returns for each rank what to add to times of step `number` so that they are on the clock of the first rank's
    step; None if that is not known.

    Ranks of one host share a clock. Others are put so that messages, which no rank has before the last one sent its
    part, arrive at the same time on both: the median over messages."""
    first = run.ranks[0]
    begun = _step(first, number).begin
    found: dict[int, int | None] = {}
    for rank in run.ranks:
        shift: int | None = _step(rank, number).begin - begun
        if rank.header.host != first.header.host:
            mine, theirs = _arrivals(rank, number), _arrivals(first, number)
            gaps = [theirs[key] - mine[key] for key in mine.keys() & theirs.keys()]
            shift = round(median(gaps)) if gaps else None
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
    """Returns what `rank` waited for in step `number`, the longest first."""
    step = _step(rank, number)
    if step.detail is None:
        return []
    begun = states(step.detail)
    last_sent = _last_sent(run, rank, number)
    unknown = _not_known(run, number)
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
        cause, text = _cause(rank, step, worst, last_sent.get((worst.group, worst.number)), unknown)
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
    """Returns for each message, of the ranks whose times are known, the one that sent its part last, and when, on the
    clock of `rank`'s step."""
    there = Run(run.path, tuple(each for each in run.ranks if each.step(number) is not None), run.missing)
    if not there.ranks:
        return {}
    shift = offsets(there, number)
    mine = shift.get(rank.header.rank)
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for other in there.ranks:
        detail, own = _step(other, number).detail, shift[other.header.rank]
        if detail is None or own is None or mine is None:
            continue
        for message in detail.messages:
            at = message.issue + own - mine
            key = message.group, message.number
            if key not in found or at > found[key][1]:
                found[key] = other.header.rank, at
    return found


def _not_known(run: Run, number: int) -> str:
    """Why it is not known of some ranks when they sent; "" if it is known of all."""
    if run.missing:
        return f"no record here of {ranks_named(run.missing)}"
    without = [each.header.rank for each in run.ranks if (step := each.step(number)) is None or step.detail is None]
    if without:
        return f"{ranks_named(without)} did not record step {number} in full"
    apart = [rank for rank, shift in offsets(run, number).items() if shift is None]
    return f"the clock of {ranks_named(apart)} cannot be put beside the others" if apart else ""


def _cause(
    rank: RankRecord, step: Step, message: Message, last: tuple[int, int] | None, unknown: str
) -> tuple[str, str]:
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
    if unknown:
        return "unknown", f"{_fact(step, message)}; {unknown}, so whether a rank sent its part late is not known"
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


def _fact(step: Step, message: Message) -> str:
    """Says what this rank's record shows of a message by itself."""
    lead, took = (message.need or 0) - message.issue, (message.arrived or message.need or 0) - message.issue
    if message.purpose == "reduce":
        where = "at the end of the backward" if _is_at_the_end(step, message) else "before the next reduction"
        return f"waited for {where}, took {milliseconds(took)}"
    if message.purpose not in GATHERS:
        return f"a message of a call between commands, took {milliseconds(took)}"
    return f"gathered {milliseconds(lead)} before it was needed, took {milliseconds(took)}"


def _is_at_the_end(step: Step, message: Message) -> bool:
    need, detail = message.need or 0, step.detail
    waiting = [c for c in (detail.commands if detail else ()) if c.begin <= need <= c.end]
    return bool(waiting) and waiting[0].kind == "finish"


def _cause_of_reduction(step: Step, message: Message) -> tuple[str, str]:
    if _is_at_the_end(step, message):
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
    parts = _parts(run, number)
    found = []
    for rank in run.ranks:
        own = rank.header.rank
        late = [sent[-1][0] - sent[-2][0] for sent in parts if sent[-1][1] == own]
        took = [step.nanoseconds for step in rank.steps[1:] or rank.steps if not step.failed]
        found.append(
            Standing(
                own,
                round(median(took)) if took else 0,
                shares(_step(rank, number)),
                len(late) / len(parts) if parts else 0.0,
                round(sum(late) / len(late)) if late else 0,
            )
        )
    return found


def _parts(run: Run, number: int) -> list[list[tuple[int, int]]]:
    """Returns for each message that several ranks have in step `number`: when each sent its part, and which, in
    order."""
    shift = offsets(run, number)
    sent: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for rank in run.ranks:
        detail, own = _step(rank, number).detail, shift[rank.header.rank]
        if detail is None or own is None:
            continue
        for message in detail.messages:
            sent[message.group, message.number].append((message.issue + own, rank.header.rank))
    return [sorted(parts) for parts in sent.values() if len(parts) > 1]


# ---- stragglers ------------------------------------------------------------------------------------------------------

# Steps that are judged, the last ones; and the chance below which a rank is called a straggler.
_JUDGED, _CHANCE = 30, 0.01
_LEAST_SHARE = 0.05


class Straggler(NamedTuple):
    """A rank for which the others wait. Of `steps` steps it was in `worst` the one with the shortest waits; `last`: the
    part of messages to which it came last, `waits`: how much longer the others waited, `share`: as a part of the step;
    these three are medians over steps. `chance`: how likely one of the ranks is the worst that often, if all are
    alike."""

    rank: int
    steps: int
    worst: int
    last: float
    waits: int
    share: float
    chance: float

    @property
    def is_sure(self) -> bool:
        return self.chance < _CHANCE

    def __str__(self) -> str:
        odds = f"1 in {1 / self.chance:,.0f}" if self.chance > 1e-6 else "below one in a million"
        found = (
            f"rank {self.rank}: the others wait {milliseconds(self.waits)} more, {100 * self.share:.0f} % of a step, "
            f"and it is last at {100 * self.last:.0f} % of messages (medians); so in {self.worst} of {self.steps} steps"
        )
        if self.is_sure:
            return f"{found}, by chance {odds}"
        return f"{found}, which alike ranks would show with a chance of {100 * self.chance:.0f} %: record more steps"


def judged_steps(run: Run) -> list[int]:
    """The last steps that all ranks recorded in full. The first of a record is left out, since it forms groups and
    allocates."""
    first = min((step.number for rank in run.ranks for step in rank.steps), default=0)
    return [number for number in run.common() if number != first][-_JUDGED:]


def are_enough(steps: int, ranks: int) -> bool:
    """Whether a rank that is the worst in all of `steps` steps is surely a straggler among `ranks`.

    >>> are_enough(7, 2), are_enough(8, 2), are_enough(4, 8)
    (False, True, True)
    """
    return steps > 0 and ranks * _at_least(steps, steps, 1 / ranks) < _CHANCE


def stragglers(run: Run) -> list[Straggler]:
    """The rank for which the others wait, if there is one: over the steps that all ranks recorded in full, last at more
    than half of the messages, and with waits that are shorter by a twentieth of the step. `is_sure` says whether that
    many steps can show it; where chance alone would do it as often as not, none is named."""
    numbers = judged_steps(run)
    ranks = [rank.header.rank for rank in run.ranks]
    if len(ranks) < 2 or not numbers:
        return []
    last: dict[int, list[float]] = {rank: [] for rank in ranks}
    gaps: dict[int, list[tuple[int, float]]] = {rank: [] for rank in ranks}
    for number in numbers:
        parts = _parts(run, number)
        waits = {rank.header.rank: _waited(_step(rank, number)) for rank in run.ranks}
        whole = max(_step(run.ranks[0], number).nanoseconds, 1)
        for rank in ranks:
            late = sum(sent[-1][1] == rank for sent in parts)
            last[rank].append(late / len(parts) if parts else 0.0)
            gap = round(median(wait for other, wait in waits.items() if other != rank)) - waits[rank]
            gaps[rank].append((gap, gap / whole))
    found = []
    for rank in ranks:
        share = median(part for _, part in gaps[rank])
        if median(last[rank]) > 0.5 and share > _LEAST_SHARE:
            worst = sum(
                gaps[rank][i][0] > 0 and gaps[rank][i][0] == max(gaps[r][i][0] for r in ranks)
                for i in range(len(numbers))
            )
            waits_more = round(median(gap for gap, _ in gaps[rank]))
            chance = min(1.0, len(ranks) * _at_least(worst, len(numbers), 1 / len(ranks)))
            if chance < 0.5:
                found.append(Straggler(rank, len(numbers), worst, median(last[rank]), waits_more, share, chance))
    return found


def _waited(step: Step) -> int:
    return sum(message.exposed for message in step.detail.messages) if step.detail else 0


def _at_least(hits: int, trials: int, chance: float) -> float:
    """The probability of at least `hits` in `trials`.

    >>> _at_least(3, 3, 0.5), round(_at_least(2, 4, 0.25), 4)
    (0.125, 0.2617)
    """
    return sum(comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1))
