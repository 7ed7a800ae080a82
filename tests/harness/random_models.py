"""Random models as data, and Hypothesis strategies that draw them: what may be sharded, in one place.

A `ModelSpec` is a frozen value that pickles, prints and shrinks: which modules there are, how wide, which are frozen,
tied, unused, recomputed or units, in which dtypes, and in which pattern micro-batches are reduced. `build`, `shard` and
`batch` make of it the same model, units and data on every rank and in every process; `tests.harness.parity` trains it.

Sizes are small and awkward on purpose: 1, primes, fewer rows than ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecisionPolicy
from tests.harness.models import seeded

Kind = Literal["dense", "dense_no_bias", "twins", "norm", "scale", "table", "conv"]
# When a leaf takes part: always, never, at every other step on all ranks, or on every other rank.
Use = Literal["always", "never", "by_step", "by_rank"]
Recompute = Literal["no", "inside", "outside", "outside_reentrant"]

VOCABULARY = 11
ROWS = 2  # of one micro-batch


@dataclass(frozen=True)
class LeafSpec:
    """One leaf: `hidden` is its inner size; `unit`: it is a unit of its own."""

    kind: Kind
    hidden: int = 3
    use: Use = "always"
    unit: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """Leaves one after the other, then the inner block. `reshard` goes to `fully_shard`."""

    leaves: tuple[LeafSpec, ...]
    inner: BlockSpec | None = None
    unit: bool = True
    reshard: bool | None = None
    recompute: Recompute = "no"


POLICIES: dict[str, MixedPrecisionPolicy] = {
    "none": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    "bf16_reduced_as_stored": MixedPrecisionPolicy(torch.bfloat16),
    "bf16_reduced_in_fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32_reduced_in_bf16": MixedPrecisionPolicy(None, torch.bfloat16),
    "reduced_in_fp64": MixedPrecisionPolicy(None, torch.float64),
}


@dataclass(frozen=True)
class ModelSpec:
    """A model, its units and its training. `sync[i]`: whether the backward of micro-batch i of a step reduces; the last
    one does. `frozen` are positions among the parameters below `blocks`, counted round. `dims`: along which
    each parameter of the model is cut, in their order, counted round twice: over parameters, and over each one's dims.
    """

    blocks: tuple[BlockSpec, ...]
    width: int = 5
    tokens: bool = True
    frozen: tuple[int, ...] = ()
    dims: tuple[int, ...] = (0,)
    reshard: bool | None = None  # of the root
    dtype: Literal["float32", "float64"] = "float32"
    policy: str = "none"
    sync: tuple[bool, ...] = (True,)
    prefetch_depth: int = 1
    reductions_in_flight: int = 2
    seed: int = 0

    @property
    def storage(self) -> torch.dtype:
        return {"float32": torch.float32, "float64": torch.float64}[self.dtype]

    def options(self) -> dict[str, Any]:
        """For `use_options`; every command is checked."""
        return {
            "prefetch_depth": self.prefetch_depth,
            "reductions_in_flight": self.reductions_in_flight,
            "check": True,
        }


# ---- modules -------------------------------------------------------------------------------------------------


class Leaf(nn.Module):
    """x (n, width) -> (n, width); `turn` is (step, rank)."""

    def __init__(self, spec: LeafSpec, width: int) -> None:
        super().__init__()
        self.kind, self.use = spec.kind, spec.use
        if spec.kind in ("dense", "dense_no_bias"):
            self.up = nn.Linear(width, spec.hidden, bias=spec.kind == "dense")
            self.down = nn.Linear(spec.hidden, width, bias=False)
        elif spec.kind == "twins":
            self.first = nn.Linear(width, width)
            self.second = nn.Linear(width, width)
            self.second.weight = self.first.weight
        elif spec.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif spec.kind == "scale":
            self.gain = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
            self.shift = nn.Parameter(torch.randn(1))
        elif spec.kind == "table":
            self.table = nn.Parameter(0.1 * torch.randn(spec.hidden, 2, width))
        else:
            self.conv = nn.Conv1d(1, spec.hidden, kernel_size=3, padding=1)

    def forward(self, x: Tensor, turn: tuple[int, int]) -> Tensor:
        step, rank = turn
        if self.use == "never" or (self.use == "by_step" and step % 2) or (self.use == "by_rank" and (step + rank) % 2):
            return x
        if self.kind in ("dense", "dense_no_bias"):
            return x + self.down(torch.tanh(self.up(x)))
        if self.kind == "twins":
            return x + self.second(torch.tanh(self.first(x)))
        if self.kind == "norm":
            return x + self.norm(x)
        if self.kind == "scale":
            return x * self.gain + self.shift
        if self.kind == "table":
            return x + self.table.sum((0, 1))
        return x + self.conv(x.unsqueeze(1)).mean(1)


class Block(nn.Module):
    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Leaf(leaf, width) for leaf in spec.leaves)
        self.inner = Block(spec.inner, width) if spec.inner else None
        self.recompute = spec.recompute

    def forward(self, x: Tensor, turn: tuple[int, int]) -> Tensor:
        if self.recompute == "inside":
            return checkpoint(self.body, x, turn, use_reentrant=False)
        return self.body(x, turn)

    def body(self, x: Tensor, turn: tuple[int, int]) -> Tensor:
        for leaf in self.leaves:
            x = leaf(x, turn)
        return x if self.inner is None else call(self.inner, x, turn)


def call(block: Block, x: Tensor, turn: tuple[int, int]) -> Tensor:
    """The block's forward, recomputed if the block says so."""
    reentrant = block.recompute == "outside_reentrant"
    if block.recompute == "outside" or (reentrant and x.requires_grad):
        return checkpoint(block, x, turn, use_reentrant=reentrant)
    return block(x, turn)


