"""Which checkpoints stay, and how the others go."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fullshard import checkpoint
from fullshard.checkpoint import retention
from fullshard.checkpoint.directory import Saving
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.retention import CheckpointInfo, Rule, kept, using
from fullshard.cli import main


def info(step: int, problem: str | None = None, **metrics: float) -> CheckpointInfo:
    return CheckpointInfo(Path(f"step-{step}"), step, problem, metrics=metrics)


def steps(found: list[CheckpointInfo], rule: Rule) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in kept(found, rule))


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(1), [9, 10]),
        (Rule(3), [6, 7, 9, 10]),
        (Rule(1, every=3), [3, 6, 9, 10]),
        (Rule(1, best=2, metric="loss"), [2, 7, 9, 10]),
        (Rule(1, best=2, metric="loss", mode="max"), [1, 3, 9, 10]),
        (Rule(1, best=1, metric="score", mode="max"), [9, 10]),
        (Rule(1, every=6, best=1, metric="loss"), [6, 7, 9, 10]),
    ],
)
def test_what_a_rule_keeps(rule: Rule, expected: list[int]) -> None:
    """9 is the newest whole one, 10 is being written, 8 damaged, 5 the rest of a killed save; 6 measured nothing."""
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 7: 1.0, 9: 3.0}
    found = [info(step, loss=loss) for step, loss in losses.items()]
    found += [info(6, loss=math.nan), info(5, "an unfinished save"), info(8, "a file is short"), info(10, "unfinished")]
    assert steps(found, rule) == expected


def test_what_measured_nothing_is_none_of_the_best() -> None:
    found = [info(1, m=math.nan), info(2, m=1.0), info(3, m=2.0), info(4)]
    assert steps(found, Rule(1, best=1, metric="m")) == [2, 4]
    assert steps(found, Rule(1, best=3, metric="m", mode="max")) == [2, 3, 4]


def test_a_rule_keeps_a_whole_one_whatever_it_is_given() -> None:
    """Property, over all small folders: the newest whole one stays, and everything where none is whole."""
    rules = [Rule(1), Rule(2, every=2), Rule(1, best=1, metric="m", mode="max"), Rule(3, 5, 2, "m")]
    for count in range(5):
        for problems in itertools.product([None, "damaged"], repeat=count):
            for rule in rules:
                found = [info(n, problem, m=float(-n)) for n, problem in enumerate(problems, 1)]
                stays = steps(found, rule)
                whole = [one.step for one in found if one.whole]
                assert (max(whole) in stays) if whole else (len(stays) == count)
                assert set(whole[-rule.last :]) <= set(stays)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"keep_last": 0}, "so that one checkpoint stays"),
        ({"keep_last": 1, "keep_best": 2}, "expected both or neither"),
        ({"keep_last": 1, "metric": "loss"}, "expected both or neither"),
        ({"keep_last": 1, "keep_best": 0, "metric": "loss"}, "keep_best: expected an int >= 1"),
        ({"keep_last": 1, "keep_best": 1, "metric": 3}, "expected the name of a metric"),
        ({"keep_last": 1, "mode": "best"}, "expected one of min, max"),
    ],
)
def test_a_rule_that_is_none_is_refused(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint.retain(tmp_path, **wrong)


def killed_save(path: Path) -> None:
    """What a first save that was killed leaves."""
    saving = Saving.begin(str(path), "a" * 32)
    saving._folder.close()
    assert saving._lock is not None
    os.close(saving._lock)


# ---- folders ---------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, **metrics: float) -> Path:
    path = folder / f"step-{step}"
    checkpoint.save({"step": step}, checkpoint_id=path, metrics=metrics)
    return path


def test_a_listing_says_what_is_there_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    save(tmp_path, 2, loss=1.5)
    save(tmp_path, 10)
    manifest = next((save(tmp_path, 4)).glob("g*/manifest.json"))
    manifest.write_bytes(manifest.read_bytes()[:-1])
    killed_save(tmp_path / "step-6")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").mkdir()
    found = checkpoint.list_checkpoints(tmp_path)
    assert [(one.step, one.whole) for one in found] == [(2, True), (4, False), (6, False), (10, True)]
    assert "expected the digest in CURRENT" in str(found[1].problem) and found[2].problem == "an unfinished save"
    first = found[0]
    assert first.metrics == {"loss": 1.5} and first.path == tmp_path / "step-2" and first.layout == "1 rank"
    assert first.saved_at is not None and found[3].saved_at is not None and first.saved_at <= found[3].saved_at
    assert first.nbytes == sum(file.nbytes for file in checkpoint.inspect(first.path).files)
    assert checkpoint.list_checkpoints(tmp_path / "nowhere") == []


def test_metrics_are_no_part_of_the_state(tmp_path: Path) -> None:
    path = save(tmp_path, 1, loss=2.0)
    state = {"step": 0}
    checkpoint.load(state, checkpoint_id=path)
    assert state == {"step": 1}
    for wrong in ({"loss": "2"}, {"loss": True}, {3: 1.0}, [1.0]):
        with pytest.raises(TypeError, match="metrics"):
            checkpoint.save({"step": 1}, checkpoint_id=path, metrics=wrong)  # type: ignore[arg-type]


def test_the_best_stay_and_what_would_go_can_be_asked_for(tmp_path: Path) -> None:
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0), 1):
        save(tmp_path, step, loss=loss)
    rule: dict[str, Any] = {"keep_last": 1, "keep_best": 1, "metric": "loss"}
    gone = [tmp_path / f"step-{step}" for step in (1, 3, 4)]
    assert checkpoint.retain(tmp_path, **rule, dry_run=True) == gone and all(path.is_dir() for path in gone)
    assert checkpoint.retain(tmp_path, **rule) == gone
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-5"]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2)]
    (tmp_path / "alias").symlink_to(tmp_path)
    for used, pruned in ((tmp_path / "alias", tmp_path), (tmp_path, tmp_path / "alias")):
        with using(str(used / "step-1")):
            assert checkpoint.retain(pruned, keep_last=1) == []
    assert checkpoint.retain(tmp_path, keep_last=1) == paths[:1] and not retention._used


def test_a_load_uses_what_it_loads(tmp_path: Path) -> None:
    """Retention by another thread meanwhile, by an object whose state is loaded last."""
    found: list[list[Path]] = []

    class Prunes:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            found.append(checkpoint.retain(tmp_path, keep_last=1))

    for step in (1, 2):
        checkpoint.save({"held": Prunes()}, checkpoint_id=tmp_path / f"step-{step}")
    checkpoint.load({"held": Prunes()}, checkpoint_id=tmp_path / "step-1")
    assert found == [[]]


def test_what_is_not_ours_stays_where_it_was(tmp_path: Path) -> None:
    old, _ = save(tmp_path, 1), save(tmp_path, 2)
    (next(old.glob("g*")) / "mine").mkdir()
    assert checkpoint.retain(tmp_path, keep_last=1) == [old]
    assert [path.name for path in old.rglob("*")][1:] == ["mine"] and not (old / "CURRENT").exists()
    # A directory of the name of a rest, with something else in it.
    rest = tmp_path / ".removed-step-7"
    rest.mkdir()
    (rest / "notes").write_text("mine")
    (tmp_path / ".removed-step-8").symlink_to(tmp_path / "step-2")
    checkpoint.retain(tmp_path, keep_last=1)
    assert (rest / "notes").read_text() == "mine" and (tmp_path / "step-2" / "CURRENT").exists()


def test_the_command_lists_and_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, loss=1 / step)
    killed_save(tmp_path / "step-4")
    folder, best = str(tmp_path), ["--keep-best", "1", "--metric", "loss", "--mode", "max"]
    assert main(["checkpoint", "list", folder]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "step", "size", "layout", "age", "metrics", "state"]
    assert [row.split()[0] for row in rows] == ["step-1", "step-2", "step-3", "step-4"]
    assert (
        rows[1].split()[-2:] == ["loss=0.5", "whole"] and rows[3].endswith("an unfinished save") and "1 rank" in rows[0]
    )
    assert main(["checkpoint", "list", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["whole"] for one in found] == [True, True, True, False] and found[2]["metrics"] == {"loss": 1 / 3}
    assert main(["checkpoint", "prune", folder, "--keep-last", "1", *best, "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would remove {folder}/step-2\n" and (tmp_path / "step-2").exists()
    assert main(["checkpoint", "prune", folder, "--keep-last", "1", *best, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["removed"] == [f"{folder}/step-2"] and f"{folder}/step-1" in said["kept"]
    assert main(["checkpoint", "prune", folder, "--keep-last", "1", *best]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    assert main(["checkpoint", "prune", folder, "--keep-last", "0"]) == 2
    assert main(["checkpoint", "list", f"{folder}/none"]) == 2
    assert "expected a folder with checkpoints" in capsys.readouterr().err


# ---- a removal that ends in the middle -------------------------------------------------------------------------------


class Ends(BaseException):
    """As a kill: nothing of the removal runs after it."""


def ending(patch: pytest.MonkeyPatch, at: int) -> None:
    """Raise `Ends` before file operation number `at`, and before each one after it."""
    count = itertools.count()

    def watched(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) >= at:
                raise Ends
            return original(*args, **kwargs)

        return call

    for name in ("open", "unlink", "rmdir", "rename", "fsync", "listdir"):
        patch.setattr(os, name, watched(getattr(os, name)))


def test_a_removal_that_ends_at_any_operation_leaves_a_whole_one_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every operation of a removal: what is listed is whole, and the next call leaves nothing behind. (Processes
    that are killed: tests/procs/test_checkpoint_kills.py.)"""
    before, folder = tmp_path / "before", tmp_path / "c"
    for step in (1, 2):
        save(before, step)
    listed = []
    for at in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        with monkeypatch.context() as patch:
            ending(patch, at)
            try:
                retention.remove(str(folder / "step-1"))
                break
            except Ends:
                pass
        found = checkpoint.list_checkpoints(folder)
        listed.append(len(found))
        for one in found:
            assert one.whole
            checkpoint.verify(one.path)
        assert checkpoint.latest(folder) == folder / "step-2"
        checkpoint.retain(folder, keep_last=1)
        assert os.listdir(folder) == ["step-2"], at
    assert listed == sorted(listed, reverse=True) and len(listed) > 10 and listed[-5:] == [1] * 5


def test_what_killed_saves_and_older_versions_left_goes(tmp_path: Path) -> None:
    """A first save that was killed, also one of a step that is kept; and a removal of 0.2.0 that was killed."""
    save(tmp_path, 9)
    for step in (1, 4):
        killed_save(tmp_path / f"step-{step}")
    (save(tmp_path, 2) / "CURRENT").unlink()
    checkpoint.retain(tmp_path, keep_last=2, keep_every=2)
    assert os.listdir(tmp_path) == ["step-9"]
    with Folder.open(str(tmp_path)) as folder:
        assert folder.names() == ["step-9"]
