"""A checkpoint of a model under PEFT as files, in one process: the model is built again on the meta device, from what
the checkpoint keeps of it, and PEFT's own code then says what its files contain."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..adapters import FILE, PREFIX, Adapters, names_of_adapters
from ..companions import CONFIG, adapted
from ..errors import CheckpointMismatch
from ..plan import Box
from ..state import dtype_of, named_tensors
from .adapters import Merged, adapter_keys, refuse_prompts, refuse_quantised
from .source import Source, TensorInfo
from .writings import model_of, published

_ITSELF = (
    "build the model as for training, on the meta device, and pass it: "
    'fullshard.checkpoint.formats.convert(source, target, "hf", model=peft_model)'
)


class AdapterSource(Source):
    """The adapters in `inner`, the state of `peft_model`, under the names that they have there."""

    def __init__(self, inner: Source, peft_model: Any) -> None:
        self.inner, self.kind, self.path, self.model = inner, inner.kind, inner.path, peft_model
        named = named_tensors(peft_model)
        keys = adapter_keys(peft_model, {key: TensorInfo((key,), *_facts(one)) for key, one in named.items()})
        # Those of a quantised base have statistics below their names.
        odd = (key for key in inner.tensors if key not in named and not _is_below(key, named))
        _compare(inner, peft_model, keys, odd)
        self.tensors = {key: inner.tensors[key] for key in keys}
        self.values = {}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        return self.inner.read(key, box)

    def value(self, key: str) -> Any:
        raise KeyError(key)

    def close(self) -> None:
        self.inner.close()


def as_files(source: Source, files: Mapping[str, bytes], *, merge: bool, model: nn.Module | None) -> Source:
    """`source`, the state of one model, as what files have of it: under the names of `save_pretrained`, of adapters
    those alone, or merged into the base.

    `files`: the companions of the model. `model`: the model, on any device, if it cannot be built from them. Raises
    `CheckpointMismatch` if that is impossible; base and adapters are never written together.
    """
    under = adapted(model)
    if model is None and FILE in files:
        under = _built(source, Adapters.from_bytes(files[FILE], str(source.path)), files)
    if under is None and (names := names_of_adapters(source.tensors)):
        _refuse(source, names)
    if under is None and merge:
        raise CheckpointMismatch(
            f"{source.path}: expected the state of a model with adapters of PEFT to merge, found",
            ["names without adapters"],
            "leave --merge-adapters (merge_adapters=True) out",
        )
    if under is None:
        return published(source, model if model is not None else model_of(files))
    if not merge:
        return AdapterSource(source, under)
    refuse_quantised((key, info.dtype) for key, info in source.tensors.items())
    named = named_tensors(under)
    _compare(source, under, named, (key for key in source.tensors if key not in named))
    _compare_ties(source, named)
    merged = Merged(source, under)
    return published(merged, merged.model)


def refuse_adapters(what: str, names: Iterable[str]) -> None:
    """Raise `CheckpointMismatch` if `names`, which would be written as safetensors, are of base and adapters."""
    if found := names_of_adapters(names):
        raise CheckpointMismatch(
            f"{what}: expected names of a plain model, found those of a model under PEFT, which nothing loads",
            found,
            "pass the state that fullshard.checkpoint.get_state_dict took of the PeftModel itself, without renaming; "
            'the format "torch" keeps the names',
        )


def _refuse(source: Source, names: list[str]) -> NoReturn:
    start, _, _ = names[0].partition(PREFIX)
    choice = f", and --only '{start}*' --strip {start}" if start and start != names[0] else ""
    raise CheckpointMismatch(
        f"{source.path}: expected the names of a plain model, found those of a model under PEFT, and no configuration "
        f"of its adapters (checkpoints keep it when the state is that of get_state_dict(peft_model))",
        names,
        f"pass --adapter-config PATH, PEFT's adapter_config.json or its folder, and --config FOLDER, that of the base "
        f"model{choice}; or {_ITSELF}; --to torch and --to dcp keep these names",
    )


# ---- building the model ----------------------------------------------------------------------------------------


def _built(source: Source, adapters: Adapters, files: Mapping[str, bytes]) -> Any:
    """The model under PEFT that `adapters` and the configuration among `files` describe, on the meta device."""
    if importlib.util.find_spec("peft") is None:
        raise CheckpointMismatch(
            f"{source.path}: expected PEFT, which writes and merges adapters, found", ["no such package"], "install it"
        )
    base = model_of(files)
    if base is None:
        raise CheckpointMismatch(
            f"{source.path}: expected a base that can be built: a class of transformers, whose code alone is run, and "
            f"its config.json; found",
            [
                adapters.base
                or (f"{CONFIG} of another kind, or without architectures" if CONFIG in files else f"no {CONFIG}")
            ],
            f"give --config FOLDER, that of the base model; or {_ITSELF}",
        )
    try:
        refuse_prompts(adapters.configs)
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return _with_adapters(base, adapters, is_peft=any(key.startswith(PREFIX) for key in source.tensors))
    except CheckpointMismatch:
        raise
    except Exception as error:
        raise CheckpointMismatch(
            f"{source.path}: expected adapters that PEFT puts into {type(base).__name__}, found",
            [f"{type(error).__name__}: {error}"],
            _ITSELF,
        ) from error


def _with_adapters(base: Any, adapters: Adapters, *, is_peft: bool) -> Any:
    from peft import get_peft_model

    model = base
    for number, (name, config) in enumerate(adapters.configs.items()):
        made = _config_of(config, initialises=False)
        if not is_peft:
            base.add_adapter(made, name)
        elif number == 0:
            model = get_peft_model(base, made, name, low_cpu_mem_usage=True)
        else:
            model.add_adapter(name, made, low_cpu_mem_usage=True)
    for name, config in adapters.configs.items():
        model.peft_config[name] = _config_of(config)
    tuner = model.base_model if is_peft else model
    tuner.set_adapter(adapters.active[0] if len(adapters.active) == 1 else adapters.active)
    for name, module in model.named_modules():
        if name in adapters.scaling:
            module.scaling.update(adapters.scaling[name])
        if name in adapters.merged:
            module.merged_adapters = list(adapters.merged[name])
    if adapters.trained is not None:
        trained = frozenset(adapters.trained)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
    return model


def _config_of(config: Mapping[str, Any], *, initialises: bool = True) -> Any:
    """PEFT's object for a configuration; without initial values, which are computed of weights and of data."""
    from peft import PeftConfig

    if config.get("megatron_config"):
        raise ValueError("megatron_config names code to import")
    # PEFT extends lists of its configurations.
    options = {key: copy.deepcopy(value) for key, value in config.items() if key != "runtime_config"}
    if not initialises:
        options |= {key: False for key in ("init_lora_weights", "init_weights", "inference_mode") if key in options}
    build: Any = PeftConfig.from_peft_type
    return build(**options)


