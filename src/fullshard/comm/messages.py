"""Texts between the first rank and the others, over a separate data group, and small messages over meshes.

A background save sends while the model trains, and NCCL cannot send from the CPU; so the first message opens a gloo
group beside each process group. It has its own scope: a failed save does not fail a step, nor a failed step a save.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .._torch import dtensor_like, local_of
from ..peers import Scope, scope_of
from .comparison import number_of
from .data_group import DataGroup, Line, can_cut, data_group, open_data_group
from .group import backend_name, message_device

# ---- messages --------------------------------------------------------------------------------------------------------


class Messenger(NamedTuple):
    """One rank of `world`. Without a line it is alone and sends nothing. `members`: its ranks, in the numbers of the
    default group."""

    line: Line | None
    rank: int
    world: int
    device: str
    members: tuple[int, ...]

    @property
    def group(self) -> DataGroup | dist.ProcessGroup | None:
        """The group that carries its messages."""
        return None if self.line is None else self.line.data_group or self.line.origin

    @property
    def _scope(self) -> Scope | None:
        return None if self.line is None or self.line.data_group is None else self.line.data_group.scope

    @property
    def is_own(self) -> bool:
        """Whether its connections are its own, and not those of the process group."""
        return self.line is not None and self.line.data_group is not None

    def connect(self) -> None:
        """Wait for all ranks, if their connections do not exist yet."""
        if self.line is not None and self.line.data_group is not None:
            self.line.data_group.connect()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks do `what` inside: a block of messages, by its number since they last met. If one raises, all raise
        in the same block, those too that only begin it; they meet before the next one."""
        scope = self._scope
        if scope is None:
            yield
            return
        with scope.within(what), scope.reporting(what):
            self._begin(scope, what)
            yield
            scope.failures.block += 1

    def _begin(self, scope: Scope, what: str) -> None:
        failures = scope.failures
        causes = [fault for fault in scope.causes() if not fault.is_found]
        left = next((fault for fault in causes if fault.block == failures.block), None)
        if left is not None and not failures.has_raised:
            error = left.error(what)
            # Some rank may wait for this one, whose messages the first one that failed had sent.
            scope.publish("raised", f"{type(error).__name__}: {error}")
            raise error
        # Whoever failed in a later block has sent all messages of this one.
        if failures.must_meet or len(causes) < len(scope.causes()) or any(f.block < failures.block for f in causes):
            scope.meet()

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """This rank prepares `what` inside, while the others wait; an exception is reported to them."""
        with nullcontext() if self._scope is None else self._scope.reporting(what):
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """This thread sends inside, concurrently with the model's thread."""
        scope = self._scope
        if scope is None:
            yield
            return
        scope.watch.waiting.send_beside(1)
        try:
            yield
        finally:
            scope.watch.waiting.send_beside(-1)

    def fold(self, text: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes | None:
        """All texts as one, on the first rank; None on the others. Each rank combines its own text with those of the
        ranks below it in a tree (`below`), in their order, and sends the result on: `combine` is associative.

        No rank receives more than FAN_IN messages, whatever the world is, and the tree has a depth of log(world).
        """
        if self.line is None or self.world == 1:
            return combine([text])
        found = self.line.send(_Fold(self, self.line, text, combine).begin).wait()
        return found if isinstance(found, bytes) else None

    def collect(self, text: bytes) -> list[bytes] | None:
        """The texts of all ranks in rank order, on the first rank; None on the others."""
        joined = self.fold(self.rank.to_bytes(8, "little") + len(text).to_bytes(8, "little") + text, b"".join)
        if joined is None:
            return None
        texts, at = dict[int, bytes](), 0
        while at < len(joined):
            rank, nbytes = (int.from_bytes(joined[at + i : at + i + 8], "little") for i in (0, 8))
            texts[rank] = joined[at + 16 : at + 16 + nbytes]
            at += 16 + nbytes
        return [texts[rank] for rank in range(self.world)]

    def share(self, text: bytes | None, source: int = 0) -> bytes:
        """Broadcast the text of the rank at `source` of the group, the first one; the others pass None."""
        if self.line is None or self.world == 1:
            assert text is not None
            return text
        length = torch.tensor([len(text or b"")], dtype=torch.int64, device=self.device)
        self.line.broadcast(length, source).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if text is not None:
            data.copy_(_tensor(text))
        if len(data):
            self.line.broadcast(data, source).wait()
        return _bytes(data)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The maximum of each of `values` over all ranks."""
        if self.line is None or self.world == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.int64, device=self.device)
        self.line.all_reduce(found, dist.ReduceOp.MAX).wait()
        most: list[int] = found.tolist()
        return most

    def is_same(self, said: str) -> bool:
        """Whether `said` is the same on all ranks; 16 bytes."""
        number = number_of(said)
        most, least = self.largest([number, -number])
        return most == -least


# How many ranks send to one, at most; and the bytes of a message's first part, which has its length.
FAN_IN = 16
_FRAME_NBYTES = 256
_FOLD_TAG = 0x66736869


@functools.cache
def fan_in(world: int) -> int:
    """How many ranks of `world` send to one in the tree: as few as make it no deeper than FAN_IN does. So its branches
    are about equal, and none passes on most of what there is.

    >>> fan_in(17), fan_in(20), fan_in(10_000)
    (16, 4, 10)
    """
    depth = _depth(world, FAN_IN)
    return next(each for each in range(1, FAN_IN + 1) if _depth(world, each) <= depth)


def _depth(world: int, fan_in: int) -> int:
    """The depth of a tree of `world` ranks."""
    depth, room, level = 0, 1, 1
    while room < world:
        depth, level = depth + 1, level * fan_in
        room += level
    return depth


def below(rank: int, world: int) -> range:
    """The ranks that send to `rank` in the tree.

    >>> below(0, 20), below(1, 20)
    (range(1, 5), range(5, 9))
    """
    each = fan_in(world)
    return range(min(rank * each + 1, world), min((rank + 1) * each + 1, world))


def above(rank: int, world: int) -> int:
    """The rank to which `rank`, not the first one, sends."""
    return (rank - 1) // fan_in(world)


class _Fold:
    """One `Messenger.fold` over a line, of which it is one message."""

    def __init__(self, of: Messenger, line: Line, text: bytes, combine: Callable[[list[bytes]], bytes]) -> None:
        self._line, self._rank, self._world, self._device = line, of.rank, of.world, of.device
        self._text, self._combine = text, combine

    def begin(self) -> _Fold:
        """Expect what arrives."""
        group = self._line.process_group
        self._frames = [self._empty(_FRAME_NBYTES) for _ in below(self._rank, self._world)]
        self._works = [
            group.recv([frame], rank, _FOLD_TAG)
            for rank, frame in zip(below(self._rank, self._world), self._frames, strict=True)
        ]
        return self

    def wait(self) -> bytes | None:
        group, texts = self._line.process_group, [self._text]
        for rank, frame, work in zip(below(self._rank, self._world), self._frames, self._works, strict=True):
            work.wait()
            head = _bytes(frame)
            nbytes, text = int.from_bytes(head[:8], "little"), head[8:]
            if nbytes > len(text):
                rest = self._empty(nbytes - len(text))
                group.recv([rest], rank, _FOLD_TAG).wait()
                text += _bytes(rest)
            texts.append(text[:nbytes])
        made = self._combine(texts)
        if self._rank == 0:
            return made
        room = _FRAME_NBYTES - 8
        head = len(made).to_bytes(8, "little") + made[:room].ljust(room, b"\0")
        for part in filter(None, (head, made[room:])):
            group.send([_tensor(part).to(self._device)], above(self._rank, self._world), _FOLD_TAG).wait()
        return None

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def alone() -> Messenger:
    """A messenger for this process alone."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Messenger(None, 0, 1, "cpu", (rank,))


def messenger(process_group: dist.ProcessGroup | None, purpose: str = "checkpoint") -> Messenger:
    """The messenger of `process_group` (None: the default group, or `alone` if there is none). Sends nothing. Those of
    another `purpose` have connections of their own."""
    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            return alone()
        process_group = dist.group.WORLD
        assert process_group is not None
    rank, world = process_group.rank(), process_group.size()
    ranks = tuple(dist.get_process_group_ranks(process_group))
    backend = str(dist.get_backend_config(process_group))
    if world == 1 or not any(can_cut(part.rpartition(":")[2]) for part in backend.split(",")):
        # Test backends, whose groups have no sockets.
        device = message_device(backend, torch.device("cpu")) or "cpu"
        return Messenger(Line(process_group), rank, world, device, ranks)
    # One scope per process group, even for equal ranks; torch's group names are equal on all ranks.
    scope = scope_of(ranks, f"{purpose}s {process_group.group_name}")
    assert scope is not None
    made = open_data_group(scope, process_group, torch.device("cpu"), "gloo", purpose)
    return Messenger(Line(process_group, made), rank, world, "cpu", ranks)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    here = tensor.cpu()  # avoids numpy, which torch does not require
    return ctypes.string_at(here.data_ptr(), len(here)) if len(here) else b""


# ---- agree -----------------------------------------------------------------------------------------------------------
# Small messages over all axes of a mesh, by which ranks agree. Complete on return.

_TEXT_NBYTES = 1000
_HOST = torch.device("cpu")
# The default description of a wait.
_SUM = "a sum between steps"


@contextmanager
def together_over(meshes: Iterable[DeviceMesh], what: str) -> Iterator[None]:
    """All ranks of `meshes` do `what` inside, outside of a step: `Scope.together` for the meshes and their axes."""
    scopes: dict[Scope, None] = {}
    for mesh in dict.fromkeys(meshes):
        axes = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        for ranks in (mesh.mesh.flatten().tolist(), *axes):
            scope = scope_of(ranks)
            if scope is not None:
                scopes[scope] = None
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope.together(what))
        yield


