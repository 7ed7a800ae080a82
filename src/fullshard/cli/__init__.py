"""The command `fullshard`: its parts, put together.

`train` and `generate` are the trainer's (`fullshard.train.cli`); `checkpoint` is here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..train import cli as train
from . import checkpoint

_EPILOG = """\
`fullshard COMMAND --help` tells more, with examples.

exit codes: 0 well, 1 failed, 2 cannot be run as asked, 3 recognised and refused, 130 interrupted by Ctrl-C,
143 by SIGTERM
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="fullshard",
        description="Train models that are sharded over processes, and look after checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fullshard {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_commands(commands)
    checkpoint.add_commands(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        return checkpoint.run(arguments) if arguments.command == "checkpoint" else train.run(arguments)
    except KeyboardInterrupt:
        print("fullshard: interrupted by SIGINT", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone, `| head` for instance
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
