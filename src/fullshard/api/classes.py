"""The class of a sharded module: how it is made, what it adds to the original, and where others find the original.

As in torch, `fully_shard` gives a module of class `Block` the class `FSDPBlock`. Libraries that look up something by
class expect `Block`:

    who                                 by                            finds the original because
    transformers, weights in files      type(module).__name__         calls from here are made in `original_classes`
    save_pretrained: architectures,     type(model)                   `checked_save` calls it in `original_classes`
      names in files, auto_map; PEFT's
      base_model_class
    transformers, recorded outputs      str(type(model)), in forward  `_introduce` registers the sharded class too
    pipelines, exporters, model cards   type(model), at any moment    the caller enters `original_classes`
    isinstance, a method, a class attr  the class                     the sharded class is a subclass
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch import MIXED, TorchFSDPModule, current_backward
from ..engine import unit_of
from ..engine.foreign import note_shards_read
from ..policy.arguments import expect_module
from ..schedule import Full
from .module import FSDPModule

# ---- making it -------------------------------------------------------------------------------------------------------

# One sharded class per class, so that types compare equal and pickle names agree. Weak, because classes defined in
# functions must be freed with their last module.
_SHARDED_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()
# Two threads that shard modules of one class at the same moment (tests' ranks, servers) would each make one, and the
# blocks of one model would have two classes. Making a class calls `__init_subclass__` of users, which may come back.
_MAKING = threading.RLock()


def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """FSDP<Original>: a subclass of `FSDPModule` and `original`, made once per class."""
    with _MAKING:
        made = _SHARDED_CLASSES.get(original)
        if made is None:
            made = _SHARDED_CLASSES[original] = _subclass(original)
            _introduce(original, made)
        return made


def _subclass(original: type[nn.Module]) -> type[nn.Module]:
    members = {"__module__": original.__module__, **unknown_methods(FSDPModule, original)}
    members |= {**named_methods(original, FSDPModule), **checked_save(original)}
    name = f"FSDP{original.__name__}"
    # Listing nn.Module puts torch's class, which serves `isinstance` only, after it: its methods then never come
    # between the module's class and the bases of that class.
    bases: tuple[type, ...] = tuple(dict.fromkeys((FSDPModule, original, nn.Module, TorchFSDPModule)))
    if _first_has_memory(original):
        return type(name, bases, members)
    return _ordered(type(original))(name, (original, *(base for base in bases if base is not original)), members)


def _first_has_memory(cls: type) -> bool:
    """Whether instances of `cls` may become those of a subclass whose first base is `FSDPModule`.

    Python compares, in both classes, the base above the one that gave instances their `__dict__`: `object`, unless
    `cls` begins with empty slots.
    """
    while cls.__base__ is not None and _sizes(cls) == _sizes(cls.__base__):
        cls = cls.__base__
    above = cls.__base__ or cls
    # A base with memory of its own comes first in any order.
    return above is object or above.__basicsize__ > object.__basicsize__


def _sizes(cls: type) -> tuple[int, int, int, int]:
    return cls.__basicsize__, cls.__itemsize__, cls.__dictoffset__, cls.__weakrefoffset__


def _ordered(kind: type[type]) -> type[type]:
    """A metaclass below `kind` for a class whose first base is the original, which gives it the original's memory. In
    the order of methods `FSDPModule` comes first nevertheless, as in every sharded class.

    For originals that begin with a base of empty slots (`ABC`, `Generic`, `Protocol`): Python refuses to give their
    instances a class whose first base has another memory. torch's FSDP2 raises `TypeError` for them.
    """

    class Ordered(kind):  # type: ignore[misc, valid-type]
        def mro(cls) -> list[type]:
            inherited = list(cls.__bases__[0].__mro__)
            if FSDPModule in inherited:  # a class derived from the sharded one
                return list(super().mro())
            inherited.insert(inherited.index(nn.Module) + 1, TorchFSDPModule)
            return [cls, FSDPModule, *inherited]

    return Ordered


# ---- finding the original --------------------------------------------------------------------------------------------


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` had before `fully_shard`; its class, if it is not sharded."""
    cls = type(module)
    return cls.__mro__[FSDPModule._orig_cls_mro_index] if isinstance(module, FSDPModule) else cls


@contextlib.contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """While it is open, `model` and the sharded modules below it have the classes that they had before `fully_shard`.

    For libraries that look something up by class, such as the pipelines of transformers:

        with fullshard.original_classes(model):
            recognise = transformers.pipeline("automatic-speech-recognition", model=model, ...)

    Parameters stay as they are, and forwards work as ever. Methods of `FSDPModule` are missing meanwhile; do not
    convert the model. Blocks may be nested. Raises `TypeError` if `model` is no module.
    """
    expect_module("model", model)
    changed = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, _ in changed:
            module.__class__ = original_class(module)  # type: ignore[assignment]
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _introduce(original: type[nn.Module], made: type[nn.Module]) -> None:
    """Register the sharded class where forwards of transformers look up which outputs they can record: without it,
    `output_hidden_states=True` has no effect on a model that is a unit."""
    registry = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if isinstance(registry, dict) and (known := dict.get(registry, str(original))) is not None:
        dict.__setitem__(registry, str(made), known)


# ---- methods ---------------------------------------------------------------------------------------------------------
# Methods other than `forward` that compute with sharded parameters raise an error that names the method.
#
# Only `forward` and methods given to `register_fsdp_forward_method` unshard. Unsharding for every method would be
# wrong: an all-gather is collective, and a method may be meant for one rank. Methods that succeed run unchanged.


