"""Checkpoints in an object store: whole or invisible there too, whatever fails or ends. No more is read than needed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import checkpoint
from fullshard.checkpoint import bucket, store
from fullshard.checkpoint.errors import (
    CheckpointBusy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFound,
)
from fullshard.checkpoint.state import dtype_of
from fullshard.checkpoint.store import Store
from fullshard.cli import main
from fullshard.layout import whole
from fullshard.train.config import CheckpointKeys, ConfigError, load_config
from fullshard.train.folder import Checkpoints, Line, make_run_dir
from tests.harness.bucket import Request, Requests, buckets
from tests.harness.moments import Meeting
from tests.harness.threads import run_ranks

RUN = "bucket://b/run"
STEP = f"{RUN}/step-1"
MIB = 1 << 20


@pytest.fixture
def requests() -> Iterator[Requests]:
    bucket._proven.clear()
    with buckets() as found:
        yield found


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FIRST_PAUSE_SECONDS", 0.0)


def state(version: int, rows: int = 5) -> dict[str, Any]:
    full = torch.full((rows, 3), float(version))
    sharded = full
    if dist.is_initialized():
        sharded = distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"m": {"w": sharded, "b": torch.full((7,), version)}, "step": version}


def save(version: int, url: str = STEP) -> str:
    return checkpoint.save(state(version), checkpoint_id=url)


def version_of(url: str = STEP) -> int | None:
    """The version that loads, whole; None when there is none."""
    found = state(0)
    try:
        checkpoint.load(found, checkpoint_id=url, no_dist=True)
    except CheckpointNotFound:
        return None
    step = int(found["step"])
    assert (found["m"]["w"] == step).all() and (found["m"]["b"] == step).all(), f"a mixture: {found}"
    checkpoint.verify(url)
    return step


def named(requests: Requests, under: str = "b/run") -> list[str]:
    """Names with letters instead of ids of saves."""
    names = sorted(name[len(under) + 1 :] for name in requests.objects if name.startswith(f"{under}/"))
    return ["/".join(part.split("-")[0] if part[:1] == "g" else part for part in name.split("/")) for name in names]


# ---- what is there, and what is read ---------------------------------------------------------------------------------


def test_the_files_are_those_of_a_directory(requests: Requests, tmp_path: Path) -> None:
    """Copied to a directory by any tool they load there, and the other way round."""
    run_ranks(2, lambda rank: save(1))
    assert named(requests) == [
        "step-1/CURRENT-000001",
        "step-1/g000001/data-00000.safetensors",
        "step-1/g000001/data-00001.safetensors",
        "step-1/g000001/manifest.json",
    ]
    for name, data in requests.objects.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    copied = tmp_path / "b/run/step-1"
    assert version_of(str(copied)) == 1
    checkpoint.save(state(2), checkpoint_id=copied)
    requests.objects.clear()
    requests.objects |= {f"b/up/step-1/{p.relative_to(copied)}": p.read_bytes() for p in copied.glob("g*/*")}
    requests.objects["b/up/step-1/CURRENT"] = (copied / "CURRENT").read_bytes()
    assert version_of("bucket://b/up/step-1") == 2
    save(3, "bucket://b/up/step-1")
    assert named(requests, "b/up")[0] == "step-1/CURRENT-000003" and version_of("bucket://b/up/step-1") == 3
    assert checkpoint.retain(tmp_path / "b/run", keep_last=1) == []
    save(4, str(tmp_path / "b/run/step-9"))
    assert checkpoint.retain(tmp_path / "b/run", keep_last=1) == [copied] and not copied.exists()


def test_another_number_of_ranks_reads_what_it_needs(requests: Requests) -> None:
    """Counted: each byte of the tensors once over all ranks, and of files only headers and tables more."""
    rows = 4 * MIB // 12 * 12 // 12 * 4  # 16 MiB over two ranks, in blocks of a MiB

    def saved(rank: int) -> None:
        checkpoint.save(state(1, rows), checkpoint_id=STEP)

    run_ranks(2, saved)
    nbytes = sum(len(data) for name, data in requests.objects.items() if "data-" in name)
    requests.made.clear()

    def loaded(rank: int) -> None:
        found = state(0, rows)
        checkpoint.load(found, checkpoint_id=STEP)
        assert (found["m"]["w"].to_local() == 1).all() and found["step"] == 1

    run_ranks(4, loaded)
    read = [one for one in requests.made if one.kind == "get" and "data-" in one.path]
    # A block that two ranks share is read by both: one of each of four ranks' two ends.
    assert nbytes <= sum(one.nbytes for one in read) <= nbytes + 8 * MIB
    # Batches of 8 MiB, and the block in which one ends.
    assert max(one.nbytes for one in read) < 9 * MIB
    requests.made.clear()
    with checkpoint.open_checkpoint(STEP) as found:
        assert found.tensor("m.b").tolist() == [1] * 7
    assert sum(one.nbytes for one in requests.made if "data-" in one.path) < MIB


def test_requests_of_each_rank_as_the_page_counts_them(requests: Requests) -> None:
    checkpoint.save({"n": 1}, checkpoint_id=f"{RUN}/step-0", no_dist=True)
    ranks = 4

    def saved(url: str) -> None:
        checkpoint.save(state(1, 8), checkpoint_id=url)

    for step in (1, 2):  # nothing depends on what was saved before
        requests.made.clear()
        run_ranks(ranks, lambda rank, step=step: saved(f"{RUN}/step-{step}"))  # type: ignore[misc]
        counted = {kind: requests.count(kind) for kind in ("put", "put?", "list", "head", "get", "delete")}
        # A file of each rank, and the manifest. The first rank lists what is there, the files, and after the commit
        # both again; then it looks for what may go.
        assert counted == {"put": ranks + 1, "put?": 1, "list": 6, "head": 0, "get": 0, "delete": 0}
    requests.made.clear()
    run_ranks(ranks, lambda rank: checkpoint.load(state(0, 8), checkpoint_id=STEP))
    counted = {kind: requests.count(kind) for kind in ("list", "get", "head", "put")}
    # The first rank lists the names, and reads the pointer. Each reads the manifest; of its file and of that with the
    # plain tensor it asks for the size, and reads header, table and a range. Two ranges of one file are read at a time.
    files = 2 * ranks - 1
    assert counted == {"list": 1, "get": 1 + ranks + 3 * files + 1, "head": files, "put": 0}


def test_threads_that_read_one_object_ask_for_its_size_and_table_once(requests: Requests) -> None:
    """Red before: each of the two, where both began at the same moment."""
    save(1)
    requests.made.clear()
    meetings = {"head": Meeting(), "get": Meeting()}

    def meet(request: Request) -> None:
        if "data-" in request.path:
            meetings[request.kind]()

    requests.fault = meet
    with checkpoint.open_checkpoint(STEP) as found:
        entries = [found.manifest.tensors[key] for key in ("m.w", "m.b")]
        each = [(entry, whole(entry.shape), torch.empty(entry.shape, dtype=dtype_of(entry.dtype))) for entry in entries]
        found.read_each(each, threads=2)
    assert all((tensor == 1).all() for *_, tensor in each)
    # Header and table, and a range of each tensor.
    assert (requests.count("head"), sum(one.kind == "get" and "data-" in one.path for one in requests.made)) == (1, 4)


@pytest.mark.parametrize("how", ["sync", "async", "directory"])
def test_progress_of_a_save_ends_at_its_bytes(
    how: str, requests: Requests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "PART_NBYTES", 5000)
    said: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    def rank_main(rank: int) -> None:
        place = tmp_path / "c" if how == "directory" else STEP
        given: dict[str, Any] = {"checkpoint_id": place, "progress": lambda *now: said[rank].append(now)}
        if how == "async":
            checkpoint.async_save(state(1, 8000), **given).result()
        else:
            checkpoint.save(state(1, 8000), **given)

    run_ranks(2, rank_main)
    for rank, found in said.items():
        total = 4000 * 3 * 4 + (56 if rank == 0 else 0)
        assert found[-1] == (total, total) and found == sorted(found)
        # In parts, as they arrive; a directory block by block.
        assert len(found) >= (2 if how == "directory" else 9)


# ---- kills -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a process: nothing of it makes a request any more."""


