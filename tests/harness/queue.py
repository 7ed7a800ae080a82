"""A plugin of pytest: several runs share a queue of test files (tests/workers.py).

    python -m pytest -p tests.harness.queue --queue=FOLDER tests/pure

Each run collects all of them, and before it runs the tests of a file makes a file of its name in FOLDER. Where that is
there already, another run has taken that file.

With --last-words=FILE, what a fatal signal (a segmentation fault) leaves is in FILE: the test that ran, and the stacks
of all threads.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--queue", type=Path, help="folder in which runs say which test files they have taken")
    parser.addoption("--last-words", type=Path, help="file for what a fatal signal leaves")


_LAST_WORDS = pytest.StashKey[TextIO]()


@pytest.hookimpl(trylast=True)  # after pytest's own faulthandler, whose text scrolls by
def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--last-words")
    if path is not None:
        config.stash[_LAST_WORDS] = path.open("w")  # not closed: it must be open when the process dies
        faulthandler.enable(config.stash[_LAST_WORDS])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    file = item.config.stash.get(_LAST_WORDS, None)
    if file is not None:
        file.seek(0)
        file.truncate()
        file.write(f"It ran {item.nodeid}\n")
        file.flush()


def take(queue: Path, name: str) -> bool:
    """Whether this run is the first one that takes `name`."""
    try:
        (queue / name.replace("/", "!")).open("x").close()
    except FileExistsError:
        return False
    return True


def _taken(session: pytest.Session, queue: Path) -> Iterator[pytest.Item]:
    """The tests of the files that this run takes, one file after the other."""
    for file, group in groupby(session.items, key=lambda item: item.nodeid.partition("::")[0]):
        items = list(group)
        if take(queue, file):
            yield from items
        else:
            # So that the last line printed is at 100 %. A run without any test would have failed.
            session.testscollected = max(1, session.testscollected - len(items))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    queue: Path | None = session.config.getoption("--queue")
    if queue is None or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop, which does what has to be done about errors of the collection
    items = _taken(session, queue)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True
