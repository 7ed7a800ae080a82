"""`load_pretrained` without any package: names, ties, dtypes, rows, and one outcome on all ranks."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from fullshard.checkpoint.formats import HfSource, load_into
from fullshard.checkpoint.plan import Box
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks


class Tied(nn.Module):
    """Tokens (n,) to logits (n, 7): a table that is the head, too, blocks with rows that no world divides, a buffer
    that is saved and one that is not."""

    counts: Tensor

    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.scale = Scale()
        self.head = nn.Linear(5, 7, bias=False)
        self.register_buffer("counts", torch.arange(3))
        if tie:
            self.head.weight = self.table.weight

    def reset_parameters(self) -> None:
        self.counts.copy_(torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(x * self.scale.factor)
        return output


class Scale(nn.Module):
    """A buffer that no file has: its module computes it."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((5,), 2.0), persistent=False)

    def reset_parameters(self) -> None:
        self.factor.fill_(2.0)


@functools.cache
def plain(*, tie: bool = True) -> Tied:
    return seeded(lambda: Tied(tie=tie))


def on_meta(*, tie: bool = True, dtype: torch.dtype = torch.float32) -> Tied:
    with torch.device("meta"):
        model = Tied(tie=tie).to(dtype)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def weights(**options: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in plain(**options).state_dict().items()}


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tied model in two files with an index, without the name of the head."""
    tensors = {name: tensor for name, tensor in weights().items() if name != "head.weight"}
    where = {name: f"model-0000{1 + (i > 2)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tmp_path


def full(model: nn.Module) -> dict[str, Tensor]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


def assert_loaded(model: Tied, expected: Tied | None = None) -> None:
    expected = plain() if expected is None else expected
    found = full(model)
    for name, value in expected.state_dict().items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert model.head.weight is model.table.weight or expected.head.weight is not expected.table.weight
    tokens = torch.arange(7)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected(tokens))


@pytest.mark.sample(2)
@behaviour(
    "a tied model on the meta device is filled from a folder of safetensors; each rank reads its rows alone",
    area="initialisation",
    torch="none",
    reason="with torch every rank, or rank 0 for all, reads whole tensors",
)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_meta_model_is_filled_and_each_rank_reads_its_rows(
    world: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, asked = HfSource.read, [dict[str, int]() for _ in range(world)]

    def counted(self: HfSource, key: str, box: Box | None = None) -> Tensor:
        found = read(self, key, box)
        mine = asked[torch.distributed.get_rank()]
        mine[key] = mine.get(key, 0) + found.numel()
        return found

    monkeypatch.setattr(HfSource, "read", counted)

    def rank_main(rank: int) -> None:
        model = on_meta()
        optimizer = torch.optim.AdamW(model.parameters())
        assert fullshard.load_pretrained(model, folder, progress=False) is model
        held = {name: p.to_local().numel() for name, p in model.named_parameters()} | {"counts": 3}
        assert asked[rank] == {name: numel for name, numel in held.items() if numel}
        assert_loaded(model)
        # It trains on, also with an optimizer that was built before.
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()

    run_ranks(world, rank_main)


@pytest.mark.parametrize("stored", ["table", "head", "both"])
def test_one_name_of_a_tied_parameter_is_enough(stored: str, tmp_path: Path) -> None:
    tensors = weights()
    for name in ("table", "head"):
        if stored not in (name, "both"):
            del tensors[f"{name}.weight"]
    saved(tmp_path / "x", tensors)

    def rank_main(rank: int) -> None:
        fullshard.load_pretrained(model := on_meta(), tmp_path / "x" / "model.safetensors", progress=False)
        assert_loaded(model)

    run_ranks(3, rank_main)


def test_a_tied_parameter_that_is_stored_with_two_values_is_an_error(tmp_path: Path) -> None:
    tensors = weights()
    tensors["head.weight"][6, 4] += 1  # in the rows of one rank
    saved(tmp_path / "x", tensors)

    def rank_main(rank: int) -> None:
        model = on_meta()
        with pytest.raises(CheckpointMismatch, match=r"table.weight = head.weight: .* different values[\s\S]*untied"):
            fullshard.load_pretrained(model, tmp_path / "x", progress=False)
        with pytest.raises(RuntimeError, match="table.weight"):  # nothing half loaded is trained
            model(torch.arange(7))
        fullshard.load_pretrained(model := on_meta(tie=False), tmp_path / "x", progress=False)
        assert torch.equal(full(model)["head.weight"], tensors["head.weight"])

    run_ranks(3, rank_main)


def test_a_load_of_a_tied_state_takes_either_name(folder: Path) -> None:
    """`load_into`, and `checkpoint.load` of what was converted, from files without the head's name."""
    from fullshard.checkpoint.formats import convert, open_source

    with open_source(folder) as source:
        convert(source, folder / "ours")

    def rank_main(rank: int) -> None:
        for ours in (False, True):
            model = on_meta()
            fullshard.materialize(model, seed=3)
            state, _ = checkpoint.get_state_dict(model)
            if ours:
                checkpoint.load(state, checkpoint_id=folder / "ours")
            else:
                with open_source(folder) as source:
                    load_into(state, source)
            assert_loaded(model)
            model = on_meta(tie=False)
            fullshard.materialize(model, seed=3)
            with pytest.raises(CheckpointMismatch, match="missing: head.weight"):
                checkpoint.load(checkpoint.get_state_dict(model)[0], checkpoint_id=folder / "ours")

    run_ranks(3, rank_main)


