"""Parameters that are DTensors before they are sharded: tensor and expert parallelism, and full meshes.

Ranks are threads on a mesh (dp, tp). Compared with a plain model that sees the batches of all data-parallel ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.harness import installed, tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation, run
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

R = Replicate()


class Block(nn.Module):
    """A norm, a wide layer and a narrow one, as transformers have them. `width` rows are cut by dp alone or by both."""

    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks() -> nn.Module:
    return seeded(lambda: nn.Sequential(Block(), Block(), nn.Linear(6, 3)))


def plan_tp(model: nn.Module, tp: DeviceMesh, *, sequence: bool) -> None:
    """Tensor parallelism of the blocks; with `sequence`, what is between the layers is cut along the sequence."""
    for block in list(model.children())[:-1]:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "": PrepareModuleInputOutput(
                    input_layouts=(R,),
                    desired_input_layouts=(Shard(1),),
                    use_local_input=False,
                    output_layouts=(Shard(1),),
                    desired_output_layouts=(R,),
                ),
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        parallelize_module(block, tp, plan)


def batch(step: int, dp_rank: int) -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def train_plain(model: nn.Module, dp_world: int, steps: int, clip: float | None = None) -> list[dict[str, Tensor]]:
    """Parameters and AdamW's first moments after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(dp_world):
            (model(batch(step, rank)).square().mean() / dp_world).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        states.append(collect(model, optimizer))
    return states


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = whole(p)
        found[f"{name}.exp_avg"] = whole(optimizer.state[p]["exp_avg"])
    return found


@pytest.mark.sample(1)
@behaviour("training beside tensor and sequence parallelism", area="strategies")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@for_each_implementation
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_training_with_tensor_parallelism_is_that_of_the_plain_model(sequence: bool, impl: Implementation) -> None:
    """Colwise and Rowwise layers, and norms that are replicated (sequence parallel: their gradients are partial)."""
    # torch's clipping refuses parameters on different meshes.
    clip = 0.05 if impl is FULLSHARD else None
    expected = train_plain(blocks(), 2, 3, clip)
    models = [blocks() for _ in range(4)]

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: Any = models[rank]
        plan_tp(model, mesh["tp"], sequence=sequence)
        for block in model:
            impl.fully_shard(block, mesh=mesh["dp"])
        impl.fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, mesh.get_local_rank("dp"))).square().mean().backward()
            for p in model.parameters():
                assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            if clip is not None:
                impl.clip(model.parameters(), clip)
            optimizer.step()
            for name, value in collect(model, optimizer).items():
                tolerance.assert_close(value, expected[step][name], what=f"step {step} {name}")

    run(rank_main, impl, world=4)


def describe(model: nn.Module) -> dict[str, Any]:
    """What the DTensors of a model say about themselves."""
    return {
        name: (p.placements, p.device_mesh.mesh_dim_names, tuple(p.shape), tuple(p.to_local().shape), p.stride())
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


def both(world: int, build: Callable[[Callable[..., Any]], nn.Module]) -> None:
    """`build(fully_shard)` with torch's and ours: the same description and the same local values on every rank."""

    def rank_main(rank: int) -> None:
        theirs, ours = build(TORCH.fully_shard), build(FULLSHARD.fully_shard)
        assert describe(ours) == describe(theirs)
        for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), name
            assert torch.equal(a.full_tensor(), b.full_tensor()), name
        assert list(ours.state_dict()) == list(theirs.state_dict())

    run_ranks(world, rank_main)


@behaviour(
    "2-D parameters of tensor parallelism: placements and values, uneven ones too", area="placement", torch="equal"
)
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (3, 1), (2, 1)], ids=str)
def test_placements_and_values_are_those_of_torch(shape: tuple[int, int]) -> None:
    """Uneven and short dims on both axes: rows 5 and 2, columns 3."""

    def build(fully_shard: Callable[..., Any]) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = nn.Module()
        generator = torch.Generator().manual_seed(0)
        for name, placement in (("a", Shard(0)), ("b", Shard(1)), ("c", R), ("d", Shard(0)), ("e", None)):
            value = torch.randn((2, 3) if name == "d" else (5, 3), generator=generator)
            kept = value if placement is None else distribute_tensor(value, mesh["tp"], [placement])
            setattr(model, name, nn.Parameter(kept))
        model.forward = lambda: None  # type: ignore[method-assign, assignment]
        fully_shard(model, mesh=mesh["dp"])
        return model

    both(shape[0] * shape[1], build)