class RandomModel(nn.Module):
    """Embedding (or float inputs), blocks, head; the first and the last belong to the root."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, spec.width) if spec.tokens else None
        self.blocks = nn.ModuleList(Block(block, spec.width) for block in spec.blocks)
        self.head = nn.Linear(spec.width, 3)

    def forward(self, x: Tensor, turn: tuple[int, int]) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x).mean(1)
        for block in self.blocks:
            x = call(block, x, turn)
        return self.head(x)


def build(spec: ModelSpec) -> nn.Module:
    """The plain model: its values depend on the spec alone."""
    model = seeded(lambda: RandomModel(spec), spec.seed).to(spec.storage)
    params = list(model.get_submodule("blocks").parameters())
    for position in spec.frozen:
        if params:
            params[position % len(params)].requires_grad_(False)
    return model


def unit_names(spec: ModelSpec) -> list[tuple[str, bool | None]]:
    """(name, reshard_after_forward) of every unit, inner ones first; the root, "", is the last."""
    found: list[tuple[str, bool | None]] = []

    def walk(name: str, block: BlockSpec) -> None:
        found.extend((f"{name}.leaves.{i}", block.reshard) for i, leaf in enumerate(block.leaves) if leaf.unit)
        if block.inner is not None:
            walk(f"{name}.inner", block.inner)
        if block.unit:
            found.append((name, block.reshard))

    for i, block in enumerate(spec.blocks):
        walk(f"blocks.{i}", block)
    return [*found, ("", spec.reshard)]


def policy_of(spec: ModelSpec, name: str) -> MixedPrecisionPolicy:
    """The policy of one unit: that of the model; the root's output comes in the storage dtype."""
    policy = POLICIES[spec.policy]
    if name:
        return policy
    return MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, spec.storage)