# ---- comparing it with the checkpoint --------------------------------------------------------------------------


def _facts(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _is_below(key: str, names: Mapping[str, object]) -> bool:
    return any(key[:end] in names for end, letter in enumerate(key) if letter == ".")


def _compare(source: Source, model: Any, keys: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise `CheckpointMismatch` unless `source` has `keys` of `model` in their shapes; and give the tensors of `model`
    the dtypes that are stored."""
    named, problems = named_tensors(model), [f"unexpected: {key}" for key in unexpected]
    for key in keys:
        info = source.tensors.get(key)
        if info is None:
            problems.append(f"missing: {key}")
        elif info.shape != (shape := tuple(named[key].shape)):
            problems.append(f"shape: {key} is {shape} by the configuration, {info.shape} in the checkpoint")
        elif not named[key].is_meta:
            problems.append(f"device: {key} is on {named[key].device}, not on the meta device")
        else:
            named[key].data = torch.empty(shape, dtype=dtype_of(info.dtype), device="meta")
    if problems:
        raise CheckpointMismatch(
            f"{source.path}: expected the tensors that base and adapters have by their configurations, found",
            problems,
            "pass those with which it was trained: --adapter-config PATH (a folder, where an adapter is not named "
            "default) and --config FOLDER; choose a part of the state with --only, --skip and --strip",
        )


def _compare_ties(source: Source, named: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointMismatch` if tensors are one parameter by the configuration and not in the checkpoint, or the
    reverse: a merge changes both or one."""
    groups: dict[int, list[str]] = {}
    for key, tensor in named.items():
        groups.setdefault(id(tensor), []).append(key)
    problems = []
    for first, *others in groups.values():
        value = source.read(first) if others else None
        problems += [f"{first} = {other}: two values" for other in others if not _equal(value, source.read(other))]
    tied = {(one, other) for keys in groups.values() for one in keys for other in keys}
    problems += [f"{one} = {other}: one parameter" for one, other in source.tied.items() if (one, other) not in tied]
    if problems:
        raise CheckpointMismatch(
            f"{source.path}: expected the tied parameters of the configuration of the base, found", problems, _ITSELF
        )


def _equal(one: Tensor | None, other: Tensor) -> bool:
    # Bytes, because NaN is not equal to itself.
    return one is not None and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
