"""Models by name and by a Hugging Face `config.json`, as `Program`s without values: for `fullshard plan`.

The batches have one token everywhere. A step takes the mean cross entropy over tokens in float32, as the trainer does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.program import Program, ProgramError
from fullshard.train.model import Llama, LlamaShape

# As their authors published them (Llama 2 and Llama 3.1); context: of pretraining.
NAMED = {
    "llama-2-7b": LlamaShape(32000, 32, 4096, 32, 32, 11008, 4096, tie_embeddings=False),
    "llama-2-13b": LlamaShape(32000, 40, 5120, 40, 40, 13824, 4096, tie_embeddings=False),
    "llama-34b": LlamaShape(32000, 48, 8192, 64, 8, 22016, 16384, tie_embeddings=False, rope_theta=1e6),
    "llama-2-70b": LlamaShape(32000, 80, 8192, 64, 8, 28672, 4096, tie_embeddings=False),
    "llama-8b": LlamaShape(128256, 32, 4096, 32, 8, 14336, 8192, tie_embeddings=False, rope_theta=500000.0),
    "llama-70b": LlamaShape(128256, 80, 8192, 64, 8, 28672, 8192, tie_embeddings=False, rope_theta=500000.0),
    "llama-405b": LlamaShape(128256, 126, 16384, 128, 8, 53248, 8192, tie_embeddings=False, rope_theta=500000.0),
}
# Model types of Hugging Face that have the trainer's Llama's layers and shapes.
_LIKE_LLAMA = ("llama", "mistral")
# Keys of their configs that add parameters which these layers do not have.
_BIASES = ("attention_bias", "mlp_bias")
# What a config without the key has.
_KV_HEADS = {"mistral": 8}
_LONGEST = 4096
# A token that no config has for padding: models look whether a batch has any.
_TOKEN = 3


def named(name: str, sequence: int | None = None) -> Program:
    """The program of a named shape, with batches of one sequence of `sequence` tokens (default: its context)."""
    return language_model(NAMED[name], sequence or NAMED[name].context)


def language_model(shape: LlamaShape, sequence: int) -> Program:
    """The program of a Llama of that shape, on sequences of that length."""
    return _program(lambda: Llama(replace(shape, context=sequence)), _logits, shape.vocab, sequence)


def hugging_face(path: Path, sequence: int | None = None) -> Program:
    """The program of a `config.json`: the causal language model that transformers would make; without transformers,
    that of a Llama or Mistral. Raises `ProgramError` for a file that is no such configuration."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProgramError(f"{path}: cannot read it: {error.strerror or error}") from None
    except ValueError as error:
        raise ProgramError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(told, dict) or not isinstance(told.get("model_type"), str):
        raise ProgramError(f"{path}: expected a Hugging Face config.json with a model_type, found none")
    length = sequence or min(told.get("max_position_embeddings") or _LONGEST, _LONGEST)
    try:
        import transformers
    except ModuleNotFoundError:
        return language_model(_shape(path, told), length)
    try:
        config = transformers.AutoConfig.for_model(**told)
        config.use_cache = False
        predicts = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "auto_map" in told
        vocabulary = int(config.get_text_config().vocab_size) if predicts else 0
    except Exception as error:
        raise ProgramError(f"{path}: transformers cannot read it: {str(error).strip().splitlines()[0]}") from None

    if not predicts:
        raise ProgramError(
            f"{path}: expected the config of a model that predicts the next token, found a {told['model_type']}; plan "
            f"the program that trains it, module:function"
        )

    def build() -> nn.Module:
        given: dict[str, Any] = {"dtype": torch.float32}
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **given)  # type: ignore[no-untyped-call]
        return model.train()

    return _program(build, lambda model, tokens: model(input_ids=tokens).logits, vocabulary, length)


def _shape(path: Path, told: dict[str, Any]) -> LlamaShape:
    kind, biases = told["model_type"], [key for key in _BIASES if told.get(key)]
    if kind not in _LIKE_LLAMA or biases:
        what = " with ".join([kind, *biases[:1]])
        raise ProgramError(
            f"{path}: a {what} needs the package transformers, which is not installed; pip install 'fullshard[hf]'"
        )
    try:
        heads = told["num_attention_heads"]
        return LlamaShape(
            told["vocab_size"],
            told["num_hidden_layers"],
            told["hidden_size"],
            heads,
            told.get("num_key_value_heads", _KV_HEADS.get(kind)) or heads,
            told["intermediate_size"],
            _LONGEST,
            tie_embeddings=bool(told.get("tie_word_embeddings", False)),
            head_width=told.get("head_dim"),
        )
    except KeyError as error:
        raise ProgramError(f"{path}: expected the key {error.args[0]}, found none") from None


def _program(
    build: Callable[[], nn.Module], logits: Callable[[nn.Module, Tensor], Tensor], vocabulary: int, length: int
) -> Program:
    def batch(index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.full((1, length), min(_TOKEN, vocabulary - 1), device="cpu")
        return tokens, tokens.clone()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, targets = batch
        return loss_fn(logits(model, tokens), targets)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    return Program(build, loss, batch, loss_fn=loss_fn)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens)
    return found