def test_all_that_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    tensors = weights(tie=False)
    del tensors["blocks.0.bias"]
    tensors |= {"stranger": torch.zeros(2), "blocks.1.bias": torch.zeros(4), "counts": torch.zeros(3)}
    saved(tmp_path / "x", tensors)

    def rank_main(rank: int) -> None:
        model = on_meta(tie=False)
        with pytest.raises(CheckpointMismatch) as caught:
            fullshard.load_pretrained(model, tmp_path / "x")
        assert sorted(caught.value.problems) == [
            "dtype: counts is int64 here, float32 in the files",
            "missing: blocks.0.bias",
            "shape: blocks.1.bias is (5,) here, (4,) in the files",
            "unexpected: stranger",
        ]
        assert "allow_missing" in str(caught.value)
        assert all(p.to_local().is_meta for p in model.parameters())

    run_ranks(2, rank_main)


@pytest.mark.parametrize("world", [1, 3])
def test_what_may_be_missing_is_initialised_and_the_rest_loaded(world: int, tmp_path: Path) -> None:
    """A new head of another shape, an absent bias: the same values at any world."""
    tensors = weights(tie=False)
    del tensors["blocks.0.bias"]
    tensors |= {"stranger": torch.zeros(2), "head.weight": torch.zeros(2, 5)}
    saved(tmp_path / "x", tensors)

    def rank_main(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)  # ranks need not be seeded alike
        model = on_meta(tie=False)
        fullshard.load_pretrained(
            model,
            tmp_path / "x",
            allow_missing=["head.*", "blocks.0.bias"],
            allow_unexpected=["str*"],
            seed=4,
            progress=False,
        )
        model(torch.arange(7))
        return full(model)

    with torch.device("meta"):
        alone = Tied(tie=False)
    expected = full(fullshard.materialize(alone, seed=4))
    for found in run_ranks(world, rank_main):
        for name, value in found.items():
            fresh = name in ("head.weight", "blocks.0.bias")
            assert torch.equal(value, expected[name] if fresh else tensors[name]), name


@pytest.mark.parametrize(
    ("stored", "held"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, None)]
)
def test_parameters_keep_their_dtype(stored: torch.dtype, held: torch.dtype | None, tmp_path: Path) -> None:
    tensors = {n: t.to(stored) if t.is_floating_point() else t for n, t in weights(tie=False).items()}
    saved(tmp_path / "x", tensors)
    dtype = held or stored

    def rank_main(rank: int) -> None:
        fullshard.load_pretrained(model := on_meta(tie=False, dtype=dtype), tmp_path / "x", progress=False)
        for name, value in full(model).items():
            expected = tensors[name].to(dtype) if value.is_floating_point() else tensors[name]
            assert value.dtype == expected.dtype and torch.equal(value, expected), name

    run_ranks(2, rank_main)


