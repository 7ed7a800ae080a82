"""Optimizers that step on local shards: torch's own arithmetic, without a DTensor dispatch per parameter.

During `step()` the optimizer sees plain tensors, the shards themselves:

    param_groups[i]["params"]    the local tensors, with the local gradients on `.grad`
    state                        the same state tensors, without their DTensor wrappers

Before it returns, parameters and state are restored: the state as DTensors over the tensors that were written. So
`state_dict()`, DCP, schedulers, hooks and scalers work as usual. This is correct for elementwise optimizers only.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like, local_of, spec_of
from .._torch.modules import outside_graphs, remains_a_method
from ..engine.foreign import ON_OWNERS, ON_SHARDS
from ..param import PendingGrad, SteppedGrad
from ..policy.arguments import expect_flag

O = TypeVar("O", bound=Optimizer)  # noqa: E741

# Their update of an element depends only on that element, its gradient, its state and scalars.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

_ATTRIBUTE = ON_SHARDS
# The `Around` of an optimizer of which some parameters step in backward (step_in_backward.py).
AROUND = "_fullshard_around_step"
# Param groups of an optimizer, each with the parameters to step.
Parts = Sequence[tuple[dict[str, Any], list[Tensor]]]
_CLASSES: weakref.WeakValueDictionary[type[Optimizer], type[Optimizer]] = weakref.WeakValueDictionary()
# Held while a class is made: two threads would make two of one name. Making one calls `__init_subclass__` of users.
MAKING = threading.RLock()


def step_on_shards(optimizer: O, *, elementwise: bool = False) -> O:
    """Make `optimizer.step()` work on the local tensors of sharded parameters; returns the same optimizer.

    Values, state and state dicts are the same, but a step avoids a DTensor dispatch per operation and parameter.
    `foreach`, `fused` and `capturable` keep their meaning.

        optimizer = fullshard.step_on_shards(torch.optim.AdamW(model.parameters(), lr=3e-4))

    optimizer: an elementwise optimizer of torch (ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop,
        Rprop, SGD). It steps plain parameters as usual.
    elementwise: True declares another class elementwise. For one that is not (Muon, Adafactor, LBFGS, Shampoo: their
        update of an element depends on other elements) the result would silently depend on the number of ranks.
    The optimizer gets a subclass of its class; `isinstance` and `type(...).__name__` still work. Applying it again
    does nothing. Raises `TypeError` for an object that is no optimizer and `ValueError` for a class that is not
    elementwise.
    """
    expect_flag("elementwise", elementwise)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}; build it from "
            f"model.parameters() and pass it here"
        )
    original = type(optimizer)
    if ON_OWNERS in optimizer.__dict__:
        raise ValueError(
            f"optimizer: expected one whose matrices have no owners, found {original.__name__} of step_on_owners, "
            f"whose update of an element depends on others; name what it may step on shards there (on_shards)"
        )
    if _ATTRIBUTE in optimizer.__dict__:
        return optimizer
    if original not in ELEMENTWISE and not elementwise:
        names = ", ".join(c.__name__ for c in ELEMENTWISE)
        raise ValueError(
            f"optimizer: expected one that treats each element by itself ({names}), found {original.__name__}; use it "
            f"as it is, or pass elementwise=True if its update of an element depends on no other element"
        )
    expect_own_step(optimizer, "step_on_shards")
    optimizer.__dict__[_ATTRIBUTE] = {}
    with MAKING:
        optimizer.__class__ = _stepping(original)
    return optimizer


def expect_own_step(optimizer: Optimizer, caller: str) -> None:
    """Raise `ValueError` if something replaced the step of its class on the object."""
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"optimizer: expected the step of its class, found another one on the object, which would stay: "
            f"learning-rate schedules put it there; call {caller} before the schedule is built"
        )


class Around(Protocol):
    """Called around the user's `step()`."""

    def before_step(self, *, closure: bool) -> None:
        """The step begins."""
        ...

    def after_step(self) -> None:
        """The step succeeded."""
        ...


def step_parts(optimizer: Optimizer, parts: Parts) -> None:
    """Step only the parameters in `parts`, of an optimizer that steps on shards. Runs no step hooks."""
    shards = _Shards(optimizer, parts)
    try:
        shards.put()
        step_as_its_class(optimizer)
    finally:
        shards.take_back()


def step_as_its_class(optimizer: Optimizer) -> None:
    """The step of the user's class, without the wrapper that runs step hooks: they must not see exchanged tensors."""
    original: Any = type(optimizer).__bases__[0]
    getattr(original.step, "__wrapped__", original.step)(optimizer)


def _stepping(original: type[Optimizer]) -> Any:
    made = _CLASSES.get(original)
    if made is None:

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            around: Around | None = self.__dict__.get(AROUND)
            if around is not None:
                around.before_step(closure=closure is not None)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            step_parts(self, [(group, group["params"]) for group in self.param_groups])
            if around is not None:
                around.after_step()
            return loss

        made = _CLASSES[original] = with_step(original, step)
    return made


def with_step(original: type[Optimizer], step: Callable[..., Any]) -> Any:
    """A subclass of `original` that steps by `step`."""
    step.__doc__ = original.step.__doc__
    # Outside of compiled graphs (torch.compile(optimizer.step)): dynamo cannot trace the exchange.
    hooked: Any = remains_a_method(Optimizer.profile_hook_step(outside_graphs(step)))
    hooked.hooked = True
    return type(original.__name__, (original,), {"step": hooked, "__module__": original.__module__})


