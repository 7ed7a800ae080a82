"""The class of the sharded parameters on modules: a DTensor that knows the unit that owns it.

Every operation runs torch's DTensor code, and its results are plain DTensors. It differs where torch's DTensor loses a
value, hangs, or raises an error without a name:

    p.data = value              takes the value; a DTensor silently keeps its rows
    full_tensor, redistribute   before ranks communicate they compare, as for the messages of a step
    F.linear(x, p), x @ p.T     with a plain tensor: the error names the parameter
    copies, pickles             are DTensors, which torch loads without this package

Views (`p.T`, `p.detach()`, and so a state dict) keep the class and refer to their parameter's owner.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .._torch import MIXED, dtensor_like, is_view_of_its_input, local_of, no_torch_function, set_local, take_spec


class Owner:
    """The unit that owns a parameter."""

    # Where a parameter keeps its owner, or a copy of it None.
    ATTRIBUTE = "_fullshard_owner"

    # The ranks of its mesh, as ranks in the default group.
    ranks: tuple[int, ...] = ()

    @abstractmethod
    def name(self) -> str:
        """The parameter's name, as the user's model spells it."""

    @abstractmethod
    def around(self) -> str:
        """The name and class of the unit whose forward unshards it."""

    @abstractmethod
    def before_messages(self, parameter: DTensor, axes: Sequence[int]) -> None:
        """Called before DTensor communicates for `parameter` over these axes of its mesh."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Copies and pickles have no owner.
        return type(None), ()

    @classmethod
    def of(cls, parameter: Tensor) -> Owner | None:
        found = parameter.__dict__.get(cls.ATTRIBUTE)
        return found if isinstance(found, Owner) else None


def claim(parameter: Tensor, owner: Owner | None) -> None:
    """Turn the DTensor `parameter` into a sharded parameter of `owner` (None keeps the current owner)."""
    parameter.__class__ = ShardedParameter
    if owner is not None:
        parameter.__dict__[Owner.ATTRIBUTE] = owner


def set_data(parameter: Tensor, value: Tensor) -> None:
    """`.data = value` as on any tensor: a DTensor then has the new shape but its old rows."""
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


class ShardedParameter(DTensor):
    """See the module. Made by `claim`, which swaps the class, as torch's own conversions do."""

    __slots__ = ()  # swap_tensors compares the slots with those of DTensor
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    # ---- values ------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take the rows of `value`, a DTensor with the same placements. With another dtype or device the parameter is
        converted, as `module.to()` would do; otherwise the values are copied."""
        if not isinstance(self, nn.Parameter):
            set_data(self, value)
            return
        self._refuse_data(value)
        local, new = local_of(self), local_of(value)
        with torch.inference_mode(False), torch.no_grad():
            if new.dtype is local.dtype and new.device == local.device:
                local.copy_(new)  # also for the same memory (`p.data *= x`), so that the write is counted
                return
        set_data(self, value)
        take_spec(self, value)
        set_local(self, new)

    def _refuse_data(self, value: Tensor) -> None:
        found = ""
        if not isinstance(value, DTensor):
            found = f"a plain tensor of shape {tuple(value.shape)}"
        elif value.shape != self.shape:
            found = f"a DTensor of shape {tuple(value.shape)}"
        elif value.device_mesh != self.device_mesh or tuple(value.placements) != tuple(self.placements):
            found = f"one on {value.device_mesh} with placements {tuple(value.placements)}"
        if found:
            raise RuntimeError(
                f"{_name(self)}: expected a DTensor of shape {tuple(self.shape)} with placements "
                f"{tuple(self.placements)} to be assigned to the .data of this sharded parameter, found {found}; use "
                f"load_state_dict, or p.copy_(distribute_tensor(value, p.device_mesh, p.placements)) under "
                f"torch.no_grad()"
            )

    def detach(self) -> Tensor:
        made = super().detach()
        # Also in an optimizer step.
        claim(made, Owner.of(self))
        return made

    # ---- messages ----------------------------------------------------------------------------------------

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        owner = Owner.of(self)
        if owner is not None and placements is not None:
            there = self.placements
            axes = [
                axis
                for axis, wanted in enumerate(placements)
                # Splitting what every rank has needs no message.
                if axis < len(there) and wanted != there[axis] and not there[axis].is_replicate()
            ]
            if axes:
                owner.before_messages(self, axes)
        return super().redistribute(device_mesh, placements, **options)

    # ---- compilers ---------------------------------------------------------------------------------------

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Tensor:
        """The stand-in while a compiler traces. Without this class, its first run would reject the compiled code."""
        made: Tensor = DTensor.__tensor_unflatten__(*args)
        claim(made, None)
        return made

    # ---- copies ------------------------------------------------------------------------------------------

    def _plain(self) -> DTensor:
        """The same tensor as a plain DTensor."""
        plain = dtensor_like(self, local_of(self))
        plain.requires_grad_(self.requires_grad)
        plain.__dict__.update(self.__dict__)
        plain.__dict__.pop(Owner.ATTRIBUTE, None)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            plain = self._plain()
            plain.grad = self.grad
            memo[id(self)] = copy.deepcopy(plain, memo)
        found: Tensor = memo[id(self)]
        return found


def _name(parameter: Tensor) -> str:
    owner = Owner.of(parameter)
    return "a sharded parameter" if owner is None else owner.name()


# ---- operations --------------------------------------------------------------------------------------------------


def name_mixed(on: bool) -> None:
    """Whether operations on sharded parameters pass through `_named`, which adds the name to errors and keeps the class
    of views. On at import. Off, they are as fast as a DTensor's; on, they take half as long again."""
    chosen: Any = _named if on else DTensor.__dict__["__torch_dispatch__"]
    ShardedParameter.__torch_dispatch__ = chosen  # type: ignore[method-assign]


@classmethod  # type: ignore[misc]
def _named(cls: type, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    parameters = list(_sharded_in((args, *kwargs.values()) if kwargs else args))
    try:
        for parameter in parameters:
            # DTensor's path for subclasses is five times slower, and writes to another object, whose version counts.
            parameter.__class__ = DTensor  # type: ignore[assignment]
        result = operation(*args, **(kwargs or {}))
    except RuntimeError as refusal:
        if MIXED not in str(refusal):
            raise
        raise _mixed(parameters, refusal) from refusal
    finally:
        for parameter in parameters:
            parameter.__class__ = ShardedParameter
    if parameters and type(result) is DTensor and _returns_view(operation):
        claim(result, Owner.of(parameters[0]))
    return result


_returns_view = cache(is_view_of_its_input)


def _sharded_in(values: Iterable[Any]) -> Iterator[ShardedParameter]:
    for value in values:
        if type(value) is ShardedParameter:
            yield value
        elif type(value) in (list, tuple):
            yield from _sharded_in(value)


def _mixed(parameters: Iterable[Tensor], refusal: RuntimeError) -> RuntimeError:
    parameters = tuple(parameters)
    names = ", ".join(dict.fromkeys(map(_name, parameters)))
    owner = next((owner for owner in map(Owner.of, parameters) if owner is not None), None)
    around = "its module" if owner is None else owner.around()
    return RuntimeError(
        f"{names}: expected it to be used inside the forward of {around}, which makes it full, found it beside a plain "
        f"tensor where it is sharded ({refusal}); apply fully_shard to its own module before the outer one, or use it "
        f"in a method registered with register_fsdp_forward_method, between unshard() and reshard() of {around}, or in "
        f"fullshard.full_params(model); or make the other tensor a DTensor"
    )


name_mixed(True)
