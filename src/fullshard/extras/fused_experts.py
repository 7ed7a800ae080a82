"""Experts of Hugging Face's models, with the weights of all in a few parameters: their layout, and their products where
ranks divide them.

    FusedExperts     what is put above their class: parameters, names and gate stay
    layout_of        how the parameters are laid out, by a trial: the class's own forward on small numbers

Letters in shapes: E experts, D width, F width of an expert; G = 2F with gates, F without.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm import ExpertLine
from .experts import gates_and_ups, products, routed

# Where gate and up of an expert are among its 2F features.
HALVES, PAIRS = "halves", "pairs"
_DOWN, _BIAS = "down_proj", "_bias"
# The method of a class that has a gate of its own.
_GATE = "_apply_gate"


@dataclass(frozen=True)
class FusedLayout:
    """first: `gate_up_proj` (E, 2F, D), or `up_proj` (E, F, D) of experts without gates; `down_proj` is (E, D, F).
    transposed: the last two dims of both are the other way round. gates: HALVES, PAIRS, or "" where features cannot be
    divided. Biases, if there are any, are (E, G) and (E, D)."""

    first: str
    transposed: bool = False
    gates: str = ""

    def cut(self, name: str) -> int | None:
        """The dim of a parameter along which `etp` cuts it; None for a bias that belongs to the whole sum."""
        if name.endswith(_BIAS):
            return 1 if name.startswith(self.first) else None
        return 1 if name.startswith(_DOWN) == self.transposed else 2

    @property
    def can_be_cut(self) -> bool:
        return self.first == "up_proj" or bool(self.gates)

    def apply(
        self, module: Any, weights: dict[str, Tensor], rows: Tensor, counts: list[int], line: ExpertLine | None = None
    ) -> Tensor:
        """rows (n, D), `counts` for each expert here -> (n, D). line: ranks along tp have parts of each expert, whose
        results add up."""
        cut = line is not None and line.cut
        last = weights.get(_DOWN + _BIAS)
        if cut and last is not None:
            # Of the sum over the ranks once; the others have a gradient of zeros, so that all send the same.
            last = last * float(line.part == 0)  # type: ignore[union-attr]
        hidden = self._product(rows.to(weights[self.first].dtype), weights, self.first, counts)
        if cut and self.gates == HALVES:
            hidden = gates_and_ups(line, hidden)
        return products(_activated(module, self.first, hidden), self._of(weights[_DOWN]), counts, last)

    def _product(self, rows: Tensor, weights: dict[str, Tensor], name: str, counts: list[int]) -> Tensor:
        return products(rows, self._of(weights[name]), counts, weights.get(name + _BIAS))

    def _of(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if self.transposed else weight


def _activated(module: Any, first: str, hidden: Tensor) -> Tensor:
    """(n, G) -> (n, F), by what transformers calls a class's own gate, else by its default."""
    gated = getattr(module, _GATE, None)
    if first == "up_proj":
        out: Tensor = module.act_fn(hidden)
    elif gated is not None:
        out = gated(hidden)
    else:
        gate, up = hidden.chunk(2, -1)
        out = module.act_fn(gate) * up
    return out


