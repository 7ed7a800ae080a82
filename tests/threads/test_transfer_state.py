"""`transfer` of a model with its optimizer: training continues in the other layout as it would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import fully_shard, step_on_owners, transfer
from fullshard.extras import TransferError
from fullshard.extras.slept_memory import tensors_in
from tests.harness.installed import clear_sharding_cache
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.test_owners import KINDS, LAYOUTS, assert_same, flat, give_gradients, parted
from tests.threads.test_owners import Model as Matrices


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    """The same gradients on all ranks and in all layouts, so that bits do not depend on sums over ranks."""
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def found(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        values |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return values


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
]


@pytest.mark.parametrize("build", OPTIMIZERS)
@pytest.mark.parametrize("to", ["fsdp 2", "hsdp", "none", "more"])
@pytest.mark.sample(4, full=12)
def test_a_run_changes_its_layout(build: Callable[[Any], torch.optim.Optimizer], to: str) -> None:
    world = 4

    def rank_main(rank: int) -> dict[str, Any] | None:
        # Ranks 0 and 1 of another test were a world, whose group has the name of this test's world.
        clear_sharding_cache()
        source: Any = seeded(make)
        few = DeviceMesh("cpu", [0, 1])
        everyone = DeviceMesh("cpu", list(range(world)))
        there = everyone if to != "more" else few
        if rank in there.mesh:
            fully_shard(source[0], mesh=there)
            fully_shard(source, mesh=there)
            optimizer = build(source.parameters())
            for number in range(3):
                step(source, optimizer, number)
            optimizer.param_groups[0]["lr"] = 0.05  # by a schedule
        here = (rank < 2, few) if to in ("fsdp 2", "none") else (True, everyone)
        target: Any = None
        if here[0]:
            target = seeded(make, seed=1)
        if to == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = here[1]
        if target is not None and to != "none":
            fully_shard(target, mesh=mesh)
        other = None if target is None else build(target.parameters())
        move = transfer(
            (source, optimizer) if rank in there.mesh else None,
            None if target is None else (target, other),
            limit_nbytes=64,
        )
        assert " of the optimizer" not in str(move.plan())
        move.run()
        if target is None:
            torch.distributed.barrier()
            return None
        assert other is not None and other.param_groups[0]["lr"] == 0.05
        assert type(other.param_groups[0].get("betas", ())) is tuple
        for number in range(3, 5):
            step(target, other, number)
        values = found(target, other)
        if here[1] is few:
            torch.distributed.barrier()  # ranks without a target wait
        return values

    plain: Any = seeded(make)
    optimizer = build(plain.parameters())
    for number in range(5):
        if number == 3:
            optimizer.param_groups[0]["lr"] = 0.05
        step(plain, optimizer, number)
    expected = found(plain, optimizer)
    for one in run_ranks(world, rank_main):
        if one is not None:
            assert one.keys() == expected.keys()
            for name, value in expected.items():
                assert isinstance(value, Tensor)
                # Means of 2 or 4 equal gradients are exact.
                assert torch.equal(one[name], value), name


def test_fused_and_renamed_state_and_what_is_refused() -> None:
    def rank_main(rank: int) -> None:
        source = nn.ModuleDict({"q": nn.Linear(3, 4, bias=False), "k": nn.Linear(3, 2, bias=False)})
        target: Any = nn.ModuleDict({"qk": nn.Linear(3, 6, bias=False)})
        fully_shard(target["qk"])
        optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
        other = torch.optim.AdamW(target.parameters(), lr=0.2)
        for parameter in source.parameters():
            parameter.grad = torch.full_like(parameter, float(parameter.shape[0]))
        optimizer.step()
        names: Any = {("q.weight", "k.weight"): "qk.weight"}
        move = transfer((source, optimizer), (target, other), names=names, dtype=torch.bfloat16)
        move.run()
        state = other.state[target["qk"].weight]
        expected = torch.cat([optimizer.state[p]["exp_avg"] for p in source.parameters()])
        assert torch.equal(state["exp_avg"].full_tensor(), expected) and float(state["step"]) == 1.0
        assert state["exp_avg"].placements == target["qk"].weight.placements
        # The settings of a transfer are those when it was made.
        optimizer.param_groups[0]["lr"] = 0.3
        with pytest.raises(
            TransferError, match="the optimizer's state or settings changed since; make the transfer anew"
        ):
            move.run()
        with pytest.raises(ValueError, match="an optimizer on one side alone"):
            transfer((source, optimizer), target, names=names)
        few = torch.optim.AdamW([source["q"].weight], lr=0.1)
        with pytest.raises(ValueError, match="k.weight: needed beside q.weight, and not there|not in the source's"):
            transfer((source, few), (target, other), names=names)

    run_ranks(2, rank_main)


class Factors(torch.optim.Optimizer):
    """State of other shapes: a factor whose rows are the parameter's columns, a history, a count in the parameter's
    place; as optimizers of whole matrices have it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, full = self.state[parameter], whole(parameter.grad)
                if not state:
                    state["factor"] = full.new_zeros(full.shape[-1], 2)
                    state["columns"] = parameter.grad.new_zeros(full.shape[-1])
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["factor"] += full.sum()
                state["columns"] += 1
                state["count"] += 1
                parameter.add_(parameter.grad * float(state["factor"].mean()), alpha=-0.1)


