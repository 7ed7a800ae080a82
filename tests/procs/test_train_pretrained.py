"""`fullshard train --model`: models of Hugging Face folders, against PEFT and transformers in one process."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import checkpoint
from fullshard.train.config import Config, ConfigError, load_config
from fullshard.train.data import SampleOrder, read_corpus, tokenize, windows
from fullshard.train.folder import make_run_dir
from fullshard.train.loop import Trainer
from fullshard.train.metrics import read_metrics
from fullshard.train.optimizers import adamw
from fullshard.train.pretrained import check_pretrained_folder, open_pretrained, opened_on_all
from fullshard.train.process import world_of
from fullshard.train.run import train
from fullshard.train.sample import generate, load_run
from fullshard.train.schedules import learning_rate
from tests.harness import tolerance
from tests.harness.installed import clear_sharding_cache
from tests.harness.models import seeded
from tests.harness.packages import offline
from tests.harness.pool import pool

TIMEOUT = 200.0
STEPS = 4
SIZES = dict(
    vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, pad_token_id=None
)
GROUPED = dict(**SIZES, num_key_value_heads=2)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
# Classes of configurations, with their sizes; tied are Llama, Gemma, Qwen 3 and GPT-2.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", dict(**GROUPED, tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(**GROUPED, head_dim=6, tie_word_embeddings=True)),
    "gpt2": ("GPT2Config", dict(vocab_size=300, n_embd=24, n_layer=2, n_head=4, **NO_DROPOUT)),
    "mixtral": ("MixtralConfig", dict(**GROUPED, num_local_experts=4)),
    "gpt_oss": ("GptOssConfig", dict(**GROUPED, head_dim=6, num_local_experts=4, num_experts_per_tok=2)),
    "gemma": ("GemmaConfig", dict(**GROUPED, head_dim=6)),
    "gemma3": ("Gemma3TextConfig", dict(**GROUPED, head_dim=6)),
    "phi": ("PhiConfig", {**SIZES, "hidden_size": 32}),  # half of a head is rotated, by pairs
    "phi3": ("Phi3Config", GROUPED),
}
SETTINGS = (
    f"training.steps={STEPS}",
    "training.sequence_length=16",
    "training.global_batch=4",
    "training.micro_batch=1",
    "training.device=cpu",
    "optimizer.warmup_steps=2",
    "optimizer.lr=1e-3",
    "data.validation_fraction=0.01",
    "metrics.eval_windows=2",
    "metrics.plot=false",
    "metrics.tensorboard=false",
    "metrics.record_first=0",
    "metrics.record_every=0",
    "sample.tokens=3",
    "checkpoint.every=2",
    "checkpoint.keep_last=9",
)


def make_folder(path: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
    """A model of random values in several files, with a byte-level tokenizer that has no BOS."""
    offline()
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    kind, sizes = FAMILIES[family]
    config = getattr(transformers, kind)(**sizes)
    model = seeded(lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=dtype))
    model.save_pretrained(path, max_shard_size="30KB")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["the rank that waits for the other ranks"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(path)


def config_of(folder: Path, *settings: str, world: int = 2) -> Config:
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("".join(f"rank {n} waits for rank {n * n % 7}, é.\n" for n in range(400)))
    config = load_config(None, [*SETTINGS, f"data.corpus=path:{corpus}", f"model.folder={folder}", *settings])
    config.check_world(world)
    return config


# ---- the steps ---------------------------------------------------------------------------------------------------


def steps(rank: int, family: str, folder: str, settings: tuple[str, ...], stored: torch.dtype) -> dict[str, Any]:
    """The trainer's losses and parameters, and on rank 0 what one process makes of the same batches."""
    path = Path(folder) / "model"
    # Of earlier jobs in this process, with other axes.
    clear_sharding_cache()
    if rank == 0:
        make_folder(path, family, stored)
    dist.barrier()
    size = dist.get_world_size()
    config = config_of(path, *settings, world=size)
    world = world_of(config, rank, size, torch.device("cpu"), dist.FileStore(f"{folder}/store", size))
    pretrained = opened_on_all(config, world)
    split = tokenize(read_corpus(config.data), pretrained.tokenizer, config.data.validation_fraction)
    model, world = pretrained.on(world)
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), config.optimizer)
    trainer = Trainer(config, world, model, optimizer, split, pretrained.tokenizer)
    initial = _full(trainer.model)
    records = [trainer.step(step) for step in range(1, STEPS + 1)]
    found = {"losses": [r.loss for r in records], "norms": [r.grad_norm for r in records], "val": records[-1].val_loss}
    found["parameters"] = _full(trainer.model)
    if rank == 0:
        found["plain"], found["up"], found["down"] = (
            _plain(config, path, trainer, initial, sign) for sign in (0.0, 1.0, -1.0)
        )
    dist.barrier()
    return found


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in named.items()}


