"""The documents stay within their budget of words: what is longer was not made shorter."""

from __future__ import annotations

from pathlib import Path

from tools import words


def test_what_a_user_reads_is_within_its_budget() -> None:
    assert words.read(words.count()) <= words.BUDGET_READ, "python -m tools.words"


def test_all_but_records_are_within_their_budget() -> None:
    assert words.all_of(words.count()) <= words.BUDGET_ALL, "python -m tools.words"


def test_records_are_those_that_a_command_writes_and_dated_ones() -> None:
    assert all((words.ROOT / path).is_file() for path in words.GENERATED)
    assert words.group("docs/reliability_torch-2.13.0_2026-11-26.md") == words.RECORDS
    assert words.group("docs/how-to/data.md") == "how-to" and words.group("README.md") == "README"
    assert words.group("docs/adr/0001-the-lifecycle-is-data.md") == words.DECISIONS
    assert words.group("CHANGELOG.md") is None


def test_words_are_counted_by_group(tmp_path: Path) -> None:
    (tmp_path / "docs" / "tutorials").mkdir(parents=True)
    (tmp_path / "README.md").write_text("two words\n")
    (tmp_path / "docs" / "memory.md").write_text("# one, two\nthree\n")
    (tmp_path / "docs" / "tutorials" / "a.md").write_text("four more words here")
    (tmp_path / "docs" / "mutations.md").write_text("many")
    found = words.count(tmp_path)
    assert (found["README"], found["in detail"], found["tutorials"], found[words.RECORDS]) == (2, 4, 4, 1)
    assert (words.read(found), words.all_of(found)) == (6, 10)
