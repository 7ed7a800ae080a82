"""What one rank checks when it saves and loads: files as others see them, replicas, cores, files that are open."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import files, reading, saving, state, writing
from fullshard.checkpoint.agreement import Heard
from fullshard.checkpoint.directory import Pointer, Saving
from fullshard.checkpoint.errors import CheckpointDamaged, CheckpointIOError
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.loading import LoadJob, LoadOptions
from fullshard.checkpoint.plan import whole
from fullshard.checkpoint.safetensors import FilePart
from fullshard.checkpoint.saving import different_replicas, snapshot
from fullshard.checkpoint.state import Leaf, Part, bytes_of, dtype_name, flatten, on_host, part_of
from fullshard.checkpoint.table import Table
from fullshard.checkpoint.writing import ChecksumThreads, spare_cores, write_file
from fullshard.comm import alone
from fullshard.peers.wait import Loss


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were synced."""
    names: list[str] = []
    original = os.fsync

    def fsync(fd: int) -> None:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


def part(value: torch.Tensor) -> Part:
    found = part_of(value)
    assert isinstance(found, Part)
    return found


# ---- saving ----------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, **tensors: torch.Tensor) -> Any:
    parts = [
        FilePart(key, dtype_name(t.dtype), t.element_size(), tuple(t.shape), whole(tuple(t.shape)))
        for key, t in tensors.items()
    ]
    held = list(tensors.values())
    with Folder.open(str(folder)) as opened:
        return write_file(opened, name, parts, lambda i: bytes_of(held[i]), "a" * 32)


def test_data_files_are_synced(tmp_path: Path, synced: list[str]) -> None:
    write(tmp_path, "data-00000.safetensors", a=torch.ones(2))
    assert synced == ["data-00000.safetensors"]
    spec = checkpoint.TensorSpec(("a",), "float32", (2,))
    with checkpoint.CheckpointWriter(tmp_path / "c", [spec]) as writer:
        synced.clear()
        writer.write("a", torch.ones(2))
        assert synced == ["data-00000.safetensors"]


def test_elements_lie_at_their_alignment_in_a_file(tmp_path: Path) -> None:
    entry, crcs = write(tmp_path, "f", a=torch.ones(3).bool(), b=torch.ones(1).double())
    data = (tmp_path / "f").read_bytes()
    table = Table.parse(data[-entry.table_nbytes :], 1 << 20, "f")
    a, b = table.find("a"), table.find("b")
    assert a and b and b.start % 8 == 0 and a.start == b.start + 8
    assert struct.unpack("<d", data[b.start :][:8]) == (1.0,)
    assert [list(a.crcs), list(b.crcs)] == [list(each) for each in crcs] and len(data) == entry.nbytes
    assert hashlib.sha256(data[-entry.table_nbytes :]).hexdigest() == entry.digest


def test_data_files_are_read_by_safetensors(tmp_path: Path) -> None:
    """The table is one of their tensors."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    write(tmp_path, "f", a=torch.arange(3), b=torch.ones(2, 2), c=torch.ones(5).bool())
    found = load_file(str(tmp_path / "f"))
    assert found.pop("__fullshard_table__").dtype is torch.uint8
    assert {key: value.tolist() for key, value in found.items()} == {
        "a": [0, 1, 2],
        "b": [[1.0, 1.0], [1.0, 1.0]],
        "c": [True] * 5,
    }


def test_a_part_of_other_bytes_than_were_announced_is_refused(tmp_path: Path) -> None:
    with Folder.open(str(tmp_path)) as opened, pytest.raises(ValueError, match="expected 8 bytes of a, found 4"):
        file_part = FilePart("a", "float32", 4, (2,), whole((2,)))
        write_file(opened, "f", [file_part], lambda i: memoryview(b"1234"), "a" * 32)


def test_a_checksum_that_cannot_be_computed_ends_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "of_blocks", lambda data, nbytes: 1 / 0)
    with ChecksumThreads(1) as threads, pytest.raises(ZeroDivisionError):
        threads.submit(memoryview(b"a")).result()


def test_a_file_that_is_shorter_than_what_was_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the rank that commits sees the file of another one: a file system may have lost its end."""
    monkeypatch.setattr(Saving, "sizes", lambda self, names: [5] * len(names))
    with pytest.raises(CheckpointIOError, match="bytes were written, the file has 5"):
        checkpoint.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    assert not checkpoint.is_complete(tmp_path / "c")


def test_a_manifest_that_nobody_can_read_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "to_bytes", lambda manifest: b'{"world": 0}')
    with pytest.raises(CheckpointDamaged):
        checkpoint.save({"n": 1}, checkpoint_id=tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointNotFound):
        checkpoint.inspect(tmp_path / "c")


def test_replicas_that_differ_are_named() -> None:
    box = "[0:2]"
    assert different_replicas({("a", box): {0: 7, 1: 7, 2: 7}, ("b", box): {1: 3}}) == []
    (said,) = different_replicas({("a", box): {0: 7, 1: 7, 2: 8}})
    assert said == "a: ranks 0 and 1 have 00000007, rank 2 has 00000008 at [0:2]"
    assert saving._digest((1, 2)) != saving._digest((2, 1)), "blocks in another order"


