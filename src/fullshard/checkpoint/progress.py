"""What a long read or write shows on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds between two lines.
_PAUSE = 10.0


@contextmanager
def shown_progress(total_nbytes: int, title: str, *, lines: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes of each finished tensor. On a terminal a bar, or a percentage if rich is
    missing; elsewhere, if `lines`, one line every ten seconds and one at the end."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich import progress
        from rich.console import Console

        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        ends = (progress.TextColumn("{task.description}"), progress.TimeRemainingColumn())
        with progress.Progress(ends[0], *columns, ends[1], console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total_nbytes)
            yield lambda nbytes: bar.advance(task, nbytes)
        return
    terminal, begun, done, due = sys.stderr.isatty(), time.monotonic(), 0, time.monotonic() + _PAUSE

    def show(text: str, end: str = "\n") -> None:
        print(text, end=end, file=sys.stderr, flush=True)

    def advance(nbytes: int) -> None:
        nonlocal done, due
        done += nbytes
        if terminal:
            show(f"\r{title} {done / max(total_nbytes, 1):4.0%}", end="")
        elif lines and time.monotonic() >= due:
            due = time.monotonic() + _PAUSE
            show(f"{title}: {done / 1e6:,.1f} of {total_nbytes / 1e6:,.1f} MB")

    try:
        yield advance
    finally:
        if terminal:
            show("")
        elif lines:
            show(f"{title}: {done / 1e6:,.1f} of {total_nbytes / 1e6:,.1f} MB in {time.monotonic() - begun:.1f} s")
