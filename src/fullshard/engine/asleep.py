"""Units whose memory was given away (extras/sleep.py): what refuses to use them, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch import no_torch_function
from .optimizer_steps import refuses_steps
from .unit import Unit


def _refuse(what: str, use: str) -> NoReturn:
    raise RuntimeError(
        f"{what}: expected memory, found it asleep (fullshard.sleep) in {use}; call fullshard.wake on all ranks first"
    )


class AsleepTensor(Tensor):
    """The tensor of a parameter, gradient, state or buffer without memory; each operation raises."""

    known_as: str

    @staticmethod
    def of(tensor: Tensor, name: str) -> AsleepTensor:
        """One with the shape, strides and dtype of `tensor`."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        asleep = made.as_subclass(AsleepTensor)
        asleep.known_as = name
        return asleep

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AsleepTensor({self.known_as}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        stack: list[Any] = [*args, *(kwargs or {}).values()]
        while stack:
            value = stack.pop(0)
            if isinstance(value, AsleepTensor):
                _refuse(value.known_as, f"{func}")
            if isinstance(value, (list, tuple)):
                stack.extend(value)
        _refuse("a tensor", f"{func}")

    __torch_function__ = no_torch_function  # type: ignore[assignment]


class AsleepUnit:
    """The `opened` of a unit that is asleep."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def check_forward(self) -> NoReturn:
        """Raise, and name it to the other ranks, which wait for this one."""
        unit = self._unit
        try:
            _refuse(unit.record.name, "a forward")
        except RuntimeError as error:
            if unit.root is not None:
                unit.root.companion.failed(error, f"the forward of {unit.record.name}")
            raise

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self._unit.record.name, "full_params, or another use of full parameters")


def refuse_asleep(unit: Unit, use: str) -> None:
    """Raise `RuntimeError` if `unit` is asleep."""
    if isinstance(unit.opened, AsleepUnit):
        _refuse(unit.record.name, use)


class HeldOptimizers:
    """Optimizers with parameters that are asleep: until `release`, steps and state dicts raise."""

    def __init__(self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        self._held = {id(parameter) for parameter in parameters}
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._held |= {id(p) for group in optimizer.param_groups for p in group["params"]}
            name = type(optimizer).__name__
            self._handles += [
                optimizer.register_state_dict_pre_hook(_refusing(name, "state_dict")),
                optimizer.register_load_state_dict_pre_hook(_refusing(name, "load_state_dict")),
            ]
        _held.append(self)

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._held

    def release(self) -> None:
        """They have their memory again."""
        _held.remove(self)
        for handle in self._handles:
            handle.remove()


def _refusing(name: str, use: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        _refuse(name, use)

    return refuse


_held: list[HeldOptimizers] = []


@refuses_steps(_held)
def _refuse_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for held in _held:
        if any(held.holds(p) for group in optimizer.param_groups for p in group["params"]):
            _refuse(type(optimizer).__name__, "step")