def _plain(
    config: Config, path: Path, trainer: Trainer, initial: dict[str, torch.Tensor], sign: float
) -> dict[str, Any]:
    """Plain training by the packages themselves: their models, their loss, torch's clipping."""
    import transformers

    keys, dtype = config.adapters, getattr(torch, config.model.dtype)
    options: dict[str, Any] = {"dtype": dtype}
    if keys.method == "qlora":
        options["device_map"] = {"": "cpu"}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    if keys.method != "none":
        from peft import LoraConfig, get_peft_model

        targets: Any = "all-linear" if keys.targets == ("all-linear",) else list(keys.targets)
        lora = LoraConfig(r=keys.rank, lora_alpha=keys.alpha, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    model.train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(initial[name])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(trained, config.optimizer)
    batch, length = config.training.global_batch, config.training.sequence_length
    terms = tolerance.terms_of(model.parameters(), batch * length)
    settle = tolerance.disturb(optimizer, sign, terms, model) if sign else lambda: None
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, config.training.steps, step + 1)
        starts = trainer.order.starts(step, batch)
        rows = torch.stack([trainer.part.tokens[s : s + length + 1] for s in starts]).long()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, config.training.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    settle()
    named = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {"losses": losses, "norms": norms, "parameters": named, "terms": terms, "initial": initial}


def odd(found: dict[str, Any]) -> list[str]:
    """What rounding does not explain."""
    plain, ends = found["plain"], (found["up"], found["down"])
    wrong, moved = [], 0
    for name, value in plain["parameters"].items():
        allowed = tolerance.updates(value, STEPS)
        allowed += max(tolerance.largest(end["parameters"][name], value) for end in ends)
        off = tolerance.largest(found["parameters"][name], value)
        wrong += [] if off <= allowed else [f"{name}: off by {off:.3g}, allowed {allowed:.3g}"]
        moved += tolerance.largest(plain["initial"][name], value) > 4 * allowed
    # An element whose gradient is nothing but rounding moves by a whole step of AdamW; the others show a wrong one.
    if moved * 2 <= len(plain["parameters"]):
        wrong.append(f"training moves {moved} of {len(plain['parameters'])} parameters further than rounding does")
    for kind in ("losses", "norms"):
        for step, (mine, one) in enumerate(zip(found[kind], plain[kind], strict=True)):
            allowed = tolerance.sums(torch.float32, plain["terms"]) * abs(one)
            allowed += max(abs(end[kind][step] - one) for end in ends)
            wrong += [] if abs(mine - one) <= allowed else [f"{kind} {step + 1}: {mine}, expected {one}, {allowed:.3g}"]
    return wrong


