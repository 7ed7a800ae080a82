"""The backward of a root: whether it runs and how it ended, which saved weights it reads, and what may not be written.

it ends      the autograd engine calls a callback
it raises    the engine drops the callback without a call. The lifetime of the callback therefore says whether the
             backward still runs, and no stale flag survives a failed step (ADR 0008). The exception is not known
             here. On a device its thread may drop it late: then the model's next call outside of a backward says so
it reads     saved-tensor hooks report a saved weight that backward is about to read (ADR 0006)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .._torch import (
    base_of,
    current_backward,
    internal_to_checkpoints,
    keeps_graph,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    queue_backward_callback,
    recompute_with_arguments,
    saved_for_recomputation,
    saved_tensor_hooks_allowed,
    top_saved_tensor_hooks,
    version_of,
)
from .._torch.modules import outside_graphs
from ..schedule import Full, Phase, Use
from .unit import Unit

# ---- running ---------------------------------------------------------------------------------------------------------
# A unit and one of its uses, if that is known.
Reached = tuple[Unit, Use | None]

# A dead reference: no backward is running.
NOT_RUNNING: Any = weakref.ref(set())


class RunningBackward:
    """The running backward of a root whose model runs in `thread`, from its first report (`begin`) on.

    The engine calls `ended` when the backward is over. If it dropped the callback instead, `failed` is called with the
    exception, or None if that is unknown.
    """

    def __init__(self, thread: int, ended: Callable[[], None], failed: Callable[[BaseException | None], None]) -> None:
        self.thread = thread
        self.ended, self._failed = ended, failed
        self._when_it_ends = outside_graphs(_End.report)
        # Alive while a backward is running.
        self.end: weakref.ref[_End] = NOT_RUNNING
        # The last one frees its graph; some parameter got a gradient.
        self.spends, self.brought = True, False
        # The uses that it reached, and whether the module showed shards when it did.
        self.reached: dict[Reached, bool] = {}
        # The uses whose module showed shards, without gradient sync, in earlier backwards of the step that brought no
        # gradient and kept their graph. A schedule that splits the backward found no weights there.
        self.inputs_only: set[Reached] = set()

    def begin(self) -> None:
        self.spends, self.brought = not keeps_graph(), False
        self.reached = {}
        end = _End(self)
        self.end = weakref.ref(end, self._dropped)
        queue_backward_callback(partial(self._when_it_ends, end))

    def note_split(self, *, more_follow: bool) -> None:
        """The backward is over; `more_follow`: another one of the same step may."""
        if self.brought:
            self.inputs_only.difference_update(self.reached)
        elif not self.spends:
            for reached, freed in self.reached.items():
                unit, _ = reached
                if freed and not unit.record.plan.sync and unit.gradients.expected:
                    self.inputs_only.add(reached)
        if not more_follow:
            self.inputs_only.clear()
        self.reached = {}

    def forget(self) -> None:
        """The backward ended, or its leftovers were discarded."""
        self.end = NOT_RUNNING

    def settle(self) -> None:
        """Call `failed` for a backward that ended without its callback: that was dropped, or no backward runs in the
        model's thread. The engine's device thread may hold a callback for a while after the exception arrived here."""
        if self.end is NOT_RUNNING:
            return
        if self.end() is None or (threading.get_ident() == self.thread and current_backward() == -1):
            self.forget()
            self._failed(sys.exception())

    def _dropped(self, which: weakref.ref[_End]) -> None:
        # Only in the model's thread: from an engine thread, `failed` could run during the next forward. Otherwise the
        # model's thread calls `settle` later.
        if self.end is which and threading.get_ident() == self.thread:
            self.settle()


class _End:
    """Held by the engine's end-of-backward callback, so it lives exactly as long as the engine keeps that backward."""

    __slots__ = ("__weakref__", "_of")

    def __init__(self, of: RunningBackward) -> None:
        self._of = of

    def report(self) -> None:
        self._of.ended()


