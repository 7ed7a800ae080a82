"""Which gradients of a unit came in the running backward, which are still to come, and what earlier backwards left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch.modules import outside_graphs
from ..param import ParamGroup, ShardedParam
from ..schedule import UnitRecord


class Stepper(Protocol):
    """An optimizer that takes gradients in backward, for the parameters it has (extras/step_in_backward.py). `backward`
    is whatever tells one running backward from another."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of the optimizer's."""
        ...

    def stepped_any(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether some of `parameters` were stepped since the user's last `optimizer.step()`."""
        ...

    def begin(self, backward: object, unit_name: str) -> None:
        """The parameters of a unit are stepped, in a backward that is running."""
        ...

    def step(self, params: Sequence[ShardedParam]) -> None:
        """Take the optimizer's step with these parameters, and drop their gradients."""
        ...

    def end(self, backward: object) -> None:
        """That backward ended well."""
        ...

    def refuse_half_a_step(self) -> None:
        """Raise `RuntimeError` when a backward failed after a part of the parameters was stepped."""
        ...


class UnitGradients:
    """One bit for each trainable parameter of a unit. `groups`: the unit's own list."""

    def __init__(self, groups: Sequence[ParamGroup], record: UnitRecord) -> None:
        self._groups, self._record = groups, record
        # Bits of the running backward: those that came, and all.
        self.arrived = 0
        self.expected = 0
        # Those that one run of the autograd engine brought (its number, bits): each brings a parameter's once.
        self.came = (-1, 0)
        # Called with a parameter and its bit, each time its gradient came.
        self.on_arrival: Callable[[ShardedParam, int], None] | None = None
        # Takes them in backward.
        self.stepper: Stepper | None = None
        # A backward ended with unreduced gradients, on every rank alike: the next message is in the reduce dtype.
        self.window_open = False
        # A backward ended with partial sums, which the next message that is all-reduced carries.
        self.partial_open = False
        # Whether hooks are on what is trainable now.
        self.is_known = False
        self._hooks: list[RemovableHandle] = []
        # By what has arrived: bytes of the largest gradient that has not.
        self._largest_missing: dict[int, int] = {}

    @property
    def windows(self) -> tuple[bool, bool]:
        """Whether a window of unreduced gradients, and one of partial sums, is open; may be put back."""
        return self.window_open, self.partial_open

    @windows.setter
    def windows(self, windows: tuple[bool, bool]) -> None:
        self.window_open, self.partial_open = windows

    def learn(self) -> None:
        """The full parameters are on the modules: note which are trainable, and hook these."""
        self.forget()
        bit, frozen = 0, False
        for group in self._groups:
            group.trainable = tuple(i for i, p in enumerate(group.params) if p.full.requires_grad)
            frozen = frozen or len(group.trainable) < len(group.params)
            for i in group.trainable:
                self._hooks.append(_hook(self, group.params[i], 1 << bit))
                bit += 1
        self.expected = (1 << bit) - 1
        self._largest_missing.clear()
        self._record.frees_late = frozen
        self._record.trainable = bit > 0
        self.is_known = True

    def forget(self) -> None:
        """Parameters were replaced: `learn` has to be called again."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.is_known = False

    def came_again(self, backward: int, bit: int) -> bool:
        """The gradient of `bit` came, in that run of the engine; whether this run brought all of them."""
        self.arrived |= bit
        self.came = backward, bit | (self.came[1] if self.came[0] == backward else 0)
        return self.came[1] == self.expected

    def largest_missing_nbytes(self) -> int:
        """Bytes of the largest gradient that the running backward may still bring."""
        known = self._largest_missing.get(self.arrived)
        if known is None:
            trained = [group.params[i].full for group in self._groups for i in group.trainable]
            missing = [full.nbytes for bit, full in enumerate(trained) if not self.arrived >> bit & 1]
            known = self._largest_missing[self.arrived] = max(missing, default=0)
        return known

    def take_assigned(self) -> None:
        """Take the gradients that somebody put on full parameters by hand: no hook reports them."""
        for group in self._groups if self.is_known else ():
            for param in (group.params[i] for i in group.trainable):
                if param.full.grad is not None:
                    param.take_fresh()
                    self.arrived |= 1

    def are_held(self) -> bool:
        """Whether earlier backwards left gradients that were not reduced."""
        return any(param.live_held() is not None for group in self._groups for param in group.params)


def _hook(gradients: UnitGradients, param: ShardedParam, bit: int) -> RemovableHandle:
    """Call `gradients.on_arrival` each time a backward brought the gradient of `param` to its full parameter.

    Keeps neither of them. Python's collector does not see that a tensor keeps its hooks: one that kept what keeps the
    tensor would keep both for ever, and the model with them.
    """
    its_unit, itself, name = weakref.ref(gradients), weakref.ref(param), param.name

    def arrived(_full: Tensor) -> None:
        here, reached = its_unit(), itself()
        if here is None or reached is None or here.on_arrival is None:
            raise RuntimeError(
                f"{name}: expected the module that computed this to exist when a backward goes through it, found that "
                f"it is gone; keep the model until its backwards are over"
            )
        here.on_arrival(reached, bit)

    handle: RemovableHandle = param.full.register_post_accumulate_grad_hook(outside_graphs(arrived))
    return handle
