"""A step run twice and compared bit by bit: finds silent hardware errors, with the rank and the parameter.

    snapshot -> step -> (results and snapshot change places) -> the same step again -> compare

A step is a function of parameters, state, random state and batch, and fullshard is deterministic (docs/determinism.md).
So if two runs from one state differ in a bit, memory, a message or a kernel was wrong in one of them.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import local_of
from ..comm import least_over, told_by_one
from ..engine.names import clean_name, parameter_names
from ..engine.root import Root, formed
from ..engine.seal import sum_of_bits
from ..engine.unit import Unit, module_units
from ..param import ExtensionGroup, PendingGrad, ShardedParam
from ..policy.arguments import expect_callable, expect_each, expect_group, expect_module, expect_optimizers
from ..schedule import Command
from .check_gradients import asked, named_gradients

OnDifference = Literal["raise", "return"]

_RANK_BITS = 24
_NOTHING = 1 << 62
# After everything that is recorded while the step runs.
_END = 1 << 30
_SHOWN = 4


class Stateful(Protocol):
    """Anything else that a step changes: a scheduler, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Replay:
    """The result of `replay`; all but `value` and `differing` are the same on every rank.

    ok: both runs were equal in every bit, on all ranks.
    value: the result of the second run of the step.
    rank: the rank (in the default group) of the first difference; None when `ok`.
    what: what differed first there: "the shard of layers.0.weight", "the full parameter ..." (as it was gathered),
        "this rank's gradient of ...", "the reduced gradient of ...", or at the end "parameter ...", "buffer ...",
        "optimizer state exp_avg of ...", "the step's value".
    differing: this rank's differences at the end. A wrong bit spreads, so they do not show where it came from.
    """

    ok: bool
    value: Any
    rank: int | None = None
    what: str | None = None
    differing: tuple[str, ...] = ()


class ReplayError(RuntimeError):
    """Raised by `replay` on every rank; `replay` is the result."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(
            f"expected two runs of one step to be equal in every bit, found that they differ first on rank "
            f"{replay.rank}, in {replay.what}. Memory, a link or a kernel of that rank was wrong in one run, or the "
            f"step is not deterministic (docs/determinism.md). The state is that of the second run: load a checkpoint, "
            f"and leave the machine of that rank out"
        )
        self.replay = replay


def replay(
    step: Callable[[], Any],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    stateful: Sequence[Stateful] = (),
    on_difference: OnDifference = "raise",
    process_group: dist.ProcessGroup | None = None,
) -> Replay:
    """Run `step()` twice from the same state, and compare the results bit by bit, on all ranks.

        fullshard.replay(lambda: train_step(batch), model, optimizer)      # now and then, instead of the step

    step: a whole step (forward, backward, `optimizer.step()`, `zero_grad()`) on fixed data; a function of the state
        given here. Its result is compared too if it is a tensor or a number.
    model, optimizers: restored before the second run: parameters, buffers, gradients, optimizer state and options; also
        the random state of torch, Python and numpy. stateful: anything else the step changes (schedulers, scalers).
    on_difference: "raise": `ReplayError` on all ranks; "return": only the result reports it.
    process_group: as for `check_gradients`.
    Afterwards the state is as after one step: that of the second run. Memory: a second copy of this rank's parameters,
    buffers, gradients and optimizer state during the call; time: two steps and the checksums.
    From a model's second step on, everything sent, gathered and reduced is recorded on the way, and the first
    difference names where it began; in the first step, only the state at the end is compared.
    Collective. Raises `ValueError` for an unknown `on_difference`, `RuntimeError` inside an accumulation window, and
    any error of `step`, which leaves the state as it is then."""
    expect_callable("step", step, "a function without arguments")
    expect_module("model", model)
    expect_each("stateful", stateful, lambda one: hasattr(one, "state_dict"), "a list of objects with a state_dict")
    expect_group("process_group", process_group)
    if on_difference not in get_args(OnDifference):
        expected = ", ".join(map(repr, get_args(OnDifference)))
        raise ValueError(f"on_difference: expected one of {expected}, found {on_difference!r}")
    state = _State(model, expect_optimizers("optimizers", optimizers), stateful)
    units = module_units(model)
    runs, values = [], []
    first: dict[str, Any] = {}
    for again in (False, True):
        if again:
            first = state.put_back()
        for unit in units:
            if unit.root is not None:
                # Parameters left full by earlier steps would make the two runs differ.
                unit.root.reshard(unit)
        with Recorder(model, units, state.optimizers) as recorder:
            values.append(step())
        runs.append(recorder.found)
    last = state.now()
    if not _same(*values):
        last["the step's value"], first["the step's value"] = True, False
    differing = tuple(name for name in {**first, **last} if not _same(first.get(name), last.get(name)))
    found = first_difference(*runs) or ((_END, differing[0]) if differing else None)
    groups, device = asked(named_gradients(model), process_group)
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = _NOTHING if found is None else found[0] << _RANK_BITS | rank
    least = int(least_over(groups, torch.tensor(own, device=device)).item())
    if least == _NOTHING:
        return Replay(True, values[1])
    text = found[1] if found is not None and least == own else None
    result = Replay(
        False, values[1], least & ((1 << _RANK_BITS) - 1), told_by_one(groups, text, device), differing[:_SHOWN]
    )
    if on_difference == "raise":
        raise ReplayError(result)
    return result


# ---- state ---------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A snapshot of a tensor: the object, and its values (this rank's)."""

    tensor: Tensor
    values: Tensor