LORA, QLORA = "adapters.method=lora", "adapters.method=qlora"
ATTENTION = 'adapters.targets=["q_proj", "v_proj"]'
EVERYDAY: list[tuple[str, tuple[str, ...], torch.dtype]] = [
    ("llama", (), torch.bfloat16),
    ("qwen3", (LORA, "adapters.rank=3"), torch.float32),
    ("llama", (QLORA,), torch.float32),
]
MORE: list[tuple[str, tuple[str, ...], torch.dtype]] = [
    *((family, (), torch.float32) for family in FAMILIES if family != "llama"),
    *((family, (LORA,), torch.bfloat16) for family in FAMILIES if family not in ("qwen3", "mixtral", "gpt_oss")),
    *((family, (QLORA,), torch.float32) for family in FAMILIES if family not in ("llama", "mixtral", "gpt_oss")),
    ("mixtral", (LORA, ATTENTION), torch.float32),
    ("mixtral", (QLORA, ATTENTION), torch.float32),
    ("llama", ("sharding.activation_checkpointing.at=units", "training.accumulate=reduce"), torch.float32),
    ("llama", (LORA, "sharding.reshard_after_forward=false", "training.micro_batch=2"), torch.float32),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "settings", "stored"), [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_steps_are_those_of_one_process(
    family: str, settings: tuple[str, ...], stored: torch.dtype, tmp_path: Path
) -> None:
    first, second = pool(2).run(steps, family, str(tmp_path), settings, stored, timeout=TIMEOUT)
    assert not odd(first), odd(first)
    assert first["losses"] == second["losses"] and math.isfinite(first["val"])
    for name, value in first["parameters"].items():
        assert torch.equal(value.view(torch.uint8), second["parameters"][name].view(torch.uint8)), name
        if name not in first["plain"]["parameters"]:
            assert torch.equal(value.view(torch.uint8), first["plain"]["initial"][name].view(torch.uint8)), name


# ---- a run -------------------------------------------------------------------------------------------------------


def _run(rank: int, folder: str, settings: tuple[str, ...]) -> None:
    """A run in a process group that is there; rank 0 makes the folder of the model if there is none."""
    path = Path(folder)
    clear_sharding_cache()
    if rank == 0 and not (path / "model").exists():
        make_folder(path / "model", "llama", torch.bfloat16)
    dist.barrier()
    config = config_of(path / "model", f"run.dir={folder}/run", *settings, world=dist.get_world_size())
    if rank == 0:
        make_run_dir(config)
        (path / "store").unlink(missing_ok=True)
    dist.barrier()
    world = world_of(
        config,
        rank,
        dist.get_world_size(),
        torch.device("cpu"),
        dist.FileStore(f"{folder}/store", dist.get_world_size()),
    )
    train(config, world, path / "run")


def _taken_up(rank: int, folder: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """A whole run; then it loses its end, and the same again from the middle."""
    path = Path(folder)
    found = {}
    for sitting in ("whole", "resumed"):
        _run(rank, folder, settings)
        if rank == 0:
            found[sitting] = read_metrics(path / "run" / "metrics.jsonl")
            shutil.copytree(path / "run" / "model", path / sitting)
            manifest = json.loads((path / "run" / "manifest.json").read_text())
            (path / "run" / "manifest.json").write_text(json.dumps(manifest | {"status": "failed"}))
            shutil.rmtree(path / "run" / "checkpoints" / f"step-{STEPS}")
        dist.barrier()
    return found | (_looked_at(path, settings) if rank == 0 else {})


def _looked_at(path: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    """What other programs find in the folder of the run."""
    import transformers

    model: Any
    tokens = torch.arange(12)[None] + 3
    found: dict[str, Any] = {"files": sorted(file.name for file in (path / "run" / "checkpoints").glob("*"))}
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "run" / "model")
    found["dtype"], found["logits"] = model.dtype, model(tokens).logits.detach()
    found["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    words = transformers.AutoTokenizer.from_pretrained(path / "run" / "model")
    found["words"] = words.decode(words.encode("the rank, é"))
    base = transformers.AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
    found["terms"] = tolerance.terms_of(base)
    found["before"] = base(tokens).logits.detach()
    if settings:
        from peft import PeftModel

        found["peft"] = PeftModel.from_pretrained(base, path / "run" / "adapters")(tokens).logits.detach()
        entries = checkpoint.inspect(path / "run" / "checkpoints" / "step-2").tensors
        found["stored"] = sorted(name for name in entries if name.startswith("model."))
    ours, tokenizer, config = load_run(path / "run")
    keys = replace(config.sample, temperature=0.0, tokens=4, prompt="the rank")
    found["text"] = generate(ours, tokenizer, keys, context=16, seed=0)
    ids = words("the rank", return_tensors="pt")
    model.generation_config.eos_token_id = None
    end = model.generate(**ids, max_new_tokens=4, do_sample=False, suppress_tokens=[words.eos_token_id])
    found["theirs"] = words.decode(end[0], skip_special_tokens=True)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "lora", "qlora"])
def test_a_run_is_taken_up_again_and_exported(method: str, tmp_path: Path) -> None:
    settings = () if method == "none" else (f"adapters.method={method}",)
    found = pool(2).run(_taken_up, str(tmp_path), settings, timeout=TIMEOUT)[0]
    times = ("seconds", "tokens_per_second", "tflop_per_second", "memory_bytes", "checkpoint_seconds", "mfu")
    whole, resumed = ([{k: v for k, v in r.items() if k not in times} for r in found[s]] for s in ("whole", "resumed"))
    assert len(whole) == STEPS and whole == resumed
    ends = [load_file(tmp_path / sitting / "model.safetensors") for sitting in ("whole", "resumed")]
    assert ends[0].keys() == ends[1].keys() and all(
        torch.equal(ends[1][name], value) for name, value in ends[0].items()
    )
    assert found["dtype"] is torch.float32 and found["tied"] and found["words"] == "the rank, é"
    assert not tolerance.close(found["logits"], found["before"], found["terms"])
    if settings:
        assert tolerance.close(found["logits"], found["peft"], found["terms"])
        assert found["stored"] and all(".lora_" in name for name in found["stored"])
    assert found["text"] == found["theirs"]


def sitting(rank: int, folder: str, settings: tuple[str, ...]) -> list[dict[str, Any]]:
    _run(rank, folder, settings)
    return read_metrics(Path(folder) / "run" / "metrics.jsonl")


# ---- what is refused ---------------------------------------------------------------------------------------------


def _without(*patterns: str) -> Callable[[Path], None]:
    return lambda path: [file.unlink() for pattern in patterns for file in path.glob(pattern)] and None


def _of_pickles(path: Path) -> None:
    _without("*.safetensors*")(path)
    torch.save({}, path / "pytorch_model.bin")


def _quantised(path: Path) -> None:
    """Files of which one tensor has whole numbers, as formats of quantised weights have."""
    for file in path.glob("*.safetensors"):
        save_file({name: (value * 9).to(torch.int8) for name, value in load_file(file).items()}, file, {"format": "pt"})


def _with_config(**changed: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        told = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(told | changed))

    return change


WRONG: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (_without("config.json"), (), "expected config.json of a model of transformers in it"),
    (_without("tokenizer*"), (), "expected a tokenizer in it, found none"),
    (_without("*.safetensors*"), (), "expected safetensors files in it, found none"),
    (_of_pickles, (), "found pickles, pytorch_model.bin, which are not read"),
    (_with_config(quantization_config={"quant_method": "gptq"}), (), "found them quantised by gptq"),
    (_quantised, (), "expected weights in float32, bfloat16, float16, float64, found "),
    (_without("model-00002*"), (), "the index names this file, which does not exist"),
    (_with_config(model_type="nonsense"), (), "transformers cannot read its config.json"),
    (_with_config(model_type="t5"), (), "transformers makes no causal language model of it"),
    (_with_config(vocab_size=77), (), "its tokenizer has 279 tokens, and its model 77"),
    (_with_config(max_position_embeddings=8), (), "has 8 positions; nearest valid: 8"),
    (_with_config(output_router_logits=True), (), "a loss that the trainer does not add"),
    (_with_config(), (LORA, 'adapters.targets=["q_prj"]'), 'matches no module of the model; nearest valid: "q_proj"'),
    (_with_config(), (LORA, 'adapters.modules_to_save=["lm_haed"]'), 'nearest valid: "lm_head"'),
    (shutil.rmtree, (), "there is no such folder"),
]


