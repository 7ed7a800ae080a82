"""Exports of a run on a model of a folder: a folder for `from_pretrained`, and adapters for `PeftModel`."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import checkpoint
from fullshard.checkpoint.formats import export_full
from fullshard.train.folder_tokenizer import FolderTokenizer, quiet_transformers
from fullshard.train.pretrained import Pretrained
from fullshard.train.process import World

MODEL, ADAPTERS = "model", "adapters"


def export(found: Pretrained, model: nn.Module, run_dir: Path, world: World) -> list[str]:
    """Write the trained `model`, with merged adapters, and these alone; returns the names of the folders. Collective.

    A base in 4 bits is not what adapters are merged into: they are merged into the weights of the folder, which the
    ranks read again, each its rows.
    """
    names = [MODEL, ADAPTERS] if found.adapters else [MODEL]
    if world.rank == 0:
        for name in names:  # of a run that was complete before, and continued
            shutil.rmtree(run_dir / name, ignore_errors=True)
    world.total([0.0])
    words = found.tokenizer.inner
    if found.adapters:
        state, _ = checkpoint.get_state_dict(model)
        export_full(state, run_dir / ADAPTERS, "hf", tokenizer=words)
    if found.config.adapters.method == "qlora":
        model = _on_the_folder(found, model, world)
    state, _ = checkpoint.get_state_dict(model)
    export_full(state, run_dir / MODEL, "hf", tokenizer=words, merge_adapters=found.adapters)
    return names


def _on_the_folder(found: Pretrained, model: nn.Module, world: World) -> nn.Module:
    """The trained parameters of `model` on the base of the folder. Both are cut in the same way."""
    whole = found.prepared(world.mesh, world.device, quantised=False).model
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                other = trained.pop(name)
                assert isinstance(parameter, DTensor) and isinstance(other, DTensor)
                parameter.to_local().copy_(other.to_local())
    assert not trained, trained.keys()
    return whole


def load_exported(path: Path) -> tuple[nn.Module, FolderTokenizer]:
    """The model and the tokenizer of a folder that `export` wrote, on the CPU."""
    transformers = quiet_transformers()
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    words = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return model.eval(), FolderTokenizer(words, model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
