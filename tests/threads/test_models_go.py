"""A model that nobody holds any more goes, with its units, its memory and what is remembered of it.

Python's collector sees what Python objects hold. What autograd's nodes and tensors hold in C++ (hooks, `.grad`, views'
bases) it does not see: one reference from there back to the model keeps all of it for ever. So each way to use a model
is tried here, and what has to be gone is asked for by weak references.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import fullshard
from fullshard.engine.unit import module_units
from fullshard.param import ShardedParam
from tests.harness.behaviours import behaviour
from tests.harness.errors import RanksFailed
from tests.harness.failing_places import PLACES, Fault
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import PROGRAMS, Frozen, Model, Tied, batch, part, recomputed, shard

WORLD = 2


_collecting = threading.Lock()


class _Identity(nn.Module):
    """Returns what it was given, as a layer does that is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Skipping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = _Identity()


# ---- what is to be gone ------------------------------------------------------------------------------------------


class Remains(NamedTuple):
    """What a model was made of, held weakly. `objects`: by what to call them."""

    objects: list[tuple[str, weakref.ref[Any]]]
    storages: list[tuple[str, StorageWeakRef]]

    def alive(self) -> list[str]:
        names = [name for name, reference in self.objects if reference() is not None]
        return names + [name for name, storage in self.storages if not storage.expired()]


def _remains(model: nn.Module) -> Remains:
    objects = [(f"module {name}", weakref.ref(module)) for name, module in model.named_modules()]
    tensors: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        objects.append((f"parameter {name}", weakref.ref(parameter)))
        tensors.append((f"the shard of {name}", _local(parameter)))
        if parameter.grad is not None:
            tensors.append((f"the gradient of {name}", _local(parameter.grad)))
    for unit in module_units(model):
        objects.append((f"unit {unit.record.name}", weakref.ref(unit)))
        if unit.root is not None:
            objects += [("root", weakref.ref(unit.root)), ("executor", weakref.ref(unit.root.executor))]
        tensors += [(f"full {param.name}", param.full) for param in unit.params if _has_memory(param)]
    return Remains(objects, [(name, StorageWeakRef(tensor.untyped_storage())) for name, tensor in tensors])


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _has_memory(param: ShardedParam) -> bool:
    return type(param.full) is nn.Parameter


# ---- ways to use a model -----------------------------------------------------------------------------------------