class _State:
    """Everything that a step reads and changes, at the time of construction."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], stateful: Sequence[Stateful]) -> None:
        self.optimizers, self._stateful, self._model = optimizers, stateful, model
        self._by_name = dict(named_gradients(model))
        self._names = {id(parameter): name for name, parameter in self._by_name.items()}
        pending = [name for name, p in self._by_name.items() if isinstance(p.grad, PendingGrad)]
        if pending:
            raise RuntimeError(
                f"replay: expected the beginning of a step, found a window of accumulation open "
                f"({', '.join(pending[:_SHOWN])} have gradients that were not reduced); replay whole steps, with all "
                f"their micro-batches"
            )
        self._kept = {name: _Kept(tensor, _values(tensor).clone()) for name, tensor in self._tensors()}
        self._grads = {name: p.grad for name, p in self._by_name.items()}
        self._buffers = list(self._places())
        self._states = [{p: dict(state) for p, state in o.state.items()} for o in optimizers]
        self._options = [_options(optimizer) for optimizer in optimizers]
        self._others = [copy.deepcopy(other.state_dict()) for other in stateful]
        self._random = _random_state()

    def now(self) -> dict[str, Any]:
        """Everything by name: tensors, and the other state of optimizers."""
        found: dict[str, Any] = {name: _values(tensor) for name, tensor in self._tensors()}
        for i, optimizer in enumerate(self.optimizers):
            found[f"options of optimizer {i}"] = _options(optimizer)
        for i, other in enumerate(self._stateful):
            found[f"state of {type(other).__name__} {i}"] = copy.deepcopy(other.state_dict())
        return found

    def put_back(self) -> dict[str, Any]:
        """Restore everything; returns the results by name. They take over the memory of the snapshot."""
        became = self.now()
        with torch.no_grad():
            for name, (tensor, values) in self._kept.items():
                local = _values(tensor)
                there = became.get(name)
                if there is not None and there.data_ptr() == local.data_ptr() and there.shape == local.shape:
                    new = local.clone()
                    local.copy_(values)
                    became[name] = values.copy_(new)
                else:
                    local.copy_(values)
        for name, parameter in self._by_name.items():
            parameter.grad = self._grads[name]
        for module, name, buffer in self._buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for optimizer, states, options in zip(self.optimizers, self._states, self._options, strict=True):
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = dict(state)
            for group, kept in zip(optimizer.param_groups, options, strict=True):
                group.update(copy.deepcopy(kept))
        for other, kept_state in zip(self._stateful, self._others, strict=True):
            other.load_state_dict(copy.deepcopy(kept_state))
        _set_random_state(self._random)
        return became

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._by_name.items():
            yield f"parameter {name}", parameter
            if parameter.grad is not None and not isinstance(parameter.grad, PendingGrad):
                yield f"the gradient of {name}", parameter.grad
        for module_name, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                yield f"buffer {clean_name(f'{module_name}.{name}' if module_name else name)}", buffer
        for i, optimizer in enumerate(self.optimizers):
            for position, (parameter, state) in enumerate(optimizer.state.items()):
                of = self._names.get(id(parameter), f"parameter {position} of optimizer {i}")
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"optimizer state {key} of {of}", value

    def _places(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                yield module, name, buffer


def _values(tensor: Tensor) -> Tensor:
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _random_state() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _set_random_state(state: tuple[Any, ...]) -> None:
    host, devices, python, numbers = state
    torch.set_rng_state(host)
    if devices is not None:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(python)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numbers is not None:
        numpy.random.set_state(numbers)


def _same(first: Any, second: Any) -> bool:
    """Equality in every bit, where values can be compared; other objects count as equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        a, b = _values(first), _values(second)
        if a.shape != b.shape or a.dtype is not b.dtype:
            return False
        # Not torch.equal alone: NaN differs from itself, and -0 equals 0.
        return torch.equal(_bits(a), _bits(b))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (first != first and second != second)
    if first is None or second is None or isinstance(first, int | str) or isinstance(second, int | str):
        return bool(first == second)
    return True


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---- recorder --------------------------------------------------------------------------------------------------------
# Checksums of one step on this rank, in command order: shards before the all-gather, full parameters after use, full
# gradients before the reduce-scatter, and `.grad` before the optimizer step. A wrong bit therefore shows first on the
# rank that produced it, and on the others once a message carried it.

