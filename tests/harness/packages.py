"""What the tests with other people's packages share: tiny models, made without a network."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tests.harness.models import seeded

VOCABULARY = 61
ROWS = 2  # of a batch, on each rank


def offline() -> None:
    """Before the first import of a package in a rank: nothing may ask for a network, draw bars or talk."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
    import transformers

    transformers.utils.logging.disable_progress_bar()


def llama(*, tied: bool) -> Any:
    """A LlamaForCausalLM of two blocks, the same on every rank; `tied`: embedding and head are one parameter."""
    offline()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return seeded(lambda: LlamaForCausalLM(config))


def tokens(step: int, world: int) -> torch.Tensor:
    """The batch of all ranks at `step`, (ROWS * world, 9); rank r has rows ROWS * r to ROWS * (r + 1)."""
    return torch.randint(3, VOCABULARY, (ROWS * world, 9), generator=torch.Generator().manual_seed(step))


def own(batch: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows of `rank`."""
    return batch[ROWS * rank : ROWS * (rank + 1)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The package's own loss of predicting each token of `batch` from those before it."""
    loss = model(input_ids=batch, labels=batch).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def sharded(fully_shard: Any, model: Any, **options: Any) -> Any:
    """Every block as a unit, then the model."""
    for block in model.get_decoder().layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, world: int, steps: int) -> list[float]:
    """`steps` steps on the rows of `rank`; None: on those of all ranks, as one process would. The losses."""
    losses = []
    for step in range(steps):
        batch = tokens(step, world)
        loss = loss_of(model, batch if rank is None else own(batch, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Poisoned(nn.Module):
    """(n, 6) -> (n, 5). While `poisoned`, the gradient of `offset` is infinite in its first element and nowhere else:
    of several ranks that share, the first alone finds it among its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.offset = nn.Parameter(torch.zeros(5))
        self.poisoned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = self.offset.clone()
        if self.poisoned:
            offset.register_hook(lambda gradient: torch.cat([torch.full_like(gradient[:1], torch.inf), gradient[1:]]))
        output: torch.Tensor = self.linear(x)
        return output + offset.to(output.dtype)
