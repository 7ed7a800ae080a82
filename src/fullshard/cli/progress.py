"""How far a conversion is: a bar on a terminal (with rich), nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from ..train import optional


@contextlib.contextmanager
def progress_for(total_nbytes: int, *, quiet: bool) -> Iterator[Callable[[str, int], None] | None]:
    """What to call with (key, bytes) for each tensor that is done; None where nothing is shown. On stderr, so that
    stdout is the result alone."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    if optional.find("rich") is None:
        done = 0

        def line(key: str, nbytes: int) -> None:
            nonlocal done
            done += nbytes
            print(f"\r{done / max(total_nbytes, 1):4.0%}", end="", file=sys.stderr, flush=True)

        try:
            yield line
        finally:
            print(file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total_nbytes)

        def advance(key: str, nbytes: int) -> None:
            bar.advance(task, nbytes)

        yield advance