def _train(model: Any, rank: int, steps: int = 2, optimizer: Any = None, world: int = WORLD) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(part(batch(world, step), rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _plain(rank: int, impl: Implementation, kind: Callable[[], nn.Module] = Model, **options: Any) -> nn.Module:
    model = shard(seeded(kind), impl, **options)
    _train(model, rank)
    return model


def _never_used(rank: int, impl: Implementation) -> nn.Module:
    return shard(seeded(Model), impl)


def _evaluated(rank: int, impl: Implementation) -> nn.Module:
    model = shard(seeded(Model), impl)
    with torch.no_grad():
        model(part(batch(WORLD, 0), rank))
    return model


def _graph_alone(rank: int, impl: Implementation) -> nn.Module:
    """A forward whose backward never came."""
    model = shard(seeded(Model), impl)
    model(part(batch(WORLD, 0), rank))
    return model


def _gradients_stay(rank: int, impl: Implementation) -> nn.Module:
    model = shard(seeded(Model), impl)
    for step in range(2):
        model(part(batch(WORLD, step), rank)).sum().backward()
    return model


def _in_an_open_window(rank: int, impl: Implementation) -> nn.Module:
    model = shard(seeded(Model), impl)
    model.set_requires_gradient_sync(False)
    model(part(batch(WORLD, 0), rank)).sum().backward()
    return model


def _gathered(rank: int, impl: Implementation) -> nn.Module:
    """Gone while it is full, and while a gather is under way."""
    model = shard(seeded(Model), impl)
    _train(model, rank)
    model.unshard()
    model.layers[0].unshard(async_op=True)
    return model


def _prefetching(rank: int, impl: Implementation) -> nn.Module:
    model = shard(seeded(Model), impl)
    first, second, third = model.layers
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    _train(model, rank)
    return model


def _mixed(rank: int, impl: Implementation) -> nn.Module:
    policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _plain(rank, impl, mp_policy=policy)


def _offloaded(rank: int, impl: Implementation) -> nn.Module:
    return _plain(rank, impl, offload_policy=impl.namespace.CPUOffloadPolicy(pin_memory=False))


def _replicated(rank: int, impl: Implementation) -> nn.Module:
    return _plain(rank, impl, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def _fails(where: str) -> Callable[[int, Implementation], nn.Module]:
    def use(rank: int, impl: Implementation) -> nn.Module:
        model = shard(seeded(Model), impl)
        _train(model, rank, steps=1)

        PLACES[where].arm(model.layers[1], Fault)
        with suppress(Fault):
            model(part(batch(WORLD, 0), rank)).sum().backward()
            raise AssertionError("expected the step to fail")
        return model

    return use


def _graph_kept(rank: int, impl: Implementation) -> nn.Module:
    model = shard(seeded(Model), impl)
    loss = model(part(batch(WORLD, 0), rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return model


def _saved_and_loaded(rank: int, impl: Implementation) -> nn.Module:
    model = shard(seeded(Model), impl)
    _train(model, rank)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    _train(model, rank)
    return model


# Of these, what FSDP2 does is shown beside ours.
USES: dict[str, Callable[[int, Implementation], nn.Module]] = {
    "never_used": _never_used,
    "plain": _plain,
    "evaluated": _evaluated,
    "graph_alone": _graph_alone,
    "gradients_stay": _gradients_stay,
    "in_an_open_window": _in_an_open_window,
    "gathered": _gathered,
    "not_freed": lambda rank, impl: _plain(rank, impl, reshard_after_forward=False),
    "mixed": _mixed,
    "offloaded": _offloaded,
    "replicated": _replicated,
    "prefetching": _prefetching,
    "tied": lambda rank, impl: _plain(rank, impl, Tied),
    "frozen": lambda rank, impl: _plain(rank, impl, Frozen),
    "recomputed": lambda rank, impl: _plain(rank, impl, recomputed(False)),
    "recomputed_reentrant": lambda rank, impl: _plain(rank, impl, recomputed(True)),
    "skipping": lambda rank, impl: _plain(rank, impl, Skipping),
    "fails_in_forward": _fails("after"),
    "fails_in_backward": _fails("gradient of the output"),
    "graph_kept": _graph_kept,
    "saved_and_loaded": _saved_and_loaded,
}


def _on_shards(rank: int) -> nn.Module:
    model = shard(seeded(Model))
    _train(model, rank, optimizer=fullshard.step_on_shards(torch.optim.AdamW(model.parameters())))
    return model


def _stepping_in_backward(rank: int, fails: bool = False) -> nn.Module:
    """Its marks stand in the place of gradients in the end."""
    model = shard(seeded(Model))
    optimizer = torch.optim.AdamW(model.parameters())
    fullshard.step_in_backward(model, optimizer)
    _train(model, rank, optimizer=optimizer)
    if fails:
        PLACES["gradient of the output"].arm(model.layers[0], Fault)
    with suppress(Fault):
        model(part(batch(WORLD, 0), rank)).sum().backward()
    return model


def _guarded(rank: int) -> nn.Module:
    model = shard(seeded(Model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with fullshard.guard(model):
            model(part(batch(WORLD, 0), rank)).sum().backward()
        fullshard.clip_grad_norm_(model.parameters(), 1.0)
        fullshard.check_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _looked_at(rank: int) -> nn.Module:
    model = shard(seeded(Model))
    _train(model, rank)
    with fullshard.full_params(model):
        copy.deepcopy(list(model.parameters()))
    str(fullshard.report(model))
    fullshard.find_drift(model)
    return model


def _kept_in_parts(rank: int) -> nn.Module:
    model = shard(seeded(Model), reshard_after_forward=WORLD)
    _train(model, rank)
    with torch.no_grad():
        model(part(batch(WORLD, 0), rank))
    return model


def _replayed(rank: int) -> nn.Module:
    model = shard(seeded(Model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(part(batch(WORLD, 0), rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    fullshard.replay(step, model, optimizer)
    return model


OWN_USES: dict[str, Callable[[int], nn.Module]] = {
    "on_shards": _on_shards,
    "stepping_in_backward": _stepping_in_backward,
    "step_in_backward_fails": lambda rank: _stepping_in_backward(rank, fails=True),
    "guarded": _guarded,
    "looked_at": _looked_at,
    "kept_in_parts": _kept_in_parts,
    "replayed": _replayed,
}


def _program(name: str) -> Callable[[int], nn.Module]:
    def use(rank: int) -> nn.Module:
        program = PROGRAMS[name]
        model = shard(seeded(program.model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            program.loss(model, part(batch(WORLD, step), rank), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    return use


PROGRAM_USES = {name: _program(name) for name in PROGRAMS}


def _left(rank: int, uses: dict[str, Callable[..., nn.Module]], *given: Any) -> list[str]:
    """What is left of models that were used in these ways and dropped."""
    remains = {name: _remains(use(rank, *given)) for name, use in uses.items()}
    dist.barrier()
    with _collecting:  # beside the one of another thread a collection does nothing
        gc.collect()
    dist.barrier()
    return [f"{name}: {what}" for name, remain in remains.items() for what in remain.alive()]


@pytest.mark.slow
@behaviour("a model that nobody holds any more is gone, and its memory with it", area="training")
@for_each_implementation
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_a_model_that_nobody_holds_is_gone(impl: Implementation) -> None:
    for left in run_ranks(WORLD, _left, USES, impl):
        assert left == []


@pytest.mark.slow
def test_so_is_one_of_a_kind_of_our_own() -> None:
    for left in run_ranks(WORLD, _left, OWN_USES):
        assert left == []


@pytest.mark.slow
def test_so_is_one_of_each_program() -> None:
    for left in run_ranks(WORLD, _left, PROGRAM_USES):
        assert left == []


def test_so_is_one_of_a_world_of_one() -> None:
    """Full parameters are the shards."""
    uses = {name: USES[name] for name in ("plain", "mixed", "tied", "recomputed", "skipping", "fails_in_backward")}
    for left in run_ranks(1, _left, uses, FULLSHARD):
        assert left == []


def _classes(rank: int) -> list[weakref.ref[type]]:
    """Those of a model and an optimizer that were defined in a function, and what was made of them."""
    kind, family = type("Local", (Model,), {}), type("LocalSGD", (torch.optim.SGD,), {})
    model = shard(seeded(kind))
    optimizer = fullshard.step_on_shards(family(model.parameters(), lr=0.1), elementwise=True)
    _train(model, rank, optimizer=optimizer)
    assert type(shard(seeded(kind))) is type(model)
    return [weakref.ref(kind) for kind in (kind, family, type(model), type(optimizer))]


@pytest.mark.slow
@pytest.mark.threads_only(reason="weak references do not pickle")
def test_so_are_classes_that_were_made_for_it() -> None:
    for found in run_ranks(WORLD, _classes):
        for _ in range(2):  # what was made goes first, and then what it was made of
            gc.collect()
        assert [kind() for kind in found] == [None] * 4


def _backward_alone(rank: int, world: int) -> list[Tensor]:
    """The model goes between forward and backward, and somebody holds the parameters."""
    model = shard(seeded(Model))
    parameters = list(model.parameters())
    loss = model(part(batch(world, 0), rank)).sum()
    del model
    gc.collect()
    loss.backward()
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, WORLD])
def test_a_graph_keeps_the_model_whose_outputs_it_has(world: int) -> None:
    for gradients in run_ranks(world, _backward_alone, world):
        assert len(gradients) == len(list(Model().parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert sum(float(gradient.abs().sum()) for gradient in gradients) > 0


def _backward_inside(rank: int) -> None:
    model = fullshard.fully_shard(seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))))
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda _module, _args, output: kept.append(output))
    model(torch.ones(1, 3))
    loss = kept.pop().sum()
    del model
    gc.collect()
    loss.backward()


def test_a_graph_inside_of_a_model_that_is_gone_raises() -> None:
    """Silence would leave the parameters, which somebody may hold, without gradients."""
    with pytest.raises(RanksFailed, match=r"0\.\w+: expected the module that computed this to exist"):
        run_ranks(1, _backward_inside)
