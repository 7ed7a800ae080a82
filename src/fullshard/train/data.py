"""The corpus, its tokens and their split, and the samples of each step.

```
corpus file(s) -> documents -> tokens: BOS doc EOS BOS doc EOS ... -> [ training part | validation part ]
training part  -> windows of T+1 tokens, T apart -> SampleOrder: (seed, step) -> the step's windows, for all ranks
```

Every rank computes the same list of windows for a step and takes its slice of it. So the data of a step does not depend
on the number of ranks, and the step number is its only state.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.train.chats import Conversation, chat_tokens, conversation_of
from fullshard.train.config import ConfigError, DataKeys, invalid
from fullshard.train.folder_tokenizer import FolderTokenizer, open_tokenizer
from fullshard.train.metrics import installed

BPE_HINT = 'data.tokenizer = "bpe" needs the package tokenizers: pip install "fullshard[bpe]"'


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order, and where they come from."""

    name: str
    documents: tuple[str, ...]
    sha256: str  # of the file's bytes; of several their digests'; of the joined documents for the built-in corpus
    nbytes: int
    prompts: tuple[str, ...] = ()  # of each document, before its text; () where there are none
    chats: tuple[Conversation, ...] = ()  # in place of documents, with `data.messages_key`
    assistant_only: bool = False  # of chats, the tokens that count

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.prompts, *self.documents)


def read_corpus(keys: DataKeys) -> Corpus:
    """The corpus that `data.corpus` names. Raises `ConfigError` if the file cannot be used."""
    if keys.corpus == "builtin":
        return _builtin()
    digests, documents, prompts, nbytes = [], [], [], 0
    chats: list[Conversation] = []
    for path in _files(keys):
        raw, text = _read(keys, path)
        digests.append(hashlib.sha256(raw).hexdigest())
        nbytes += len(raw)
        for name in ("prompt_key", "messages_key"):
            if (key := getattr(keys, name)) and path.suffix != ".jsonl":
                raise invalid(f"data.{name}", key, f"has no effect on {path}, which is no .jsonl", '""')
        if keys.messages_key:
            chats += _jsonl_chats(keys, path, text)
            continue
        found = _jsonl_documents(keys, text) if path.suffix == ".jsonl" else [("", text)]
        prompts += [prompt for prompt, _ in found]
        documents += [text for _, text in found]
    if not any(documents) and not chats:
        raise invalid("data.corpus", keys.corpus, "there is no text in it")
    sha256 = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return Corpus(
        keys.corpus,
        tuple(documents),
        sha256,
        nbytes,
        tuple(prompts) if keys.prompt_key else (),
        tuple(chats),
        keys.loss_on == "assistant",
    )


def read_validation(keys: DataKeys) -> Corpus | None:
    """The files that `data.validation` names, read as the corpus is; None where a part of that validates."""
    if not keys.validation:
        return None
    try:
        return read_corpus(replace(keys, corpus=keys.validation))
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.corpus = ", "data.validation = ")) from None


def _files(keys: DataKeys) -> list[Path]:
    """The files of a corpus: a file of that whole name, or for each part between commas the file, or those that match
    the pattern, sorted. None comes twice."""
    whole = Path(keys.corpus.removeprefix("path:")).expanduser()
    if whole.is_file():
        return [whole]
    found: dict[Path, None] = {}
    for part in str(whole).split(","):
        name = os.path.expanduser(part.strip())
        matching = [name]
        if glob.has_magic(name) and not Path(name).is_file():
            matching = sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file())
            if not matching:
                raise invalid("data.corpus", keys.corpus, f"no file matches {name}")
        found |= dict.fromkeys(map(Path, matching))
    return list(found)


def _read(keys: DataKeys, path: Path) -> tuple[bytes, str]:
    try:
        raw = path.read_bytes()
        return raw, raw.decode()
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror or error}"
        raise invalid("data.corpus", keys.corpus, problem) from None
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text: byte {error.start} is {raw[error.start]}"
        raise invalid("data.corpus", keys.corpus, problem) from None


def _builtin() -> Corpus:
    # About 0.5 MB of English in every Python; the text differs between versions.
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics))
    raw = "".join(documents).encode()
    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(f"pydoc_data.topics of Python {version}", documents, hashlib.sha256(raw).hexdigest(), len(raw))


def _jsonl_documents(keys: DataKeys, text: str) -> list[tuple[str, str]]:
    """The prompt and the text of each line: an object with the text under `data.text_key`, and the prompt under
    `data.prompt_key` if there is that; or a plain JSON string."""
    documents = []
    for number, value in _jsonl_values(keys, text):
        found = [""]
        for name in ("prompt_key", "text_key") if keys.prompt_key else ("text_key",):
            key, one = getattr(keys, name), value
            if isinstance(value, dict):
                if key not in value:
                    there = ", ".join(map(str, value)) or "no key"
                    problem = f"line {number} of {keys.corpus} has no such key, only {there}"
                    raise invalid(f"data.{name}", key, problem)
                one = value[key]
            elif keys.prompt_key:
                problem = f"line {number}: expected an object, found {type(value).__name__}"
                raise invalid("data.corpus", keys.corpus, problem)
            if not isinstance(one, str):
                raise invalid("data.corpus", keys.corpus, f"line {number}: expected text, found {type(one).__name__}")
            found.append(one)
        documents.append((found[-2], found[-1]))
    return documents


