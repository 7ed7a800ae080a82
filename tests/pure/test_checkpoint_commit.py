"""The order of a commit: nothing is named before it is sure to outlast a loss of power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.directory import Saving, read_current
from fullshard.checkpoint.errors import CheckpointBusy, CheckpointDamaged, CheckpointNotFound
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.manifest import Manifest, to_bytes

A, B = "a" * 32, "b" * 32


class Trace:
    """What is done to files, by the names of what it is done to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self._names: dict[int, str] = {}
        for call in ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
            monkeypatch.setattr(os, call, self._recording(call, getattr(os, call)))

    def _recording(self, call: str, original: Any) -> Any:
        def record(first: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(first, *args, **kwargs)
            if call == "open":
                self._names[result] = os.path.basename(first)
            elif call in ("write", "fsync"):
                self.done.append(f"{call} {self._names[first]}")
            elif call in ("rename", "replace"):
                self.done.append(f"{call} {first} {args[0]}")
            else:
                self.done.append(f"{call} {os.path.basename(first)}")
            return result

        return record


def manifest(save_id: str) -> bytes:
    return to_bytes(Manifest(save_id, 1, "test", {}, {}, ()))


def save(path: Path, save_id: str) -> None:
    saving = Saving.begin(str(path), save_id)
    saving.commit(manifest(save_id))
    saving.end()


def current(path: Path) -> str:
    with Folder.open(str(path)) as folder:
        return read_current(folder).manifest.save_id


def test_the_order_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save(path, A)
    saving = Saving.begin(str(path), B)
    trace = Trace(monkeypatch)
    trace._names |= {saving._folder.fd: "c"}
    saving.commit(manifest(B))
    assert trace.done == [
        "write manifest.json",
        "fsync manifest.json",
        f"fsync .saving-{B}",
        f"rename .saving-{B} g000002-{B}",
        "fsync c",
        "write .CURRENT.next",
        "fsync .CURRENT.next",
        "replace .CURRENT.next CURRENT",
        "fsync c",
    ]
    trace.done.clear()
    saving.end()
    assert trace.done == ["unlink manifest.json", f"rmdir g000001-{A}"], "the old one goes behind it, manifest first"
    assert current(path) == B


def test_a_new_directory_is_synced_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(monkeypatch)
    Saving.begin(str(tmp_path / "x" / "y"), A).end()
    assert trace.done[:4] == ["mkdir x", f"fsync {tmp_path.name}", "mkdir y", "fsync x"]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A commit whose last sync fails: the pointer moved, and may be the old one after a loss of power."""
    path = tmp_path / "c"
    save(path, A)
    saving = Saving.begin(str(path), B)
    original, count = os.fsync, [0]

    def fsync(fd: int) -> None:
        count[0] += fd == saving._folder.fd
        if count[0] == 2:
            raise OSError(5, "injected")
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="injected"):
        saving.commit(manifest(B))
    saving.end()
    monkeypatch.setattr(os, "fsync", original)
    yield path


def test_both_generations_stay_when_nobody_knows_which_is_current(refused: Path) -> None:
    assert {f"g000001-{A}", f"g000002-{B}"} <= set(os.listdir(refused))
    assert current(refused) == B
    save(refused, "c" * 32)
    assert len(os.listdir(refused)) == 3 and current(refused) == "c" * 32


def test_one_saver_at_a_time(tmp_path: Path) -> None:
    first = Saving.begin(str(tmp_path), A)
    with pytest.raises(CheckpointBusy):
        Saving.begin(str(tmp_path), B)
    first.end()
    save(tmp_path, B)
    assert current(tmp_path) == B


def test_a_pointer_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    """To save over it could lose what it named."""
    save(tmp_path, A)
    (tmp_path / "CURRENT").write_text("{}")
    with pytest.raises(CheckpointDamaged, match="it is kept"):
        Saving.begin(str(tmp_path), B)
    assert f"g000001-{A}" in os.listdir(tmp_path)


def test_what_is_in_a_generation_and_not_ours_stays(tmp_path: Path) -> None:
    save(tmp_path, A)
    (tmp_path / f"g000001-{A}" / "mine").mkdir()
    (tmp_path / f"g000001-{A}" / "link").symlink_to(tmp_path)
    save(tmp_path, B)
    assert sorted(os.listdir(tmp_path / f"g000001-{A}")) == ["link", "mine"]
    with Folder.open(str(tmp_path)) as folder, pytest.raises(CheckpointDamaged, match="name of a file"):
        folder.sub("../x")


def test_a_directory_says_what_it_has_instead(tmp_path: Path) -> None:
    Saving.begin(str(tmp_path), A)._folder.close()
    with Folder.open(str(tmp_path)) as folder, pytest.raises(CheckpointNotFound, match="found only an unfinished save"):
        read_current(folder)
