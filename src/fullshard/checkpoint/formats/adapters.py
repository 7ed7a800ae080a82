"""Models under PEFT as files: the adapters alone, as PEFT writes them, or merged into the base model.

What belongs to an adapter, and how it is merged, PEFT's own code says: it is run on stand-ins without memory for the
names, and layer by layer for values.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api import original_class
from ..companions import base_of, files_of, tied_names, unwrapped, write_files
from ..errors import CheckpointMismatch
from ..plan import Box, whole
from ..state import dtype_name, dtype_of, named_tensors, plain_name
from .source import Source, TensorInfo, place

# ---- adapters alone --------------------------------------------------------------------------------------------


def adapter_keys(model: Any, infos: Mapping[str, TensorInfo]) -> list[str]:
    """The keys of a state dict that PEFT writes into files of adapters. May ask whether a file is on the hub, as
    `save_pretrained` does: one rank is enough. Raises `CheckpointMismatch`."""
    from peft import get_peft_model_state_dict

    names = list(model.peft_config) if hasattr(model, "get_base_model") else model.active_adapters()
    refuse_prompts({name: {"peft_type": model.peft_config[name].peft_type} for name in names})
    stand_ins = {key: _on_meta(info) for key, info in infos.items()}
    key_of = {id(stand_in): key for key, stand_in in stand_ins.items()}
    chosen: dict[str, None] = {}
    plain = _plain(model, _on_meta)
    for name in names:
        for stored, tensor in get_peft_model_state_dict(plain, state_dict=stand_ins, adapter_name=name).items():
            if id(tensor) not in key_of:
                raise CheckpointMismatch(
                    "exporting adapters: expected tensors that PEFT stores as they are, found",
                    [f"{stored}: computed of others"],
                    "enter fullshard.full_params(model, rank0_only=True) and call model.save_pretrained in it",
                )
            chosen[key_of[id(tensor)]] = None
    left = [plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    left = [name for name in left if name in infos and name not in chosen]
    if left:
        warnings.warn(
            f"exporting adapters: {left[0]} and {len(left) - 1} other parameter(s) train and are no part of the "
            f"adapters, so PEFT does not write them; name their modules in modules_to_save, or export with "
            f"merge_adapters=True",
            stacklevel=2,
        )
    return list(chosen)


def refuse_prompts(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `CheckpointMismatch` if one of `configs`, by the name of the adapter, puts none into layers."""
    from peft import PeftType, PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kinds = {name: PeftType(config["peft_type"]) for name, config in configs.items()}
    prompts = [
        name for name, kind in kinds.items() if issubclass(PEFT_TYPE_TO_CONFIG_MAPPING[kind], PromptLearningConfig)
    ]
    if prompts:
        raise CheckpointMismatch(
            "exporting adapters: expected adapters in layers, found",
            [f"{name}: {kinds[name].value}, whose file PEFT computes" for name in prompts],
            "with the model in memory, enter fullshard.full_params(model, rank0_only=True, offload_to_cpu=True) on "
            "every rank and call model.save_pretrained(folder) in it on the first",
        )


def write_adapters(
    folder: Path, model: Any, tensors: dict[str, Tensor], companions: Mapping[str, bytes] | None = None
) -> list[Path]:
    """Let PEFT write `tensors`, full ones by their keys in the state dict of `model`, with its configuration, and
    `companions` beside them.

    Everything is written elsewhere and moved at the end, the configuration last. Returns the files. Raises
    `FileExistsError` if there are adapters already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        plain: Any = _plain(model, _on_meta)
        plain.save_pretrained(made, state_dict=tensors)
        files = [path for path in sorted(Path(made).rglob("*")) if path.is_file()]
        files.sort(key=lambda path: path.suffix == ".json")
        targets = [folder / path.relative_to(made) for path in files]
        taken = [path for path in targets if path.exists() and path.name != "README.md"]
        if taken:
            raise FileExistsError(f"{taken[0]} exists: choose a folder without adapters, or remove it first")
        for path, target in zip(files, targets, strict=True):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target.with_name(f".{target.name}.new"))
            os.replace(target.with_name(f".{target.name}.new"), target)
    return targets + write_files(folder, companions or {}, None)


# ---- merged ----------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A layer with adapters: its module; the prefix of its tensors in the state dict, and in the merged model."""

    module: nn.Module
    inside: str
    outside: str