def _jsonl_chats(keys: DataKeys, path: Path, text: str) -> list[Conversation]:
    """The conversation of each line, under `data.messages_key`."""
    found = []
    for number, value in _jsonl_values(keys, text):
        if not isinstance(value, dict) or keys.messages_key not in value:
            there = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            problem = f"line {number} of {path} has no such key, only {there or 'no key'}"
            raise invalid("data.messages_key", keys.messages_key, problem)
        found.append(conversation_of(value[keys.messages_key], f"line {number} of {path}"))
    return found


def _jsonl_values(keys: DataKeys, text: str) -> Iterator[tuple[int, Any]]:
    """Each line that is not empty, with its number from 1."""
    # Split at line feeds only: `splitlines` also splits at characters that JSON strings may contain unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise invalid("data.corpus", keys.corpus, f"line {number} is not JSON: {error.msg}") from None


def check_data(keys: DataKeys) -> Corpus:
    """Read the corpus and check that the tokenizer is available, before any process starts."""
    if keys.tokenizer == "bpe" and not installed("tokenizers"):
        raise ConfigError(BPE_HINT)
    words = open_tokenizer(keys) if keys.tokenizer_folder else None
    corpus = read_corpus(keys)
    if words is not None and corpus.chats:
        # Of all conversations the first; the others are read by the run.
        chat_tokens(words.inner, corpus.chats[0], corpus.assistant_only)
    read_validation(keys)
    return corpus


# ---- tokens ----------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """One token per UTF-8 byte, then BOS, EOS, PAD; exactly reversible.

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    >>> ByteTokenizer().decode([256, 110, 195, 169, 257])
    'né'
    """

    vocab, bos, eos, pad = 259, 256, 257, 258  # vocab: number of tokens, specials included

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without specials."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; specials give no text, bytes that are not UTF-8 give U+FFFD."""
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def token_nbytes(self) -> list[int]:
        """The number of UTF-8 bytes of each token; 0 for specials. Makes bits per byte comparable."""
        return [1] * 256 + [0] * 3


class BPETokenizer:
    """Byte-level BPE of the package `tokenizers`, from the JSON text that `train_bpe` returns; exactly reversible."""

    def __init__(self, json_text: str) -> None:
        self._bpe = _tokenizers().Tokenizer.from_str(json_text)
        self.vocab: int = self._bpe.get_vocab_size()
        self.bos, self.eos, self.pad = (self._bpe.token_to_id(t) for t in _SPECIALS)

    def encode(self, text: str) -> list[int]:
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._bpe.decode(list(tokens), skip_special_tokens=True))

    def token_nbytes(self) -> list[int]:
        # Byte-level BPE represents every byte by one character of its own alphabet.
        specials = {self.bos, self.eos, self.pad}
        return [0 if t in specials else len(self._bpe.id_to_token(t)) for t in range(self.vocab)]


Tokenizer = ByteTokenizer | BPETokenizer | FolderTokenizer

_SPECIALS = ("<bos>", "<eos>", "<pad>")


def train_bpe(texts: Iterable[str], vocab: int) -> str:
    """Train byte-level BPE with `vocab` tokens on `texts`; the same texts give the same JSON.

    Raises `ModuleNotFoundError`, naming the extra to install, if `tokenizers` is missing.
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
    return str(bpe.to_str())


def _tokenizers() -> Any:
    if not installed("tokenizers"):
        raise ModuleNotFoundError(BPE_HINT)
    return importlib.import_module("tokenizers")


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Training and validation tokens, int32, each (num_tokens,)."""

    train: Tensor
    validation: Tensor
    # Whether each counts as a target, bool of the same shapes; None: all do.
    train_counted: Tensor | None = None
    validation_counted: Tensor | None = None


@dataclass(slots=True)
class TrainingPart:
    """The tokens to train on, whether each counts as a target (None: all do), and how many targets of the step count,
    over all processes."""

    tokens: Tensor
    counted: Tensor | None
    of_step: int


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, validation_fraction: float, validation: Corpus | None = None
) -> TokenSplit:
    """All documents, each between BOS and EOS, split once: the last `validation_fraction` of the tokens validates; or,
    where there is a corpus for it, all of `validation`.

    Where there are prompts, each follows BOS, and its tokens do not count. It is tokenized apart from the text. Chats
    begin and end as their template writes them.
    """
    tokens, counted = _stream(corpus, tokenizer)
    if validation is not None:
        others, counted_others = _stream(validation, tokenizer)
        return TokenSplit(tokens, others, counted, counted_others)
    cut = len(tokens) - max(round(len(tokens) * validation_fraction), 2)
    if counted is None:
        return TokenSplit(tokens[:cut], tokens[cut:])
    return TokenSplit(tokens[:cut], tokens[cut:], counted[:cut], counted[cut:])