class FusedExperts(nn.Module):
    """The forward of experts that ranks divide, above their own class."""

    line: ExpertLine | None = None
    layout: FusedLayout
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        line, weights = self.line, {name: self._here(name, p) for name, p in self.named_parameters(recurse=False)}

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            return self.layout.apply(self, weights, rows, counts, line)

        return routed(hidden_states, top_k_index, top_k_weights, self.num_experts, compute, line)

    def _here(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a weight that ranks divide; of one that is whole along tp the gradient is a sum."""
        if not isinstance(weight, DTensor):
            return weight
        summed: list[Placement] = [Shard(0), Partial()]
        whole = weight.device_mesh.ndim == len(summed) and self.layout.cut(name) is None
        return weight.to_local(grad_placements=summed if whole else None)


# ---- the layout ------------------------------------------------------------------------------------------------------

# Of the trial: experts, D, F, tokens, experts of each token.
_E, _D, _F, _N, _K = 3, 6, 4, 8, 2
# Of the largest number: some forwards compute in float32.
_TOLERANCE = 1e-5


def layout_of(module: nn.Module) -> FusedLayout | str:
    """How the experts `module` are laid out; "" for a module without such parameters, or why they cannot be divided.

    No name of an attribute decides it: the forward of the class, on a copy with small random weights, and ours have to
    give the same. It sends nothing, and leaves the module as it is.
    """
    own = dict(module.named_parameters())
    first = next((name for name in ("gate_up_proj", "up_proj") if name in own), None)
    if first is None or _DOWN not in own:
        return ""
    if others := sorted({*own} - {first, _DOWN, first + _BIAS, _DOWN + _BIAS}):
        return f"it has {others[0]} beside them"
    fitting = [each for each in (False, True) if _fits(module, own, first, each)]
    if not fitting:
        shapes = " and ".join(f"{name} {tuple(own[name].shape)}" for name in (first, _DOWN))
        return f"its shapes are {shapes} with num_experts = {getattr(module, 'num_experts', None)}"
    told = ""
    with torch.no_grad(), torch.device("cpu"):
        for transposed in fitting:
            layout = FusedLayout(first, transposed)
            told = _difference(module, layout, own)
            if not told:
                return FusedLayout(first, transposed, _gates(module, first))
    return told


def _fits(module: nn.Module, own: dict[str, nn.Parameter], first: str, transposed: bool) -> bool:
    into, out = tuple(own[first].shape), tuple(own[_DOWN].shape)
    experts, parts = getattr(module, "num_experts", None), 2 if first == "gate_up_proj" else 1
    if len(into) != 3 or len(out) != 3 or not into[0] == out[0] == experts:
        return False
    if transposed:
        into, out = (experts, into[2], into[1]), (experts, out[2], out[1])
    biases = {first + _BIAS: into[1], _DOWN + _BIAS: out[1]}
    return into == (experts, parts * out[2], out[1]) and all(
        tuple(own[name].shape) == (experts, width) for name, width in biases.items() if name in own
    )


def _difference(module: nn.Module, layout: FusedLayout, own: dict[str, nn.Parameter]) -> str:
    """Why the class's own forward is not that of `layout`, or ""."""
    width = (2 if layout.first == "gate_up_proj" else 1) * _F
    shapes = {layout.first: (_E, width, _D), _DOWN: (_E, _D, _F)}
    if layout.transposed:
        shapes = {name: (e, b, a) for name, (e, a, b) in shapes.items()}
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {name: drawn(*shapes[name]) for name in shapes}
    biases = {layout.first + _BIAS: (_E, width), _DOWN + _BIAS: (_E, _D)}
    weights |= {name: drawn(*shape) for name, shape in biases.items() if name in own}
    index = torch.stack([torch.randperm(_E, generator=generator)[:_K] for _ in range(_N)])
    small: Any = copy.copy(module)
    small.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in weights.items()}
    small.num_experts = _E
    forward: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
    for scale in (1.0, 20.0):  # gates that cut large numbers off do so at the second
        rows, factors = scale * drawn(_N, _D), drawn(_N, _K).abs()
        try:
            theirs = forward(small, rows, index, factors)
            ours = routed(rows, index, factors, _E, lambda r, c: layout.apply(small, weights, r, c))
        except Exception as error:  # of code that is not ours
            return f"its forward cannot be tried on small numbers: {type(error).__name__}: {error}".partition("\n")[0]
        if theirs.shape != ours.shape or (theirs - ours).abs().max() > _TOLERANCE * theirs.abs().max():
            return "its forward computes something else than down(gate(up(x))) of each token"
    return ""


def _gates(module: nn.Module, first: str) -> str:
    """HALVES or PAIRS: which features of the gate's input make one part of its output; "" for neither."""
    if first == "up_proj":
        return ""
    parts = 2
    hidden = torch.randn(5, 2 * _F, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = _activated(module, first, hidden)
    pairs = hidden.view(5, _F, 2).chunk(parts, 1)
    halves = hidden.view(5, 2, _F).chunk(parts, 2)
    for kind, pieces in ((PAIRS, pairs), (HALVES, halves)):
        found = torch.cat([_activated(module, first, piece.reshape(5, -1)) for piece in pieces], -1)
        if (found - whole).abs().max() <= _TOLERANCE * whole.abs().max():
            return kind
    return ""
