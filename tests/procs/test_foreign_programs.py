"""Checkpoints as other programs really write them: transformers, FSDP1 in each of its state dict types, Composer's "
"nesting."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint.formats import (
    Chosen,
    FlatParameterCheckpoint,
    RefusedCheckpoint,
    ShardedTensorCheckpoint,
    TorchSource,
    convert,
    detect,
    export_full,
    llama,
    load_into,
    open_source,
)
from fullshard.train.model import Llama, LlamaShape
from tests.harness import packages, tolerance
from tests.harness.behaviours import behaviour
from tests.harness.pool import pool

# The shape of `packages.llama`.
SHAPE = LlamaShape(vocab=packages.VOCABULARY, layers=2, dim=24, heads=4, kv_heads=2, ffn_dim=40, context=64)


def _shape(tied: bool, config: Any) -> LlamaShape:
    from dataclasses import replace

    theta = config.rope_parameters["rope_theta"]
    return replace(SHAPE, tie_embeddings=tied, norm_eps=config.rms_norm_eps, rope_theta=theta)


def _transformers(rank: int, folder: str, tied: bool) -> tuple[float, float]:
    """A model of transformers, saved by it in several files, loaded into ours on two ranks; and ours exported and
    loaded by it. How far logits are apart, either way."""
    theirs = packages.llama(tied=tied).eval()
    path = Path(folder)
    if rank == 0:
        theirs.save_pretrained(path / "theirs", max_shard_size="8KB")
    dist.barrier()
    ours = Llama(_shape(tied, theirs.config))
    ours.init_weights(7)
    for block in ours.layers:
        fully_shard(block)
    fully_shard(ours)
    state, _ = checkpoint.get_state_dict(ours)
    with open_source(path / "theirs") as source:
        load_into(state, Chosen(source, renaming=llama("hf", "fullshard")))
    tokens = torch.arange(2 * 9).view(2, 9) % packages.VOCABULARY
    with torch.no_grad():
        expected = theirs(tokens).logits
        forwards = float((ours(tokens) - expected).abs().max() / expected.abs().max())
    # Back: with other weights, so that nothing is there already.
    ours = Llama(_shape(tied, theirs.config))
    ours.init_weights(11)
    with torch.no_grad():
        expected = ours(tokens)
    for block in ours.layers:
        fully_shard(block)
    fully_shard(ours)
    export_full(ours.state_dict(), path / "ours", "hf", renaming=llama("fullshard", "hf"), max_file_nbytes=8000)
    if rank == 0:
        theirs.config.save_pretrained(path / "ours")
    dist.barrier()
    again = type(theirs).from_pretrained(path / "ours").eval()
    with torch.no_grad():
        backwards = float((again(tokens).logits - expected).abs().max() / expected.abs().max())
    return forwards, backwards


@pytest.mark.slow
@behaviour(
    "a Llama of transformers, loaded into ours from its files, computes the same, and the other way ({tied})",
    area="checkpoints",
    torch="none",
    reason="not a part of FSDP2",
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_of_transformers_computes_the_same_in_ours_and_the_other_way(tied: bool, tmp_path: Path) -> None:
    for forwards, backwards in pool(2).run(_transformers, str(tmp_path), tied, timeout=110.0):
        assert max(forwards, backwards) <= tolerance.sums(torch.float32, tolerance.TERMS, 2 * 9 * packages.VOCABULARY)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1


# ---- FSDP1 -----------------------------------------------------------------------------------------------------


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))


def _fsdp1(rank: int, folder: str) -> None:
    """Every kind of state dict that FSDP1 has, by DCP and by torch.save."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    path = Path(folder)
    warnings.simplefilter("ignore")
    for name, mesh in (("mesh", init_device_mesh("cpu", (2,))), ("plain", None)):
        model: Any = FSDP(_net(), device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            torch_dcp.save({"state": {"model": state, "epoch": 3}}, checkpoint_id=path / name / "ep1-ba20")
            (path / f"{name} ranks").mkdir(exist_ok=True)
            dist.barrier()
            torch.save(state, path / f"{name} ranks" / f"ep1-ba20-rank{rank}.pt")
    model = FSDP(_net(), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        torch_dcp.save({"model": state}, checkpoint_id=path / "local")
        if rank == 0:
            torch.save({"model": {key: value.local_tensor() for key, value in state.items()}}, path / "local.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
        if rank == 0:
            torch.save(state, path / "full.pt")
    dist.barrier()


def _loaded(rank: int, folder: str) -> dict[str, Tensor]:
    """Composer's folder, its nesting taken off, into a model sharded by us."""
    model = _net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fully_shard(model)
    state = dict(model.state_dict())
    with open_source(folder) as source:
        load_into(state, Chosen(source, only=["state.model.*"], strip="state.model."))
    full: dict[str, Tensor] = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return full


@behaviour(
    "what FSDP1 saved is read, or refused by name",
    area="checkpoints",
    torch="none",
    reason="FSDP2 reads the state dicts that have DTensors or full tensors",
)
def test_what_fsdp1_saved_is_read_or_refused_by_name(tmp_path: Path) -> None:
    pool(2).run(_fsdp1, str(tmp_path), timeout=110.0)
    expected = {name: tensor.detach() for name, tensor in _net().state_dict().items()}

    def assert_same(found: dict[str, Tensor]) -> None:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    # As DTensor with a device_mesh, and ShardedTensors whose chunks DCP wrote as any other: read, by any number of
    # ranks.
    for name in ("mesh", "plain"):
        found = detect(tmp_path / name)
        assert found.kind == "dcp" and found.path.name == "ep1-ba20"
        for world in (1, 2, 3):
            for loaded in pool(world).run(_loaded, str(tmp_path / name), timeout=110.0):
                assert_same(loaded)
        # One file for each rank, each with its own rows: refused, as a folder and one by one.
        with pytest.raises(RefusedCheckpoint, match="one for each rank"):
            detect(tmp_path / f"{name} ranks")
    for name, kind in (("mesh", "DTensors"), ("plain", "ShardedTensors")):
        with pytest.raises(Exception, match=f"holds {kind}: one rank's"):
            TorchSource(tmp_path / f"{name} ranks" / "ep1-ba20-rank0.pt", allow=True)
    with pytest.raises(ShardedTensorCheckpoint, match="torch.distributed.checkpoint"):
        TorchSource(tmp_path / "plain ranks" / "ep1-ba20-rank0.pt", allow=True)
    # Flat parameters: refused, by DCP and by torch.save.
    with pytest.raises(FlatParameterCheckpoint, match="LOCAL_STATE_DICT"):
        open_source(tmp_path / "local")
    with pytest.raises(FlatParameterCheckpoint, match="LOCAL_STATE_DICT"):
        open_source(tmp_path / "local.pt", allow_torch_save=True)
    # The full state dict: read where it is asked for.
    with open_source(tmp_path / "full.pt", allow_torch_save=True) as source:
        assert_same({name: source.read(name) for name in source.tensors})
        convert(source, tmp_path / "ours")
    assert checkpoint.verify(tmp_path / "ours").tensors.keys() == expected.keys()


def _torchtitan_like(rank: int, folder: str) -> None:
    """torchtitan's layout: the model's keys at the top, the rest below names, objects among them."""
    import io

    model = _net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    moments = {
        f"state.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    state = {
        **model.state_dict(),
        "optimizer": {**moments, **{f"param_groups.{name}.lr": 1e-3 for name in names}},
        "lr_scheduler": {"last_epoch": 4},
        "train_state": {"step": torch.tensor(4), "losses": io.BytesIO(b"1234")},
        "dataloader": {f"dp_rank_{rank}": b"pickled"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=Path(folder) / "step-4")


@pytest.mark.slow
@behaviour(
    "a checkpoint in torchtitan's form loads",
    area="checkpoints",
    torch="none",
    reason="torchtitan loads its own",
)
def test_a_checkpoint_of_torchtitan_s_form(tmp_path: Path) -> None:
    pool(2).run(_torchtitan_like, str(tmp_path), timeout=110.0)
    with open_source(tmp_path) as source:
        assert {"0.weight", "optimizer.state.0.weight.exp_avg", "train_state.step"} <= set(source.tensors)
        assert source.value("lr_scheduler.last_epoch") == 4 and source.value("dataloader.dp_rank_1") == b"pickled"
        # An object is an error that names it, only where it is wanted.
        with pytest.raises(checkpoint.CheckpointMismatch, match="train_state.losses.*BytesIO"):
            convert(source, tmp_path / "all")
        convert(Chosen(source, skip=["train_state.losses", "dataloader.*"]), tmp_path / "ours")
    assert "optimizer.state.2.bias.exp_avg_sq" in checkpoint.inspect(tmp_path / "ours").tensors
