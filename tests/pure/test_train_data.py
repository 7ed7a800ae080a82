"""Corpus, tokenizers and the order of samples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.train.config import ConfigError, DataKeys
from fullshard.train.data import (
    BPETokenizer,
    ByteTokenizer,
    SampleOrder,
    check_data,
    read_corpus,
    tokenize,
    train_bpe,
    validation_windows,
    windows,
)


def test_the_builtin_corpus_is_english_and_hashed() -> None:
    corpus = read_corpus(DataKeys())
    assert corpus.nbytes > 300_000
    assert " the " in corpus.documents[0] + corpus.documents[1]
    assert corpus.sha256 == hashlib.sha256("".join(corpus.documents).encode()).hexdigest()
    assert read_corpus(DataKeys()) == corpus


@given(st.text())
def test_bytes_are_reversible(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.bos, *tokens, tokenizer.eos, tokenizer.pad]) == text
    assert sum(tokenizer.token_nbytes()[t] for t in tokens) == len(text.encode()) == len(tokens)


def test_bpe_is_reversible_and_the_same_each_time() -> None:
    """Any text, unseen characters included; every token knows its bytes; the stored JSON is the tokenizer."""
    pytest.importorskip("tokenizers")
    texts = ["the cat sat on the mat", "the dog sat on the log"]
    json_text = train_bpe(texts, 300)
    assert train_bpe(texts, 300) == json_text
    tokenizer = BPETokenizer(json_text)
    assert tokenizer.vocab <= 300
    assert len(tokenizer.encode("the cat sat")) < len("the cat sat")
    for text in (*texts, "ünïcödé 漢字 \x00", ""):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.bos, *tokens, tokenizer.eos]) == text
        assert sum(tokenizer.token_nbytes()[t] for t in tokens) == len(text.encode())


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("né\r\nb".encode())
    corpus = read_corpus(DataKeys(corpus=f"path:{path}"))
    assert corpus.documents == ("né\r\nb",)
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    """Objects with the configured key or plain strings; empty lines and odd line ends inside strings are no borders."""
    path = tmp_path / "c.jsonl"
    lines = [
        json.dumps({"body": "a\nb"}),
        "",
        json.dumps("c"),
        json.dumps({"body": "d\u2028e", "x": 1}, ensure_ascii=False),
    ]
    path.write_text("\n".join(lines) + "\n")
    assert read_corpus(DataKeys(corpus=f"path:{path}", text_key="body")).documents == ("a\nb", "c", "d\u2028e")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("c.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ["data.text_key", "line 2", "txt"]),
        ("c.jsonl", b'{"text": "a"}\nnot json\n', ["line 2 is not JSON"]),
        ("c.jsonl", b'{"text": 3}\n', ["line 1: expected text, found int"]),
        ("c.txt", b"", ["there is no text in it"]),
        ("c.txt", b"abc\xff", ["not UTF-8", "byte 3"]),
    ],
)
def test_a_corpus_that_cannot_be_used_is_explained(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_corpus(DataKeys(corpus=f"path:{path}"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_tokenizer_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"fullshard\[bpe\]"):
        check_data(DataKeys(tokenizer="bpe"))


def test_documents_are_framed_and_split_once(tmp_path: Path) -> None:
    """BOS doc EOS ..., the last part validates, nothing is in both or in neither."""
    path = tmp_path / "c.jsonl"
    path.write_text('"abc"\n"defg"\n')
    tokenizer = ByteTokenizer()
    split = tokenize(read_corpus(DataKeys(corpus=f"path:{path}")), tokenizer, 0.4)
    stream = [256, *b"abc", 257, 256, *b"defg", 257]
    assert split.train.tolist() + split.validation.tolist() == stream
    assert len(split.validation) == 4


@given(
    num_tokens=st.integers(20, 400),
    length=st.integers(2, 10),
    seed=st.integers(0, 5),
    batch=st.integers(1, 7),
)
def test_an_epoch_sees_each_window_once(num_tokens: int, length: int, seed: int, batch: int) -> None:
    """Over any whole epoch each window comes once, whatever the batch; all windows lie inside the tokens."""
    order = SampleOrder(num_tokens=num_tokens, sequence_length=length, seed=seed)
    epochs = 3
    steps = -(-epochs * order.num_windows // batch)
    starts = [s for step in range(steps) for s in order.starts(step, batch)][: epochs * order.num_windows]
    assert all(0 <= s and s + length < num_tokens for s in starts)
    for epoch in range(epochs):
        once = Counter(starts[epoch * order.num_windows : (epoch + 1) * order.num_windows])
        assert set(once.values()) == {1}
        assert len({s % length for s in once}) == 1  # the epoch's offset


def test_the_order_depends_on_seed_and_step_alone() -> None:
    """A step can be asked for at any time, by any rank; the global batch only cuts one endless list."""
    order = SampleOrder(num_tokens=1000, sequence_length=8, seed=1)
    again = SampleOrder(num_tokens=1000, sequence_length=8, seed=1)
    late = again.starts(57, 4)
    assert [order.starts(step, 4) for step in range(58)][57] == late
    assert order.starts(0, 8) == again.starts(0, 4) + again.starts(1, 4)
    assert SampleOrder(num_tokens=1000, sequence_length=8, seed=2).starts(0, 8) != order.starts(0, 8)


def test_a_corpus_too_small_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"training\.sequence_length = 64.*only 40 tokens; nearest valid: 20"):
        SampleOrder(num_tokens=40, sequence_length=64, seed=0)
    SampleOrder(num_tokens=40, sequence_length=20, seed=0)


def test_targets_are_the_next_tokens() -> None:
    tokens = torch.arange(50, dtype=torch.int32)
    inputs, targets = windows(tokens, [3, 40], 4)
    assert inputs.tolist() == [[3, 4, 5, 6], [40, 41, 42, 43]]
    assert targets.tolist() == [[4, 5, 6, 7], [41, 42, 43, 44]]
    assert inputs.dtype == torch.int64


@pytest.mark.parametrize("num_tokens", [2, 5, 9, 10, 11])
def test_validation_counts_every_token_once(num_tokens: int) -> None:
    """Each token but the first is a target once; the rest of the last window is padding."""
    tokens = torch.arange(num_tokens, dtype=torch.int32)
    inputs, targets = validation_windows(tokens, 4, 0, pad=99)
    assert targets[targets != 99].tolist() == list(range(1, num_tokens))
    assert inputs.shape == targets.shape
    assert torch.equal(targets[targets != 99] - 1, inputs[targets != 99])
    assert len(validation_windows(tokens, 4, 1, pad=99)[0]) == 1


def test_several_files_and_patterns_are_one_corpus(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c,d.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "e.jsonl").write_text('{"text": "x"}\n"y"')
    both = read_corpus(DataKeys(corpus=f"path:{tmp_path}/e.jsonl, {tmp_path}/[ab].txt,{tmp_path}/a.txt"))
    assert both.documents == ("x", "y", "a.txt", "b.txt")
    assert read_corpus(DataKeys(corpus=f"path:{tmp_path}/c,d.txt")).documents == ("c,d.txt",)
    other = read_corpus(DataKeys(corpus=f"path:{tmp_path}/b.txt,{tmp_path}/a.txt"))
    same = read_corpus(DataKeys(corpus=f"path:{tmp_path}/[ab].txt"))
    assert other.sha256 != same.sha256
    assert (other.nbytes, same.nbytes) == (10, 10)
    with pytest.raises(ConfigError, match=r"no file matches .*\*\.md"):
        read_corpus(DataKeys(corpus=f"path:{tmp_path}/*.md"))


def test_prompts_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "ab", "text": "c"}\n{"q": "", "text": "de"}\n')
    split = tokenize(read_corpus(DataKeys(corpus=f"path:{file}", prompt_key="q")), ByteTokenizer(), 0.25)
    assert split.train_counted is not None and split.validation_counted is not None
    tokens = [*split.train.tolist(), *split.validation.tolist()]
    assert tokens == [256, 97, 98, 99, 257, 256, 100, 101, 257]
    counted = [*split.train_counted.tolist(), *split.validation_counted.tolist()]
    assert counted == [False, False, False, True, True, False, True, True, True]
    inputs, targets = windows(split.train, [0, 2], 4, split.train_counted, -100)
    assert inputs.tolist() == [[256, 97, 98, 99], [98, 99, 257, 256]]
    assert targets.tolist() == [[-100, -100, 99, 257], [99, 257, -100, 100]]
    inputs, targets = validation_windows(split.validation, 2, 0, 258, split.validation_counted)
    assert (inputs.tolist(), targets.tolist()) == ([[101, 257]], [[257, 258]])
    for text, key in (('"plain"', "expected an object"), ('{"text": "x"}', "has no such key, only text")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=key):
            read_corpus(DataKeys(corpus=f"path:{file}", prompt_key="q"))
