"""What a checkpoint shares with earlier ones, by links of files that did not change; and which of them are kept."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import files, linking
from fullshard.checkpoint.directory import read_pointer
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.manifest import BLOCK_NBYTES
from fullshard.checkpoint.table import Table
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

WIDTH = 512  # its square, in float32, is worth a file of its own


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3, bias=False))


class Trained:
    """A model with a frozen layer, its optimizer, and values that tell the step."""

    def __init__(self, frozen: bool = True) -> None:
        self.model: Any = seeded(_layers)
        self.model[0].requires_grad_(not frozen)
        fully_shard(self.model)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = checkpoint.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def local(self, layer: int) -> torch.Tensor:
        weight: Any = self.model[layer].weight
        found: torch.Tensor = weight.to_local()
        return found

    def same_in(self, path: Path) -> bool:
        """Whether the checkpoint has what the model has now. Collective."""
        held = [self.local(layer).clone() for layer in (0, 1)]
        state = self.state()
        checkpoint.load(state, checkpoint_id=path)
        return all(torch.equal(self.local(layer), held[layer]) for layer in (0, 1))


def generation(path: Path) -> Path:
    with Folder.open(str(path)) as folder:
        pointer = read_pointer(folder)
    assert pointer is not None
    return path / pointer.generation


def shared(one: Path, other: Path) -> list[str]:
    """Names of the data files that two checkpoints share."""
    here, there = generation(one), generation(other)
    names = [path.name for path in here.glob("data-*")]
    return sorted(n for n in names if (there / n).exists() and (here / n).samefile(there / n))


FROZEN = ["data-00000-001.safetensors", "data-00001-001.safetensors"]


def test_what_is_frozen_and_unchanged_is_linked_and_each_checkpoint_is_whole(tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"step-{step}" for step in (1, 2, 3))

    def rank_main(rank: int) -> None:
        trained = Trained()
        for path, base in ((one, None), (two, one), (three, two)):
            trained.step()
            if path is three:
                checkpoint.async_save(trained.state(), checkpoint_id=path, base=base).result()
            else:
                checkpoint.save(trained.state(), checkpoint_id=path, base=base)
            assert trained.same_in(path)

    run_ranks(2, rank_main)
    assert shared(one, two) == shared(one, three) == FROZEN
    # Deletion of the base harms nothing; nor does retention, which keeps what it keeps whole.
    shutil.rmtree(one)
    assert checkpoint.retain(tmp_path, keep_last=1) == [two]
    checkpoint.verify(three)
    (listed,) = checkpoint.list_checkpoints(tmp_path)
    assert listed.whole and listed.layout == "2 ranks, 1 copy of 2 parts"


@pytest.mark.threads_only(reason="what the file system says is imitated in this process")
def test_room_is_needed_for_what_is_written_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.fstatvfs

    def nearly_full(fd: int) -> Any:
        found = list(original(fd))
        found[1:5] = 1, found[2], WIDTH * WIDTH * 4, WIDTH * WIDTH * 4
        return os.statvfs_result((*found, 0))

    def rank_main(rank: int) -> None:
        trained = Trained()
        checkpoint.save(trained.state(), checkpoint_id=tmp_path / "1")
        dist.barrier()
        if rank == 0:
            monkeypatch.setattr(os, "fstatvfs", nearly_full)
        dist.barrier()
        with pytest.raises(checkpoint.CheckpointIOError, match="expected room for"):
            checkpoint.save(trained.state(), checkpoint_id=tmp_path / "2")
        checkpoint.save(trained.state(), checkpoint_id=tmp_path / "2", base=tmp_path / "1")

    run_ranks(2, rank_main)
    assert shared(tmp_path / "1", tmp_path / "2") == FROZEN


def edited(trained: Trained) -> None:
    """One bit of one element of the frozen layer, on each rank."""
    trained.local(0).view(torch.int32)[0, 0] ^= 1


def unfrozen(trained: Trained) -> None:
    trained.model[0].requires_grad_(True)


@pytest.mark.parametrize("change", [edited, unfrozen])
def test_what_changed_is_written(change: Callable[[Trained], None], tmp_path: Path) -> None:
    """Nothing is trusted to be unchanged because it is frozen; and what is not frozen is not looked for."""

    def rank_main(rank: int) -> None:
        trained = Trained()
        checkpoint.save(trained.state(), checkpoint_id=tmp_path / "1")
        with torch.no_grad():
            change(trained)
        checkpoint.save(trained.state(), checkpoint_id=tmp_path / "2", base=tmp_path / "1")
        assert trained.same_in(tmp_path / "2")

    run_ranks(2, rank_main)
    assert shared(tmp_path / "1", tmp_path / "2") == []
    for name in "12":
        checkpoint.verify(tmp_path / name)


def damaged(at: int) -> Callable[[Path], None]:
    """One bit of the frozen files: of the header (near the beginning), of the table (from the end)."""

    def change(base: Path) -> None:
        for path in generation(base).glob("data-*-001.safetensors"):
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)

    return change


def shorter(base: Path) -> None:
    for path in generation(base).glob("data-*-001.safetensors"):
        os.truncate(path, path.stat().st_size - 1)


def of_another(base: Path) -> None:
    """The file of the other rank."""
    first, second = sorted(generation(base).glob("data-*-001.safetensors"))
    first.write_bytes(second.read_bytes())
    second.unlink()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "harm",
    [damaged(20), damaged(-3), damaged(-20), shorter, of_another],
    ids=["header", "checksum", "start", "short", "swapped"],
)
def test_a_file_that_is_not_what_a_save_would_write_is_not_linked(harm: Callable[[Path], None], tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        checkpoint.save(Trained().state(), checkpoint_id=tmp_path / "1")

    def again(rank: int) -> None:
        trained = Trained()
        checkpoint.save(trained.state(), checkpoint_id=tmp_path / "2", base=tmp_path / "1")
        assert trained.same_in(tmp_path / "2")

    run_ranks(2, rank_main)
    harm(tmp_path / "1")
    run_ranks(2, again)
    assert shared(tmp_path / "1", tmp_path / "2") == []
    checkpoint.verify(tmp_path / "2")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_where_there_are_no_links_it_is_written(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file system, one without links, too many of them, or a base that retention removed meanwhile."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)

    def rank_main(rank: int) -> None:
        trained = Trained()
        for name, base in (("1", None), ("2", tmp_path / "1")):
            checkpoint.save(trained.state(), checkpoint_id=tmp_path / name, base=base)
        assert trained.same_in(tmp_path / "2")

    run_ranks(2, rank_main)
    assert shared(tmp_path / "1", tmp_path / "2") == []


def test_a_base_of_another_layout_is_none(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        trained = Trained()
        base = tmp_path / "1" if (tmp_path / "1").exists() else None
        checkpoint.save(trained.state(), checkpoint_id=tmp_path / ("2" if base else "1"), base=base)
        assert trained.same_in(tmp_path / ("2" if base else "1"))

    run_ranks(1, rank_main)
    run_ranks(2, rank_main)
    assert shared(tmp_path / "1", tmp_path / "2") == []


def test_the_same_bits_of_another_dtype_are_another_file(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    checkpoint.save({"model": model}, checkpoint_id=tmp_path / "1")
    model.weight = nn.Parameter(model.weight.view(torch.int32), requires_grad=False)
    checkpoint.save({"model": model}, checkpoint_id=tmp_path / "2", base=tmp_path / "1")
    assert shared(tmp_path / "1", tmp_path / "2") == []
    assert checkpoint.verify(tmp_path / "2").tensors["model.weight"].dtype == "int32"


def test_a_base_that_is_no_checkpoint_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    def rank_main(rank: int) -> None:
        for base in ("none", "empty"):
            with pytest.raises(checkpoint.CheckpointNotFound):
                checkpoint.save({"n": 1}, checkpoint_id=tmp_path / "1", base=tmp_path / base)

    run_ranks(2, rank_main)
    assert not checkpoint.is_complete(tmp_path / "1")


def test_after_a_block_that_differs_the_rest_of_the_state_is_not_read() -> None:
    """It may be terabytes that changed."""
    data = [memoryview(bytes([i] * 8)) for i in range(3)]
    flat = [crc for one in data for crc in files.of_blocks(one, BLOCK_NBYTES)]
    table = Table.of(0, ["a", "b", "c"], [64, 72, 80, 88], flat, BLOCK_NBYTES).to_bytes()
    for changed, taken in ((None, [0, 1, 2]), (1, [0, 1])):
        asked: list[int] = []

        def part(i: int, changed: int | None = changed, asked: list[int] = asked) -> memoryview:
            asked.append(i)
            return memoryview(b"changed!") if i == changed else data[i]

        found = linking._checksums(table, [0, 1, 2], part, "a file")
        assert asked == taken and (found is None) == (changed is not None)


def test_few_frozen_bytes_get_no_files_of_their_own(tmp_path: Path) -> None:
    """A frozen bias alone would double the number of files."""

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        model[0].requires_grad_(False)
        checkpoint.save({"model": model}, checkpoint_id=tmp_path / "1")

    run_ranks(2, rank_main)
    assert all("-001" not in path.name for path in generation(tmp_path / "1").iterdir())


# ---- retention by all ranks together -------------------------------------------------------------------------


def test_all_ranks_get_what_the_first_one_removed(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[Path]:
        for step in (1, 2, 3):
            checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}", metrics={"loss": step + rank})
        return checkpoint.retain(tmp_path, keep_last=1, keep_best=1, metric="loss", no_dist=False)

    assert run_ranks(2, rank_main) == [[tmp_path / "step-2"]] * 2
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    assert [one.metrics for one in checkpoint.list_checkpoints(tmp_path)] == [{"loss": 1.0}, {"loss": 3.0}]


def test_ranks_that_ask_for_different_things_remove_nothing(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        for step in (1, 2, 3):
            checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")
        with pytest.raises(checkpoint.CheckpointMismatch, match=r"(?s)rank 0: .*last=1.*rank 1: .*last=2"):
            checkpoint.retain(tmp_path, keep_last=1 + rank, no_dist=False)

    run_ranks(2, rank_main)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 3


def test_what_the_system_refuses_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    for step in (1, 2):
        checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")
    monkeypatch.setattr(os, "rename", refuse)

    def rank_main(rank: int) -> None:
        with pytest.raises(checkpoint.CheckpointIOError, match="removing .*step-1: Permission denied"):
            checkpoint.retain(tmp_path, keep_last=1, no_dist=False)

    run_ranks(2, rank_main)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2
