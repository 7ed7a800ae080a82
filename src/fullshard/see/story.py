"""A run as text: a summary of a step in a few lines, and one unit's story, every command with its rule."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

from ..schedule import rules
from .causes import exposures, stragglers
from .record import Command, Detail, Message, RankRecord, RecordError, Run, Step
from .timeline import Memory, human, milliseconds, shares

# ---- summary ---------------------------------------------------------------------------------------------------------


def summary(run: Run, number: int, shown: int = 3) -> str:
    """Step `number` of `run`: where the time went, the longest waits of the first rank, the peak, stragglers; and what
    is not whole."""
    rank = run.ranks[0]
    step = rank.step(number)
    assert step is not None and step.detail is not None
    found = shares(step)
    total = max(found.total, 1)
    _, peak, _ = Memory(step.detail).peak()
    ended = "failed after" if step.failed else "took"
    lines = [
        f"{run.name}: step {number} {ended} {milliseconds(step.nanoseconds)} on rank {rank.header.rank} of "
        f"{run.world}: {100 * found.compute / total:.0f} % compute, {100 * found.wait / total:.0f} % exposed messages, "
        f"host-bound: {100 * found.host / total:.0f} %; peak of what the library holds: {human(peak)}"
    ]
    for item in exposures(run, rank, number)[:shown]:
        unit = f"{rank.name_of(item.unit)}: " if item.unit >= 0 else ""
        phase = f", {item.phase}" if item.phase else ""
        lines.append(f"  {unit}{item.what}{phase}, {milliseconds(item.nanoseconds)} exposed: {item.text}")
    lines += [f"  {'straggler' if each.is_sure else 'perhaps a straggler'}: {each}" for each in stragglers(run)]
    return "\n".join(lines)


def remarks(run: Run) -> list[str]:
    """Names what is not whole in the record, and each failed step with what was held then."""
    lines = [f"{run.name}: {text}" for text in run.remarks]
    for rank in run.ranks:
        for step in rank.steps:
            if step.failed:
                lines.append(f"{run.name}: step {step.number} failed on rank {rank.header.rank}: {step.failed}")
                lines += [f"  {text}" for text in held_at_failure(rank, step)]
    return lines


def held_at_failure(rank: RankRecord, step: Step, shown: int = 6) -> list[str]:
    """Lists what was held when `step` failed: of the library by kind, the largest things in it, and of the device or
    the process in all."""
    if not step.held:
        return []
    kinds: Counter[str] = Counter()
    for item in step.held:
        kinds[item.kind] += item.nbytes
    total = sum(kinds.values())
    largest = sorted(step.held, key=lambda item: -item.nbytes)[:shown]
    named = [f"{item.kind} of {rank.name_of(item.unit)}" if item.unit >= 0 else item.kind for item in largest]
    each = ", ".join(f"{kind} {human(nbytes)}" for kind, nbytes in kinds.most_common())
    lines = [
        f"held by the library then: {human(total)} ({each})",
        f"the largest: {'; '.join(f'{n} {human(i.nbytes)}' for n, i in zip(named, largest, strict=True))}",
    ]
    memory = step.memory
    if "allocated" in memory:
        beside = max(memory["allocated"] - total, 0)
        lines.append(
            f"the device's allocator: {human(memory['allocated'])} allocated, of these {human(beside)} beside the "
            f"library (activations, the program's own), {human(memory['reserved'])} reserved; the device has "
            f"{human(memory['free'])} free of {human(memory['total'])}"
        )
    elif "resident" in memory:
        lines.append(f"the process in all: {human(memory['resident'])} resident")
    return lines


# ---- story -----------------------------------------------------------------------------------------------------------

# Said of commands without a rule of their own.
_CALLED = "the program called {}"


@functools.cache
def rule_texts() -> dict[str, str]:
    """The rules by number, in the words of schedule/rules.py.

    >>> rule_texts()["R5"]
    'Only the running units hold full memory.'
    """
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for text in Path(rules.__file__).read_text().splitlines():
        comment = re.match(r"\s*# (.*)", text)
        if comment is None:
            current = None
            continue
        begins = re.match(r"\[(R\d+)\] (.*)", comment[1])
        if begins:
            current = found.setdefault(begins[1], [])
            current.append(begins[2])
        elif current is not None:
            current.append(comment[1])
    for number, text in re.findall(r'"""\[(R\d+)\] (.*?)"""', Path(rules.__file__).read_text(), re.S):
        found.setdefault(number, [" ".join(text.split())])
    return {number: " ".join(lines) for number, lines in found.items()}


def story(rank: RankRecord, step: Step, name: str) -> str:
    """The story of the unit `name` in `step`. Raises `RecordError` if there is no such unit."""
    units = rank.header.units
    numbers = [number for number, unit in enumerate(units) if unit.name == name]
    if not numbers:
        shown = ", ".join(unit.name for unit in units[:8]) + (f" and {len(units) - 8} more" if len(units) > 8 else "")
        raise RecordError(f"--unit {name}: expected a unit of this run, found {shown}")
    number, detail = numbers[0], step.detail or Detail()
    unit = units[number]
    lines = [
        f"{name} ({unit.module_class}) in step {step.number} on rank {rank.header.rank} of {rank.header.world}: "
        f"{unit.numel:,} parameters, {human(unit.full_nbytes)} full, {human(unit.shard_nbytes)} here; {unit.dtypes}",
        "",
    ]
    rows = [("ms", "took", "command", "after the event", "rule", "messages")]
    texts = rule_texts()
    used: dict[str, str] = {}
    for command in detail.commands:
        if command.unit != number:
            continue
        event = detail.events[command.event] if command.event >= 0 else None
        after = f"{event.kind} {rank.name_of(event.unit)}" if event else ""
        if command.rule in texts:
            used[command.rule] = texts[command.rule]
        elif command.rule == "called":
            used["called"] = _CALLED.format(f"{event.kind}()" if event else "it")
        sent = [m for m in detail.messages if m.unit == number and command.begin <= m.issue <= command.end]
        arrived = _waited(detail, number, command)
        rows.append(
            (
                f"{command.begin / 1e6:.3f}",
                milliseconds(command.end - command.begin),
                command.kind,
                after,
                command.rule,
                "; ".join([*map(_told, sent), *arrived]),
            )
        )
    if len(rows) == 1:
        return "\n".join([*lines, "no command of this unit in this step"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i < 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += ["", *(f"{rule}: {text}" for rule, text in used.items())]
    peak = max((level.nbytes for level in detail.levels if level.unit == number and level.kind == "full"), default=0)
    exposed = sum(message.exposed for message in detail.messages if message.unit == number)
    lines.append(f"full parameters: at most {human(peak)}; waited for its messages: {milliseconds(exposed)}")
    return "\n".join(lines)


def _told(message: Message) -> str:
    text = f"sends message {message.number}, {human(message.nbytes)}"
    if message.need is not None:
        text += f", needed {milliseconds(message.need - message.issue)} later"
    if message.arrival is not None:
        text += f", there after {milliseconds(message.arrival - message.issue)}"
    return text


def _waited(detail: Detail, unit: int, command: Command) -> list[str]:
    waits = [
        m.exposed
        for m in detail.messages
        if m.unit == unit and m.need is not None and command.begin <= m.need <= command.end
    ]
    return [f"waits {milliseconds(sum(waits))}"] if waits else []
