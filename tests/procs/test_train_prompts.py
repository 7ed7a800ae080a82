"""Prompts without loss: the mean is over the tokens that count, on any number of processes, however they are spread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fullshard.train.config import load_config
from fullshard.train.data import ByteTokenizer, SampleOrder, read_corpus, tokenize
from fullshard.train.model import Llama, llama_shape
from tests.harness import tolerance
from tests.harness.pool import pool
from tests.procs.test_train_world import TINY, full, trainer_of


def overrides(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": "q" * (7 * i % 61), "completion": "answer " * (1 + i % 5)} for i in range(120)]
    file.write_text("\n".join(map(json.dumps, rows)))
    keys = ("data.prompt_key=prompt", "data.text_key=completion", "sharding.precision.reduce=float64")
    return (*TINY, f"data.corpus=path:{file}", "training.clip_norm=0", "training.steps=3", *keys)


def ran(rank: int, keys: tuple[str, ...]) -> tuple[list[tuple[float, float | None, float]], dict[str, torch.Tensor]]:
    trainer = trainer_of(rank, load_config(None, keys))
    records = [trainer.step(step) for step in (1, 2, 3)]
    figures = [(record.loss, record.val_loss, record.grad_norm) for record in records]
    return figures, {name: full(p).clone() for name, p in trainer.model.named_parameters()}


def test_one_and_two_processes_are_plain_training(tmp_path: Path) -> None:
    keys = overrides(tmp_path)
    one, parameters = pool(1).run(ran, keys)[0]
    two, others = pool(2).run(ran, keys)[0]
    assert one == two
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)

    # By hand: all windows of the first step in one batch of plain torch.
    config, tokenizer = load_config(None, keys), ByteTokenizer()
    length = config.training.sequence_length
    tokens, mask = [], []
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, text = row["prompt"].encode(), row["completion"].encode()
        tokens += [256, *prompt, *text, 257]
        mask += [0] * (1 + len(prompt)) + [1] * (len(text) + 1)
    split = tokenize(read_corpus(config.data), tokenizer, config.data.validation_fraction)
    assert [*split.train.tolist(), *split.validation.tolist()] == tokens
    order = SampleOrder(num_tokens=len(split.train), sequence_length=length, seed=0)
    starts = order.starts(0, config.training.global_batch)
    inputs = torch.tensor([tokens[s : s + length] for s in starts])
    targets = torch.tensor([tokens[s + 1 : s + length + 1] for s in starts])
    counts = torch.tensor([mask[s + 1 : s + length + 1] for s in starts])
    assert len(set(counts.sum(1).tolist())) > 1  # not as many in each sequence
    model = Llama(llama_shape(config, tokenizer.vocab))
    model.init_weights(0)
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    loss = (losses * counts.flatten()).sum() / counts.sum()
    loss.backward()
    loss, losses = loss.detach(), losses.detach()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    # Sums of that many float32 terms, in another order.
    near = tolerance.terms_of(model, counts.numel()) * torch.finfo(torch.float32).eps
    assert one[0][0] == pytest.approx(float(loss), rel=near)
    assert one[0][2] == pytest.approx(float(norm), rel=near)
    plain = float(losses.mean())
    assert abs(plain - float(loss)) > near * plain  # with prompts it would be another number
