"""Text from a model: the next token is drawn from what the model says, again and again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fullshard.checkpoint.formats.hf import read_safetensors
from fullshard.train.config import Config
from fullshard.train.config_load import load_config
from fullshard.train.model import Llama, LlamaShape
from fullshard.train.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],  # tokens (1, T) -> logits (1, T, V)
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    context: int,  # the model sees at most this many last tokens
    temperature: float,
    top_k: int,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and what follows it, always `num_tokens` tokens long.

    Exactly `num_tokens` forward passes are made, whatever is drawn: a sharded model needs the same number of them on
    every rank, and so BOS, EOS and PAD, which could end a text, are never drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    never = torch.tensor([tokenizer.bos, tokenizer.eos, tokenizer.pad])
    tokens = [tokenizer.bos, *tokenizer.encode(prompt)]
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-context:]], device=device)
        logits = model(seen)[0, -1].float().cpu()
        logits[never] = -torch.inf
        tokens.append(_draw(logits, temperature, top_k, generator))
    return tokenizer.decode(tokens)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def llama_shape(config: Config, vocab: int) -> LlamaShape:
    """The shape of the model that `config` describes, for a tokenizer of `vocab` tokens."""
    m = config.model
    return LlamaShape(
        vocab=vocab,
        layers=m.layers,
        dim=m.dim,
        heads=m.heads,
        kv_heads=m.kv_heads,
        ffn_dim=config.ffn_dim,
        context=config.training.sequence_length,
        tie_embeddings=m.tie_embeddings,
        rope_theta=m.rope_theta,
        norm_eps=m.norm_eps,
    )


def load_run(run_dir: Path) -> tuple[Llama, Tokenizer, Config]:
    """The trained model of a run folder, on the CPU, with its tokenizer and configuration.

    Raises `FileNotFoundError` for a folder without a trained model, `ValueError` for files that do not belong together.
    """
    for name in ("config.toml", "model.safetensors"):
        if not (run_dir / name).is_file():
            raise FileNotFoundError(f"{run_dir} has no {name}: expected the folder of a run that has ended well")
    config = load_config(run_dir / "config.toml")
    tokenizer: Tokenizer = ByteTokenizer()
    if config.data.tokenizer == "bpe":
        tokenizer = BPETokenizer((run_dir / "tokenizer.json").read_text())
    with torch.device("meta"):
        model = Llama(llama_shape(config, tokenizer.vocab))
    model.to_empty(device="cpu")
    model.init_weights()  # for what is not in the file: the rotary tables
    weights = read_safetensors(run_dir / "model.safetensors")
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if found != expected:
        name = next(n for n in sorted({*found, *expected}) if found.get(n) != expected.get(n))
        raise ValueError(
            f"{run_dir}: config.toml asks for {name} {expected.get(name, '(none)')}, "
            f"model.safetensors has {found.get(name, '(none)')}"
        )
    model.load_state_dict(weights)
    return model, tokenizer, config
