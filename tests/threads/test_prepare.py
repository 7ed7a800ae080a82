"""`prepare_fully_shard`: each row of seed 004 has a test named after it; training equals plain training."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import Prepared, prepare_fully_shard
from fullshard.extras import matrices
from fullshard.migrate import LEVELS, ConfigError, read_config
from tests.harness.models import (
    BY_NAME,
    Case,
    Trained,
    Transformer,
    _Residual,
    adamw,
    assert_same_training,
    collect,
    full_copy,
    seeded,
)
from tests.harness.models import train_reference as plainly
from tests.harness.threads import WORLD, run_ranks

# What prepares a model returns it, which does not go from a process to another; tests/procs/test_prepare_real.py and
# test_converted.py run over gloo.
pytestmark = pytest.mark.threads_only(reason="a sharded model does not pickle")

STEPS = 3
CASE, TIED = BY_NAME["transformer"], BY_NAME["tied"]
EVEN = Case("even", lambda: nn.Sequential(*(_Residual(8, 16) for _ in range(2))), ("0", "1"), (8,), (8,))


def reference(case: Case = CASE, world: int = WORLD, **build: Any) -> Trained:
    return plainly(case.build(), case.loss, [[case.batch(s, r) for r in range(world)] for s in range(STEPS)])


def train(model: nn.Module, optimizer: Any, case: Case, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        case.loss(model, case.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def prepared_training(
    rank: int, case: Case, config: Any, before: bool = True, options: Any = None
) -> tuple[Trained, Prepared]:
    model = case.build()
    optimizer = adamw(model.parameters(), watched=False) if before else None
    prepared = prepare_fully_shard(model, optimizer, config, show=False, **(options or {}))
    if optimizer is None:
        optimizer = adamw(model.parameters(), watched=False)
    train(model, optimizer, case, rank)
    return collect(model, optimizer), prepared


def check(config: Any, case: Case = CASE, before: bool = True, options: Any = None, world: int = WORLD) -> Prepared:
    trained = run_ranks(world, prepared_training, case, config, before, options)
    expected = reference(case, world)
    for found, _ in trained:
        assert_same_training(found, expected)
    return trained[0][1]  # type: ignore[no-any-return]


def names(prepared: Prepared) -> list[str]:
    return [row.name for row in prepared.units]


# ---- seed 004 --------------------------------------------------------------------------------------------------------


def test_rows_of_seed_004_have_tests() -> None:
    here = Path(__file__).read_text()
    for row in ROWS:
        assert f"def test_{row}(" in here, row


ROWS = """mixed_precision cpu_offload auto_submodule_level_wrapping state_checkpointing weight_tying microbatching hsdp
optimizers activation_checkpointing hsdp_with_flexible_reshard_degree composability_with_tp_sp_ep""".split()


def precision_of(rank: int, precision: Any) -> list[Any]:
    model = CASE.build()
    seen: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    prepared = prepare_fully_shard(model, None, {"precision": precision}, show=False)
    out = model(CASE.batch(0, rank)[0])
    out.float().sum().backward()
    row = next(row for row in prepared.units if row.name == "layers.0")
    kept = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}  # type: ignore[union-attr]
    assert kept == {torch.float32}
    return [row.compute, row.reduce, out.dtype, seen[0]]


def trained_with_masters(rank: int, case: Case, how: str, source: str) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """A model in bfloat16, a part of it frozen: `how` its trainable parameters become float32, and where values are."""
    model = case.build().bfloat16()
    frozen = next(name for name, p in model.named_parameters() if "norm" in name or name.endswith("bias"))
    model.get_parameter(frozen).requires_grad_(False)
    if how == "as Accelerate":  # before it shards
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
    if source == "mixed" and rank:
        model.to_empty(device="meta")
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), watched=False)
    precision = {"mode": "PURE", "master": "float32" if how == "by the setting" else "default"}
    config = {"precision": precision, "initialisation": {"source": source}}
    prepare_fully_shard(model, optimizer, config, show=False)
    for step in range(STEPS):
        case.loss(model, case.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    state = {f"state.{n}.{k}": v for n, (p, s) in enumerate(optimizer.state.items()) for k, v in s.items() if v.dim()}
    found |= {key: value.full_tensor() for key, value in state.items()}
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes.pop(frozen) == torch.bfloat16 and {*dtypes.values()} == {p.dtype for p in optimizer.state}
    return found, dtypes


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "source"), [(CASE, "auto"), (CASE, "mixed"), (TIED, "auto")], ids=lambda each: getattr(each, "name", each)
)
def test_masters_in_float32_of_a_model_in_bfloat16(case: Case, source: str) -> None:
    """Parameters and optimizer state are those of converting trainable parameters before they are sharded, as
    Accelerate does under mixed precision, and not those of masters in bfloat16."""
    for (found, dtypes), (expected, _), (low, lower) in zip(
        *(run_ranks(WORLD, trained_with_masters, case, how, s) for how, s in _ways(source)), strict=True
    ):
        assert {*dtypes.values()} == {torch.float32} and {*lower.values()} == {torch.bfloat16}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert any(not torch.equal(found[key].bfloat16(), low[key].bfloat16()) for key in low)


def _ways(source: str) -> list[tuple[str, str]]:
    return [("by the setting", source), ("as Accelerate", "auto"), ("not at all", "auto")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("precision", "compute", "reduce", "output"),
    [
        ("FULL", "float32", "float32", torch.float32),
        ("DEFAULT", "bfloat16", "float32", torch.bfloat16),
        ("PURE", "bfloat16", "bfloat16", torch.bfloat16),
        ({"param_dtype": torch.float16, "reduce": "fp32", "output_dtype": "float64"}, "float16", "float32", None),
    ],
)  # fmt: skip
def test_mixed_precision(precision: Any, compute: str, reduce: str, output: torch.dtype | None) -> None:
    for found in run_ranks(WORLD, precision_of, precision):
        assert found[:2] == [compute, reduce] and found[2] == (output or torch.float64)
        assert found[3] == getattr(torch, compute)


def test_cpu_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy reaches every unit but those that an override leaves out. Training goes as without."""
    given: list[Any] = []
    monkeypatch.setattr("fullshard.migrate.prepare.fully_shard", _noting(given))
    config = {"cpu_offload": True, "pin_memory": False, "override": {"layers.0": {"cpu_offload": False}}}
    check(config, world=1)
    policies = {name: options["offload_policy"] for name, options in given}
    assert type(policies.pop("layers.0")) is fullshard.OffloadPolicy
    assert policies.keys() == {"embedding", "layers.1", "layers.2", "norm+head", "root"}
    assert all(policy == fullshard.CPUOffloadPolicy(pin_memory=False) for policy in policies.values())