def named_methods(original: type[nn.Module], taken: type) -> dict[str, Callable[..., Any]]:
    """The public methods of `original` that neither `nn.Module` nor `taken` has, wrapped for its sharded class."""
    found: dict[str, Callable[..., Any]] = {}
    for cls in original.__mro__:
        if cls.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, attribute in vars(cls).items():
            public = not name.startswith("_") and name not in found
            if public and inspect.isfunction(attribute) and not hasattr(nn.Module, name) and not hasattr(taken, name):
                if name != "forward" and not inspect.isgeneratorfunction(attribute):
                    found[name] = _named(attribute)
    return found


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            unit = unit_of(self)
            # If this unit's parameters are full, the error is about another unit.
            if unit is None or unit.record.full is Full.FULL or MIXED not in str(error):
                raise
            if current_backward() != -1:
                note_shards_read(error, [unit])  # it was called in a forward, and is recomputed
                raise
            name = method.__name__
            raise RuntimeError(
                f"{type(self).__name__}.{name}: expected to compute with full parameters, found those of "
                f"{unit.record.name} sharded, because a method other than forward gathers nothing; after fully_shard, "
                f"call register_fsdp_forward_method(module, {name!r}) on the sharded modules whose methods compute, or "
                f"module.unshard() before and module.reshard() after, or use fullshard.full_params(model)"
            ) from error

    return call


# ---- save pretrained -------------------------------------------------------------------------------------------------
# `save_pretrained` of transformers and PEFT raises if it would write shards.
#
# They pass `state_dict()` to safetensors, which needs plain tensors and gets DTensors: torch's FSDP2 fails with
# "Attempted to access the data pointer on an invalid python storage" after it wrote the folder and its config.json.
# Gathering here would hang the many programs that save on one rank only.

_NAME = "save_pretrained"


def checked_save(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods that the sharded class of `original` gets: `save_pretrained`, if it has one.

    It calls the module's own method, with `original_classes`, if the tensors are plain: with a full `state_dict`, or
    inside `full_params`. Inside `full_params`, on a rank with sharded parameters and `is_main_process=False`, it does
    nothing. With a `config.distributed_config` transformers gathers itself. Otherwise, and where PEFT would find no
    adapters, it raises `RuntimeError` on each calling rank, before anything is written.
    """
    save = getattr(original, _NAME, None)
    if not callable(save):
        return {}
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        state = kwargs.get("state_dict", bound.get("state_dict"))
        if state is not None:
            sharded = _sharded(state.items())
        elif getattr(getattr(self, "config", None), "distributed_config", None) is not None:
            sharded = None
        else:
            sharded = _sharded(self.named_parameters())
            unit = unit_of(self)
            if sharded and unit is not None and unit.opened is not None and bound.get("is_main_process") is False:
                return None
        if sharded is not None:
            raise RuntimeError(
                f"{_NAME}: expected plain full tensors, found {sharded} sharded; on every rank enter `with "
                f"fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):` and save in it on the first "
                f"rank, or pass state_dict=get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                f"cpu_offload=True)) of torch.distributed.checkpoint.state_dict, taken on every rank"
            )
        if (wrapped := _wrapped_adapters(self)) is not None:
            raise RuntimeError(
                f"{_NAME}: expected adapters that PEFT finds, found {wrapped} in a wrapper (activation checkpointing, "
                f"torch.compile), of whose adapters it would write none; call on every rank "
                f'fullshard.checkpoint.formats.export_full(fullshard.checkpoint.get_state_dict(model)[0], folder, "hf")'
            )
        with original_classes(self):
            return save(self, *args, **kwargs)

    return {_NAME: save_pretrained}


def _wrapped_adapters(model: nn.Module) -> str | None:
    """A module with adapters of PEFT in a wrapper, whose part of the name PEFT does not take off; or None."""
    if not hasattr(model, "peft_config"):
        return None
    wrappers = {"_checkpoint_wrapped_module", "_orig_mod"}
    names = (name for name, module in model.named_modules() if hasattr(module, "base_layer"))
    return next((name for name in names if wrappers.intersection(name.split("."))), None)


def _sharded(tensors: Iterable[tuple[str, Any]]) -> str | None:
    """The name of the first sharded tensor, or None."""
    return next((name for name, tensor in tensors if isinstance(tensor, DTensor)), None)


# ---- unknown methods -------------------------------------------------------------------------------------------------
# torch's class is a base for `isinstance` alone. A method that another torch adds to it would be inherited, and would
# act on state that is not there.


def unknown_methods(known: type, original: type[nn.Module] = nn.Module) -> dict[str, Any]:
    """Methods and properties that raise, for those that torch's class has now and neither `known` nor `original`
    has."""
    found: dict[str, Any] = {}
    for name, attribute in vars(TorchFSDPModule).items():
        acts = callable(attribute) or hasattr(attribute, "__get__")
        # What Python keeps on every class has two underlines and is no function.
        special = name.startswith("__") and name.endswith("__") and not inspect.isfunction(attribute)
        if acts and not special and name not in vars(known) and not hasattr(original, name):
            refuse = _unknown(name)
            found[name] = refuse if callable(getattr(TorchFSDPModule, name)) else property(refuse)
    return found


def _unknown(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}.{name}: expected a method of FSDPModule that fullshard has, found one that torch "
            f"{torch.__version__} added, which would act on state that torch's fully_shard makes; leave the call out, "
            f"or use a version of fullshard whose documents name it"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