@contextmanager
def line_over(
    scope: Scope | None, process_group: dist.ProcessGroup, device: torch.device, purpose: str, doing: str
) -> Iterator[Line]:
    """A line for messages of `device` between the ranks of `process_group`: over a data group, which raises if a rank
    of `scope` failed, where its backend has any. `doing`: for errors. The first one is collective."""
    backend = backend_name(process_group, device)
    if scope is None or not can_cut(backend):
        yield Line(process_group)
        return
    with scope.within(doing):
        if not any(isinstance(group, DataGroup) and group.purpose == "data" for group in scope.groups.values()):
            # No root has formed, so only this call can make the ranks meet after a failure.
            scope.resume()
        with scope.reporting(doing):
            yield Line(process_group, open_data_group(scope, process_group, device, backend, purpose))


def _small(process_group: dist.ProcessGroup, device: torch.device, what: str) -> AbstractContextManager[Line]:
    """The line for small messages between the ranks of `process_group`."""
    found = data_group(process_group)
    scope = scope_of(dist.get_process_group_ranks(process_group)) if found is None else found.scope
    purpose = "small" if found is None or found.device.type == device.type else f"small {device.type}"
    return line_over(scope, process_group, device, purpose, what if scope is None else scope.told or what)


def all_reduce_over(
    tensor: Tensor, process_group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, what: str = _SUM
) -> None:
    """All-reduce in place over any process group; complete on return.

    If the group has no backend for the tensor's device (a CPU tensor with NCCL), the tensor is copied to the group's
    device and back: meant for small tensors.
    """
    elsewhere = message_device(str(dist.get_backend_config(process_group)), tensor.device)
    moved = tensor if elsewhere is None else tensor.to(elsewhere)
    with _small(process_group, moved.device, what) as line:
        line.all_reduce(moved, op).wait()
    if elsewhere is not None:
        tensor.copy_(moved)


