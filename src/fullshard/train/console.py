"""Console output of a run: lines or a progress bar; and the plot of the loss."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from fullshard.observe import Report
from fullshard.train.metrics import StepRecord, in_units, installed, missing


class Console:
    """Receives everything that may be shown. This base class shows nothing; all ranks but 0 use it."""

    def say(self, text: str) -> None:
        """Print a permanent line (or several)."""

    def begin(self, steps: int, after: int = 0) -> None:
        """Training up to step `steps` begins now, after step `after`."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def end(self) -> None:
        """Training is over or has failed; safe to call twice."""


def console_for(rank: int, log_every: int) -> Console:
    """Silent on ranks other than 0; a bar on a terminal if rich is installed; plain lines otherwise."""
    if rank != 0:
        return Console()
    if sys.stdout.isatty():
        if installed("rich"):
            return ProgressConsole()
        print(missing("rich", "ui", "there are lines instead of a progress bar"), flush=True)
    return PlainConsole(log_every)


# A terminal has as many columns.
WIDTH = 80


def summary(record: StepRecord, before: str = "", after: str = "") -> str:
    """The figures of a step between `before` and `after`, in one line of `WIDTH` columns: the loss and the rate always,
    and of the others the first that have room, `after` as one of them. `metrics.jsonl` has all of them."""
    rate = f"{record.tokens_per_second:,.0f} tok/s"
    # In the order of the line, and how early each is given room.
    wanted = [
        (f"loss {nats(record.loss)}", 0),
        ("" if record.val_loss is None else f"val {nats(record.val_loss)}", 1),
        (f"norm {record.grad_norm:.3g}", 3),
        ("" if record.mfu is None else f"MFU {record.mfu:.1%}", 4),
        (f"mem {in_units(record.memory_bytes)}", 5),
        (rate, 0),
        (after, 2),
    ]
    line = before
    shown: set[int] = set()
    for place in sorted(range(len(wanted)), key=lambda place: wanted[place][1]):
        figures = [text for at, (text, _) in enumerate(wanted) if at in shown | {place}]
        longer = "  ".join(filter(None, [before, *figures]))
        if wanted[place][1] == 0 or len(longer) <= WIDTH:
            shown.add(place)
            line = longer
    return line


def nats(loss: float) -> str:
    """
    >>> nats(1.23456), nats(123456.7), nats(float("inf"))
    ('1.2346', '1.235e+05', 'inf')
    """
    return f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.4g}"


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainConsole(Console):
    """One line every `log_every` steps, at the first and last step, and at every step that validates."""

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
            self.say(summary(record, f"step {record.step:>{width}}/{self._steps}", f"left {left}"))


class ProgressConsole(Console):
    """Two lines at the bottom, a bar and the newest figures; validations are printed above them."""

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
            self.say(summary(record, f"step {record.step}"))
        self._progress.update(self._progress.task_ids[0], completed=record.step)
        self._live.update(self._lines(summary(record)))

    def _lines(self, figures: str) -> Any:
        from rich.console import Group

        return Group(self._progress, figures)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def memory_lines(report: Report, unsharded_nbytes: int, trained_nbytes: int, copies: int | None = 2) -> list[str]:
    """One line each for parameters, gradients and optimizer: measured, expected, and the unsharded size.

    `unsharded_nbytes`: bytes of all parameters. `trained_nbytes`: of those that train; gradients take as many, and the
    optimizer `copies` of them. What is not known before is left out.
    """
    lines = []
    sizes = (
        ("parameters", unsharded_nbytes),
        ("gradients", trained_nbytes),
        ("optimizer", None if copies is None else copies * trained_nbytes),
    )
    for name, whole in sizes:
        measured, expected = getattr(report.measured, name), getattr(report.expected, name)
        sides = ((measured, "measured"), (expected, "expected"), (whole, "unsharded"))
        lines.append(
            f"{name:<10} " + ", ".join(f"{in_units(nbytes):>10} {what}" for nbytes, what in sides if nbytes is not None)
        )
    return lines


def draw_loss(records: list[dict[str, Any]], path: Path) -> None:
    """Plot the training and validation loss of the records of `metrics.jsonl` as a PNG. Needs matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # silences its message about building a font cache
    # Figure, not pyplot: no global state, no window system.
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
