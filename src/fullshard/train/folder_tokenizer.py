"""The tokenizer of a model's folder, as the trainer uses tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The target that torch's cross entropy leaves out. No token has this number, so no text loses one of its own.
IGNORED = -100


class FolderTokenizer:
    """A tokenizer of transformers for a model of `vocab` rows, which may have more than the tokenizer has tokens.

    A text begins as the tokenizer itself begins one: with BOS, or without. `pad` is no token: where it is a target, the
    target does not count.
    """

    pad = IGNORED

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        self.inner, self.vocab = tokenizer, vocab
        self.eos: int | None = tokenizer.eos_token_id
        first = list(tokenizer.encode("a"))[:1]
        begins = bool(first) and first[0] == tokenizer.bos_token_id
        self.bos: int | None = tokenizer.bos_token_id if begins else None

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without specials."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, without specials."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def token_nbytes(self) -> list[int]:
        """The number of UTF-8 bytes of each token's text; 0 for specials, and for rows without a token."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        is_bytes = backend is not None and "ByteLevel" in f"{backend.decoder!r}{backend.pre_tokenizer!r}"
        specials, added = set(self.inner.all_special_ids), set(self.inner.get_added_vocab().values())
        found = [0] * self.vocab
        for text, number in self.inner.get_vocab().items():
            if number in specials or number >= self.vocab:
                continue
            if number in added:
                found[number] = len(text.encode())
            elif is_bytes:
                found[number] = len(text)  # each byte is one character of an alphabet of its own
            elif text.startswith("<0x") and text.endswith(">"):
                found[number] = 1
            else:
                found[number] = len(text.replace("\u2581", " ").removeprefix("##").encode())
        return found
