"""Ranks that disagree at the beginning: an error on all of them that says where, and none where they rightly differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.peers import RanksDisagree
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Block, Model, batch, part, shard

# Whose model or calls are other than those of the rest.
ODD = 1


class Small(Model):
    """A parameter of one row beside the others, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(3))

    def out(self, x: Tensor) -> Any:
        return self.head(x) * self.scale


BASE: Any = seeded(Small)
OTHER: Any = seeded(Small, seed=1)


def step(model: Any, rank: int, index: int = 0) -> None:
    model(part(batch(dist.get_world_size(), index), rank)).pow(2).mean().backward()


# ---- what differs --------------------------------------------------------------------------------------------


class Odd(NamedTuple):
    """What the odd rank does, and how the error begins on all ranks. `before`: to its model, before it is sharded;
    `shard`: in the place of sharding as the others do; `after`: behind that."""

    expected: str
    before: Callable[[Any], object] = lambda model: None
    shard: Callable[[Any], object] = shard
    after: Callable[[Any], object] = lambda model: None
    world: int = 2


def swap_order(model: Any) -> None:
    """The head is registered before the embedding."""
    embedding = model.embedding
    del model.embedding
    model.embedding = embedding


def rename(model: Any) -> None:
    model.output, model.head.out_features = model.head, 0
    del model.head


def all_but(*left_out: int) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        for i, layer in enumerate(model.layers):
            if i not in left_out:
                fully_shard(layer)
        fully_shard(model)

    return apply


def inner_too(model: Any) -> None:
    fully_shard(model.layers[0].up)
    shard(model)


def two_as_one(model: Any) -> None:
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard(model.layers[2])
    fully_shard(model)


def with_(layer: int | None = None, **options: Any) -> Callable[[Any], object]:
    """Sharded with `options` for one layer, or for all units."""

    def apply(model: Any) -> None:
        for i, block in enumerate(model.layers):
            fully_shard(block, **(options if layer in (None, i) else {}))
        fully_shard(model, **(options if layer is None else {}))

    return apply


def without(parameter: str) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        for block in model.layers:
            fully_shard(block)
        fully_shard(model, ignored_params={model.get_parameter(parameter)})

    return apply


