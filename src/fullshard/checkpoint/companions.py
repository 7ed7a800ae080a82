"""Companions: the files beside the weights without which `from_pretrained` loads nothing: config, generation config,
tokenizer. A checkpoint stores them as bytes, under keys that no program asks for.

    ("__pretrained__", "model", "config.json")                  uint8, of the model whose state is under "model"
    ("__pretrained__", "tokenizer", "tokenizer.json")           uint8, of an object with `save_pretrained`
    ("__pretrained__", "model", "tied")                         a value: {name left out of files: name kept}
    ("__pretrained__", "metrics")                               a value: {name: number} of the save
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..api import original_class
from .manifest import Manifest, is_file_name
from .plan import KeyPath, key_of

ROOM = "__pretrained__"
TIED = "tied"
METRICS = "metrics"
CONFIG = "config.json"
GENERATION = "generation_config.json"
_KINDS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
# A tokenizer has tens of megabytes at most.
_MAX_NBYTES = 200_000_000


class ModelState(dict[str, Any]):
    """The state dict of `model`, which a save asks for its companions. Copies and pickles are plain dicts."""

    def __init__(self, state: Mapping[str, Any], model: nn.Module) -> None:
        super().__init__(state)
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def is_companion(value: object) -> bool:
    """Whether `value` is a tokenizer, a processor or a configuration: it saves files, and has no state."""
    return callable(getattr(value, "save_pretrained", None)) and not hasattr(value, "state_dict")


def files_of(owner: Any) -> dict[str, bytes]:
    """The files that `owner`, a model or an object with `save_pretrained`, would write beside weights; empty for a
    model that is not of transformers. A failure is a warning: training state is worth more than its description."""
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        try:
            if isinstance(owner, nn.Module):
                _save_config(owner, folder)
            else:
                owner.save_pretrained(folder)
        except Exception as error:
            warnings.warn(
                f"the checkpoint has no files of {type(owner).__name__}: its save_pretrained raised "
                f"{type(error).__name__}: {error}; give them to `checkpoint export` with --config",
                stacklevel=2,
            )
            return {}
        return files_in(Path(folder))


def unwrapped(model: Any) -> Any:
    """`model` without torch.compile and activation checkpointing around it."""
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        model = getattr(model, wrapper, model)
    return model


def adapted(model: nn.Module | None) -> Any:
    """`model` without wrappers, if PEFT put adapters into it, or transformers with its `add_adapter`; else None."""
    inner = None if model is None else unwrapped(model)
    is_peft = callable(getattr(inner, "get_base_model", None)) and hasattr(inner, "peft_config")
    return inner if is_peft or getattr(inner, "_hf_peft_config_loaded", False) else None


def base_of(model: Any) -> Any:
    """The model into which PEFT put its adapters: inside of a `PeftModel`, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _save_config(model: Any, folder: str) -> None:
    model = base_of(unwrapped(model))
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [original_class(model).__name__]
    floats = (str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point())
    config.dtype = next(floats, None)
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(folder)


def tied_names(named: Mapping[str, Tensor], model: nn.Module) -> dict[str, str]:
    """{name to leave out: name to keep} of tied tensors: transformers' choice where it has one, else the first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named.items():
        groups.setdefault(id(tensor), []).append(name)
    # {name that is tied to another: that other}
    known = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        name: kept
        for names in groups.values()
        for kept in [next((name for name in names if name not in known), names[0])]
        for name in names
        if name != kept
    }


def files_in(folder: Path) -> dict[str, bytes]:
    """The companions in `folder`, by name."""
    found: dict[str, bytes] = {}
    for path in sorted(path for kind in _KINDS for path in folder.glob(kind)):
        if not path.name.endswith(".index.json") and path.is_file() and path.stat().st_size <= _MAX_NBYTES:
            found[path.name] = path.read_bytes()
    return found


def files_beside(path: Path) -> dict[str, bytes]:
    """The companions in the folder of a checkpoint, `path` or around it; none without a config of transformers."""
    folder = path if path.is_dir() else path.parent
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    return files_in(folder) if isinstance(config, dict) and {"model_type", "architectures"} & config.keys() else {}


def stored_files(paths: Mapping[str, KeyPath], model: str | None) -> dict[str, str]:
    """{file name: key} of the stored companions at `paths`: those of `model` (None: of any), and those of no model."""
    models = {owner_of(path) for path in paths.values() if path[-1] == TIED}
    return {
        str(path[-1]): key
        for key, path in paths.items()
        if path[-1] not in (TIED, METRICS)
        and (model is None or owner_of(path) == model or owner_of(path) not in models)
    }


def write_files(folder: Path, files: Mapping[str, bytes], dtype: str | None) -> list[Path]:
    """Write companions into `folder`; `dtype`: that of the weights, which the config has to say, because
    `from_pretrained` converts to it."""
    written = []
    for name, data in files.items():
        if not is_file_name(name):
            continue
        (folder / name).write_bytes(_with_dtype(data, dtype) if name == CONFIG and dtype else data)
        written.append(folder / name)
    return written


def _with_dtype(data: bytes, dtype: str) -> bytes:
    found = json.loads(data)
    if not isinstance(found, dict):
        return data
    found.pop("torch_dtype", None)
    found["dtype"] = dtype
    for name, part in found.items():
        for key in ("dtype", "torch_dtype"):
            # The parts of a composite model; how a quantiser computes does not matter here.
            if name != "quantization_config" and isinstance(part, dict) and isinstance(part.get(key), str):
                part[key] = dtype
    return (json.dumps(found, indent=2, sort_keys=True) + "\n").encode()


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """The metrics that its save recorded."""
    entry = manifest.values.get(key_of((ROOM, METRICS)))
    held = entry.value if entry is not None and isinstance(entry.value, dict) else {}
    return {str(name): float(value) for name, value in held.items() if isinstance(value, int | float)}


def owner_of(path: KeyPath) -> str:
    """The key under which a state dict had the owner of a stored companion."""
    return key_of(path[1:-1])