@pytest.mark.parametrize("to", ["sharded", "plain"])
def test_state_of_another_shape_goes_whole(to: str) -> None:
    """Plain state stays plain; what is a DTensor in the source is a replicated one where the parameter is a DTensor.
    Entries of the target that the source lacks are gone."""

    def rank_main(rank: int) -> None:
        source: Any = seeded(make)
        fully_shard(source)
        optimizer = Factors(source.parameters())
        step(source, optimizer, 0)
        target: Any = seeded(make, seed=1)
        if to == "sharded":
            fully_shard(target[0])
            fully_shard(target)
        other = Factors(target.parameters())
        other.state[target[2].weight]["stale"] = torch.ones(3)
        move = transfer((source, optimizer), (target, other))
        for _ in range(2):  # into new tensors, and into those
            kept = dict(other.state[target[0].weight])
            move.run()
            for parameter, mine in zip(target.parameters(), source.parameters(), strict=True):
                state, expected = other.state[parameter], optimizer.state[mine]
                assert state.keys() == expected.keys() == {"factor", "columns", "count"}
                assert all(torch.equal(whole(state[key]), whole(expected[key])) for key in state)
                assert type(state["factor"]) is Tensor and state["factor"].shape == (parameter.shape[-1], 2)
                assert isinstance(state["columns"], DTensor) is (to == "sharded")
            assert all(other.state[target[0].weight][key] is value for key, value in kept.items())
        step(source, optimizer, 1)
        step(target, other, 1)
        for one, two in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(whole(one), whole(two))

    run_ranks(2, rank_main)


def test_adafactors_own_class_between_ranks_and_what_no_part_can_be_made_of() -> None:
    def rank_main(rank: int) -> None:
        source, target = seeded(make), seeded(make, seed=1)
        optimizer = torch.optim.Adafactor(source.parameters(), lr=0.1)
        other = torch.optim.Adafactor(target.parameters(), lr=0.1)
        step(source, optimizer, 0)
        names: Any = {"0.weight": (("a", 3), ("b", 4))}
        with pytest.raises(
            ValueError, match=r"0.weight: state 'row_var' of shape \(7, 1\), not of the parameter's \(7"
        ):
            parts = nn.ParameterDict({"a": torch.zeros(3, 5), "b": torch.zeros(4, 5)})
            rest = {name: None for name, _ in source.named_parameters() if name != "0.weight"}
            few = torch.optim.Adafactor(parts.parameters(), lr=0.1)
            transfer((source, optimizer), (parts, few), names=names | rest)
        transfer(
            (source, optimizer) if rank == 0 else None,
            (target, other) if rank == 1 else None,
        ).run()
        if rank == 1:
            for number in range(1, 3):
                step(source, optimizer, number)
                step(target, other, number)
            for name, value in found(source, optimizer).items():
                assert torch.equal(found(target, other)[name], value), name

    run_ranks(2, rank_main)