def exchanged_over(
    tensor: Tensor | None, process_group: dist.ProcessGroup, ranks: Sequence[int], what: str
) -> list[Tensor]:
    """`tensor` of each of `ranks` of the group, in their order, on each of them; on others, which pass None, nothing.
    One message to each of them; complete on return. Collective over the group."""
    here = _HOST if tensor is None else tensor.device
    device = torch.device(message_device(str(dist.get_backend_config(process_group)), here) or here)
    flat = None if tensor is None else tensor.detach().to(device).contiguous().view(-1)
    world = process_group.size()
    sizes = [0 if flat is None or rank not in ranks else flat.numel() for rank in range(world)]
    pieces = torch.empty(0, device=device) if flat is None else torch.cat([flat] * len(ranks))
    out = torch.empty_like(pieces)
    with _small(process_group, pieces.device, what) as line:
        line.exchange(out, pieces, sizes, sizes).wait()
    if flat is None or tensor is None:
        return []
    found = dict(zip(sorted(ranks), out.split(flat.numel()) if flat.numel() else [out] * len(ranks), strict=True))
    return [found[rank].view(tensor.shape).to(tensor.device) for rank in ranks]


def sum_over(mesh: DeviceMesh, counts: Tensor, what: str = _SUM) -> Tensor:
    """The sum of `counts` (of any shape) over all ranks of `mesh`, on the mesh's device. Axes of one rank send
    nothing."""
    return _reduce_over(mesh, counts, dist.ReduceOp.SUM, what)


def largest_over(mesh: DeviceMesh, values: Tensor, what: str) -> Tensor:
    """The maximum of each of `values` over all ranks of `mesh`, otherwise as `sum_over`."""
    return _reduce_over(mesh, values, dist.ReduceOp.MAX, what)