def _stream(corpus: Corpus, tokenizer: Tokenizer) -> tuple[Tensor, Tensor | None]:
    """All tokens of a corpus, and whether each counts as a target; None: all do."""
    stream: list[int] = []
    counted: list[bool] = []
    # The tokenizer of a folder may lack one of them.
    begin, end = ([] if token is None else [token] for token in (tokenizer.bos, tokenizer.eos))
    for prompt, document in zip(corpus.prompts or ("",) * len(corpus.documents), corpus.documents, strict=True):
        before = begin + (tokenizer.encode(prompt) if prompt else [])
        after = tokenizer.encode(document) + end
        stream += before + after
        if corpus.prompts:
            counted += [False] * len(before) + [True] * len(after)
    for chat in corpus.chats:
        assert isinstance(tokenizer, FolderTokenizer)  # `data_keys` refuses others
        found, counts = chat_tokens(tokenizer.inner, chat, corpus.assistant_only)
        stream += found
        counted += counts
    if corpus.assistant_only and not any(counted):
        problem = f"expected messages of an assistant, found none in {corpus.name}"
        raise ConfigError(f'data.loss_on = "assistant": {problem}')
    tokens = torch.tensor(stream, dtype=torch.int32)
    return tokens, torch.tensor(counted) if corpus.prompts or corpus.assistant_only else None


# ---- samples ---------------------------------------------------------------------------------------------------


class SampleOrder:
    """The training windows of each step: a function of (seed, step) alone, without replacement within an epoch.

    An epoch is a permutation of the windows with its own offset below T, so that the window borders differ between
    epochs.

    >>> order = SampleOrder(num_tokens=101, sequence_length=10, seed=0)
    >>> order.num_windows
    9
    >>> starts = [s for step in range(3) for s in order.starts(step, global_batch=3)]
    >>> len(set(starts)), order.starts(1, global_batch=3) == starts[3:6]
    (9, True)
    """

    def __init__(self, *, num_tokens: int, sequence_length: int, seed: int) -> None:
        # The room for the largest offset (T - 1) and for the last target, one token after the last window.
        self.num_windows = (num_tokens - sequence_length) // sequence_length
        self.sequence_length, self.seed = sequence_length, seed
        if self.num_windows < 1:
            problem = f"the training part has only {num_tokens} tokens"
            raise invalid("training.sequence_length", sequence_length, problem, str(max(num_tokens // 2, 2)))
        # The same epoch is needed many times; a batch across an epoch's end alternates between two.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def starts(self, step: int, global_batch: int) -> list[int]:
        """First token of each window of step `step` (from 0), in order; rank r's share is a slice of this list."""
        found = []
        for index in range(step * global_batch, (step + 1) * global_batch):
            epoch, place = divmod(index, self.num_windows)
            offset, permutation = self._epoch(epoch)
            found.append(offset + int(permutation[place]) * self.sequence_length)
        return found

    def digest(self, step: int, global_batch: int) -> str:
        """Twelve hexadecimal digits that identify the windows of a step."""
        return hashlib.sha256(repr(self.starts(step, global_batch)).encode()).hexdigest()[:12]

    def _draw_epoch(self, epoch: int) -> tuple[int, Tensor]:
        digest = hashlib.sha256(f"{self.seed}:epoch:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        offset = int(torch.randint(self.sequence_length, (), generator=generator))
        return offset, torch.randperm(self.num_windows, generator=generator)


def windows(
    tokens: Tensor, starts: list[int], sequence_length: int, counted: Tensor | None = None, pad: int = -100
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (len(starts), T) int64; the target of a token is the one after it, and `pad` where that
    is not `counted`, which is of the shape of `tokens`."""
    rows = torch.stack([tokens[s : s + sequence_length + 1] for s in starts]).long()
    targets = rows[:, 1:]
    if counted is not None:
        mask = torch.stack([counted[s + 1 : s + sequence_length + 1] for s in starts])
        targets = targets.masked_fill(~mask, pad)
    return rows[:, :-1], targets


def validation_windows(
    tokens: Tensor, sequence_length: int, limit: int, pad: int, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The first `limit` windows of the validation part (all for 0), the last one padded with `pad`.

    Inputs and targets, both (num_windows, T) int64. Targets equal to `pad` do not count.
    """
    count = -(-(len(tokens) - 1) // sequence_length)
    if limit:
        count = min(count, limit)
    rows = torch.full((count, sequence_length + 1), pad, dtype=torch.int64)
    for i in range(count):
        piece = tokens[i * sequence_length : (i + 1) * sequence_length + 1]
        rows[i, : len(piece)] = piece
    if counted is None:
        return rows[:, :-1], rows[:, 1:]
    _, targets = validation_windows(torch.where(counted, tokens, pad), sequence_length, limit, pad)
    if not (targets != pad).any():
        raise ConfigError("data.prompt_key, data.loss_on: no validation token has a loss; use more of the text")
    return rows[:, :-1], targets
