"""Facts of the model: plain first, with steps, then sharded as rank 0 of the world asked for, over a fake group."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import fullshard
from fullshard._torch import fake_group, non_persistent_buffers
from fullshard._torch.modules import storage_key
from fullshard.migrate.axes import Axes as Ranks
from fullshard.migrate.meshes import build_meshes
from fullshard.migrate.parallelism import Parallelism
from fullshard.program import Program, ProgramError

from . import fingerprints
from .axes import divide_by, look_at_rules, look_at_step
from .facts import Axes, Measured, Model, Steps
from .steps import line, plain_steps, sharded_steps, sync_as_batch_norm

# A model that takes longer to build is not built a second time.
_SECONDS_TO_BUILD = 30.0


class _Call(NamedTuple):
    """One call of `fully_shard`."""

    modules: tuple[nn.Module, ...]
    given: dict[str, Any]


def look(
    program: Program,
    world: int,
    replicas: int,
    options: dict[str, Any],
    *,
    steps: bool,
    plan: Parallelism | None = None,
) -> tuple[Model, Measured]:
    """The facts of `program`'s model, and the times of its steps. `options`: of `fully_shard`; `steps`: whether to take
    any. Raises `ProgramError` if the model cannot be built."""
    skipped = [] if steps else ["a step (--no-probe)"]
    axes, declared = Axes(), None
    if plan is not None:
        axes, declared = look_at_rules(program, lambda: _build(program), plan, world)
    with ExitStack() as group:
        group.enter_context(fake_group(world))
        model, compared = _built_again(program, world, group, skipped) if steps else (_build(program), {})
        found = _tensors(model) | compared
        seconds: float | None = None
        shown = Steps()
        has_values = not (found["meta"] or found["meta_buffers"] or any(map(is_lazy, model.parameters())))
        if steps and not has_values:
            skipped.append("a step (the model has no values)")
        elif steps:
            with sync_as_batch_norm(model):
                seconds, shown = plain_steps(program, model)
            if world == 1:
                shown = replace(shown, drifting_buffers=())
        optimizer, given = None, options
        loss_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        if plan is not None and declared is not None:
            meshes = build_meshes(declared.axes, "cpu")
            given = {"mesh": meshes.data, **options}
            if declared.axes.tp > 1 and steps and has_values:
                axes = look_at_step(program, _build(program), plan, meshes.whole["tp"])
            if declared.axes.tp > 1 and axes.failure is None:
                loss_context = divide_by(program, plan, model, meshes.whole["tp"])
        if declared is not None:
            axes = replace(axes, apart=_parts(declared.axes))
        if axes.broken or axes.failure:
            skipped.append("the sharded model (its layers cannot be divided)")
        elif axes.apart:
            skipped.append(f"the sharded model (a rank has some of its {' and '.join(axes.apart)})")
        else:
            optimizer = _look_at_sharded(program, model, world, replicas, given, found)
        host: float | None = None
        if optimizer is not None and seconds is not None:
            units = [unit for unit in found["report"].units if unit.num_params]
            full = {unit.name: unit.numel * unit.compute_itemsize for unit in units}
            with warnings.catch_warnings(), sync_as_batch_norm(model), loss_context():
                warnings.simplefilter("ignore")
                taken, shown, why = sharded_steps(program, model, optimizer, full, shown)
            if why:
                skipped.append(f"reads of partial values (torch cannot watch this step: {why})")
            if taken is not None:
                host = max(taken - seconds, 0.0) / max(len(units), 1)
            else:
                skipped.append("host time (the sharded step raised an error)")
    if shown.sharded_failure is not None and world > 1:
        shown = replace(shown, fails_alone=_fails_alone(program, options))
    return Model(**found, steps=shown, axes=axes), Measured(seconds, host, skipped=tuple(skipped))


def _parts(axes: Ranks) -> tuple[str, ...]:
    """Returns `Axes.apart`."""
    return ("stages",) * (axes.pp > 1) + ("experts",) * (axes.ep > 1)


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Checks the plain model's parameters and buffers as they are."""
    tensors = [(name, p) for name, p in model.named_parameters() if not is_lazy(p)]
    buffers = [(name, b) for name, b in model.named_buffers() if not is_lazy(b)]
    ghosts = [
        (f"{prefix}.{name}".lstrip("."), getattr(module, name))
        for prefix, module in model.named_modules()
        for name in sorted(non_persistent_buffers(module))
        if getattr(module, name) is not None
    ]
    return {
        "meta": tuple(name for name, p in tensors if p.is_meta),
        "uninitialised": (
            *(name for name, p in model.named_parameters() if is_lazy(p)),
            *(name for name, p in tensors if not p.is_meta and not _is_finite(p)),
            *(name for name, b in buffers if not b.is_meta and b.isnan().any()),
        ),
        "meta_buffers": tuple(dotted for dotted, buffer in ghosts if buffer.is_meta),
        "half": tuple(name for name, p in tensors if p.requires_grad and p.dtype is torch.float16),
        "buffers": tuple(
            sorted(((name, b.nbytes) for name, b in (*buffers, *_attributes(model))), key=lambda item: -item[1])
        ),
    }


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules have as plain attributes, also in a list or dict: masks and tables. What is computed of
    parameters, or is the memory of one, is left out."""
    seen = {storage_key(t.untyped_storage()) for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            for place, tensor in _held(value) if name not in ("_parameters", "_buffers", "_modules") else ():
                key = storage_key(tensor.untyped_storage())
                if not tensor.requires_grad and key not in seen:
                    seen.add(key)
                    yield f"{prefix}.{name}{place}".lstrip("."), tensor


def _held(value: object) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the tensors in a list or dict, each with its place."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", item) for key, item in items if isinstance(item, Tensor))


# ---- sharded ---------------------------------------------------------------------------------------------------------


def _shard(
    program: Program, model: nn.Module, world: int, replicas: int, options: dict[str, Any]
) -> tuple[list[_Call], str]:
    """Let the program shard its model; the calls of `fully_shard`, and what one raised."""
    calls: list[_Call] = []
    shape, axes = ((world,), ("shard",)) if replicas == 1 else (
        (replicas, world // replicas), ("replicate", "shard"))  # fmt: skip
    mesh = options.get("mesh") or init_device_mesh("cpu", shape, mesh_dim_names=axes)

    def shard(module: Any, **given: Any) -> Any:
        modules = (module,) if isinstance(module, nn.Module) else tuple(module)
        calls.append(_Call(modules, given))
        return fullshard.fully_shard(module, **{"mesh": mesh, **options, **given})

    try:
        program.shard(model, shard)
    except Exception as error:
        return calls, line(error)
    return calls, ""


def _optimizer(program: Program, model: nn.Module) -> Optimizer:
    try:
        return program.optimizer(model.parameters())
    except Exception as error:
        raise ProgramError(f"the optimizer cannot be built: {line(error)}") from error


def _look_at_sharded(
    program: Program, model: nn.Module, world: int, replicas: int, options: dict[str, Any], found: dict[str, Any]
) -> Optimizer | None:
    """Shard the model, and add to `found` what that shows. Returns the optimizer; None if nothing was sharded."""
    names = {id(p): name for name, p in model.named_parameters()}
    places = _places(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is found here, or said at the launch
        calls, found["refusal"] = _shard(program, model, world, replicas, options)
        found["ties_across"] = _ties_across(model, places, calls)
        found["ignored"] = frozenset(
            names[id(p)] for call in calls for p in call.given.get("ignored_params") or () if id(p) in names
        )
        if not calls or found["refusal"]:
            return None
        optimizer = _optimizer(program, model)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = {id(p) for p in model.parameters()}
        found["strays"] = len(held - own)
        found["not_optimized"] = tuple(
            name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held
        )
        report = found["report"] = fullshard.report(model, None if found["strays"] else optimizer)
    kept = {id(m) for call in calls if call.given.get("reshard_after_forward") is False for m in call.modules}
    modules = dict(model.named_modules())
    found["gathers"] = tuple(1 if unit.name == "" or id(modules.get(unit.name)) in kept else 2 for unit in report.units)
    return optimizer


def _fails_alone(program: Program, options: dict[str, Any]) -> bool:
    """Whether a sharded step raises in a world of one too, where values are those of training."""
    with fake_group(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _build(program)
        _, refusal = _shard(program, model, 1, 1, options)
        if refusal:
            return True
        with sync_as_batch_norm(model):
            _, shown, _ = sharded_steps(program, model, _optimizer(program, model), {}, Steps())
    return shown.sharded_failure is not None


# ---- plain -----------------------------------------------------------------------------------------------------------


def _built_again(
    program: Program, world: int, group: ExitStack, skipped: list[str]
) -> tuple[nn.Module, dict[str, tuple[str, ...]]]:
    """The plain model; and which of its tensors had other values the time before, after the same seeds, or have on
    rank 1, by whose number the program seeds. `group`: of rank 0, left meanwhile."""
    start = time.perf_counter()
    model = _build(program)
    taken = time.perf_counter() - start
    if taken > _SECONDS_TO_BUILD:
        skipped.append(f"whether two calls of `model` give equal weights (the first took {taken:.0f} s)")
        return model, {}
    before, seed = fingerprints.of_model(model), torch.initial_seed()
    del model
    by_rank: tuple[str, ...] = ()
    if world > 1:
        group.close()
        by_rank = _seeded_by_rank(program, world, before, seed)
        group.enter_context(fake_group(world))
    model = _build(program)
    unseeded = tuple(fingerprints.differing(before, fingerprints.of_model(model)))
    return model, {"unseeded": unseeded, "seeded_by_rank": () if unseeded else by_rank}


def _seeded_by_rank(program: Program, world: int, before: dict[str, object], seed: int) -> tuple[str, ...]:
    """Returns the names of tensors that have other values on rank 1. Nothing if the generator is seeded alike there:
    ranks may leave weights to rank 0, which sends them when the model is sharded."""
    variables = ("RANK", "LOCAL_RANK")
    values = {name: os.environ.get(name) for name in variables}
    os.environ.update(dict.fromkeys(variables, "1"))
    try:
        with fake_group(world, 1):
            model = _build(program)
    except ProgramError:
        return ()  # the model wants the other ranks
    finally:
        for name, value in values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return () if torch.initial_seed() == seed else tuple(fingerprints.differing(before, fingerprints.of_model(model)))


def _build(program: Program) -> nn.Module:
    """The plain model; memory that nothing was written to holds NaN."""
    try:
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        with _filling_memory():
            model = program.model()
    except Exception as error:
        raise ProgramError(f"the model cannot be built: {line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ProgramError(f"expected `model` to build an nn.Module, found a {type(model).__name__}")
    return model


@contextmanager
def _filling_memory() -> Iterator[None]:
    """torch.utils.deterministic.fill_uninitialized_memory, which needs deterministic algorithms."""
    was, only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite; true for dtypes without NaN or that torch cannot ask."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return True
    return bool(tensor.detach().isfinite().all())


def _places(model: nn.Module) -> list[list[tuple[str, tuple[nn.Module, ...]]]]:
    """Returns for each tied parameter: its names, each with the modules around it, the innermost first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    slots: dict[int, list[tuple[str, tuple[nn.Module, ...]]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")[:-1]
        around = tuple(modules[".".join(parts[:i])] for i in range(len(parts), -1, -1))
        slots.setdefault(id(parameter), []).append((name, around))
    return [found for found in slots.values() if len(found) > 1]


def _ties_across(
    model: nn.Module, places: list[list[tuple[str, tuple[nn.Module, ...]]]], calls: list[_Call]
) -> tuple[str, ...]:
    names = {id(module): name or "root" for name, module in model.named_modules()}
    unit_of = {id(module): number for number, call in enumerate(calls) for module in call.modules}
    found = []
    for slots in places:
        units = [next((unit_of[id(m)] for m in around if id(m) in unit_of), -1) for _, around in slots]
        if len(set(units)) > 1:
            titles = ["root" if u < 0 else "+".join(names[id(m)] for m in calls[u].modules) for u in units]
            found.append(" = ".join(f"{name} (unit {t})" for (name, _), t in zip(slots, titles, strict=True)))
    return tuple(found)