def _reduce_over(mesh: DeviceMesh, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
    values = values.to(mesh.device_type)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            all_reduce_over(values, mesh.get_group(axis), op, what)
    return values


def least_over(groups: Sequence[dist.ProcessGroup], value: Tensor) -> Tensor:
    """All-reduce `value` (any shape) to its minimum, in place, over one group after the other."""
    for group in groups:
        all_reduce_over(value, group, dist.ReduceOp.MIN)
    return value


def told_by_one(groups: Sequence[dist.ProcessGroup], text: str | None, device: torch.device) -> str:
    """Share the `text` of the only rank of `groups` that has one; cut at a thousand bytes."""
    message = torch.zeros(_TEXT_NBYTES, dtype=torch.int32)
    if text is not None:
        encoded = text.encode()[:_TEXT_NBYTES]
        message[: len(encoded)] = -torch.tensor(list(encoded), dtype=torch.int32)
    message = least_over(groups, message.to(device))
    return bytes((-message).tolist()).rstrip(b"\0").decode(errors="replace")


def joining_groups(meshes: Iterable[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Process groups over which, one after the other, an extremum reaches all ranks of `meshes`.

    If one mesh contains the ranks of all others: its axes. Otherwise the axes of all, twice: a result of the last mesh
    must reach the ranks of the first one. Every rank gets its own groups, in the same order.
    """
    ranks = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in dict.fromkeys(meshes)}
    # Drop meshes whose ranks are a part of another's; of equal ones keep the first.
    wide = [
        mesh
        for i, (mesh, own) in enumerate(ranks.items())
        if not any(own < other or (own == other and j < i) for j, other in enumerate(ranks.values()))
    ]
    groups = [mesh.get_group(axis) for mesh in wide for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return groups if len(wide) < 2 else [*groups, *groups]


# ---- broadcast -------------------------------------------------------------------------------------------------------
# Broadcast tensors through one buffer of bounded size.

BUFFER_NBYTES = 16 << 20


def broadcast_over(
    mesh: DeviceMesh, tensors: Sequence[Tensor], source: int, what: str = "a broadcast", *, nbytes: int = BUFFER_NBYTES
) -> None:
    """Broadcast `tensors` of one rank of `mesh` in place: plain tensors with data, equal in number and sizes.

    source: the sender's position in `mesh`, in row-major order. The buffer, of at most `nbytes` bytes, is on the device
    of the mesh. `what`: for errors. Collective; complete on return.
    """
    (coordinate,) = (torch.arange(mesh.size()).view(mesh.mesh.shape) == source).nonzero().tolist()
    # One axis after the other: after the last one, every rank has the source's values.
    axes = [(mesh.get_group(axis), at) for axis, at in enumerate(coordinate) if mesh.size(axis) > 1]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    buffer = torch.empty(min(nbytes, total), dtype=torch.uint8, device=mesh.device_type)
    filled: list[tuple[Tensor, Tensor]] = []
    used = 0

    def flush() -> None:
        nonlocal used
        for place, piece in filled:
            place.copy_(piece)
        for group, at in axes:
            with _small(group, buffer.device, what) as line:
                line.broadcast(buffer[:used], at).wait()
        for place, piece in filled:
            piece.copy_(place)
        filled.clear()
        used = 0

    with torch.no_grad():
        for tensor in tensors:
            written = tensor.detach()
            bytes_of = written.contiguous().as_strided((written.numel(),), (1,)).view(torch.uint8)
            left = bytes_of
            while left.numel():
                taken = min(left.numel(), buffer.numel() - used)
                filled.append((buffer[used : used + taken], left[:taken]))
                used, left = used + taken, left[taken:]
                if used == buffer.numel():
                    flush()
            if not written.is_contiguous():
                if filled:
                    flush()
                written.copy_(bytes_of.view(written.dtype).view(written.shape))
        if filled:
            flush()


# ---- whole -----------------------------------------------------------------------------------------------------------
# `full_tensor()` over a data group, so that an error names the failed peer.


def whole_of(tensor: DTensor, what: str) -> Tensor:
    """`tensor.full_tensor()` without a graph; collective over its mesh, complete on return. `what`: for errors.

    Handles tensors sharded over one mesh axis, as by `fully_shard`; torch gathers others (tensor parallelism). The
    result is where the shard is: one on the host goes over the device if no group sends from there (NCCL alone).
    """
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not axes:
        return local_of(tensor)
    (axis, *more), mesh = axes, tensor.device_mesh
    here = local_of(tensor).device
    sends = message_device(str(dist.get_backend_config(mesh.get_group(axis))), here)
    if sends is not None:
        return whole_of(dtensor_like(tensor, local_of(tensor).to(sends)), what).to(here)
    placement = tensor.placements[axis]
    if more or type(placement) is not Shard or mesh.size(axis) == 1:
        return tensor.full_tensor()
    with _small(mesh.get_group(axis), here, what) as line:
        if line.data_group is None:
            return tensor.full_tensor()
        world, dim = mesh.size(axis), placement.dim
        # Shards as in torch: equal parts, of which the last ones may be smaller or empty.
        rows = -(-tensor.shape[dim] // world)
        part = local_of(tensor).movedim(dim, 0)
        padded = part.contiguous()
        if len(part) < rows:
            padded = part.new_zeros((rows, *part.shape[1:]))
            padded[: len(part)] = part
        gathered = padded.new_empty((world * rows, *part.shape[1:]))
        if gathered.numel():
            line.gather_into(gathered, padded).wait()
    return gathered[: tensor.shape[dim]].movedim(0, dim)