@behaviour("expert and tensor parallelism on one parameter", area="placement", torch="equal")
def test_a_mesh_of_two_own_axes() -> None:
    """Expert and tensor parallelism: dp, ep and tp, with dim 0 cut by dp and ep, or by all three."""

    def build(fully_shard: Callable[..., Any]) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        model = nn.Linear(4, 8)
        own = mesh["ep", "tp"]
        value = torch.arange(32.0).view(8, 4)
        model.weight = nn.Parameter(distribute_tensor(value, own, [Shard(0), Shard(1)]))
        model.bias = nn.Parameter(distribute_tensor(torch.arange(8.0), own, [Shard(0), Shard(0)]))
        fully_shard(model, mesh=mesh["dp"])
        return model

    both(8, build)


def test_an_equal_axis_of_another_mesh() -> None:
    """DTensor caches results of operations by the value of a mesh: after a second mesh, parameters carry the first."""

    def rank_main(rank: int) -> None:
        first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        second = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "dp", "tp"))
        model = blocks()
        plan_tp(model, first["tp"], sequence=False)
        fullshard.fully_shard(model, mesh=second["replicate", "dp"])
        model(batch(0, rank // 2)).square().mean().backward()
        plain = blocks()
        for dp_rank in range(2):
            (plain(batch(0, dp_rank)).square().mean() / 2).backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            tolerance.assert_close(whole(mine.grad), its.grad, terms=64)

    run_ranks(4, rank_main)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("own", [("half", "tp"), ("tp", "half")])
@for_each_implementation
def test_axes_of_two_meshes_over_the_same_ranks(impl: Implementation, own: tuple[str, str]) -> None:
    """The data-parallel axis is of one `init_device_mesh`, the tensor-parallel one of another one, with other names.
    Axes along the same ranks are refused."""
    expected = train_plain(blocks(), 2, 3)

    def rank_main(rank: int, impl: Implementation) -> None:
        data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
        tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=own)
        model = blocks()
        plan_tp(model, tensor["tp"], sequence=False)
        if own[0] == "tp":
            with pytest.raises(RuntimeError, match="different axes of one mesh" if impl is FULLSHARD else None):
                impl.fully_shard(model, mesh=data["dp"])
            return
        for block in list(model.children())[:-1]:
            impl.fully_shard(block, mesh=data["dp"])
        impl.fully_shard(model, mesh=data["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, rank // 2)).square().mean().backward()
            optimizer.step()
            for name, value in collect(model, optimizer).items():
                tolerance.assert_close(value, expected[step][name], what=f"step {step} {name}")

    run(rank_main, impl, world=4)


def test_in_compute_the_parameter_is_what_it_was() -> None:
    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = seeded(lambda: nn.Linear(4, 8))
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        before = {name: (p.placements, p.device_mesh) for name, p in model.named_parameters()}
        seen = {}

        def look(module: nn.Module, *_: Any) -> None:
            for name, p in module.named_parameters():
                assert isinstance(p, nn.Parameter)
                seen[name] = (p.placements, p.device_mesh)

        fullshard.fully_shard(model, mesh=mesh["dp"])
        model.register_forward_pre_hook(look)
        model(torch.ones(2, 4))
        assert seen == before

    run_ranks(4, rank_main)


@behaviour(
    "gradients that are partial over tp are added in the reduce dtype",
    area="mixed precision",
    torch="better",
    reason="torch 2.13 adds them in the compute dtype (pytorch#190626)",
)
@pytest.mark.parametrize("sync", [True, False], ids=["one backward", "accumulated"])
def test_partial_gradients_are_added_in_the_reduce_dtype(sync: bool, impl: Implementation) -> None:
    """bf16 compute, float32 reduction: summands of the tp ranks that bf16 cannot add exactly (256 + 1) stay exact, and
    are not rounded on their way over the dp ranks either."""

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh["tp"]
        model: Any = seeded(lambda: nn.Linear(1, 4, bias=False))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), tp, [R]))
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        impl.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        for last in (True,) if sync else (False, True):
            model.set_requires_gradient_sync(last)
            # Each tp rank has a row of its own of a batch that is sharded: the weight's gradient is partial.
            mine = torch.tensor([[256.0 if tp.get_local_rank() == 0 else 1.0]])
            model(DTensor.from_local(mine, tp, [Shard(0)])).sum().backward()
        grad = model.weight.grad
        assert grad.placements == model.weight.placements and grad.dtype is torch.float32
        assert torch.equal(grad.full_tensor(), torch.full((4, 1), 257.0 * (1 if sync else 2)))

    run(rank_main, impl, world=4)


