"""Bytes that a step writes, sends and holds, counted where torch dispatches operations; and NCCL's plan on a CPU.

    written    what operations write: new results and tensors changed in place, `.data` writes, list (foreach) copies,
               clones that autograd makes, and the bytes that a storage keeps when it grows (which no operation shows)
    messages   what is given to collectives, by kind; their outputs are written by them and are not in `written`
    across     how much of it one rank sends to other nodes, by kind. What a backend adds or gathers goes around a ring
               of ranks, as NCCL's does, where the last one of a node alone sends to another: the mean over ranks

    held       storages: when each one comes, changes its size, and goes

Nothing is sampled or estimated: an operation whose writes are not known stops the count. What a kernel writes inside of
itself and throws away is not seen, neither written nor held (a CPU sums bfloat16 into float32 by way of a float32 copy;
a GPU does not).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# New memory without contents, and changes of what a tensor says about its memory.
_WRITES_NOTHING = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "detach_",
        "as_strided_",
        "t_",
        "transpose_",
        "squeeze_",
        "unsqueeze_",
    }
)
# Collectives: the position of the tensors whose bytes are the message.
_MESSAGES = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "allreduce_": ("all-reduce", 0),
    # Between two ranks: counted where it leaves.
    "send": ("send", 0),
    "broadcast_": ("broadcast", 0),
}


class ByteCounter(TorchDispatchMode):
    """Counts while it is entered. `written` is by name of the operation, `messages` by kind of collective; bytes.

    `local_world`: how many consecutive ranks are on a node, for `across`; None: all.
    """

    def __init__(self, local_world: int | None = None) -> None:
        super().__init__()
        self._local_world = local_world
        self.across: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._growing: Any = None

    @property
    def written_nbytes(self) -> int:
        return sum(self.written.values())

    @property
    def messages_nbytes(self) -> int:
        return sum(self.messages.values())

    def __enter__(self) -> ByteCounter:
        self._growing = mock.patch.object(torch.UntypedStorage, "resize_", self._noting_growth())
        self._growing.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._growing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count_message(func, args)
        elif func.namespace == "fsdp":
            self._count_fsdp2(func, args, kwargs or {})
        elif func.namespace == "aten":
            self._count(func, args, kwargs or {}, result)
        elif func.namespace != "profiler":
            raise NotImplementedError(f"{func}: expected an operation of aten, c10d or fsdp; say here what it writes")
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _WRITES_NOTHING:
            return
        given = [*args, *kwargs.values()]
        known = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
        nbytes = 0
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[position] if position < len(args) else None)
                nbytes += sum(map(_nbytes, _tensors([value])))
        # A result that is, or looks into, an argument was counted as one if it was written.
        nbytes += sum(_nbytes(t) for t in _tensors([result]) if t.untyped_storage()._cdata not in known)
        self.written[name] += nbytes

    def _count_message(self, func: Any, args: Any) -> None:
        name = func._schema.name.removeprefix("c10d::")
        if name in ("barrier", "recv_"):
            return
        kind, position = _MESSAGES[name]
        nbytes = sum(map(_nbytes, _tensors([args[position]])))
        self.messages[kind] += nbytes
        if self._local_world is not None:
            self.across[kind] += int(nbytes * self._share_across(kind, func, args))

    def _share_across(self, kind: str, func: Any, args: Any) -> Fraction:
        """Of the bytes of a message, what this rank sends to other nodes."""
        names = [argument.name for argument in func._schema.arguments]
        group = dist.ProcessGroup.unbox(args[names.index("process_group")])
        nodes = [rank // self._local_world for rank in dist.get_process_group_ranks(group)]
        world, here = len(nodes), nodes[group.rank()]
        if kind == "send":
            return Fraction(nodes[args[names.index("dst")]] != here)
        if kind == "all-to-all":
            return Fraction(sum(node != here for node in nodes), world)
        crossing = sum(node != after for node, after in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        rounds = 2 if kind == "all-reduce" else 1
        return rounds * Fraction(world - 1, world) * Fraction(crossing, world)

    def _count_fsdp2(self, func: Any, args: Any, kwargs: Any) -> None:
        # torch's own copies between parameters and messages, which do not say in their schema what they write.
        name = func._schema.name.removeprefix("fsdp::")
        if name == "all_gather_copy_in":
            written = args[0]
        elif name in ("split_with_sizes_copy", "chunk_cat", "chunk_cat_mixed_dtype"):
            written = kwargs["out"]
        else:
            raise NotImplementedError(f"{func}: say here what it writes")
        self.written[f"fsdp::{name}"] += sum(map(_nbytes, _tensors([written])))

    def _noting_growth(self) -> Any:
        resize, counter = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            counter.written["storage growth"] += min(storage.size(), nbytes) if storage.size() != nbytes else 0
            return resize(storage, nbytes)

        return resize_


class _Event(NamedTuple):
    """A storage came, changed its size or went; it is named by the order in which storages were first seen."""

    storage: int
    nbytes: int
    mark: str


class MemoryCounter(TorchDispatchMode):
    """Follows every storage that operations bring, while it is entered. What is there before is where it counts from.

    `mark` names what happens from now on; `peak` says how much there was at most under a mark.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[_Event] = []
        self._mark = ""
        # By the address of the storage's implementation, which is another's once it went.
        self._names: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._born: dict[int, str] = {}
        self._resizing: Any = None

    def mark(self, name: str) -> None:
        self._mark = name
        self._events.append(_Event(-1, 0, name))

    def peak(self, mark: str, *, without_lasting: tuple[str, ...] = (), above_nbytes: int = 0) -> int:
        """The most bytes under `mark`, beyond what was there at the beginning; storages that came under one of
        `without_lasting` and are still there do not count, nor those that never had more than `above_nbytes`."""
        left = {name for name, size in self._sizes.items() if size and self._born.get(name) in without_lasting}
        if above_nbytes:
            largest = dict(self._sizes)
            for event in self._events:
                largest[event.storage] = max(largest.get(event.storage, 0), abs(event.nbytes))
            left |= {name for name, nbytes in largest.items() if nbytes <= above_nbytes}
        there = most = 0
        for event in self._events:
            if event.storage not in left:
                there += event.nbytes
            if event.mark == mark:
                most = max(most, there)
        return most

    def __enter__(self) -> MemoryCounter:
        resize, counter = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            counter._know([storage])
            result = resize(storage, nbytes)
            counter._look([storage])
            return result

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tensor.untyped_storage() for tensor in _tensors([*args, *(kwargs or {}).values()])]
        self._know(given)
        result = func(*args, **(kwargs or {}))
        self._look(given)
        self._look([tensor.untyped_storage() for tensor in _tensors([result])])
        return result

    def _know(self, storages: list[torch.UntypedStorage]) -> None:
        """What was there before is part of the beginning."""
        for storage in storages:
            if storage._cdata not in self._names:
                self._sizes[self._name(storage)] = storage.size()

    def _look(self, storages: list[torch.UntypedStorage]) -> None:
        for storage in storages:
            name = self._names.get(storage._cdata)
            if name is None:
                name = self._name(storage)
                self._born[name] = self._mark
            self._change(name, storage.size())

    def _name(self, storage: torch.UntypedStorage) -> int:
        name = self._names[storage._cdata] = len(self._sizes)
        self._sizes[name] = 0
        weakref.finalize(storage, self._gone, storage._cdata, name)
        return name

    def _gone(self, address: int, name: int) -> None:
        if self._names.get(address) == name:
            del self._names[address]
        self._change(name, 0)

    def _change(self, name: int, nbytes: int) -> None:
        if nbytes != self._sizes[name]:
            self._events.append(_Event(name, nbytes - self._sizes[name], self._mark))
            self._sizes[name] = nbytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def nccl_plan(direct_nbytes: int) -> Iterator[None]:
    """What is sharded and first run here gets the plan of NCCL on a GPU, whatever the backend.

    Parameters of at least `direct_nbytes` (in the compute dtype) travel by themselves, the others packed; the backend
    reduces gradients, and no buffers are kept between steps.
    """
    from fullshard.engine.executor import Shared

    with (
        mock.patch("fullshard.layout.gather.GROUPING_BACKENDS", frozenset({"fake", "gloo", "threaded"})),
        mock.patch("fullshard.layout.gather.EXCHANGING_BACKENDS", frozenset()),
        mock.patch("fullshard.layout.gather.PAIRWISE_BACKENDS", frozenset()),
        mock.patch("fullshard.api.fully_shard.DIRECT_GATHER_NBYTES", direct_nbytes),
        mock.patch("fullshard.engine.root.Shared", lambda *, keep: Shared(keep=False)),
    ):
        yield


