"""Compiled blocks from one declaration over gloo, beside one process; and torch's own faults, each reproduced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import Parallelism, prepare_fully_shard
from fullshard.migrate.compilation import RECOMPUTES
from fullshard.migrate.tensor_parallel import Replaced, apply_styles, divide
from fullshard.migrate.tree import Tree
from tests.harness.axes import assert_norms, batch, llama, loss, plainly, train
from tests.harness.installed import clear_sharding_cache
from tests.harness.models import Trained, adamw, assert_same_training, collect
from tests.harness.pool import pool

pytestmark = [pytest.mark.slow, pytest.mark.hang_after(400)]
WHOLE = {"embedding": "keep"}


def compiled(rank: int, tensor: int, config: dict[str, Any]) -> tuple[Trained, list[float], list[bool]]:
    clear_sharding_cache()
    torch.compiler.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
    model = llama()
    optimizer = adamw(model.parameters(), watched=False)
    plan = Parallelism(tensor, False, styles=WHOLE) if tensor > 1 else None
    prepared = prepare_fully_shard(model, optimizer, {"compile": "aot_eager", **config}, parallelism=plan, show=False)
    norms = train(model, optimizer, prepared)
    has = [layer._compiled_call_impl is not None for layer in model.layers]  # type: ignore[union-attr]
    return collect(model, optimizer), norms, has


@pytest.mark.parametrize(
    ("world", "tensor", "config"),
    [(2, 2, {}), (4, 2, {}), (2, 1, {"activation_checkpointing": "units"})],
    ids=["tp", "tp-fsdp", "recomputed"],
)
def test_compiled_blocks_are_equal_to_one_process(world: int, tensor: int, config: dict[str, Any]) -> None:
    expected, norms = plainly(llama, world // tensor)
    ranks: list[Any] = pool(world).run(compiled, tensor, config, timeout=360.0)
    for trained, found, has in ranks:
        assert all(has)
        assert_same_training(trained, expected)
        assert_norms(found, norms)


def of_torch(rank: int, styles: dict[str, str], recompute: bool) -> str:
    """What torch raises for compiled blocks of divided layers; nothing of this package shards here."""
    from fullshard import checkpoint_activations

    clear_sharding_cache()
    torch.compiler.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
    model = llama()
    tree = Tree(model)
    division = divide(tree, Parallelism(2, False, styles=styles))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_styles(tree, division, division.styles, mesh, Replaced())
    if recompute:
        checkpoint_activations(model, "classes", classes=("Block",))
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    try:
        loss(model, batch(0, 0)).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_cut_embedding_before_compiled_blocks_is_torch_s_fault() -> None:
    for said in pool(2).run(of_torch, {}, False, timeout=360.0):
        assert said.startswith("AttributeError: 'Tensor' object has no attribute '_local_tensor'")


def test_recomputation_of_compiled_divided_blocks_is_torch_s_fault() -> None:
    for said in pool(2).run(of_torch, WHOLE, True, timeout=360.0):
        assert said == "" if RECOMPUTES else said.startswith("AssertionError: expected all tensors_saved_with_vc_check")


def redistributed(rank: int) -> tuple[str, ...]:
    first = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("b", "c"))["b"]
    value = distribute_tensor(torch.arange(4.0), first, [Shard(0)])
    return tuple(value.redistribute(other, [Shard(0)]).device_mesh.mesh_dim_names or ())


def test_redistribution_to_another_mesh_is_torch_s_fault() -> None:
    """With equal placements it returns the tensor on its old mesh, without a word."""
    assert pool(2).run(redistributed) == [("a",), ("a",)]
