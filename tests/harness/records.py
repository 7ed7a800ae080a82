"""Records of runs made by hand, for tests of what they show: a forward of two units and its backward, with messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.see import record
from fullshard.see.record import Command, Detail, Event, Header, Level, Message, Step, Unit

MS = 1_000_000
UNITS = (
    Unit("root", "Model", 0, 0, 0, 0, "", False),
    Unit("layers.0", "Block", 100, 50, 400, 200, "float32 float32 float32", True),
    Unit("layers.1", "Block", 100, 50, 400, 200, "float32 float32 float32", True),
)


def header(rank: int = 0, world: int = 2, first_step: int = 1, **changes: Any) -> Header:
    made = Header(rank, world, first_step, {"fullshard": "0"}, "cpu", "here", (0, 0), UNITS, {"prefetch_depth": 1})
    return replace(made, **changes)


def detail(**changes: Sequence[Any]) -> Detail:
    """Times in milliseconds: layers.0 is gathered from 1 to 3 and computes until 5; layers.1, which was issued at 3,
    arrives at 6 and is waited for from 5 to 6; it computes until 8. Loss until 9. Backward of layers.1 until 12, of
    layers.0 until 14; the reduction of layers.1 is hidden, that of layers.0 is waited for at the end, from 15 to 17.
    The step ends at 20."""

    def ms(*values: float | None) -> list[Any]:
        return [None if value is None else round(value * MS) for value in values]

    events = [
        Event(*ms(0.5), "pre_forward", 0, ""),
        Event(*ms(0.9), "pre_forward", 1, ""),
        Event(*ms(4.9), "post_forward", 1, "outputs"),
        Event(*ms(5), "pre_forward", 2, ""),
        Event(*ms(8), "post_forward", 2, "inputs outputs"),
        Event(*ms(8.1), "post_forward", 0, "outputs"),
        Event(*ms(9), "pre_backward", 2, ""),
        Event(*ms(11.9), "grads_ready", 2, ""),
        Event(*ms(12.1), "pre_backward", 1, ""),
        Event(*ms(14), "grads_ready", 1, ""),
        Event(*ms(14.9), "backward_end", 0, ""),
    ]
    commands = [
        Command("unshard", 1, "R16", *ms(1, 1.1), 1),
        Command("wait", 1, "R16", *ms(1.1, 3), 1),
        Command("unshard", 2, "R3", *ms(3, 3.1), 1),
        Command("reshard", 1, "R5", *ms(4.9, 5), 2),
        Command("wait", 2, "R16", *ms(5, 6.2), 3),
        Command("reduce", 2, "R18", *ms(11.9, 12), 7),
        Command("reduce", 1, "R18", *ms(14, 14.1), 9),
        Command("finish", 0, "R37", *ms(14.9, 17.1), 10),
    ]
    messages = [
        Message("data 0.1", 1, 1, "unshard", 200, *ms(1, 1.1, 2.9, 2.9)),
        Message("data 0.1", 2, 2, "unshard", 200, *ms(3, 5, 6, 6)),
        Message("data 0.1", 3, 2, "reduce", 200, *ms(11.95, 14.92, 13, 14.93)),
        Message("data 0.1", 4, 1, "reduce", 200, *ms(14.05, 15, 17, 17)),
    ]
    levels = [
        Level(0, 1, "shards", 200),
        Level(0, 2, "shards", 200),
        Level(1 * MS, 1, "full", 400),
        Level(3 * MS, 2, "full", 400),
        Level(5 * MS, 1, "full", 0),
        Level(8 * MS, 2, "full", 0),
        Level(11 * MS, 2, "gradients", 500),
        Level(12 * MS, 2, "gradients", 0),
        Level(12 * MS, 2, "messages", 300),
        Level(15 * MS, 2, "messages", 0),
    ]
    made = Detail(tuple(events), tuple(commands), tuple(messages), tuple(levels))
    return replace(made, **{name: tuple(rows) for name, rows in changes.items()})


def step(number: int, in_full: Detail | None = None, begin: int = 100 * MS, loss: float | None = 2.0) -> Step:
    start = begin + number * 20 * MS
    return Step(number, start, start + 20 * MS, {"loss": loss, "norm": 1.0}, in_full)


def write(folder: Path, head: Header, steps: Sequence[Step], *, ended: bool = True, notes: Sequence[Any] = ()) -> Path:
    """A file as the recorder writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [record.line(record.header_fields(head))]
    for each in steps:
        fields: dict[str, Any] = {"step": each.number, "begin": each.begin, "end": each.end, "figures": each.figures}
        if each.failed:
            fields["failed"] = each.failed
        if each.detail is not None:
            fields["detail"] = vars(each.detail)
        lines.append(record.line(fields))
    lines += [record.line({"note": note}) for note in notes]
    path = folder / record.file_name(head.first_step, head.rank)
    path.write_bytes(b"".join([*lines, record.line({"ended": True})] if ended else lines))
    return path


def two_ranks(folder: Path, *, late: int = 0, **changes: Sequence[Any]) -> Path:
    """A run of two ranks and four steps, of which the second and fourth are recorded in full; the messages of rank 1
    are issued `late` nanoseconds later."""
    for rank in range(2):
        made = detail(**changes)
        if rank:
            made = replace(made, messages=tuple(m._replace(issue=m.issue + late) for m in made.messages))
        steps = [step(n, made if n % 2 == 0 else None, loss=2.0 / n) for n in range(1, 5)]
        notes = [["checkpoint", 200 * MS, 3 * MS, 4, "step-4"]] if rank == 0 else ()
        write(folder / "see", header(rank), steps, notes=notes)
    return folder
