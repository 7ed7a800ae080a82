"""The tokenizer of a model's folder, as the trainer uses tokenizers."""

from __future__ import annotations

import hashlib
import importlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.keys import invalid, show
from fullshard.train.data_keys import DataKeys
from fullshard.train.metrics import installed

# The target that torch's cross entropy leaves out. No token has this number, so no text loses one of its own.
IGNORED = -100
# The folder of a run with the tokenizer of its model.
TOKENIZER = "tokenizer"


class FolderTokenizer:
    """A tokenizer of transformers for a model of `vocab` rows, which may have more than the tokenizer has tokens. None:
    for a model made for it, with one row more, for padding.

    A text begins as the tokenizer itself begins one: with BOS, or without. `pad` is no token of it: where it is a
    target, the target does not count.
    """

    def __init__(self, tokenizer: Any, vocab: int | None = None) -> None:
        self.inner = tokenizer
        self.pad = IGNORED if vocab is not None else max(tokenizer.get_vocab().values()) + 1
        self.vocab = self.pad + 1 if vocab is None else vocab
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

    def fingerprint(self) -> str:
        """A digest of the tokenizer: how it cuts text, its special tokens and its chat template."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        rules = sorted(self.inner.get_vocab().items()) if backend is None else backend.to_str()
        told = repr((rules, sorted(self.inner.special_tokens_map.items()), self.inner.chat_template))
        return hashlib.sha256(told.encode()).hexdigest()


def open_tokenizer(keys: DataKeys) -> FolderTokenizer:
    """The tokenizer of the folder that `data.tokenizer` names, for a model made for it. Raises `ConfigError`."""
    path = Path(keys.tokenizer_folder).expanduser()
    if not installed("transformers"):
        problem = "needs the package transformers: pip install transformers"
        raise invalid("data.tokenizer", keys.tokenizer, problem, show("bytes"))
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing"
        raise invalid("data.tokenizer", keys.tokenizer, f"expected a folder with a tokenizer, found {what}")
    return FolderTokenizer(read_tokenizer(path, "data.tokenizer", keys.tokenizer))


def read_tokenizer(path: Path, key: str, value: str) -> Any:
    """The tokenizer that transformers makes of a folder. Raises `ConfigError` about that key."""
    try:
        return quiet_transformers().AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        problem = f"expected a tokenizer in it, which transformers cannot make: {line}"
        raise invalid(key, value, problem) from None


def quiet_transformers() -> Any:
    """The package, without bars and notes."""
    # torchao, which both packages import where it is installed, reports kernels that this machine lacks.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    # PEFT says both of models whose layers it takes as they are.
    warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
    return transformers
