"""Other formats into a sharded model and out of it: values, slices, memory, and one error for all ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointError, CheckpointMismatch
from fullshard.checkpoint.formats import (
    Chosen,
    Source,
    convert,
    export_full,
    llama,
    load_full,
    load_into,
    open_source,
    optimizer_names,
    save_full,
)
from fullshard.checkpoint.plan import Box
from fullshard.train.model import Llama, LlamaShape
from tests.harness.behaviours import behaviour
from tests.harness.threads import run_ranks

# 259 and 10 rows divide by neither 3 nor 4; the norms have fewer rows than some worlds have ranks times two.
SHAPE = LlamaShape(vocab=259, layers=2, dim=12, heads=2, kv_heads=1, ffn_dim=10, context=8, tie_embeddings=False)


def plain(seed: int = 3) -> Llama:
    model = Llama(SHAPE)
    model.init_weights(seed)
    return model


def sharded(world: int, seed: int, *, replicate: bool = False) -> Llama:
    model = plain(seed)
    names = ("replicate", "shard") if replicate else ("shard",)
    mesh = init_device_mesh("cpu", (2, world // 2) if replicate else (world,), mesh_dim_names=names)
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def stepped(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).view(2, 8) + rank
    model(tokens).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            same(found[key], value)
        elif isinstance(value, Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


class Watched(Source):
    """Remembers how many elements each read asked for."""

    def __init__(self, inner: Source) -> None:
        self.inner, self.kind, self.path = inner, inner.kind, inner.path
        self.tensors, self.values = inner.tensors, inner.values
        self.asked: dict[str, int] = {}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        found = self.inner.read(key, box)
        self.asked[key] = self.asked.get(key, 0) + found.numel()
        return found

    def value(self, key: str) -> Any:
        return self.inner.value(key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain model as a Hugging Face folder, as a DCP checkpoint with torchtitan's names, and as a file."""
    path = tmp_path_factory.mktemp("formats")
    weights = {name: tensor.detach() for name, tensor in plain().state_dict().items()}
    torch.save(weights, path / "model.pt")
    with open_source(path / "model.pt", allow_torch_save=True) as source:
        convert(Chosen(source, renaming=llama("fullshard", "hf")), path / "hf", "hf", max_file_nbytes=9000)
        convert(Chosen(source, renaming=llama("fullshard", "titan", head_dim=6)), path / "dcp", "dcp")
        convert(source, path / "ours")
    return path


def opened(folder: Path, kind: str) -> Source:
    match kind:
        case "hf":
            return Chosen(open_source(folder / "hf"), renaming=llama("hf", "fullshard"))
        case "dcp":
            return Chosen(open_source(folder / "dcp"), renaming=llama("titan", "fullshard", head_dim=6))
        case "torch":
            return open_source(folder / "model.pt", allow_torch_save=True)
    return open_source(folder / "ours")


@pytest.mark.sample(3)
@behaviour(
    "a sharded model loads from {kind}: each rank reads its rows and not one more",
    area="checkpoints",
    torch="none",
    reason="for other formats than its own torch reads all of it on a rank and sends it",
)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["hf", "dcp", "torch", "fullshard"])
def test_each_rank_reads_its_rows_of_any_format(kind: str, world: int, folder: Path) -> None:
    def rank_main(rank: int) -> None:
        model = sharded(world, seed=99, replicate=world == 4)
        state, _ = checkpoint.get_state_dict(model)
        with opened(folder, kind) as source:
            watched = Watched(source)
            load_into(state, watched)
        same(full(model.state_dict()), {name: t.detach() for name, t in plain().state_dict().items()})
        # Not one element that this rank does not hold.
        assert watched.asked == {name: p.to_local().numel() for name, p in model.named_parameters()}

    run_ranks(world, rank_main)


