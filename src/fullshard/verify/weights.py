"""The full parameters that a sharded model computes with: bit by bit what its shards hold, or kept for the comparison.

They are looked at inside of the forward of each unit, after the library gathered them, also where activations are
computed again in backward. `forward` is wrapped, so no hook comes between those of the library.

Only where the cause of a difference is looked for, a hook on each full parameter keeps the gradient that autograd made
for this rank, and looks at the weights of its unit at that moment: those that backward computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.migrate.experts import EXPERT_SHARDS

from .setting import named


class Used(NamedTuple):
    """A full parameter as a unit's forward found it. `phase`: "backward" if that forward was computed again."""

    phase: str
    name: str
    value: Tensor


class Uses(NamedTuple):
    """The uses of full parameters in one step: how many were looked at, and those that shards did not hold."""

    looked: int
    others: list[Used]


class Weights:
    """Looks at the full parameters in each forward of a unit. Those that are not `held`, bit by bit, it keeps."""

    def __init__(self, dtype: torch.dtype | None = None, kept: Collection[str] = ()) -> None:
        """`dtype`: in which units compute; None for that of the parameters, as for those of the names in `kept`."""
        self._dtype, self._kept = dtype, kept
        # The values that the shards hold, by name.
        self.held: dict[str, Tensor] = {}
        # The phase that runs: a forward that is computed again runs in the backward.
        self.phase = "forward"
        # The modules of each unit whose parameters are its own, and the names of these.
        self._places: dict[nn.Module, list[tuple[nn.Module, dict[str, str]]]] = {}
        self._count, self._others = 0, dict[tuple[str, str], Used]()
        # The gradients of each micro-batch: those of this rank by name, before any reduction; None: they are not kept.
        self.gradients: list[dict[str, Tensor]] | None = None
        # The full parameters with a hook; and by name, which tensors got a gradient since `torn` was called.
        self._hooked: Any = WeakIdKeyDictionary()
        self._tensors = dict[str, set[int]]()

    def watch(self, model: nn.Module, units: list[nn.Module]) -> None:
        """Look whenever one of `units` (inner ones first) runs its forward."""
        names = {id(parameter): name for name, parameter in named(model) if isinstance(parameter, DTensor)}
        seen = set[nn.Module]()
        for unit in units:
            inner = [module for module in unit.modules() if module not in seen]
            seen.update(inner)
            self._places[unit] = [
                (module, {key: names[id(p)] for key, p in _own_parameters(module).items() if id(p) in names})
                for module in inner
            ]
            unit.forward = self._looking(unit, unit.forward)

    def _looking(self, unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        look: Any = torch.compiler.disable(self.look)  # its comparisons are none of the model's

        @wraps(forward)
        def looks_first(*args: Any, **kwargs: Any) -> Any:
            look(unit)
            return forward(*args, **kwargs)

        return looks_first

    @torch.no_grad()
    def look(self, unit: nn.Module) -> None:
        """`unit` begins its forward."""
        for module, names in self._places[unit]:
            found = _own_parameters(module)
            for key, name in names.items():
                value: Tensor = found[key]
                if isinstance(value, DTensor):
                    if {"shard", EXPERT_SHARDS} & {*(value.device_mesh.mesh_dim_names or ())}:
                        continue  # the program uses shards here, or a unit's forward that fully_shard does not know
                    value = value.full_tensor()  # over the axis of tensor parallelism, or of experts
                self._count += 1
                if not self._is_held(value, self.held[name], self._dtype_of(name)):
                    copy = value.detach().to("cpu", copy=True)
                    self._others.setdefault((self.phase, name), Used(self.phase, name, copy))
                if self.gradients is not None and found[key].requires_grad and found[key] not in self._hooked:
                    self._hooked[found[key]] = name
                    found[key].register_hook(partial(self._came, unit, name, id(found[key])))

    def torn(self) -> list[str]:
        """The parameters that were several tensors since the last call; of those whose gradients are kept."""
        found = sorted(name for name, tensors in self._tensors.items() if len(tensors) > 1)
        self._tensors.clear()
        return found

    def _came(self, unit: nn.Module, name: str, tensor: int, gradient: Tensor) -> None:
        """`gradient` of a full parameter was computed, by weights that are still there."""
        if not self.gradients:
            return
        if not isinstance(gradient, DTensor):  # beside tensor parallelism it is a part of one
            self._tensors.setdefault(name, set()).add(tensor)
            here, copy = self.gradients[-1], gradient.detach().to("cpu", copy=True)
            here[name] = here[name] + copy if name in here else copy
        self.look(unit)

    def _dtype_of(self, name: str) -> torch.dtype | None:
        return None if name in self._kept else self._dtype

    @staticmethod
    def _is_held(value: Tensor, held: Tensor, dtype: torch.dtype | None) -> bool:
        # Of a floating dtype that only says how large packed values are, nothing is cast; these are not trained.
        wanted = dtype if dtype is not None and held.is_floating_point() else held.dtype
        if value.shape != held.shape or (value.requires_grad and value.dtype is not wanted):
            return False
        held = held.to(value.device, value.dtype)
        return torch.equal(value, held) or bool(((value == held) | (value.isnan() & held.isnan())).all())

    def take(self) -> Uses:
        """Returns what was seen since the last call."""
        found = Uses(self._count, [*self._others.values()])
        self._count = 0
        self._others.clear()
        return found


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))