def test_values_are_overwritten_and_no_process_group_is_needed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for model in (Tied(), Tied().to("meta")):
        model.head.weight = model.table.weight
        fullshard.load_pretrained(model, folder)
        assert_loaded(model)
    text = capfd.readouterr().err
    assert text.count(f"loading {folder.name}: ") == 2 and "MB in" in text


def test_progress_is_the_first_rank_s_and_can_be_turned_off(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank_main(rank: int, progress: bool) -> None:
        fullshard.load_pretrained(on_meta(), folder, progress=progress)

    run_ranks(3, rank_main, True)
    assert capfd.readouterr().err.count("loading ") == 1
    run_ranks(3, rank_main, False)
    assert capfd.readouterr().err == ""


# ---- one outcome on all ranks ----------------------------------------------------------------------------------


def per_rank(monkeypatch: pytest.MonkeyPatch, folders: list[Path]) -> None:
    """Each rank finds its own folder under the one path."""
    init = HfSource.__init__
    monkeypatch.setattr(HfSource, "__init__", lambda self, path: init(self, folders[torch.distributed.get_rank()]))


def test_a_damaged_file_on_one_rank_is_an_error_on_all(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = saved(tmp_path_factory.mktemp("other"), {n: t for n, t in weights().items() if n != "head.weight"})
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    per_rank(monkeypatch, [folder, other, folder])

    def rank_main(rank: int) -> None:
        model = on_meta()
        with pytest.raises(CheckpointDamaged, match="rank 1: .*the header describes"):
            fullshard.load_pretrained(model, folder, progress=False)
        assert all(p.to_local().is_meta for p in model.parameters())

    run_ranks(3, rank_main)


def test_other_weights_on_one_rank_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names and shapes, as of a base model and its chat version."""
    tensors = {n: t for n, t in weights().items() if n != "head.weight"}
    ours = saved(tmp_path / "base", tensors)
    theirs = saved(tmp_path / "chat", {n: t + 1 for n, t in tensors.items()})
    per_rank(monkeypatch, [ours, ours, theirs])

    def rank_main(rank: int) -> None:
        with pytest.raises(CheckpointMismatch, match=r"rank\(s\) 2 have other files than rank 0"):
            fullshard.load_pretrained(on_meta(), ours, progress=False)

    run_ranks(3, rank_main)


def test_a_read_that_fails_on_one_rank_leaves_nothing_half_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, broken = HfSource.read, threading.Event()
    broken.set()

    def failing(self: HfSource, key: str, box: Box | None = None) -> Tensor:
        if broken.is_set() and key == "blocks.1.weight" and torch.distributed.get_rank() == 1:
            raise OSError(5, "Input/output error")
        return read(self, key, box)

    monkeypatch.setattr(HfSource, "read", failing)

    def rank_main(rank: int) -> None:
        model = on_meta()
        with pytest.raises(CheckpointError, match="rank 1: .*Input/output error"):
            fullshard.load_pretrained(model, folder, progress=False)
        with pytest.raises(RuntimeError, match="every parameter and buffer to have a value"):
            model(torch.arange(7))
        torch.distributed.barrier()
        broken.clear()
        fullshard.load_pretrained(model, folder, progress=False)
        assert_loaded(model)

    run_ranks(3, rank_main)


def test_a_path_that_is_no_such_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="snapshot_download"):
        fullshard.load_pretrained(Tied(), "someone/some-model")
    checkpoint.save({"model": plain().state_dict()}, checkpoint_id=tmp_path / "ours", no_dist=True)
    with pytest.raises(CheckpointError, match=r"found a fullshard checkpoint .*fullshard\.checkpoint\.load"):
        fullshard.load_pretrained(Tied(), tmp_path / "ours")