def _noting(given: list[Any]) -> Callable[..., Any]:
    def noted(module: Any, **options: Any) -> Any:
        kinds = [type(one).__name__ for one in (module if isinstance(module, list) else [module])]
        given.append(({"Transformer": "root", "Embedding": "embedding", "RMSNorm": "norm+head"}.get(kinds[0]), options))
        if kinds == ["_Block"]:
            given[-1] = (f"layers.{sum(name.startswith('layers') for name, _ in given[:-1])}", options)
        return fullshard.fully_shard(module, **options)

    return noted


def test_auto_submodule_level_wrapping() -> None:
    prepared = check({"wrap": "children"})
    assert names(prepared) == ["root", "embedding", "layers.0", "layers.1", "layers.2", "norm", "head"]


def state_of(rank: int, kind: Any, folder: Path) -> Any:
    model = TIED.build()
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, {"state_dict": kind}, show=False)
    train(model, optimizer, TIED, rank, 1)
    state = prepared.state_dict()
    fullshard.checkpoint.save(
        dict(zip(("model", "optimizer"), fullshard.checkpoint.get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=folder,
    )
    fresh = prepare_fully_shard(TIED.build(seed=1), None, {"wrap": "none"}, show=False)
    other = adamw(fresh.model.parameters(), watched=False)
    assert isinstance(fresh.model, Transformer)
    assert fresh.model.head.weight is fresh.model.embedding.weight  # tied after wrapping
    own = dict(zip(("model", "optimizer"), fullshard.checkpoint.get_state_dict(fresh.model, other), strict=True))
    fullshard.checkpoint.load(own, checkpoint_id=folder)
    fullshard.checkpoint.set_state_dict(
        fresh.model, other, model_state_dict=own["model"], optim_state_dict=own["optimizer"]
    )
    assert fresh.model.head.weight is fresh.model.embedding.weight  # and after load
    loaded = {name: value.full_tensor() for name, value in fresh.model.state_dict().items()}
    expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value) for name, value in state.items()}, {
        type(value) for value in state.values()
    }