@behaviour(
    "clipping by the norm of parameters on several meshes",
    area="clipping",
    torch="better",
    reason="torch's clip_grad_norm_ refuses gradients on different meshes",
)
def test_norms_and_clipping_over_several_axes(impl: Implementation) -> None:
    """Norms 1, 2, 3 and inf of a mix of 2-D, 1-D and plain parameters, ours and torch's, and the scaled gradients."""

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = blocks()
        extra = nn.Parameter(torch.ones(3))
        plan_tp(model, mesh["tp"], sequence=False)
        for block in list(model.children()):
            impl.fully_shard(block, mesh=mesh["dp"])
        model(batch(0, mesh.get_local_rank("dp"))).square().sum().backward()
        extra.grad = torch.full((3,), 0.5)
        parameters = [*model.parameters(), extra]
        saved = [None if p.grad is None else p.grad.clone() for p in parameters]
        elements = torch.cat([whole(g).flatten() for g in saved if g is not None])
        for norm_type in (1.0, 2.0, 3.0, float("inf")):
            for p, grad in zip(parameters, saved, strict=True):
                p.grad = None if grad is None else grad.clone()
            expected = torch.linalg.vector_norm(elements.double(), norm_type).float()
            norm = impl.clip(parameters, 0.1, norm_type)
            tolerance.assert_close(norm, expected)
            for p, grad in zip(parameters, saved, strict=True):
                assert p.grad is not None and grad is not None
                tolerance.assert_close(whole(p.grad), whole(grad) * (0.1 / (expected + 1e-6)))
        partial = nn.Parameter(distribute_tensor(torch.ones(3), mesh["tp"], [R]))
        partial.grad = DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()])
        with pytest.raises(NotImplementedError, match="redistribute them first"):
            impl.clip([partial], 1.0)

    run(rank_main, impl, world=4)


@behaviour("accumulation, recomputation and failures beside tensor parallelism", area="strategies")
@for_each_implementation
def test_programs_around_tensor_parallelism(impl: Implementation) -> None:
    """Accumulation without synchronisation, recomputation, frozen and unused parameters, a weight used by to_local(),
    and a failed backward with a retry: gradients of the plain model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.direct, self.unused = Block(), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
            self.block.up.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.block, x, use_reentrant=False)
            weight = self.direct.weight
            if isinstance(weight, DTensor):
                # Every rank of tp computes all of it: their gradients are equal.
                weight = weight.redistribute(placements=[R]).to_local(grad_placements=[R])
            return nn.functional.linear(y, weight).square().mean()

    reference = seeded(Model)
    for step in range(2):
        for rank in range(2):
            (reference(batch(step, rank)) / 2).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: Any = models[rank]
        plan: dict[str, Any] = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], {**plan, "direct": ColwiseParallel()})
        if installed.release() < (2, 11):  # it forgets what is frozen
            model.block.up.bias.requires_grad_(False)
        assert not model.block.up.bias.requires_grad
        impl.fully_shard(model.block, mesh=mesh["dp"])
        impl.fully_shard(model, mesh=mesh["dp"])
        if impl is FULLSHARD:
            loss = model(batch(5, rank))
            loss.register_hook(_fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            model(batch(step, mesh.get_local_rank("dp"))).backward()
        for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            if expected.grad is None:
                assert p.grad is None, name
                continue
            assert p.grad.placements == p.placements
            tolerance.assert_close(p.grad.full_tensor(), expected.grad, what=name)

    models = [seeded(Model) for _ in range(4)]
    run(rank_main, impl, world=4)


def _fail(_: Tensor) -> None:
    raise ArithmeticError


# ---- state of parameters on several axes ---------------------------------------------------------------------

# torch says so of the last layer; nothing here edits its output.
FULL = StateDictOptions(full_state_dict=True)


def even() -> nn.Sequential:
    """Every dim is a multiple of both axes: torch's loader of full state dicts asserts so for strided shards."""
    return nn.Sequential(Block(8, 12), Block(8, 12), nn.Linear(8, 4))