class _Mirror:
    """One sharded parameter as the optimizer sees it during a step."""

    __slots__ = ("inner", "local", "outer", "parameter", "proxy", "values")

    def __init__(self, parameter: Tensor, local: Tensor) -> None:
        self.parameter = parameter
        self.local = local
        # Shares memory and version counter with the shard, but has its own `.grad`.
        self.proxy = local.detach()
        self.inner: dict[Any, Any] = {}
        # The sources of `inner`: the optimizer's state of the parameter, and its values.
        self.outer: Any = None
        self.values: list[Any] = []

    def refresh(self, outer: dict[Any, Any]) -> None:
        """Follow `outer`: a state dict may have been loaded, or an entry replaced."""
        if (
            outer is self.outer
            and len(outer) == len(self.values)
            and all(map(operator.is_, outer.values(), self.values))
        ):
            return
        self.inner = {key: local_of(value) if isinstance(value, DTensor) else value for key, value in outer.items()}
        self._note(outer)

    def is_shown(self) -> bool:
        """Whether a step added and replaced nothing."""
        return len(self.inner) == len(self.values) and all(map(self._shows, self.inner.values(), self.values))

    def publish(self, outer: dict[Any, Any]) -> None:
        """Show in `outer` what a step added or replaced."""
        inner, parameter = self.inner, self.parameter
        shape = self.local.shape
        for key, value in inner.items():
            old = outer.get(key)
            if old is not None and self._shows(value, old):
                continue
            # A tensor of the shard's shape is one value per element; others (step counts) belong to the whole.
            per_element = isinstance(value, Tensor) and value.shape == shape
            outer[key] = dtensor_like(parameter, value) if per_element else value
        for key in outer.keys() - inner.keys():
            del outer[key]
        self._note(outer)

    @staticmethod
    def _shows(inner: Any, outer: Any) -> bool:
        return inner is outer or (isinstance(outer, DTensor) and local_of(outer) is inner)

    def _note(self, outer: dict[Any, Any]) -> None:
        self.outer = outer
        self.values = list(outer.values())


class _Shards:
    """The exchange around one step. `parts`: the parameters to step, by param group."""

    def __init__(self, optimizer: Optimizer, parts: Parts) -> None:
        self._optimizer = optimizer
        self._parts = parts
        # Keyed by id: hashing a tensor runs Python code.
        self._mirrors: dict[int, _Mirror] = optimizer.__dict__[_ATTRIBUTE]
        self._groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._all_groups = optimizer.param_groups
        self._state = optimizer.state
        self._in_backward = AROUND in optimizer.__dict__
        self._used: list[_Mirror] = []

    def put(self) -> None:
        outer_state = self._state
        inner_state: defaultdict[Tensor, Any] = defaultdict(dict)
        for group, parameters in self._parts:
            proxies: list[Tensor] = []
            for parameter in parameters:
                if not isinstance(parameter, DTensor):
                    if parameter in outer_state:
                        inner_state[parameter] = outer_state[parameter]
                    proxies.append(parameter)
                    continue
                local = local_of(parameter)
                mirror = self._mirrors.get(id(parameter))
                if mirror is None or mirror.local is not local or mirror.parameter is not parameter:
                    mirror = self._mirrors[id(parameter)] = _Mirror(parameter, local)
                outer = outer_state.get(parameter)
                if outer is not None:
                    mirror.refresh(outer)
                elif mirror.outer is not None:
                    mirror = self._mirrors[id(parameter)] = _Mirror(parameter, local)
                mirror.proxy.grad = local_gradient(parameter, may_be_stepped=self._in_backward)
                inner_state[mirror.proxy] = mirror.inner
                proxies.append(mirror.proxy)
                self._used.append(mirror)
            self._groups.append((group, group["params"]))
            group["params"] = proxies
        self._optimizer.param_groups = [group for group, _ in self._groups]
        self._optimizer.state = inner_state

    def take_back(self) -> None:
        """Restore everything that was exchanged, also after a failure in `put` or in the step."""
        inner_state, outer_state = self._optimizer.state, self._state
        for group, parameters in self._groups:
            group["params"] = parameters
        self._optimizer.param_groups = self._all_groups
        self._optimizer.state = outer_state
        for mirror in self._used:
            mirror.proxy.grad = None
            if not mirror.is_shown():
                mirror.publish(outer_state[mirror.parameter])
        if inner_state is not outer_state:
            for _, parameters in self._parts:
                for parameter in parameters:
                    if not isinstance(parameter, DTensor) and inner_state.get(parameter):
                        outer_state[parameter] = inner_state[parameter]


def local_gradient(parameter: DTensor, *, may_be_stepped: bool = False) -> Tensor | None:
    """This rank's part of the gradient of a sharded parameter. `may_be_stepped`: None for one that stepped in
    backward."""
    gradient = parameter.grad
    if gradient is None or (may_be_stepped and isinstance(gradient, SteppedGrad)):
        return None
    if isinstance(gradient, PendingGrad):
        gradient.to_local()  # raises, with the reason
    if not isinstance(gradient, DTensor):
        raise RuntimeError(
            f"expected a DTensor on the .grad of a sharded parameter of shape {tuple(parameter.shape)}, found "
            f"{type(gradient).__name__}; leave .grad as backward made it, or assign a DTensor with its placements"
        )
    if spec_of(gradient) is not spec_of(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_of(gradient)
