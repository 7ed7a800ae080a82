"""Small models trained from one declaration of axes, beside one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard import Prepared, prepare_fully_shard
from fullshard.migrate import ConfigError
from fullshard.migrate.parallelism import Parallelism
from fullshard.train.model import Llama, LlamaShape
from tests.harness import tolerance
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

STEPS, VOCABULARY, TOKENS = 3, 32, 8
# Below the norm of each step, so that clipping changes each of them.
MAX_NORM = 0.5


class Norm(NamedTuple):
    """A norm of gradients, and by how much of it rounding may be off."""

    value: float
    relative: float


def llama(*, tied: bool = False, **sizes: int) -> Llama:
    """The trainer's model, small enough for milliseconds."""
    shape = dict(vocab=VOCABULARY, layers=2, dim=16, heads=4, kv_heads=2, ffn_dim=24, context=TOKENS) | sizes
    model = Llama(LlamaShape(**shape, tie_embeddings=tied))  # type: ignore[arg-type]
    model.init_weights(3)
    return model


def hugging_face(kind: str, **sizes: Any) -> nn.Module:
    """A small causal language model of transformers."""
    import transformers

    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    config = getattr(transformers, f"{kind}Config")(**(shape | sizes))
    return seeded(lambda: getattr(transformers, f"{kind}ForCausalLM")(config))


def batch(step: int, share: int) -> Tensor:
    """(2, TOKENS + 1), int64."""
    generator = torch.Generator().manual_seed(1_000 * step + share)
    return torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    out: Any = model(tokens[:, :-1])
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plainly(make: Callable[[], nn.Module], shares: int, steps: int = STEPS) -> tuple[Trained, list[Norm]]:
    """Training in one process on all shares of each batch, with clipping; and the norms before it."""
    model = make()
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    norms = []
    for step in range(steps):
        for share in range(shares):
            (loss(model, batch(step, share)) / shares).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        watched = tolerance.watched(optimizer)
        assert watched is not None
        norms.append(Norm(norm, watched.relative))
    return collect(model, optimizer), norms


def train(model: nn.Module, optimizer: Any, prepared: Prepared, steps: Sequence[int] = range(STEPS)) -> list[float]:
    """The same on one rank; returns the norms."""
    norms = []
    for step in steps:
        with prepared.loss_context():
            loss(model, batch(step, prepared.share[0])).backward()
        norms.append(float(fullshard.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def planned(
    rank: int, make: Callable[[], nn.Module], plan: Any, config: Any = None, options: Any = None
) -> tuple[Trained, list[float], list[str]]:
    """A rank's training from the declaration `plan`, with an optimizer from before; and what was printed."""
    model = make()
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, parallelism=plan, show=False, **(options or {}))
    norms = train(model, optimizer, prepared)
    return collect(model, optimizer), norms, str(prepared).splitlines()


def assert_norms(found: Sequence[float], expected: Sequence[Norm]) -> None:
    for step, (mine, its) in enumerate(zip(found, expected, strict=True), start=1):
        assert math.isclose(mine, its.value, rel_tol=its.relative), f"norm of step {step}: {mine}, {its}"


def check(world: int, make: Callable[[], nn.Module], plan: Any, config: Any = None, options: Any = None) -> list[str]:
    """Parameters, optimizer state and norms of all ranks are those of one process; returns what rank 0 printed."""
    shares = plan.on(world).shares if isinstance(plan, Parallelism) else Parallelism(**plan).on(world).shares
    expected, norms = plainly(make, shares)
    ranks = run_ranks(world, planned, make, plan, config, options, timeout=240.0)
    for trained, found, _ in ranks:
        assert_same_training(trained, expected)
        assert_norms(found, norms)
    printed: list[str] = ranks[0][2]
    return printed


def assert_not_legal(make: Callable[[], nn.Module], plan: Any, said: str, world: int = 4) -> None:
    """Each of the ranks gets one line in which `said` is, and its model stays as it was."""

    def rank_main(rank: int) -> None:
        model = make()
        before = dict(model.named_parameters())
        with pytest.raises(ConfigError) as raised:
            prepare_fully_shard(model, parallelism=plan, show=False)
        assert said in str(raised.value) and "\n" not in str(raised.value)
        assert all(p is before[name] for name, p in model.named_parameters())

    run_ranks(world, rank_main)
