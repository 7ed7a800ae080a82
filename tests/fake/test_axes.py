"""One declaration on meshes of any size: groups, placements and messages over each axis, without a value."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard import Parallelism
from fullshard.migrate import compilation
from fullshard.migrate.meshes import build_meshes, check_mesh
from fullshard.migrate.styles import messages_of
from fullshard.migrate.tensor_parallel import Division, Replaced, apply_styles, divide
from fullshard.migrate.tree import Tree
from fullshard.train.config import load_config
from fullshard.train.model import sharded_model
from fullshard.train.process import world_of
from tests.harness.axes import TOKENS, VOCABULARY, batch, llama, loss
from tests.harness.fake import fake_world
from tests.harness.installed import clear_redistribution_cache, clear_sharding_cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_3d.toml"


def test_the_example_of_three_axes_on_eight_ranks() -> None:
    config = load_config(EXAMPLE)
    config.check_world(8)
    axes = config.axes(8)
    assert axes.mesh == (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)) and axes.shares == 4
    with fake_world(8):
        world = world_of(config, 0, 8, torch.device("cpu"), None)
        assert world.shares == 4 and world.counted([2.0]) == [2.0]
        model = sharded_model(config, 259, world.mesh, world.device, world.whole)
        weight = model.get_parameter("layers.1.ffn.down.weight")
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert weight.to_local().shape == (32, config.ffn_dim // 2)
        model(torch.zeros(1, 64, dtype=torch.int64)).sum().backward()


def test_four_axes_on_sixteen_ranks() -> None:
    """dp_replicate x dp_shard x cp x tp, of which cp and dp_shard cut parameters as one axis."""
    plan = Parallelism(2, data_parallel_replicate_degree=2, context_parallel_degree=2)
    axes = plan.on(16)
    with fake_world(16):
        model = llama()
        tree = Tree(model)
        division = divide(tree, plan)
        whole, data = build_meshes(axes, "cpu")
        assert whole.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp") and axes.share(0) == (0, 4)
        assert data.mesh.tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
        assert check_mesh(data, axes).data is data
        apply_styles(tree, division, division.styles, whole["tp"], Replaced())
        for block in model.layers:
            fullshard.fully_shard(block, mesh=data)
        fullshard.fully_shard(model, mesh=data)
        weight = model.get_parameter("layers.0.attention.wq.weight")
        assert isinstance(weight, DTensor) and weight.to_local().shape == (2, 16)  # of 16 rows, by tp and by four
        assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp", "tp")
        loss(model, batch(0, 0)).backward()


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch's counter
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_messages_of_tp_are_counted(sequence: bool, tied: bool) -> None:
    """What the styles say is what one forward and backward send, operation by operation."""
    from torch.distributed.device_mesh import init_device_mesh

    plan = Parallelism(2, sequence)
    with fake_world(2):
        model = llama(tied=tied)
        tree = Tree(model)
        division = divide(tree, plan)
        widths = widths_of(tree, division)
        apply_styles(
            tree, division, division.styles, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"], Replaced()
        )
        with CommDebugMode() as seen:
            model(torch.zeros(2, TOKENS, dtype=torch.int64)).sum().backward()
    counted: Counter[str] = Counter()
    names = {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
    }
    for operation, count in seen.get_comm_counts().items():
        counted[next(name for text, name in names.items() if text in str(operation))] += count
    said = messages_of(division.styles, widths, 2 * TOKENS, 4, ["embedding"])
    # The gradients of replicated norms are summed where they are reduced over the other axes.
    assert {m.operation: m.count for m in said} == dict(counted)
    assert all(m.nbytes >= m.count * 2 * TOKENS * 16 * 4 for m in said if m.operation != "all_gather")


def widths_of(tree: Tree, division: Division) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name in division.styles:
        module: Any = tree.modules[name]
        if isinstance(module, torch.nn.Linear):
            found[name] = module.in_features, module.out_features
        else:
            found[name] = (VOCABULARY, 16) if isinstance(module, torch.nn.Embedding) else (16, 16)
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_whole_call_on_a_fake_group(device: str) -> None:
    """`prepare_fully_shard` at any world size in one process: values are where this rank has them."""
    clear_sharding_cache()
    clear_redistribution_cache()
    with fake_world(16):
        with torch.device(device):
            model = llama()
        plan = Parallelism(2, data_parallel_replicate_degree=2)
        prepared = fullshard.prepare_fully_shard(model, None, parallelism=plan, init=lambda _: None, show=False)
        assert prepared.source == ("given" if device == "cpu" else "meta")
        weight = model.get_parameter("layers.0.ffn.up.weight")
        assert isinstance(weight, DTensor) and weight.to_local().shape == (3, 16)  # of 24 rows, by tp and by four
        assert prepared.axes.mesh == (("dp_replicate", 2), ("dp_shard", 4), ("tp", 2))


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline", "expert"])
def test_micro_batches_of_any_size_are_refused_beside_other_axes(axis: str) -> None:
    plan = Parallelism(**{f"{axis}_parallel_degree": 2})
    with fake_world(4), pytest.raises(fullshard.migrate.ConfigError, match="micro_batches.size = .* give a number"):
        fullshard.prepare_fully_shard(llama(), None, {"micro_batches": "auto"}, parallelism=plan, show=False)


@pytest.mark.parametrize(
    ("config", "styles", "said"),
    [
        ({}, {}, "expected embeddings that are whole beside compiled blocks, found embedding divided"),
        (
            {"activation_checkpointing": "units"},
            {"embedding": "keep"},
            "expected no recomputation of compiled blocks whose layers are divided",
        ),
    ],
    ids=["embedding", "recomputation"],
)
def test_what_torch_gets_wrong_in_compiled_blocks_is_refused(config: Any, styles: dict[str, str], said: str) -> None:
    """By name, before the model is changed; tests/procs/test_compiled_axes.py shows what torch does."""
    if "recomputation" in said and compilation.RECOMPUTES:
        pytest.skip("this torch recomputes them")
    plan = Parallelism(2, False, styles=styles)
    with fake_world(4):
        model = llama()
        before = dict(model.named_parameters())
        with pytest.raises(fullshard.migrate.ConfigError, match=said):
            fullshard.prepare_fully_shard(model, None, {"compile": "eager", **config}, parallelism=plan, show=False)
        assert all(p is before[name] for name, p in model.named_parameters())