@pytest.mark.sample(1)
@behaviour(
    "a DCP checkpoint of two ranks loads into model and optimizer on three, also one that has not stepped",
    area="checkpoints",
    torch="none",
    reason="torch steps the optimizer first",
)
@pytest.mark.parametrize("by_conversion", [False, True])
def test_a_dcp_checkpoint_of_model_and_optimizer_goes_into_a_sharded_one(by_conversion: bool, tmp_path: Path) -> None:
    """Written by torch on two ranks, loaded on three: also the state of an optimizer that has not stepped."""

    def write(rank: int) -> Any:
        model = sharded(2, seed=1)
        optimizer = stepped(model, rank)
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": {**optimizer_state, "state": dict(optimizer_state["state"])}}
        torch_dcp.save(state, checkpoint_id=tmp_path / "dcp")
        return full(state)

    def read(rank: int) -> Any:
        model = sharded(3, seed=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if by_conversion:
            if rank == 0:
                with open_source(tmp_path / "dcp") as source:
                    convert(source, tmp_path / "ours")
            checkpoint.load(state, checkpoint_id=tmp_path / "ours")
        else:
            with open_source(tmp_path / "dcp") as source:
                load_into(state, source)
        checkpoint.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        return full({"model": model_state, "optimizer": optimizer_state})

    with warnings.catch_warnings():  # around all ranks: the filters are the process's
        warnings.simplefilter("ignore")
        expected = run_ranks(2, write)[0]
    for found in run_ranks(3, read):
        same(found["model"], expected["model"])
        same(dict(found["optimizer"]["state"]), expected["optimizer"]["state"])
        assert found["optimizer"]["param_groups"][0]["lr"] == 1e-2


def test_what_does_not_fit_is_one_error_on_all_ranks_and_nothing_changes(folder: Path) -> None:
    def rank_main(rank: int) -> None:
        model = sharded(2, seed=99)
        before = {name: p.to_local().clone() for name, p in model.named_parameters()}
        state, _ = checkpoint.get_state_dict(model)
        state["extra"] = torch.zeros(3)
        if rank == 1:
            state["layers.0.ffn.up.weight"] = torch.zeros(2, 2)
        with opened(folder, "hf") as source, pytest.raises(CheckpointMismatch) as caught:
            load_into(state, Chosen(source, skip=["norm.weight"]))
        text = str(caught.value)
        for part in ("missing: extra", "missing: norm.weight", "shape: layers.0.ffn.up.weight"):
            assert part in text, text
        state.pop("extra")
        state["layers.0.ffn.up.weight"] = model.state_dict()["layers.0.ffn.up.weight"]
        with opened(folder, "hf") as source, pytest.raises(CheckpointError, match="rank 1: .*Input/output error"):
            load_into(state, _Fails(source) if rank == 1 else source)
        assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())

    run_ranks(2, rank_main)


class _Fails(Watched):
    def read(self, key: str, box: Box | None = None) -> Tensor:
        if key == "norm.weight":
            raise OSError(5, "Input/output error")
        return super().read(key, box)


@behaviour(
    "full files (Hugging Face, torch.save) out of a sharded model, one full tensor in memory at a time",
    area="checkpoints",
    torch="none",
    reason="torch's full_state_dict brings the whole model to rank 0",
)
@pytest.mark.parametrize("world", [1, 3])
def test_full_files_out_of_a_sharded_model(world: int, tmp_path: Path) -> None:
    expected = {name: tensor.detach() for name, tensor in plain().state_dict().items()}

    def rank_main(rank: int) -> None:
        model = sharded(world, seed=3)
        state = model.state_dict()
        export_full(state, tmp_path / "hf", "hf", renaming=llama("fullshard", "hf"), max_file_nbytes=9000)
        export_full({"model": state, "step": 4, "groups": [{"lr": 0.1}]}, tmp_path / "x.pt", "torch")
        with pytest.raises(CheckpointMismatch, match="step: no tensor"):
            export_full({"model": state, "step": 4}, tmp_path / "no", "hf")
        with pytest.raises(CheckpointError, match="x.pt exists"):  # on all ranks, though the first alone looks
            export_full(state, tmp_path / "x.pt", "torch")

    run_ranks(world, rank_main)
    weights: dict[str, Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        weights |= load_file(path)
    assert len(list((tmp_path / "hf").iterdir())) == 4  # three files and the index
    with open_source(tmp_path / "hf") as source:
        back = Chosen(source, renaming=llama("hf", "fullshard"))
        same({name: back.read(name) for name in back.tensors}, expected)
    assert torch.equal(weights["model.layers.1.mlp.gate_proj.weight"], expected["layers.1.ffn.gate.weight"])
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    same(loaded["model"], expected)
    assert (loaded["step"], loaded["groups"]) == (4, [{"lr": 0.1}])


def test_an_export_that_fails_raises_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    """The first rank cannot write; the others are not left in the middle of a gather."""
    (tmp_path / "file").write_text("")

    def rank_main(rank: int) -> None:
        state = sharded(2, seed=3).state_dict()
        for format in ("hf", "torch"):
            with pytest.raises(CheckpointError, match="rank 0: "):
                export_full(state, tmp_path / "file" / "x", format)  # type: ignore[arg-type]
        # And both go on together.
        export_full(state, tmp_path / "good.pt", "torch")

    run_ranks(2, rank_main)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "good.pt"]


