"""Connections of a data group: how they are made, cut, and what their errors say.

Cutting ends every wait of this rank and its peers on the group at once, from any thread:

    gloo    has no call for it. A receive that times out closes all connections of its group (torch 2.11 to 2.13), so
            `cut_host` posts a receive with a timeout of a millisecond (tests/procs/test_data_groups.py)
    NCCL    `abort` of the backend

They connect at once, inside of a wait that the watch knows, also on NCCL, which would do it at the first message. A
thread of its own does it: neither gloo nor NCCL returns while a rank that is gone is missing. Nothing of Python's is
left with the backend, which may call its store whenever it likes, from threads of C++.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch import backend_of, default_store, same_group
from ..peers import Fault, Scope, Wait, wait_until

_CUT_TAG = 0x66736866
# Words in a backend's errors about connections, as opposed to errors about arguments.
_OF_CONNECTIONS = ("gloo/transport", "pair closure", "onnection", "ocket", "imed out", "NCCL")
# How long to wait, after a connection was closed, until a peer reports why or is found dead.
_CLOSED_SECONDS = 3.5
# The backend's timeout must come after the watch's, whose error names ranks.
_BACKEND_SECONDS_MORE = 30.0


def connected(
    scope: Scope,
    origin: dist.ProcessGroup,
    ranks: Sequence[int],
    device: torch.device,
    backend: str,
    name: str,
    wait: Wait,
) -> dist.ProcessGroup:
    """Connections between `ranks`, those of `origin`. Collective over them, inside of `wait`; `name`: the same on all
    of them, and unique."""
    seconds = scope.watch.settings.limit_seconds + _BACKEND_SECONDS_MORE

    def connect() -> dist.ProcessGroup:
        # A store of C++: a backend may use it for as long as it exists, from any thread. Nothing limits how long a
        # silent one is waited for.
        return same_group(origin, tuple(ranks), device, backend, default_store(), name, seconds)

    with scope.reporting("the connections of a group"):
        # First wait for all ranks here: the backend's own wait for them would end with its timeout.
        with scope.store_answers("the connections of a group"):
            asked = scope.watch.records.store
            asked.add(f"{name}/here", 1)
            wait_until(lambda: asked.add(f"{name}/here", 0) >= len(ranks), wait)
        return made_within(wait, connect)


def made_within(wait: Wait, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """`make()`, inside of `wait`. A wait that ends early leaves the thread to its time limit, and nobody uses what it
    makes."""
    made: Future[dist.ProcessGroup] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
        wait.wake()

    threading.Thread(target=run, name="fullshard connects", daemon=True).start()
    wait_until(made.done, wait)
    assert isinstance(wait.scope, Scope)
    try:
        return made.result()
    except dist.DistNetworkError as error:
        raise wait.scope.without_store().error(wait.doing) from error


def cut_host(group: dist.ProcessGroup, device: torch.device) -> None:
    """Cut the connections of a `group` of gloo, whatever the `device` of its messages is. Does not raise."""
    rank, size = group.rank(), group.size()
    backend = backend_of(group, device)
    for step in range(1, size):
        try:
            backend.recv([torch.empty(1)], (rank + step) % size, _CUT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
            # This peer had already closed its connection: those to the others are still open.


def is_of_connections(error: RuntimeError) -> bool:
    """Whether a backend's `error` is about its connections, and not about the message that it was given."""
    return any(word in str(error) for word in _OF_CONNECTIONS)


def explained(scope: Scope, wait: Wait, text: str, spoiled: str) -> RuntimeError:
    """The exception to raise instead of a backend's error, whose `text` it was, in `wait`. Waits some seconds for a
    peer to report why a connection was closed. The scope's data groups are cut afterwards. `spoiled`: the message after
    which the device computed without its bytes, or ""."""
    doing = wait.doing
    scope.failures.has_raised = True
    fault = scope.failures.cause or _reported(scope, wait)
    if fault is not None:
        scope.fail(fault, spoiled)
        return fault.error(doing)
    scope.publish("raised", text)
    scope.fail(Fault(scope.rank, "raised", text, scope.name, scope.epoch), spoiled)
    return RuntimeError(
        f"{doing}: expected an answer of the other ranks, found that a message between them failed ({text}) and "
        f"that none of them said why: a process that was killed, and served the store, or a broken network; see "
        f"the output of the other ranks"
    )


def _reported(scope: Scope, wait: Wait) -> Fault | None:
    watch, seconds = scope.watch, _CLOSED_SECONDS
    # Without the store, which the process that is gone may have served, the watch ends this wait.
    with suppress(RuntimeError):
        if not watch.records.is_one_machine():
            # Only missing signs of life show that a process on another machine is gone.
            seconds = max(seconds, watch.settings.beat_seconds + 2)
    with suppress(RuntimeError):
        end = time.monotonic() + seconds
        wait_until(lambda: wait.fault is not None or time.monotonic() > end, wait)
    return wait.fault
