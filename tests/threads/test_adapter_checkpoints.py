"""`fullshard checkpoint export` of models under PEFT, in one process: what it writes, what it refuses and why.

References are PEFT's own `save_pretrained`, and `save_pretrained` of the model that its `merge_and_unload` returns.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointMismatch
from fullshard.checkpoint.adapters import FILE
from fullshard.checkpoint.formats import Chosen, convert, export_full, open_source
from fullshard.cli import main as command
from tests.harness.families import family
from tests.harness.models import seeded
from tests.harness.packages import llama, offline
from tests.procs.test_adapter_files import from_checkpoint
from tests.procs.test_published_files import tensors_in

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`",
    "ignore:.is_gradient_checkpointing. is deprecated",
    "ignore:Model has `tie_word_embeddings=True`",
)


def _lora(base: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "r": 3} | options
    return get_peft_model(base, LoraConfig(init_lora_weights=options.pop("init", False), **options))


def _base() -> Any:
    return llama(tied=False)


def _scaled() -> Any:
    """Factors that no configuration has."""
    model = _lora(_base())
    model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 0.375)
    return model


def _merged() -> Any:
    """Weights that contain an adapter already."""
    model = _lora(_base())
    model.merge_adapter()
    return model


def _mixture() -> Any:
    """Two active adapters, and a third one that is not."""
    from peft import LoraConfig

    model = _lora(_base())
    for name in ("second", "third"):
        model.add_adapter(name, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def _weighted() -> Any:
    model = _mixture()
    model.add_weighted_adapter(["default", "third"], [0.5, 0.25], "sum", combination_type="cat")
    model.set_adapter("sum")
    return model


def _patterns() -> Any:
    ranks, alphas = {"layers.0.self_attn.q_proj": 5}, {"down_proj": 11}
    return _lora(_base(), use_rslora=True, rank_pattern=ranks, alpha_pattern=alphas)


def _pissa() -> Any:
    """Initial values that are computed of the base, and change it."""
    return _lora(_base(), init="pissa")


def _half() -> Any:
    return _lora(_base().to(torch.bfloat16))


def _classifier() -> Any:
    offline()
    import transformers

    base = seeded(lambda: transformers.LlamaForSequenceClassification(_base().config))
    return _lora(base, task_type="SEQ_CLS")


def _wrapped() -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = _lora(_base())
    layers = model.base_model.model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    return model


def _experts() -> Any:
    return _lora(family("mixtral"), target_parameters=["mlp.experts.gate_up_proj"], use_rslora=True)


def _several() -> Any:
    """All at once: a tied head, a saved module, an embedding's rows, decomposed weights."""
    return _lora(
        llama(tied=True),
        use_dora=True,
        modules_to_save=["norm"],
        trainable_token_indices=[3, 5],
        target_modules=["k_proj", "up_proj"],
    )


EVERYDAY: dict[str, Callable[[], Any]] = {"scaled": _scaled, "mixture": _mixture, "half": _half, "wrapped": _wrapped}
MORE: dict[str, Callable[[], Any]] = {
    "merged": _merged,
    "weighted": _weighted,
    "patterns": _patterns,
    "pissa": _pissa,
    "classifier": _classifier,
    "experts": _experts,
    "several": _several,
}


def _saved(model: Any, folder: Path) -> None:
    state, _ = checkpoint.get_state_dict(model)
    checkpoint.save({"model": state, "step": 3}, checkpoint_id=folder, no_dist=True)


def _references(model: Any, folder: Path) -> None:
    model = copy.deepcopy(model)
    layers = model.base_model.model.model.layers
    for number, layer in enumerate(layers):  # PEFT finds no adapters in wrappers
        layers[number] = getattr(layer, "_checkpoint_wrapped_module", layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder / "alone")
        model.merge_and_unload().save_pretrained(folder / "merged")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*EVERYDAY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_a_checkpoint_has_all_that_the_files_of_adapters_need(kind: str, tmp_path: Path) -> None:
    model = (EVERYDAY | MORE)[kind]()
    _references(model, tmp_path)
    _saved(model, tmp_path / "ours")
    assert from_checkpoint(tmp_path / "ours", tmp_path / "a", tmp_path / "alone") == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_full(checkpoint.get_state_dict(model)[0], tmp_path / "live", "hf")
    assert tensors_in(tmp_path / "live").keys() == tensors_in(tmp_path / "alone").keys() != set()
    words = ["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "m"), "--to", "hf", "--merge-adapters"]
    assert command([*words, "--json"]) == 0
    ours, theirs = tensors_in(tmp_path / "m"), tensors_in(tmp_path / "merged")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name][1], theirs[name][1])]
    configs = [json.loads((tmp_path / one / "config.json").read_text()) for one in ("m", "merged")]
    assert configs[0]["architectures"] == configs[1]["architectures"] and configs[0]["dtype"] == configs[1]["dtype"]


