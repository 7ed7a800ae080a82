"""The questions on docs/troubleshooting.md: thirty at least, each with the thread in which it was asked and the test of
its answer."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
ASKED = TEXT.partition("\n## Questions that people asked\n")[2]
THREAD = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)\)")
TEST = re.compile(r"\[(test_\w+)\]\(\.\./tests/(\w+/test_\w+)\.py\)")
ROWS = [line.strip("| ").split(" | ") for line in ASKED.splitlines() if line.startswith("| ")][1:]


def test_each_question_has_a_thread_and_a_test() -> None:
    assert len(ROWS) >= 30 and all(len(row) == 4 for row in ROWS)
    assert [row[0] for row in ROWS if not row[0].endswith("?")] == []
    assert [row[0] for row in ROWS if not THREAD.search(row[2])] == []
    assert [row[0] for row in ROWS if not TEST.search(row[3])] == []
    threads = [thread for row in ROWS for thread in THREAD.findall(row[2])]
    assert len(set(threads)) == len(threads), "a thread answers two questions"
    assert {repository for repository, *_ in threads} >= {"pytorch", "accelerate", "verl", "torchtitan"}


def test_links_are_called_what_they_are() -> None:
    assert all((name, number) == (repository, linked) for name, number, repository, linked in THREAD.findall(ASKED))
    assert all(path.endswith(f"/{name}") for name, path in TEST.findall(ASKED))
    assert ASKED.count("https://") == len(THREAD.findall(ASKED))
