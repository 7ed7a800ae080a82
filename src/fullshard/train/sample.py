"""Text generation: the next token is drawn from the model's distribution, repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.formats.hf import read_safetensors
from fullshard.train.config import Config, SampleKeys, load_config
from fullshard.train.data import BPETokenizer, ByteTokenizer, Tokenizer
from fullshard.train.exported import MODEL, load_exported
from fullshard.train.folder_tokenizer import TOKENIZER, FolderTokenizer, read_tokenizer
from fullshard.train.model import Llama, llama_shape
from fullshard.train.pretrained import logits_of


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],  # tokens (1, T) -> logits (1, T, V)
    tokenizer: Tokenizer,
    keys: SampleKeys,
    *,
    context: int,  # the model sees at most this many of the last tokens
    seed: int,
    device: torch.device | str = "cpu",
    whole: bool = False,
) -> str:
    """The prompt and its continuation, always `keys.tokens` tokens long.

    It runs exactly `keys.tokens` forward passes: a sharded model needs the same number on every rank. So BOS, EOS and
    PAD, which could end a text, are never drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    specials = [token for token in (tokenizer.bos, tokenizer.eos, tokenizer.pad) if token is not None and token >= 0]
    never = torch.tensor(specials, dtype=torch.int64)
    tokens = (
        [*([] if tokenizer.bos is None else [tokenizer.bos]), *tokenizer.encode(keys.prompt)] or specials[:1] or [0]
    )
    for _ in range(keys.tokens):
        seen = tokens[-context:]
        # Padded to the length of training, which tensor parallelism divides; no token reads one after it.
        padded = [*seen, *[tokenizer.pad] * (context - len(seen))] if whole else seen
        out = model(torch.tensor([padded], device=device))
        logits = (out.full_tensor() if isinstance(out, DTensor) else out)[0, len(seen) - 1].float().cpu()
        logits[never] = -torch.inf
        tokens.append(_draw(logits, keys.temperature, keys.top_k, generator))
    return tokenizer.decode(tokens)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def load_run(run_dir: Path) -> tuple[Callable[[Tensor], Tensor], Tokenizer, Config]:
    """The trained model of a run folder, on the CPU, with its tokenizer and configuration.

    Raises `FileNotFoundError` for a folder without a trained model, `ValueError` for files that do not match.
    """
    _expect(run_dir, "config.toml")
    config = load_config(run_dir / "config.toml")
    if config.model.folder:
        _expect(run_dir, f"{MODEL}/config.json")
        model, words = load_exported(run_dir / MODEL)
        return partial(logits_of, model), words, config
    _expect(run_dir, "model.safetensors")
    tokenizer: Tokenizer = ByteTokenizer()
    if config.data.tokenizer == "bpe":
        tokenizer = BPETokenizer((run_dir / "tokenizer.json").read_text())
    elif config.data.tokenizer_folder:
        _expect(run_dir, f"{TOKENIZER}/tokenizer_config.json")
        tokenizer = FolderTokenizer(read_tokenizer(run_dir / TOKENIZER, "data.tokenizer", str(run_dir / TOKENIZER)))
    with torch.device("meta"):
        llama = Llama(llama_shape(config, tokenizer.vocab))
    llama.to_empty(device="cpu")
    llama.init_weights()  # for the rotary tables, which are not in the file
    weights = read_safetensors(run_dir / "model.safetensors")
    expected = {name: tuple(p.shape) for name, p in llama.named_parameters()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if found != expected:
        name = next(n for n in sorted({*found, *expected}) if found.get(n) != expected.get(n))
        raise ValueError(
            f"{run_dir}: config.toml asks for {name} {expected.get(name, '(none)')}, "
            f"model.safetensors has {found.get(name, '(none)')}"
        )
    llama.load_state_dict(weights)
    return llama, tokenizer, config


def _expect(run_dir: Path, name: str) -> None:
    if not (run_dir / name).is_file():
        raise FileNotFoundError(f"{run_dir} has no {name}: expected the folder of a completed run")