def shard(spec: ModelSpec, model: nn.Module, fully_shard: Any) -> Any:
    """Apply `fully_shard` to the spec's units of `model`, in place."""
    options: dict[str, Any] = {}
    if any(spec.dims):
        dims = {p: spec.dims[i % len(spec.dims)] % p.ndim for i, p in enumerate(model.parameters())}
        options["shard_placement_fn"] = lambda parameter: Shard(dims[parameter])
    for name, reshard in unit_names(spec):
        fully_shard(
            model.get_submodule(name), reshard_after_forward=reshard, mp_policy=policy_of(spec, name), **options
        )
    return model


def batch(spec: ModelSpec, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one micro-batch of one rank."""
    seed = ((spec.seed * 1009 + step) * 101 + micro) * 31 + rank
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(ROWS, 3, generator=generator, dtype=spec.storage)
    if spec.tokens:
        return torch.randint(VOCABULARY, (ROWS, 3), generator=generator), targets
    return torch.randn(ROWS, spec.width, generator=generator, dtype=spec.storage), targets


def loss(spec: ModelSpec, model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    """The loss of one micro-batch of one rank."""
    inputs, targets = batch(spec, step, micro, rank)
    out: Tensor = model(inputs, (step, rank))
    return (out.to(targets.dtype) - targets).pow(2).mean()


# ---- strategies ----------------------------------------------------------------------------------------------

EXPLORING = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def examples(quick: int, full: int) -> hypothesis.settings:
    """So many examples by default, so many in the full profile. Only the full one shrinks what fails: an example that
    hangs costs a time-out each time it is tried."""
    phases = list(hypothesis.Phase) if EXPLORING else [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    return hypothesis.settings(
        max_examples=full if EXPLORING else quick,
        phases=phases,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


sizes = st.sampled_from([1, 2, 3, 5, 7, 13])


def leaves() -> st.SearchStrategy[LeafSpec]:
    kinds: tuple[Kind, ...] = ("dense", "dense_no_bias", "twins", "norm", "scale", "table", "conv")
    # Not "by_rank": whether a unit gets gradients at all must not depend on the rank.
    uses: tuple[Use, ...] = ("always", "always", "always", "never", "by_step")
    unit = st.sampled_from([False, False, True])
    return st.builds(LeafSpec, st.sampled_from(kinds), sizes, st.sampled_from(uses), unit)


def blocks(depth: int = 2) -> st.SearchStrategy[BlockSpec]:
    recompute: tuple[Recompute, ...] = ("no", "no", "inside", "outside", "outside_reentrant")
    return st.builds(
        BlockSpec,
        leaves=st.lists(leaves(), min_size=1, max_size=3).map(tuple),
        inner=blocks(depth - 1) | st.none() if depth > 1 else st.none(),
        unit=st.sampled_from([True, True, False]),
        reshard=st.sampled_from([None, True, False]),
        recompute=st.sampled_from(recompute),
    )


@st.composite
def model_specs(draw: st.DrawFn, *, precision: bool = True) -> ModelSpec:
    """Any model; `precision=False`: only policies that leave all dtypes alone."""
    policy = draw(st.sampled_from(["none", "none", *(POLICIES if precision else ())]))
    return ModelSpec(
        blocks=draw(st.lists(blocks(), min_size=1, max_size=3).map(tuple)),
        width=draw(sizes),
        tokens=draw(st.booleans()),
        frozen=draw(st.lists(st.integers(0, 20), max_size=4).map(tuple)),
        dims=draw(st.sampled_from([(0,), (0,), (1,), (0, 1), (2, 1, 0)])),
        reshard=draw(st.sampled_from([None, True, False])),
        dtype=draw(st.sampled_from(["float32", "float32", "float64"])) if policy == "none" else "float32",
        policy=policy,
        sync=(*draw(st.lists(st.booleans(), max_size=2)), True),
        prefetch_depth=draw(st.sampled_from([1, 1, 0, 2])),
        reductions_in_flight=draw(st.sampled_from([2, 1, 3])),
        seed=draw(st.integers(0, 99)),
    )
