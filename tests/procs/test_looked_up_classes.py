"""What transformers, PEFT, accelerate, Lightning and diffusers look up by the class of a model: a row each.

`in_block`: the library is called by the user, in `fullshard.original_classes`; the others find the original anyhow.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard
from fullshard.checkpoint import get_state_dict
from tests.harness.families import family
from tests.harness.models import seeded
from tests.harness.packages import llama, offline, sharded
from tests.harness.pool import pool


def _base() -> Any:
    return sharded(fully_shard, llama(tied=False))


def _saved(model: Any, folder: Path) -> dict[str, Any]:
    """The first configuration that the model's own `save_pretrained` writes."""
    with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
    dist.barrier()
    found: dict[str, Any] = json.loads(next(folder.glob("*config.json")).read_text())
    return found


def _recorded(model: Any, folder: Path) -> object:
    """transformers records outputs of a model whose class it knows, also where that model is a unit."""
    del model, folder
    plain = llama(tied=False).model.eval()
    unit = llama(tied=False).model.eval()
    for one in (plain, unit):
        one.set_attn_implementation("eager")
    for layer in unit.layers:
        fully_shard(layer)
    fully_shard(unit)
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        one, other = (m(tokens, output_hidden_states=True, output_attentions=True) for m in (plain, unit))
    counts = [[len(found.hidden_states or ()), len(found.attentions or ())] for found in (one, other)]
    return counts[0] == counts[1] == [3, 2] or counts


def _tower(model: Any, folder: Path) -> object:
    """LLaVA takes hidden states of its vision tower, here a unit."""
    del model, folder
    plain, unit = family("llava"), family("llava")
    fully_shard(unit.model.vision_tower)
    fully_shard(unit)
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[5, *[60] * 4, 7]])
    with torch.no_grad():
        one, other = (m(input_ids=tokens, pixel_values=image).logits for m in (plain, unit))
    return torch.allclose(one, other, atol=1e-5) or "other logits"


def _generated(model: Any, folder: Path) -> object:
    """`generate` reads the class for its kinds of caches and modes."""
    del folder
    for name in ("generate",):
        fullshard.register_fsdp_forward_method(model, name)
    options = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True)
    one, other = (m.eval().generate(torch.arange(3, 9)[None], **options) for m in (llama(tied=False), model))
    return torch.equal(one.sequences, other.sequences) and len(one.hidden_states) == len(other.hidden_states)


