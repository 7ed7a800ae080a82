"""Backwards as the program calls them, and their ends.

it ends             a callback of the engine
it raises           the engine drops that callback: so whether a backward is *still* running is read off the
                    callback's life, and no flag of ours can survive a failed step. Why is known where it was called
autograd.grad(loss, parameters), loss.backward(inputs=parameters)
                    the graph was made of the full parameters. Of sharded ones autograd would say "at index 1",
                    return None, or train nothing and be silent: refused by name
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .._torch import queue_backward_callback, reaches, watch_backwards
from .._torch.modules import outside_graphs
from ..param import Owner, ShardedParameter
from .misuse import first_few

_registrations = itertools.count()
_followed: weakref.WeakSet[RunningBackward] = weakref.WeakSet()


class RunningBackward:
    """Whether a backward of a root, whose model `thread` runs, is running: from its first report (`begin`) on.

    `ended` is called by the engine at its end, `failed` when it has failed: by an exception, or None where that is not
    known. In that case it is called again with the exception, when it leaves the call of the backward.
    """

    def __init__(self, thread: int, ended: Callable[[], None], failed: Callable[[BaseException | None], None]) -> None:
        self._thread = thread
        self.ended, self._failed = ended, failed
        self._when_it_ends = outside_graphs(_End.report)
        self._end: weakref.ref[_End] | None = None
        follow_backwards()
        _followed.add(self)

    @property
    def is_running(self) -> bool:
        return self._end is not None and self._end() is not None

    def begin(self) -> None:
        end = _End(self)
        self._end = weakref.ref(end, self._dropped)
        queue_backward_callback(partial(self._when_it_ends, end))

    def forget(self) -> None:
        """It ended, or what it left was discarded."""
        self._end = None

    def _dropped(self, which: weakref.ref[_End]) -> None:
        # Not from a thread of the engine's: the one that ran the model may be in its next forward.
        if self._end is which and threading.get_ident() == self._thread:
            self._failed(sys.exception())

    def raised(self, error: BaseException) -> None:
        """A call of a backward ended with `error`: of this one, if it was dropped."""
        if threading.get_ident() == self._thread and self._end is not None and self._end() is None:
            self.forget()
            self._failed(error)


class _End:
    """In what the engine calls when a backward is over. It lives exactly as long as the engine keeps that backward."""

    __slots__ = ("__weakref__", "_of")

    def __init__(self, of: RunningBackward) -> None:
        self._of = of

    def report(self) -> None:
        self._of.ended()


def follow_backwards() -> None:
    """From now on the calls of backwards are followed. Once in a process."""
    if next(_registrations) == 0:
        watch_backwards(_begins, _raised)


def _raised(error: BaseException) -> None:
    for running in tuple(_followed):
        running.raised(error)


def _begins(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    asked = [tensor for tensor in inputs if isinstance(tensor, ShardedParameter)]
    if not asked or reaches(outputs, asked):
        return
    owners = [owner for owner in map(Owner.of, asked) if owner is not None]
    names = first_few([owner.name() for owner in owners]) if owners else "sharded parameters"
    raise RuntimeError(
        f"{names}: expected loss.backward(), which leaves the gradients of this rank's shards in .grad, found a "
        f"backward for these parameters by themselves (torch.autograd.grad, or backward(inputs=...)); the graph was "
        f"made of the full parameters, and reaches none of these; call loss.backward() without inputs, and set "
        f"requires_grad_(False) before the forward on what is to get no gradient"
    )
