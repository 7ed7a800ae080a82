"""NCCL for the device "simulated": torch's names for it, and in its place backends of the same shape (nccl.cpp).

register(seed)             torch has NCCL in this process, for this device: `init_process_group("nccl")`, or
                           "cpu:gloo,simulated:nccl", takes torch's own path to it, and so does fullshard.
                           "nccl-legacy", "nccl2" and "nccl-lazy" make what torch 2.15 makes of these names, on
                           every torch; "nccl2" is what 2.15 makes of "nccl", too
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
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.harness import simulated

BACKEND = "nccl"
# What torch 2.15 has beside it.
OTHERS = ("nccl-legacy", "nccl2", "nccl-lazy")
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
        for kind in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
            vars(place)[kind] = getattr(made, kind)
    vars(distributed_c10d)["_NCCL_AVAILABLE"] = True
    vars(distributed_c10d)["default_pg_nccl_timeout"] = timedelta(minutes=10)
    backends.backend_capability[BACKEND] = ["simulated"]
    # From 2.15 on "nccl" is ProcessGroupNCCL2 unless TORCH_DIST_USE_NCCL2=0 was set at the import; what is simulated
    # here is the class that it then is, and that fullshard makes its own groups of with every torch.
    legacy = getattr(distributed_c10d, "_register_builtin_nccl_as_legacy", None)
    if legacy is not None:
        legacy()
    backends.default_device_backend_map["simulated"] = BACKEND
    for name in OTHERS:
        if name.upper() not in backends._plugins:
            backends.register_backend(name, functools.partial(_make, name), extended_api=True, devices=["simulated"])
            backends.backend_type_map.setdefault(name, dist.ProcessGroup.BackendType.CUSTOM)


def backends_of(name: str) -> str:
    """The backends of a process group with `name` for the device, as torch makes it by default."""
    return f"cpu:gloo,simulated:{name}"


def _make(name: str, given: Any, options: Any) -> Any:
    """A backend as torch 2.15 makes it. `given`: torch's `_DistributedBackendOptions`."""
    made = library()
    options = made.ProcessGroupNCCL.Options() if options is None else options
    options._timeout, options.group_name = given.timeout, given.group_id
    options.global_ranks_in_group = given.global_ranks_in_group
    told = given.store, given.group_rank, given.group_size
    if name == "nccl-legacy":
        return made.ProcessGroupNCCL(*told, options)
    kind = made.ProcessGroupNCCL2 if name == "nccl2" else made.ProcessGroupNCCLLazy
    if (parent := _parent(kind, options)) is not None:
        ranks = [dist.get_group_rank(dist.group.WORLD, rank) for rank in given.global_ranks_in_group]
        return parent.split(given.store, ranks, options)
    group = _group_of(given)
    device = group.bound_device_id
    if device is None:
        rank = given.global_ranks_in_group[given.group_rank] if given.global_ranks_in_group else given.group_rank
        place = int(os.environ.get("LOCAL_RANK", rank)) % torch.accelerator.device_count()
        device = group.bound_device_id = torch.device("simulated", place)
    return kind(*told, options, device)


def _parent(kind: Any, options: Any) -> Any:
    """What a new group is split from: the default group where that is bound."""
    world = dist.group.WORLD
    if world is None or world.bound_device_id is None or options.lazy_init:
        return None
    parent = world._get_backend(world.bound_device_id)
    return parent if type(parent) is kind and parent.supports_splitting else None


def _group_of(given: Any) -> Any:
    """The group that is being made, which torch tells a backend only from 2.14 on."""
    found = getattr(given, "process_group", None)
    frame = sys._getframe()
    while found is None:
        found = frame.f_locals.get("pg")
        frame = frame.f_back  # type: ignore[assignment]
    return found


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
def failing(*kinds: str, after: int = 0) -> Iterator[list[int]]:
    """Messages of `kinds` fail inside, but for the first `after` ones: nothing arrives, and the watchdog finds the
    error some time later. Afterwards the yielded list holds how many of these did not come."""
    left: list[int] = []
    library().fail(list(kinds), after)
    try:
        yield left
    finally:
        left.append(library().fail([], 0))


def is_quiet() -> bool:
    """Whether no message is held back; for `simulated.watched(queries=...)`."""
    if not library().any_held():
        return True
    waits_on_host.set()
    return False
