"""What a person sees of a run: lines or a progress bar, the table of the units, and the picture of the loss.

The table says how many bytes of parameters, gradients and optimizer a rank holds, expected and measured. Expected is
arithmetic on what `fullshard.inspect_units` says of each unit; measured is counted from the storages that the model and
the optimizer really hold. AdamW keeps two values per element, in the parameter's dtype.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import UnitInfo
from fullshard.train.metrics import StepRecord, in_units, installed, missing


class Console:
    """Receives everything that may be shown. This one shows nothing, as on all ranks but 0."""

    def say(self, text: str) -> None:
        """A line (or several) that stays."""

    def begin(self, steps: int, after: int = 0) -> None:
        """Training up to step `steps` begins now, after step `after`."""

    def step(self, record: StepRecord) -> None:
        """A step was made."""

    def end(self) -> None:
        """Training is over or has failed; safe to call twice."""


def console_for(rank: int, log_every: int) -> Console:
    """Nothing on ranks other than 0; a bar on a terminal where rich is installed; plain lines elsewhere."""
    if rank != 0:
        return Console()
    if sys.stdout.isatty():
        if installed("rich"):
            return ProgressConsole()
        print(missing("rich", "ui", "there are lines instead of a progress bar"), flush=True)
    return PlainConsole(log_every)


def summary(record: StepRecord) -> str:
    """The figures of a step in one line, without the step number."""
    parts = [
        f"loss {record.loss:.4f}",
        "" if record.val_loss is None else f"val {record.val_loss:.4f}",
        f"grad_norm {record.grad_norm:.3f}",
        f"mem {in_units(record.memory_bytes)}",
        f"{record.tokens_per_second:,.0f} tok/s",
        f"{record.tflop_per_second:.3g} TFLOP/s",
        "" if record.mfu is None else f"MFU {record.mfu:.1%}",
    ]
    return "  ".join(filter(None, parts))


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainConsole(Console):
    """One line every `log_every` steps, at the first and last step, and wherever a step validates."""

    def __init__(self, log_every: int) -> None:
        self._log_every, self._steps, self._after, self._begun = log_every, 0, 0, 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, steps: int, after: int = 0) -> None:
        self._steps, self._after, self._begun = steps, after, time.monotonic()

    def step(self, record: StepRecord) -> None:
        due = record.step % self._log_every == 0 or record.step in (self._after + 1, self._steps)
        if due or record.val_loss is not None:
            elapsed = time.monotonic() - self._begun
            left = clock(elapsed / (record.step - self._after) * (self._steps - record.step))
            width = len(str(self._steps))
            self.say(f"step {record.step:>{width}}/{self._steps}  {summary(record)}  left {left}")


class ProgressConsole(Console):
    """Two lines that stay at the bottom, a bar and the newest figures; validations are lines above them."""

    def __init__(self) -> None:
        self._live: Any = None
        self._progress: Any = None

    def say(self, text: str) -> None:
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, steps: int, after: int = 0) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None), TextColumn("left"))
        self._progress = Progress(*columns, TimeRemainingColumn(compact=True), expand=True)
        self._progress.add_task("", total=steps, completed=after)
        self._live = Live(self._lines(""), transient=True)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        if record.val_loss is not None:
            self.say(f"step {record.step}  {summary(record)}")
        self._progress.update(self._progress.task_ids[0], completed=record.step)
        self._live.update(self._lines(summary(record)))

    def _lines(self, figures: str) -> Any:
        from rich.console import Group

        return Group(self._progress, figures)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


# ---- the table of the units ------------------------------------------------------------------------------------

_ADAMW_STATES = 2


class StateBytes(NamedTuple):
    """Bytes of training state, of one unit or of a whole model."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def expected_local(unit: UnitInfo) -> StateBytes:
    """What this rank holds of the unit between two steps, the padding of its flat buffer included.

    The optimizer sees each parameter's own rows, without padding.
    """
    padded_nbytes = unit.padded_local_numel * unit.storage_itemsize
    return StateBytes(padded_nbytes, padded_nbytes, _ADAMW_STATES * unit.local_numel * unit.storage_itemsize)


def expected_unsharded(unit: UnitInfo) -> StateBytes:
    """What one process would hold of the unit without sharding."""
    nbytes = unit.numel * unit.storage_itemsize
    return StateBytes(nbytes, nbytes, _ADAMW_STATES * nbytes)


def add(parts: Iterable[StateBytes]) -> StateBytes:
    return StateBytes(*map(sum, zip((0, 0, 0), *parts, strict=True)))


def measured_local(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """What this rank holds now: each distinct storage behind parameters, gradients and optimizer state, counted once.

    Counted whole: a view of one element keeps its whole storage alive.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return StateBytes(_storage_nbytes(parameters), _storage_nbytes(gradients), _storage_nbytes(states))


def _storage_nbytes(tensors: Iterable[Tensor]) -> int:
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


_HEADER = ("unit", "module", "tensors", "elements", "unsharded", "parameters", "gradients", "AdamW", "padding")


def unit_table(units: Sequence[UnitInfo], rank: int) -> str:
    """One line per unit, equal neighbours together, and a line of sums."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for _, same in groupby(units, key=_figures):
        first, *others = group = list(same)
        name, module = first.name or "root", first.module_class
        if others:
            name, module = f"{name} .. {others[-1].name}", f"{module} x{len(group)}"
        rows.append((name, module, *_cells(group)))
    rows.append(("sum", "", *_cells(units)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    header, *lines, total = [form.format(*row) for row in rows]
    rule = "-" * len(header)
    own = (
        "unsharded: parameters, gradients and AdamW in one process; the three columns after it are the share of "
        f"rank {rank}; padding: of all ranks together"
    )
    return "\n".join([header, rule, *lines, rule, total, own])


def _figures(unit: UnitInfo) -> tuple[Any, ...]:
    return (unit.module_class, unit.num_params, unit.numel, unit.local_numel, unit.padded_local_numel)


def _cells(units: Sequence[UnitInfo]) -> tuple[str, ...]:
    nbytes = (
        add(map(expected_unsharded, units)).total,
        *add(map(expected_local, units)),
        sum((u.world * u.padded_local_numel - u.numel) * u.storage_itemsize for u in units),
    )
    return (str(sum(u.num_params for u in units)), f"{sum(u.numel for u in units):,}", *map(in_units, nbytes))


def memory_lines(expected: StateBytes, unsharded: StateBytes, measured: StateBytes) -> list[str]:
    """Three short lines that set side by side what was measured, what was expected, and what it were unsharded."""
    return [
        f"{name:<10} {in_units(here):>10} measured, {in_units(there):>10} expected, {in_units(whole):>10} unsharded"
        for name, here, there, whole in zip(StateBytes._fields, measured, expected, unsharded, strict=True)
    ]


# ---- the picture -----------------------------------------------------------------------------------------------


def draw_loss(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the training and validation loss of the records of `metrics.jsonl` into a PNG. Needs matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # says on its first use that it builds a font cache
    # The object, not pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=1, label="training")
    validated = [r for r in records if "val_loss" in r]
    if validated:
        label = f"validation (last {validated[-1]['val_loss']:.3f})"
        axes.plot([r["step"] for r in validated], [r["val_loss"] for r in validated], "o-", markersize=4, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    part = path.with_name(path.name + ".part")
    figure.savefig(part, dpi=120, format="png")
    part.replace(path)