@behaviour(
    "full files (Hugging Face, torch.save) out of a sharded model, one full tensor in memory at a time",
    area="checkpoints",
    torch="none",
    reason="torch's full_state_dict brings the whole model to rank 0",
)
def test_one_full_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank that writes and on the one that does not: a gathered tensor is gone before the next but one is "
    "made."""
    import weakref

    living: dict[int, weakref.WeakSet[Tensor]] = {0: weakref.WeakSet(), 1: weakref.WeakSet()}
    most = {0: 0, 1: 0}
    gather = DTensor.full_tensor

    def counted(self: DTensor, **options: Any) -> Tensor:
        made, rank = gather(self, **options), torch.distributed.get_rank()
        living[rank].add(made)
        most[rank] = max(most[rank], len(living[rank]))
        return made

    def rank_main(rank: int) -> None:
        state = sharded(2, seed=3).state_dict()
        for format in ("hf", "torch"):
            export_full(state, tmp_path / format, format)  # type: ignore[arg-type]

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    run_ranks(2, rank_main)
    assert 1 <= most[0] <= 2 and 1 <= most[1] <= 2


@behaviour(
    "model and optimizer in one file of torch.save, loaded on any number of ranks",
    area="checkpoints",
    torch="none",
    reason="torch's full_state_dict brings the whole model to rank 0",
)
@pytest.mark.parametrize("world", [1, 3])
def test_one_file_for_model_and_optimizer_and_back_on_other_ranks(world: int, tmp_path: Path) -> None:
    """Written by two ranks, loaded on others into an optimizer that has not stepped, and by a plain program."""

    def write(rank: int) -> Any:
        model = sharded(2, seed=1)
        optimizer = stepped(model, rank)
        save_full(model, optimizer, tmp_path / "x.pt")
        save_full(model, (), tmp_path / "model alone.pt")
        return full(dict(zip(("model", "optimizer"), checkpoint.get_state_dict(model, optimizer), strict=True)))

    def read(rank: int) -> Any:
        model = sharded(world, seed=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
        with pytest.raises(CheckpointError, match="allow_torch_save"):
            load_full(model, optimizer, tmp_path / "x.pt")
        load_full(model, optimizer, tmp_path / "x.pt", allow_torch_save=True)
        found = full(dict(zip(("model", "optimizer"), checkpoint.get_state_dict(model, optimizer), strict=True)))
        model = sharded(world, seed=2)
        load_full(model, (), tmp_path / "model alone.pt", allow_torch_save=True)
        same(full(model.state_dict()), found["model"])
        return found

    expected = run_ranks(2, write)[0]
    plainly = torch.load(tmp_path / "x.pt", weights_only=True)
    for found in [plainly, *run_ranks(world, read)]:
        same(found["model"], expected["model"])
        same(dict(found["optimizer"]["state"]), dict(expected["optimizer"]["state"]))
        assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_a_plain_program_s_file_with_numbers_goes_into_a_sharded_model(tmp_path: Path) -> None:
    """Each rank takes its rows of the moments that the number of their parameter stands for."""
    model = plain()
    optimizer = stepped(model, 0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    expected = dict(zip(("model", "optimizer"), checkpoint.get_state_dict(model, optimizer), strict=True))

    def read(rank: int) -> None:
        model = sharded(3, seed=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
        before = full(dict(model.state_dict()))
        with pytest.raises(CheckpointError, match="optimizer_names"):
            load_full(model, optimizer, tmp_path / "x.pt", allow_torch_save=True)
        same(full(dict(model.state_dict())), before)
        names = optimizer_names(model, optimizer)
        load_full(model, optimizer, tmp_path / "x.pt", allow_torch_save=True, optimizer_names=names)
        found = full(dict(zip(("model", "optimizer"), checkpoint.get_state_dict(model, optimizer), strict=True)))
        same(found["model"], dict(expected["model"]))
        same(found["optimizer"]["state"], dict(expected["optimizer"]["state"]))
        assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]

    run_ranks(3, read)
