"""Saves of several hosts: by way of their disks, of which what a crash left is finished, and to one directory of all.
The newest checkpoint is the same on all ranks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint import limits, local_first, saving, store
from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.errors import CheckpointError, CheckpointIOError
from fullshard.checkpoint.files import Folder, WriteFile
from fullshard.train.config import CheckpointKeys
from fullshard.train.folder import Checkpoints
from tests.harness.bucket import Request, Requests
from tests.harness.threads import run_ranks
from tests.threads.test_checkpoint_buckets import RUN, STEP, named, no_pauses, points, requests, save, state, version_of

__all__ = ["no_pauses", "requests"]


def save_by_disk(version: int, local: Path, step: int = 1, **more: Any) -> str:
    url = f"{RUN}/step-{step}"
    found: str = checkpoint.async_save(state(version), checkpoint_id=url, local=local, **more).result()
    return found


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def failing(requests: Requests, name: str) -> None:
    """From now on what is written as `name` is refused."""

    def fault(request: Request) -> None:
        if request.kind == "put" and name in request.path:
            raise PermissionError("Access Denied")

    requests.fault = fault


def test_files_are_on_the_disk_before_they_are_in_the_store(requests: Requests, tmp_path: Path) -> None:
    seen: list[tuple[list[str], list[str]]] = []
    requests.fault = lambda one: seen.append((named(requests), files(tmp_path))) if "data-" in one.path else None
    told: list[tuple[int, int]] = []
    save_by_disk(1, tmp_path, progress=lambda *now: told.append(now))
    ((there, here),) = seen
    assert there == ["step-1/g000001/manifest.json"] and here[0].endswith("/data-00000.safetensors")
    assert version_of() == 1 and files(tmp_path) == [] and os.listdir(tmp_path) == []
    assert told and told[-1][0] == told[-1][1]


def test_a_crash_at_any_request_leaves_the_older_or_what_can_be_finished(requests: Requests, tmp_path: Path) -> None:
    def prepare() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save(1)

    outcomes, announced = [], []
    for request, _ in points(requests, lambda: save_by_disk(2, tmp_path, 2), prepare):
        assert checkpoint.latest(RUN) in (f"{RUN}/step-1", f"{RUN}/step-2")
        on_disk = bool(files(tmp_path))
        newest = checkpoint.recover(RUN, local=tmp_path)
        outcomes.append(version_of(str(newest)))
        announced.append(any("step-2" in name and "manifest" in name for name in named(requests)) or on_disk)
        assert newest == checkpoint.latest(RUN)
        assert files(tmp_path) == [] or outcomes[-1] == 1, request
    # From the moment on that the manifest is there it is the newest, though no file was sent.
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}
    sent = [request.path.rpartition("/")[2] for request in requests.made]
    assert outcomes.count(2) >= 6 and any(name.startswith("data-") for name in sent)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_hosts_finish_together_what_each_has(world: int, requests: Requests, tmp_path: Path, no_pauses: None) -> None:
    """Each of two ranks has a disk of its own. The second cannot send; then any number of ranks finds both disks."""
    save(1, f"{RUN}/step-1")
    failing(requests, "data-00001")

    def saved(rank: int) -> None:
        with pytest.raises(CheckpointIOError, match="no permission"):
            save_by_disk(2, tmp_path / str(rank), 2)
        assert version_of(f"{RUN}/step-1") == 1

    run_ranks(2, saved)
    assert version_of(f"{RUN}/step-2") is None and checkpoint.latest(RUN) == f"{RUN}/step-1"
    requests.fault = lambda _: None
    if world == 1:
        shutil.copytree(tmp_path / "1", tmp_path / "0", dirs_exist_ok=True)
    sent = len(requests.made)

    def recovered(rank: int) -> Any:
        return checkpoint.recover(RUN, local=tmp_path / str(rank))

    assert run_ranks(world, recovered) == [f"{RUN}/step-2"] * world
    # Only what lacked was sent.
    names = [one.path.rpartition("/")[2] for one in requests.made[sent:] if one.kind == "put"]
    assert names == ["data-00001.safetensors"]
    assert version_of(f"{RUN}/step-2") == 2
    assert all(files(tmp_path / str(rank)) == [] for rank in range(world))


def test_a_lost_disk_leaves_the_older_one(
    requests: Requests, tmp_path: Path, no_pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    save(1)
    failing(requests, "data-0000")

    def saved(rank: int) -> None:
        with pytest.raises(CheckpointIOError):
            save_by_disk(2, tmp_path / str(rank), 2)

    run_ranks(2, saved)
    requests.fault = lambda _: None
    shutil.rmtree(tmp_path / "1")
    (data,) = (tmp_path / "0").rglob("data-*")
    with caplog.at_level(logging.WARNING, "fullshard"):
        found = run_ranks(2, lambda rank: checkpoint.recover(RUN, local=tmp_path / str(rank)))
    assert found == [f"{RUN}/step-1"] * 2 and version_of() == 1
    assert "1 file(s) are neither in the store nor on a disk of ranks 0 and 1, such as data-00001" in caplog.text
    # A file that was cut is no file.
    data.write_bytes(data.read_bytes()[:-1])
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fullshard"):
        assert checkpoint.recover(RUN, local=tmp_path / "0", no_dist=True) == f"{RUN}/step-1"
    assert "2 file(s) are neither" in caplog.text
    # The next save finds its way, and clears both.
    run_ranks(2, lambda rank: save_by_disk(3, tmp_path / str(rank), 2))
    assert version_of(f"{RUN}/step-2") == 3 and files(tmp_path) == []
    assert len([name for name in named(requests) if name.startswith("step-2")]) == 4


def test_disks_keep_one_save_and_none_that_nobody_can_finish(
    requests: Requests, tmp_path: Path, no_pauses: None
) -> None:
    failing(requests, "data-0")
    for step in (1, 2, 3):
        with pytest.raises(CheckpointIOError):
            save_by_disk(step, tmp_path, step)
        assert {name.split("/")[0] for name in files(tmp_path)} == {f"step-{step}"}
    failing(requests, "manifest")
    with pytest.raises(CheckpointIOError):
        save_by_disk(4, tmp_path, 4)
    assert {name.split("/")[0] for name in files(tmp_path)} == {"step-3"}
    requests.fault = lambda _: None
    assert checkpoint.recover(RUN, local=tmp_path) == f"{RUN}/step-3"
    assert version_of(f"{RUN}/step-3") == 3 and files(tmp_path) == []


def test_the_newest_of_a_directory_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    assert checkpoint.recover(tmp_path) is None
    checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-7")
    assert run_ranks(2, lambda rank: checkpoint.recover(tmp_path)) == [tmp_path / "step-7"] * 2
    with pytest.raises(TypeError, match="local: expected a directory, for a save to an object store"):
        checkpoint.async_save({"n": 1}, checkpoint_id=tmp_path / "step-8", local=tmp_path / "scratch")


def test_an_upload_in_parts_reads_the_disk_in_pieces(
    requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PART_NBYTES", 300)
    monkeypatch.setattr(local_first, "_PIECE_NBYTES", 70)
    save_by_disk(1, tmp_path)
    assert version_of() == 1 and requests.count("upload_part") >= 1


def test_ranks_of_a_host_share_the_work_and_other_names_are_cleared(
    requests: Requests, tmp_path: Path, no_pauses: None
) -> None:
    """All four ranks see one disk. A name without a number is cleared too."""
    failing(requests, "data-")

    def saved(rank: int, url: str = f"{RUN}/step-2") -> None:
        with pytest.raises(CheckpointIOError, match="no permission"):
            checkpoint.async_save(state(2, 8), checkpoint_id=url, local=tmp_path).result()

    run_ranks(4, saved)
    requests.fault = lambda _: None
    senders: list[tuple[str, str]] = []
    upload = local_first.upload

    def noting(folder: Folder, objects: Folder, name: str, **more: Any) -> None:
        senders.append((threading.current_thread().name, name))
        upload(folder, objects, name, **more)

    local_first.upload = noting
    try:
        run_ranks(4, lambda rank: checkpoint.recover(RUN, local=tmp_path))
    finally:
        local_first.upload = upload
    assert len(senders) == 4 and len({name for name, _ in senders}) == 4 and files(tmp_path) == []
    checkpoint.async_save({"n": 1}, checkpoint_id=f"{RUN}/last", local=tmp_path, no_dist=True).result()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("has", [0, 1])
def test_a_save_by_the_disks_of_some_ranks_is_refused(has: int, requests: Requests, tmp_path: Path) -> None:
    def saved(rank: int) -> None:
        with pytest.raises(CheckpointError, match="rank 1: .*expected `local` on all ranks or on none, found") as found:
            save_by_disk(2, tmp_path) if rank == has else save(2)
        assert "a directory on the first and none here" in str(found.value) or has

    run_ranks(2, saved)
    assert version_of() is None and os.listdir(tmp_path) == [] and named(requests) == []


def test_a_rank_without_a_disk_takes_part(requests: Requests, tmp_path: Path, no_pauses: None) -> None:
    """A host that was added has none, or was given none."""
    failing(requests, "data-00001")

    def saved(rank: int) -> None:
        with pytest.raises(CheckpointIOError):
            save_by_disk(2, tmp_path / str(rank), 2)

    run_ranks(2, saved)
    requests.fault = lambda _: None
    found = run_ranks(3, lambda rank: checkpoint.recover(RUN, local=tmp_path / str(rank) if rank else None))
    assert found == [f"{RUN}/step-2"] * 3 and version_of(f"{RUN}/step-2") == 2


def test_of_two_killed_saves_the_one_whose_files_are_there_is_finished(
    requests: Requests, tmp_path: Path, no_pauses: None
) -> None:
    """Both of one step, with one number; the disk of one of them is gone."""
    names = []
    for version in (2, 3, 4):
        failing(requests, "data-")
        with pytest.raises(CheckpointIOError):
            save_by_disk(version, tmp_path / str(version), 2)
        requests.fault = lambda _: None
        names += [path.name for path in (tmp_path / str(version) / "step-2").iterdir()]
    middle = sorted(names)[1]
    version = 2 + names.index(middle)
    assert checkpoint.recover(RUN, local=tmp_path / str(version)) == f"{RUN}/step-2"
    assert version_of(f"{RUN}/step-2") == version
    assert [name for name in named(requests) if name.endswith("manifest.json")] == ["step-2/g000001/manifest.json"]


def test_what_another_save_overtook_is_not_finished(requests: Requests, tmp_path: Path, no_pauses: None) -> None:
    """Also where that one is damaged: an older step is the newest whole one."""
    save(1)
    failing(requests, "data-")
    with pytest.raises(CheckpointIOError):
        save_by_disk(2, tmp_path, 2)
    requests.fault = lambda _: None
    left = {name: data for name, data in requests.objects.items() if "step-2" in name}
    save(3, f"{RUN}/step-2")
    save(4, f"{RUN}/step-2")
    requests.objects |= left
    name = next(name for name in requests.objects if "g000002" in name and "data-" in name)
    requests.objects[name] = requests.objects[name][:-1]
    assert checkpoint.recover(RUN, local=tmp_path) == STEP


def test_a_full_disk_is_an_error_of_all_ranks(
    requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    write = WriteFile.write

    def full(self: WriteFile, buffer: memoryview) -> None:
        if "data-00001" in self.path and type(self) is WriteFile:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, buffer)

    monkeypatch.setattr(WriteFile, "write", full)

    def saved(rank: int) -> None:
        with pytest.raises(CheckpointIOError, match=f"rank 1: writing {tmp_path}.*data-00001.*No space left") as found:
            save_by_disk(2, tmp_path, 2)
        assert found.value.errno == errno.ENOSPC

    run_ranks(2, saved)
    assert files(tmp_path) == [] and named(requests, "b/run/step-2") == []
    assert run_ranks(2, lambda rank: checkpoint.recover(RUN, local=tmp_path)) == [STEP] * 2


def test_a_lost_rank_leaves_what_can_be_finished(
    requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when it has answered: the first rank puts the manifest into the store, and the others cannot know."""
    monkeypatch.setattr(
        saving, "agree", lambda *given: lost(agree(*given)) if given[3].__name__ == "_commit" else agree(*given)
    )

    def lost(_: Any) -> Any:
        raise CheckpointError("expected all ranks, lost one") from RuntimeError("connection closed")

    with pytest.raises(CheckpointError, match="lost one"):
        save_by_disk(2, tmp_path, 2)
    assert len(files(tmp_path)) == 1
    monkeypatch.undo()
    assert checkpoint.recover(RUN, local=tmp_path) == f"{RUN}/step-2" and version_of(f"{RUN}/step-2") == 2


