"""The class of the sharded parameters that stand on modules: a DTensor that knows whose it is.

In every operation it is the DTensor that it was (the same code of torch runs), and everything computed from it is a
plain DTensor. It differs where torch's DTensor loses a value, waits for ever or complains without a name:

    p.data = value              takes the value over; a DTensor keeps its rows, and nobody is told
    full_tensor, redistribute   where ranks have to send, they are compared first, as messages of a step are
    F.linear(x, p), x @ p.T     beside a plain tensor: the error has the name of the parameter
    copies, pickles             are DTensors, which torch loads without this package

Views (`p.T`, `p.detach()`, and so a state dict) keep the class: what is asked of those is asked of their parameter.
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
    """Whose a parameter is."""

    _ATTRIBUTE = "_fullshard_owner"

    # Of its mesh, by their rank in the default group.
    ranks: tuple[int, ...] = ()

    @abstractmethod
    def name(self) -> str:
        """The parameter's, as the user's model spells it."""

    @abstractmethod
    def around(self) -> str:
        """The unit whose forward makes it full, and its class."""

    @abstractmethod
    def before_messages(self, parameter: DTensor, axes: Sequence[int]) -> None:
        """DTensor is about to send for `parameter` over these axes of its mesh."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # What is copied or pickled belongs to nobody.
        return type(None), ()

    @classmethod
    def of(cls, parameter: Tensor) -> Owner | None:
        found = parameter.__dict__.get(cls._ATTRIBUTE)
        return found if isinstance(found, Owner) else None


def claim(parameter: Tensor, owner: Owner | None) -> None:
    """Let `parameter`, a DTensor, be a sharded parameter of `owner` (None: as it was)."""
    parameter.__class__ = ShardedParameter
    if owner is not None:
        parameter.__dict__[Owner._ATTRIBUTE] = owner


def set_data(parameter: Tensor, value: Tensor) -> None:
    """What `.data = value` does to any tensor: a DTensor has another shape then, and the rows that it had."""
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


class ShardedParameter(DTensor):
    """See the module. Made by `claim`: torch's conversions exchange classes, so one more exchange is nothing new."""

    __slots__ = ()  # swap_tensors compares them with those of DTensor
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    # ---- values ------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over the rows of `value`, a DTensor placed as this one. Of another dtype or device it becomes what the
        module is converted to, as `module.to()` would; else it is copied."""
        if not isinstance(self, nn.Parameter):
            set_data(self, value)
            return
        self._refuse_data(value)
        local, new = local_of(self), local_of(value)
        with torch.inference_mode(False), torch.no_grad():
            if new.dtype is local.dtype and new.device == local.device:
                local.copy_(new)  # also where it is the same memory (`p.data *= x`): the write is counted
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
        # Also in a step of an optimizer.
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
                # What every rank has is cut without a message.
                if axis < len(there) and wanted != there[axis] and not there[axis].is_replicate()
            ]
            if axes:
                owner.before_messages(self, axes)
        return super().redistribute(device_mesh, placements, **options)

    # ---- compilers ---------------------------------------------------------------------------------------

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Tensor:
        """What stands for one while a compiler traces: of this class, or what it made is refused at its first run."""
        made: Tensor = DTensor.__tensor_unflatten__(*args)
        claim(made, None)
        return made

    # ---- copies ------------------------------------------------------------------------------------------

    def _plain(self) -> DTensor:
        """The same tensor as DTensor has it."""
        plain = dtensor_like(self, local_of(self))
        plain.requires_grad_(self.requires_grad)
        plain.__dict__.update(self.__dict__)
        plain.__dict__.pop(Owner._ATTRIBUTE, None)
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
    """Whether operations on sharded parameters pass by us, for the name in the error and the class of views; at first
    they do. Without, they are as fast as a DTensor's; with it, they take half as long again."""
    chosen: Any = _named if on else DTensor.__dict__["__torch_dispatch__"]
    ShardedParameter.__torch_dispatch__ = chosen  # type: ignore[method-assign]


@classmethod  # type: ignore[misc]
def _named(cls: type, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    parameters = list(_sharded_in((args, *kwargs.values()) if kwargs else args))
    try:
        for parameter in parameters:
            # DTensor's way for subclasses takes five times as long, and writes to another object, whose version counts.
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
        f"tensor where it is sharded ({refusal}); apply fully_shard to its own module, before the one around that, so "
        f"that a call gathers it; or use it in a method that register_fsdp_forward_method knows of, between unshard() "
        f"and reshard() of {around}, or in fullshard.full_params(model); or make the other tensor a DTensor"
    )


name_mixed(True)