def killed_before(number: int) -> Callable[[Request], None]:
    left = [number]

    def fault(_: Request) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return fault


def points(
    requests: Requests, action: Callable[[], object], prepare: Callable[[], object]
) -> Iterator[tuple[Request, bool]]:
    """Prepare, and end `action` before each of its requests in turn: the request, and whether it had committed."""
    requests.objects.clear()
    prepare()
    requests.made.clear()
    bucket._proven.clear()
    action()
    made = list(requests.made)
    for number, request in enumerate(made):
        requests.objects.clear()
        requests.uploads.clear()
        prepare()
        bucket._proven.clear()
        requests.fault = killed_before(number)
        with pytest.raises(Killed):
            action()
        requests.fault = lambda _: None
        yield request, any(is_commit(one) for one in made[:number])


@pytest.mark.parametrize("first", [True, False], ids=["first", "overwriting"])
def test_a_saver_killed_before_any_request_leaves_old_or_new(
    first: bool, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PART_NBYTES", 200)  # a file is sent in parts
    found = []
    for _, committed in points(requests, lambda: save(2), lambda: None if first else save(1)):
        found.append(version_of())
        assert (found[-1] == 2) == committed
        assert checkpoint.latest(RUN) == (None if found[-1] is None else STEP)
        # The next save finds its way, and clears what was left.
        save(3)
        assert version_of() == 3 and not requests.uploads
        # One that was killed while it tried whether it may write leaves what it wrote, of five bytes.
        left = [name for name in named(requests) if ".fullshard-" not in name]
        assert [name.rpartition("/")[2][:8] for name in left] == ["CURRENT-", "data-000", "manifest"]
    assert len(found) >= 10 and found == sorted(found, key=lambda one: one or 0)
    assert set(found) == {None if first else 1, 2}


def test_a_removal_killed_before_any_request_leaves_a_whole_one_or_none(requests: Requests) -> None:
    def prepare() -> None:
        for step in (1, 2, 3):
            save(step, f"{RUN}/step-{step}")

    found = []
    for _ in points(requests, lambda: checkpoint.retain(RUN, keep_last=1), prepare):
        found.append([version_of(f"{RUN}/step-{step}") for step in (1, 2, 3)])
        assert checkpoint.latest(RUN) == f"{RUN}/step-3"
        checkpoint.retain(RUN, keep_last=1)
        left = named(requests)
        assert {name.split("/")[0] for name in left} == {"step-3"}, left
    assert found[0] == [1, 2, 3] and found[-1] == [None, None, 3]
    assert all(one in ([1, 2, 3], [None, 2, 3], [None, None, 3]) for one in found)


def test_a_rank_that_ends_fails_the_others_and_the_former_stays(requests: Requests, no_pauses: None) -> None:
    """A bucket that vanishes: each request of one rank, and then of all, finds none."""
    run_ranks(2, lambda rank: save(1))
    before = dict(requests.objects)

    def gone(request: Request) -> None:
        if "data-" in request.path:
            raise FileNotFoundError("The specified bucket does not exist")

    requests.fault = gone

    def rank_main(rank: int) -> None:
        begun = time.monotonic()
        with pytest.raises(CheckpointIOError, match=r"no such bucket.*data-0000[01]|data-0000[01].*no such bucket"):
            save(2)
        assert time.monotonic() - begun < 60

    run_ranks(2, rank_main)
    requests.fault = lambda _: None
    assert requests.objects == before and version_of() == 1


@pytest.mark.parametrize("kind", ["put", "put?", "list", "get"])
def test_servers_that_fail_now_and_then_are_no_failure(kind: str, requests: Requests, no_pauses: None) -> None:
    failed = set[str]()

    def fault(request: Request) -> None:
        if request.kind == kind and request.path not in failed:
            failed.add(request.path)
            raise TimeoutError("The read timed out")

    requests.fault = fault
    run_ranks(2, lambda rank: save(1))
    assert version_of() == 1 and failed


def test_no_permission_is_one_line_before_anything_is_written(requests: Requests) -> None:
    def fault(request: Request) -> None:
        if request.kind.startswith("put"):
            raise PermissionError("Access Denied")

    requests.fault = fault

    def rank_main(rank: int) -> None:
        with pytest.raises(CheckpointIOError, match="no permission: Access Denied; look at the credentials") as found:
            save(1)
        assert "\n" not in str(found.value)

    run_ranks(2, rank_main)
    assert [one.kind for one in requests.made] == ["put"]


# ---- several at a time -----------------------------------------------------------------------------------------------


def interrupted(requests: Requests, when: Callable[[Request], bool], then: Callable[[], object]) -> None:
    """Do `then` in the middle of the request that `when` finds first."""

    def fault(request: Request) -> None:
        if when(request):
            requests.fault = lambda _: None
            then()

    requests.fault = fault


def is_commit(request: Request) -> bool:
    return request.kind == "put?" and "CURRENT" in request.path


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_of_two_savers_one_commits(saves: int, requests: Requests) -> None:
    """The other one is at its commit when `saves` complete, which removed the pointer that it was about to make."""
    save(1)
    interrupted(requests, is_commit, lambda: [save(10 + n) for n in range(saves)])
    with pytest.raises(CheckpointBusy, match="another save completed meanwhile"):
        save(2)
    assert version_of() == 9 + saves
    assert len([name for name in named(requests) if "CURRENT" in name]) == 1


def test_a_saver_that_two_killed_ones_overtook_does_not_commit(requests: Requests) -> None:
    """They left its files, and removed the pointer that it then writes."""
    save(1)

    def killed(kind: str, name: str, version: int) -> None:
        def fault(request: Request) -> None:
            if request.kind == kind and name in request.path:
                raise Killed

        requests.fault = fault
        with pytest.raises(Killed):
            save(version)
        requests.fault = lambda _: None

    def others() -> None:
        killed("list_multipart_uploads", "", 10)
        killed("delete", "manifest.json", 11)
        assert "step-1/CURRENT-000002" not in named(requests)

    interrupted(requests, is_commit, others)
    with pytest.raises(CheckpointBusy, match="another save completed meanwhile"):
        save(2)
    assert version_of() == 11


def test_uploads_of_killed_savers_go_and_others_stay(requests: Requests) -> None:
    save(1, f"{RUN}/step-5")
    for step in (4, 6):
        name = f"step-{step}/g000001-{step:032d}/data-00000.safetensors"
        Store(RUN).multipart("create_multipart_upload", name)
    checkpoint.retain(RUN, keep_last=1)
    assert [name.partition("/")[0] for name, _ in Store(RUN).uploads()] == ["step-6"]


def test_a_saver_that_was_overtaken_and_removed_cannot_commit(requests: Requests) -> None:
    """What is left of a killed save looks as one that still runs: its removal takes the number of its commit."""
    save(1, f"{RUN}/step-9")

    def removed() -> None:
        assert checkpoint.retain(RUN, keep_last=1) == [STEP]

    interrupted(requests, is_commit, removed)
    with pytest.raises(CheckpointError):
        save(2)
    assert version_of() is None and checkpoint.latest(RUN) == f"{RUN}/step-9"
    # Also one that is removed in the middle, when it has committed: it stays.
    interrupted(requests, lambda request: "CURRENT-000001" in request.path and request.kind == "put?", lambda: None)
    save(3)
    assert version_of() == 3


def test_a_removal_stops_where_a_saver_commits_first(requests: Requests) -> None:
    save(1, f"{RUN}/step-9")
    requests.fault = killed_before(4)
    with pytest.raises(Killed):
        save(2)
    requests.fault = lambda _: None
    (name,) = [name for name in requests.objects if "step-1/" in name]
    number = bucket.numbered_pointer(1)
    interrupted(
        requests,
        is_commit,
        lambda: requests.objects.update({f"b/run/step-1/{number}": b"the pointer of a saver that was faster"}),
    )
    assert checkpoint.retain(RUN, keep_last=1) == []
    assert name in requests.objects


def test_the_pointer_goes_before_the_files(requests: Requests) -> None:
    save(1)
    save(2, f"{RUN}/step-2")
    requests.made.clear()
    checkpoint.retain(RUN, keep_last=1)
    order = [one.path.rpartition("/")[2] for one in requests.made if one.kind in ("put?", "delete")]
    assert order == ["CURRENT-000002", "CURRENT-000001", "manifest.json", "data-00000.safetensors", "CURRENT-000002"]
    assert [one.kind for one in requests.made if "CURRENT-000002" in one.path] == ["put?", "delete"]


# ---- the other functions ---------------------------------------------------------------------------------------------


def test_all_functions_take_a_url(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        checkpoint.async_save(state(step), checkpoint_id=f"{RUN}/step-{step}", metrics={"loss": abs(step - 1)}).result()
    assert checkpoint.latest(RUN) == f"{RUN}/step-3" and checkpoint.latest("bucket://b/none") is None
    found = checkpoint.list_checkpoints(RUN)
    assert [(one.path, one.whole, one.metrics["loss"]) for one in found] == [
        (f"{RUN}/step-{step}", True, abs(step - 1)) for step in (1, 2, 3)
    ]
    assert all(one.saved_at is not None and abs(one.saved_at - time.time()) < 600 for one in found)
    assert checkpoint.is_complete(STEP) and not checkpoint.is_complete("bucket://b/none")
    assert checkpoint.inspect(STEP).world == 1
    with pytest.raises(TypeError, match="base: expected two directories"):
        checkpoint.save(state(4), checkpoint_id=f"{RUN}/step-4", base=STEP)
    assert main(["checkpoint", "list", RUN]) == 0 and "step-2" in capsys.readouterr().out
    gone = checkpoint.retain(RUN, keep_last=1, keep_best=1, metric="loss")
    assert gone == [f"{RUN}/step-2"]
    assert main(["checkpoint", "prune", RUN, "--keep-last", "1"]) == 0
    assert [one.step for one in checkpoint.list_checkpoints(RUN)] == [3]


def test_a_damaged_one_is_set_aside_and_its_name_is_free(requests: Requests) -> None:
    save(1)
    save(2)
    name = next(name for name in requests.objects if "data-" in name)
    whole = requests.objects[name]
    requests.objects[name] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(CheckpointDamaged):
        version_of()
    requests.objects[name] = whole[:-1]
    assert not checkpoint.is_complete(STEP) and checkpoint.list_checkpoints(RUN)[0].problem
    aside = checkpoint.set_aside(STEP)
    assert aside == f"{STEP}.damaged" and checkpoint.latest(RUN) is None and checkpoint.list_checkpoints(RUN) == []
    save(3)
    checkpoint.set_aside(STEP)
    assert version_of(f"{STEP}.2.damaged") == 3
    requests.objects[name.replace("step-1", "step-1.damaged")] = whole
    assert version_of(str(aside)) == 2


def test_tensor_by_tensor_and_older_schemas(requests: Requests, tmp_path: Path) -> None:
    from fullshard.checkpoint.upgrade import upgrade

    spec = [checkpoint.TensorSpec(("w",), "float32", (3, 2))]
    with checkpoint.CheckpointWriter(STEP, spec, {("step",): 7}) as writer:
        writer.write("w", torch.ones(3, 2))
    assert checkpoint.inspect(STEP).values["step"].value == 7
    with pytest.raises(ZeroDivisionError), checkpoint.CheckpointWriter(f"{RUN}/step-2", spec) as writer:
        writer.write("w", torch.ones(3, 2) / (1 // 0))
    assert checkpoint.latest(RUN) == STEP and "step-2" not in str(named(requests))
    old = Path(__file__).parents[1] / "data" / "checkpoints_0.2.0" / "2-ranks" / "checkpoint"
    shutil.copytree(old, tmp_path / "old")
    for path in (tmp_path / "old").rglob("*"):
        if path.is_file():
            requests.objects[f"b/old/{path.relative_to(tmp_path / 'old')}"] = path.read_bytes()
    assert upgrade("bucket://b/old") and not upgrade("bucket://b/old")
    assert named(requests, "b/old")[0] == "CURRENT-000002"


# ---- in the commands, in the trainer, and of a store that takes no parts -------------------------------------


def test_the_command_takes_a_url(requests: Requests, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: object, code: int = 0) -> str:
        assert main(["checkpoint", *map(str, words)]) == code
        out, errors = capsys.readouterr()
        assert errors.count("\n") <= 2
        return out + errors

    save(1)
    save(2, f"{RUN}/step-2")
    assert f"a fullshard checkpoint in {RUN}/step-2, the newest in {RUN}" in said("inspect", RUN)
    assert "m.w" in said("inspect", STEP) and "whole" in said("verify", STEP)
    assert "m.w  float32 [5, 3], 60 B, 1 part(s)" in said("show", STEP, "m.w")
    assert "step: number, 2" in said("show", RUN, "step")
    assert "already in schema" in said("upgrade", STEP)
    # Of a store to a directory, to another place of a store, and back; other formats are directories.
    said("convert", STEP, tmp_path / "ours")
    said("convert", tmp_path / "ours", f"{RUN}/step-9")
    assert version_of(str(tmp_path / "ours")) == version_of(f"{RUN}/step-9") == 1
    said("export", STEP, tmp_path / "torch.pt", "--to", "torch")
    assert torch.load(tmp_path / "torch.pt")["step"] == 1
    refused = said("export", STEP, f"{RUN}/torch.pt", "--to", "torch", code=2)
    assert "expected a directory for the format torch, found a URL" in refused
    for words in (("inspect", "bucket://b/none"), ("show", "bucket://b/none", "w"), ("list", "bucket://b/none")):
        assert "bucket://b/none: expected a" in said(*words, code=2)
    assert "expected a directory, or a URL as a string" in said("list", "bucket:/b/run", code=2)


@pytest.mark.parametrize("url", ["memory://b/run", "memory://run"])
def test_a_store_without_parts(url: str, no_pauses: None) -> None:
    """fsspec's own in memory: objects are sent whole."""
    for step in (1, 2, 3):
        run_ranks(2, lambda rank, step=step: save(step, f"{url}/step-{step}"))  # type: ignore[misc]
    assert checkpoint.latest(url) == f"{url}/step-3" and version_of(f"{url}/step-3") == 3
    save(4, f"{url}/step-3")
    assert version_of(f"{url}/step-3") == 4
    assert checkpoint.retain(url, keep_last=1) == [f"{url}/step-1", f"{url}/step-2"]
    assert [one.step for one in checkpoint.list_checkpoints(url)] == [3]
    assert checkpoint.set_aside(f"{url}/step-3") == f"{url}/step-3.damaged"
    assert version_of(f"{url}/step-3.damaged") == 4 and checkpoint.latest(url) is None


def test_a_trainer_saves_and_continues_there(requests: Requests, tmp_path: Path) -> None:
    keys = CheckpointKeys(folder=RUN, keep_last=2)
    alone: Any = SimpleNamespace(rank=0, size=1, largest=lambda values: values)

    def made(run_dir: Path) -> tuple[torch.nn.Module, Checkpoints]:
        model = torch.nn.Linear(2, 2)
        return model, Checkpoints(run_dir, keys, alone, model, torch.optim.AdamW(model.parameters()), {"seed": 0})

    model, checkpoints = made(tmp_path / "one")
    assert checkpoints.resume() == (0, None)
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, step)
        checkpoints.save(step, wait=step == 3)
    assert not (tmp_path / "one").exists()
    assert {name.split("/")[0] for name in named(requests)} == {"step-2", "step-3"}
    # A file of the newest is cut: another folder of a run continues from the one before.
    name = next(name for name in requests.objects if "step-3" in name and "data-" in name)
    requests.objects[name] = requests.objects[name][:-1]
    model, checkpoints = made(tmp_path / "two")
    assert checkpoints.resume() == (2, f"{RUN}/step-2") and (model.weight == 2).all()
    assert [path for path, _ in checkpoints.aside] == [f"{RUN}/step-3.damaged"]


def test_a_folder_of_a_run_that_cannot_be_written_is_refused_at_once(requests: Requests, tmp_path: Path) -> None:
    def make(folder: str) -> None:
        make_run_dir(load_config(None, [f"run.dir={tmp_path / 'run'}", f"checkpoint.folder={folder}"]))

    def fault(_: Request) -> None:
        raise PermissionError("Access Denied")

    make(RUN)
    bucket._proven.clear()
    requests.fault = fault
    with pytest.raises(ConfigError, match='checkpoint.folder = "bucket://b/run": .*no permission: Access Denied; look'):
        make(RUN)
    with pytest.raises(ConfigError, match="checkpoint.folder = .*expected a protocol of fsspec in nonsense://"):
        make("nonsense://b/run")
    with pytest.raises(ConfigError, match="checkpoint.folder = .*expected a directory, or a URL"):
        make("bucket:/b/run")
    with pytest.raises(ConfigError, match="run.dir = .*checkpoints alone go to a URL, checkpoint.folder"):
        load_config(None, ["run.dir=s3://b/run"])


def test_a_long_save_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = Line("step-1", said.append)
    for seconds in (1, 9, 11, 12, 20, 25):
        now[0] = seconds
        line(seconds * 10**6, 10**8)
    assert said == [
        "step-1: 11.0 of 100.0 MB of this process are saved",
        "step-1: 25.0 of 100.0 MB of this process are saved",
    ]