class Merged(Source):
    """The state of a model under PEFT, `inner`, with its active adapters merged, as `merge_and_unload` does.

    `model`: the merged model, on the meta device. `read` computes one layer at a time and keeps its tensors until they
    are read; each can be read once.
    """

    def __init__(self, inner: Source, peft_model: Any) -> None:
        self.inner, self.kind, self.path = inner, inner.kind, inner.path
        self.values = inner.values
        refuse_quantised((plain_name(name), dtype_name(p.dtype)) for name, p in peft_model.named_parameters())
        base = base_of(peft_model)
        prefix = "" if base is peft_model else "base_model.model."
        layers = {layer.outside: layer for layer in _layers(base, prefix)}
        self.model: Any = _plain(base, _on_meta)
        for layer in layers.values():
            name = layer.outside.rstrip(".")
            try:
                merged = _merged(self.model.get_submodule(name))
            except Exception as error:
                raise CheckpointMismatch(
                    f"merging adapters: expected layers that PEFT merges on stand-ins without values, found {name}",
                    [f"{type(error).__name__}: {error}"],
                    "export the adapters alone; where PEFT can merge them, PeftModel.from_pretrained(base, folder)"
                    ".merge_and_unload() does",
                ) from error
            _set_submodule(self.model, name, merged)
        for name in ("peft_config", "_hf_peft_config_loaded"):
            self.model.__dict__.pop(name, None)
        named = named_tensors(self.model)
        self.tensors = {k: TensorInfo((k,), dtype_name(t.dtype), tuple(t.shape)) for k, t in named.items()}
        self._layer_of = {
            name: layer for name in named for outside, layer in layers.items() if name.startswith(outside)
        }
        self.tied = tied_names(named, self.model)
        # A merged layer whose weight is also at another place, such as the table of a tied head.
        self._same = {kept: name for name, kept in self.tied.items() if name in self._layer_of}
        self._prefix = prefix
        self._made: dict[str, dict[str, Tensor]] = {}

    def companions(self, model: str | None = None) -> dict[str, bytes]:
        return files_of(self.model)

    def inputs(self, order: Iterable[str]) -> list[str]:
        return self.inner.inputs(dict.fromkeys(key for name in order for key in self._keys(name)))

    def _keys(self, name: str) -> list[str]:
        name = self._same.get(name, name)
        layer = self._layer_of.get(name)
        if layer is None:
            return [self._prefix + name]
        return [layer.inside + inner for inner in named_tensors(layer.module)]

    def read(self, key: str, box: Box | None = None) -> Tensor:
        name = self._same.get(key, key)
        layer = self._layer_of.get(name)
        if layer is None:
            return self.inner.read(self._prefix + name, box)
        made = self._made.pop(layer.outside, None) or self._values_of(layer)
        full = made.pop(name)
        made = {other: tensor for other, tensor in made.items() if other in self.tensors and other not in self.tied}
        if made:
            self._made[layer.outside] = made
        return full if box is None else place(full, whole(tuple(full.shape)), box)

    def _values_of(self, layer: _Layer) -> dict[str, Tensor]:
        held = named_tensors(layer.module)
        full = {id(held[name]): self.inner.read(layer.inside + name).clone() for name in held}
        # Buffers that no state dict has are on every rank.
        module = _plain(layer.module, lambda tensor: full.get(id(tensor), tensor))
        if absent := _without_values(module):
            raise CheckpointMismatch(
                "merging adapters: expected all values of a layer in the checkpoint, found some that PEFT computes",
                [f"{layer.outside}{name}" for name in absent],
                "merge from memory: export_full(state, folder, merge_adapters=True); or export the adapters alone",
            )
        return {layer.outside + name: tensor.detach() for name, tensor in named_tensors(_merged(module)).items()}

    def value(self, key: str) -> Any:
        return self.inner.value(key)

    def close(self) -> None:
        self.inner.close()


