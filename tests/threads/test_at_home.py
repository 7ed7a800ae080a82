"""At home in torch: unmodified programs by `install`, what other parts of torch ask of a module, and its utilities.

Where both implementations must do the same, the test runs for both.
"""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp as old_path
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard.engine import executor
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    FULLSHARD,
    Implementation,
    for_each_implementation,
    kinds,
    run,
    sharded,
)
from tests.harness.models import adamw, assert_same_training, collect, seeded
from tests.harness.threads import WORLD, run_ranks

# Other test modules of this process imported torch's functions; the test that is about that says so itself.
pytestmark = pytest.mark.filterwarnings("ignore:install. expected no module:UserWarning")

NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


@pytest.fixture
def put_back() -> Iterator[dict[tuple[str, str], Any]]:
    """What stood in torch's modules before the test, which must stand there after it."""
    places = [torch_fsdp, old_path, sys.modules["torch.distributed._composable.fsdp.fully_shard"]]
    before = {(place.__name__, name): value for place in places for name, value in vars(place).items()}
    yield before
    fullshard.uninstall()
    after = {(place.__name__, name): value for place in places for name, value in vars(place).items()}
    assert after.keys() == before.keys() and all(after[key] is before[key] for key in before)


# ---- install -------------------------------------------------------------------------------------------------

# As a user of torch 2.13 writes it; nothing in it knows of fullshard.
PROGRAM = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from {path} import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))

    def encode(self, x):
        return self.linear(x)


def build():
    return nn.Sequential(Block(), Block(), nn.Linear(5, 3))