def _refused(rank: int, folder: str) -> list[str]:
    path, told = Path(folder) / "model", []
    if rank == 0:
        make_folder(path, "llama")
        for number, (change, settings, _) in enumerate(WRONG):
            other = path.with_name(f"wrong-{number}")
            shutil.copytree(path, other)
            change(other)
            told.append(
                _text(lambda other=other, settings=settings: check_pretrained_folder(config_of(other, *settings), 2))
            )
    dist.barrier()
    # Of the weights all ranks know together.
    for settings in ((), (QLORA,)):
        if rank == 0:
            shutil.copytree(path, path.with_name("torn"), dirs_exist_ok=True)
            index = json.loads((path / "model.safetensors.index.json").read_text())
            lost = "model.layers.1.mlp.up_proj.weight"
            file = path.with_name("torn") / index["weight_map"].pop(lost)
            (path.with_name("torn") / "model.safetensors.index.json").write_text(json.dumps(index))
            save_file({name: value for name, value in load_file(file).items() if name != lost}, file, {"format": "pt"})
        dist.barrier()
        config = config_of(path.with_name("torn"), *settings)
        world = world_of(config, rank, 2, torch.device("cpu"), dist.HashStore())
        told.append(_text(partial(open_pretrained(config).sharded, world.mesh, world.device)))
        dist.barrier()
    return told


