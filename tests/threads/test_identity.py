"""What is the same object for a plain module is the same object for a unit, in the forward and where it is recomputed.

Each block computes otherwise where two of its arguments are one object, and notes what it found. The oracle is the same
model without units: the same findings, and in float32 the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks
from tests.threads.programs import compare_gradients

WIDTH, STEPS = 6, 2


class Marked(Tensor):
    """A subclass that changes nothing."""


@dataclass
class State:
    hidden: Any
    other: Any = None


# What each form hands over, and which questions the block asks.
Asks = Callable[..., list[bool]]
FORMS: dict[str, tuple[Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]], Asks]] = {
    "twice": (lambda x: ((x, x), {}), lambda q, k: [q is k]),
    "by name": (lambda x: ((x,), {"key": x}), lambda q, key: [q is key]),
    "in containers": (
        lambda x: ((x, {"k": [x, (x,)]}), {}),
        lambda q, d: [q is d["k"][0], q is d["k"][1][0]],
    ),
    "one list twice": (lambda x: (([x],) * 2, {}), lambda a, b: [a is b, a[0] is b[0]]),
    "one state twice": (lambda x: ((x, *[State(x)] * 2), {}), lambda q, a, b: [a is b, a.hidden is q, a.other is None]),
    "nothing twice": (lambda x: ((x, None, None), {}), lambda q, a, b: [a is b, a is None]),
    "a subclass": (lambda x: ((x, (x * 1).as_subclass(Marked)), {}), lambda q, k: [type(k) is Marked]),
    "two": (lambda x: ((x, x * 1), {}), lambda q, k: [q is k]),
}
# Those of which a cast makes another tensor, as `Tensor.to` does.
UNCAST = {
    "a view": (lambda x: ((x, x[...]), {}), lambda q, k: [k._base is (q if q._base is None else q._base)]),
    "an attribute": (lambda x: ((x, _note(x * 1)), {}), lambda q, k: [hasattr(k, "note")]),
}


def _note(tensor: Any) -> Any:
    tensor.note = True
    return tensor


class Block(nn.Module):
    def __init__(self, asks: Asks, found: list[bool], *, inside: bool) -> None:
        super().__init__()
        self.asks, self.found = asks, found
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            return checkpoint(self.run, *args, use_reentrant=False, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        answers = self.asks(*args, **kwargs)
        self.found += answers
        x = args[0][0] if isinstance(args[0], list) else args[0]
        y = self.other(torch.tanh(self.one(x)))
        for place, answer in enumerate(answers):
            y = torch.tanh(y) if answer else y / (place + 2)
        return y, y, args


class Model(nn.Module):
    def __init__(self, forms: dict[str, Any], recompute: str) -> None:
        super().__init__()
        self.found: list[bool] = []
        self.first = nn.Linear(WIDTH, WIDTH)
        self.hands = [hands for hands, _ in forms.values()]
        self.around = recompute == "around"
        inside = recompute == "inside"
        self.blocks = nn.ModuleList(Block(asks, self.found, inside=inside) for _, asks in forms.values())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for hands, block in zip(self.hands, self.blocks, strict=True):
            args, kwargs = hands(x)
            call = partial(checkpoint, block, use_reentrant=False) if self.around else block
            y, again, given = call(*args, **kwargs)
            # Outputs, too; mutable containers come back as they were handed over.
            self.found.append(y is again)
            self.found.extend(a is b for a, b in zip(given, args, strict=True) if not isinstance(a, Tensor))
            x = x + y.to(x.dtype)
        return x


POLICIES = {
    "no policy": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, output float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", ["no", "inside", "around"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_finds_the_identities_of_the_plain_one(policy: str, recompute: str) -> None:
    """In each step, in the original forward and in the recomputed one."""
    forms = FORMS | UNCAST if policy == "no policy" else FORMS

    def rank_fn(rank: int) -> None:
        reference: Any = seeded(lambda: Model(forms, recompute))
        model = copy.deepcopy(reference)
        for block in model.blocks:
            fully_shard(block, mp_policy=POLICIES[policy])
        fully_shard(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        tolerance.watch(optimizers[1])
        x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)  # the same for all ranks
        for step in range(STEPS):
            for one in (model, reference):
                one(x).pow(2).mean().backward()
            assert model.found == reference.found
            if policy == "no policy":
                compare_gradients(model, reference, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(WORLD, rank_fn)


# ---- attention -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Takes one product for query, key and value only where they are one object."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wrapped = wrapped
        self.attention: Any = checkpoint_wrapper(attention) if wrapped else attention

    def forward(self, x: Tensor) -> Tensor:
        if self.wrapped:
            return x + self.attention(x, x, x, need_weights=False)[0]
        run = partial(self.attention, need_weights=False)
        return x + checkpoint(run, x, x, x, use_reentrant=False)[0]


class Attentions(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Attention(wrapped) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


UNITS: dict[str, Callable[[Any], Any]] = {
    "around the checkpoint": lambda block: block,
    "the attention": lambda block: block.attention,
    "inside its wrapper": lambda block: block.attention._checkpoint_wrapped_module,
}


@pytest.mark.parametrize(
    ("wrapped", "unit"),
    [(False, "around the checkpoint"), (False, "the attention")] + [(True, name) for name in UNITS],
)
@pytest.mark.sample(3)
def test_recomputed_attention_of_one_tensor(wrapped: bool, unit: str) -> None:
    def rank_fn(rank: int) -> None:
        reference: Any = seeded(lambda: Attentions(wrapped))
        model = copy.deepcopy(reference)
        for block in model.blocks:
            fully_shard(UNITS[unit](block))
        fully_shard(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        tolerance.watch(optimizers[1])
        x = torch.linspace(-1, 1, 6 * WIDTH).reshape(2, 3, WIDTH)
        for step in range(STEPS):
            for one in (model, reference):
                one(x).pow(2).mean().backward()
            compare_gradients(model, reference, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(WORLD, rank_fn)