@pytest.mark.parametrize("build", [torch.optim.Adafactor, Factors])
def test_state_of_owners_goes_to_other_owners_and_to_a_plain_model(build: Any) -> None:
    """`step_on_owners` keeps state of other shapes on one rank for each matrix: another one in another world."""

    def given(model: nn.Module, optimizer: Any, steps: range) -> None:
        for number in steps:
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                full = torch.randn(parameter.shape, generator=generator)
                parameter.grad = parted(full, parameter) if isinstance(parameter, DTensor) else full
            optimizer.step()

    def rank_main(rank: int) -> list[dict[str, Any]]:
        clear_sharding_cache()
        source: Any = seeded(make)
        few = DeviceMesh("cpu", [0, 1])
        there = None
        if rank < 2:
            fully_shard(source[0], mesh=few)
            fully_shard(source, mesh=few)
            mine = build(source.parameters())
            step_on_owners(mine)
            given(source, mine, range(2))
            there = source, mine
        target, plain = seeded(make, seed=1), seeded(make, seed=2)
        fully_shard(target)
        other, alone = build(target.parameters()), build(plain.parameters())
        step_on_owners(other)
        transfer(there, (target, other)).run()
        transfer(there, (plain, alone) if rank == 3 else None).run()
        given(target, other, range(2, 4))
        values = [{name: whole(tensor) for name, tensor in target.state_dict().items()}]
        if rank == 3:
            given(plain, alone, range(2, 4))
            values.append(dict(plain.state_dict()))
        return values

    expected = seeded(make)
    given(expected, build(expected.parameters()), range(4))
    for values in run_ranks(4, rank_main):
        for value in values:
            for name, tensor in expected.state_dict().items():
                assert torch.equal(value[name], tensor), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["soap", "shampoo", pytest.param("adafactor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", ["flat", "hsdp"])
def test_state_of_matrices_arrives_on_their_owners_alone(kind: str, to: str) -> None:
    """Lists of tensors too. Whole state crosses the line once for each replica, and no other rank has it."""

    def rank_main(rank: int) -> tuple[int, int]:
        clear_sharding_cache()
        source, few = seeded(Matrices), DeviceMesh("cpu", [0, 1])
        there = None
        if rank < 2:
            mine = KINDS[kind](flat(source, mesh=few).parameters())
            step_on_owners(mine, model=source)
            give_gradients(seeded(Matrices), source, 0)
            mine.step()
            there = source, mine
        plain, target = seeded(Matrices), LAYOUTS[to](seeded(Matrices, seed=1))
        ref, other = KINDS[kind](plain.parameters()), KINDS[kind](target.parameters())
        owners = step_on_owners(other, model=target)
        give_gradients(plain, plain, 0)
        ref.step()
        move = transfer(there, (target, other), limit_nbytes=64)
        move.run()
        assert_same(plain, ref, target, other, owners.plan())
        # State that is not sharded, and has dims: what of it is here, and what all ranks would have.
        mine_nbytes = all_nbytes = 0
        for name, parameter in target.named_parameters():
            for key, value in ref.state[dict(plain.named_parameters())[name]].items():
                tensors = [t for _, t in tensors_in(value) if t.ndim]
                here = other.state[parameter].get(key)
                if tensors and not isinstance(here, DTensor) and name not in owners.plan().kept:
                    all_nbytes += sum(tensor.nbytes for tensor in tensors)
                    mine_nbytes += sum(tensor.nbytes for _, tensor in tensors_in(here) if tensor.ndim)
        return mine_nbytes, all_nbytes

    found = run_ranks(4, rank_main)
    (everything,) = {every for _, every in found}
    assert sum(here for here, _ in found) == everything * (2 if to == "hsdp" else 1) > 0


def test_state_that_cannot_travel_is_named_on_all_ranks() -> None:
    def rank_main(rank: int) -> None:
        source, target = seeded(make), seeded(make, seed=1)
        optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
        other = torch.optim.SGD(target.parameters(), lr=0.1)
        for key, entry, text in (
            (source[0].weight, {"old_dirs": {1: torch.ones(2)}}, "Object of type Tensor"),  # type: ignore[index]
            ("of all", {"total": 1}, "expected state of parameters in its groups, found 'of all'"),
        ):
            optimizer.state.clear()
            if rank == 0:
                optimizer.state[key] = entry
            with pytest.raises(ValueError, match=f"rank 0: an optimizer's settings or state: {text}"):
                transfer((source, optimizer), (target, other))

    run_ranks(2, rank_main)
