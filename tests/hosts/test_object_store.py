"""Checkpoints in a bucket of an S3 server, by processes: conditional writes, uploads in parts, faults of the server,
killed savers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import checkpoint
from fullshard.checkpoint import bucket, store
from fullshard.checkpoint.errors import CheckpointIOError, CheckpointNotFound
from fullshard.checkpoint.store import Store
from tests.harness.forked import run_forks
from tests.harness.killed import DONE, RAISED, Kill, run_killed
from tests.procs.test_train_cli import children_of

pytestmark = [pytest.mark.slow, pytest.mark.hang_after(900)]
SHAPE = (5, 3)
MIB = 1 << 20
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "right", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(autouse=True, scope="module")
def server() -> Iterator[str]:
    """The address of a server with a bucket."""
    for package in ("s3fs", "moto", "flask_cors"):
        if find_spec(package) is None:
            pytest.skip(f"an S3 server and its client need {package} (make hosts-setup)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("s3_server.py")), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    patch = pytest.MonkeyPatch()
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}.items():
        patch.setenv(name, value)
    try:
        for _ in range(300):
            try:
                counts(address)
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield address
    finally:
        process.kill()
        process.wait()
        patch.undo()


@pytest.fixture
def run(server: str) -> Iterator[str]:
    """An unused folder of the bucket, and a server without faults before and after."""
    answers(server, "none")
    bucket._proven.clear()
    yield f"s3://bucket/{os.urandom(4).hex()}"
    answers(server, "none")


def ranks(world: int, fn: Any) -> list[Any]:
    """`fn(rank)` on forks, which make clients of their own."""
    return run_forks(world, fn, (), 300.0)


def answers(server: str, kind: str, every: int = 1) -> None:
    with urllib.request.urlopen(f"{server}/-/answers?kind={kind}&every={every}", timeout=30) as answer:
        answer.read()


def new_clients() -> None:
    """Forget the clients of this process; those that a fork inherited must not end in it."""
    for key in [key for key in store._systems if key[0] == os.getpid()]:
        del store._systems[key]


def counts(server: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{server}/-/counts", timeout=30) as answer:
        found: dict[str, int] = json.loads(answer.read())
        return found


def state(version: int, rows: int = 5) -> dict[str, Any]:
    full = torch.full((rows, 3), float(version))
    sharded = full
    if dist.is_initialized():
        sharded = distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"model": {"w": sharded, "b": torch.full((7,), version)}, "step": version}


def version_of(url: str) -> int | None:
    found = state(0)
    try:
        checkpoint.load(found, checkpoint_id=url, no_dist=True)
    except CheckpointNotFound:
        return None
    step = int(found["step"])
    assert (found["model"]["w"] == step).all() and (found["model"]["b"] == step).all(), f"a mixture: {found}"
    checkpoint.verify(url)
    return step


def test_of_many_conditional_writes_one_succeeds(run: str) -> None:
    won: list[int] = []
    here = Store(run)

    def write(number: int) -> None:
        if here.put_if_absent("CURRENT-000001", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and here.read("CURRENT-000001", 0, 9) == b"%d" % won[0]


def test_parts_and_ranges_over_processes(run: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 MiB by two processes, each in parts of 8; read by three, each its share."""
    rows = 80 * MIB // 12
    monkeypatch.setattr(store, "PART_NBYTES", 8 * MIB)
    url = f"{run}/step-1"

    def saved(rank: int) -> int:
        told: list[int] = []
        checkpoint.save(state(1, rows), checkpoint_id=url, progress=lambda done, total: told.append(done))
        assert told[-1] >= 40 * MIB - 24
        return len(told)

    counts(server)
    # Five parts, and the table of checksums.
    assert ranks(2, saved) == [6, 6]
    # Of the first rank also the manifest and the pointer, and two to see whether it may write there.
    assert counts(server)["PUT"] == 2 * 6 + 2 + 2

    def loaded(rank: int) -> int:
        reads: list[int] = []
        read = Store.read

        def counting(self: Store, name: str, start: int, stop: int) -> bytes:
            found = read(self, name, start, stop)
            reads.append(len(found) if "data-" in name else 0)
            return found

        Store.read = counting  # type: ignore[method-assign]
        try:
            found = state(0, rows)
            checkpoint.load(found, checkpoint_id=url)
            assert (found["model"]["w"].to_local() == 1).all()
        finally:
            Store.read = read  # type: ignore[method-assign]
        return sum(reads)

    for nbytes in ranks(3, loaded):
        # Its third, in whole blocks of a MiB at both ends of each file, and headers and tables.
        assert nbytes <= 80 * MIB / 3 + 5 * MIB