# (description, how often it occurred in this step).
Moment = tuple[str, int]

_SHARDS = frozenset({"unshard"})
_FULL = frozenset({"reshard", "shelve", "reshard_secondary"})
_GRADIENTS = frozenset({"reduce", "accumulate"})


class Recorder:
    """Context manager that fills `found` with an entry for each moment, in order. Ignores roots that form inside."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], optimizers: Sequence[Optimizer]) -> None:
        # Position, counted in commands, which are the same on all ranks; sum of bits.
        self.found: dict[Moment, tuple[int, int]] = {}
        self._position = 0
        self._counts: Counter[str] = Counter()
        self._names = parameter_names(model, units)
        self._of_shards = {id(param.sharded): name for param, name in self._names.items()}
        self._optimizers = optimizers
        self._listening = [
            (root, partial(self._before, root)) for root in dict.fromkeys(map(formed, units)) if root is not None
        ]

    def __enter__(self) -> Recorder:
        for root, listener in self._listening:
            root.executor.listeners.append(listener)
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        return self

    def __exit__(self, *_: object) -> None:
        for root, listener in self._listening:
            root.executor.listeners.remove(listener)
        for handle in self._handles:
            handle.remove()

    def _before(self, root: Root, command: Command) -> None:
        unit = root.units[command.unit.index]
        self._position += 1
        groups = [group for group in unit.groups if not isinstance(group, ExtensionGroup)]
        if command.kind in _SHARDS:
            for group in groups:
                for param in group.params:
                    self._note("the shard of", param, param.local)
        elif command.kind in _FULL:
            for group in groups:
                if not group.shares_memory and group.memory.live_nbytes:
                    for param in group.params:
                        self._note("the full parameter", param, param.full)
        elif command.kind in _GRADIENTS:
            for param in unit.params:
                if param.gradients.fresh is not None:
                    self._note("this rank's gradient of", param, param.gradients.fresh)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                self._position += 1
                gradient = parameter.grad
                if gradient is not None and not isinstance(gradient, PendingGrad):
                    name = self._of_shards.get(id(parameter), f"parameter {position} of the optimizer")
                    self._put(f"the reduced gradient of {name}", gradient)

    def _note(self, what: str, param: ShardedParam, tensor: Tensor) -> None:
        self._put(f"{what} {self._names.get(param, param.name)}", tensor)

    def _put(self, what: str, tensor: Tensor) -> None:
        self._counts[what] += 1
        self.found[what, self._counts[what]] = self._position, sum_of_bits(tensor)


def first_difference(
    first: dict[Moment, tuple[int, int]], second: dict[Moment, tuple[int, int]]
) -> tuple[int, str] | None:
    """(position in the step, description) of the first sum that differs, or None.

    Ignores moments of only one of them: the prefetch order may still be settling.
    """
    for moment, (position, bits) in first.items():
        again = second.get(moment)
        if again is not None and again[1] != bits:
            return position, moment[0]
    return None
