"""The table of programs names those that are there and says why of what is not equal; docs/programs.md shows it."""

from __future__ import annotations

from tests.harness import programs
from tests.programs import PROGRAMS


def test_every_program_is_in_the_table() -> None:
    assert sorted(path.stem for path in programs.FOLDER.glob("[!_]*.py")) == sorted(PROGRAMS)


def test_what_is_not_equal_has_its_reason() -> None:
    for name, program in PROGRAMS.items():
        assert bool(program.why) == ("bits" not in (program.plain, program.torch) or program.plain != program.torch), (
            f"{name}: a reason is expected exactly where one of the two is not 'bits'"
        )


def test_the_page_is_of_the_table() -> None:
    assert programs.PAGE.read_text() == programs.page(), "python -m tests.harness.programs --write"


def test_the_import_is_changed_and_nothing_else() -> None:
    for name in PROGRAMS:
        text = (programs.FOLDER / f"{name}.py").read_text()
        assert text.count("torch.distributed.fsdp") == 1, f"{name}: one import from torch.distributed.fsdp is expected"
        assert "fullshard" not in text