@pytest.mark.parametrize("kind", ["500", "503"])
def test_a_server_that_fails_now_and_then(kind: str, run: str, server: str) -> None:
    answers(server, kind, every=3)
    ranks(2, lambda rank: checkpoint.save(state(1), checkpoint_id=f"{run}/step-1"))
    assert version_of(f"{run}/step-1") == 1


def test_a_server_that_does_not_answer_is_an_error_of_all_ranks(
    run: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank_main(rank: int) -> str:
        store.ATTEMPTS, store._S3_CONFIG["read_timeout"] = 2, 1
        new_clients()
        try:
            with pytest.raises(CheckpointIOError, match=r"sent 2 times") as found:
                checkpoint.save(state(1), checkpoint_id=f"{run}/step-1")
            return str(found.value)
        finally:
            store.ATTEMPTS, store._S3_CONFIG["read_timeout"] = 6, 15
            new_clients()

    answers(server, "slow")
    assert all("imeout" in text or "imed out" in text for text in ranks(2, rank_main))


def test_a_bucket_that_vanishes_in_a_save(run: str, server: str) -> None:
    url = f"{run}/step-1"
    ranks(2, lambda rank: checkpoint.save(state(1), checkpoint_id=url))

    def rank_main(rank: int) -> None:
        from fullshard.checkpoint.saving import SaveJob

        write = SaveJob._write

        def gone(self: SaveJob, begun: Any) -> Any:
            if rank == 0:
                answers(server, "gone")
            return write(self, begun)

        SaveJob._write = gone  # type: ignore[method-assign]
        begun = time.monotonic()
        try:
            with pytest.raises(CheckpointIOError, match="no such bucket"):
                checkpoint.save(state(2), checkpoint_id=url)
        finally:
            SaveJob._write = write  # type: ignore[method-assign]
        assert time.monotonic() - begun < 60

    ranks(2, rank_main)
    answers(server, "none")
    assert version_of(url) == 1


def test_wrong_credentials_and_no_bucket_are_one_line(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_line(url: str) -> str:
        new_clients()
        with pytest.raises(CheckpointIOError) as found:
            checkpoint.save(state(1), checkpoint_id=url)
        assert "\n" not in str(found.value)
        return str(found.value)

    assert "no such bucket" in first_line("s3://none-of-that-name/run/step-1")
    with pytest.raises(CheckpointIOError, match="no such bucket"):
        checkpoint.latest("s3://none-of-that-name/run")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    assert "no permission: The AWS Access Key Id you provided does not exist" in first_line(f"{run}/step-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "no credentials" in first_line(f"{run}/step-1")
    new_clients()


def test_retention_removes_what_killed_savers_left(run: str) -> None:
    for step in (1, 2, 3):
        checkpoint.save(state(step), checkpoint_id=f"{run}/step-{step}", metrics={"loss": step})
    here = Store(run)
    here.put("step-1/g000002-" + "0" * 32 + "/data-00000.safetensors", b"1")
    unfinished = here.multipart("create_multipart_upload", "step-2/g000002-" + "0" * 32 + "/data-00000.safetensors")
    assert [upload for _, upload in here.uploads()] == [unfinished["UploadId"]]
    assert checkpoint.retain(run, keep_last=1) == [f"{run}/step-1", f"{run}/step-2"]
    assert here.uploads() == [] and list(here.names()) == ["step-3"]
    assert checkpoint.set_aside(f"{run}/step-3") == f"{run}/step-3.damaged"
    assert version_of(f"{run}/step-3.damaged") == 3 and list(here.names()) == ["step-3.damaged"]


def saving(url: str, fatal: int | None, rank_of: int, count_in: Path) -> Any:
    """A save on a fork, which ends before the request `fatal` of rank `rank_of`."""

    def save(rank: int) -> None:
        new_clients()
        bucket._proven.add((os.getpid(), url.rpartition("/")[0]))
        store.PART_NBYTES = 5 * MIB
        attempt, made = Store._try, [0]

        def counting(self: Store, *arguments: Any) -> Any:
            if rank == rank_of and made[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            made[0] += 1
            return attempt(self, *arguments)

        Store._try = counting  # type: ignore[method-assign]
        checkpoint.save(state(2, 2 * MIB), checkpoint_id=url)
        (count_in / str(rank)).write_text(str(made[0]))

    return save


def test_a_saver_killed_at_each_request_leaves_old_or_new(run: str, tmp_path: Path) -> None:
    url = f"{run}/step-1"
    rows = 2 * MIB

    def loads() -> int:
        found = state(0, rows)
        checkpoint.load(found, checkpoint_id=url, no_dist=True)
        assert (found["model"]["w"] == found["step"]).all()
        return int(found["step"])

    assert run_killed(2, saving(url, None, 0, tmp_path), None) == [DONE, DONE]
    numbers = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert numbers[0] >= 10 and numbers[1] >= 4
    for rank in (0, 1):
        outcomes = []
        for fatal in range(numbers[rank]):
            checkpoint.save(state(1, rows), checkpoint_id=url)
            statuses = run_killed(2, saving(url, fatal, rank, tmp_path), Kill(rank), timeout=120)
            assert statuses[rank] == -signal.SIGKILL and statuses[1 - rank] in (DONE, RAISED), statuses
            outcomes.append(loads())
        assert set(outcomes) <= {1, 2} and outcomes == sorted(outcomes)
        assert (2 in outcomes) == (rank == 0)
    checkpoint.save(state(3, rows), checkpoint_id=url)
    checkpoint.save(state(4, rows), checkpoint_id=f"{run}/step-2")
    assert checkpoint.retain(run, keep_last=1) == [url] and list(Store(run).names()) == ["step-2"]
    assert Store(run).uploads() == []


LAST_WORDS = """
import torch
from fullshard import checkpoint
from fullshard.checkpoint import store

store.PART_NBYTES = 5 << 20
checkpoint.async_save({"w": torch.ones(30 << 18)}, checkpoint_id=URL, no_dist=True)
"""


def test_a_save_in_the_background_survives_the_end_of_its_process(run: str, server: str) -> None:
    """By the name of the server, which is looked up in an executor of the interpreter for each new connection."""
    environment = {**os.environ, "AWS_ENDPOINT_URL": server.replace("127.0.0.1", "localhost")}
    program = LAST_WORDS.replace("URL", repr(f"{run}/step-1"))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert checkpoint.latest(run) == f"{run}/step-1"


# ---- the trainer -----------------------------------------------------------------------------------------------------

TRAINING = {
    "training.steps": 24,
    "training.global_batch": 12,
    "training.micro_batch": 2,
    "training.sequence_length": 16,
    "model.layers": 1,
    "model.dim": 16,
    "model.heads": 2,
    "model.kv_heads": 1,
    "metrics.eval_every": 100,
    "metrics.eval_windows": 2,
    "checkpoint.every": 3,
    "sample.tokens": 0,
}


def train(run_dir: Path, world: int, **more: object) -> subprocess.Popen[str]:
    keys = {**TRAINING, "run.dir": run_dir, **{name.replace("__", "."): value for name, value in more.items()}}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "fullshard", "train", *sets, "--nproc", str(world)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def losses(run_dir: Path) -> dict[int, float]:
    found = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {one["step"]: one["loss"] for one in found}


def test_a_run_that_is_killed_continues_from_the_bucket_in_a_new_folder(run: str, tmp_path: Path) -> None:
    """All its processes end, and its folder with the machine; another number of processes continues elsewhere."""
    straight = train(tmp_path / "straight", 2)
    said, _ = straight.communicate(timeout=300)
    assert straight.returncode == 0, said
    first = train(tmp_path / "first", 2, checkpoint__folder=run)
    deadline = time.monotonic() + 300
    while len(checkpoint.list_checkpoints(run)) < 2 and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    for pid in (first.pid, *children_of(first)):
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    whole = checkpoint.latest(run)
    assert whole is not None
    second = train(tmp_path / "second", 3, checkpoint__folder=run)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert (
        f"continuing after step {str(whole).rpartition('-')[2]}, from {whole}" in said and "checkpoints: s3://" in said
    )
    found, expected = losses(tmp_path / "second"), losses(tmp_path / "straight")
    assert sorted(found) == [step for step in expected if step > int(str(whole).rpartition("-")[2])]
    assert [found[step] for step in found] == pytest.approx([expected[step] for step in found], rel=1e-5)
    assert [one.step for one in checkpoint.list_checkpoints(run)] == [21, 24]
    # Nothing is left to do in it.
    third = train(tmp_path / "third", 2, checkpoint__folder=run)
    said, _ = third.communicate(timeout=300)
    assert third.returncode == 2 and "its run is complete after 24 steps" in said


def test_a_trainer_with_wrong_credentials_ends_with_one_line(run: str, tmp_path: Path) -> None:
    patch = pytest.MonkeyPatch()
    with patch.context() as inside:
        inside.setenv("AWS_ACCESS_KEY_ID", "wrong")
        process = train(tmp_path / "run", 2, checkpoint__folder=run)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and said.count("\n") == 1
    assert "checkpoint.folder" in said and "no permission" in said and "look at the credentials" in said
    assert not (tmp_path / "run").exists()