# ---- reads -----------------------------------------------------------------------------------------------------------
# Unshards weights that backward reads before a gradient reaches any output of the unit.
#
# Usually backward first brings a gradient to an output of the unit, and a hook there unshards it in time. Some valid
# programs do not: a loss on an intermediate, an output hidden in an object, an output edited in place. But every
# program *unpacks* the saved weight. So in the first forwards of a unit, saved-tensor hooks replace weights by tokens,
# and unpacking a token unshards the unit. A unit that ever needed this keeps its hooks; others do not, because they
# cost about ten microseconds per saved tensor, as much as everything else together (ADR 0006).
#
# Other saved-tensor hooks (checkpointing, activation offload) are never hidden: while they are active, nothing is
# watched. Checkpointing runs a function again, with the arguments that it saved through these hooks: the same objects
# again. If that is a unit's forward, it unshards the unit; if it is a part of one, unpacking its arguments does.


class _Weight(NamedTuple):
    """A saved full parameter, or a view of one."""

    unit: Unit
    tensor: Tensor


class _Activation(NamedTuple):
    """Any other saved tensor, with its version: saved-tensor hooks disable autograd's check for in-place edits.
    `recomputed`: the units of whose forwards a part will run again with it."""

    tensor: Tensor
    version: int
    recomputed: Sequence[Unit] = ()


class SavedTensorHooks:
    """The saved-tensor hooks of one root. Calls the method `needed(unit)` when a token of `unit` is unpacked.

    Holds the root and its units weakly: a gloo message issued while hooks are active holds the hooks, and a strong
    reference would be a leaked cycle.
    """

    def __init__(self, needed: Callable[[Unit], None], *, always: bool) -> None:
        self._needed = weakref.WeakMethod(needed)
        self._always = always
        # A fixed pair of objects, recognisable on torch's stack of hooks.
        self._hooks = (internal_to_checkpoints(outside_graphs(self._pack)), outside_graphs(self._unpack))
        self._owner: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._active = 0
        # How often a forward that follows a forward is watched again.
        self.again_left = 8

    def learn(self, unit: Unit) -> None:
        """Register the full parameters of `unit`, which may be new objects."""
        for key in [key for key, owner in self._owner.items() if owner is unit]:
            del self._owner[key]
        for group in unit.groups:
            for key in group.full_ids:
                self._owner[key] = unit

    def begin(self, unit: Unit) -> bool:
        """A forward of `unit` with gradients begins, and some more forwards are to be watched. Returns whether `end`
        must be called after it."""
        if not saved_tensor_hooks_allowed():
            return False
        if not (unit.reads.is_irregular or self._always):
            unit.reads.left -= 1
        top = top_saved_tensor_hooks()
        if top is not None:
            # The hooks of an enclosing unit know the weights of all units; other hooks must not be hidden.
            unit.reads.is_on = top[0] is self._hooks[0]
            return False
        unit.reads.is_on = True
        push_saved_tensor_hooks(*self._hooks)
        self._active += 1
        return True

    def end(self) -> None:
        """The forward returned or raised."""
        pop_saved_tensor_hooks()
        self._active -= 1

    def reset(self) -> None:
        """Pop the hooks of forwards that ended without notice (KeyboardInterrupt)."""
        while self._active:
            self.end()

    def _pack(self, tensor: Tensor) -> object:
        # Custom autograd functions and compiled code save views made without gradients, which are leaves too.
        base = base_of(tensor)
        unit = self._owner.get(id(tensor if base is None else base))
        if unit is not None:
            return _Weight(unit, tensor if tensor.is_leaf else tensor.detach())
        recomputed: Sequence[Unit] = ()
        run = saved_for_recomputation()
        if run is not None:
            recompute_with_arguments(run)
            recomputed = [unit for unit in dict.fromkeys(self._owner.values()) if unit.record.phase is Phase.FORWARD]
        # Detached: an output saved by its own node would keep the node and its history alive.
        return _Activation(tensor if tensor.is_leaf else tensor.detach(), version_of(tensor), recomputed)

    def _unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _Weight):
            needed = self._needed()
            assert needed is not None  # the unit of the token keeps its root
            needed(saved.unit)
            return saved.tensor
        assert isinstance(saved, _Activation)
        if version_of(saved.tensor) != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"expected version {saved.version} of a tensor of shape {tuple(saved.tensor.shape)} and dtype "
                f"{saved.tensor.dtype}, found version {version_of(saved.tensor)}; clone it before the edit, or enable "
                f"torch.autograd.set_detect_anomaly(True) to see where it was used"
            )
        for unit in saved.recomputed:
            # Without its weights, and with more gradients to come: backward did not come by its outputs.
            if unit.record.full is not Full.FULL and not unit.gradients.all_came():
                needed = self._needed()
                assert needed is not None
                needed(unit)
        return saved.tensor
