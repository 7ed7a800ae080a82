"""`average`: a running average of a model's parameters on their shards: EMA, or SWA's mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like
from ..api import write_shards
from ..engine.names import clean_name
from ..engine.optimizer_steps import refuses_steps
from ..param import local_data, local_part
from ..policy.arguments import expect, expect_choice, expect_flag, expect_module

# Bytes of averages that one update treats together: kernels of many tensors, and temporaries of bounded size.
_TOGETHER_NBYTES = 64 << 20


def average(
    model: nn.Module,
    *,
    decay: float | None = None,
    window: float | None = None,
    device: str | None = None,
    buffers: bool = False,
) -> Average:
    """A running average of the floating-point parameters of `model`, which starts with their present values.

        mean = fullshard.average(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            mean.update()
        with mean.applied():
            evaluate(model)

    Of any model, sharded or not: each rank averages its own shards, and nothing is sent. The average is in float32
    (float64 for float64 parameters) whatever the dtype of the parameters, so that small steps count. Its bits are those
    of the same average in one process: `decay * mean + (1 - decay) * p`, and `mean + (p - mean) / n`, as torch's
    `AveragedModel` computes them, which cannot copy a sharded model.

    decay: of an exponential average (EMA), in [0, 1].
    window: of an equal one (SWA): the mean of all values up to `window` of them, after which a new one counts
        1 / window; `math.inf` for the mean of all. In both the first update takes the values as they are.
    device: "cpu" keeps the average in the host's memory; None beside the shards. Costs 4 bytes per element of a shard.
    buffers: average floating-point buffers, too.

    Exactly one of `decay` and `window`. Update it outside of a step, after `optimizer.step()`. Raises `ValueError` for
    numbers out of range.
    """
    expect_module("model", model)
    if (decay is None) is (window is None):
        raise ValueError(f"average: expected decay or window, found decay={decay!r} and window={window!r}; pass one")
    for argument, value, least, most in (("decay", decay, 0.0, 1.0), ("window", window, 1.0, math.inf)):
        if value is not None:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            expect(argument, fits, "a number", value, "pass 0.999, for example")
            expect(argument, least <= value <= most, f"{least:g} to {most:g}", value, "see its meaning", ValueError)
    if device is not None:
        expect_choice("device", device, ["cpu"])
    expect_flag("buffers", buffers)
    return Average(model, decay, window, device, buffers=buffers)


class Average:
    """The result of `average`. It owns its tensors, `{name: DTensor or tensor}`, placed like the model's."""

    def __init__(
        self, model: nn.Module, decay: float | None, window: float | None, device: str | None, *, buffers: bool
    ) -> None:
        self._model, self._decay, self._window = model, decay, window
        self._device, self._buffers = device, buffers
        # How many updates it had.
        self.updates = 0
        self._means: dict[str, Tensor] = {}
        # While it is applied: the tensors that have the average, by id.
        self._held: frozenset[int] = frozenset()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self._current().items():
                self._means[name] = self._new(local_data(tensor), dtype=_mean_dtype(tensor.dtype))
        self.reset()

    def _new(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        if local.is_meta:
            raise RuntimeError(
                "average: expected parameters with values, found some on the meta device; initialise or load the "
                "model first (fullshard.materialize, fullshard.load_pretrained)"
            )
        on_host = self._device == "cpu" and local.device.type != "cpu"
        return torch.empty(local.shape, dtype=dtype, device=self._device or local.device, pin_memory=on_host)

    def reset(self) -> None:
        """Start anew with the present values of the model, after a load for example."""
        self.updates = 0
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self._current().items():
                self._means[name].copy_(local_data(tensor))

    def update(self) -> None:
        """Take the present values into the average. No message."""
        with torch.inference_mode(False), torch.no_grad():
            for means, values in self._together():
                values = [value.to(mean.device, mean.dtype) for mean, value in zip(means, values, strict=True)]
                # Each operation rounds once, so that bits do not depend on where a shard begins.
                if self.updates == 0:
                    torch._foreach_copy_(means, values)
                elif self._decay is not None:
                    torch._foreach_mul_(means, self._decay)
                    torch._foreach_add_(means, torch._foreach_mul(values, 1 - self._decay))
                else:
                    assert self._window is not None
                    differences = torch._foreach_sub(values, means)
                    torch._foreach_div_(differences, float(min(self.updates + 1, self._window)))
                    torch._foreach_add_(means, differences)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged values, in its own dtypes; afterwards its own ones again, bit for bit.

        For evaluation, generation, export and saving: `state_dict()`, `fullshard.weights` and checkpoints see the
        average. Costs a copy of the shards, on the average's device. On all ranks, outside of a step. An optimizer's
        step inside raises `RuntimeError`, because leaving the context would undo it.
        """
        if any(entered._model is self._model for entered in tuple(_applied)):
            raise RuntimeError("average.applied: expected the model's own values, found an average applied already")
        current = self._current()
        write_shards(self._model, "average.applied")
        kept: dict[str, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in current.items():
                local = local_data(tensor)
                kept[name] = self._new(local, dtype=local.dtype).copy_(local)
            for name, tensor in current.items():
                local_data(tensor).copy_(self._means[name])
        self._held = frozenset(map(id, current.values()))
        _applied.append(self)
        try:
            yield
        finally:
            _applied.remove(self)
            write_shards(self._model, "average.applied")
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in current.items():
                    local_data(tensor).copy_(kept[name])

    def state_dict(self) -> dict[str, Any]:
        """`{"means": {name: DTensor or tensor}, "updates": int}`. Shares the average's memory; a checkpoint stores it
        for any number of ranks, `checkpoint.save({"average": mean, ...})`. No message."""
        current = self._current()
        return {
            "means": {name: _like(current[name], mean) for name, mean in self._means.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here or on other ranks through a checkpoint. Plain full tensors are taken
        apart; names have to be those of this average (`KeyError`)."""
        means: Mapping[str, Tensor] = state["means"]
        if means.keys() != self._means.keys():
            other = sorted(means.keys() ^ self._means.keys())
            raise KeyError(f"average: expected the names of this average, found only on one side: {other[:8]}")
        current = self._current()
        with torch.inference_mode(False), torch.no_grad():
            for name, value in means.items():
                mean = self._means[name]
                if value.shape != current[name].shape:
                    raise ValueError(
                        f"average: expected {tuple(current[name].shape)} of {name}, found {tuple(value.shape)}"
                    )
                if isinstance(current[name], DTensor):
                    like = current[name]
                    assert isinstance(like, DTensor)
                    if isinstance(value, DTensor):
                        if value.device_mesh != like.device_mesh or value.placements != like.placements:
                            value = value.redistribute(like.device_mesh, like.placements)
                        mean.copy_(local_data(value))
                    else:
                        mean.copy_(local_part(value, like))
                elif mean.data_ptr() != value.data_ptr():
                    mean.copy_(value)
        self.updates = int(state["updates"])

    def _current(self) -> dict[str, Tensor]:
        """The tensors that are averaged, sharded where they are sharded; tied ones once."""
        state = self._model.state_dict(keep_vars=True)
        own = {clean_name(name) for name, _ in self._model.named_buffers()}
        found: dict[int, tuple[str, Tensor]] = {}
        for name, value in state.items():
            name = clean_name(name)
            if isinstance(value, Tensor) and value.is_floating_point() and (self._buffers or name not in own):
                found.setdefault(id(value), (name, value))
        return dict(found.values())

    def _together(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Averages and values, of one dtype and device each, some at a time."""
        kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, tensor in self._current().items():
            mean, local = self._means[name], local_data(tensor).detach()
            if not local.numel():
                continue
            key = mean.dtype, local.dtype, mean.device, local.device
            means, values = kinds.setdefault(key, ([], []))
            if sum(one.nbytes for one in means) + mean.nbytes > _TOGETHER_NBYTES and means:
                yield means, values
                kinds[key] = means, values = [], []
            means.append(mean)
            values.append(local)
        yield from (one for one in kinds.values() if one[0])


def _mean_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 4 else torch.float32


def _like(tensor: Tensor, mean: Tensor) -> Tensor:
    return dtensor_like(tensor, mean) if isinstance(tensor, DTensor) else mean


_applied: list[Average] = []


@refuses_steps(_applied)
def _refuse_undone(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for entered in tuple(_applied):  # another thread may leave its own
        # Not the model's state dict: a model of another thread may be in a forward, which that would reshard.
        if any(id(parameter) in entered._held for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): expected no step while an average is applied, which would be "
                f"undone at its end; step outside of `with average.applied()`"
            )
