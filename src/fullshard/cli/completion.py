"""`fullshard completion`: a script that completes commands in bash, zsh or fish; shtab writes it from the parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_EXAMPLES = """\
to have it in every new shell:
  bash  fullshard completion bash > ~/.local/share/bash-completion/completions/fullshard
  zsh   fullshard completion zsh > ~/.zfunc/_fullshard       with fpath+=~/.zfunc before compinit in ~/.zshrc
  fish  fullshard completion fish > ~/.config/fish/completions/fullshard.fish

in this shell alone:
  eval "$(fullshard completion bash)"

exit codes: 0 printed; 2 the package shtab is missing
"""

# Arguments that take a name or the path of a file.
_SOURCES = ("program", "source")


def add_command(commands: Any) -> None:
    """Add `completion` to the parser of the command line."""
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description="Print a script that completes commands, options, names and files of fullshard in your shell.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose completion is printed")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script for `parser`, which serves for nothing else afterwards; the exit code."""
    try:
        import shtab
    except ImportError:
        print('fullshard completion: shtab is missing; pip install "fullshard[completion]"', file=sys.stderr)
        return 2
    names = _names()
    for action in _arguments(parser):
        if action.dest in names:
            action.choices = names[action.dest]
        elif action.type is Path or action.dest in _SOURCES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _names() -> dict[str, list[str]]:
    """Returns what may be written for an argument whose values the command checks, and not the parser. Found without
    torch, for shells that run this at every start."""
    from fullshard.plan.machine import PROFILES
    from fullshard.plan.questions import QUESTIONS
    from fullshard.plan.strategy import OPTIMIZERS

    return {
        "hardware": [*PROFILES, "here"],
        "explain": [*QUESTIONS],
        "optimizer": [*OPTIMIZERS],
        "reshard": ["always", "never"],
    }


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and those of its commands."""
    for action in parser._actions:
        if action.nargs == argparse.PARSER and isinstance(action.choices, Mapping):
            for below in action.choices.values():
                yield from _arguments(below)
        else:
            yield action
