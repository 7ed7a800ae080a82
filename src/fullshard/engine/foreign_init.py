"""Initialisers of other packages, by module: `_init_weights` of transformers' models, the resets of PEFT's LoRA layers.

Their modules have no `reset_parameters()` of their own (RMSNorm, rotary embeddings); the model above initialises them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

# transformers' mark on tensors that its initialisers leave alone.
_KEEP = "_is_hf_initialized"


def foreign_initialisers(top: nn.Module) -> dict[nn.Module, Callable[[], object]]:
    """What initialises each module below `top` that belongs to a model of transformers; empty without such a model.

    The nearest model above decides. A LoRA layer initialises its adapters itself, because they have to begin as zero.
    """
    pretrained, adapters = _class("transformers.modeling_utils", "PreTrainedModel"), _class(*_TUNER)
    found: dict[nn.Module, Callable[[], object]] = {}
    if pretrained is None:
        return found
    configs = {name: one for module in top.modules() for name, one in _peft_configs(module)} if adapters else {}

    def walk(module: nn.Module, model: Any) -> None:
        model = module if isinstance(module, pretrained) else model
        if adapters is not None and isinstance(module, adapters):
            inner = module.get_base_layer()
            found.update({each: _nothing for each in module.modules()})
            found[module] = lambda: _reset_adapters(module, configs)
            walk(inner, model)
            return
        if model is not None and module not in found:
            found[module] = lambda: _init_weights(model, module)
        elif model is None and _peft_configs(module):
            found[module] = _nothing  # owns nothing, and answers for the model inside
        for child in module.children():
            walk(child, model)

    walk(top, None)
    return found


@contextmanager
def kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """transformers' initialisers leave `tensors` alone inside."""
    marked = [tensor for tensor in tensors if not hasattr(tensor, _KEEP)]
    for tensor in marked:
        setattr(tensor, _KEEP, True)
    try:
        yield
    finally:
        for tensor in marked:
            tensor.__dict__.pop(_KEEP, None)


_TUNER = ("peft.tuners.tuners_utils", "BaseTunerLayer")


def _class(module: str, name: str) -> Any:
    """The class, if the package is imported at all."""
    return getattr(sys.modules.get(module), name, None)


def _nothing() -> None:
    pass


def _init_weights(model: Any, module: nn.Module) -> None:
    # The functions of torch.nn.init heed the mark inside, for models whose code is not transformers' own.
    guard: Callable[[], AbstractContextManager[object]] = getattr(
        sys.modules.get("transformers.initialization"), "guard_torch_init_functions", nullcontext
    )
    with guard():
        getattr(model, "_init_weights")(module)  # noqa: B009  the one private name of transformers', of each model


def _peft_configs(module: nn.Module) -> Iterable[tuple[str, Any]]:
    found = getattr(module, "peft_config", None)
    return found.items() if isinstance(found, dict) else ()


def _reset_adapters(layer: Any, configs: dict[str, Any]) -> None:
    for name in getattr(layer, "r", ("default",)):
        ways = getattr(configs.get(name), "init_lora_weights", None)
        if not hasattr(layer, "reset_lora_parameters") or ways not in (True, False, "gaussian"):
            raise ValueError(
                f"init: expected a LoRA adapter whose init_lora_weights is True, False or 'gaussian', found {name!r} "
                f"in {type(layer).__name__} with {ways!r}; pass init=, a function that initialises its module"
            )
        layer.reset_lora_parameters(name, ways)
