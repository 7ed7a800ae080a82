"""From the meta device to the first forward: what was not written is named, on all ranks or on none, and only that."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fullshard
from fullshard import fully_shard
from tests.harness import models, tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.programs import Frozen, Model, Tied, batch, part, shard

# torch says of every view output that an in-place edit of it would be wrong there.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def seeded(make: Callable[[], nn.Module] = Model, seed: int = 0) -> Any:
    return models.seeded(make, seed)


def dtensor(value: Tensor, like: DTensor) -> DTensor:
    """This rank's part of `value`, as a DTensor like `like`; nothing is sent."""
    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


@contextlib.contextmanager
def swapping(on: bool) -> Iterator[None]:
    """torch's global choice of how conversions replace parameters."""
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


# ---- what torch has too --------------------------------------------------------------------------------------


def constants(module: nn.Module) -> None:
    """An initialiser that gives each parameter the same value whoever calls it."""
    for p in module.parameters(recurse=False):
        nn.init.constant_(p, 1.0 / p.numel())


def train(model: Any, ranks: Sequence[int], world: int, sign: float = 0.0) -> dict[str, Tensor]:
    """Two steps on the parts of these ranks; the full parameters afterwards. `sign`: of what rounding is off by."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settle = tolerance.disturb(optimizer, sign, model=model) if sign else lambda: None
    for step in range(2):
        for r in ranks:
            (model(part(batch(world, step), r)).float().pow(2).mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    settle()
    found = ((name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in model.named_parameters())
    return {name: p.detach() for name, p in found}


def train_alone(model: Any, world: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What a plain model comes to with the parts of all ranks, and how far rounding may take it."""
    expected, *disturbed = (train(copy.deepcopy(model), range(world), world, sign) for sign in (0.0, 1.0, -1.0))
    return expected, tolerance.ends(expected, disturbed, steps=2)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], allowed: dict[str, float]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype is expected.dtype and tolerance.largest(ours[name], expected) <= allowed[name], name


@pytest.mark.sample(1)
@behaviour("meta device, `to_empty`, `reset_parameters`: trains as the model built with data", area="initialisation")
@for_each_implementation
@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_the_flow_of_torch_s_users(impl: Implementation, world: int, optimizer_first: bool) -> None:
    reference = Frozen()
    reference.apply(constants)
    expected = train_alone(reference, world)

    def job(rank: int) -> None:
        model = shard(on_meta(Frozen), impl=impl)
        held = list(model.parameters())
        model.to_empty(device="cpu")
        if optimizer_first:  # what an optimizer would hold by now is still what stands on the modules
            assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
        model.apply(constants)
        assert_close(train(model, [rank], world), *expected)

    run_ranks(world, job)


