"""Private process-group APIs: backends, options, names; and fake tensors."""

from __future__ import annotations

import importlib
import json
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

# ---- groups ----------------------------------------------------------------------------------------------------------
# Private process group APIs: backends, the store, and the flight recorder.


def allocate_for(process_group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Message memory of shape (numel,) for `process_group`: from its backend if it allocates, else from torch."""
    backend = process_group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def backend_of(process_group: ProcessGroup, device: torch.device) -> Any:
    """The backend of `process_group` for `device`. Its calls are not operators, so dispatch modes do not see them."""
    return process_group._get_backend(device)


def default_store() -> Any:
    """The store of the default process group, on a separate connection: a wait on it blocks no other user."""
    return cast(Any, distributed_c10d._get_default_store()).clone()


class StoreConnection:
    """The store of the default process group on a separate connection. Each request raises `RuntimeError` after
    `seconds` without an answer; so does making it, after 20 s at least.

    torch waits for an answer without a limit. If the machine that serves the store loses its power or its network, or
    the process is stopped, nothing closes the connection, and a rank would wait for ever. The kernel ends the wait
    (SO_RCVTIMEO), and torch itself that of a `get`, for which it polls. The connection is shut then: an answer that
    comes late would be read as that of the next request.
    """

    def __init__(self, seconds: float) -> None:
        port = getattr(_underlying(distributed_c10d._get_default_store()), "port", 0)
        before = _connected_to(port)
        self._store = _cloned(seconds)
        self._descriptors = _connected_to(port) - before
        self._store.set_timeout(timedelta(seconds=seconds))
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        for each in _sockets(self._descriptors):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def __getattr__(self, name: str) -> Any:
        call, descriptors = getattr(self._store, name), self._descriptors

        # It must not hold `self`: in a circle the connection would stay open until a garbage collection.
        def ask(*args: Any) -> Any:
            try:
                return call(*args)
            except RuntimeError as error:
                if "Socket Timeout" in str(error):
                    for each in _sockets(descriptors):
                        with suppress(OSError):
                            each.shutdown(socket.SHUT_RDWR)
                raise

        # Found without this function from now on.
        setattr(self, name, ask)
        return ask


# The least limit of a first contact. On a busy machine a clone of torch's store takes 5.01 s about once in ten times,
# where others take milliseconds, and took eight once (torch 2.13, without fullshard).
_FIRST_SECONDS = 20.0


def _cloned(seconds: float) -> Any:
    """`default_store()`. A silent server accepts the connection, and torch waits for its first answer without end, so
    a thread of its own does it."""
    made: Future[Any] = Future()
    limit = max(seconds, _FIRST_SECONDS)
    store = cast(Any, distributed_c10d._get_default_store())

    def clone() -> None:
        try:
            made.set_result(store.clone())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=clone, name="fullshard connects to the store", daemon=True).start()
    try:
        return made.result(limit)
    except TimeoutError:
        raise RuntimeError(f"expected the store to answer within {limit:g} s, found that it is silent") from None


def _sockets(descriptors: Iterable[int]) -> Iterator[socket.socket]:
    """Yields sockets as duplicates, so that closing these closes nothing."""
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            yield found


def _underlying(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _connected_to(port: int) -> set[int]:
    """The descriptors of this process that are connected to `port` of some machine."""
    found = set()
    for name in os.listdir("/dev/fd") if port else ():
        with suppress(OSError):  # the descriptor of the listing is closed by now; not every socket is connected
            # A duplicate of what is no socket would stay open: `socket.socket` raises before it owns it.
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.getpeername()[1:2] == (port,):
                        found.add(int(name))
    return found


def error_of(process_group: ProcessGroup, device: torch.device) -> str:
    """The error that NCCL's watchdog found in `process_group`, as torch names it; "" if none. Set before it aborts the
    communicator, so a message that it ended is never over before."""
    found = cast(Any, process_group._get_backend(device)).get_error()
    return "" if found == found.__class__.SUCCESS else str(found.name)


def timeout_of(process_group: ProcessGroup) -> float:
    """The timeout of `process_group`'s backend in seconds; half an hour if unknown."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return float(cast(Any, options)._timeout.total_seconds())
    return 1800.0


def same_group(
    like: ProcessGroup,
    ranks: Sequence[int],
    device: torch.device,
    backend: str,
    store: dist.Store,
    name: str,
    seconds: float,
) -> ProcessGroup:
    """A private process group of `ranks`, those of `like`, with its own connections; destroyed with its last reference.

    `backend`: that of `like` for `device`: "gloo", "nccl", or one that was registered with torch; `store`: for the
    rendezvous; `name`: unused before, the same on all ranks; `seconds`: the timeout, on NCCL that of `like`."""
    store = dist.PrefixStore(name, store)
    rank, size = like.rank(), len(ranks)
    kinds, limit = ProcessGroup.BackendType, timedelta(seconds=seconds)
    own: Any
    if backend == "nccl":
        options = own_options(cast(Any, like._get_backend(device)).options, ranks, name)
        own, kind = cast(Any, dist).ProcessGroupNCCL(store, rank, size, options), kinds.NCCL
    elif backend == "gloo":
        own, kind = cast(Any, dist).ProcessGroupGloo(store, rank, size, limit), kinds.GLOO
    else:
        own = distributed_c10d.Backend._plugins[backend.upper()].creator_fn(store, rank, size, limit)
        kind = kinds.CUSTOM
    if isinstance(own, ProcessGroup):  # a backend written in Python is the group
        made = cast(Any, own)
    else:
        made = cast(Any, ProcessGroup)(store, rank, size)
        made._register_backend(device, kind, own)
        made._set_default_backend(kind)
    made._set_group_name(name)
    if backend == "nccl":
        # Otherwise its first message would connect: a wait for the other ranks that nobody expects there.
        own.eager_connect_single_device(_indexed(device))
    return made  # type: ignore[no-any-return]


def own_options(like: Any, ranks: Sequence[int], name: str) -> Any:
    """New NCCL options with the time limit, the priority and the configuration of `like`, for a group of `ranks`.

    Not `like` itself: a group that torch split from another one has `split_from` and `split_color` in its options, and
    the first message of a communicator with those is a split of the parent, a collective over all ranks of the parent.
    """
    made = type(like)()
    for kept in ("_timeout", "is_high_priority_stream", "config"):
        if hasattr(like, kept):
            setattr(made, kept, _own(getattr(like, kept)))
    made.global_ranks_in_group = list(ranks)
    made.group_name = name
    return made


def _own(value: Any) -> Any:
    """`value`, and of a configuration of NCCL a copy by its settings. A copied struct would have the same text of
    `net_name`, and some versions of NCCL free it with each communicator (torch 2.15 copies it for that reason)."""
    if isinstance(value, (bool, timedelta)):
        return value
    made = type(value)()
    for name in dir(value):
        setting = getattr(value, name)
        if name[0].isalpha() and not callable(setting) and setting != getattr(made, name, None):
            setattr(made, name, setting)
    return made


def new_group(
    ranks: Sequence[int], like: ProcessGroup, device: torch.device, backend: str | None, purpose: str | None = None
) -> ProcessGroup:
    """A torch process group with `ranks`, this one included, which these ranks alone make. It has no communicator until
    a message needs one.

    `like`: the group beside which it is made; `backend`: that of `like`, None for the default group's.

    Where the default group is bound to a device, torch would make the communicator at once, as a split of the default
    group: a collective over all ranks of that, and memory that no message uses. So it is not bound meanwhile.
    """
    default = dist.group.WORLD
    assert default is not None
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        made = dist.new_group(
            list(ranks),
            backend=backend,
            use_local_synchronization=True,
            group_desc=purpose,
            **_bound_later(like, device),
        )
    finally:
        default.bound_device_id = bound
    assert isinstance(made, ProcessGroup)
    return made


def _bound_later(like: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The arguments by which a group beside `like` is of `device`, and connects at its first message.

    From torch 2.15 on the NCCL of "nccl" connects where it is bound, and torch binds a group without a device to that
    of LOCAL_RANK or of the rank: another rank's, where a program counts devices otherwise. Others need nothing."""
    there: Any = like._get_backend(device) if device.type in {one.type for one in like._device_types} else None
    while hasattr(there, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        there = there.wrapped_pg
    kinds = tuple(getattr(distributed_c10d, name) for name in _SECOND if hasattr(distributed_c10d, name))
    if not isinstance(there, kinds) or not hasattr(there.options, "lazy_init"):
        return {}
    options = type(there.options)()
    options.lazy_init = True
    return {"device_id": _indexed(device), "pg_options": options}


# The classes of torch 2.15.
_SECOND = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")


def _indexed(device: torch.device) -> torch.device:
    """`device` with its index: the current one if it has none."""
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


class Recorded(NamedTuple):
    """An unfinished collective of this process. `group`: name of the process group; `number`: its number in the group,
    the same on all ranks; `call`: the backend's name for it; `thread`: `get_ident` of the issuing thread."""

    group: str
    number: int
    call: str
    thread: int

    @property
    def needs_all(self) -> bool:
        """Whether it ends on no rank before all ranks joined."""
        return self.call in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def _recorded(*, active: bool) -> list[dict[str, Any]]:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, active)).get("entries", ()) if dump is not None else ()
    return [entry for entry in entries if not entry["is_p2p"]]


def active_collectives() -> list[Recorded]:
    """The unfinished collectives of this process, oldest first, from torch's flight recorder (gloo only; empty with
    TORCH_FR_BUFFER_SIZE=0)."""
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
    """Upper bound on the collectives that this process issued over each group of torch.distributed."""
    recorded = {entry["process_group"][0]: int(entry["collective_seq_id"]) for entry in _recorded(active=False)}
    found = {}
    for name, group in known_groups().items():
        try:
            backend = cast(Any, group._get_backend(torch.device("cpu")))
            # gloo's count includes point-to-point messages; the recorder may have dropped entries.
            counted = int(backend._get_sequence_number_for_group())
        except RuntimeError:
            continue
        found[name] = min(counted, recorded.get(name, counted))
    return found


def known_groups() -> dict[str, ProcessGroup]:
    """The process groups of torch.distributed in this process, by name, which is the same on all of their ranks.
    Thread-safe."""
    return {str(group.group_name): group for group in list(distributed_c10d._world.pg_names)}


# ---- fake ------------------------------------------------------------------------------------------------------------
# torch's fake process group: one process is one rank of any world, and its collectives do nothing.


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of `world` ranks: layouts and bytes are right, values are not. This process must have no group."""
    store: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    excepthook = sys.excepthook  # init_process_group puts one around it
    dist.init_process_group("fake", rank=rank, world_size=world, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
