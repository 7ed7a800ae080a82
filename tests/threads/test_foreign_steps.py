"""Optimizers and wrappers of others around shards: an error with names and the call that works, which then does."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import fully_shard
from fullshard._torch.modules import REFUSES_CHANGED_PLACEMENTS
from fullshard.engine.foreign import note_mixed, note_uncaught
from tests.harness import tolerance
from tests.harness.errors import RanksFailed
from tests.harness.models import seeded
from tests.harness.threads import run_ranks


class Adapted(nn.Module):
    """A linear that is sharded, and a scale that stays plain on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 128)
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) * self.scale
        return found


def _inputs() -> Tensor:
    return torch.linspace(-1, 1, 128).view(2, 64)


def _sharded(plain: nn.Module) -> Any:
    model = copy.deepcopy(plain)
    return fully_shard(model, ignored_params={model.scale})


def _backward(*models: nn.Module) -> None:
    for model in models:
        model(_inputs()).square().mean().backward()


def _compare(model: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert tolerance.close(getattr(mine, "full_tensor", lambda one=mine: one)(), theirs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("cure", ["shards", "off"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_one_list_of_plain_and_sharded_parameters(how: str, cure: str, kind: Any) -> None:
    def run(rank: int) -> None:
        plain = seeded(Adapted)
        model = _sharded(plain)
        _backward(model, plain)
        optimizer, reference = kind(model.parameters(), lr=0.1, **{how: True}), kind(plain.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=rf"base.weight, .* beside Adapted.scale, .*step_on_shards.*{how}=False"):
            optimizer.step()
        assert not optimizer.state
        if cure == "shards":
            fullshard.step_on_shards(optimizer)
        else:
            optimizer = kind(model.parameters(), lr=0.1, **{how: False})
        optimizer.step()
        reference.step()
        _compare(model, plain)

    run_ranks(2, run)


def test_what_torch_takes_is_not_refused() -> None:
    """Plain parameters without a gradient, in another dtype, or in no list of the shards'; and no option at all."""

    def run(rank: int) -> None:
        for change in ("frozen", "dtype", "groups", "default"):
            model = _sharded(seeded(Adapted))
            if change == "dtype":
                model.scale.data = model.scale.data.double()
            _backward(model)
            if change == "frozen":
                model.scale.grad = None
            shards = [p for p in model.parameters() if p is not model.scale]
            groups: Any = [{"params": shards}, {"params": [model.scale]}] if change == "groups" else model.parameters()
            torch.optim.AdamW(groups, foreach=None if change == "default" else True).step()

    run_ranks(2, run)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW", "Lion8bit"])
def test_optimizers_of_bitsandbytes(name: str) -> None:
    optimizers = pytest.importorskip("bitsandbytes").optim

    def run(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(64, 128, bias=False)))
        _backward(model)
        before = model.weight.full_tensor().clone()
        optimizer = getattr(optimizers, name)(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"found weight, .*step_on_shards\(optimizer, elementwise=True\)"):
            optimizer.step()
        fullshard.step_on_shards(optimizer, elementwise=True).step()
        # A first step of these moves each element by about the learning rate.
        assert ((model.weight.full_tensor() - before).abs() > 0.05).float().mean() > 0.9

    run_ranks(2, run)


@pytest.mark.parametrize("where", ["root", "part", "inner"])
def test_distributed_data_parallel_around_units(where: str) -> None:
    def run(rank: int) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))
        fully_shard({"root": model, "part": model[0], "inner": model[1][0]}[where])
        named = {"root": "0.weight", "part": "0.weight", "inner": "1.0.weight"}[where]
        with pytest.raises(
            RuntimeError, match=rf"DistributedDataParallel: expected .* sharded {named}.*mesh of two axes"
        ):
            DistributedDataParallel(model)

    run_ranks(2, run)


def test_shards_that_ddp_leaves_out_are_no_concern() -> None:
    """The names are on the module before DDP is built, as torch documents."""

    def run(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
        DistributedDataParallel(model, init_sync=False)

    run_ranks(2, run)


def test_a_module_without_shards_is_no_concern() -> None:
    """`module` of another class, and DDP beside a sharded model."""

    class Around(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    def run(rank: int) -> None:
        model = fully_shard(nn.Linear(4, 4))
        assert Around(model).module is model
        DistributedDataParallel(nn.Linear(4, 4))

    run_ranks(2, run)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["ASGD", "Adadelta", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"])
def test_what_is_refused_torch_cannot_do(kind: str) -> None:
    """The step without our look: a torch that learns it shows here."""

    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=0.1, foreach=True)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            type(optimizer).step.__wrapped__(optimizer)
        with pytest.raises(RuntimeError, match="step_on_shards"):
            optimizer.step()

    run_ranks(2, run)


# ---- Muon ------------------------------------------------------------------------------------------------------------


def _muon(world: int, shape: tuple[int, int], dim: int = 0, *, replicas: int = 1, frozen: bool = False) -> None:
    """A step of it over a matrix of `shape`, which moves it on all ranks alike (tests/programs/muon.py has values)."""

    def run(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        model: Any = seeded(lambda: nn.Linear(shape[1], shape[0], bias=False))
        before = model.weight.detach().clone()
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim))
        optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        if not frozen:
            model(torch.ones(2, shape[1])).square().sum().backward()
        optimizer.step()
        after: Tensor = model.weight.full_tensor().detach()
        assert torch.equal(before, after) is frozen and after.isfinite().all()
        return after

    first, *others = run_ranks(world, run)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("world", "shape", "more", "words"),
    [
        (2, (1, 8), {}, "dim 0.*give it to AdamW, or shard dim 1 of such a matrix"),
        (3, (2, 8), {}, r"weight of shape \(2, 8\), sharded over 3 ranks along dim 0"),
        (4, (8, 3), {"dim": 1}, "dim 1.*or shard dim 0"),
        (4, (1, 8), {"replicas": 2}, "over 2 ranks along dim 0"),
        (2, (1, 1), {}, "give it to AdamW\\n"),
    ],
    ids=["one row", "two rows", "few columns", "replicas", "one element"],
)
def test_muon_over_fewer_rows_than_ranks(world: int, shape: tuple[int, int], more: Any, words: str) -> None:
    """Refused before the step; the cure that it names works."""
    if not REFUSES_CHANGED_PLACEMENTS:  # torch up to 2.11 adds whole updates to shards
        _muon(world, shape, **more)
        return
    with pytest.raises(RanksFailed, match=f"Muon.step: expected matrices with a row for each rank, found .*{words}"):
        _muon(world, shape, **more)
    if "or shard dim" in words:
        _muon(world, shape, dim=1 - more.get("dim", 0))


def test_muon_where_each_rank_has_a_row() -> None:
    _muon(2, (2, 8))
    _muon(4, (2, 8), replicas=2)
    _muon(2, (1, 8), frozen=True)


# ---- notes of exceptions where sharded and plain parameters meet ---------------------------------------------


def _noted(run: Callable[[], object], said: str = "got mixed") -> list[str]:
    with pytest.raises(RuntimeError, match=said) as caught:
        run()
    note_mixed(caught.value)
    return list(getattr(caught.value, "__notes__", ()))


class ByHand(torch.optim.SGD):
    """Steps all parameters of a group at once, and counts them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_add_(params, [p.grad for p in params], alpha=-1.0)


@pytest.mark.slow
def test_clips_of_torch() -> None:
    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        clips: list[Callable[[], object]] = [
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=False),
            lambda: nn.utils.clip_grad_norm_([model.scale, *model.base.parameters()], 1.0, norm_type=float("inf")),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=True),
        ]
        for clip in clips:
            (note,) = _noted(clip)
            assert "base.weight is sharded, and Adapted.scale, in one list with it, is not" in note
            assert "fullshard.clip_grad_norm_(model.parameters(), max_norm)" in note

    run_ranks(2, run)


def test_a_step_of_an_optimizer_of_others() -> None:
    def run(rank: int) -> None:
        plain = seeded(Adapted)
        model = _sharded(plain)
        _backward(model, plain)
        (note,) = _noted(ByHand(model.parameters(), lr=1.0).step)
        assert "Adapted.scale" in note and "fullshard.step_on_shards(optimizer)" in note
        fullshard.step_on_shards(ByHand(model.parameters(), lr=1.0), elementwise=True).step()
        ByHand(plain.parameters(), lr=1.0).step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert tolerance.close(getattr(mine, "full_tensor", lambda one=mine: one)(), theirs)

    run_ranks(2, run)


def test_a_guard_adds_it() -> None:
    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        with pytest.raises(RuntimeError, match="got mixed") as caught, fullshard.guard(model, optimizer):
            _backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert any("fullshard.clip_grad_norm_" in note for note in caught.value.__notes__)

    run_ranks(2, run)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def test_a_weight_that_is_read_after_the_forward() -> None:
    """No forward of fullshard is among the frames."""
    gc.collect()  # models of other tests, whose heads have this name too

    def run(rank: int) -> None:
        model: Any = seeded(Head)
        fully_shard(model.head)
        fully_shard(model)

        def loss(model: Any) -> Tensor:
            hidden = model(torch.ones(2, 4))
            return nn.functional.linear(hidden, model.head.weight)

        (note,) = _noted(lambda: loss(model))
        assert "read were probably head.weight of unit head" in note and "fullshard.unit_open(module)" in note

    run_ranks(2, run)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("take", "use"),
    [
        (lambda head: head.weight, nn.functional.linear),
        (lambda head: head.weight.detach(), nn.functional.linear),
        (lambda head: head.weight.t(), torch.mm),
        (lambda head: head.weight, lambda hidden, weight: hidden[:, None] @ weight.t()[None].expand(2, 4, 8)),
    ],
    ids=["itself", "detached", "transposed", "in a batch"],
)
def test_a_full_weight_that_is_used_after_its_unit_freed_it(take: Any, use: Any) -> None:
    def run(rank: int) -> None:
        model: Any = seeded(Head)
        fully_shard(model.head)
        fully_shard(model)

        def loss(clones: bool) -> Tensor:
            hidden = model(torch.ones(2, 4))
            with fullshard.unit_open(model.head):
                weight = take(model.head)
                weight = weight.clone() if clones else weight
            found: Tensor = use(hidden, weight)
            return found

        (note,) = _noted(lambda: loss(False), "not allocated|storage of size 0")
        assert "head.weight of unit head was used after the unit had freed it" in note and "bias" not in note
        loss(True).sum().backward()

    run_ranks(2, run)


def test_memory_that_is_no_weight_s_gets_no_note_and_within_a_forward_a_guess() -> None:
    def read() -> None:
        torch.ones(3).set_(torch.zeros(0).untyped_storage(), 0, (3,), (1,)).sum()  # type: ignore[call-overload]

    class Reads(Head):
        def forward(self, x: Tensor) -> Tensor:
            read()
            return super().forward(x)

    def run(rank: int) -> None:
        assert not _noted(read, "storage of size 0")
        (note,) = _noted(lambda: fully_shard(Reads())(torch.ones(2, 4)), "storage of size 0")
        assert "probably a weight was used after" in note

    run_ranks(1, run)


def test_other_exceptions_and_other_mixtures_get_none() -> None:
    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        for error in (RuntimeError("got mixed signals"), ValueError("got mixed torch.Tensor and DTensor")):
            note_mixed(error)
            assert not getattr(error, "__notes__", ())
        weight, other = model.base.weight, torch.ones(128, 64)
        gradient = weight.grad
        assert not _noted(lambda: gradient * other)
        (note,) = _noted(lambda: weight * other)
        assert "read were probably base.weight" in note

    run_ranks(2, run)


def _uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def test_an_exception_that_nobody_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of the program is called as before, once, with the note there; and a hook that raises nothing new."""
    seen: list[list[str]] = []
    monkeypatch.setattr(
        sys, "excepthook", lambda kind, error, trace: seen.append(list(getattr(error, "__notes__", ())))
    )
    monkeypatch.setattr("fullshard.engine.foreign._installed", False)
    found: list[BaseException] = []

    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        if rank == 0:
            with pytest.raises(RuntimeError, match="got mixed") as caught:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            _uncaught(caught.value)
            _uncaught(KeyboardInterrupt())
            found.append(caught.value)

    run_ranks(2, run)
    (note,), nothing = seen
    assert "base.weight is sharded, and Adapted.scale" in note and not nothing

    def broken(error: BaseException) -> None:
        raise ValueError

    note_uncaught()
    monkeypatch.setattr("fullshard.engine.foreign.note_mixed", broken)
    sys.excepthook(type(found[0]), found[0], None)
    assert len(seen) == 3


@pytest.mark.slow
def test_a_program_that_ends_with_it() -> None:
    code = """
    import torch
    import torch.distributed as dist
    from torch import nn
    import fullshard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Net()
    fullshard.fully_shard(model, ignored_params={model.scale})
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "fullshard: weight is sharded, and Net.scale, in one list" in done.stderr, done.stderr
