"""The tensor on a module under a parameter's name: the only place that writes `module._parameters`.

A parameter that several modules share (tied weights) has one slot per module and name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

# ---- memory ----------------------------------------------------------------------------------------------------------
# The memory of the full parameters of one group: allocated while they are needed, zero bytes otherwise.
#
# Autograd saves views of full parameters in forward and reads them in backward, after the memory was freed and filled
# again. They must therefore keep their storage *object*: its bytes are resized, it is never replaced.


class OwnedMemory:
    """A separate storage of `numel` elements; `allocate` and `release` resize it, also on a meta device.

    It starts allocated: views of it can only be made while its bytes exist (torch checks bounds, and `set_` even grows
    a storage that is too small). The views stay valid when it is released and allocated again.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.size()
        # The bytes stay between uses, at one address (`set_keep_unsharded_storage`).
        self.keeps = False

    @property
    def live_nbytes(self) -> int:
        """Bytes held right now."""
        return self._storage.size()

    def allocate(self) -> None:
        if self._storage.size() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def release(self) -> None:
        if not self.keeps:
            self._storage.resize_(0)


class SharedMemory:
    """One rank, one dtype: the memory of the shards itself. It is never freed and costs nothing."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat.detach()
        self.keeps = False  # has no effect: it never moves

    @property
    def live_nbytes(self) -> int:
        """0: it needs no bytes beyond the shards."""
        return 0

    def allocate(self) -> None:
        pass

    def release(self) -> None:
        pass


class TrackedMemory:
    """Storages that are allocated and freed together: `owned` ones, made here, and those of other tensors."""

    def __init__(self) -> None:
        self.owned: list[OwnedMemory] = []
        self.keeps = False
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def track(self, memory: OwnedMemory) -> None:
        self.owned.append(memory)

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        """Allocate and free it with the others from now on; one that is already tracked is not counted twice."""
        if all(storage.data_ptr() != memory.flat.untyped_storage().data_ptr() for memory in self.owned):
            self._storages[storage.data_ptr()] = (storage, storage.size())

    @property
    def live_nbytes(self) -> int:
        """Bytes held right now."""
        others = sum(storage.size() for storage, _ in self._storages.values())
        return others + sum(memory.live_nbytes for memory in self.owned)

    def allocate(self) -> None:
        for memory in self.owned:
            memory.allocate()
        for storage, nbytes in self._storages.values():
            if storage.size() != nbytes:
                storage.resize_(nbytes)

    def release(self) -> None:
        if self.keeps:
            return
        for memory in self.owned:
            memory.release()
        for storage, _ in self._storages.values():
            storage.resize_(0)


# ---- swap ------------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """A place where a parameter is registered."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.name] = parameter


class Swap:
    """The slots of a group's parameters, flat, so that a swap is one loop without a call per parameter.

    `owners[i]` says which parameter, by position, belongs into the i-th slot. `shards` and `fulls` are the group's
    parameters, one for each slot.
    """

    __slots__ = ("_places", "fulls", "owners", "registered", "shards")

    def __init__(self, slots: Iterable[tuple[int, Slot]]) -> None:
        pairs = list(slots)
        self.owners = [owner for owner, _ in pairs]
        # Not setattr: it walks all registries and is thirty times slower. A module's dict never changes.
        self._places = [(slot.module._parameters, slot.name) for _, slot in pairs]
        registries, names = [registry for registry, _ in self._places], [name for _, name in self._places]
        # The parameters in the slots now, one after the other. No Python per slot: asked at each all-gather.
        self.registered = partial(map, dict.get, registries, names)
        self.shards: list[nn.Parameter] = []
        self.fulls: list[nn.Parameter] = []

    def spread(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """One entry per slot, from one per parameter."""
        return [parameters[owner] for owner in self.owners]

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put `parameters`, one per slot, on the modules."""
        for (registry, name), parameter in zip(self._places, parameters, strict=True):
            registry[name] = parameter

    def show_shards(self, shown: Sequence[nn.Parameter] | None = None) -> None:
        """Put the sharded parameters back in place of the full ones, or of `shown`, one per slot; parameters that users
        put there are kept."""
        before = self.fulls if shown is None else shown
        for (registry, name), old, shard in zip(self._places, before, self.shards, strict=True):
            if registry.get(name) is old:
                registry[name] = shard


class Found(NamedTuple):
    """A parameter of a unit before it is sharded."""

    parameter: nn.Parameter
    # Dotted name below the unit's module, of the first slot.
    name: str
    slots: tuple[Slot, ...]
    # The dim to shard, not negative.
    dim: int = 0


def managed_modules(root: nn.Module, is_unit: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """`root` and the modules below it that no other unit manages, each once, with dotted names, in definition order."""
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        yield prefix, module
        for name, child in module.named_children():
            if child not in seen and not is_unit(child):
                yield from walk(f"{prefix}.{name}" if prefix else name, child)

    yield from walk("", root)


def managed_parameters(modules: Iterable[tuple[str, nn.Module]], ignored: Iterable[nn.Parameter] = ()) -> list[Found]:
    """The parameters registered on `modules`, each once with all its slots, except the ignored ones."""
    skip = {id(parameter) for parameter in ignored}
    found: dict[int, tuple[nn.Parameter, str, list[Slot]]] = {}
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skip:
                continue
            dotted = f"{prefix}.{name}" if prefix else name
            entry = found.setdefault(id(parameter), (parameter, dotted, []))
            entry[2].append(Slot(module, name))
    return [Found(parameter, name, tuple(slots)) for parameter, name, slots in found.values()]


def move_unsharded(
    modules: Iterable[tuple[str, nn.Module]], ignored: Collection[nn.Parameter], device: torch.device
) -> None:
    """Move buffers and ignored parameters to `device`; those on the meta device stay there."""
    for _, module in modules:
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != device:
                setattr(module, name, buffer.to(device))
        for parameter in module._parameters.values():
            if parameter is not None and parameter in ignored and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