def _export(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    code = command(["checkpoint", "export", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A checkpoint without the configuration, as earlier versions and other programs save it; PEFT's files beside."""
    model = _lora(_base())
    _references(model, tmp_path)
    _base().save_pretrained(tmp_path / "base")
    checkpoint.save({"model": dict(model.state_dict()), "step": 3}, checkpoint_id=tmp_path / "ours", no_dist=True)
    return tmp_path / "ours"


def test_without_the_configuration_it_says_what_to_pass(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = former.parent
    words = [former, folder / "out", "--to", "hf"]
    choice = ["--only", "model.*", "--strip", "model."]
    code, _, text = _export(*words, "--only", "model.*", capsys=capsys)
    assert code == 2 and "--adapter-config PATH" in text and "--config FOLDER" in text
    assert "--only 'model.*' --strip model." in text and "base_layer" in text
    given = ["--adapter-config", folder / "alone"]
    code, _, text = _export(*words, *choice, *given, capsys=capsys)
    assert code == 2 and "no config.json" in text and "--config FOLDER" in text
    assert not (folder / "out").exists()
    given += ["--config", folder / "base"]
    code, out, text = _export(*words, *choice, *given, capsys=capsys)
    assert code == 0 and "as adapters, 3 file(s)" in out and "missing" not in out
    assert from_checkpoint(former, folder / "again", folder / "alone", *map(str, choice + given)) == []
    merged = [*choice, "--adapter-config", folder / "alone" / "adapter_config.json", "--config", folder / "base"]
    assert _export(former, folder / "m", "--to", "hf", "--merge", *merged, capsys=capsys)[0] == 0
    one, other = tensors_in(folder / "m"), tensors_in(folder / "merged")
    assert one.keys() == other.keys() and all(torch.equal(one[name][1], other[name][1]) for name in one)


def test_a_wrong_configuration_is_named(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = former.parent
    config = json.loads((folder / "alone" / "adapter_config.json").read_text())
    words = [former, folder / "out", "--to", "hf", "--only", "model.*", "--strip", "model."]
    words += ["--config", folder / "base"]

    def said(change: dict[str, Any], *more: str, name: str = "default") -> str:
        path = folder / "changed" / ("" if name == "default" else name) / "adapter_config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config | change))
        code, _, text = _export(*words, "--adapter-config", folder / "changed", *more, capsys=capsys)
        path.unlink()
        assert code in (1, 2) and not list(folder.glob("out/*.safetensors"))
        return text

    assert "lora_A.default.weight is (4, 24) by the configuration, (3, 24) in the checkpoint" in said({"r": 4})
    assert "unexpected: base_model.model.model.layers.0.mlp.down_proj" in said({"target_modules": ["q_proj"]})
    assert "missing: " in said({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "--merge-adapters")
    assert "missing: base_model.model.model.layers.0.mlp.down_proj.lora_A.other.weight" in said({}, name="other")
    assert "NOTHING" in said({"peft_type": "NOTHING"})
    assert "megatron_config" in said({"megatron_config": {"a": 1}, "megatron_core": "antigravity"})
    assert "PROMPT_TUNING, whose file PEFT computes" in said({"peft_type": "PROMPT_TUNING"})


def test_what_is_tied_in_the_configuration_alone_is_not_merged(tmp_path: Path) -> None:
    """Two values under names that the configuration makes one parameter: a merge into either would lose the other."""
    model = _lora(llama(tied=True), target_modules=["lm_head"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["base_model.model.model.embed_tokens.weight"] += 1
    _saved(model, tmp_path / "tied")
    with open_source(tmp_path / "tied") as source:
        files = source.companions()
    checkpoint.save(state, checkpoint_id=tmp_path / "untied", no_dist=True)
    with open_source(tmp_path / "untied") as source:
        with pytest.raises(CheckpointMismatch, match=r"embed_tokens.weight = .*two values"):
            convert(source, tmp_path / "out", "hf", companions=files, merge_adapters=True)
        convert(source, tmp_path / "alone", "hf", companions=files)
    assert not (tmp_path / "out").exists() and (tmp_path / "alone" / "adapter_model.safetensors").exists()


class Own(nn.Module):
    """A base that nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x).relu())
        return output


def test_a_base_of_ones_own_is_passed_as_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _lora(seeded(Own), target_modules=["first"], task_type=None)
    _saved(model, tmp_path / "ours")
    code, _, text = _export(tmp_path / "ours", tmp_path / "out", "--to", "hf", capsys=capsys)
    assert code == 2 and "test_adapter_checkpoints.Own" in text and "model=peft_model" in text
    with torch.device("meta"):
        skeleton = _lora(Own(), target_modules=["first"], task_type=None)
    with open_source(tmp_path / "ours") as opened:
        source = Chosen(opened, only=["model.*"], strip="model.")
        files = convert(source, tmp_path / "alone", "hf", model=skeleton)
        convert(source, tmp_path / "merged", "hf", model=skeleton, merge_adapters=True)
    model.save_pretrained(tmp_path / "expected")
    assert (tmp_path / "alone" / "adapter_model.safetensors") in files
    one, other = tensors_in(tmp_path / "alone"), tensors_in(tmp_path / "expected")
    assert one.keys() == other.keys() and all(torch.equal(one[name][1], other[name][1]) for name in one)
    plain = model.merge_and_unload().state_dict()
    found = {name: tensor for name, (_, tensor) in tensors_in(tmp_path / "merged").items()}
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


def test_base_and_adapters_are_never_written_together(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = former.parent
    plain = {name: tensor for name, tensor in _lora(_base()).state_dict().items()}
    inside = {name.removeprefix("base_model.model."): tensor for name, tensor in plain.items()}
    for number, state in enumerate((plain, inside)):
        with pytest.raises(CheckpointMismatch, match="get_state_dict took of the PeftModel"):
            export_full(state, folder / f"full {number}", "hf")
    export_full(plain, folder / "full.pt", "torch")
    # Files with these names, of any program: refused, or read with the configuration.
    words = [folder / "full.pt", folder / "out", "--to", "hf", "--allow-torch-save"]
    assert _export(*words, capsys=capsys)[0] == 2
    assert _export(*words, "--config", folder / "base", capsys=capsys)[0] == 2
    given = ["--config", folder / "base", "--adapter-config", folder / "alone"]
    assert _export(*words, *given, capsys=capsys)[0] == 0
    assert _export(*words[:1], folder / "x", "--to", "dcp", words[-1], *given[2:], capsys=capsys)[0] == 2
    checkpoint.save({"w": torch.ones(2)}, checkpoint_id=folder / "plain", no_dist=True)
    code, _, text = _export(folder / "plain", folder / "out", "--to", "hf", "--merge-adapters", capsys=capsys)
    assert code == 2 and "leave --merge-adapters" in text
    assert not list(folder.glob("full */*.safetensors")) and not list(folder.glob("out/model*.safetensors"))


def test_a_module_called_like_those_of_peft_is_a_module(tmp_path: Path) -> None:
    """Names alone are no adapters: an original needs something beside it."""
    checkpoint.save({"a.base_layer.weight": torch.ones(2)}, checkpoint_id=tmp_path / "ours", no_dist=True)
    with open_source(tmp_path / "ours") as source:
        assert len(convert(source, tmp_path / "out", "hf")) == 1


def test_what_else_trains_is_named_and_a_tokenizer_comes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Words:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")

    model = _lora(_base())
    model.base_model.model.model.norm.requires_grad_(True)
    state, _ = checkpoint.get_state_dict(model)
    checkpoint.save({"model": state, "words": Words()}, checkpoint_id=tmp_path / "ours", no_dist=True)
    code, out, text = _export(tmp_path / "ours", tmp_path / "out", "--to", "hf", capsys=capsys)
    assert code == 0 and "model.norm.weight" in text and "modules_to_save" in text and "missing" not in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    with pytest.warns(UserWarning, match="modules_to_save"):
        export_full(state, tmp_path / "live", "hf", tokenizer=Words())
    assert {path.name for path in (tmp_path / "live").iterdir()} == names
    # A copy in our own format keeps the configuration.
    words = [str(tmp_path / "copy"), "--only", "model.*", "--strip", "model."]
    assert command(["checkpoint", "convert", str(tmp_path / "ours"), *words]) == 0
    assert from_checkpoint(tmp_path / "copy", tmp_path / "back", tmp_path / "out") == []


def test_damaged_descriptions_are_refused(tmp_path: Path) -> None:
    _saved(_lora(_base()), tmp_path / "ours")
    with open_source(tmp_path / "ours") as opened:
        source = Chosen(opened, only=["model.*"], strip="model.")
        files = source.companions()
        for text in (b"{}", b"[]", b'{"configs": {}, "active": []}', b'{"configs": {"a": {}}, "active": ["b"]}'):
            with pytest.raises(checkpoint.CheckpointDamaged, match=FILE):
                convert(source, tmp_path / "out", "hf", companions=files | {FILE: text})


@pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`")
@pytest.mark.parametrize("kind", ["OFTConfig", "HiraConfig"])
def test_what_peft_computes_of_values_is_not_merged(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The indices of OFT are no state; on the meta device its merge would leave the base as it was."""
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = peft.get_peft_model(_base(), config)
    _saved(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "alone")
    assert from_checkpoint(tmp_path / "ours", tmp_path / "a", tmp_path / "alone") == []
    code, _, text = _export(tmp_path / "ours", tmp_path / "m", "--to", "hf", "--merge-adapters", capsys=capsys)
    assert code == 2 and "q_proj" in text and "adapters alone" in text
    assert not list(tmp_path.glob("m/*.safetensors"))


@pytest.mark.slow
def test_adapters_on_a_base_in_4_bits_are_exported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    _base().save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map={"": "cpu"}, quantization_config=config)
    model = _lora(base)
    model.save_pretrained(tmp_path / "alone")
    _saved(model, tmp_path / "ours")
    # The model is built without its quantisation, which PEFT's card mentions.
    assert from_checkpoint(tmp_path / "ours", tmp_path / "a", tmp_path / "alone") == ["README.md: other bytes"]
    code, _, text = _export(tmp_path / "ours", tmp_path / "m", "--to", "hf", "--merge-adapters", capsys=capsys)
    assert code == 2 and "expected a base of floating-point weights" in text and "merge_and_unload()" in text