def test_a_trainer_saves_by_way_of_a_disk(requests: Requests, tmp_path: Path, no_pauses: None) -> None:
    keys = CheckpointKeys(folder=RUN, local=str(tmp_path / "disk"))
    alone: Any = SimpleNamespace(rank=0, size=1, largest=lambda values: values)

    def made() -> tuple[torch.nn.Module, Checkpoints]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, Checkpoints(tmp_path / "run", keys, alone, model, optimizer, {"seed": 0})

    model, checkpoints = made()
    assert checkpoints.resume() == (0, None)
    for step in (1, 2):
        torch.nn.init.constant_(model.weight, step)
        checkpoints.save(step, wait=step == 2)
    assert checkpoint.latest(RUN) == f"{RUN}/step-2" and files(tmp_path) == []
    failing(requests, "data-")
    torch.nn.init.constant_(model.weight, 3)
    with pytest.raises(CheckpointIOError):
        checkpoints.save(3, wait=True)
    requests.fault = lambda _: None
    model, checkpoints = made()
    assert checkpoints.resume() == (3, f"{RUN}/step-3") and (model.weight == 3).all()
    assert files(tmp_path) == []


# ---- a directory that not all hosts see ----------------------------------------------------------------------

HOSTS = {"rank 0": "alpha", "rank 1": "alpha", "rank 2": "beta", "rank 3": "beta", "rank 4": "gamma"}