@behaviour("meta device, `load_state_dict(assign=True)` without `to_empty`", area="initialisation")
@for_each_implementation
@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_assigned_to_the_meta_device(impl: Implementation, world: int) -> None:
    reference = seeded()
    expected = train_alone(reference, world)

    def job(rank: int) -> None:
        model = shard(on_meta(Model), impl=impl)
        state = {name: dtensor(reference.get_parameter(name), p) for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert_close(train(model, [rank], world), *expected)

    run_ranks(world, job)


@behaviour(
    "`model.to(dtype)`, `.half()`, `.to(device)` after sharding, with both ways to replace", area="initialisation"
)
@for_each_implementation
@pytest.mark.parametrize("swap", [False, True])
def test_conversions_after_sharding(impl: Implementation, swap: bool) -> None:
    """With torch.__future__.set_swap_module_params_on_conversion either way; buffers follow."""
    base = seeded()
    base.layers[0].register_buffer("mean", torch.ones(3))
    base.layers[0].register_buffer("count", torch.ones(3, dtype=torch.int64))

    def job(rank: int) -> None:
        for convert in (
            lambda m: m.to(torch.bfloat16),
            lambda m: m.half(),
            lambda m: m.double(),
            lambda m: m.to("cpu").to(torch.float64).cpu(),
        ):
            model, reference = copy.deepcopy(base), convert(copy.deepcopy(base))
            shard(model, impl=impl)
            held = list(model.parameters())
            assert convert(model) is model
            for p, old, q in zip(model.parameters(), held, reference.parameters(), strict=True):
                assert p is old and isinstance(p, DTensor) and torch.equal(p.full_tensor(), q)
            assert [b.dtype for b in model.buffers()] == [b.dtype for b in reference.buffers()]
            out, expected = model(part(batch(2, 0), rank)), reference(part(batch(2, 0), rank))
            assert out.dtype is expected.dtype and torch.allclose(out, expected, rtol=1e-2, atol=1e-3)
            out.float().sum().backward()
            assert {p.grad.dtype for p in model.parameters()} == {out.dtype}

    with swapping(swap):
        run_ranks(WORLD, job)


@behaviour("`.to(device)` of a model on the meta device is refused", area="initialisation")
@for_each_implementation
def test_meta_parameters_cannot_be_moved(impl: Implementation) -> None:
    def job(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="to_empty"):
            shard(on_meta(Model), impl=impl).to("cpu")

    run_ranks(WORLD, job)


# ---- parameters that nobody wrote ----------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_was_forgotten_is_named_on_all_ranks_and_may_be_repaired(world: int) -> None:
    """13 rows on 4 ranks, a frozen parameter, and one of which most ranks own no row."""
    base = seeded(Frozen)
    base.scale = nn.Parameter(torch.ones(1))
    forgotten = {"layers.1.up.weight", "head.bias", "scale"}

    def job(rank: int) -> None:
        model = on_meta(Frozen)
        model.scale = nn.Parameter(torch.empty(1, device="meta"))
        shard(model).to_empty(device="cpu")
        for name, p in model.named_parameters():
            if name not in forgotten:
                p.data.to_local().copy_(dtensor(base.get_parameter(name), p).to_local())
        tokens = part(batch(world, 0), rank)
        for _ in range(2):  # asking again does not help
            with pytest.raises(RuntimeError, match="materialize") as caught:
                model(tokens)
            found = str(caught.value).partition("meta device): ")[2].partition(";")[0]
            assert set(found.split(", ")) == forgotten
        for name in forgotten:
            p = model.get_parameter(name)
            with torch.no_grad():
                p.copy_(dtensor(base.get_parameter(name), p))
        assert tolerance.close(model(tokens), base(tokens))
        model(tokens).sum().backward()

    run_ranks(world, job)


def _copy(p: DTensor, value: DTensor) -> None:
    p.copy_(value)


def _data(p: DTensor, value: DTensor) -> None:
    p.data.copy_(value)


def _local_data(p: DTensor, value: DTensor) -> None:
    p.to_local().data.copy_(value.to_local())


def _first_row(p: DTensor, value: DTensor) -> None:
    p.to_local().data[:1].zero_()


def _zero(p: DTensor, value: DTensor) -> None:
    nn.init.zeros_(p)


def _nan(p: DTensor, value: DTensor) -> None:
    p.fill_(torch.nan)


def _foreach(p: DTensor, value: DTensor) -> None:
    torch._foreach_zero_([p])


@pytest.mark.sample(4)
@behaviour(
    "what was written in any way after `to_empty` is taken",
    area="initialisation",
    torch="none",
    reason="torch does not look",
)
@pytest.mark.parametrize(
    "write", [_copy, _data, _local_data, _first_row, _zero, _nan, _foreach], ids=lambda f: f.__name__
)
def test_what_was_written_in_any_way_is_not_accused(write: Callable[[DTensor, DTensor], None]) -> None:
    base = seeded()

    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p, value in zip(model.parameters(), base.parameters(), strict=True):
                write(p, dtensor(value, p))
            model(part(batch(2, 0), rank))

    run_ranks(WORLD, job)


@pytest.mark.sample(2)
@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_checkpoint_is_not_accused(assign: bool, emptied: bool) -> None:
    base = seeded(Tied)

    def job(rank: int) -> None:
        model = shard(on_meta(Tied))
        if emptied:
            model.to_empty(device="cpu")
        state = {name: dtensor(base.get_parameter(name), p) for name, p in model.state_dict().items()}
        if assign or emptied:
            model.load_state_dict(state, assign=assign)
            tokens = part(batch(2, 0), rank)
            assert tolerance.close(model(tokens), base(tokens))
            assert model.head.weight is model.embedding.weight

    run_ranks(WORLD, job)


def test_rows_that_some_ranks_did_not_write_are_a_warning_with_their_name() -> None:
    """As after loading a checkpoint on one rank. It may be meant: rows that pad a vocabulary."""
    base = seeded()

    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        for meant in (False, True):
            model.to_empty(device="cpu")
            for name, p in model.named_parameters():
                if name != "head.weight" or rank == 0:
                    p.to_local().data.copy_(dtensor(base.get_parameter(name), p).to_local())
            if meant:
                fullshard.mark_initialized(model)
                model(part(batch(several(), 0), rank))
            else:  # warnings are errors in the tests
                with pytest.raises(UserWarning, match=r"^head\.weight: some ranks wrote"):
                    model(part(batch(several(), 0), rank))

    run_ranks(several(), job)


class Unread(nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unread", torch.ones(3))


def test_what_is_marked_as_initialised_is_not_looked_for() -> None:
    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        model.to_empty(device="cpu")
        fullshard.mark_initialized(model)
        assert model(part(batch(2, 0), rank)).isnan().all()
        model.to_empty(device="cpu")  # once more, now that it ran
        fullshard.mark_initialized(model)
        assert model(part(batch(2, 0), rank)).isnan().all()
        model = fully_shard(nn.Sequential(seeded(lambda: nn.Linear(3, 3)), on_meta(Unread)))
        fullshard.mark_initialized(model)
        model(torch.ones(1, 3))
        with pytest.raises(ValueError, match="call fully_shard first"):
            fullshard.mark_initialized(nn.Linear(2, 2))

    run_ranks(WORLD, job)


@pytest.mark.sample(3)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("convert", ["bfloat16", "double", "float"])
def test_converting_the_dtype_does_not_hide_what_was_not_written(convert: str, swap: bool) -> None:
    base = seeded()

    def job(rank: int) -> None:
        for before in (False, True):
            model = shard(on_meta(Model))
            if before:
                getattr(model, convert)()
            model.to_empty(device="cpu")
            if not before:
                getattr(model, convert)()
            with pytest.raises(RuntimeError, match=r"nothing was written to .*embedding\.weight"):
                model(part(batch(2, 0), rank))
            with torch.no_grad():
                for p, value in zip(model.parameters(), base.parameters(), strict=True):
                    p.copy_(dtensor(value.to(p.dtype), p))
            out = model(part(batch(2, 0), rank))
            assert out.dtype is getattr(torch, {"float": "float32", "double": "float64"}.get(convert, convert))
            assert out.isfinite().all()

    with swapping(swap):
        run_ranks(WORLD, job)


class Odd(nn.Module):
    """Parameters and buffers of many kinds. None of them is computed with, so that each may hold anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.integer = nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)
        self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.float16 = nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.register_buffer("tiny", torch.ones((), dtype=torch.uint8))
        self.register_buffer("float8", torch.ones(3).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def test_every_dtype_is_known() -> None:
    judged = {"weight", "integer", "complex", "float16", "mask", "count", "float8"}

    def job(rank: int) -> None:
        model = fully_shard(on_meta(Odd))
        model.to_empty(device="cpu")
        named = dict([*model.named_parameters(), *model.named_buffers()])
        left = set(judged)
        while left:
            with pytest.raises(RuntimeError, match="without a value|nothing was written") as caught:
                model(torch.ones(2))
            found = str(caught.value).partition("meta device): ")[2].partition(";")[0]
            assert set(found.split(", ")) == left
            name = min(left)
            target = named[name].to_local() if isinstance(named[name], DTensor) else named[name]
            target.data.copy_(torch.ones(()))
            left.discard(name)
        model(torch.ones(2))
        assert named["tiny"] == 0  # too small to be told from a value

    run_ranks(WORLD, job)


def test_a_unit_of_which_only_a_part_is_on_the_meta_device() -> None:
    base = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    value = base[0].weight.detach()

    def job(rank: int) -> None:
        model = copy.deepcopy(base)
        fully_shard(model)
        assert torch.equal(model[0].weight.full_tensor(), value)
        with pytest.raises(RuntimeError, match=r"to_empty .*: 1\.weight, 1\.bias; "):
            model(torch.ones(1, 3))
        fullshard.materialize(model)
        assert torch.equal(model[0].weight.full_tensor(), value)
        assert model(torch.ones(1, 3)).isfinite().all()

    run_ranks(WORLD, job)


@pytest.mark.parametrize("swap", [False, True])
def test_memory_may_be_given_module_by_module(swap: bool) -> None:
    """As trainers do that initialise each module right after `to_empty(recurse=False)`."""
    base = seeded()

    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        tokens = part(batch(2, 0), rank)
        for module in model.modules():
            module.to_empty(device="cpu", recurse=False)
            if module is model.head:
                break
            for name, p in module.named_parameters(recurse=False):
                owner = {id(m): n for n, m in model.named_modules()}[id(module)]
                with torch.no_grad():
                    p.copy_(dtensor(base.get_parameter(f"{owner}.{name}"), p))
            if module is model.layers[1].up:
                with pytest.raises(RuntimeError, match="on the meta device"):
                    model(tokens)
        with torch.no_grad():
            for name, p in model.head.named_parameters():
                p.copy_(dtensor(base.head.get_parameter(name), p))
        assert tolerance.close(model(tokens), base(tokens))

    with swapping(swap):
        run_ranks(WORLD, job)


def test_emptying_a_model_in_use_is_noticed_too() -> None:
    base = seeded()

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        tokens = part(batch(2, 0), rank)
        model(tokens).sum().backward()
        model.layers[1].to_empty(device="cpu")
        with pytest.raises(RuntimeError, match=r": layers\.1\.norm\.weight") as caught:
            model(tokens)
        assert "layers.0" not in str(caught.value) and "head" not in str(caught.value)

    run_ranks(WORLD, job)


# ---- buffers -------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """As in `transformers`: a buffer computed at construction and left out of checkpoints."""

    inv_freq: Tensor

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        return 10000.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * self.inv_freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class ResettingRotary(Rotary):
    def reset_parameters(self) -> None:
        self.inv_freq = self.frequencies()


class Attending(nn.Module):
    rotary: Callable[[], nn.Module] = Rotary

    def __init__(self) -> None:
        super().__init__()
        self.rope = type(self).rotary()
        self.proj = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(self.rope(x)))


class AttendingResetting(Attending):
    rotary = ResettingRotary


def attending(kind: type[Attending]) -> Any:
    return nn.Sequential(seeded(kind), seeded(kind, 1))


def _load(model: nn.Module, base: nn.Module, assign: bool, keys: set[str] | None = None) -> None:
    state = {}
    for name, value in model.state_dict().items():
        whole = base.state_dict()[name]
        state[name] = dtensor(whole, value) if isinstance(value, DTensor) else whole.clone()
    model.load_state_dict({k: v for k, v in state.items() if keys is None or k in keys}, assign=assign, strict=False)


X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("swap", [False, True])
def test_buffers_that_have_data_keep_it(swap: bool) -> None:
    """torch leaves whatever is in memory."""
    base = attending(Attending)

    def job(rank: int) -> None:
        model = copy.deepcopy(base)
        for block in model:
            fully_shard(block)
        fully_shard(model).to_empty(device="cpu")
        for (name, buffer), expected in zip(model.named_buffers(), base.buffers(), strict=True):
            assert torch.equal(buffer, expected), name
        _load(model, base, assign=False)
        assert tolerance.close(model(X), base(X))

    with swapping(swap):
        run_ranks(WORLD, job)


@pytest.mark.sample(2)
@behaviour(
    "non-persistent buffers are recomputed by the module, or named in an error",
    area="initialisation",
    torch="none",
    reason="torch does not look",
)
@pytest.mark.parametrize("how", ["to_empty", "assign"])
@pytest.mark.parametrize("kind", [Attending, AttendingResetting])
def test_buffers_without_data_are_computed_or_named(kind: type[Attending], how: str) -> None:
    """With `assign`, parameters come from a checkpoint and what it lacks stays on the meta device."""
    base = attending(kind)

    def job(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(kind(), kind()))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        if how == "to_empty":
            model.to_empty(device="cpu")
        _load(model, base, assign=how == "assign")
        if kind is Attending:
            with pytest.raises(RuntimeError, match=r"meta device\): 0\.rope\.inv_freq, 1\.rope\.inv_freq; "):
                model(X)
            for block in model:
                block.rope.inv_freq = block.rope.frequencies()
        before = torch.random.get_rng_state()
        assert tolerance.close(model(X), base(X))
        assert torch.equal(torch.random.get_rng_state(), before)
        assert torch.equal(model[0].rope.inv_freq, base[0].rope.inv_freq)

    run_ranks(WORLD, job)


def test_persistent_buffers_that_the_checkpoint_lacks_are_named() -> None:
    base = attending(AttendingResetting)

    def job(rank: int) -> None:
        model = fully_shard(on_meta(lambda: attending(AttendingResetting)))
        model.to_empty(device="cpu")
        _load(model, base, False, {k for k in base.state_dict() if not k.startswith("1.norm.running")})
        with pytest.raises(RuntimeError, match=r": 1\.norm\.running_mean, 1\.norm\.running_var; "):
            model(X)
        model[1].norm.reset_running_stats()
        model(X)

    run_ranks(WORLD, job)


class HalfLoaded(nn.Module):
    """Its reset hook would undo what a checkpoint brought."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_buffer("learned", torch.zeros(3))

    def reset_parameters(self) -> None:
        self.table = torch.arange(3.0)
        self.learned.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table + self.learned


def test_a_hook_changes_nothing_but_what_has_no_value() -> None:
    def job(rank: int) -> None:
        model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), HalfLoaded())))
        model.to_empty(device="cpu")
        learned = model[1].learned.fill_(5.0)
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        assert model(torch.zeros(1, 3)).tolist() == [[5.0, 6.0, 7.0]]
        assert model[1].learned is learned

    run_ranks(WORLD, job)


