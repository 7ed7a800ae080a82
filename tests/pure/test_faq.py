"""docs/faq.md: thirty questions at least, each with the thread in which it was asked and the test of its answer."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faq.md"
THREAD = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)\)")
TEST = re.compile(r"\[(test_\w+)\]\(\.\./tests/(\w+/test_\w+)\.py\)")


def answers() -> dict[str, str]:
    parts = re.split(r"^### (.*)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_each_question_has_a_thread_and_a_test() -> None:
    found = answers()
    assert len(found) >= 30
    asked = {question: THREAD.findall(answer) for question, answer in found.items()}
    assert [question for question, threads in asked.items() if not threads] == []
    assert [question for question, answer in found.items() if not TEST.search(answer.partition("*Tested*")[2])] == []
    threads = [thread for several in asked.values() for thread in several]
    assert len(set(threads)) == len(threads), "a thread answers two questions"
    assert {repository for repository, *_ in threads} >= {"pytorch", "accelerate", "verl", "torchtitan"}


def test_links_are_called_what_they_are() -> None:
    text = PAGE.read_text()
    assert all((name, number) == (repository, linked) for name, number, repository, linked in THREAD.findall(text))
    assert all(path.endswith(f"/{name}") for name, path in TEST.findall(text))
    assert text.count("https://") == len(THREAD.findall(text))
