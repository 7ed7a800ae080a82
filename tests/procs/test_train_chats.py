"""Conversations by the chat template of a tokenizer; the loss on an assistant's tokens, against transformers' mask."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.train.chats import chat_tokens, conversation_of
from fullshard.train.config import Config, ConfigError, load_config
from fullshard.train.data import SampleOrder, check_data, read_corpus, tokenize, windows
from fullshard.train.folder_tokenizer import open_tokenizer
from fullshard.train.model import Llama, llama_shape
from tests.harness import tolerance
from tests.procs.test_train_tokenizers import QUIET, make_tokenizer, run_on

BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + BEGIN
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%- generation -%}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + BEGIN
)
# As templates of models that think: the last message has what earlier ones have not.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)


def talk(*texts: str) -> list[dict[str, str]]:
    """Turns of a user and an assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def keys_of(tmp_path: Path, rows: list[Any], template: str | None, *more: str) -> tuple[str, ...]:
    make_tokenizer(tmp_path / "words", template)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return (
        f"data.corpus=path:{tmp_path}/a.jsonl",
        f"data.tokenizer=folder:{tmp_path}/words",
        "data.messages_key=messages",
        "data.loss_on=assistant",
        *more,
    )


def test_tokens_and_targets_by_hand(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    keys = load_config(None, keys_of(tmp_path, [talk("Hi", "Yes, é.", "So", "No")], CHATML)).data
    split = tokenize(read_corpus(keys), open_tokenizer(keys), 0.01)
    encode = Tokenizer.from_file(str(tmp_path / "words" / "tokenizer.json")).encode
    pieces = [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        ("Yes, é.<|im_end|>\n", True),
        ("<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n", False),
        ("No<|im_end|>\n", True),
    ]
    tokens = [token for text, _ in pieces for token in encode(text).ids]
    counted = [counts for text, counts in pieces for _ in encode(text).ids]
    assert split.train_counted is not None and split.validation_counted is not None
    assert [*split.train.tolist(), *split.validation.tolist()] == tokens
    assert [*split.train_counted.tolist(), *split.validation_counted.tolist()] == counted
    length = len(split.train) - 1
    _, targets = windows(split.train, [0], length, split.train_counted)
    wanted = [token if counts else -100 for token, counts in zip(tokens, counted, strict=True)]
    assert targets[0].tolist() == wanted[1 : length + 1]


def test_the_mask_is_that_of_transformers(tmp_path: Path) -> None:
    """Prefixes mark in a template without marks what transformers marks in the same with them."""
    rows = [talk("the ranks", " wait é ", "漢字", "<|im_end|>\n\n", "", ""), talk("x", "y", "z")]
    keys = load_config(None, keys_of(tmp_path, rows, CHATML)).data
    words = open_tokenizer(keys).inner
    for number, row in enumerate(rows):
        chat = conversation_of(row, f"row {number}")
        words.chat_template = MARKED
        oracle = words.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        both = [chat_tokens(words, chat, True)]
        words.chat_template = CHATML
        both.append(chat_tokens(words, chat, True))
        for tokens, counted in both:
            assert tokens == oracle["input_ids"]
            assert counted == [bool(mask) for mask in oracle["assistant_masks"]]
        assert any(both[0][1]) and not all(both[0][1])
        assert chat_tokens(words, chat, False) == (tokens, [True] * len(tokens))


def assert_first_loss(printed: float, config: Config, rows: list[Any], model: nn.Module, logits: Any) -> None:
    """The mean over the tokens that count in the first batch, by plain torch; `rows`: as transformers makes them."""
    tokens = torch.tensor([token for row in rows for token in row["input_ids"]])
    mask = torch.tensor([bool(counts) for row in rows for counts in row["assistant_masks"]])
    length, kept = config.training.sequence_length, len(tokens) - round(len(tokens) * 0.1)
    starts = SampleOrder(num_tokens=kept, sequence_length=length, seed=0).starts(0, config.training.global_batch)
    inputs, targets, counts = (
        torch.stack([x[s + shift : s + shift + length] for s in starts])
        for x, shift in ((tokens, 0), (tokens, 1), (mask, 1))
    )
    with torch.no_grad():
        losses = F.cross_entropy(logits(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    loss = float((losses * counts.flatten()).sum() / counts.sum())
    near = tolerance.terms_of(model, counts.numel()) * torch.finfo(torch.float32).eps
    assert printed == pytest.approx(loss, rel=near)


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_one_and_two_processes_and_a_stop(tmp_path: Path, template: str) -> None:
    """Equal in every bit, and the first loss is that of plain torch over the tokens that count."""
    rows = [talk("q " * (7 * i % 31), "answer " * (1 + i % 5), "so", f"{i}") for i in range(60)]
    keys = (*QUIET, *keys_of(tmp_path, rows, template), "optimizer.schedule=constant")
    one = run_on(1, (*keys, "training.steps=3"), tmp_path / "one")
    run_on(2, (*keys, "training.steps=2"), tmp_path / "two")
    two = run_on(2, (*keys, "training.steps=3"), tmp_path / "two")
    for name in ("loss", "grad_norm", "samples"):
        assert [record[name] for record in one] == [record[name] for record in two]
    assert one[-1]["val_loss"] == two[-1]["val_loss"]

    config = load_config(None, keys)
    words = open_tokenizer(config.data)
    found = [
        words.inner.apply_chat_template(row, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True)
        for row in rows
    ]
    model = Llama(llama_shape(config, words.vocab))
    model.init_weights(0)
    assert_first_loss(one[0]["loss"], config, found, model, model)


@pytest.mark.parametrize(
    "rows, template, words",
    [
        ([talk("a", "b")], None, "expected a chat_template of the tokenizer, found none"),
        ([talk("a", "b", "c", "d")], THINKING, "line 1 of .*writes message 2 the same whatever follows"),
        ([talk("a", "b")], "{{ raise_exception('roles alternate') }}", "line 1 of .*cannot write it: roles alternate"),
        ([[]], CHATML, "line 1 of .*: expected a list of messages, found an empty list"),
        (["text"], CHATML, "line 1 of .*: expected a list of messages, found str"),
        ([[{"from": "a"}]], CHATML, "message 1: expected an object with .*, found the keys from"),
        ([talk("a")], CHATML, "expected messages of an assistant, found none"),
    ],
)
def test_what_cannot_be_told_apart_is_one_line(tmp_path: Path, rows: list[Any], template: str, words: str) -> None:
    keys = load_config(None, keys_of(tmp_path, rows, template)).data
    with pytest.raises(ConfigError, match=words) as caught:
        tokenize(check_data(keys), open_tokenizer(keys), 0.1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, words",
    [
        (["data.loss_on=assistant"], "data.loss_on.*has no effect without data.messages_key"),
        (["data.messages_key=m"], "data.messages_key.*has no effect without a .jsonl corpus"),
        (["data.messages_key=m", "data.corpus=path:a.jsonl"], "data.tokenizer.*has no chat template"),
        (["data.messages_key=m", "data.corpus=path:a.jsonl", "data.prompt_key=q"], "data.prompt_key"),
    ],
)
def test_keys_without_effect_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, settings)


def test_a_model_of_a_folder_learns_answers(tmp_path: Path) -> None:
    """On one and on two processes; the first loss is that of transformers, with labels by its own mask."""
    import transformers

    from tests.procs.test_train_pretrained import make_folder

    path = tmp_path / "model"
    make_folder(path, "llama")
    told = json.loads((path / "tokenizer_config.json").read_text())
    short = {"<|im_start|>": "[", "<|im_end|>": "<end>"}
    unmarked, marked = (re.sub(r"<\|im_\w+\|>", lambda found: short[found[0]], text) for text in (CHATML, MARKED))
    (path / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": unmarked}))
    rows = [talk("q " * (7 * i % 31), "answer " * (1 + i % 5)) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    keys = [key for key in QUIET if not key.startswith("model.")]
    keys += [f"model.folder={path}", f"data.corpus=path:{tmp_path}/a.jsonl", "data.messages_key=messages"]
    keys += ["data.loss_on=assistant", "training.steps=2"]
    one, two = (run_on(size, tuple(keys), tmp_path / str(size)) for size in (1, 2))
    for name in ("loss", "grad_norm", "samples"):
        assert [record[name] for record in one] == [record[name] for record in two]

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(path)
    options = dict(chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)
    found = [words.apply_chat_template(row, **options) for row in rows]
    assert_first_loss(one[0]["loss"], load_config(None, keys), found, model, lambda inputs: model(inputs).logits)
