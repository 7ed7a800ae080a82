"""Facts of the model: plain first, with one step, then sharded as rank 0 of the world asked for, over a fake group."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parameter import is_lazy

import fullshard
from fullshard._torch import fake_group, non_persistent_buffers
from fullshard.program import Program, ProgramError

from .facts import Measured, Model

# A first step that takes longer is not taken again.
_SECONDS = 5.0


class _Call(NamedTuple):
    """One call of `fully_shard`."""

    modules: tuple[nn.Module, ...]
    given: dict[str, Any]


def look(
    program: Program, world: int, replicas: int, options: dict[str, Any], *, steps: bool
) -> tuple[Model, Measured]:
    """The facts of `program`'s model, and the times of its steps. `options`: of `fully_shard`; `steps`: whether to take
    any. Raises `ProgramError` if the model cannot be built."""
    model = _build(program)
    tensors = [(name, p) for name, p in model.named_parameters() if not is_lazy(p)]
    ghosts = [
        (f"{prefix}.{name}".lstrip("."), module, name)
        for prefix, module in model.named_modules()
        for name in sorted(non_persistent_buffers(module))
        if getattr(module, name) is not None
    ]
    found: dict[str, Any] = {
        "meta": tuple(name for name, p in tensors if p.is_meta),
        "uninitialised": (
            *(name for name, p in model.named_parameters() if is_lazy(p)),
            *(name for name, p in tensors if not p.is_meta and not _is_finite(p)),
            *(name for name, b in model.named_buffers() if not is_lazy(b) and not b.is_meta and b.isnan().any()),
        ),
        "meta_buffers": tuple(dotted for dotted, module, name in ghosts if getattr(module, name).is_meta),
    }  # fmt: skip
    skipped = [] if steps else ["a step (--no-probe)"]
    seconds: float | None = None
    if steps and (found["meta"] or found["meta_buffers"] or len(tensors) < len(list(model.named_parameters()))):
        skipped.append("a step (the model has no values)")
    elif steps:
        before = {dotted: getattr(module, name).clone() for dotted, module, name in ghosts}
        try:
            seconds = _time(program, model)
        except Exception as error:
            found["step_failure"] = f"the plain model, batch 0: {_line(error)}"
        found["changed_buffers"] = tuple(
            dotted for dotted, module, name in ghosts if not _equal(before[dotted], getattr(module, name))
        )
    model.zero_grad(set_to_none=True)
    names = {id(p): name for name, p in model.named_parameters()}
    places = _places(model)
    calls: list[_Call] = []
    host = None
    with fake_group(world), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is found here, or said at the launch
        shape, axes = ((world,), ("shard",)) if replicas == 1 else (
            (replicas, world // replicas), ("replicate", "shard"))  # fmt: skip
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)

        def shard(module: Any, **given: Any) -> Any:
            modules = (module,) if isinstance(module, nn.Module) else tuple(module)
            calls.append(_Call(modules, given))
            return fullshard.fully_shard(module, **{"mesh": mesh, **options, **given})

        try:
            program.shard(model, shard)
        except Exception as error:
            found["refusal"] = _line(error)
        found["ties_across"] = _ties_across(model, places, calls)
        found["ignored"] = frozenset(
            names[id(p)] for call in calls for p in call.given.get("ignored_params") or () if id(p) in names
        )
        if calls and not found.get("refusal"):
            try:
                optimizer = program.optimizer(model.parameters())
            except Exception as error:
                raise ProgramError(f"the optimizer cannot be built: {_line(error)}") from error
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            own = {id(p) for p in model.parameters()}
            found["strays"] = len(held - own)
            found["not_optimized"] = tuple(
                name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held
            )
            report = found["report"] = fullshard.report(model, None if found["strays"] else optimizer)
            kept = {id(m) for call in calls if call.given.get("reshard_after_forward") is False for m in call.modules}
            modules = dict(model.named_modules())
            found["gathers"] = tuple(
                1 if unit.name == "" or id(modules.get(unit.name)) in kept else 2 for unit in report.units
            )
            if seconds is not None:
                try:
                    units = sum(unit.num_params > 0 for unit in report.units)
                    host = max(_time(program, model) - seconds, 0.0) / max(units, 1)
                except Exception as error:
                    skipped.append(f"host time (a sharded step without messages: {_line(error)})")
    return Model(**found), Measured(seconds, host, skipped=tuple(skipped))


def _build(program: Program) -> nn.Module:
    """The plain model; memory that nothing was written to holds NaN."""
    try:
        torch.manual_seed(0)
        with _filling_memory():
            model = program.model()
    except Exception as error:
        raise ProgramError(f"the model cannot be built: {_line(error)}") from error
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
    """Of dtypes that have NaN and that torch can ask."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return True
    return bool(tensor.detach().isfinite().all())


def _equal(before: Tensor, after: object) -> bool:
    return isinstance(after, Tensor) and before.shape == after.shape and bool((before == after).all())


def _time(program: Program, model: nn.Module) -> float:
    """Seconds of one forward and backward; of two, the shorter one."""
    taken: list[float] = []
    while len(taken) < 2 and sum(taken) < _SECONDS:
        batch = program.batch(0)
        start = time.perf_counter()
        loss = program.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"expected a loss of one element, found {what}")
        loss.backward()
        taken.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return min(taken)


def _places(model: nn.Module) -> list[list[tuple[str, tuple[nn.Module, ...]]]]:
    """Of each tied parameter: its names, each with the modules around it, the innermost first."""
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


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
