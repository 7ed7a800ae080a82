"""The trainer's model, loss and data as a `Program`, for `fullshard verify` and `fullshard migrate --prove`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import balance_loss
from fullshard.program import Program, ProgramError
from fullshard.train import data
from fullshard.train.config import ConfigError, invalid, load_config
from fullshard.train.folder_tokenizer import open_tokenizer
from fullshard.train.model import Llama, llama_shape
from fullshard.train.optimizers import elementwise
from fullshard.train.pretrained import logits_of, open_pretrained, refuse_4_bits

# Of a batch: few, because every step is taken twice, once in one process.
_WINDOWS, _TOKENS = 2, 128


def program(path: str = "") -> Program:
    """The program of a config of the trainer (`path`; "": its defaults), with batches of two windows of at most 128
    tokens. Raises `ProgramError` for a config that is not valid."""
    try:
        config = load_config(Path(path) if path else None)
        if config.optimizer.name not in ("adamw", "sgd"):
            problem = "fullshard verify steps each element by itself"
            raise invalid("optimizer.name", config.optimizer.name, problem, '"adamw"')
        if config.data.prompt_key:
            raise invalid("data.prompt_key", config.data.prompt_key, "fullshard verify counts all tokens", '""')
        if config.data.loss_on != "all":
            raise invalid("data.loss_on", config.data.loss_on, "fullshard verify counts all tokens", '"all"')
        corpus = data.check_data(config.data)
        tokenizer: data.Tokenizer = data.ByteTokenizer()
        found = None
        if config.model.folder:
            refuse_4_bits(config, "fullshard verify builds no base in 4 bits")
            found = open_pretrained(config)
            tokenizer = found.tokenizer
        elif config.data.tokenizer == "bpe":
            tokenizer = data.BPETokenizer(data.train_bpe(corpus.texts, config.data.bpe_vocab))
        elif config.data.tokenizer_folder:
            tokenizer = open_tokenizer(config.data)
    except ConfigError as error:
        raise ProgramError(str(error)) from error
    tokens = data.tokenize(corpus, tokenizer, config.data.validation_fraction).train
    length = min(config.training.sequence_length, _TOKENS)

    def build() -> nn.Module:
        if found is not None:
            return found.plain(device="cpu")
        model = Llama(llama_shape(config, tokenizer.vocab))
        model.init_weights(config.training.seed)
        return model

    axes = config.sharding.parallelism
    # The step of a pipeline gives them by itself.
    is_cut = axes.context_parallel_degree > 1 and axes.pipeline_parallel_degree == 1

    def batch(index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        starts = torch.randint(len(tokens) - length - 1, (_WINDOWS,), generator=generator)
        found = data.windows(tokens, starts.tolist(), length)
        # Where sequences are cut over ranks, their positions are cut with them.
        return (*found, torch.arange(length).expand(_WINDOWS, length)) if is_cut else found

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, *places = batch
        logits = logits_of(model, inputs, places[0][0] if places else None)
        return loss_fn(logits, targets) + balance_loss(model)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return elementwise(parameters, config.optimizer)

    return Program(build, loss, batch, optimizer=optimizer, loss_fn=loss_fn)


def stand_in() -> Program:
    """The model of the defaults for `fullshard migrate --prove`, with one group of parameters. FSDP1's are flat pieces,
    without the shapes by which the trainer leaves norm weights undecayed."""
    made = program()
    return Program(made.model, made.loss, made.batch)
