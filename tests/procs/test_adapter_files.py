"""Exports of models under PEFT, against the files that PEFT and transformers write of the same model in one process."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointError
from fullshard.checkpoint.formats import export_full
from fullshard.cli import main as command
from tests.harness.behaviours import behaviour
from tests.harness.families import family
from tests.harness.models import seeded
from tests.harness.packages import llama, offline
from tests.harness.pool import pool
from tests.procs.test_published_files import differences, tensors_in

TIMEOUT = 110.0


def _lora(base: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options
    return get_peft_model(base, LoraConfig(r=3, init_lora_weights=False, **options))


def _two(base: Any) -> Any:
    from peft import LoraConfig

    model = _lora(base)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    return model


def _integrated(base: Any) -> Any:
    from peft import LoraConfig

    base.add_adapter(LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))
    return base


def _ia3(base: Any) -> Any:
    from peft import IA3Config, get_peft_model

    modules = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return get_peft_model(base, IA3Config(**modules, task_type="CAUSAL_LM", init_ia3_weights=False))


def _with(**options: Any) -> Callable[[Any], Any]:
    return lambda base: _lora(base, **options)


Build = tuple[Callable[[], Any], Callable[[Any], Any]]  # the base, and what puts adapters into it
TIED, UNTIED = (lambda: llama(tied=True)), (lambda: llama(tied=False))
EVERYDAY: dict[str, Build] = {
    "lora": (TIED, _lora),
    "no task": (UNTIED, _with(task_type=None)),  # the configuration names the class of the base
    "modules to save": (UNTIED, _with(modules_to_save=["lm_head"])),
    "experts": (lambda: family("mixtral"), _with(target_parameters=["mlp.experts.down_proj"])),
    "integrated": (TIED, _integrated),
}
MORE: dict[str, Build] = {
    "two adapters": (UNTIED, _two),
    "dora": (TIED, _with(use_dora=True)),
    "embedding": (UNTIED, _with(target_modules=["embed_tokens", "q_proj"])),
    "tied head": (TIED, _with(target_modules=["lm_head", "q_proj"])),
    "bias": (lambda: family("gpt_neox"), _with(target_modules=["dense"], bias="lora_only")),
    "tokens": (UNTIED, _with(trainable_token_indices=[3, 5])),
    "ia3": (UNTIED, _ia3),
    "gpt_neox": (lambda: family("gpt_neox"), _with(target_modules=["query_key_value"])),
}


def built(kind: str) -> Any:
    base, put = (EVERYDAY | MORE)[kind]
    return seeded(lambda: put(base()))


def _shard(model: Any) -> Any:
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == 2 and type(module[0]).__name__.endswith("Layer"):
            for layer in module:
                fully_shard(layer)
    return fully_shard(model)


def from_checkpoint(stored: Path, target: Path, expected: Path, *words: str) -> list[str]:
    """What differs between the files that the command line writes of a checkpoint, and those of `export_full`."""
    assert command(["checkpoint", "export", str(stored), str(target), "--to", "hf", "--json", *words]) == 0
    ours, theirs = ({str(p.relative_to(one)): p for p in one.rglob("*") if p.is_file()} for one in (target, expected))
    said = [f"{name} on one side" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        same = _comparable(ours[name]) == _comparable(theirs[name])
        said += [] if same else [f"{name}: other bytes"]
    return said


def _comparable(file: Path) -> Any:
    """The bytes of a file, of JSON its values: PEFT writes sets as lists, in any order."""
    if file.suffix != ".json":
        return file.read_bytes()
    found = json.loads(file.read_text())
    return {key: sorted(value, key=str) if isinstance(value, list) else value for key, value in found.items()}


def _export(rank: int, kind: str, folder: str) -> dict[str, Any]:
    offline()
    from peft import PeftModel

    warnings.simplefilter("ignore")
    path, whole = Path(folder), built(kind)
    has_base = hasattr(whole, "get_base_model")
    if rank == 0:
        (path / "references").mkdir()
        whole.save_pretrained(path / "references" / "alone")
        if has_base:
            merged = copy.deepcopy(whole).merge_and_unload()
            merged.save_pretrained(path / "references" / "merged")
    model = _shard(copy.deepcopy(whole))
    state, _ = checkpoint.get_state_dict(model)
    export_full(state, path / "alone", "hf")
    if has_base:
        export_full(state, path / "merged", "hf", merge_adapters=True)
    checkpoint.save({"model": state, "step": 3}, checkpoint_id=path / "ours")
    # The live model is as it was.
    again = {name: p.full_tensor() for name, p in model.named_parameters()}
    found: dict[str, Any] = {"same": all(torch.equal(again[name], p) for name, p in whole.named_parameters())}
    dist.barrier()
    if rank == 0:
        ours, theirs = path / "alone", path / "references" / "alone"
        names = [
            sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file()) for one in (ours, theirs)
        ]
        found["files"] = [] if names[0] == names[1] else names
        found["stored"] = from_checkpoint(path / "ours", path / "stored", path / "alone")
        if has_base:
            found["stored merged"] = from_checkpoint(
                path / "ours", path / "stored merged", path / "merged", "--merge-adapters"
            )
        for file in sorted(theirs.rglob("*.safetensors")):
            one, other = tensors_in((ours / file.relative_to(theirs)).parent), tensors_in(file.parent)
            same = one.keys() == other.keys() and all(torch.equal(one[name][1], other[name][1]) for name in other)
            found[file.parent.name] = [] if same else sorted(one.keys() ^ other.keys()) or ["other values"]
        for file in sorted(theirs.rglob("adapter_config.json")):
            one, other = (_comparable(folder / file.relative_to(theirs)) for folder in (ours, theirs))
            found["config"] = {key: one[key] for key in one if one[key] != other.get(key)}
        tokens = torch.arange(3, 12)[None]
        with torch.no_grad():
            expected = whole.eval()(input_ids=tokens).logits
        if has_base:
            found["merged"] = differences(path / "merged", path / "references" / "merged")
            back = type(merged).from_pretrained(path / "merged").eval()
            under = PeftModel.from_pretrained((EVERYDAY | MORE)[kind][0](), path / "alone").eval()
            with torch.no_grad():
                found["loads merged"] = torch.equal(
                    back(input_ids=tokens).logits, merged.eval()(input_ids=tokens).logits
                )
                found["loads alone"] = torch.equal(under(input_ids=tokens).logits, expected)
    dist.barrier()
    return found


@pytest.mark.slow
@behaviour(
    "PEFT: a sharded model's adapters are exported as PEFT writes them, or merged into the files of the base model",
    area="packages",
    torch="none",
    reason="with torch a rank holds the whole model",
)
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [*EVERYDAY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_adapters_are_exported_alone_and_merged(kind: str, tmp_path: Path) -> None:
    first, *others = pool(2).run(_export, kind, str(tmp_path), timeout=TIMEOUT)
    wrong = {name: value for name, value in first.items() if value not in ([], {}, True)}
    assert not wrong and first["same"] is True
    assert all(other == {"same": True} for other in others)


def _refused(rank: int, folder: str) -> list[str]:
    """What is said where adapters cannot be exported so."""
    from peft import PromptTuningConfig, get_peft_model

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    path, said = Path(folder), list[str]()

    def refused(model: Any, name: str, **options: Any) -> None:
        state, _ = checkpoint.get_state_dict(model)
        try:
            export_full(state, path / name, "hf", **options)
            said.append("nothing")
        except CheckpointError as error:
            said.append(str(error))
        dist.barrier()

    refused(_shard(llama(tied=True)), "plain", merge_adapters=True)
    prompt = get_peft_model(llama(tied=True), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    refused(_shard(prompt), "prompt")
    quantised = _lora(llama(tied=False))
    layer = quantised.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.uint8), requires_grad=False)
    refused(_shard(quantised), "quantised", merge_adapters=True)
    model = _lora(llama(tied=False))
    model.get_base_model().model.norm.requires_grad_(True)
    model = _shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused(model, "twice")
        said += [str(one.message) for one in caught if "exporting adapters" in str(one.message)]
        refused(model, "twice")
    wrapped = _lora(llama(tied=False))
    layers = wrapped.get_base_model().model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    wrapped = _shard(wrapped)
    with fullshard.full_params(wrapped):
        try:
            wrapped.save_pretrained(path / "wrapped")  # which would write an empty file
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    refused(wrapped, "seen through")
    assert not [file for name in ("plain", "prompt", "quantised", "wrapped") for file in (path / name).rglob("*.json")]
    assert rank != 0 or len(tensors_in(path / "seen through")) == 8
    return said


@pytest.mark.slow
def test_what_cannot_be_exported_says_what_to_do(tmp_path: Path) -> None:
    first, second = pool(2).run(_refused, str(tmp_path), timeout=TIMEOUT)
    plain, prompt, quantised, nothing, warning, twice, wrapped, seen = first
    assert "q_proj in a wrapper" in wrapped and "export_full" in wrapped and seen == "nothing"
    assert "merge_adapters=True, found" in plain and "get_state_dict" in plain
    assert "PROMPT_TUNING" in prompt and "full_params(model" in prompt
    assert "q_proj.base_layer.weight: uint8" in quantised and "merge_and_unload()" in quantised
    assert nothing == "nothing" and "norm.weight" in warning and "modules_to_save" in warning
    assert "adapter_model.safetensors exists" in twice and "remove it first" in twice
    assert second == [plain, prompt, quantised, nothing, twice, wrapped, seen]
