"""`fullshard see`: what a recorded run did, as a page, as a trace, and as text."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.see.record import Run

_EXAMPLES = """\
examples:
  fullshard see runs/mine                          a page about it, runs/mine/see/see.html
  fullshard see runs/mine runs/other               both, and what changed: runs/mine/see/compared.html
  fullshard see runs/mine --unit layers.3          every command of one unit in the last recorded step, and why
  fullshard see runs/mine --perfetto trace.json    a Chrome trace, for ui.perfetto.dev

A run is recorded by `fullshard train`, or by fullshard.observe.Recorder in a program of yours (docs/see.md).

exit codes: 0 success; 2 no such run, step, rank or unit, or a record that was cut off
"""


def add_command(commands: Any) -> None:
    """Add `see` to the parser of the command line."""
    see = commands.add_parser(
        "see",
        help="show what a recorded run did: memory, messages, waits and their causes",
        description="Show where the time and the memory of a recorded run went.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    see.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder; two are compared")
    see.add_argument("--step", type=int, metavar="N", help="default: the last step recorded in full")
    see.add_argument("--rank", type=int, metavar="N", help="default: all ranks, or rank 0 for --unit")
    see.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="default: see.html in the record's folder; compared.html in that of the first of two",
    )
    see.add_argument("--perfetto", type=Path, metavar="FILE", help="write a Chrome trace of the step, and no page")
    see.add_argument("--unit", metavar="NAME", help="print the commands of one unit, and write no page")
    see.add_argument(
        "--svg", type=Path, metavar="FILE", help="write lanes and bytes of the step as a picture, and no page"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from fullshard.see.record import RecordError, read_run

    try:
        if len(arguments.runs) > 2:
            raise RecordError(f"expected one run or two, found {len(arguments.runs)}")
        alone = [name for name in ("perfetto", "unit", "svg") if getattr(arguments, name) is not None]
        if alone and len(arguments.runs) > 1:
            raise RecordError(f"--{alone[0]}: expected one run, found {len(arguments.runs)}")
        return _show(arguments, [read_run(path) for path in arguments.runs])
    except RecordError as error:
        print(f"fullshard see: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"fullshard see: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


def _show(arguments: argparse.Namespace, runs: list[Run]) -> int:
    from fullshard.see import chrome, page, picture, story
    from fullshard.see.record import RecordError

    step, first = arguments.step, runs[0]
    if arguments.unit is not None or arguments.svg is not None:
        rank = first.rank(arguments.rank) if arguments.rank is not None else first.ranks[0]
        found = rank.step(first.shown_step(step))
        assert found is not None
        if arguments.unit is not None:
            print(story.story(rank, found, arguments.unit))
        if arguments.svg is not None:
            _write(arguments.svg, picture.picture(rank, found))
        return 0
    if arguments.perfetto is not None:
        _write(arguments.perfetto, chrome.chrome_trace(first, first.shown_step(step)))
        print(f"{arguments.perfetto}: open it at ui.perfetto.dev or chrome://tracing")
        return 0
    target = arguments.html or first.path / ("see.html" if len(runs) == 1 else "compared.html")
    told = [line for each in runs for line in story.remarks(each)]
    try:
        text = page.page(runs, step, arguments.rank)
    except RecordError:
        if told:  # what is known nevertheless, such as the bytes of a step that failed
            print("\n".join(told))
        raise
    _write(target, text)
    for each in runs:
        print(story.summary(each, each.shown_step(step)))
    print("\n".join([*told, f"page: {target}"]))
    return 0


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not that of the file beside it
        raise
    finally:
        beside.unlink(missing_ok=True)
