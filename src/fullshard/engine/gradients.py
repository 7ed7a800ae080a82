"""Gradient bookkeeping of a unit: arrived and missing in the running backward, and held from earlier backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch import current_backward
from .._torch.modules import outside_graphs
from ..param import ParamGroup, ShardedParam
from ..schedule import UnitRecord


class Stepper(Protocol):
    """An optimizer-in-backward (extras/step_in_backward.py). `backward` identifies one running backward."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer holds `parameter`."""
        ...

    def stepped_any(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether any of `parameters` was stepped since the user's last `optimizer.step()`."""
        ...

    def begin(self, backward: object, unit_name: str) -> None:
        """A step of a unit's parameters begins in the running backward."""
        ...

    def step(self, params: Sequence[ShardedParam]) -> None:
        """Step these parameters and free their gradients."""
        ...

    def end(self, backward: object) -> None:
        """The backward succeeded."""
        ...

    def refuse_half_a_step(self) -> None:
        """Raise `RuntimeError` if a backward failed after it stepped some of the parameters."""
        ...


# Of a unit's gradients and a parameter, its name and its bit, and the full parameter. Hooks hold the first two weakly:
# the garbage collector cannot see that a tensor holds its hooks, so a strong reference would be a cycle that leaks the
# model.
AccumulationHook = Callable[["weakref.ref[UnitGradients]", "weakref.ref[ShardedParam]", str, int, Tensor], None]


class UnitGradients:
    """One bit for each trainable parameter of a unit. `groups`: the unit's own list."""

    def __init__(self, groups: Sequence[ParamGroup], record: UnitRecord) -> None:
        self._groups, self._record = groups, record
        # Bits of the running backward: arrived, and all.
        self.arrived = 0
        self.expected = 0
        # (graph task id, bits that it brought): one run of the autograd engine brings each gradient once.
        self.came = (-1, 0)
        # Called with a parameter and its bit whenever its gradient arrives.
        self.on_arrival: Callable[[ShardedParam, int], None] | None = None
        # The hook of a full parameter, which calls `on_arrival` (hooks.py).
        self.on_accumulated: AccumulationHook | None = None
        # The optimizer-in-backward, if any.
        self.stepper: Stepper | None = None
        # A backward left unreduced gradients, on every rank: the next message is in the reduce dtype.
        self.window_open = False
        # A backward left partial sums, which the next all-reduced message carries.
        self.partial_open = False
        # Whether the hooks match the currently trainable parameters.
        self.is_known = False
        self._hooks: list[RemovableHandle] = []
        self._withdrawing: list[RemovableHandle] = []
        # Arrived bits -> bytes of the largest missing gradient.
        self._largest_missing: dict[int, int] = {}

    @property
    def windows(self) -> tuple[bool, bool]:
        """Whether an accumulation window of unreduced gradients, and one of partial sums, is open. Settable."""
        return self.window_open, self.partial_open

    @windows.setter
    def windows(self, windows: tuple[bool, bool]) -> None:
        self.window_open, self.partial_open = windows

    def learn(self) -> None:
        """Hook the trainable full parameters, which are on the modules now."""
        self.forget()
        bit, frozen = 0, False
        for group in self._groups:
            group.trainable = tuple(i for i, p in enumerate(group.params) if p.full.requires_grad)
            frozen = frozen or len(group.trainable) < len(group.params)
            for i in group.trainable:
                param = group.params[i]
                assert self.on_accumulated is not None
                hook = partial(self.on_accumulated, weakref.ref(self), weakref.ref(param), param.name, 1 << bit)
                self._hooks.append(param.full.register_post_accumulate_grad_hook(hook))
                bit += 1
        self.expected = (1 << bit) - 1
        self._largest_missing.clear()
        self._record.plan.frees_late = frozen
        self._record.plan.trainable = bit > 0
        self.is_known = True

    def forget(self) -> None:
        """Remove the hooks: parameters were replaced, so `learn` must be called again."""
        for handle in (*self._hooks, *self._withdrawing):
            handle.remove()
        for group in self._groups if self._withdrawing else ():
            for param in group.params:
                param.gradients.withdraw()
                param.gradients.shows_held = False
        self._hooks.clear()
        self._withdrawing.clear()
        self.is_known = False

    def show_held(self) -> None:
        """Show gradients that this backward held on the full parameters, here and after the following ones."""
        if not self._withdrawing:
            for group in self._groups:
                for param in (group.params[i] for i in group.trainable):
                    self._withdrawing.append(_withdrawing_hook(param))
                    param.gradients.shows_held = True
                    param.gradients.hold(param.gradients.held)

    def all_came(self) -> bool:
        """Whether the running backward brought every gradient of the unit: it reads no trainable weight any more."""
        return self.came == (current_backward(), self.expected)

    def largest_missing_nbytes(self) -> int:
        """Bytes of the largest gradient that the running backward may still bring."""
        known = self._largest_missing.get(self.arrived)
        if known is None:
            trained = [group.params[i].full for group in self._groups for i in group.trainable]
            missing = [full.nbytes for bit, full in enumerate(trained) if not self.arrived >> bit & 1]
            known = self._largest_missing[self.arrived] = max(missing, default=0)
        return known

    def take_assigned(self) -> None:
        """Take gradients that were assigned to full parameters directly, which no hook reports."""
        for group in self._groups if self.is_known else ():
            for param in (group.params[i] for i in group.trainable):
                if param.full.grad is not None:
                    param.gradients.take_fresh()
                    self.arrived |= param.gradients.fresh is not None


def _withdrawing_hook(param: ShardedParam) -> RemovableHandle:
    """Take the held gradient off the full parameter of `param` just before autograd would add to it in place."""
    handle: RemovableHandle = param.full.register_hook(partial(_outside_graphs(_arrives), weakref.ref(param)))
    return handle


def _arrives(itself: weakref.ref[ShardedParam], _gradient: Tensor) -> None:
    reached = itself()
    if reached is not None and reached.gradients.shown is not None:
        reached.gradients.live_held()  # what the user did with it counts
        reached.gradients.withdraw()


# Not at import: it imports torch's compiler. Not for each parameter: it takes tens of microseconds.
_outside_graphs = cache(outside_graphs)
