"""Commands whose results survive them: each in a session of its own, with rows that are kept as they are printed.

    row("step", ms=41.2)            in the part: one line of JSON on stdout, at once
    with attempted("offload"): ...  in the part: an exception becomes a row "could not", and the next line runs
    result = run(part, limit_s)     in the process that asks: rows, text and errors, whatever became of the part

A part that hangs, dies or leaves processes loses nothing that it printed. All of its processes have ended, also those
that left its session, before `run` returns: they carry a mark in their environment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

_MARK = "BENCHMARK_PART"
_LOOK_SECONDS = 0.05
# After SIGTERM, for stacks to be written; after SIGKILL, for the driver to release the device.
_TERM_SECONDS, _KILL_SECONDS = 0.5, 1.5
# What ending a part may take beyond its limit.
GRACE_SECONDS = _TERM_SECONDS + _KILL_SECONDS
_ERROR_LINES = 25
_BEGIN = '{"what": '


# ---- in the part -----------------------------------------------------------------------------------------------------


def row(what: str, **figures: Any) -> None:
    """Print a row of results, at once."""
    # In one call: ranks share the file, and `print` writes the end of the line by itself.
    sys.stdout.write(json.dumps({"what": what, **figures}) + "\n")
    sys.stdout.flush()


@contextmanager
def attempted(what: str, **figures: Any) -> Iterator[None]:
    """What raises inside becomes a row "could not", with the innermost place of this repository."""
    try:
        yield
    except Exception as error:
        row(what, **figures, could_not=reason(error))


def reason(error: BaseException) -> str:
    """An exception on one line: its class, its first lines, and the innermost place in this repository."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    root = str(Path(__file__).parents[1])
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    place = f" ({os.path.relpath(places[-1].filename, root)}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {' / '.join(lines[:3])[:300]}{place}"


def shows_stacks() -> None:
    """Of a part: on SIGTERM all threads write their stacks to stderr before the process ends."""
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


# ---- in the process that asks ----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A module with its arguments, and the seconds that it is given at most."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass
class Result:
    """What came of a part. `rows`: all that it printed in full; `text`: its other lines; `error`: "" if it ended well;
    `warned`: what it wrote to stderr, the last lines."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    error: str = ""
    warned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended well, and could do all that it tried."""
        return not self.error and not any("could_not" in one for one in self.rows)


def run(part: Part, limit_s: float, show: Callable[[str], object] = print, into: Result | None = None) -> Result:
    """Run it for at most `limit_s` seconds, and `GRACE_SECONDS` to end it. `show`: called with each line as it comes;
    `into`: what is returned, for a caller that may be interrupted."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", *part.command]
    result, begun = into if into is not None else Result(), time.monotonic()
    result.error = "was interrupted"
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment, start_new_session=True
        )
        lines = _Lines(out, result, show)
        try:
            while process.poll() is None and time.monotonic() - begun < limit_s:
                lines.take()
                time.sleep(_LOOK_SECONDS)
        finally:
            ran_out = process.poll() is None
            left = end(process, mark)
            lines.take()
            lines.finish()
        result.seconds = time.monotonic() - begun
        errors.seek(0)
        result.warned = errors.read().decode(errors="replace").splitlines()[-_ERROR_LINES:]
    result.error = ""
    if ran_out:
        result.error = f"ran past {limit_s:.0f} s"
    elif process.returncode:
        result.error = f"ended with {_ending(process.returncode)}"
    if left:
        result.error = "; ".join(filter(None, [result.error, f"processes that SIGKILL did not end: {left}"]))
    return result


class _Lines:
    """What a part has printed, line by line; the file may end within a line."""

    def __init__(self, file: IO[bytes], result: Result, show: Callable[[str], object]) -> None:
        self._file, self._result, self._show = file, result, show
        self._place, self._rest = 0, b""

    def take(self) -> None:
        # The part writes at the end of the same open file: read without moving its place.
        found = os.pread(self._file.fileno(), 1 << 24, self._place)
        self._place += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        for line in whole:
            self._keep(line.decode(errors="replace"))

    def finish(self) -> None:
        if self._rest:
            self._keep(self._rest.decode(errors="replace"))

    def _keep(self, line: str) -> None:
        # Others may have written on the same line: pytest its dots, NCCL its version, another rank its row.
        text, rest, is_row = "", line, False
        while (place := rest.find(_BEGIN)) >= 0:
            try:
                found, end = json.JSONDecoder().raw_decode(rest, place)
            except ValueError:
                break
            self._result.rows.append(found)
            text, rest, is_row = text + rest[:place], rest[end:], True
        if text + rest or not is_row:
            self._result.text.append(text + rest)
        self._show(line)


def end(process: subprocess.Popen[bytes], mark: str) -> list[int]:
    """End all processes of a part, and wait for it. Those that are left: in a call of the driver that does not end."""
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        until = time.monotonic() + seconds
        while True:
            there = alive(mark)
            for pid in there if number == signal.SIGKILL else ():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            if process.poll() is not None and not there:
                return []
            if time.monotonic() > until:
                break
            time.sleep(_LOOK_SECONDS / 2)
    return alive(mark)


def alive(mark: str) -> list[int]:
    """The processes with this mark; those that ended and were not waited for do not count."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _ending(code: int) -> str:
    return f"{signal.Signals(-code).name}" if code < 0 else f"status {code}"
