"""Does what a training does beside steps: a sharded one does it after its last step and writes the values down.

    clipping        a further step, whose gradients are clipped before the optimizer takes them
    evaluation      losses without gradients: before, within and after that step, and after parameters were replaced
    state dicts     plain ones, taken before that step and loaded in place after it
    checkpoint      saved before that step, and loaded into a new model and optimizer, which take the same step
    another world   that checkpoint, loaded by another number of ranks
    full_params     read, written without `writeback`, and written with it
    output_dtype    a new model whose outputs are cast takes a step; it gets its state as plain full tensors

`exercised.py` compares. Values that must be the very bits of others are compared here, on every rank; those that
differ are written down, as in `weights.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import checkpoint

from .setting import clean, evaluating, named, seed_generators, seed_of, written
from .subject import Step, Training, buffers_of, full, generators, host
from .values import floats_in
from .weights import Uses

# Those that torch's FSDP2 can do, too.
OF_TORCH = ("clipping", "evaluation", "state dicts")


class Evaluated(NamedTuple):
    """A loss of one rank, of its first batch in the training. `when`: in words. `before`, `buffers`: those of before
    and of afterwards."""

    when: str
    mode: str
    before: dict[str, Tensor]
    loss: Tensor
    generators: dict[str, str]
    buffers: dict[str, Tensor]
    uses: Uses


class Clipped(NamedTuple):
    """`norm`: of the gradients, when they were clipped to `limit`. `unlimited`: the same of a call before without a
    limit. `gradients`: after both, by rank 0."""

    unlimited: float
    norm: float
    limit: float
    gradients: dict[str, Tensor | None]


class Other(NamedTuple):
    """A value that differs from the one that it should be. `kind`: "parameters" or "optimizer state"."""

    kind: str
    name: str
    found: Any
    wanted: Any


class Loaded(NamedTuple):
    """The state of one rank after a load: how many values were looked at, those that differ, and the buffers."""

    looked: int
    others: list[Other]
    buffers: dict[str, Tensor]


class Opened(NamedTuple):
    """Full parameters on one rank. `buffers`: of the model. `names`: in the state dict inside of the context. `loss`:
    of a forward inside; None beside tensor parallelism, and of a loss that needs gradients. The rest, each as (looked
    at, those that differ): what was there inside; what rank 0 has where it alone gets them; the shards after edits that
    are dropped, and after edits that are kept."""

    buffers: dict[str, Tensor]
    names: list[str]
    loss: Tensor | None
    read: tuple[int, list[Other]]
    on_rank0: tuple[int, list[Other]]
    dropped: tuple[int, list[Other]]
    kept: tuple[int, list[Other]]


class Cast(NamedTuple):
    """A step of one rank. `loaded`: parameters from full tensors: how many, and those that differ. `outputs`: of each
    floating output of the model, its place and dtype; of each call."""

    loaded: tuple[int, list[Other]]
    buffers: dict[str, Tensor]
    outputs: list[list[tuple[str, torch.dtype]]]
    step: Step


class Exercised(NamedTuple):
    """The values that exercises found on one rank; None of what was not exercised. `names`: in a plain state dict, and
    its values that differ from those of the model. `step`: with `clipped`'s gradients. `in_place`: loaded from plain
    state dicts; `again`: from a checkpoint, and `continued` from there."""

    evaluated: list[Evaluated]
    clipped: Clipped | None
    step: Step | None
    names: list[str] | None
    taken: tuple[int, list[Other]] | None
    in_place: Loaded | None
    again: Loaded | None
    continued: Step | None
    opened: Opened | None
    cast: Cast | None


class State(NamedTuple):
    """The state of a training, whole on every rank."""

    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def exercise(training: Training, folder: Path) -> Exercised:
    """All that the setting asks for. Collective. The training's state is not that of before afterwards."""
    asked, last = training.setting.exercises, training.setting.steps - 1
    before = state_of(training)
    evaluated: list[Evaluated] = []
    clipped: list[Clipped] = []
    names = taken = in_place = again = continued = opened = cast = step = None

    def evaluate(when: str, *modes: str) -> None:
        for mode in modes if "evaluation" in asked else ():
            with during("exercising evaluation"):
                evaluated.append(_evaluate(training, when, mode))

    def between() -> None:
        evaluate("between backward and the optimizer's step", "no_grad", "inference_mode")
        if "clipping" in asked:
            with during("exercising clipping"):
                clipped.append(_clip(training))

    evaluate("after the last step", "no_grad", "inference_mode")
    scaler = training.scaler.state_dict()
    if "state dicts" in asked:
        with during("exercising state dicts"):
            model_state = _cloned(training.model.state_dict())
            optimizer_state = _cloned(training.optimizer.state_dict())
            names = [clean(name) for name in model_state]
            taken = _among(_state_dict(training), _in_modules(training.model))
    if "checkpoint" in asked:
        with during("exercising checkpoint"):
            _save(training, folder)
            if dist.get_rank() == 0:
                torch.save(tuple(before), folder / "saved.pt")
    if {"clipping", "evaluation", "state dicts"} & set(asked):
        step = training.step(last, between)
        evaluate("after a step that follows an evaluation", "inference_mode", "no_grad, training")
    if "state dicts" in asked:
        with during("exercising state dicts"):
            training.model.load_state_dict(model_state)
            training.optimizer.load_state_dict(optimizer_state)
            training.trained.weights.held = training.trained.parameters()
            in_place = loaded(training, before)
        evaluate("after a state dict was loaded", "no_grad")
    if "checkpoint" in asked:
        with during("exercising checkpoint"):
            new = _another(training)
            new.scaler.load_state_dict(scaler)
            _load(new, folder)
            again = loaded(new, before)
            continued = new.step(last)
            del new
    if "output_dtype" in asked:
        with during("exercising output_dtype"):
            cast = _cast(training)
    if "full_params" in asked:
        with during("exercising full_params"):
            opened = _open(training)
        evaluate("after full_params wrote to the parameters", "no_grad")
    return Exercised(
        evaluated,
        clipped[0] if clipped else None,
        step,
        names,
        taken,
        in_place,
        again,
        continued,
        opened,
        cast,
    )