class Positions(nn.Linear):
    """Its reset hook computes the buffer, and draws the weights anew."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "table"):
            self.table = torch.arange(3.0)


def test_a_hook_that_would_draw_parameters_is_not_called() -> None:
    def job(rank: int) -> None:
        model = fully_shard(on_meta(lambda: nn.Sequential(Positions())))
        model.to_empty(device="cpu")
        nn.init.ones_(model[0].weight)
        nn.init.ones_(model[0].bias)
        with pytest.raises(RuntimeError, match=r": 0\.table; "):
            model(torch.ones(1, 3))
        assert (model[0].weight.full_tensor() == 1).all()
        model[0].table.zero_()
        assert model(torch.ones(1, 3)).tolist() == [[4.0, 4.0, 4.0]]

    run_ranks(WORLD, job)


def test_ignored_parameters_are_judged_by_every_rank() -> None:
    def job(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        fully_shard(model, ignored_params={model[1].weight, model[1].bias})
        model.to_empty(device="cpu")
        for p in (*model[0].parameters(), model[1].bias):
            nn.init.zeros_(p)
        if rank == 0:
            nn.init.zeros_(model[1].weight)
        with pytest.raises(RuntimeError, match=r": 1\.weight; "):
            model(torch.ones(1, 3))

    run_ranks(several(), job)
