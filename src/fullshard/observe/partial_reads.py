"""`PartialReads`: which numbers a program takes from DTensors that hold only this rank's part of a sum.

`float(p.grad.norm())` and `if p.grad.isnan().any()` give each rank the figure of its own rows, without an error.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import TorchDispatchMode, operation_name

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
# What `.item()`, `float()` and `bool()` come to.
_TO_NUMBER = "aten._local_scalar_dense"


class PartialRead(NamedTuple):
    """One place that reads a part. `what`: the tensor and the operation that made the part of it, such as "gradient of
    head.weight, linalg_vector_norm"; `where`: file, line and function of the first frame outside of torch, or of torch
    itself for its optimizers."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} (at {self.where})"


class PartialReads(TorchDispatchMode):
    """While it is open on this thread, notes in `found` each place that makes a number of a partial DTensor, once.

    named: parameters of the sharded model by name; their gradients are known by them. `found_message`: whether code
    outside of fullshard sent a collective within the forward of a module. Nothing is changed; each operation costs some
    microseconds more.
    """

    # Notes nothing of operations such as `torch.cond`, which are no operations of aten.
    supports_higher_order_operators = True

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._named = list(named)
        self._of: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # by id: what a DTensor was made of
        self.found: list[PartialRead] = []
        self.found_message = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found_message = self.found_message or _is_of_a_forward()
        elif func.namespace != "higher_order" and args and isinstance(args[0], DTensor):
            if operation_name(func) == _TO_NUMBER:
                self._read(args[0])
            elif isinstance(result, DTensor) and (name := self._name(args[0])):
                made = operation_name(func).rpartition(".")[2].lstrip("_")
                self._of[id(result)] = weakref.ref(result), f"{name}, {made}"
        return result

    def _read(self, tensor: DTensor) -> None:
        if any(placement.is_partial() for placement in tensor.placements):
            read = PartialRead(self._name(tensor) or "a DTensor", _where())
            if read not in self.found:
                self.found.append(read)

    def _name(self, tensor: Tensor) -> str:
        """Names `tensor`: a parameter, a gradient, or made of one; "" if that is not known."""
        ref, name = self._of.get(id(tensor), (None, ""))
        if ref is not None and ref() is tensor:
            return name
        for name, parameter in self._named:
            if tensor is parameter:
                return name
            if tensor is parameter.grad:
                return f"gradient of {name}"
        return ""


def _is_of_a_forward() -> bool:
    """Whether the program's own code sends this message, from the forward of a module: no frame of this package is
    between."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def _where() -> str:
    """The innermost frame outside of torch and this package, below which torch's optimizers are named themselves."""
    frame = inspect.currentframe()
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{_TORCH}/optim/") and "optimizer.py" not in file and not inner:
            inner = f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if not file.startswith((_TORCH, _PACKAGE)):
            return inner or f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return inner or "an unknown place"
