"""`check_gradients`: one element that is not finite, anywhere, is one decision of all ranks, before any update."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from fullshard import check_gradients
from fullshard.extras import GradientCheck, NonFiniteError
from tests.harness import experts
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks, several


class Mixed(nn.Module):
    """Uneven and tiny dims, tied, frozen, unused, ignored and bfloat16 parameters; two units and the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.first = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.second = nn.Linear(5, 5).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(1))
        self.plain = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.table.weight
        self.first[2].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.table(tokens)) * self.scale * self.plain
        return self.head(self.second(x.to(torch.bfloat16)).float())


def _mixed(**options: Any) -> Any:
    model: Any = seeded(Mixed)
    options["ignored_params"] = {model.plain}
    # No unit has it, so its gradient is the caller's to reduce.
    model.plain.register_post_accumulate_grad_hook(lambda plain: dist.all_reduce(plain.grad))
    fullshard.fully_shard(model.first, **options)
    fullshard.fully_shard(model.second, **options)
    return fullshard.fully_shard(model, **options)


def _loss(model: Any, rank: int, step: int = 0) -> Tensor:
    tokens = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(tokens).square().mean()
    return loss


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's part of all parameters and of the optimizer's state."""
    tensors = [*model.parameters()]
    for values in optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, Tensor)]
    return [_local(tensor.detach()).clone() for tensor in tensors]


def _same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


class Setting(NamedTuple):
    """How the model is sharded."""

    world: int
    shape: tuple[int, ...] = ()
    options: Callable[[], dict[str, Any]] = dict

    def model(self) -> Any:
        options = self.options()
        if self.shape:
            options["mesh"] = init_device_mesh("cpu", self.shape, mesh_dim_names=("replicate", "shard"))
        return _mixed(**options)


SETTINGS = {
    "uneven": Setting(3),
    "alone": Setting(1),
    "replicated": Setting(4, (2, 2)),
    "offloaded": Setting(2, options=lambda: {"offload_policy": fullshard.CPUOffloadPolicy()}),
    "kept full": Setting(2, options=lambda: {"reshard_after_forward": False}),
}


def _places(gradients: list[tuple[str, Tensor]], rng: random.Random, count: int) -> list[tuple[str, int, float]]:
    """(parameter, place in this rank's rows, value), of parameters of which this rank has rows."""
    own = [(name, gradient) for name, gradient in gradients if gradient.numel()]
    chosen = [rng.choice(own) for _ in range(count)]
    return [(name, rng.randrange(g.numel()), rng.choice([math.nan, math.inf, -math.inf])) for name, g in chosen]


@pytest.mark.sample(1)
@behaviour(
    "`fullshard.check_gradients`: one bad element of a gradient, anywhere, is named on all ranks, the step skipped",
    area="failures",
    torch="none",
    reason="torch updates all parameters with NaN",
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_bad_element_anywhere(setting: str) -> None:
    """50 random places (rank, parameter, index): found each time; parameters and state bitwise as before the step."""
    chosen = SETTINGS[setting]

    def rank_main(rank: int) -> int:
        model = chosen.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        _loss(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        _loss(model, rank, 1).backward()
        if chosen.shape or chosen.world > 1:
            # That of an ignored parameter is this rank's own; equal ones here, as after a reduction by the user.
            dist.all_reduce(model.plain.grad)
        named = dict(model.named_parameters())
        good = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        assert set(named) - set(good) == {"first.2.bias", "unused"}
        before = _state(model, optimizer)
        local = [(name, _local(gradient)) for name, gradient in good.items()]
        # Every rank draws the places of all of them: whose turn it is, and then its place.
        turns = random.Random(5)
        own = _places(local, random.Random(100 + rank), 50)
        found = 0
        for turn in range(50):
            owner = turns.randrange(chosen.world)
            for name, gradient in good.items():
                named[name].grad = gradient.clone()
            assert check_gradients(model) == GradientCheck(True, turn)
            name, index, value = own[turn]
            if rank == owner:
                _local(named[name].grad).view(-1)[index] = value
            check = check_gradients(model, 1.0, on_nonfinite="skip")
            said = [None] * chosen.world
            dist.all_gather_object(said, (check, name))
            assert all(other == said[0] for other in [(c, said[0][1]) for c, _ in said]), said  # type: ignore[index]
            assert not check.ok and check.bad_steps == turn + 1
            assert check.rank == owner and check.name == said[owner][1], (check, said[owner])  # type: ignore[index]
            assert check.what is not None and check.what.startswith("1 of ")
            if rank == owner:
                assert check.what.endswith(str(value)), check.what
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())
            found += _same(_state(model, optimizer), before)
        # It was no accident that nothing changed.
        for name, gradient in good.items():
            named[name].grad = gradient.clone()
        check_gradients(model, 1.0, on_nonfinite="skip")
        optimizer.step()
        assert not _same(_state(model, optimizer), before)
        return found

    assert run_ranks(chosen.world, rank_main) == [50] * chosen.world


def test_the_first_by_order_of_parameters_then_by_rank() -> None:
    world = 3

    def rank_main(rank: int) -> None:
        model = _mixed()
        _loss(model, rank).backward()
        named = dict(model.named_parameters())
        for name in ("head.bias", "first.0.weight", "first.0.bias"):
            if rank != 0:
                _local(named[name].grad).view(-1)[0] = math.nan
        check = check_gradients(model, on_nonfinite="count")
        assert (check.ok, check.name, check.rank) == (False, "first.0.weight", 1)
        assert check.what == "1 of 15 elements of its part, the first at (0, 0): nan"
        # Counted, and left as it was.
        assert all(not math.isfinite(_local(named["head.bias"].grad).sum()) for _ in (0,) if rank != 0)
        check = check_gradients(model, math.inf if rank == 2 else 1.0, on_nonfinite="count")
        assert (check.name, check.rank, check.what, check.bad_steps) == ("loss", 2, "it is inf", 2)
        with pytest.raises(
            NonFiniteError, match=r"the loss is not finite on rank 1: 2 of 4 elements .*\(1,\): nan"
        ) as e:
            check_gradients(model, torch.tensor([0.0, math.nan, math.inf, 1.0] if rank else [0.0]))
        assert isinstance(e.value, FloatingPointError) and e.value.check.bad_steps == 3
        # Parameters alone have no names.
        check = check_gradients(model.parameters(), on_nonfinite="count")
        position = list(named).index("first.0.weight")
        assert check.name == f"parameter {position} of shape (9, 5)" and check.bad_steps == 1
        assert check_gradients(model.table.weight, on_nonfinite="count").ok

    run_ranks(world, rank_main)


@behaviour(
    "a loss of NaN on one rank stops all ranks before the update, and the rank is named",
    area="failures",
    torch="none",
    reason="torch has no such call",
)
def test_the_loss_of_one_rank() -> None:
    """Its gradients are bad on all ranks; the loss says whose batch it was. The model learns on without that step."""
    world = several()

    def rank_main(rank: int, bad: bool) -> list[Tensor]:
        model = _mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            if step == 1 and not bad:
                continue
            loss = _loss(model, rank, step)
            if step == 1 and rank == world - 1:
                loss = loss * math.nan
            loss.backward()
            check = check_gradients(model, loss, on_nonfinite="skip")
            assert (check.name, check.rank) == (("loss", world - 1) if step == 1 else (None, None))
            optimizer.step()
            optimizer.zero_grad()
        return _state(model, optimizer)

    for skipped, without in zip(run_ranks(world, rank_main, True), run_ranks(world, rank_main, False), strict=True):
        assert _same(skipped, without)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, for `check_invariants=False`
def test_nothing_is_accused_that_is_finite() -> None:
    """Sums of squares that overflow, float16 at its end, complex and sparse gradients, none at all, empty parts."""

    def rank_main(rank: int) -> None:
        model: Any = fullshard.fully_shard(seeded(lambda: nn.Linear(4, 2)))
        assert check_gradients(model).ok and check_gradients([]).ok and check_gradients(nn.Identity(), 1.0).ok
        model(torch.ones(1, 4)).sum().backward()
        for value in (3e38, -3e38, 1e-45):
            for p in model.parameters():
                _local(p.grad).fill_(value)
            assert check_gradients(model).ok
        plain = nn.ParameterList(
            [
                nn.Parameter(torch.ones(70, dtype=torch.float16)),
                nn.Parameter(torch.ones(2, dtype=torch.complex64)),
                nn.Parameter(torch.ones(3, 2)),
                nn.Parameter(torch.ones(0, 2)),
            ]
        )
        plain[0].grad = torch.full((70,), 65504.0, dtype=torch.float16)
        plain[1].grad = torch.full((2,), complex(3e38, -3e38))
        index = torch.tensor([[0, 2]])
        plain[2].grad = torch.sparse_coo_tensor(index, torch.full((2, 2), 3e38), (3, 2), check_invariants=False)
        plain[3].grad = torch.ones(0, 2)
        assert check_gradients(plain).ok
        # Of several process groups that are no mesh: the default one decides.
        plain[1].grad[rank] = complex(0.0, math.nan)
        check = check_gradients(plain, on_nonfinite="count")
        assert (check.name, check.rank) == ("1", 0) and check.what is not None and "nan" in check.what
        plain[1].grad = None
        plain[2].grad = torch.sparse_coo_tensor(
            index, torch.tensor([[0.0, math.inf]] * 2), (3, 2), check_invariants=False
        )
        assert check_gradients(plain, on_nonfinite="count").name == "2"

    run_ranks(2, rank_main)


def test_full_parameters_on_the_modules_hide_nothing() -> None:
    """`full_params`, and full parameters that stay after backward: gradients are on the sharded ones."""

    def rank_main(rank: int) -> None:
        model = _mixed(reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        _loss(model, rank).backward()
        weight = model.first[0].weight
        assert not isinstance(weight, DTensor), "full parameters were to stay"
        for p in [p for unit in model.modules() if isinstance(unit, fullshard.FSDPModule) for p in _sharded(unit)]:
            if p.grad is not None and p.shape == weight.shape and rank == 1:
                _local(p.grad).view(-1)[0] = math.inf
        assert check_gradients(model, on_nonfinite="count").name == "first.0.weight"
        model.reshard()
        with fullshard.full_params(model):
            assert check_gradients(model, on_nonfinite="count").name == "first.0.weight"

    run_ranks(WORLD if WORLD > 1 else 2, rank_main)


def _sharded(module: Any) -> list[Tensor]:
    return [param.sharded for param in module._unit().params]


def test_parameters_on_several_meshes() -> None:
    """On dp, on tp, on both, replicated and plain: every rank learns of each, in whatever order they are given."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        value = torch.ones(4, 4)
        on = [
            (mesh["dp"], [Shard(0)]),
            (mesh["tp"], [Shard(1)]),
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Replicate(), Shard(0)]),
        ]
        parameters = [nn.Parameter(distribute_tensor(value, m, placements)) for m, placements in on]
        parameters.append(nn.Parameter(value.clone()))
        for chosen in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 1], [1, 0], [0, 1, 4]):
            some = [parameters[i] for i in chosen]
            for owner in range(4):
                for broken in range(len(some)):
                    for p in some:
                        p.grad = torch.ones_like(p.detach())
                    assert check_gradients(some).ok
                    if rank == owner:
                        _local(some[broken].grad)[0, 0] = math.nan  # type: ignore[arg-type]
                    check = check_gradients(some, on_nonfinite="count")
                    where = f"{chosen}: rank {owner}, parameter {broken}: {check}"
                    assert check.name is not None and check.name.startswith(f"parameter {broken} of"), where
                    assert check.rank == owner, where

    run_ranks(4, rank_main)


def test_experts_on_fewer_ranks() -> None:
    """A bad expert of one pair of ranks stops the other pair as well, which has no such expert."""

    def rank_main(rank: int) -> None:
        mesh, parts = experts.meshes()
        pair = rank // 2
        model = experts.sharded(
            fullshard,
            experts.model_of(pair),
            mesh,
            lambda dim: fullshard.ShardPlacementResult(dim, parts["expert"]),
            0,
        )
        experts.loss(model, experts.batch(0, rank)).backward()
        assert check_gradients(model).ok
        if rank == 3:
            _local(model[1].up.grad).view(-1)[-1] = math.nan
        check = check_gradients(model, on_nonfinite="count")
        assert (check.name, check.rank) == ("1.up", 3)

    run_ranks(4, rank_main)


def test_ranks_that_share_no_mesh_decide_alike_by_a_process_group() -> None:
    """Two stages of a pipeline: the last one alone has a loss."""

    def rank_main(rank: int) -> None:
        stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
        model: Any = fullshard.fully_shard(seeded(lambda: nn.Linear(3, 3)), mesh=stages["shard"])
        model(torch.ones(1, 3)).sum().backward()
        loss = math.nan if rank == 3 else None
        alone = check_gradients(model, loss, on_nonfinite="count")
        assert alone.ok == (rank < 2)
        together = check_gradients(model, loss, on_nonfinite="skip", process_group=dist.group.WORLD)
        assert (together.name, together.rank) == ("loss", 3) and model.weight.grad is None

    run_ranks(4, rank_main)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fullshard.GradScaler])
def test_behind_a_gradient_scaler(kind: Any) -> None:
    """After `unscale_`: the scaler skips what it skips and halves; a bad loss with good gradients is skipped too."""

    def rank_main(rank: int) -> None:
        model: Any = fullshard.fully_shard(seeded(lambda: nn.Linear(3, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=8.0, growth_interval=100)
        scales, moved = [], []
        for case in ("good", "bad gradient", "bad loss", "good"):
            before = _state(model, optimizer)
            loss = model(torch.ones(1, 3)).square().mean()
            scaler.scale(loss).backward()
            if case == "bad gradient" and rank == 1:
                _local(model.bias.grad)[0] = math.inf
            scaler.unscale_(optimizer)
            bad = case == "bad loss" and rank == 0
            check = check_gradients(model, math.nan if bad else loss, on_nonfinite="skip")
            assert check.ok == (case == "good")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            moved.append(not _same(_state(model, optimizer), before))
        assert moved == [True, False, False, True] and scales == [8.0, 4.0, 4.0, 4.0]

    run_ranks(2, rank_main)


def test_what_is_refused() -> None:
    def rank_main(rank: int) -> None:
        model = _mixed()
        with pytest.raises(ValueError, match=r"on_nonfinite: expected one of 'raise', 'skip', 'count', found 'warn'"):
            check_gradients(model, on_nonfinite="warn")  # type: ignore[arg-type]
        model.set_requires_gradient_sync(False)
        _loss(model, rank).backward()
        with pytest.raises(RuntimeError, match="expected a reduced gradient"):
            check_gradients(model)
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if n != "plain"])
        fullshard.step_in_backward(model, optimizer)
        loss = _loss(model, rank)
        # The loss can be looked at while there are no gradients yet.
        assert check_gradients(model, loss).ok
        with pytest.raises(NonFiniteError, match="the loss is not finite on rank 1"):
            check_gradients(model, math.nan if rank == 1 else loss)
        loss.backward()
        with pytest.raises(RuntimeError, match="took a step with it in backward already"):
            check_gradients(model)

    run_ranks(2, rank_main)


def test_clipping_with_error_stays_torch_s() -> None:
    """`error_if_nonfinite` raises `RuntimeError`, as torch's; the check before it names the parameter."""

    def rank_main(rank: int) -> None:
        model = _mixed()
        _loss(model, rank).backward()
        if rank == 0:
            _local(model.head.bias.grad)[0] = math.nan
        with pytest.raises(RuntimeError, match="non-finite"):
            fullshard.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert check_gradients(model, on_nonfinite="count").name == "head.bias"

    run_ranks(2, rank_main)


def test_a_plain_model_in_one_process() -> None:
    model = copy.deepcopy(seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    model(torch.ones(1, 2)).sum().backward()
    assert check_gradients(model, 1.0) == GradientCheck(True, 0)
    model[1].weight.grad[1, 0] = math.nan  # type: ignore[index, union-attr]
    check = check_gradients(model, on_nonfinite="skip")
    assert check == GradientCheck(False, 1, "1.weight", 0, "1 of 4 elements of its part, the first at (1, 0): nan")
    assert model[0].weight.grad is None
    assert str(check) == f"the gradient of 1.weight is not finite on rank 0: {check.what}"
