"""Text <-> token numbers: bytes (built in), or a BPE trained on the corpus (optional package `tokenizers`).

Both have the three special tokens BOS, EOS and PAD, and both are exactly reversible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from . import optional

BPE_HINT = 'data.tokenizer = "bpe" needs the package tokenizers: pip install "fullshard[bpe]"'


class Tokenizer(Protocol):
    """What the trainer asks of a tokenizer."""

    vocab: int  # number of tokens, specials included
    bos: int
    eos: int
    pad: int

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without specials."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; specials give no text, bytes that are not UTF-8 give U+FFFD."""
        ...

    def token_nbytes(self) -> list[int]:
        """For each token the number of UTF-8 bytes it stands for; 0 for specials. Makes bits per byte comparable."""
        ...

    def to_json(self) -> str | None:
        """What must be stored to have this tokenizer again, or None where nothing must."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte, then BOS, EOS, PAD.

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    >>> ByteTokenizer().decode([256, 110, 195, 169, 257])
    'né'
    """

    vocab, bos, eos, pad = 259, 256, 257, 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def token_nbytes(self) -> list[int]:
        return [1] * 256 + [0] * 3

    def to_json(self) -> str | None:
        return None


class BPETokenizer:
    """Byte-level BPE of the package `tokenizers`, from the JSON text that `train_bpe` returns."""

    def __init__(self, json_text: str) -> None:
        self._json = json_text
        self._bpe = _tokenizers().Tokenizer.from_str(json_text)
        self.vocab: int = self._bpe.get_vocab_size()
        self.bos, self.eos, self.pad = (self._bpe.token_to_id(t) for t in _SPECIALS)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._bpe.decode(list(tokens), skip_special_tokens=True)
        return text

    def token_nbytes(self) -> list[int]:
        # Byte-level BPE spells every byte with one character of its own alphabet.
        specials = {self.bos, self.eos, self.pad}
        return [0 if t in specials else len(self._bpe.id_to_token(t)) for t in range(self.vocab)]

    def to_json(self) -> str | None:
        return self._json


_SPECIALS = ("<bos>", "<eos>", "<pad>")


def train_bpe(texts: Iterable[str], vocab: int) -> str:
    """Train byte-level BPE with `vocab` tokens on `texts`; the same texts give the same JSON.

    Raises `ModuleNotFoundError`, naming the extra to install, where `tokenizers` is missing.
    """
    package = _tokenizers()
    bpe = package.Tokenizer(package.models.BPE())
    bpe.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIALS),
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: any text can be encoded
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    json_text: str = bpe.to_str()
    return json_text


def _tokenizers() -> Any:
    package = optional.find("tokenizers")
    if package is None:
        raise ModuleNotFoundError(BPE_HINT)
    return package
