"""The tokenizer of a folder for the trainer's own model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fullshard.train.config import ConfigError, load_config
from fullshard.train.data import SampleOrder, check_data
from fullshard.train.folder import make_run_dir
from fullshard.train.metrics import read_metrics
from fullshard.train.model import Llama, llama_shape
from fullshard.train.process import world_of
from fullshard.train.run import train
from fullshard.train.sample import generate, load_run
from tests.harness import tolerance
from tests.harness.packages import offline
from tests.harness.pool import pool
from tests.procs.test_train_world import TINY

QUIET = (
    *TINY,
    "training.clip_norm=0",
    "sharding.precision.reduce=float64",
    "metrics.plot=false",
    "metrics.tensorboard=false",
    "metrics.record_first=0",
    "metrics.record_every=0",
    "sample.tokens=3",
)


def make_tokenizer(path: Path, template: str | None = None) -> None:
    """A byte-level BPE of 280 tokens with an end, and no beginning."""
    offline()
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    specials = ["<end>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["the rank that waits for the other ranks"] * 3, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    made.chat_template = template
    made.save_pretrained(path)


def trained(rank: int, size: int, keys: tuple[str, ...], run_dir: str) -> None:
    config = load_config(None, keys)
    store = dist.FileStore(f"{run_dir}/store-{size}-{config.training.steps}", size)
    train(config, world_of(config, rank, size, torch.device("cpu"), store), Path(run_dir))


def run_on(size: int, keys: tuple[str, ...], run_dir: Path) -> list[dict[str, object]]:
    """Train in that folder; the records of all of its steps."""
    make_run_dir(load_config(None, (*keys, f"run.dir={run_dir}")))
    pool(size).run(trained, size, keys, str(run_dir))
    return read_metrics(run_dir / "metrics.jsonl")


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    """Losses are those of plain torch on tokens that `tokenizers` makes, and the run keeps its tokenizer."""
    from tokenizers import Tokenizer

    make_tokenizer(tmp_path / "words")
    text = "".join(f"the rank {n} waits, é. " for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    keys = (*QUIET, f"data.corpus=path:{tmp_path}/a.txt", f"data.tokenizer=folder:{tmp_path}/words", "training.steps=2")
    records = run_on(2, keys, tmp_path / "run")

    words = Tokenizer.from_file(str(tmp_path / "words" / "tokenizer.json"))
    tokens = torch.tensor([*words.encode(text).ids, words.token_to_id("<end>")])
    config = load_config(None, keys)
    length = config.training.sequence_length
    part = tokens[: len(tokens) - round(len(tokens) * 0.1)]
    starts = SampleOrder(num_tokens=len(part), sequence_length=length, seed=0).starts(0, 8)
    rows = torch.stack([part[s : s + length + 1] for s in starts])
    model = Llama(llama_shape(config, words.get_vocab_size() + 1))  # one row for padding
    model.init_weights(0)
    loss = float(F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).detach())
    near = tolerance.terms_of(model, rows.numel()) * torch.finfo(torch.float32).eps
    assert records[0]["loss"] == pytest.approx(loss, rel=near)

    (tmp_path / "words").rename(tmp_path / "elsewhere")
    llama, kept, config = load_run(tmp_path / "run")
    assert kept.encode(text) == words.encode(text).ids
    assert generate(llama, kept, config.sample, context=length, seed=0).startswith("The ")


@pytest.mark.parametrize(
    "value, words",
    [
        ("folder:PLACE/none", "expected a folder with a tokenizer, found nothing"),
        ("folder:PLACE/file", "expected a folder with a tokenizer, found a file"),
        ("folder:PLACE/empty", "expected a tokenizer in it, which transformers cannot make"),
        ("folder:", 'expected one of .*"folder:PATH"; nearest valid: "folder:PATH"'),
        ("byts", 'expected one of .*; nearest valid: "bytes"'),
    ],
)
def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path, value: str, words: str) -> None:
    offline()
    (tmp_path / "file").write_text(json.dumps("x"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words) as caught:
        check_data(load_config(None, [f"data.tokenizer={value.replace('PLACE', str(tmp_path))}"]).data)
    assert "data.tokenizer = " in str(caught.value) and "\n" not in str(caught.value)