def load_elsewhere(training: Training, folder: Path) -> Loaded:
    """Returns the state of a training on another number of ranks after it loaded the checkpoint."""
    with during("exercising another world"):
        _disturb(training.model)
        _load(training, folder)
        state = torch.load(folder / "saved.pt", weights_only=False)
        return loaded(training, State(*state))


@contextmanager
def during(doing: str) -> Iterator[None]:
    """An exception says what raised it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while {doing}")
        raise


# ---- state -----------------------------------------------------------------------------------------------------------


def state_of(training: Training) -> State:
    """Collective."""
    state = {
        name: {key: full(value) for key, value in training.optimizer.state[p].items()}
        for name, p in named(training.model)
        if p in training.optimizer.state
    }
    return State({name: full(p) for name, p in named(training.model)}, state)


def loaded(training: Training, wanted: State) -> Loaded:
    """Returns the state of the training, compared with `wanted`. Collective."""
    found = state_of(training)
    looked, others = differing(found.parameters, wanted.parameters)
    for name in found.state.keys() | wanted.state.keys():
        ours, theirs = found.state.get(name, {}), wanted.state.get(name, {})
        more, odd = differing(ours, theirs, kind="optimizer state", prefix=f"{name}.")
        looked, others = looked + more, others + odd
    return Loaded(
        looked, sorted(others, key=lambda other: (other.kind == "optimizer state", other.name)), _buffers(training)
    )


def differing(
    found: dict[str, Any], wanted: dict[str, Any], *, kind: str = "parameters", prefix: str = ""
) -> tuple[int, list[Other]]:
    """How many values were looked at, and those that are not the same bits in the same dtype, or are on one side."""
    names = list(dict.fromkeys([*wanted, *found]))
    return len(names), [
        Other(kind, prefix + name, found.get(name), wanted.get(name))
        for name in names
        if name not in found or name not in wanted or not _same(found[name], wanted[name])
    ]


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        return isinstance(found, Tensor) is isinstance(wanted, Tensor) and bool(found == wanted)
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    return torch.equal(found, wanted) or bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@torch.no_grad()
def _disturb(model: nn.Module) -> None:
    """Move all that a load has to write, so that what it leaves out is seen."""
    for value in model.state_dict().values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.add_(1)


def _another(training: Training, output_dtype: torch.dtype | None = None) -> Training:
    new = Training(training.program, training.setting, training.device, training.mesh, output_dtype)
    _disturb(new.model)
    return new


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def _save(training: Training, folder: Path) -> None:
    # Each rank has buffers of its own batches; those of the first are saved, as in most programs.
    model, optimizer = checkpoint.get_state_dict(training.model, training.optimizer)
    buffers = {clean(name) for name, _ in training.model.named_buffers(remove_duplicate=False)}
    first = [f"model.{name}" for name in model if name in buffers]
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(state, checkpoint_id=folder / "checkpoint", take_first=first)


def _load(training: Training, folder: Path) -> None:
    """Loads into a model and an optimizer that has not stepped."""
    model, optimizer = checkpoint.get_state_dict(training.model, training.optimizer)
    state = {"model": model, "optimizer": optimizer}
    checkpoint.load(state, checkpoint_id=folder / "checkpoint")
    checkpoint.set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    training.trained.weights.held = training.trained.parameters()


# ---- one exercise ----------------------------------------------------------------------------------------------------


def _evaluate(training: Training, when: str, mode: str) -> Evaluated:
    weights = training.trained.weights
    index, batch = training.batch(0, 0)
    before, weights.phase = _buffers(training), "forward"
    with evaluating(training.model, mode):
        seed_generators(seed_of(index))
        with training.loss_context():
            loss = full(training.program.loss(training.model, batch))
    if training.setting.library == "torch":
        # With reshard_after_forward=False an evaluation leaves full parameters on the modules of torch's FSDP2, without
        # gradients and stale after the next optimizer step, until somebody calls this.
        for module in training.model.modules():
            if type(module).__name__.startswith("FSDP"):
                cast(Any, module).reshard()
    return Evaluated(when, mode, before, host(loss), generators(training.device), _buffers(training), weights.take())


def _clip(training: Training) -> Clipped:
    clip: Any = fullshard.clip_grad_norm_ if training.setting.library == "fullshard" else nn.utils.clip_grad_norm_
    parameters = list(training.model.parameters())
    unlimited = float(full(clip(parameters, math.inf)))
    limit = unlimited / 2 if 0 < unlimited < math.inf else 1.0
    norm = float(full(clip(parameters, limit)))
    return Clipped(unlimited, norm, limit, training.trained.gradients())


def _state_dict(training: Training) -> dict[str, Any]:
    """Returns the state dict whole, under the names of the plain model."""
    return {clean(name): full(value) for name, value in training.model.state_dict().items()}


def _in_modules(model: nn.Module) -> dict[str, Any]:
    """Returns the tensors whose values a state dict has to have: parameters, under each name, and buffers."""
    found = {clean(name): full(p) for name, p in model.named_parameters(remove_duplicate=False)}
    return found | {clean(name): full(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}


def _among(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[int, list[Other]]:
    """Does what `differing` does for the tensors in both; names are compared with those of the plain model."""
    both = [name for name in found if name in wanted and isinstance(found[name], Tensor)]
    return differing({name: found[name] for name in both}, {name: wanted[name] for name in both})


def _cast(training: Training) -> Cast:
    """The new model has the parameters of the old one, and the buffers of its first rank."""
    with fullshard.full_params(training.model):
        state = _cloned(training.model.state_dict())
    new = _another(training, training.setting.output_dtype)
    new.model.load_state_dict(state)
    fullshard.sync_module_states(new.model, buffers_only=True)  # a first step refuses others
    new.trained.weights.held = new.trained.parameters()
    held = new.trained.weights.held
    taken = differing(held, {clean(name): full(value) for name, value in state.items() if clean(name) in held})
    buffers, outputs = _buffers(new), list[list[tuple[str, torch.dtype]]]()
    _watch_outputs(new.model, outputs)
    return Cast(taken, buffers, outputs, new.step(0))


def _watch_outputs(model: nn.Module, outputs: list[list[tuple[str, torch.dtype]]]) -> None:
    """Note what callers of `model` get. Its class is replaced, since a hook might run before the library's."""
    plain: Any = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = plain.__call__(self, *args, **kwargs)
        outputs.append([(place, value.dtype) for place, value in floats_in(found)])
        return found

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call})


