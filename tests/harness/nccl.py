"""NCCL for the device "simulated": torch's name for it, and in its place a backend of the same shape (nccl.cpp).

register(seed)             torch has NCCL in this process, for this device: `init_process_group("nccl")`, or
                           "cpu:gloo,simulated:nccl", takes torch's own path to it, and so does fullshard
held("all-to-all")         messages of these kinds do not run inside, nor those after them on their communicator; a
                           wait orders the stream alone, and the host continues with memory that never arrived
failing("reduce-scatter")  messages of these kinds fail inside: nothing arrives, and the error is found later
failures()                 what messages found wrong: changed inputs, freed memory, a store that is gone

issue     returns at once. The outputs are poisoned (NaN), the inputs remembered.
run       some operators later, drawn from a seed. Messages of one communicator run in their order, those of several
          in any. An input that was changed meanwhile, or memory that was freed, is a failure.
wait      orders the current stream after the message. Operators run at once on this device, so it also returns no
          earlier than the message ran, or its communicator was aborted: then without an error, as on NCCL.
watchdog  ends messages that exceed the group's time limit: their error is set later, the communicators are aborted
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.harness import simulated

BACKEND = "nccl"
# The backends of a process group as torch makes it by default, where there is a device.
BOTH = "cpu:gloo,simulated:nccl"
# Whether the host asked for an event while a message was held back.
waits_on_host = threading.Event()


@functools.cache
def library() -> Any:
    """The compiled module."""
    simulated.load()
    path = str(simulated.build())
    spec = importlib.util.spec_from_loader(
        "simulated_nccl", importlib.machinery.ExtensionFileLoader("simulated_nccl", path)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register(seed: int = 0) -> None:
    """Give torch in this process NCCL, for the device. `seed`: when messages run."""
    made = library()
    made.begin(seed, _place)
    backends: Any = dist.Backend
    for place in (dist, distributed_c10d):
        vars(place)["ProcessGroupNCCL"] = made.ProcessGroupNCCL
    vars(distributed_c10d)["_NCCL_AVAILABLE"] = True
    vars(distributed_c10d)["default_pg_nccl_timeout"] = timedelta(minutes=10)
    backends.backend_capability[BACKEND] = ["simulated"]
    # From 2.15 on "nccl" is ProcessGroupNCCL2 unless TORCH_DIST_USE_NCCL2=0 was set at the import; what is simulated
    # here is the class that it then is, and that fullshard makes its own groups of with every torch.
    legacy = getattr(distributed_c10d, "_register_builtin_nccl_as_legacy", None)
    if legacy is not None:
        legacy()
    backends.default_device_backend_map["simulated"] = BACKEND


def _place() -> list[str]:
    return list(simulated.frames())


def end() -> None:
    """End all groups of this process: the job is over."""
    library().end()
    waits_on_host.clear()
    _freeze()


@functools.cache
def _freeze() -> None:
    """What the first job imported never becomes garbage; without this each later collection looks at all of it."""
    gc.collect()
    gc.freeze()


def failures() -> list[str]:
    """What messages found wrong so far, in this process."""
    return list(library().failures())


@contextmanager
def held(*kinds: str) -> Iterator[None]:
    """Hold back the messages of `kinds` that are issued inside; they run afterwards, unless they were aborted."""
    library().hold(list(kinds))
    try:
        yield
    finally:
        let_go()
        waits_on_host.clear()


def let_go() -> None:
    """Let the messages run that are held back; later ones are not."""
    library().let_go()


@contextmanager
def failing(*kinds: str) -> Iterator[None]:
    """Messages of `kinds` fail inside: nothing arrives, and the watchdog finds the error some time later."""
    library().fail(list(kinds))
    try:
        yield
    finally:
        library().fail([])


def is_quiet() -> bool:
    """Whether no message is held back; for `simulated.watched(queries=...)`."""
    if not library().any_held():
        return True
    waits_on_host.set()
    return False
