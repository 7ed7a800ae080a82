"""The order of a commit: nothing is named before it is sure to outlast a loss of power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.directory import Saving, read_current
from fullshard.checkpoint.errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointNotFound
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


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_save_that_fails_at_its_beginning_leaves_nothing_open_or_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, A)
    before = files_open()
    with monkeypatch.context() as refusing:
        refusing.setattr(Folder, "make_folder", lambda self, name: (_ for _ in ()).throw(OSError(28, "injected")))
        with pytest.raises(OSError, match="injected"):
            Saving.begin(str(tmp_path), B)
    assert files_open() == before
    save(tmp_path, B)
    assert current(tmp_path) == B and files_open() == before


def test_what_a_killed_save_left_is_in_nobodys_way(tmp_path: Path) -> None:
    save(tmp_path, A)
    killed = Saving.begin(str(tmp_path), B)
    (tmp_path / ".CURRENT.next").write_text("half of it")
    os.close(killed._folder.fd)
    os.close(killed._lock)  # type: ignore[arg-type]
    (tmp_path / "generations").mkdir()
    (tmp_path / ".saving-mine").mkdir()
    saving = Saving.begin(str(tmp_path), "c" * 32)
    assert killed.name not in os.listdir(tmp_path), "its place on the disk may be needed"
    saving.end()
    save(tmp_path, "c" * 32)
    assert sorted(os.listdir(tmp_path)) == [".saving-mine", "CURRENT", "LOCK", f"g000002-{'c' * 32}", "generations"]


def test_a_save_that_failed_takes_its_files_and_gives_the_lock_back(tmp_path: Path) -> None:
    save(tmp_path, A)
    saving = Saving.begin(str(tmp_path), B)
    with Folder.open(str(tmp_path)) as folder, folder.sub(saving.name) as inner:
        inner.write("data-00000.safetensors", b"1")
    saving.end()
    assert sorted(os.listdir(tmp_path)) == ["CURRENT", "LOCK", f"g000001-{A}"]
    Saving.begin(str(tmp_path), B).end()


def test_a_removal_that_is_interrupted_leaves_no_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest goes first, whatever the names of the other files."""
    save(tmp_path, A)
    (tmp_path / f"g000001-{A}" / "data-00000.safetensors").write_bytes(b"1")
    trace = Trace(monkeypatch)
    save(tmp_path, B)
    removed = [done for done in trace.done if done.startswith("unlink ") and "CURRENT" not in done]
    assert removed == ["unlink manifest.json", "unlink data-00000.safetensors"]


def test_a_generation_is_sure_before_older_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer may be that of a commit whose last sync failed."""
    save(tmp_path, A)
    trace = Trace(monkeypatch)
    saving = Saving.begin(str(tmp_path), B)
    assert trace.done == [f"fsync {tmp_path.name}", f"mkdir .saving-{B}", f"fsync {tmp_path.name}"]
    saving.end()


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.replace(b'"generation"', b' "generation"'),
        lambda raw: raw.replace(b"g000001", b"g000009"),
        lambda raw: raw.replace(b"g000001-" + A.encode(), b"g000001-" + B.encode()),
        lambda raw: raw.replace(A.encode() + b'", "manifest', B.encode() + b'", "manifest'),
        lambda raw: raw.replace(b"g000001-" + A.encode(), b"../elsewhere"),
        lambda raw: raw.replace(b'sha256": "', b'sha256": "0'),
    ],
)
def test_a_pointer_is_what_a_save_writes_byte_for_byte(tmp_path: Path, edit: Any) -> None:
    save(tmp_path, A)
    pointer = tmp_path / "CURRENT"
    raw = pointer.read_bytes()
    assert edit(raw) != raw
    pointer.write_bytes(edit(raw))
    with pytest.raises(CheckpointDamaged):
        current(tmp_path)


def test_the_manifest_of_another_save_is_not_read(tmp_path: Path) -> None:
    """Whatever its digest is said to be."""
    import hashlib
    import json

    save(tmp_path, A)
    other = manifest(B)
    (tmp_path / f"g000001-{A}" / "manifest.json").write_bytes(other)
    with pytest.raises(CheckpointDamaged, match="expected the digest in CURRENT"):
        current(tmp_path)
    pointer = json.loads((tmp_path / "CURRENT").read_text())
    pointer["manifest_sha256"] = hashlib.sha256(other).hexdigest()
    (tmp_path / "CURRENT").write_text(json.dumps(pointer) + "\n")
    with pytest.raises(CheckpointDamaged, match=f"expected save {A}, found {B}"):
        current(tmp_path)


def test_a_generation_that_is_gone_is_damage(tmp_path: Path) -> None:
    save(tmp_path, A)
    (tmp_path / f"g000001-{A}" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match="expected the manifest that CURRENT names, found none"):
        current(tmp_path)


def test_a_file_that_another_rank_wrote_and_this_one_does_not_see(tmp_path: Path) -> None:
    saving = Saving.begin(str(tmp_path), A)
    with pytest.raises(CheckpointError, match="the directory must be one that all ranks share"):
        saving.sizes(["data-00001.safetensors"])
    saving.end()


@pytest.mark.parametrize("count", [3, 200])
def test_sizes_of_few_and_of_many_files(count: int, tmp_path: Path) -> None:
    """In the order of the names; of several that are missing the first is named, and no link is followed."""
    saving = Saving.begin(str(tmp_path / "c"), A)
    folder = tmp_path / "c" / saving.name
    names = [f"data-{number:05d}.safetensors" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(bytes(number))
    assert saving.sizes(names) == list(range(count)) and saving.sizes([]) == []
    (folder / names[1]).unlink()
    (folder / names[-1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{names[1]}: expected the file that another rank wrote, found none"):
        saving.sizes(names)
    (folder / names[1]).symlink_to(folder / names[0])
    with pytest.raises(CheckpointDamaged, match="expected a plain file"):
        saving.sizes(names)
    saving.end()