def _without_values(layer: nn.Module) -> list[str]:
    """Tensors of `layer` on the meta device: no state dict has them, and where the model was built again, nothing has
    computed them. With them a merge may be wrong without an error: an index on the meta device selects nothing."""
    found = []
    for path, module in layer.named_modules():
        if "trainable_tokens_original" in path:  # what an unmerge puts back
            continue
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            inner = name not in ("_parameters", "_buffers", "_modules")
            if inner and any(isinstance(one, Tensor) and one.is_meta for one in values):
                found.append(f"{path}.{name}" if path else name)
    return found


def _layers(base: nn.Module, prefix: str) -> Iterator[_Layer]:
    """The outermost modules that PEFT replaced."""
    found: list[str] = []
    for name, module in base.named_modules():
        unloads = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
        if unloads and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
            plain = plain_name(f"{name}.")
            yield _Layer(module, prefix + plain, plain)


def _merged(layer: Any) -> nn.Module:
    """Merge the active adapters into `layer`, in place, as PEFT does."""
    with torch.no_grad():
        if hasattr(layer, "unload_and_optionally_merge_module"):
            made = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge(safe_merge=False, adapter_names=None)
            made = layer.get_base_layer()
    assert isinstance(made, nn.Module)
    return made


def _plain(module: nn.Module, take: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `module` and of all below it without hooks and wrappers, each of its original class, with the tensors
    that `take` gives for parameters and buffers. Modules and parameters that are at several places are so in the copy.

    Of modules in wrappers (activation checkpointing, torch.compile) PEFT itself finds no adapters, and says nothing.
    """
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, Tensor | None] = {id(None): None}

    def taken(tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and id(tensor) not in tensors:
            made = take(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=False)
            tensors[id(tensor)] = made
        return tensors[id(tensor)]

    def copied(original: nn.Module) -> nn.Module:
        original = unwrapped(original)
        if original not in modules:
            kind = original_class(original)
            made = modules[original] = object.__new__(kind)
            for name, value in vars(original).items():
                if "_hooks" in name and isinstance(value, dict):
                    made.__dict__[name] = OrderedDict()
                elif not name.startswith("_fullshard"):
                    # PEFT changes lists of a layer when it merges.
                    made.__dict__[name] = copy.copy(value) if isinstance(value, (list, set, dict)) else value
            made.__dict__["_parameters"] = {name: taken(p) for name, p in original._parameters.items()}
            made.__dict__["_buffers"] = {name: taken(b) for name, b in original._buffers.items()}
            children = original._modules.items()
            made.__dict__["_modules"] = {name: None if m is None else copied(m) for name, m in children}
        return modules[original]

    return copied(module)


def _set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    *parents, last = path.split(".")
    for name in parents:
        model = getattr(model, name)
    setattr(model, last, module)


def refuse_quantised(dtypes: Iterable[tuple[str, str]]) -> None:
    """Raise `CheckpointMismatch` if one of `dtypes`, by the name of a tensor of a model, is not floating-point."""
    odd = [f"{name}: {dtype}" for name, dtype in dtypes if not dtype_of(dtype).is_floating_point]
    if odd:
        raise CheckpointMismatch(
            "exporting with merge_adapters=True: expected a base of floating-point weights, found",
            odd,
            "export the adapters alone, and merge them into the base in its own dtype: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload()",
        )


def _on_meta(like: TensorInfo | Tensor) -> Tensor:
    dtype = like.dtype if isinstance(like, Tensor) else dtype_of(like.dtype)
    return torch.empty(tuple(like.shape), dtype=dtype, device="meta")
