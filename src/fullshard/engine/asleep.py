"""Units whose memory was given away (extras/sleep.py): what refuses to use them, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch import no_torch_function, without_torch_functions
from .optimizer_steps import refuses_steps
from .unit import Unit


def _refuse(what: str, use: str) -> NoReturn:
    raise RuntimeError(
        f"{what}: expected memory, found it asleep (fullshard.sleep) in {use}; call fullshard.wake on all ranks first"
    )


class AsleepTensor(Tensor):
    """The local tensor of a DTensor without memory; each operation raises."""

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
        _refuse(_known_as((*args, *(kwargs or {}).values())), f"{func}")

    __torch_function__ = no_torch_function  # type: ignore[assignment]


class AsleepInPlace(Tensor):
    """The class of a tensor object while its memory is given away: what the program does with it raises."""

    known_as: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AsleepInPlace({self.known_as})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        _refuse(_known_as((*args, *(kwargs or {}).values())), getattr(func, "__name__", str(func)))


def _known_as(values: Sequence[Any]) -> str:
    """The name of the first tensor without memory among `values`."""
    stack: list[Any] = list(values)
    while stack:
        value = stack.pop(0)
        if isinstance(value, AsleepTensor | AsleepInPlace):
            return value.known_as
        if isinstance(value, (list, tuple)):
            stack.extend(value)
    return "a tensor"


_METADATA = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")}


def asleep_in_place(tensor: Tensor, name: str) -> Callable[[], None]:
    """Let uses of the object `tensor` raise, until the result is called."""
    kind = tensor.__class__
    tensor.__class__ = AsleepInPlace
    tensor.__dict__["known_as"] = name

    def awake() -> None:
        tensor.__dict__.pop("known_as", None)
        tensor.__class__ = kind

    return awake


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
    for held in tuple(_held):  # another thread may wake its own
        if any(held.holds(p) for group in optimizer.param_groups for p in group["params"]):
            _refuse(type(optimizer).__name__, "step")
