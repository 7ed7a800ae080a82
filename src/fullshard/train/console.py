"""What a person sees while the run goes: a progress bar on a terminal (with rich), plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from . import optional
from .facts import in_units
from .metrics import StepRecord


class Console(Protocol):
    """The loop tells it everything; it decides what to show. Only rank 0 has one that shows anything."""

    def say(self, text: str) -> None:
        """A line (or several) that stays."""
        ...

    def begin(self, steps: int, after: int = 0) -> None:
        """Training up to step `steps` begins now, behind step `after`."""
        ...

    def step(self, record: StepRecord) -> None: ...

    def end(self) -> None:
        """Training is over or broken off; safe to call twice."""
        ...


def console_for(rank: int, log_every: int) -> Console:
    if rank != 0:
        return SilentConsole()
    if sys.stdout.isatty():
        if optional.find("rich") is not None:
            return ProgressConsole()
        print(optional.missing("rich", "ui", "there are lines instead of a progress bar"), flush=True)
    return PlainConsole(log_every)


def summary(record: StepRecord) -> str:
    """The figures of a step in one line, without the step number."""
    parts = [f"loss {record.loss:.4f}"]
    if record.val_loss is not None:
        parts.append(f"val {record.val_loss:.4f}")
    parts.append(f"grad_norm {record.grad_norm:.3f}")
    parts += [
        f"mem {in_units(record.memory_bytes)}",
        f"{record.tokens_per_second:,.0f} tok/s",
        f"{record.tflop_per_second:.3g} TFLOP/s",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class SilentConsole:
    """All ranks but 0."""

    def say(self, text: str) -> None: ...

    def begin(self, steps: int, after: int = 0) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def end(self) -> None: ...


class PlainConsole:
    """One line every `log_every` steps, at the first and last step, and wherever a step validates."""

    def __init__(self, log_every: int) -> None:
        self._log_every, self._steps, self._after, self._begun = log_every, 0, 0, 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, steps: int, after: int = 0) -> None:
        self._steps, self._after, self._begun = steps, after, time.monotonic()

    def step(self, record: StepRecord) -> None:
        last = record.step == self._steps
        if record.step % self._log_every and record.step != self._after + 1 and not last and record.val_loss is None:
            return
        elapsed = time.monotonic() - self._begun
        left = clock(elapsed / (record.step - self._after) * (self._steps - record.step))
        width = len(str(self._steps))
        self.say(f"step {record.step:>{width}}/{self._steps}  {summary(record)}  left {left}")

    def end(self) -> None: ...


class ProgressConsole:
    """Two lines that stay at the bottom, a bar and the newest figures; validations are lines above them."""

    def __init__(self) -> None:
        self._live: Any = None
        self._progress: Any = None
        self._task: Any = None

    def say(self, text: str) -> None:
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, steps: int, after: int = 0) -> None:
        progress, live = optional.find("rich.progress"), optional.find("rich.live")
        assert progress is not None and live is not None
        self._progress = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(compact=True),
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=after)
        self._live = live.Live(self._lines(""), transient=True)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        if record.val_loss is not None:
            self.say(f"step {record.step}  {summary(record)}")
        self._progress.update(self._task, completed=record.step)
        self._live.update(self._lines(summary(record)))

    def _lines(self, figures: str) -> Any:
        console = optional.find("rich.console")
        assert console is not None
        return console.Group(self._progress, figures)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