def _text(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing is refused"


def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    first, second = pool(2).run(_refused, str(tmp_path), timeout=TIMEOUT)
    for told, (_, _, expected) in zip(first, WRONG, strict=False):
        assert expected in told and "\n" not in told, told
    for told in (*first[-2:], *second):
        assert told.endswith("its weights do not fit its config.json: missing: model.layers.1.mlp.up_proj.weight"), told


def _other_eps(path: Path) -> None:
    _with_config(rms_norm_eps=1e-3)(path)


def _other_template(path: Path) -> None:
    told = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": "{{ messages }}"}))


def _other_weights(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        save_file({name: value * 2 for name, value in load_file(file).items()}, file, {"format": "pt"})


OTHERS = {"config.json": _other_eps, "tokenizer": _other_template, "weights": _other_weights}


def _of_two_hosts(rank: int, folder: str) -> list[str]:
    """What each rank says of a folder that is another one on rank 1."""
    path, told = Path(folder) / "model", []
    if rank == 0:
        make_folder(path, "llama")
        for number, change in enumerate(OTHERS.values()):
            shutil.copytree(path, path.with_name(f"other-{number}"))
            change(path.with_name(f"other-{number}"))
    dist.barrier()
    for number in range(len(OTHERS)):
        config = config_of(path.with_name(f"other-{number}") if rank else path, QLORA)
        world = world_of(config, rank, 2, torch.device("cpu"), dist.FileStore(f"{folder}/store-{number}", 2))
        try:
            opened_on_all(config, world)
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
        dist.barrier()
    return told


def test_another_folder_on_another_host_is_an_error(tmp_path: Path) -> None:
    first, second = pool(2).run(_of_two_hosts, str(tmp_path), timeout=TIMEOUT)
    assert first == [""] * len(OTHERS)
    for name, told in zip(OTHERS, second, strict=True):
        assert f"of the {name} of model.folder: rank 0 has" in told or f"of {name} of model.folder: rank 0 has" in told


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["model.layers=3"], "model.layers = 3: has no effect with model.folder; nearest valid: 4"),
        (["data.tokenizer=bytes"], "has no effect with model.folder, which has a tokenizer of its own"),
        (["adapters.rank=3"], 'has no effect with adapters.method = "none"'),
        ([LORA, 'adapters.targets=["all-linear", "q_proj"]'], 'expected names, or "all-linear" alone'),
        ([LORA, "parallelism.tensor_parallel_degree=2"], 'is not built beside adapters.method = "lora"; nearest'),
        ([QLORA, "parallelism.context_parallel_degree=2"], 'is not built beside adapters.method = "qlora"; nearest'),
        (["parallelism.pipeline_parallel_degree=2"], "a model of a folder has no stages in the trainer"),
        (["sharding.precision.dtype=float16", "sharding.precision.mode=PURE"], "does not scale losses"),
    ],
)
def test_keys_that_have_no_effect_on_a_folder(settings: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["model.folder=somewhere", *settings])
    assert expected in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("setting", [LORA, "adapters.rank=3", "model.dtype=bfloat16", "data.tokenizer=folder"])