def test_state_checkpointing(tmp_path: Path) -> None:
    sharded = run_ranks(WORLD, state_of, "sharded", tmp_path / "a")
    full = run_ranks(WORLD, state_of, {"kind": "full", "rank0_only": True, "offload_to_cpu": True}, tmp_path / "b")
    assert sharded[0][1] == {DTensor} and full[0][1] == {torch.Tensor} and not full[-1][0]
    assert sharded[0][0].keys() == full[0][0].keys() == TIED.build().state_dict().keys()
    assert all(torch.equal(value, full[0][0][name]) for name, value in sharded[0][0].items())


@pytest.mark.parametrize("ties", ["lowest_common", "one_unit"])
def test_weight_tying(ties: str) -> None:
    prepared = check({"wrap": {"ties": ties}}, TIED)
    (tie,) = prepared.ties
    assert tie.names == ("embedding.weight", "head.weight") and tie.instead_of == ("embedding", "norm+head")
    assert tie.unit == ("root" if ties == "lowest_common" else "embedding+norm+head")
    assert isinstance(prepared.model, Transformer) and prepared.model.head.weight is prepared.model.embedding.weight
    with pytest.raises(Exception, match="expected no parameter in two units, found embedding.weight = head.weight"):
        run_ranks(1, prepared_training, TIED, {"wrap": {"ties": "refuse"}})


class Tied(nn.Module):
    """A tie inside a block, one that crosses two blocks, and one of a block with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Residual(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8, bias=False)
        first, second, third = self.blocks
        first.down.weight = first.up.weight
        second.up.weight = third.down.weight
        self.head.weight = third.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


TIES = {
    ("blocks.0.up.weight", "blocks.0.down.weight"),
    ("blocks.1.up.weight", "blocks.2.down.weight"),
    ("blocks.2.up.weight", "head.weight"),
}
CROSSING = Case("crossing", Tied, ("blocks.0",), (8,), (8,))


def ties_of(model: nn.Module) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(found) for found in names.values() if len(found) > 1}


def tied_through(rank: int, ties: str, folder: Path) -> tuple[Trained, list[str]]:
    """From the meta device, through loading of the plain model's values, training, saving and loading again."""
    with torch.device("meta"):
        model = Tied()
    prepared = prepare_fully_shard(model, None, {"wrap": {"ties": ties}, "initialisation": "meta"}, show=False)
    assert ties_of(model) == TIES  # after wrapping and after memory was allocated
    assert {tie.names for tie in prepared.ties} == TIES and not prepared.uninitialised
    whole = CROSSING.build().state_dict()
    model.load_state_dict(
        {
            name: distribute_tensor(whole[name], p.device_mesh, p.placements, src_data_rank=None)
            for name, p in model.state_dict().items()
        }
    )
    assert ties_of(model) == TIES
    optimizer = adamw(model.parameters(), watched=False)
    train(model, optimizer, CROSSING, rank)
    fullshard.checkpoint.save({"model": fullshard.checkpoint.get_state_dict(model)[0]}, checkpoint_id=folder)
    other = prepare_fully_shard(CROSSING.build(seed=1), None, {"wrap": "none"}, show=False).model
    own = {"model": fullshard.checkpoint.get_state_dict(other)[0]}
    fullshard.checkpoint.load(own, checkpoint_id=folder)
    fullshard.checkpoint.set_state_dict(other, model_state_dict=own["model"])
    assert ties_of(other) == TIES
    mine, loaded = (dict(each.named_parameters()) for each in (model, other))
    assert all(torch.equal(loaded[name].full_tensor(), value.full_tensor()) for name, value in mine.items())  # type: ignore[attr-defined]
    return collect(model, optimizer), names(prepared)


@pytest.mark.parametrize(
    ("ties", "units"),
    [
        ("lowest_common", ["root", "blocks.0"]),
        ("one_unit", ["root", "blocks.0", "blocks.1+blocks.2+head"]),
    ],
)
def test_nested_and_crossing_ties_hold(ties: str, units: list[str], tmp_path: Path) -> None:
    expected = reference(CROSSING)
    for found, told in run_ranks(WORLD, tied_through, ties, tmp_path):
        assert told == units
        assert_same_training(found, expected)


