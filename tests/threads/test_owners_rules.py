"""`step_on_owners`: what it refuses and names, its rules, what it sends, and a training with it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fullshard
from fullshard import PeerFailed, RanksDisagree, step_on_owners
from fullshard.comm import OwnerLine
from fullshard.extras import matrices
from fullshard.layout import newton_schulz_flops
from tests.harness import tolerance
from tests.harness.models import assert_same_training, collect, full_copy, seeded
from tests.harness.threads import WORLD, run_ranks
from tests.threads.test_optimizer_families import _in_float64
from tests.threads.test_owners import (
    LAYOUTS,
    Model,
    adafactor,
    assert_same,
    flat,
    give_gradients,
    muon,
    tensor_parallel,
)

# ---- what goes wrong -------------------------------------------------------------------------------------------------


def _pair(models: list[nn.Module], rank: int, **options: Any) -> Any:
    plain, model = models[rank], flat(models[dist.get_world_size() + rank])
    ref, optimizer = muon(plain.parameters()), muon(model.parameters())
    return plain, ref, model, optimizer, step_on_owners(optimizer, model=model, **options)


def _content(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: full_copy(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": full_copy(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def _raised(rank: int, step: Callable[[], Any]) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        step()
    return caught.value


def test_a_gradient_that_is_none_on_one_rank_is_named_on_all() -> None:
    """Also where that rank has no rows. Nothing is written, and the next step is as if nothing had been."""
    models = [seeded(Model) for _ in range(6)]

    def job(rank: int) -> None:
        plain, ref, model, optimizer, owners = _pair(models, rank)
        for step in range(2):
            give_gradients(plain, model, step)
            if step == 1:
                before = _content(model, optimizer)
                held = model.gate.weight.grad  # type: ignore[union-attr]
                if rank == 2:
                    model.gate.weight.grad = None  # type: ignore[union-attr]
                error = _raised(rank, optimizer.step)
                assert "gate.weight" in str(error) and "None on rank 2 alone" in str(error), error
                owner = owners.plan().owner("gate.weight")
                assert isinstance(error, PeerFailed) is (rank != owner)
                if rank != owner:
                    assert error.rank == owner  # type: ignore[attr-defined]
                for name, value in _content(model, optimizer).items():
                    assert torch.equal(value, before[name]), name
                model.gate.weight.grad = held  # type: ignore[union-attr, assignment]
            ref.step()
            optimizer.step()
        assert_same(plain, ref, model, optimizer, owners.plan())

    run_ranks(3, job)


class Failing(torch.optim.Adafactor):
    """Raises in the step of a matrix of a shape, after it wrote it."""

    fails: tuple[int, ...] = ()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            if any(tuple(p.shape) == self.fails for p in group["params"]):
                raise ArithmeticError("the eigenvalues did not converge")


@pytest.mark.parametrize("chunk_nbytes", [1 << 20, 100])
def test_an_owner_that_raises_is_named_and_its_chunk_is_whole(chunk_nbytes: int) -> None:
    """In one chunk nothing is written, factors that the owner keeps included. After earlier chunks a step is refused
    until it is accepted, and says which matrices took it."""
    models = [seeded(Model) for _ in range(6)]

    def job(rank: int) -> None:
        plain, model = models[rank], flat(models[3 + rank])
        ref, optimizer = (Failing(one.parameters(), lr=0.05) for one in (plain, model))
        owners = step_on_owners(optimizer, model=model, chunk_nbytes=chunk_nbytes)
        give_gradients(plain, model, 0)
        ref.step()
        optimizer.step()
        give_gradients(plain, model, 1)
        before = [_content(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])]
        kept = {id(p): dict(state) for p, state in optimizer.state.items()}
        optimizer.fails = (9, 1)  # type: ignore[misc]
        error = _raised(rank, optimizer.step) if rank != owners.plan().owner("wide.weight") else None
        if error is None:
            with pytest.raises(ArithmeticError, match="did not converge") as caught:
                optimizer.step()
            assert any("of what this rank owns" in note for note in caught.value.__notes__)
        else:
            assert isinstance(error, PeerFailed) and error.rank == owners.plan().owner("wide.weight")
            assert "ArithmeticError: the eigenvalues did not converge" in str(error)
        optimizer.fails = ()
        assert optimizer.state_dict()["param_groups"] == before[1]
        written = owners.written
        after = _content(model, optimizer)
        for name, value in before[0].items():
            took = any(name == title or name.startswith(f"{title}.") for title in written)
            assert torch.equal(after[name], value) is not took, name
        if chunk_nbytes == 100:
            assert written and "wide.weight" not in written
            assert "accept()" in str(_raised(rank, optimizer.step))
            owners.accept()
            optimizer.step()
            return
        assert not written
        for parameter in model.parameters():
            assert {k: id(v) for k, v in optimizer.state[parameter].items()} == {
                k: id(v) for k, v in kept[id(parameter)].items()
            }
        ref.step()
        optimizer.step()
        assert_same(plain, ref, model, optimizer, owners.plan())

    run_ranks(3, job)


def test_ranks_whose_optimizers_have_other_matrices_are_named() -> None:
    models = [seeded(Model) for _ in range(2)]

    def job(rank: int) -> None:
        model = flat(models[rank])
        parameters = [model.up.weight, model.down.weight][: 2 - rank]  # type: ignore[union-attr]
        optimizer = torch.optim.Muon(parameters, lr=0.02)  # type: ignore[arg-type]
        step_on_owners(optimizer, model=model)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # type: ignore[arg-type, union-attr]
        with pytest.raises(RanksDisagree, match="the same matrices") as caught:
            optimizer.step()
        zero, one = caught.value.by_rank.values()
        assert zero == "2 matrices, down.weight (6, 9) with 4, 4 bytes per element of gradient, parameter and state"
        assert one == "1 matrices, none of its own"

    run_ranks(2, job)


def test_matrices_leave_out_vocabularies_by_rule() -> None:
    """Weights of embeddings, heads tied to them, and what has the size of a vocabulary; stacks of experts by their
    matrices alone."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.bag = nn.Embedding(50, 8), nn.EmbeddingBag(7, 8)
            self.inner, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
            self.tied = nn.Linear(8, 50, bias=False)
            self.tied.weight = self.tokens.weight
            self.large, self.below = nn.Linear(8, 32_768), nn.Linear(32_767, 8)
            self.experts = nn.Parameter(torch.zeros(40_000, 2, 3))  # many, each of them small
            self.vocabularies = nn.Parameter(torch.zeros(2, 3, 32_768))
            self.frozen = nn.Linear(8, 8).requires_grad_(False)

    with torch.device("meta"):
        model = Language()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in matrices(model)] == ["experts", "inner.weight", "below.weight"]
    rest = {names[id(p)] for p in matrices(model, rest=True)}
    assert rest == set(names.values()) - {"experts", "inner.weight", "below.weight", "frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (17, 17), (1, 50), (50, 1)])
def test_the_cost_of_a_matrix_is_what_torch_counts_in_muon_s_step(shape: tuple[int, int]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = torch.optim.Muon([parameter], lr=0.1)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert counted.get_total_flops() == newton_schulz_flops(shape)


def test_what_is_refused() -> None:
    model = Model()
    with pytest.raises(TypeError, match="optimizers: expected an optimizer"):
        step_on_owners(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS, which needs all parameters"):
        step_on_owners(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="for which step_on_shards is enough"):
        step_on_owners(torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="on_shards: expected names"):
        step_on_owners(muon(model.parameters()), on_shards="up")
    optimizer = muon(model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match="call step_on_owners before the schedule is built"):
        step_on_owners(optimizer)
    optimizer = muon(model.parameters())
    step_on_owners(optimizer)
    with pytest.raises(ValueError, match="one whose matrices have no owners"):
        fullshard.step_on_shards(optimizer, elementwise=True)


# ---- rules -----------------------------------------------------------------------------------------------------------


class PerIndex(torch.optim.Muon):
    """Muon that takes stacks by itself: each index as a matrix."""

    def step(self, closure: Any = None) -> None:
        groups, states = [group["params"] for group in self.param_groups], self.state
        try:
            inner: Any = defaultdict(dict)
            for group in self.param_groups:
                flat: list[Tensor] = []
                for p in group["params"]:
                    for number in range(len(p)) if p.ndim == 3 else (None,):
                        one = p.detach() if number is None else p.detach()[number]
                        one.grad = p.grad if number is None else p.grad[number]
                        if states[p]:
                            held = states[p]["momentum_buffer"]
                            inner[one]["momentum_buffer"] = held if number is None else held[number]
                        else:
                            inner[one]["momentum_buffer"] = torch.zeros_like(one)
                        flat.append(one)
                group["params"] = flat
            self.state = inner
            super().step(closure)
        finally:
            self.state = states
            for group, params in zip(self.param_groups, groups, strict=True):
                made = iter(group["params"])
                group["params"] = params
                for p in params:
                    found = [inner[next(made)]["momentum_buffer"] for _ in range(len(p) if p.ndim == 3 else 1)]
                    self.state[p]["momentum_buffer"] = torch.stack(found) if p.ndim == 3 else found[0]


def test_stacks_are_cut_by_expert_and_stay_where_they_are() -> None:
    """torch's Muon steps them so on owners, though it takes two dims alone; beside a Muon that does it itself."""
    models = [seeded(Model) for _ in range(6)]

    def job(rank: int) -> None:
        plain, model = models[rank], flat(models[3 + rank])
        ref, optimizer = PerIndex([plain.gate.weight], lr=0.1), torch.optim.Muon([model.gate.weight], lr=0.1)  # type: ignore[list-item, union-attr]
        for one, of in ((ref, plain), (optimizer, model)):
            one.add_param_group({"params": [of.experts], "lr": 0.2})
        plan = step_on_owners(optimizer, model=model).plan()
        assert [plan.owner(f"experts[{number}]") for number in range(3)] == [0, 1, 2]
        assert all(nbytes == 0 for title, *_, nbytes in plan.rows() if title != "gate.weight")
        for step in range(3):
            give_gradients(plain, model, step)
            ref.step()
            optimizer.step()
        for name in ("gate.weight", "experts"):
            other, parameter = dict(model.named_parameters())[name], dict(plain.named_parameters())[name]
            assert torch.equal(full_copy(other), parameter.detach()), name
            found = optimizer.state[other]["momentum_buffer"]
            assert torch.equal(full_copy(found), ref.state[parameter]["momentum_buffer"]), name

    run_ranks(3, job)


@pytest.mark.parametrize(
    ("layout", "world"), [("flat", 1), ("hsdp", 2), ("hsdp", 4), ("flat", 2), ("flat", 4), ("tp", 4)]
)
@pytest.mark.sample(2)
def test_stacks_are_stepped_by_expert_in_every_layout(layout: str, world: int) -> None:
    """Also by one rank, and where each replica has them whole, as plain Muon takes two dims alone."""
    models = [seeded(Model) for _ in range(2 * world)]

    def job(rank: int) -> None:
        plain, model = models[rank], LAYOUTS[layout](models[world + rank])
        ref, optimizer = PerIndex([plain.up.weight], lr=0.1), torch.optim.Muon([model.up.weight], lr=0.1)  # type: ignore[list-item, union-attr]
        for one, of in ((ref, plain), (optimizer, model)):
            one.add_param_group({"params": [of.experts], "lr": 0.2})
        plan = step_on_owners(optimizer, model=model).plan()
        assert (plan.messages == 0) is (world == 1 or (layout, world) == ("hsdp", 2))
        for step in range(2):
            give_gradients(plain, model, step)
            ref.step()
            optimizer.step()
        for name in ("up.weight", "experts"):
            other, parameter = dict(model.named_parameters())[name], dict(plain.named_parameters())[name]
            assert torch.equal(full_copy(other), parameter.detach()), name
            found = optimizer.state[other]["momentum_buffer"]
            assert torch.equal(full_copy(found), ref.state[parameter]["momentum_buffer"]), name

    run_ranks(world, job)


def test_what_is_stepped_on_shards_and_what_matrices_are() -> None:
    """Names and functions; an optimizer with AdamW beside it, in one call and one step."""
    models = [
        seeded(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 9, bias=False)))
        for _ in range(4)
    ]

    def job(rank: int) -> None:
        plain, model = models[rank], models[2 + rank]
        fullshard.fully_shard(model)
        assert [tuple(p.shape) for p in matrices(model)] == [(6, 4), (9, 6)]
        assert len(matrices(model, rest=True)) == 4
        pairs = []
        for one in (plain, model):
            pairs.append([torch.optim.Muon(matrices(one), lr=0.1), torch.optim.AdamW(matrices(one, rest=True), lr=0.1)])
        owners = step_on_owners(pairs[1], model=model)
        assert set(owners.plan().kept) == {"0.weight", "1.bias", "2.weight", "2.bias"}
        assert "AdamW: each element by itself" in str(owners.plan())
        for step in range(2):
            give_gradients(plain, model, step)
            for one in pairs[0]:
                one.step()
            owners.step()
            owners.zero_grad()
        for (name, p), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(full_copy(other), p.detach()) and other.grad is None, name
        rules: list[Any] = [["3.*"], lambda name, p: p.shape[0] == 9]
        for rule in rules:
            assert "3.weight" in step_on_owners(pairs[1], model=model, on_shards=rule).plan().kept

    run_ranks(2, job)


# ---- a training ------------------------------------------------------------------------------------------------------


def test_bytes_and_messages_are_those_of_the_plan() -> None:
    """All-to-alls and bytes of a steady step, with two chunks, on ranks of two meshes; and none of another kind."""
    models = [seeded(Model) for _ in range(4)]
    exchange, told = OwnerLine.exchange, OwnerLine.told
    sent: list[list[tuple[str, int]]] = [[] for _ in range(4)]

    def note_exchange(line: OwnerLine, out: Tensor, pieces: Tensor, arriving: Any, leaving: Any) -> Any:
        assert leaving[line.rank] == 0 == arriving[line.rank] and sum(leaving) == len(pieces)
        sent[dist.get_rank()].append(("exchange", sum(leaving)))
        return exchange(line, out, pieces, arriving, leaving)

    def note_told(line: OwnerLine, text: str) -> Any:
        sent[dist.get_rank()].append(("told", len(text)))
        return told(line, text)

    def job(rank: int) -> Any:
        model = tensor_parallel(models[rank])
        optimizer = adafactor(model.parameters())
        owners = step_on_owners(optimizer, model=model, chunk_nbytes=300)
        for step in range(3):
            give_gradients(models[rank], model, step)
            sent[rank].clear()
            optimizer.step()
        plan = owners.plan()
        return plan.messages, sum(plan.sent_nbytes(rank)), sent[rank], len(plan.fleets)

    with mock.patch.object(OwnerLine, "exchange", note_exchange), mock.patch.object(OwnerLine, "told", note_told):
        found = run_ranks(4, job)
    for messages, nbytes, here, fleets in found:
        assert fleets == 2 and messages > 4
        assert [kind for kind, _ in here] == ["exchange"] * messages and sum(n for _, n in here) == nbytes


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("layout", ["flat", "average"])
def test_a_training_is_off_by_the_order_of_sums_alone(layout: str) -> None:
    """By a closure, under a schedule, with an average of the parameters. Newton-Schulz iterations are in float64, as in
    tests/threads/test_optimizer_families.py: in bfloat16 the last bit of a gradient may be a hundredth of an update."""

    def train(model: nn.Module, ranks: range) -> Any:
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
        if len(ranks) > 1:
            tolerance.watch(optimizer)
        else:
            step_on_owners(optimizer, chunk_nbytes=300)
        mean = fullshard.average(model, decay=0.5) if layout == "average" else None
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                losses = [model(_batch(step, rank)) / len(ranks) for rank in ranks]
                for loss in losses:
                    loss.backward()
                return torch.stack(losses).sum()

            assert optimizer.step(closure) is not None
            schedule.step()
            if mean is not None:
                mean.update()
        return collect(model, optimizer)

    with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", _in_float64()):
        expected = train(seeded(Model), range(WORLD))
        models = [seeded(Model) for _ in range(WORLD)]

        def job(rank: int) -> None:
            assert_same_training(train(flat(models[rank]), range(rank, rank + 1)), expected)

        run_ranks(WORLD, job)


def test_scaled_mixed_and_offloaded() -> None:
    """With the gradients that the optimizer sees, whole, one process takes the same steps; one with inf is skipped."""
    models = [seeded(Model) for _ in range(2 * WORLD)]

    def job(rank: int) -> None:
        plain = models[rank]
        options = {
            "mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16),
            "offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False),
        }
        model = flat(models[WORLD + rank], **options)
        ref, optimizer = muon(plain.parameters()), muon(model.parameters())
        plan = step_on_owners(optimizer, model=model).plan()
        scaler = fullshard.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scale = float("inf") if step == 1 else 1.0
            scaler.scale(model(_batch(step, rank)) * scale).backward()
            scaler.unscale_(optimizer)
            for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert other.grad is not None
                parameter.grad = full_copy(other.grad)
            scaler.step(optimizer)
            scaler.update()
            if step != 1:
                ref.step()
            assert_same(plain, ref, model, optimizer, plan)

    run_ranks(WORLD, job)


def test_parameters_that_come_later_and_options_that_count() -> None:
    """`add_param_group` between steps: owners stay, and so does the state that they keep."""
    models = [seeded(Model) for _ in range(2 * WORLD)]

    def job(rank: int) -> None:
        plain, model = models[rank], flat(models[WORLD + rank])
        pair = [adafactor([p for p in one.parameters() if p.ndim == 1]) for one in (plain, model)]
        owners = step_on_owners(pair[1], model=model)
        for step in range(3):
            if step == 1:
                before = {title: owner for title, _, owner, *_ in owners.plan().rows()}
                for optimizer, one in zip(pair, (plain, model), strict=True):
                    optimizer.add_param_group({"params": [p for p in one.parameters() if p.ndim > 1], "lr": 0.1})
                after = {title: owner for title, _, owner, *_ in owners.plan().rows()}
                assert before.items() <= after.items() and len(after) == len(before) + 5
            give_gradients(plain, model, step)
            for optimizer in pair:
                optimizer.step()
        assert_same(plain, pair[0], model, pair[1], owners.plan())

    run_ranks(WORLD, job)