def train(model, rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for block in model[:2]:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    assert isinstance(model, FSDPModule) and fully_shard.state(model) is not None
    register_fsdp_forward_method(model[0], "encode")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            (model(x).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
"""


def _program(path: str) -> Any:
    module = types.ModuleType("a_users_program")
    exec(PROGRAM.format(path=path), vars(module))
    return module


@behaviour(
    "`install()`: a program written for torch's FSDP2 runs unmodified, with the same result",
    area="surface",
    torch="none",
    reason="nothing is swapped unless it is called",
)
def test_an_unmodified_program_runs_on_fullshard(put_back: dict[tuple[str, str], Any]) -> None:
    """From the public path and the old one; the result is that of torch's FSDP2, which the same text runs on before."""

    def job(rank: int, program: Any, world: int, ours: bool) -> Any:
        model = seeded(program.build)
        optimizer = program.train(model, rank, world)
        assert isinstance(model, fullshard.FSDPModule) is ours
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return collect(model, optimizer)

    plain = seeded(_program("torch.distributed.fsdp").build)
    optimizer = tolerance.watch(torch.optim.AdamW(plain.parameters(), lr=1e-2))
    for step in range(3):
        for micro, rank in itertools.product(range(2), range(WORLD)):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            (plain(x).square().mean() / 2 / WORLD).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    alone = collect(plain, optimizer)
    for path in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
        expected = run_ranks(WORLD, job, _program(path), WORLD, False)
        with fullshard.install():
            found = run_ranks(WORLD, job, _program(path), WORLD, True)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_training(ours, replace(theirs, allowed=alone.allowed))
            assert_same_training(ours, alone)


def test_install_and_uninstall_put_back_the_very_objects(put_back: dict[tuple[str, str], Any]) -> None:
    def installed() -> bool:
        now = {torch_fsdp.fully_shard is fullshard.fully_shard, old_path.fully_shard is fullshard.fully_shard}
        assert len(now) == 1
        return now.pop()

    fullshard.uninstall()  # nothing to do
    with fullshard.install() as outer:
        assert installed() and isinstance(outer, fullshard.extras.Installation)
        for name in NAMES:
            assert getattr(torch_fsdp, name) is getattr(fullshard, name)
        with fullshard.install():  # changes nothing, and does not end what another one began
            assert installed()
        assert installed()
        fullshard.uninstall()
        assert not installed()
    with pytest.raises(KeyError), fullshard.install():
        raise KeyError
    assert not installed()
    fullshard.install()
    assert installed()
    # Classes stay torch's: ours are instances of them already.
    for name in ("FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert getattr(torch_fsdp, name) is put_back["torch.distributed.fsdp", name]


def test_who_imported_before_is_named(put_back: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    early = types.ModuleType("an_early_library")
    early.shard_it = torch_fsdp.fully_shard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_early_library", early)
    with pytest.warns(
        UserWarning, match=r"expected no module .* found .*an_early_library\.shard_it.*, which still call"
    ):
        fullshard.install()
    with fullshard.install():  # it was said
        pass
    fullshard.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="an_early_library"):
            fullshard.install()
    assert torch_fsdp.fully_shard is early.shard_it, "a warning that is an error leaves nothing swapped"
    assert early.shard_it is put_back["torch.distributed.fsdp", "fully_shard"]


def test_what_somebody_else_replaced_stays_theirs(
    put_back: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fullshard.install()
    with monkeypatch.context() as patch:
        other = object()
        patch.setattr(torch_fsdp, "share_comm_ctx", other)
        with pytest.warns(UserWarning, match=r"found others at torch\.distributed\.fsdp\.share_comm_ctx, which stay"):
            fullshard.uninstall()
        assert torch_fsdp.share_comm_ctx is other
        assert torch_fsdp.fully_shard is put_back["torch.distributed.fsdp", "fully_shard"]
    torch_fsdp.share_comm_ctx = put_back["torch.distributed.fsdp", "share_comm_ctx"]


def test_code_that_imported_while_installed_still_knows_torch_s_modules(put_back: dict[tuple[str, str], Any]) -> None:
    """As pipelining does, which asks `fully_shard.state` of whatever the user sharded."""

    def job(rank: int) -> None:
        theirs, ours = put_back["torch.distributed.fsdp", "fully_shard"](nn.Linear(2, 2)), nn.Linear(2, 2)
        with fullshard.install():
            from torch.distributed.fsdp import fully_shard

            fully_shard(ours)
        assert isinstance(ours, fullshard.FSDPModule) and not isinstance(theirs, fullshard.FSDPModule)
        state: Any = fully_shard.state  # type: ignore[attr-defined]
        assert state(theirs) is theirs._get_fsdp_state() and state(ours) is ours._get_fsdp_state()  # type: ignore[attr-defined]
        assert state(nn.Linear(2, 2)) is None
        assert torch_fsdp.fully_shard.state(ours) is state(ours)  # type: ignore[attr-defined]

    run_ranks(1, job)


# ---- the class -----------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """A module with an `_apply` of its own, which must be called between ours and that of nn.Module."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.applied = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.applied += 1
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_the_class_of_the_module_stands_where_torch_has_it() -> None:
    """dynamo reads `__mro__[2]`; and what the class overrides and calls by super() never meets torch's methods."""

    def job(rank: int) -> None:
        for make in (lambda: Scaled(3), nn.Module):
            ours, theirs = make(), make()
            fullshard.fully_shard(ours)
            torch_fsdp.fully_shard(theirs)
            assert type(ours).__mro__[2] is type(theirs).__mro__[2]
        model = fullshard.fully_shard(Scaled(3))
        optimizer = adamw(model.parameters())
        model.double()
        assert model.applied == 1 and model.weight.dtype is torch.float64
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        part = type(model)(3)
        assert type(part) is Scaled and part.applied == 0

    run_ranks(WORLD, job)


# ---- other data parallelism ----------------------------------------------------------------------------------


@behaviour("torch's `replicate` refuses a module that is sharded", area="errors")
@for_each_implementation
def test_replicate_after_fully_shard(impl: Implementation) -> None:
    def job(rank: int, impl: Implementation) -> None:
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(impl.fully_shard(nn.Linear(4, 4)))

    run(job, impl)


@behaviour(
    "`fully_shard` refuses what DistributedDataParallel or `replicate` averages",
    area="errors",
    torch="better",
    reason="torch shards it, and the other one waits for gradients of parameters that are gone",
)
def test_fully_shard_after_replicate(impl: Implementation) -> None:
    def job(rank: int, impl: Implementation) -> None:
        with pytest.raises(
            RuntimeError, match="expected parameters whose gradients nobody else averages, found 0 under"
        ):
            impl.fully_shard(nn.Sequential(replicate(nn.Linear(4, 4))))
        wrapped = replicate(nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="found DDPLinear under torch's replicate"):
            impl.fully_shard(wrapped)
        # One that averages a part is fine beside a unit that leaves this part alone.
        both = nn.Sequential(wrapped, nn.Linear(4, 4))
        impl.fully_shard(both, ignored_params=set(wrapped.parameters()))
        assert kinds(both[1]) == {DTensor} and kinds(both[0]) == {nn.Parameter}

    run(job, impl)


# ---- torch.nn.utils, EMA ------------------------------------------------------------------------


def _small() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: range) -> None:
    for rank in ranks:
        (model(_inputs(step, rank)).square().mean() / len(ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()


@behaviour("`clip_grad_value_`, `get_total_norm`, `clip_grads_with_norm_` of torch.nn.utils", area="clipping")
@for_each_implementation
def test_clipping_functions_of_torch(impl: Implementation) -> None:
    def job(rank: int, impl: Implementation) -> None:
        model, plain = sharded(impl, _small()), _small()
        model(_inputs(0, 0)).square().sum().backward()  # the same batch on both, so the mean is its gradient
        plain(_inputs(0, 0)).square().sum().backward()
        norms = [nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (model, plain)]
        total = norms[0].full_tensor()  # type: ignore[attr-defined]
        tolerance.assert_close(total, norms[1])
        for m in (model, plain):
            nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, norms[1])
            nn.utils.clip_grad_value_(m.parameters(), 0.1)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None and theirs.grad.abs().max() <= 0.1
            tolerance.assert_close(ours.grad.full_tensor(), theirs.grad)
        assert max(p.grad.abs().max() for p in plain.parameters()) == torch.tensor(0.1)  # some were cut

    run(job, impl)


@behaviour("an average of weights (AveragedModel) that is made before sharding and sharded beside the model",
           area="training")  # fmt: skip
@for_each_implementation
def test_an_average_of_weights(impl: Implementation) -> None:
    """It copies the model, which a sharded one refuses: so make it first, and shard both alike."""

    def averaged(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def train(model: nn.Module, average: AveragedModel, ranks: range) -> dict[str, Tensor]:
        optimizer = adamw(model.parameters())
        for step in range(3):
            _step(model, optimizer, step, ranks)
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            out = average(_inputs(9, 0))
        return {"out": out, **collect(average.module, adamw(average.module.parameters())).params}

    plain = _small()
    expected = train(plain, averaged(plain), range(WORLD))

    def job(rank: int, impl: Implementation) -> None:
        model = _small()
        average = averaged(model)
        sharded(impl, model), sharded(impl, average.module)
        found = train(model, average, range(rank, rank + 1))
        for name, value in expected.items():
            tolerance.assert_close(found[name], value)
        assert kinds(average.module) == {DTensor}
        with pytest.raises(AssertionError, match="deepcopy"):
            averaged(model)

    run(job, impl)


@behaviour("activation checkpointing by `checkpoint_wrapper`, inside and around units", area="recomputation")
@for_each_implementation
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_wrapper(inside: bool, impl: Implementation) -> None:
    plain = _small()
    optimizer = adamw(plain.parameters())
    for step in range(2):
        _step(plain, optimizer, step, range(WORLD))
    expected = collect(plain, optimizer)

    def job(rank: int, impl: Implementation) -> None:
        model: Any = _small()
        for i in (0, 2):
            if inside:
                model[i] = checkpoint_wrapper(model[i], CheckpointImpl.NO_REENTRANT)
                impl.fully_shard(model[i])
            else:
                model[i] = checkpoint_wrapper(impl.fully_shard(model[i]), CheckpointImpl.NO_REENTRANT)
        impl.fully_shard(model)
        optimizer = adamw(model.parameters())
        for step in range(2):
            _step(model, optimizer, step, range(rank, rank + 1))
        found = collect(model, optimizer)
        for values in (found.params, found.state):
            for name in list(values):
                values[name.replace("_checkpoint_wrapped_module.", "")] = values.pop(name)
        assert_same_training(found, expected)
        assert set(model.state_dict()) == set(plain.state_dict())  # the wrapper is not in names of a checkpoint

    run(job, impl)


# ---- profiling -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_commands_are_ranges_of_a_profile_only_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(name: str) -> Any:
        made.append(name)
        return torch.profiler.record_function(name)

    monkeypatch.setattr(executor, "record_function", noted)

    def job(rank: int, impl: Implementation) -> None:
        model = sharded(impl, _small())
        model(_inputs(0, 0)).sum().backward()
        assert not made
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(_inputs(0, 0)).sum().backward()
        seen = {event.key for event in profile.key_averages() if event.key.startswith("fullshard::")}
        assert seen == set(made) and {"fullshard::unshard (0)", "fullshard::reduce (2)"} <= seen
        number = len(made)
        model(_inputs(0, 0)).sum().backward()
        assert len(made) == number

    run(job, FULLSHARD, world=1)