def micro(rank: int, config: Any) -> Trained:
    """Two micro-batches of two samples on rank 0, one of them on the others; the loss is by tokens of all ranks."""
    model = CASE.build()
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, show=False)
    assert prepared.micro_batches is not None
    for step in range(STEPS):
        inputs, targets = CASE.batch(step, rank, size=4 if rank == 0 else 2)

        def loss_of(piece: slice, x: torch.Tensor = inputs, y: torch.Tensor = targets) -> torch.Tensor:
            return F.cross_entropy(model(x[piece]).flatten(0, -2), y[piece].flatten(), reduction="sum")

        prepared.micro_batches.backward(loss_of, len(inputs), tokens=targets.numel())
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduce", ["last", "each"])
def test_microbatching(reduce: str) -> None:
    """With another number of micro-batches on each rank nothing waits for ever; gradients are those of all tokens."""
    found = run_ranks(WORLD, micro, {"micro_batches": {"size": 2, "reduce": reduce}})
    model, optimizer = CASE.build(), None
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        parts = [CASE.batch(step, rank, size=4 if rank == 0 else 2) for rank in range(WORLD)]
        tokens = sum(targets.numel() for _, targets in parts)
        for inputs, targets in parts:
            for piece in range(0, len(inputs), 2):
                logits = model(inputs[piece : piece + 2]).flatten(0, -2)
                (F.cross_entropy(logits, targets[piece : piece + 2].flatten(), reduction="sum") / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(model, optimizer)
    for one in found:
        assert_same_training(one, expected)


def with_mesh(rank: int, config: Any) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found, prepared = prepared_training(rank, CASE, config, True, {"mesh": mesh})
    return [found, prepared.mesh.mesh.tolist()]


@pytest.mark.slow
def test_hsdp() -> None:
    """By degrees, in several spellings, and by mesh."""
    expected = reference(world=4)
    for config in ({"dp_replicate_size": 2}, {"sharding": {"strategy": "HYBRID_SHARD", "dp_replicate": 2}}):
        for found, prepared in run_ranks(4, prepared_training, CASE, config):
            assert prepared.mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert next(prepared.model.parameters()).placements == (Replicate(), Shard(0))
            assert_same_training(found, expected)
    for found, mesh in run_ranks(4, with_mesh, None):
        assert mesh == [[0, 1], [2, 3]]
        assert_same_training(found, expected)
    with pytest.raises(Exception, match=r"mesh: expected 1 x 4 \(replicate x shard\), as the degrees say, found 2 x 2"):
        run_ranks(4, with_mesh, {"dp_shard_size": 4})


LEVELS_BY_NAME = {name: level for level in LEVELS for name in level.names}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LEVELS_BY_NAME)
def test_level(name: str) -> None:
    """Each name that FSDP1 and DeepSpeed have for a level gives its mesh and resharding, and trains as one process; two
    names of one level give one configuration."""
    level = LEVELS_BY_NAME[name]
    config: dict[str, Any] = {"strategy": name}
    if level.replicate == 0:
        config["dp_replicate"] = 2
    if level.reshard_after_forward is None:
        config["reshard_after_forward"] = 2
    if name != level.names[0]:
        same = read_config({"sharding": {**config, "strategy": level.names[0]}})
        assert read_config({"sharding": config}) == same
        return
    shape = {0: (2, 2), 1: (4,), -1: (4, 1)}[level.replicate]
    kept = 2 if level.reshard_after_forward is None else level.reshard_after_forward
    for found, prepared in run_ranks(4, prepared_training, CASE, {"sharding": config}):
        assert tuple(prepared.mesh.mesh.shape) == shape
        assert {row.reshard_after_forward for row in prepared.units if row.module_class == "_Block"} == {kept}
        assert_same_training(found, reference_of_four())


@functools.cache
def reference_of_four() -> Trained:
    return reference(world=4)