def change(parameter: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        with torch.no_grad():
            p = model.get_parameter(parameter)
            p.copy_(edit(p.clone()))

    return apply


def negate_last(value: Tensor) -> Tensor:
    value.view(-1)[-1] *= -1
    return value


def next_float(value: Tensor) -> Tensor:
    value.view(-1)[3] = torch.nextafter(value.view(-1)[3], torch.tensor(9.0))
    return value


def negative_zero(value: Tensor) -> Tensor:
    return -value


def columns_exchanged(value: Tensor) -> Tensor:
    """Sums of all rows and columns stay as they are."""
    value[0, 0], value[0, 1], value[1, 0], value[1, 1] = value[0, 1], value[0, 0], value[1, 1], value[1, 0]
    return value


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SHAPE, UNITS, VALUES = (
    "expected the same shape",
    "expected a unit (fully_shard) of this name",
    "expected the same values",
)
PRESENT = "expected this parameter on every rank, found it on"

DIVERGENCES: dict[str, Odd] = {
    # ---- the model
    "a layer more": Odd(f"layers.3: {UNITS}", lambda m: m.layers.append(Block())),
    "a layer less": Odd(f"layers.2: {UNITS}", lambda m: m.layers.pop(2)),
    "no layers": Odd(f"layers.0: {UNITS}", lambda m: setattr(m, "layers", nn.ModuleList())),
    "another width": Odd(f"layers.1.up.weight: {SHAPE}", lambda m: setattr(m.layers[1], "up", nn.Linear(6, 14))),
    "another vocabulary": Odd(f"embedding.weight: {SHAPE}", lambda m: setattr(m, "embedding", nn.Embedding(12, 6))),
    "a vector that is a column": Odd(f"scale: {SHAPE}", lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1, 1)))),
    "no bias": Odd(f"head.bias: {PRESENT} rank 0 ", lambda m: setattr(m.head, "bias", None)),
    "a parameter more": Odd(
        f"extra: {PRESENT} rank 1 and not", lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2)))
    ),
    "another name": Odd(f"head.weight: {PRESENT} ranks 0 and 2 ", rename, world=3),
    "another order": Odd("embedding.weight: expected the same order of parameters", swap_order),
    "a dtype": Odd("layers.0.norm.weight: expected the same dtype", lambda m: m.layers[0].norm.double()),
    "all dtypes": Odd("scale: expected the same dtype", lambda m: m.bfloat16()),
    "tied": Odd("embedding.weight: expected the same number", lambda m: setattr(m.head, "weight", m.embedding.weight)),
    "frozen": Odd("head.bias: expected the same requires_grad", lambda m: m.head.bias.requires_grad_(False)),
    "frozen afterwards": Odd("layers.2.norm.weight: expected the", after=lambda m: m.layers[2].requires_grad_(False)),
    # ---- fully_shard
    "a layer not wrapped": Odd(f"layers.1: {UNITS}", shard=all_but(1), world=3),
    "the root alone": Odd(f"layers.0: {UNITS}", shard=fully_shard),
    "an inner module too": Odd(f"layers.0.up: {UNITS}", shard=inner_too, world=3),
    "two as one": Odd(f"layers.0: {UNITS}", shard=two_as_one),
    "ignored": Odd(f"head.bias: {PRESENT} rank 0 and", shard=without("head.bias")),
    "another dim": Odd(
        "layers.2.up.weight: expected the same placement",
        shard=with_(2, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    ),
    "kept after forward": Odd(
        "layers.1: expected the same reshard_after_forward", shard=with_(1, reshard_after_forward=False)
    ),
    "the root freed": Odd(
        "root: expected the same reshard_after_forward", shard=with_(reshard_after_forward=True), world=3
    ),
    "kept in parts": Odd(
        "expected all ranks to come to the same places in the same order, found ranks 0 and 2 and 3 at the units and "
        "parameters of the model, rank 1 at fully_shard(..., reshard_after_forward=2)",
        shard=with_(0, reshard_after_forward=2),
        world=4,
    ),
    "compute dtype": Odd("layers.0: expected the same mp_policy", shard=with_(0, mp_policy=BFLOAT16)),
    "reduce dtype": Odd(
        "root: expected the same mp_policy", shard=with_(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    ),
    "output dtype": Odd(
        "layers.2: expected the same mp", shard=with_(2, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    ),
    "inputs not cast": Odd(
        "root: expected the same mp_policy", shard=with_(mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    ),
    "another order of ranks": Odd(
        "root: expected the same mesh", shard=lambda m: with_(mesh=DeviceMesh("cpu", [1, 0]))(m)
    ),
    # ---- what is set behind it
    "forward prefetch": Odd(
        "layers.0: expected the same forward prefetch",
        after=lambda m: m.layers[0].set_modules_to_forward_prefetch([m.layers[1], m.layers[2]]),
    ),
    "backward prefetch": Odd(
        "layers.2: expected the same backward prefetch",
        after=lambda m: m.layers[2].set_modules_to_backward_prefetch([m.layers[0]]),
    ),
    "divide factor": Odd(
        "layers.1: expected the same gradient divide factor", after=lambda m: m.layers[1].set_gradient_divide_factor(3)
    ),
    "freed behind backward": Odd(
        "root: expected the same reshard_after_backward",
        after=lambda m: m.set_reshard_after_backward(False, recurse=False),
    ),
    "bytes ahead": Odd(
        "root: expected the same prefetch_nbytes", after=lambda m: m.set_memory_budget(prefetch=1 << 20)
    ),
    "gradient bytes": Odd(
        "root: expected the same gradient_nbytes", after=lambda m: m.set_memory_budget(gradients=1 << 20)
    ),
    # ---- values
    "a buffer": Odd("mean (rank 0 unlike rank 1): expected the same values of a buffer", lambda m: m.mean.fill_(1)),
    "another seed": Odd(f"embedding.weight: {VALUES}", lambda m: m.load_state_dict(OTHER.state_dict())),
    "one sign": Odd(f"head.weight: {VALUES}", change("head.weight", negate_last), world=3),
    "one bit": Odd(f"layers.1.down.weight: {VALUES}", change("layers.1.down.weight", next_float)),
    "a sign of zero": Odd(f"layers.1.norm.bias: {VALUES}", change("layers.1.norm.bias", negative_zero)),
    "rows in another order": Odd(f"embedding.weight: {VALUES}", change("embedding.weight", lambda v: v.flip(0))),
    "four elements exchanged": Odd(f"layers.0.up.weight: {VALUES}", change("layers.0.up.weight", columns_exchanged)),
    "one row, of another rank": Odd(f"scale: {VALUES}", change("scale", lambda v: v + 1), world=3),
    "scaled": Odd(f"layers.2.up.bias: {VALUES}", change("layers.2.up.bias", lambda v: v * 2), world=4),
}


@pytest.mark.sample(8)
@behaviour(
    "ranks that build, shard or set up something else: an error that says where",
    area="failures",
    torch="none",
    reason="pieces of different models are trained, or ranks hang or abort in C++",
)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_differs_is_named_on_all_ranks(name: str) -> None:
    odd = DIVERGENCES[name]

    def job(rank: int) -> str:
        model = copy.deepcopy(BASE)
        with pytest.raises(RanksDisagree) as caught:
            if rank == ODD:
                odd.before(model)
                odd.shard(model)
                odd.after(model)
            else:
                shard(model)
            step(model, rank)
        if name != "kept in parts":
            with pytest.raises(RanksDisagree):  # and again: nothing was let through
                step(model, rank)
        return str(caught.value)

    texts = run_ranks(odd.world, job)
    assert len(set(texts)) == 1
    assert texts[0].startswith(odd.expected), texts[0]
    assert "rank 1" in texts[0] or "ranks" in texts[0]


def test_there_are_as_many_as_promised() -> None:
    assert len(DIVERGENCES) >= 40
