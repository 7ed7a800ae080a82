"""An exception at any point of a step, on all ranks: the next step is bitwise what it would have been.

Every module of a model, every place at which something of the user's may raise (`failing_places.py`), three kinds of
exception, and what the user does about an open window of accumulation. Two sharded models with equal parameters train
in one process group: one fails at each point, the other never does; after a good step their shards, gradients and
optimizer states have equal bits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.harness.behaviours import behaviour
from tests.harness.failing_places import PLACES, Fault, points
from tests.harness.implementations import FULLSHARD, Implementation, kinds
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, part

KINDS: tuple[type[BaseException], ...] = (Fault, KeyboardInterrupt, torch.OutOfMemoryError)
# What became of the window when a micro-batch fails, and what is done about it.
WINDOWS = (
    "none",  # there was none; on with the next step
    "kept, not sent",  # one good micro-batch, held; the failed one is tried again
    "kept, reset",  # so, and `reset_iter_state()` is called before and after the failure
    "kept, sent",  # one good micro-batch, reduced; the failed one is tried again
    "model.zero_grad",  # one good micro-batch, held; the window is given up
    "optimizer.zero_grad",
    "zeroed",  # optimizer.zero_grad(set_to_none=False) after one good micro-batch that was reduced
)


class Recomputing(Model):
    """The first block as it is, the second recomputed without re-entrance, the third with it."""

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if layer is self.layers[0]:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=layer is self.layers[2])


def _modules() -> dict[str, set[str]]:
    """What each module of `Recomputing` is."""
    found: dict[str, set[str]] = {}
    for name, module in Recomputing().named_modules():
        if isinstance(module, nn.ModuleList):
            continue
        has = {"all"}
        if name not in ("", "embedding"):
            has.add("inner")
        if any(True for _ in module.parameters(recurse=False)):
            has |= {"weights", "saving"}
        if name.startswith(("layers.1", "layers.2")):
            has.add("recomputed")
            if name not in ("layers.1", "layers.1.down"):
                has.add("recomputed to its end")
        found[name] = has
    return found


class Point(NamedTuple):
    module: str
    place: str
    kind: type[BaseException]
    window: str
    # Whether the micro-batch that fails would have reduced.
    sync: bool

    def __str__(self) -> str:
        sync = "" if self.sync else ", not sent"
        return f"{self.module or 'root'}: {self.place}, {self.kind.__name__}, window {self.window}{sync}"


def all_points() -> list[Point]:
    """The whole product: some thousands. A slice by a prime step has something of everything."""
    places = points(_modules())
    every = itertools.product(places, KINDS, WINDOWS, (True, False))
    return [Point(*place, *rest) for place, *rest in every if rest[-1] or not PLACES[place[1]].sent]


def _loss(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).pow(2).mean()


class _Twin:
    """One of the two models, and its optimizer."""

    def __init__(self, base: nn.Module, rank: int, impl: Implementation, options: dict[str, Any]) -> None:
        self.rank = rank
        self.model: Any = copy.deepcopy(base)
        for layer in self.model.layers:
            impl.fully_shard(layer, **options)
        impl.fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def micro_batch(self, seed: int, *, sync: bool = True) -> None:
        self.model.set_requires_gradient_sync(sync)
        _loss(self.model, part(batch(8, seed), self.rank)).backward()

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            found[name] = p.to_local().detach()
            if p.grad is not None:
                found[f"gradient of {name}"] = p.grad.to_local()
            for key, value in self.optimizer.state[p].items():
                found[f"{key} of {name}"] = value.to_local() if hasattr(value, "to_local") else value
        return found

    def follow(self, other: _Twin) -> None:
        """Take over the state of `other`, after a difference: the next point is judged by itself."""
        with torch.no_grad():
            theirs = other.tensors()
            for name, value in self.tensors().items():
                value.copy_(theirs[name])


def _fail(twin: _Twin, point: Point, seed: int) -> str:
    """Run the micro-batch that is to fail; what was wrong about its failing, or nothing."""
    place = PLACES[point.place]
    disarm = place.arm(twin.model.get_submodule(point.module), lambda: point.kind(str(point)))
    try:
        twin.micro_batch(seed, sync=point.sync)
    except BaseException as error:
        if type(error) is not point.kind or str(point) not in str(error):
            return f"raised another error: {type(error).__name__}: {error}"
    else:
        return "nothing was raised"
    finally:
        disarm()
    if kinds(twin.model) == {DTensor} or _unnoticed(point):
        return ""
    return "found full parameters on the modules after it"


def _unnoticed(point: Point) -> bool:
    """Whether nothing tells that the step failed, so that the root may show full parameters until the next forward.

    torch calls no hook when a KeyboardInterrupt leaves a forward; and where what fails is behind the root's forward and
    before its backward, that forward went well.
    """
    if point.kind is KeyboardInterrupt and (PLACES[point.place].in_forward or "again" in point.place):
        return True
    if point.place == "tensor hook":
        return point.module in ("", "head")
    return point.module == "" and point.place in ("after", "gradient of the output")


def _sweep(
    rank: int,
    base: nn.Module,
    chosen: Sequence[Point],
    impl: Implementation,
    options: dict[str, Any],
    mesh: tuple[int, int] | None,
) -> list[str]:
    torch.use_deterministic_algorithms(True)
    if mesh is not None:
        options = {**options, "mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))}
    disturbed, undisturbed = _Twin(base, rank, impl, options), _Twin(base, rank, impl, options)
    wrong = []
    for number, point in enumerate(chosen):
        seed = 10 * number
        for twin in (disturbed, undisturbed):
            kept = point.window.startswith("kept")
            if kept or (point.window != "none" and twin is disturbed):
                twin.micro_batch(seed, sync=point.window in ("kept, sent", "zeroed"))
            if twin is disturbed:
                if point.window == "kept, reset":
                    twin.model.reset_iter_state()
                said = _fail(twin, point, seed + 1)
                if point.window == "kept, reset":
                    twin.model.reset_iter_state()
                if point.window == "model.zero_grad":
                    twin.model.zero_grad()
                elif point.window in ("optimizer.zero_grad", "zeroed"):
                    twin.optimizer.zero_grad(set_to_none=point.window != "zeroed")
            twin.micro_batch(seed + 2)
        for twin in (disturbed, undisturbed):
            twin.optimizer.step()
        found, wanted = disturbed.tensors(), undisturbed.tensors()
        if found.keys() != wanted.keys():
            said = said or f"only on one side: {sorted(found.keys() ^ wanted.keys())}"
        different = [name for name, value in wanted.items() if name in found and not torch.equal(found[name], value)]
        if different:
            said = said or f"{len(different)} tensors differ, the first is {different[0]}"
        units = fullshard.report(disturbed.model).units if impl is FULLSHARD else ()
        live = [unit.name for unit in units if unit.full_nbytes_live]
        if live:
            said = said or f"full parameters in memory: {live}"
        if said:
            wrong.append(f"{point}: {said}")
            disturbed.follow(undisturbed)
        for twin in (disturbed, undisturbed):
            twin.optimizer.zero_grad()
    return wrong


def _check(
    chosen: Sequence[Point],
    world: int = 2,
    mesh: tuple[int, int] | None = None,
    impl: Implementation = FULLSHARD,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    wrong = run_ranks(world, _sweep, Recomputing(), chosen, impl, options, mesh, timeout=600.0)[0]
    assert not wrong, f"{len(wrong)} of {len(chosen)} points:\n" + "\n".join(wrong)


@pytest.mark.slow
@behaviour(
    "an exception at any point of a step (any module, hooks, recomputation, any kind): the next step has equal bits",
    area="failures",
    torch="better",
    reason="the next step discards what the failed one left; torch's continues with a part of it",
)
def test_an_exception_at_any_point(impl: Implementation) -> None:
    chosen = all_points()[::67]
    assert len(chosen) >= 80
    assert {p.place for p in chosen} == set(PLACES) and {p.module for p in chosen} == set(_modules())
    assert {p.kind for p in chosen} == set(KINDS) and {p.window for p in chosen} == set(WINDOWS)
    _check(chosen, impl=impl)


@pytest.mark.slow
@pytest.mark.sample(full=1)
@pytest.mark.hang_after(600)
@pytest.mark.parametrize(
    ("world", "mesh", "options"),
    [
        pytest.param(1, None, {}, id="one rank"),
        pytest.param(3, None, {"reshard_after_forward": False}, id="kept full"),
        pytest.param(4, None, {"reshard_after_forward": 2}, id="kept in part"),
        pytest.param(4, (2, 2), {}, id="replicated"),
        pytest.param(2, (2, 1), {}, id="replicated only"),
        pytest.param(2, None, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, id="bfloat16"),
        pytest.param(2, None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, id="offload"),
    ],
)
def test_an_exception_at_any_point_of_other_strategies(
    world: int, mesh: tuple[int, int] | None, options: dict[str, Any]
) -> None:
    _check(all_points()[world::41], world, mesh, **options)