@contextmanager
def gloo_plan(direct_nbytes: int) -> Iterator[None]:
    """What is sharded and first run here gets the plan of gloo, whatever the backend.

    Parameters and gradients of which a rank sends at least `direct_nbytes` go from rank to rank, the others packed.
    """
    with (
        mock.patch("fullshard.layout.gather.PAIRWISE_BACKENDS", frozenset({"fake", "gloo"})),
        mock.patch("fullshard.layout.gather.PAIRWISE_PARAMETER_NBYTES", direct_nbytes),
        mock.patch("fullshard.layout.gather.PAIRWISE_GRADIENT_NBYTES", direct_nbytes),
    ):
        yield


class KernelCounter(TorchDispatchMode):
    """Kernels that CUDA runs for the operators of a device, by kind, while it is entered: `kinds`, and `names`.

    copies, casts     of one dtype to the same one, and to another
    fills             of a value;  host: copies between host and device, those of addresses included
    arithmetic        the rest;    messages: calls of collectives

    One kernel for an operator, except: views and new memory run none; a `_foreach_` operator one for all tensors if
    they are dense and laid out alike, as its fast path asks for, and one for each otherwise; torch's `chunk_cat` and
    `split_with_sizes_copy` one, and a copy of the addresses from the host. Operators on DTensors count as what they
    run.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self._device = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        tensors = [*_tensors(given), *_tensors([result])]
        if self._device in {tensor.device.type for tensor in tensors}:
            self._count(func, given, result, tensors)
        return result

    def _count(self, func: Any, given: list[Any], result: Any, tensors: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        infos = [argument.alias_info for argument in func._schema.arguments]
        views = any(info is not None and not info.is_write for info in infos)
        if name in _WRITES_NOTHING or views or not any(tensor.numel() for tensor in tensors):
            return
        kind, kernels = "arithmetic", 1
        if func.namespace == "c10d":
            kind = "messages"
        elif len({tensor.device.type for tensor in tensors if tensor.dim()}) > 1 or name == "_local_scalar_dense":
            kind = "host"
        elif name in ("split_with_sizes_copy", "chunk_cat", "_chunk_cat"):
            self.kinds["host"] += 1
        elif name.startswith("_foreach_"):
            kernels = _foreach_kernels([list(_tensors([value])) for value in given if isinstance(value, (list, tuple))])
        if kind == "arithmetic" and any(word in name for word in ("copy", "clone", "cat")):
            kind = "casts" if len({tensor.dtype for tensor in tensors}) > 1 else "copies"
        elif kind == "arithmetic" and any(word in name for word in ("zero", "fill", "ones", "full", "scalar_tensor")):
            kind = "fills"
        self.kinds[kind] += kernels
        self.names[name] += kernels


def _foreach_kernels(lists: list[list[Tensor]]) -> int:
    """Of a `_foreach_` operator on CUDA."""
    lists = [tensors for tensors in lists if tensors]
    first = lists[0]
    alike = all(
        one.shape == other.shape
        and all(n == 1 or a == b for n, a, b in zip(one.shape, one.stride(), other.stride(), strict=True))
        for tensors in lists[1:]
        for one, other in zip(first, tensors, strict=True)
    )
    dense = all(_is_dense(tensor) for tensors in lists for tensor in tensors)
    same = all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in lists)
    return 1 if alike and dense and same else len(first)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory, each once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