@pytest.mark.parametrize(
    ("local", "world", "cores", "threads"), [("8", 16, 16, 2), ("", 16, 16, 1), ("1", 1, 64, 4), ("64", 64, 16, 1)]
)
def test_ranks_of_one_machine_share_its_cores(
    local: str, world: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert spare_cores(world) == threads


def test_a_model_that_is_lost_on_a_device_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded:
        """What counts as a DTensor here, and its mesh."""

        mesh = torch.tensor([0, 1])

        @property
        def device_mesh(self) -> Any:
            return self

    monkeypatch.setattr(saving, "had_losses", {1: None})
    monkeypatch.setattr(saving, "DTensor", Sharded)
    asked: list[list[int]] = []
    lost = Loss(0, (1,), "the all-gather of layers.3 was under way")
    monkeypatch.setattr(saving, "loss_over", lambda ranks: (asked.append(ranks), lost)[1])
    monkeypatch.setattr(saving, "part_of", lambda value: part(torch.ones(1)))
    tree = flatten({})
    tree.tensors["w"] = Leaf(("w",), Sharded(), {}, "w")
    (problem,) = snapshot(tree).problems
    assert asked == [[0, 1]] and "on rank 1 the all-gather of layers.3 was under way" in problem


def test_what_a_conjugated_view_says_is_what_is_saved() -> None:
    value = torch.tensor([1 + 2j])
    assert on_host(value.conj()).view(torch.float32).tolist() == [1.0, -2.0]
    assert on_host(value.conj().imag).tolist() == [-2.0]


def test_a_local_tensor_of_another_shape_than_its_placement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        shape, mesh = (2,), torch.tensor([0, 1])

        def get_coordinate(self) -> list[int]:
            return [0]

    class Sharded(torch.Tensor):
        device_mesh: Any = Mesh()
        placements: Any = ("Shard(0)",)

        def detach(self) -> Any:
            return self

    monkeypatch.setattr(state, "DTensor", Sharded)
    monkeypatch.setattr(state, "settled", lambda tensor: tensor)
    monkeypatch.setattr(state, "cut_dim", lambda placement: 0)
    for rows, fits in ((2, True), (3, False)):
        monkeypatch.setattr(state, "local_of", lambda tensor, rows=rows: torch.ones(rows))
        found = state.place_of(torch.ones(4).as_subclass(Sharded))
        assert isinstance(found, str) is not fits, found


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Of several files."""
    specs = [checkpoint.TensorSpec((f"t{i}",), "int32", (2,)) for i in range(5)]
    with checkpoint.CheckpointWriter(tmp_path / "c", specs, {("n",): 7}, file_nbytes=8) as writer:
        for i in range(5):
            writer.write(f"t{i}", torch.full((2,), i, dtype=torch.int32))
    return tmp_path / "c"


def test_few_files_are_open_and_each_is_proven_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_OPEN", 2)
    with checkpoint.open_checkpoint(saved) as opened:
        proven: list[int] = []
        original = opened._prove
        monkeypatch.setattr(opened, "_prove", lambda file, number: (proven.append(number), original(file, number))[1])
        for _ in range(2):
            for i in range(5):
                assert opened.tensor(f"t{i}").eq(i).all()
                assert len(opened._open) <= 2
        assert proven == [0, 1, 2, 3, 4]


def test_tables_are_forgotten_when_there_are_too_many(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checkpoint.open_checkpoint(saved) as opened:
        opened.tensor("t0")
        monkeypatch.setattr(reading, "_TABLES_NBYTES", 2 * opened._tables_nbytes)
        for i in range(5):
            assert opened.tensor(f"t{i}").eq(i).all() and len(opened._tables) <= 2


def test_each_rank_proves_the_manifest_that_it_reads(saved: Path) -> None:
    """Rank 0 says which generation; what is in it may be changed, or gone."""
    job = LoadJob(str(saved), alone(), LoadOptions())
    pointer = reading_pointer(job)
    (path,) = saved.glob("g*/manifest.json")
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"value":7', b'"value":8'))
    with pytest.raises(CheckpointDamaged, match="expected the digest in CURRENT"):
        job._match_all({"n": 0}, pointer)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match="expected the manifest that CURRENT names"):
        job._match_all({"n": 0}, pointer)


def reading_pointer(job: LoadJob) -> Pointer:
    return Pointer(*job._read_pointer(Heard([], [], b""))["pointer"])


def test_of_tied_weights_one_name_is_enough(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    checkpoint.save({"m": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "c")
    checkpoint.load({"m": {"a": weight, "b": weight.detach()}}, checkpoint_id=tmp_path / "c")
    assert weight.eq(1).all()
    with pytest.raises(checkpoint.CheckpointMismatch, match="missing: m.b"):
        checkpoint.load({"m": {"a": weight, "b": torch.zeros(3)}}, checkpoint_id=tmp_path / "c")


def test_a_dict_of_the_program_s_own_kind_stays_one(tmp_path: Path) -> None:
    from collections import Counter

    checkpoint.save({"seen": Counter({1: 2})}, checkpoint_id=tmp_path / "c")
    mine: Any = Counter({3: 4})
    found = {"seen": mine}
    checkpoint.load(found, checkpoint_id=tmp_path / "c")
    assert found["seen"] is mine and mine == Counter({1: 2})


def test_what_an_optimizer_prepares_when_it_is_built_is_kept_for_parameters_that_were_frozen() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    _, stored = checkpoint.get_state_dict(model, torch.optim.Adagrad([model.weight]))
    other = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    checkpoint.set_state_dict(model, other, optim_state_dict=stored, allow_missing=["bias"])
    assert other.state[model.bias]["sum"].eq(0.5).all() and other.state[model.weight]["sum"].eq(0).all()


def test_the_manifest_s_digest_may_come_from_elsewhere(saved: Path) -> None:
    pointer = json.loads((saved / "CURRENT").read_text())
    data = (saved / pointer["generation"] / "manifest.json").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert checkpoint.inspect(saved, manifest_sha256=digest.upper()).world == 1
    with pytest.raises(CheckpointDamaged, match="requested digest"):
        checkpoint.inspect(saved, manifest_sha256="0" * 64)
