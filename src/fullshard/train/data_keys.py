"""Keys of the data, and the rules between them. No torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from fullshard.keys import invalid, setting, show

TOKENIZERS = ("bytes", "bpe", "folder")
# Before the path of a folder with a tokenizer.
FOLDER = "folder:"


@dataclass(frozen=True, slots=True)
class DataKeys:
    corpus: str = setting(
        "builtin",
        '"builtin" = the documentation inside Python; "path:FILE" = text or .jsonl; FILE may be several, with commas '
        "between them, and patterns as *.txt",
    )
    text_key: str = setting("text", "key of the text in an object of a .jsonl corpus")
    prompt_key: str = setting(
        "", 'key of a prompt beside it: text that comes before, and whose tokens have no loss; "" = none'
    )
    messages_key: str = setting(
        "", 'key of a conversation, a list of messages, which the tokenizer\'s chat template writes; "" = none'
    )
    loss_on: str = setting(
        "all", 'tokens of a conversation that have a loss: "all", or the "assistant"\'s', choices=("all", "assistant")
    )
    validation_fraction: float = setting(0.1, "last part of the corpus, kept for validation", above=0.0, most=0.5)
    validation: str = setting(
        "", 'files to validate on, "path:FILE" as for corpus, all of which then trains; "" = the last part of it'
    )
    tokenizer: str = setting(
        "bytes",
        '"bytes", "bpe" trained on the corpus (needs fullshard[bpe]), "folder:PATH" = that of a folder, '
        'or "folder" = that of model.folder',
    )
    bpe_vocab: int = setting(1024, "vocabulary of the BPE tokenizer", least=260)

    @property
    def tokenizer_folder(self) -> str:
        """The folder that `tokenizer` names; "" where it names none."""
        return self.tokenizer.removeprefix(FOLDER) if self.tokenizer.startswith(FOLDER) else ""


def check_keys(keys: DataKeys) -> None:
    """Rules between keys. Raises `ConfigError`."""
    d = keys
    if d.corpus != "builtin" and not (d.corpus.startswith("path:") and len(d.corpus) > len("path:")):
        raise invalid("data.corpus", d.corpus, 'expected "builtin" or "path:FILE"', _nearest_corpus(d.corpus))
    if d.validation and not (d.validation.startswith("path:") and len(d.validation) > len("path:")):
        raise invalid("data.validation", d.validation, 'expected "path:FILE"', show(f"path:{d.validation}"))
    if d.validation and d.validation_fraction != DataKeys().validation_fraction:
        problem = "has no effect with data.validation"
        raise invalid("data.validation_fraction", d.validation_fraction, problem, show(DataKeys().validation_fraction))
    if d.tokenizer not in TOKENIZERS and not d.tokenizer_folder:
        nearest = difflib.get_close_matches(d.tokenizer.lower(), TOKENIZERS, n=1, cutoff=0.0)[0]
        if "/" in d.tokenizer or d.tokenizer == FOLDER:
            nearest = FOLDER + (d.tokenizer.removeprefix(FOLDER) or "PATH")
        problem = 'expected one of "bytes", "bpe", "folder", "folder:PATH"'
        raise invalid("data.tokenizer", d.tokenizer, problem, show(nearest))
    if d.prompt_key and d.corpus == "builtin":
        raise invalid("data.prompt_key", d.prompt_key, "has no effect without a .jsonl corpus", show(""))
    if not d.messages_key:
        if d.loss_on != "all":
            raise invalid("data.loss_on", d.loss_on, "has no effect without data.messages_key", show("all"))
        return
    if d.corpus == "builtin":
        raise invalid("data.messages_key", d.messages_key, "has no effect without a .jsonl corpus", show(""))
    if d.prompt_key:
        problem = "a conversation has its prompts in its messages"
        raise invalid("data.prompt_key", d.prompt_key, problem, show(""))
    if d.tokenizer in ("bytes", "bpe"):
        problem = "has no chat template, which data.messages_key needs"
        raise invalid("data.tokenizer", d.tokenizer, problem, show(f"{FOLDER}PATH"))


def _nearest_corpus(value: str) -> str:
    # A bare file name is the likely mistake; for anything that looks like a path, suggest the same path with a prefix.
    return show(f"path:{value}" if any(c in value for c in "./\\") else "builtin")