def _remote_code(model: Any, folder: Path) -> object:
    """`auto_map` of a class of one's own is what `trust_remote_code` imports."""
    import importlib.util

    path = folder.parent / "modeling_mine.py"
    if dist.get_rank() == 0:
        path.write_text("from transformers import LlamaForCausalLM\n\n\nclass Mine(LlamaForCausalLM):\n    pass\n")
    dist.barrier()
    spec = importlib.util.spec_from_file_location("modeling_mine", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["modeling_mine"] = module
    spec.loader.exec_module(module)
    module.Mine.register_for_auto_class("AutoModelForCausalLM")
    made = fully_shard(module.Mine(model.config))
    found = _saved(made, folder)
    return [found["auto_map"]["AutoModelForCausalLM"], *found["architectures"]] == ["modeling_mine.Mine", "Mine"]


def _adapter_config(model: Any, folder: Path) -> object:
    """PEFT writes the class of the base, from which `AutoPeftModel` loads."""
    del model
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(llama(tied=False), LoraConfig(r=2, target_modules=["q_proj"]))
    fully_shard(adapted.base_model.model)
    return _saved(fully_shard(adapted), folder)["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"


class ConfigMixin:
    """As diffusers documents it: `save_pretrained` writes the name of the class as `_class_name`, and `from_pretrained`
    of a pipeline looks that name up."""

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory).mkdir()
        (Path(save_directory) / "config.json").write_text(json.dumps({"_class_name": self.__class__.__name__}))


class Denoiser(nn.Module, ConfigMixin):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output


def _diffusers(model: Any, folder: Path) -> object:
    del model
    return _saved(fully_shard(seeded(Denoiser)), folder)["_class_name"] == "Denoiser"


def _companions(model: Any, folder: Path) -> object:
    """The configuration in a checkpoint, also under `torch.compile`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which torch's own imports raise
        compiled = torch.compile(model)
    fullshard.checkpoint.save({"m": get_state_dict(compiled)[0]}, checkpoint_id=folder)
    with fullshard.checkpoint.formats.open_source(folder) as source:
        config: dict[str, Any] = json.loads(source.companions()["config.json"])
    return config["architectures"] == ["LlamaForCausalLM"]


def _trainer(model: Any, folder: Path) -> object:
    """The Trainer asks for labels and whether the class returns a loss."""
    del folder
    from transformers.utils import can_return_loss, find_labels

    both = [type(model), type(model).__mro__[2]]
    return find_labels(both[0]) == find_labels(both[1]) and can_return_loss(both[0]) == can_return_loss(both[1])


def _auto(model: Any, folder: Path) -> object:
    """AutoModel's tables are by configuration; its class is fullshard's by `isinstance`."""
    del folder
    import transformers

    kind = transformers.AutoModelForCausalLM._model_mapping[type(model.config)]  # type: ignore[attr-defined]
    return isinstance(model, kind) and model.config_class is model.config.__class__ and not model.is_custom_code()


def _lightning(model: Any, folder: Path) -> object:
    del model, folder
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.linear = nn.Linear(2, 2)

    made = fully_shard(Module().linear), fully_shard(Module())
    return isinstance(made[1], lightning.LightningModule) and not made[1].hparams


def _pipeline(model: Any, folder: Path) -> object:
    """Pipelines compare the name of the class with tables, and log an error or take another path."""
    del folder
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.pipelines import TextGenerationPipeline

    pipe: Any = object.__new__(TextGenerationPipeline)
    pipe.model, pipe.task, said = model, "text-generation", list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.pipelines.base")
    logger.addHandler(handler)
    pipe.check_model_type(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    logger.removeHandler(handler)
    return said == []


def _by_name(model: Any, folder: Path) -> object:
    """accelerate and the Trainer find the class of a block by its name."""
    del folder
    from accelerate.utils.dataclasses import get_module_class_from_name
    from transformers.trainer_pt_utils import get_module_class_from_name as of_transformers

    name = type(model.model.layers[0]).__name__
    found = get_module_class_from_name(model, "LlamaDecoderLayer"), of_transformers(model, "LlamaDecoderLayer")
    return name == "LlamaDecoderLayer" and all(one is type(model.model.layers[0]) for one in found)


def _status(model: Any, folder: Path) -> object:
    del folder
    from peft import get_model_status

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter(_lora())
    return get_model_status(model).base_model_type == "LlamaForCausalLM"


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj"])


def _registry(model: Any, folder: Path) -> object:
    """A dict by class, a comparison with `is`, and a class that is pickled by its name."""
    del folder
    kind = type(llama(tied=False))
    return {kind: 1}.get(type(model)) == 1 and type(model) is kind and pickle.loads(pickle.dumps(type(model))) is kind


class Row(NamedTuple):
    run: Callable[[Any, Path], object]
    in_block: bool = False


ROWS = {
    "transformers: recorded outputs of a unit": Row(_recorded),
    "transformers: hidden states of a tower": Row(_tower),
    "transformers: generate": Row(_generated),
    "transformers: auto_map and architectures": Row(_remote_code),
    "transformers: Trainer's labels": Row(_trainer),
    "transformers: AutoModel": Row(_auto),
    "transformers: the configuration in a checkpoint": Row(_companions),
    "peft: base_model_class": Row(_adapter_config),
    "diffusers: _class_name": Row(_diffusers),
    "lightning: LightningModule": Row(_lightning),
    "transformers: pipelines": Row(_pipeline, in_block=True),
    "accelerate, transformers: a block by its name": Row(_by_name, in_block=True),
    "peft: base_model_type": Row(_status, in_block=True),
    "a dict by class, pickles": Row(_registry, in_block=True),
}


def _look(rank: int, name: str, folder: str) -> list[object]:
    """The row's answer; of one for a block, first what it says without."""
    offline()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    row, model = ROWS[name], _base()
    if not row.in_block:
        return [row.run(model, Path(folder) / "out")]
    found: list[object] = []
    if row.run is not _status:
        found.append(row.run(model, Path(folder) / "out"))
    with fullshard.original_classes(model):
        found.append(row.run(model, Path(folder) / "out"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_library_finds_the_original(name: str, tmp_path: Path) -> None:
    for found in pool(2).run(_look, name, str(tmp_path), timeout=110.0):
        *without, inside = found
        assert inside is True, found
        assert all(one is not True for one in without)  # or the row needs no block
