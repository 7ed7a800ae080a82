"""Process groups and their store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
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


def backend_of(process_group: ProcessGroup, device: torch.device) -> Any:
    """What carries messages of `device` for `process_group`. Its calls are no operators: no mode sees them."""
    return process_group._get_backend(device)


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


def same_group(
    like: ProcessGroup, ranks: Sequence[int], device: torch.device, store: dist.Store, name: str, seconds: float
) -> ProcessGroup:
    """A process group of `ranks`, those of `like`, with connections of its own, known to nobody but the caller: it ends
    with its last reference. `name`: never used before, the same on all of its ranks; `store`: through which they find
    each other; `seconds`: its time limit. gloo and NCCL."""
    store = dist.PrefixStore(name, store)
    rank, size = like.rank(), len(ranks)
    made = cast(Any, ProcessGroup)(store, rank, size)
    kinds = ProcessGroup.BackendType
    if device.type == "cuda":
        options = cast(Any, like._get_backend(device)).options
        backend, kind = cast(Any, dist).ProcessGroupNCCL(store, rank, size, options), kinds.NCCL
    else:
        limit = timedelta(seconds=seconds)
        backend, kind = cast(Any, dist).ProcessGroupGloo(store, rank, size, limit), kinds.GLOO
    backend._set_sequence_number_for_group()
    made._register_backend(device, kind, backend)
    made._set_default_backend(kind)
    made._set_group_name(name)
    return cast(ProcessGroup, made)


class Recorded(NamedTuple):
    """A collective that this process issued and that is not over, over the process group of that name, by that thread
    (its `get_ident`): the `number`th of the group, as on all of its ranks. `call`: as the backend names it."""

    group: str
    number: int
    call: str
    thread: int

    @property
    def needs_all(self) -> bool:
        """Whether it ends on no rank before all have come."""
        return self.call in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def _recorded(*, active: bool) -> list[dict[str, Any]]:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, active)).get("entries", ()) if dump is not None else ()
    return [entry for entry in entries if not entry["is_p2p"]]


def active_collectives() -> list[Recorded]:
    """The collectives of this process that are not over, oldest first, as torch's flight recorder has them (gloo; empty
    with TORCH_FR_BUFFER_SIZE=0)."""
    return [
        Recorded(
            entry["process_group"][0],
            entry["collective_seq_id"],
            entry["profiling_name"].rpartition(":")[2],
            int(entry["thread_id"]),
        )
        for entry in _recorded(active=True)
        if not entry["retired"]
    ]


def issued_by_group() -> dict[str, int]:
    """How many collectives this process has issued over each group that torch.distributed made, at most."""
    recorded = {entry["process_group"][0]: int(entry["collective_seq_id"]) for entry in _recorded(active=False)}
    found = {}
    for name, group in known_groups().items():
        try:
            backend = cast(Any, group._get_backend(torch.device("cpu")))
            # gloo counts messages to one rank with them; the recorder may have dropped some.
            counted = int(backend._get_sequence_number_for_group())
        except RuntimeError:
            continue
        found[name] = min(counted, recorded.get(name, counted))
    return found


def known_groups() -> dict[str, ProcessGroup]:
    """The process groups that torch.distributed made in this process, by the name that they have on all of their ranks.
    From any thread."""
    return {str(group.group_name): group for group in list(distributed_c10d._world.pg_names)}
