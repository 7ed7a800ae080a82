"""Each recorded step, taken again by plain torch in one process, from the state in which the sharded training began it.

Every phase starts from equal input: forward and backward from the recorded parameters, the optimizer from the recorded
gradients. So errors do not add up over steps, and a difference names its phase.

Where the strategy computes activations again, so does the plain model: a buffer that a forward updates is then updated
twice, by either.

In mixed precision the parameters are cast as `MixedPrecisionPolicy` promises (seed 001): the model computes with copies
in bfloat16, floating inputs of each sharded module are cast, gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard.program import Program, blocks_apart, to_device

from .setting import (
    SCALE,
    SEED,
    Setting,
    batch_index,
    clean,
    evaluating,
    named,
    seed_generators,
    seed_of,
    ties_of,
)
from .strategy import norms_of
from .subject import Before, Step, buffers_of, generators
from .values import cast, casting, floats_in


class Expected(NamedTuple):
    """The values that a step must give; lists are by data rank (`Setting.data_rank`). `parts`: of each micro-batch,
    each gradient before the reduction, divided as the mean divides it; the expected gradient is their sum."""

    losses: list[list[Tensor]]
    generators: list[list[dict[str, str]]]
    buffers: list[dict[str, Tensor]]
    parts: list[list[dict[str, Tensor | None]]]
    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Any]]

    def raw(self, name: str, dtype: torch.dtype, scale: float) -> list[list[Tensor | None]]:
        """The parts of one parameter as autograd made them, in `dtype`; `scale`: of the loss, times the ranks."""
        return [[None if (p := part[name]) is None else (p * scale).to(dtype) for part in row] for row in self.parts]

    def gradient(self, name: str) -> Tensor | None:
        """Returns the gradient, in float64."""
        found = [part for rank in self.parts for micro in rank if (part := micro[name]) is not None]
        return torch.stack([part.double() for part in found]).sum(0) if found else None

    def sizes(self, name: str) -> Tensor:
        """The sum of the sizes of what the gradient is a sum of, in float64."""
        found = [part for rank in self.parts for micro in rank if (part := micro[name]) is not None]
        return torch.stack([part.double().abs() for part in found]).sum(0)


class Reference:
    """The plain model of a program. `replay(step)` in the order of the steps."""

    def __init__(
        self, program: Program, setting: Setting, device: torch.device, output_dtype: torch.dtype | None = None
    ) -> None:
        """`output_dtype`: what the outputs of the whole model are cast to; None leaves them."""
        self.program, self.setting, self.device = program, setting, device
        self.computing, self.stepped = self._build(recompute=setting.strategy.recompute), self._build()
        self.ties = ties_of(self.computing)
        self.initial = {name: p.detach().to("cpu", copy=True) for name, p in named(self.stepped)}
        self.initial_buffers = buffers_of(self.computing)
        self.trainable = {name for name, p in named(self.computing) if p.requires_grad}
        self.optimizer = program.optimizer(self.stepped.parameters())
        # The scale of the loss; halved after gradients that are not finite, as a GradScaler does.
        self.scale = SCALE if setting.strategy.precision == "fp16" else 1.0
        # Whether a forward that is computed again in backward casts its inputs; only a fault does not.
        self._casts_again, self._in_backward = True, False
        # The buffers that a forward which is computed again in backward updates once more.
        self.updated_again = set[str]()
        if setting.strategy.dtype is not None:
            self._compute_in(self.computing, setting.strategy.dtype)
        # The data rank of each forward, and of each call of the model in it the floating outputs, where they are cast.
        self.outputs: list[tuple[int, list[list[tuple[str, torch.dtype]]]]] = []
        if output_dtype is not None:
            self.computing.forward = self._casting_outputs(self.computing.forward, output_dtype)

    def _build(self, *, recompute: bool = False) -> nn.Module:
        seed_generators(SEED)
        model = self.program.model().to(self.device).train()
        for block in blocks_apart(model) if recompute else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model

    def _compute_in(self, model: nn.Module, dtype: torch.dtype) -> None:
        own = norms_of(model) if self.setting.strategy.norms else []
        kept = {parameter for module in own for parameter in module.parameters()}
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter not in kept:
                parameter.data = parameter.data.to(dtype)

        units: list[nn.Module] = []
        self.program.shard(
            model, lambda module, **_: units.extend([module] if isinstance(module, nn.Module) else module)
        )
        for module in units:
            module.forward = self._casting(module.forward, dtype)

    def _casting(self, forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
        def cast_first(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward and not self._casts_again:
                return forward(*args, **kwargs)
            return casting(forward, dtype, args, kwargs)

        return cast_first

    def _casting_outputs(self, forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
        def cast_afterwards(*args: Any, **kwargs: Any) -> Any:
            found = cast(forward(*args, **kwargs), dtype)
            self.outputs[-1][1].append([(place, value.dtype) for place, value in floats_in(found)])
            return found

        return cast_afterwards

    @torch.no_grad()
    def load(self, parameters: dict[str, Tensor]) -> None:
        """Put recorded parameters into both models."""
        for model in (self.computing, self.stepped):
            for name, parameter in named(model):
                parameter.copy_(parameters[name])

    def replay(self, step: int, buffers: list[dict[str, Tensor]], gradients: dict[str, Tensor | None]) -> Expected:
        """Take `step` from the loaded parameters, with `buffers` of each rank from before it. `gradients`: those that
        the sharded training's optimizer took, and so this one takes."""
        losses, states, parts, after = [], [], [], []
        for rank in range(self.setting.data_world):
            self.put_buffers(self.buffers_for(rank, buffers))
            rows = [self.forward(step, micro, rank) for micro in range(self.setting.strategy.micro)]
            losses.append([loss for loss, _, _ in rows])
            states.append([state for _, state, _ in rows])
            parts.append([part for _, _, part in rows])
            after.append(buffers_of(self.computing))
        for name, parameter in named(self.stepped):
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.to(self.device, parameter.dtype)
        if self.scale == 1 or all(g is None or bool(g.isfinite().all()) for g in gradients.values()):
            self.optimizer.step()
        else:
            self.scale /= 2
        parameters = {name: p.detach().to("cpu", copy=True) for name, p in named(self.stepped)}
        state = {name: dict(self.optimizer.state[p]) for name, p in named(self.stepped) if p in self.optimizer.state}
        return Expected(losses, states, after, parts, parameters, state)

    def forward(self, step: int, micro: int, rank: int) -> tuple[Tensor, dict[str, str], dict[str, Tensor | None]]:
        """One forward and backward of a data rank: the loss, the generators' states after it, and the gradients."""
        index = batch_index(self.setting, step, micro, rank)
        self.outputs.append((rank, []))
        batch = to_device(self.program.batch(index), self.device)
        seed_generators(seed_of(index))
        loss = self.program.loss(self.computing, batch)
        once = buffers_of(self.computing) if self.setting.strategy.recompute else {}
        self._in_backward = True
        try:
            (self.scale * (loss / self.setting.strategy.micro)).backward()
        finally:
            self._in_backward = False
        twice = buffers_of(self.computing) if once else {}
        self.updated_again.update(name for name, buffer in once.items() if not torch.equal(buffer, twice[name]))
        state = generators(self.device)
        parts: dict[str, Tensor | None] = {}
        for name, parameter in named(self.computing):
            gradient, parameter.grad = parameter.grad, None
            # Each is rounded in the dtype of the gradient; the mean over the ranks is taken of exact values.
            scale = self.scale * self.setting.data_world
            parts[name] = None if gradient is None else gradient.detach().cpu().double() / scale
        return loss.detach().cpu(), state, parts

    def dtypes(self, name: str) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes in which the parameter computes, and is stored."""
        models = dict(named(self.computing)), dict(named(self.stepped))
        return models[0][name].dtype, models[1][name].dtype

    def evaluate(self, model: nn.Module, mode: str, rank: int) -> tuple[Tensor, dict[str, str], dict[str, Tensor]]:
        """The loss of a data rank's first batch in a mode of `evaluating`, the generators' states after it, and the
        buffers. `model`: `computing`, or `stepped`, which computes in the dtype of its parameters."""
        index = batch_index(self.setting, 0, 0, rank)
        batch = to_device(self.program.batch(index), self.device)
        with evaluating(model, mode):
            seed_generators(seed_of(index))
            loss = self.program.loss(model, batch)
        return loss.detach().cpu(), generators(self.device), buffers_of(model)

    def restart(self, state: dict[str, Any], scale: float) -> None:
        """Starts as in another process, which loads the optimizer's state dict."""
        self.optimizer, self.scale = self.program.optimizer(self.stepped.parameters()), scale
        self.optimizer.load_state_dict(state)

    # ---- with a fault, to predict what it gives --------------------------------------------------------------

    def parts(self, step: int, buffers: list[dict[str, Tensor]]) -> list[list[dict[str, Tensor | None]]]:
        """`Expected.parts` of `step` from the loaded parameters."""
        found = []
        for rank in range(self.setting.data_world):
            self.put_buffers(self.buffers_for(rank, buffers))
            found.append([self.forward(step, micro, rank)[2] for micro in range(self.setting.strategy.micro)])
        return found

    @contextmanager
    def without_use(self, alias: str) -> Iterator[None]:
        """The parameter that has the name `alias`, and others, gets no gradient of its use under that name."""
        for path, module in self.computing.named_modules(remove_duplicate=False):
            for key, tied in module.named_parameters(recurse=False, remove_duplicate=False):
                if clean(f"{path}.{key}" if path else key) == alias:
                    setattr(module, key, nn.Parameter(tied.detach()))
                    try:
                        yield
                    finally:
                        setattr(module, key, tied)
                    return
        raise KeyError(alias)

    @contextmanager
    def without_casts_again(self) -> Iterator[None]:
        """Blocks are computed again in backward, where units do not cast their inputs. In mixed precision only."""
        sound, dtype = self.computing, self.setting.strategy.dtype
        assert dtype is not None
        self.computing = self._build(recompute=self.setting.strategy.recompute)
        self._compute_in(self.computing, dtype)
        values = dict(named(sound))
        with torch.no_grad():
            for name, parameter in named(self.computing):
                parameter.copy_(values[name])
        self._casts_again = False
        try:
            yield
        finally:
            self.computing, self._casts_again = sound, True

    def buffers_for(self, data_rank: int, buffers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns those of a data rank, of `buffers` by rank; of a pipeline, what all of its stages have."""
        found: dict[str, Tensor] = {}
        for rank in reversed(self.setting.ranks_of(data_rank)):
            found |= buffers[rank]
        return found

    @torch.no_grad()
    def put_buffers(self, buffers: dict[str, Tensor], model: nn.Module | None = None) -> None:
        """Put recorded buffers into the model that computes, or into `model`."""
        for name, buffer in (model or self.computing).named_buffers():
            buffer.copy_(buffers[name])

    @torch.no_grad()
    def resume(self, found: Step) -> None:
        """Take over what the sharded training has after its step: parameters, and the optimizer's state."""
        self.load(found.parameters)
        for name, parameter in named(self.stepped):
            for key, value in found.state.get(name, {}).items():
                own = self.optimizer.state[parameter].get(key)
                if isinstance(own, Tensor) and isinstance(value, Tensor):
                    own.copy_(value)
                else:
                    self.optimizer.state[parameter][key] = value


def read_before(folder: Path, rank: int) -> Before:
    return Before(*torch.load(folder / "before" / f"rank-{rank}.pt", weights_only=False))


def read_step(folder: Path, step: int, rank: int) -> Step:
    return Step(*torch.load(folder / f"step-{step}" / f"rank-{rank}.pt", weights_only=False))