def _open(training: Training) -> Opened:
    model, weights = training.model, training.trained.weights
    held, buffers, loss = training.trained.parameters(), _buffers(training), None
    with fullshard.full_params(model):
        names = [clean(name) for name in model.state_dict()]
        read = differing(_held_by(model), held)
        # A forward inside is one without gradients, and refused beside other axes.
        if not training.setting.strategy.divides and "evaluation" in training.setting.exercises:
            index, batch = training.batch(0, 0)
            with evaluating(model, "no_grad"):
                seed_generators(seed_of(index))
                loss = host(training.program.loss(model, batch))
        weights.take()
        _write(model)
    dropped = differing(training.trained.parameters(), held)
    with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):
        first = not any(isinstance(p, DTensor) for p in model.parameters())
        on_rank0 = differing(_held_by(model), held) if first else (0, [])
    with fullshard.full_params(model, writeback=True):
        _write(model)
    weights.held = training.trained.parameters()
    kept = differing(weights.held, {name: written(value) for name, value in held.items()})
    return Opened(buffers, names, loss, read, on_rank0, dropped, kept)


def _held_by(model: nn.Module) -> dict[str, Tensor]:
    return {name: host(p) for name, p in named(model)}


@torch.no_grad()
def _write(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(written(parameter))


def _buffers(training: Training) -> dict[str, Tensor]:
    return buffers_of(training.trained.plain)
