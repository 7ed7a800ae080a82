"""Process groups and their store."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d


def allocate_for(process_group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for messages of `process_group`, (numel,): from its backend where that allocates, else torch's."""
    backend = process_group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def launch_together(
    process_group: ProcessGroup, device: torch.device, call: Callable[..., object], messages: Sequence[tuple[Any, ...]]
) -> Any:
    """The work of `call(*message)` for all of `messages`, which send over `process_group`: one launch. NCCL, and
    the fake group."""
    process_group._start_coalescing(device)
    try:
        for message in messages:
            call(*message)
    except BaseException:
        # Left open it would swallow whatever is sent next.
        process_group._end_coalescing(device)
        raise
    return process_group._end_coalescing(device)


def default_store() -> Any:
    """The store of the default process group, by a connection of our own: one that waits holds up nobody else."""
    return cast(Any, distributed_c10d._get_default_store()).clone()


def timeout_of(process_group: ProcessGroup) -> float:
    """Seconds after which the backend of `process_group` gives a message up; half an hour where it does not say."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return float(cast(Any, options)._timeout.total_seconds())
    return 1800.0


def same_group(like: ProcessGroup, ranks: Sequence[int], device: torch.device, name: str) -> ProcessGroup:
    """A process group of `ranks`, those of `like`, with connections of its own, known to nobody but the caller: it ends
    with its last reference. `name`: never used before, the same on all of its ranks. gloo and NCCL."""
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    rank, size = like.rank(), len(ranks)
    made = cast(Any, ProcessGroup)(store, rank, size)
    kinds = ProcessGroup.BackendType
    if device.type == "cuda":
        options = cast(Any, like._get_backend(device)).options
        backend, kind = cast(Any, dist).ProcessGroupNCCL(store, rank, size, options), kinds.NCCL
    else:
        timeout = cast(Any, like._get_backend(device)).options._timeout
        backend, kind = cast(Any, dist).ProcessGroupGloo(store, rank, size, timeout), kinds.GLOO
    backend._set_sequence_number_for_group()
    made._register_backend(device, kind, backend)
    made._set_default_backend(kind)
    made._set_group_name(name)
    return cast(ProcessGroup, made)


class Recorded(NamedTuple):
    """A collective that this process issued, over the process group of that name, by that thread (its `get_ident`): the
    `number`th of the group. Only collectives count, so it has that number on all ranks of the group. `call`: as the
    backend names it, "all_gather". `is_over`: the backend has finished it."""

    group: str
    number: int
    call: str
    thread: int
    is_over: bool


def issued_collectives() -> list[Recorded]:
    """The last collectives of this process over gloo (2,000 of them, TORCH_FR_BUFFER_SIZE), oldest first. Empty where
    torch does not record them. Some 40 ms when there are so many."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump()).get("entries", ()) if dump is not None else ()
    return [
        Recorded(
            entry["process_group"][0],
            entry["collective_seq_id"],
            entry["profiling_name"].rpartition(":")[2],
            int(entry["thread_id"]),
            entry["retired"],
        )
        for entry in entries
        if not entry["is_p2p"]
    ]


def issued_at_most(process_group: ProcessGroup) -> int:
    """How many collectives this process issued over the host's backend of `process_group`; gloo counts messages to one
    rank with them. Very many where that is not known."""
    try:
        backend = cast(Any, process_group._get_backend(torch.device("cpu")))
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return sys.maxsize


def known_groups() -> dict[str, ProcessGroup]:
    """The process groups that torch.distributed made in this process, by the name that they have on all of their ranks.
    From any thread."""
    return {str(group.group_name): group for group in list(distributed_c10d._world.pg_names)}