class Cluster:
    """Three hosts, and which ranks looked for what another one made. `blind`: the hosts that see none of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *blind: str) -> None:
        self.looked: list[str] = []
        self.told = 0
        here = lambda: HOSTS[threading.current_thread().name]  # noqa: E731

        def view() -> str:
            self.told += 1
            return here()

        def sees(path: str, name: str) -> str | None:
            assert os.path.isdir(f"{path}/{name}")
            self.looked.append(threading.current_thread().name)
            return "does not see it" if here() in blind else None

        monkeypatch.setattr(limits, "view", view)
        monkeypatch.setattr(limits, "host", here)
        monkeypatch.setattr(limits, "sees", sees)


@pytest.mark.threads_only(reason="hosts are imitated in this process")
def test_one_rank_of_each_other_host_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)

    def rank_main(rank: int) -> None:
        for step in (1, 2):
            checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")

    run_ranks(5, rank_main)
    assert sorted(cluster.looked) == ["rank 2", "rank 2", "rank 4", "rank 4"], "once for each save"
    assert cluster.told == 5, "where they are is asked for once"


@pytest.mark.threads_only(reason="hosts are imitated in this process")
@pytest.mark.parametrize("blind", [("beta",), ("beta", "gamma")])
def test_hosts_that_do_not_see_it_are_named_and_nothing_is_written(
    blind: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(monkeypatch, *blind)
    written: list[int] = []
    original = os.write

    def write(fd: int, data: memoryview) -> int:
        written.append(len(data))
        return original(fd, data)

    def rank_main(rank: int) -> str:
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.save({"w": torch.ones(8), "n": 1}, checkpoint_id=tmp_path / "c")
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        texts = run_ranks(5, rank_main)
    assert len(set(texts)) == 1 and "host alpha made" in texts[0] and "the directory must be one that all" in texts[0]
    assert all((f"host {name} does not see it" in texts[0]) == (name in blind) for name in ("beta", "gamma"))
    assert not written and os.listdir(tmp_path / "c") == ["LOCK"]
