"""`guard`: a block that either completes on all ranks or raises on all ranks, and the optimizer steps inside of it.

    before the first step of each optimizer   all ranks synchronise, so a rank that failed earlier prevents the step; on
                                              a device the host waits first for all that was queued (`arrive`)
    a step that raises                        may have written; reported at the next meeting (recovery.py)

Version counters of parameters and optimizer state show whether a step that raised has written. `foreach` and `fused`
steps write DTensors without bumping versions, so such a step counts as one that wrote.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch import local_of, version_of
from .._torch.modules import outside_graphs
from ..engine.foreign import note_mixed
from ..engine.root import Root, formed
from ..engine.unit import module_units
from ..peers import PeerFailed, Scope
from ..policy.arguments import expect, expect_flag
from .ledger import program_of
from .recovery import Peers, peers_below

# How long the host sleeps between two looks at an event.
_LOOK_SECONDS = 0.0002


@contextmanager
def guard(*guarded: nn.Module | Optimizer, wait: bool = True) -> Iterator[None]:
    """If one rank raises inside the block, every rank of the models raises before it leaves the block.

        with fullshard.guard(model, optimizer):
            loss = model(tokens).loss
            loss.backward()
            optimizer.step()  # runs only if every rank got here

    The rank that raises keeps its own exception. The others raise `PeerFailed`, which names that rank and quotes its
    error: at the end of the block at the latest, and within seconds if they are waiting for it. This also covers ranks
    that were killed or stopped. Afterwards all ranks may retry: call `zero_grad` and run the block again; unreduced
    gradients of earlier, successful micro-batches stay.

    Optimizers: before the first step of each, all ranks synchronise once more, so that a rank that failed earlier
    prevents the step everywhere. If a rank raises *inside* a step, all ranks name it. If no rank wrote anything, all
    may retry. Otherwise the step cannot be undone: the error says so, and every forward of the model raises
    `RanksDisagree` on all ranks until all have loaded a checkpoint (`mark_restored`). Steps that a scaler skips on all
    ranks do not count. An optimizer-in-backward step (`step_in_backward`) runs before any rank can prevent it.

    On a device the host runs ahead: after `backward()` the bytes of its messages may still be on the way, and a message
    that never comes shows later. So with `wait=True` the host waits, each time before all ranks synchronise, for all
    that was queued on the current stream. An abort or a message that failed then raises before the first step. What
    this costs on a device is unmeasured: the host cannot queue the step while the backward runs. With `wait=False` it
    does not wait: a step may run on gradients that never arrived, and the model is lost. On a CPU `wait` changes
    nothing.

    Without a guard, peers are also notified of an exception in forward or backward; but a rank that does not wait for
    a message of the failed rank continues to its optimizer step.

    guarded: models sharded by `fully_shard`, the ranks of whose meshes take part, and their optimizers. All ranks must
    enter the same blocks and take the same steps in them. Costs two messages of 16 bytes per mesh axis, and two per
    optimizer. With one rank it does nothing. Raises `TypeError` for any other object and `ValueError` for a model
    without sharded modules, or for no model.
    """
    expect_flag("wait", wait)
    models = [one for one in guarded if isinstance(one, nn.Module)]
    optimizers = [one for one in guarded if isinstance(one, Optimizer)]
    if len(models) + len(optimizers) < len(guarded):
        strange = next(one for one in guarded if not isinstance(one, nn.Module | Optimizer))
        raise TypeError(
            f"guarded: expected models and optimizers, found {type(strange).__name__}; pass models and their optimizers"
        )
    for model in models:
        found = bool(module_units(model))
        expect("guarded", found, "models with sharded modules", model, "call fully_shard first", ValueError)
    if not models:
        raise ValueError("guarded: expected a model that fully_shard was applied to, found none; pass it first")
    peers = peers_below(*models)
    roots = dict.fromkeys(
        root for model in models for unit in module_units(model) if (root := formed(unit)) is not None
    )
    devices = dict.fromkeys(unit.device for model in models for unit in module_units(model)) if wait else ()
    steps = GuardedSteps(peers, list(roots), optimizers, devices)
    try:
        with steps:
            yield
        steps.come_together("the end of a guarded block")
    except BaseException as error:
        note_mixed(error)
        told = steps.failed(error)
        peers.attempt_failed(error, steps.where)
        if told is error:
            raise
        raise told from error


class _Begun(NamedTuple):
    """A step that has begun. `versions`: of the tensors it may write; None if version counters do not show writes."""

    optimizer: Optimizer
    versions: list[int] | None


class GuardedSteps:
    """Context manager: the steps of `optimizers` in one block on all ranks of `peers`, which train `roots`."""

    def __init__(
        self,
        peers: Peers,
        roots: Sequence[Root],
        optimizers: Sequence[Optimizer],
        devices: Iterable[torch.device] = (),
    ) -> None:
        """`devices`: for which the host waits before ranks come together."""
        self._peers, self._roots, self._optimizers = peers, roots, list(dict.fromkeys(optimizers))
        self._devices = [device for device in devices if device.type != "cpu"]
        # Some rank failed before this block.
        self._after_a_failure = any(scope.failures.must_meet for scope in peers.scopes)
        self._handles: list[RemovableHandle] = []
        # Optimizers before whose first step all ranks met; names of optimizers that finished a step.
        self._met: list[Optimizer] = []
        self._taken: list[str] = []
        self._begun: _Begun | None = None

    def __enter__(self) -> None:
        before, behind = outside_graphs(self._begins), outside_graphs(self._ends)
        for optimizer in self._optimizers:
            # After existing hooks: if one of them raises, nothing is written yet.
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(behind))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def come_together(self, what: str) -> None:
        """Wait for all ranks to reach this point of the block."""
        if self._after_a_failure and any(scope.failures.must_meet for scope in self._peers.scopes):
            # Normally a forward does this; with a closure the forward comes later.
            renewed = self._peers.meet()
            for root in self._roots:
                root.met_by_hand(renewed=renewed)
        if self._devices and self._peers.scopes:
            arrive(self._devices, self._peers.scopes)
        self._peers.come_together(what)

    def _begins(self, optimizer: Optimizer, *_: object) -> None:
        if not any(optimizer is met for met in self._met):
            self.come_together(f"the step of {_name(optimizer)}")
            self._met.append(optimizer)
        self._begun = _Begun(optimizer, _versions(optimizer))

    def _ends(self, optimizer: Optimizer, *_: object) -> None:
        self._begun = None
        self._taken.append(_name(optimizer))

    @property
    def where(self) -> str:
        """The current position in the block, for errors."""
        if self._begun is not None:
            return f"the step of {_name(self._begun.optimizer)}"
        return f"a guarded block, after the step of {self._taken[-1]}" if self._taken else "a guarded block"

    def failed(self, error: BaseException) -> BaseException:
        """The block ended with `error`; return the exception to raise."""
        if not self._met:
            return error
        wrote = self._begun is not None and self._begun.versions != _versions(self._begun.optimizer)
        if self._begun is not None and (wrote or self._begun.versions is None):
            wrote = True
            for scope in self._peers.scopes:
                program_of(scope).half = _name(self._begun.optimizer)
        here = "has taken it" if self._taken else "has written nothing"
        if wrote:
            here = "was left in the middle of it"
        told = (
            f"ranks had begun the step of {_name(self._met[-1])}, and this one {here}: if ranks differ in this, it "
            f"cannot be undone, and every forward raises until you load a checkpoint"
        )
        if type(error) is PeerFailed:
            made = PeerFailed(f"{error}; {told}", rank=error.rank, step=error.step, unit=error.unit, text=error.text)
            made.__cause__ = error
            return made
        error.add_note(told)
        return error


def arrive(devices: Iterable[torch.device], scopes: Sequence[Scope]) -> None:
    """Wait on the host for all that was queued on the current streams of `devices`: the last reductions too, which
    these streams wait for. Raises the failure of a scope (`PeerFailed`, `RanksDisagree`) when connections were cut.

    The watch finds out whether a message will never come: it looks at messages under way on devices.
    """
    for device in devices:
        module = torch.get_device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
        while not event.query() and all(scope.failures.cause is None for scope in scopes):
            # Not `event.synchronize()`: Ctrl-C would wait, too, and an abort need not end it.
            time.sleep(_LOOK_SECONDS)
    for scope in scopes:
        scope.refuse_failure()
        # What a backend ended by itself counts as over, too.
        scope.groups.check()


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _versions(optimizer: Optimizer) -> list[int] | None:
    found: list[int] = []
    for group in optimizer.param_groups:
        if group.get("foreach") or group.get("fused"):
            return None
        for parameter in group["params"]:
            # `foreach=None` lets torch choose list operations, as it does on a device.
            if parameter.device.type != "cpu" and group.get("foreach", False) is None:
                return None
            state = optimizer.state.get(parameter, {})
            found.append(len(state))
            for tensor in (parameter, *state.values()):
                if isinstance(tensor, Tensor):
                    found += _of(tensor)
                elif isinstance(tensor, int | float):
                    found.append(hash(tensor))
    return found


def _of(tensor: Any) -> tuple[int, ...]:
    return (version_of(tensor), version_of(local_of(tensor))) if isinstance(tensor, DTensor) else (version_of(tensor),)