def test_keys_that_need_a_folder(setting: str) -> None:
    with pytest.raises(ConfigError, match="model.folder"):
        load_config(None, [setting])


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, settings in (("transformers", ()), ("peft", (LORA,)), ("bitsandbytes", (QLORA,))):
        monkeypatch.setattr("fullshard.train.pretrained.installed", lambda name, missing=missing: name != missing)
        with pytest.raises(ConfigError, match=f"the package {missing} is not installed"):
            open_pretrained(load_config(None, ["model.folder=somewhere", *settings]))


def test_the_rate_is_one_for_trained_weights() -> None:
    rates = {
        method: load_config(None, ["model.folder=x", f"adapters.method={method}"]).optimizer.lr
        for method in ("none", "lora", "qlora")
    }
    assert rates == {"none": 2e-5, "lora": 2e-4, "qlora": 2e-4}
    assert load_config(None, ["model.folder=x", "optimizer.lr=0.5"]).optimizer.lr == 0.5


# ---- the command line --------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"


def _command(folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.slow
@pytest.mark.hang_after(1800)
def test_the_example_trains_adapters_on_the_real_weights_of_smollm2(tmp_path: Path) -> None:
    """As examples/README.md has it: two ranks, three, the folder for other programs, and text."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _command(tmp_path, *torchrun, str(EXAMPLES / "finetune_llama.py"), "--steps", "1")
    _command(tmp_path, "fullshard", "train", str(EXAMPLES / "train_smollm2.toml"))
    run = tmp_path / "runs" / "smollm2-lora"
    resumed = _command(
        tmp_path, "fullshard", "train", "--resume", str(run), "--nproc", "3", "--set", "training.steps=9"
    )
    assert "continuing after step 6" in resumed and "shard=3" in resumed
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[-1]["val_loss"] < records[5]["val_loss"]
    before, after, same, equal = pool(1).run(_real, str(tmp_path), records[0]["samples"], timeout=900)[0]
    # What is printed is the loss before the first update: of the weights as they came.
    assert abs(records[0]["loss"] - before) < 1e-4 and after < before and same and equal
    text = _command(tmp_path, "fullshard", "generate", str(run), "--prompt", "The with statement", "--temperature", "0")
    assert text.startswith("The with statement") and len(text.split()) > 8


def _real(rank: int, folder: str, samples: str) -> tuple[float, float, bool, bool]:
    """Losses of the first batch before and after, by transformers alone; whether these are the run's windows; whether
    the adapters on the base are the merged model."""
    offline()
    import transformers
    from peft import PeftModel

    run = Path(folder) / "runs" / "smollm2-lora"
    os.chdir(folder)
    config = load_config(run / "config.toml")
    pretrained = open_pretrained(config)
    tokens = tokenize(read_corpus(config.data), pretrained.tokenizer, config.data.validation_fraction).train
    keys = config.training
    order = SampleOrder(num_tokens=len(tokens), sequence_length=keys.sequence_length, seed=keys.seed)
    inputs, targets = windows(tokens, order.starts(0, keys.global_batch), keys.sequence_length)
    rows = torch.cat([inputs, targets[:, -1:]], 1)
    losses, logits = [], []
    base = transformers.AutoModelForCausalLM.from_pretrained(pretrained.path, dtype=torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        for model in (base, merged):
            losses.append(float(model(input_ids=rows, labels=rows).loss))
        for model in (merged, PeftModel.from_pretrained(base, run / "adapters")):
            logits.append(model(input_ids=rows[:1]).logits)
    same = order.digest(0, keys.global_batch) == samples
    return losses[0], losses[1], same, tolerance.close(logits[0], logits[1], merged)