def inputs(step: int, dp_rank: int) -> torch.Tensor:
    return torch.cat([batch(step, dp_rank), batch(step + 50, dp_rank)[..., :2]], dim=-1)


def parallel(impl: Implementation, model: Any, mesh: DeviceMesh) -> Any:
    plan_tp(model, mesh["tp"], sequence=False)
    for block in model:
        impl.fully_shard(block, mesh=mesh["dp"])
    return impl.fully_shard(model, mesh=mesh["dp"])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.slow
@behaviour("full state dicts of 2-D parameters and their AdamW state, and loading them back", area="state")
@for_each_implementation
def test_full_state_dicts_go_out_and_come_back(impl: Implementation) -> None:
    """Keys and values are those of the plain model; loaded into another sharded model, the next step is the same."""
    models, others = ([even() for _ in range(4)] for _ in range(2))
    for model in models:
        model.load_state_dict(models[0].state_dict())
    names = list(models[0].state_dict())

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, other = (parallel(impl, made[rank], mesh) for made in (models, others))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other)]

        def step(model: Any, optimizer: Any, number: int) -> None:
            optimizer.zero_grad()
            model(inputs(number, mesh.get_local_rank("dp"))).square().mean().backward()
            optimizer.step()

        step(model, optimizers[0], 0)
        sharded = model.state_dict()
        assert list(sharded) == names and all(isinstance(value, DTensor) for value in sharded.values())
        full = get_model_state_dict(model, options=FULL)
        state = get_optimizer_state_dict(model, optimizers[0], options=FULL)
        assert list(full) == names and set(state["state"]) == set(names)  # type: ignore[arg-type]
        for name, p in model.named_parameters():
            assert torch.equal(full[name], p.full_tensor())
        set_model_state_dict(other, dict(full), options=FULL)
        # A copy: torch loads scalars as they are, and the two optimizers would count one step together.
        set_optimizer_state_dict(other, optimizers[1], copy.deepcopy(state), options=FULL)
        for m, optimizer in zip((model, other), optimizers, strict=True):
            step(m, optimizer, 1)
        first, second = (collect(m, o) for m, o in zip((model, other), optimizers, strict=True))
        for name, value in first.items():
            tolerance.assert_close(value, second[name], what=name)

    run(rank_main, impl, world=4)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@behaviour("meta device, tensor parallelism, sharding, to_empty, then initialisation", area="initialisation")
@for_each_implementation
def test_meta_device_then_both_parallelisms_then_memory(impl: Implementation) -> None:
    wanted = even().state_dict()

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model: Any = even()
        parallel(impl, model, mesh)
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        model.to_empty(device="cpu")
        set_model_state_dict(model, dict(wanted), options=FULL)
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), wanted[name]), name
        model(inputs(0, mesh.get_local_rank("dp"))).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run(rank_main, impl, world=4)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_plain_tensors_load_into_uneven_shards_of_two_axes() -> None:
    """Rows 5 over tp 2 over dp 2: every rank takes its own part of the whole tensor."""
    wanted = {name: torch.randn_like(value) for name, value in blocks().state_dict().items()}

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(FULLSHARD, blocks(), mesh)
        model.load_state_dict(wanted)
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), wanted[name]), name
        with fullshard.full_params(model):
            assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())

    run_ranks(4, rank_main)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_steps_on_shards_and_the_report_know_two_axes() -> None:
    """Our own tools on 2-D parameters: `step_on_shards` and `report`."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(FULLSHARD, blocks(), mesh)
        infos = fullshard.report(model).units
        assert infos[1].param_names[2] == "0.up.weight" and infos[1].world == 2
        assert infos[1].numel == 6 + 6 + 10 * 6 + 10 + 6 * 10 + 6
        # This rank's part of the tp mesh is what its data-parallel ranks share.
        assert infos[1].padded_local_numel < infos[1].numel / 2
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fullshard.step_on_shards(optimizer)
        model(batch(0, mesh.get_local_rank("dp"))).square().mean().backward()
        optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())

    run_ranks(4, rank_main)