def several_optimizers(rank: int) -> Trained:
    model = CASE.build()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    first = torch.optim.AdamW(decayed, lr=1e-2, weight_decay=0.1)
    second = torch.optim.AdamW([{"params": others, "lr": 1e-2, "name": "small"}], weight_decay=0.1)
    prepared = prepare_fully_shard(model, [first, second], show=False)
    assert prepared.optimizers == (first, second) and second.param_groups[0]["name"] == "small"
    for step in range(STEPS):
        CASE.loss(model, CASE.batch(step, rank)).backward()
        for one in prepared.optimizers:
            one.step()
            one.zero_grad()
    found = collect(model, first)
    found.state |= collect(model, second).state
    return found


def trained_before(rank: int) -> Trained:
    """State from whole parameters goes along."""
    model = CASE.build()
    optimizer = adamw(model.parameters(), watched=False)
    for every in range(WORLD):
        (CASE.loss(model, CASE.batch(0, every)) / WORLD).backward()
    optimizer.step()
    optimizer.zero_grad()
    prepare_fully_shard(model, optimizer, show=False)
    for step in range(1, STEPS):
        CASE.loss(model, CASE.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def stale(rank: int) -> str:
    model = CASE.build()
    optimizer = adamw(model.parameters(), watched=False)
    prepare_fully_shard(model, show=False)
    CASE.loss(model, CASE.batch(0, rank)).backward()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    other = adamw(CASE.build().parameters(), watched=False)
    fresh = CASE.build()
    with pytest.raises(ValueError, match="found 27 tensors and none of them"):
        prepare_fully_shard(fresh, other, show=False)
    assert not any(isinstance(p, DTensor) for p in fresh.parameters())
    return str(raised.value)


def test_optimizers() -> None:
    """Before, after, several, with state; a stale one is an error at `step()`, and one of another model before."""
    expected = reference()
    check(None, before=False)
    for found in (*run_ranks(WORLD, several_optimizers), *run_ranks(WORLD, trained_before)):
        assert_same_training(found, expected)
    assert all("embedding.weight" in told and "fully_shard" in told for told in run_ranks(WORLD, stale))


def matrices_on_owners(rank: int, config: Any) -> dict[str, torch.Tensor]:
    """Muon and AdamW of before, with state; an average; equal batches, so that a mean of two gradients is exact."""
    model = CASE.build()
    muon, adam = matrix_optimizers(model)
    for step in range(5):
        if step == 2 and config is not None:
            prepared = prepare_fully_shard(model, [muon, adam], config, show=False)
            owners = fullshard.step_on_owners(prepared.optimizers, model=model)
            assert owners.optimizers == (muon, adam)
        if step == 3:
            mean = fullshard.average(model, decay=0.5)
        CASE.loss(model, CASE.batch(step, 0)).backward()
        for one in (muon, adam):
            one.step()
            one.zero_grad()
        if step >= 3:
            mean.update()
    assert config is None or owners.plan().messages == (2 if config == {} else 0)
    found = {name: full_copy(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state = {**muon.state.get(p, {}), **adam.state.get(p, {})}
        found |= {f"{name} {key}": full_copy(value) for key, value in state.items()}
    return found | {f"the average of {name}": full_copy(t) for name, t in mean.state_dict()["means"].items()}


def matrix_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    muon = torch.optim.Muon(matrices(model), lr=0.02)
    return muon, torch.optim.AdamW(matrices(model, rest=True), lr=1e-2)


@pytest.mark.parametrize("config", [{}, {"sharding": {"data_parallel_replicate_degree": 2}}])
def test_optimizers_of_matrices_continue_on_owners(config: Any) -> None:
    """Bit for bit those of one process, with the state that they had before the model was sharded."""
    (expected,) = run_ranks(1, matrices_on_owners, None)
    for found in run_ranks(2, matrices_on_owners, config):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("keys", "checkpointed"),
    [
        (True, ["embedding", "layers.0", "layers.1", "layers.2", "norm", "head"]),
        ("units", ["layers.0", "layers.1", "layers.2"]),
        ({"classes": ["_Attention"]}, ["layers.0.attention", "layers.1.attention", "layers.2.attention"]),
        ({"at": "units", "every": 2}, ["layers.1"]),
        ({"at": "units", "save": ["aten.mm", "aten.addmm.default"]}, ["layers.0", "layers.1", "layers.2"]),
        ({"at": "units", "recompute": False, "offload": True}, ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_activation_checkpointing(keys: Any, checkpointed: list[str]) -> None:
    prepared = check({"activation_checkpointing": keys})
    assert list(prepared.checkpointed) == checkpointed


@pytest.mark.slow
def test_hsdp_with_flexible_reshard_degree() -> None:
    """An integer, for all units and for one; one that is no factor is refused before anything is changed."""
    prepared = check({"reshard_after_forward": 2, "override": {"layers.1": {"reshard_after_forward": False}}}, world=4)
    kept = {row.name: row.reshard_after_forward for row in prepared.units}
    assert kept == {"root": 2, "embedding": 2, "layers.0": 2, "layers.1": False, "layers.2": 2, "norm+head": 2}
    assert re.search(r"^layers.0 .* 1/2 ", str(prepared), re.MULTILINE)
    with pytest.raises(Exception, match="expected a factor of the 2 ranks"):
        run_ranks(4, with_mesh, {"reshard_after_forward": 4})


def two_axes(rank: int) -> Trained:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = EVEN.build()
    for block in model:  # type: ignore[attr-defined]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = adamw(model.parameters(), watched=False)
    prepare_fully_shard(model, optimizer, {"wrap": ["_Residual"]}, mesh=mesh["dp"], show=False)
    late = prepare_fully_shard(EVEN.build(), mesh=mesh["dp"], show=False).model
    with pytest.raises(ValueError, match="expected tensor parallelism before fully_shard"):
        parallelize_module(late.get_submodule("0"), mesh["tp"], {"up": ColwiseParallel()})
    train(model, optimizer, EVEN, mesh["dp"].get_local_rank())
    return collect(model, optimizer)


def test_composability_with_tp_sp_ep() -> None:
    """Tensor parallelism goes first, and its order is checked; sequence and expert parallelism are DTensors too."""
    expected = reference(EVEN, 2)
    for found in run_ranks(4, two_axes):
        assert_same_training(found, expected)


# ---- initialisation --------------------------------------------------------------------------------------------------


class Reset(Transformer):
    """With an initialiser of its own for each module of torch, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((3,), 2.0))


def initialised(rank: int, config: Any, meta_on: str, options: Any = None) -> tuple[dict[str, torch.Tensor], Any]:
    on_meta = meta_on == "all" or (meta_on == "others" and rank > 0)
    model = seeded(Reset, 5 + rank)
    if on_meta:
        model = model.to_empty(device="meta")
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, show=False, **(options or {}))
    state = {name: collectable(value) for name, value in model.state_dict().items()}
    train(model, optimizer, CASE, rank, 1)
    assert len(optimizer.state) == len(list(model.parameters()))
    return state, (prepared.source, prepared.uninitialised)


def collectable(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("source", "meta_on"), [("cpu", "none"), ("mixed", "others"), ("auto", "others")])
def test_the_values_of_rank_0(source: str, meta_on: str) -> None:
    expected = seeded(Reset, 5).state_dict()
    for state, (found, lost) in run_ranks(WORLD, initialised, {"initialisation": source}, meta_on):
        assert found == ("cpu" if source == "cpu" else "mixed") and not lost
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def fill_buffer(module: nn.Module) -> None:
    if isinstance(module, Reset):
        nn.init.constant_(module.seen, 2.0)  # type: ignore[arg-type]
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_the_meta_device_gives_equal_values_at_any_number_of_ranks() -> None:
    found = [
        run_ranks(world, initialised, {"initialisation": {"source": source, "seed": 7}}, "all", {"init": fill_buffer})
        for world, source in ((1, "meta"), (WORLD, "auto"))
    ]
    for state, (source, lost) in found[1]:
        assert source == "meta" and not lost
        assert all(torch.equal(value, state[name]) for name, value in found[0][0][0].items())
    assert float(found[0][0][0]["seen"][0]) == 2.0


def pretrained(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    with torch.device("meta"):
        model = Transformer(tied=True)
    config = {"initialisation": {"path": str(folder)}}
    prepared = prepare_fully_shard(model, None, config, show=False)
    assert model.head.weight is model.embedding.weight
    return {name: collectable(value) for name, value in model.state_dict().items()}, prepared.source


def test_pretrained(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    expected = {k: v.clone() for k, v in TIED.build(seed=3).state_dict().items() if k != "head.weight"}
    safetensors.save_file(expected, tmp_path / "model.safetensors")
    for state, source in run_ranks(WORLD, pretrained, tmp_path):
        assert source == "pretrained" and all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("source", "meta_on", "told"),
    [
        ("given", "all", "expected values on every rank"),
        ("cpu", "others", "expected values on every rank"),
        (
            "mixed",
            "none",
            "expected values on rank 0 and all parameters of the others on the meta device, found 2 of 2",
        ),
        ("meta", "others", "found 1 of 2 ranks without"),
    ],
)
def test_values_on_the_wrong_ranks(source: str, meta_on: str, told: str) -> None:
    with pytest.raises(Exception, match=re.escape(told)):
        run_ranks(2, initialised, {"initialisation": source}, meta_on)


def test_what_is_not_initialised_is_named() -> None:
    with pytest.raises(Exception, match="seen"):
        run_ranks(WORLD, initialised, {"initialisation": "meta"}, "all")


# ---- the rest --------------------------------------------------------------------------------------------------------


def one_after_the_other(rank: int) -> list[str]:
    model = CASE.build()
    frozen = model.get_parameter("head.weight")
    before = {name: p for name, p in model.named_parameters()}
    told = []
    wrong: list[tuple[Any, str]] = [
        ({"override": {"layers.7": {"reshard_after_forward": True}}}, "which is none of them"),
        ({"override": {"_Attention": {"reshard_after_forward": True}}}, "which is none of them"),
        ({"wrap": {"ignored": ["hed"]}}, "which matches none; the nearest is"),
        ({"dp_shard_size": 3}, "there are 3 of"),
        ({"wrap": ["Absent"]}, "found no Absent"),
        ({"activation_checkpointing": {"classes": ["Absent"]}}, "found no Absent"),
        ({"activation_checkpointing": {"at": "units", "save": ["aten.no_such"]}}, "found 'aten.no_such'"),
        ("absent.toml", "cannot read"),
    ]
    for config, words in wrong:
        with pytest.raises((ValueError, ConfigError), match=words):
            prepare_fully_shard(model, None, config, show=False)
        assert {name: p for name, p in model.named_parameters()} == before
        assert "forward" not in vars(model.layers[0])  # type: ignore[index]
    config = {
        "wrap": {"ignored": ["head.*"]},
        "override": {"_Block": {"param": "bfloat16", "output": "float32"}, "root": {"output": "float64"}},
    }
    prepared = prepare_fully_shard(model, None, config, show=True)
    assert model.get_parameter("head.weight") is frozen
    assert {row.compute for row in prepared.units if row.module_class == "_Block"} == {"bfloat16"}
    assert model(CASE.batch(0)[0]).dtype == torch.float64
    with pytest.raises(ValueError, match="found fully_shard applied in the model"):
        prepare_fully_shard(model, show=False)
    told.append(str(prepared))
    return told


def test_mistakes_change_nothing_and_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = run_ranks(1, one_after_the_other)
    out = capsys.readouterr().out
    assert out == f"{told[0]}\n"
    assert re.search(r"^layers.0 +_Block +block +8 +1,287 +5.0 KiB +\d+.\d% +default +bfloat16", out, re.MULTILINE)


def copied(rank: int) -> Trained:
    """A deepcopy of a model with checkpointed activations computes with its own parameters."""
    model = CASE.build()
    assert fullshard.checkpoint_activations(model, "classes", classes=["_Block"])
    with pytest.raises(ValueError, match="found one checkpointed before"):
        fullshard.checkpoint_activations(model, "classes", classes=["_Block"])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = adamw(other.parameters(), watched=False)
    prepare_fully_shard(other, optimizer, show=False)
    train(other, optimizer, CASE, rank)
    return collect(other, optimizer)


def test_activations_before_and_after_sharding() -> None:
    for found in run_ranks(WORLD, copied):
        assert_same_training(found, reference())
    assert all(run_ranks(WORLD, afterwards))


def afterwards(rank: int) -> bool:
    model = CASE.build()
    prepare_fully_shard(model, show=False)
    calls: list[int] = []
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[index,union-attr]
    assert fullshard.checkpoint_activations(model, "classes", classes=["_Block"], every=1) == (
        "layers.0",
        "layers.1",
        "layers.2",
    )
    CASE.loss(model, CASE.batch(0, rank)).backward()
    return len(calls) == 2  # forward, and again in backward
