"""Loading: everything is read and checked where it is, or in separate memory; all ranks agree; and only then is
anything written. Every byte is compared with its checksum before use (reading.py)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import dtensor_like, local_of
from ..agree import mark_restored
from ..comm import Messenger
from ..peers import shown_ranks
from .agreement import Heard, Message, agree
from .companions import ROOM
from .directory import Pointer, not_found, open_folder, read_generation, read_pointer
from .errors import CheckpointMismatch
from .files import doing
from .manifest import TensorEntry, kind_of
from .plan import KeyPath, key_of, matches
from .reading import CheckpointReader, Copy, Progress
from .resident import NotResident
from .state import (
    Leaf,
    OpenState,
    Part,
    Tree,
    dtype_name,
    dtype_of,
    flatten,
    nested,
    part_of,
    place_of,
    staging,
)
from .store import is_url, location
from .wrapped import Stored, Taken, destinations, put_together, stored_in, taken
from .writing import spare_cores

_EXPECTED = "expected a checkpoint that fits the state, found"
_REMEDY = (
    "load() takes exceptions: allow_missing and allow_unexpected take keys in which * stands for anything, "
    "rename maps keys of the state to those of the checkpoint, cast=True lets floating dtypes differ"
)

# Ranges of objects that a rank reads at a time: each request waits for its answer.
_REQUESTS = 8

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class LoadOptions:
    """The differences that a load tolerates; none by default. Patterns are keys in which * matches anything."""

    # The stored floating dtype may differ from that of the state.
    cast: bool = False
    # Keys of the state that the checkpoint may lack; they keep their contents.
    allow_missing: Sequence[str] = ()
    # Keys of the checkpoint that the state may lack.
    allow_unexpected: Sequence[str] = ()
    # A mapping or function from a key of the state to a key of the checkpoint.
    rename: Rename | None = None
    manifest_sha256: str | None = None
    # Keys that only some ranks ask for.
    on_some_ranks: Sequence[str] = ()
    # Called with the bytes read so far, and those that this rank reads.
    progress: Progress | None = None

    def stored_key(self, key: str) -> str:
        if self.rename is None:
            return key
        return self.rename.get(key, key) if isinstance(self.rename, Mapping) else self.rename(key)


@dataclass
class Request:
    """The parts that one rank takes from a checkpoint: a part of each stored tensor, and its destination."""

    # A list, because tied weights may take one stored tensor twice.
    tensors: list[tuple[TensorEntry, Part]] = field(default_factory=list)
    values: list[tuple[Leaf, Any]] = field(default_factory=list)
    # New tensors of optimizers: (their state, name of the parameter, path in its state, the tensor or value).
    new: list[tuple[OpenState, str, KeyPath, Any]] = field(default_factory=list)
    # New tensors that are put together of what is read: (what is taken, of which positions in `tensors`).
    wrapped: list[Wrapped] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    # The meshes of those that are DTensors.
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    # The destination tensors.
    held: list[Tensor] = field(default_factory=list)


class Wrapped(NamedTuple):
    """A new tensor of an optimizer that is a wrapper in the checkpoint, and its future place. `parts`: for each segment
    of what is taken, the positions of its tensors in `Request.tensors`."""

    stored: Stored
    taken: Taken
    parts: list[dict[str, int]]
    parameter: Tensor
    state: OpenState
    name: str
    item: str

    def make(self, staged: Sequence[Tensor]) -> Tensor:
        read = [{name: staged[index] for name, index in parts.items()} for parts in self.parts]
        local = local_of(self.parameter) if isinstance(self.parameter, DTensor) else self.parameter
        return placed(self.parameter, put_together(self.stored, self.taken, read, local.device))


class LoadJob:
    """One load on one rank. All ranks of `messenger` call `run`."""

    def __init__(self, path: str, messenger: Messenger, options: LoadOptions) -> None:
        self.path, self.messenger, self.options = location(path), messenger, options
        self.what = f"loading {self.path}"
        self._tree, self._wanted = Tree(), Request()
        self._copies: list[Copy] = []

    def run(self, state_dict: dict[str, Any]) -> None:
        """Write the stored state into `state_dict`. On an error nothing was written, on any rank."""
        found = agree(self.messenger, self.what, dict, self._read_pointer)
        pointer = Pointer(*found["pointer"])
        agree(self.messenger, self.what, lambda: self._match_all(state_dict, pointer), self._refuse_differences)
        try:
            agree(self.messenger, self.what, lambda: self._read_all(pointer), lambda _: {})
            write(self._tree, self._wanted, self._copies, self._manifest.save_id)
        finally:
            self._copies = []  # and what is locked for them, also if the caller keeps an error

    def _read_pointer(self, _: Heard) -> Message:
        """Reads the pointer, on the first rank: all read the same generation, whatever a saver does meanwhile."""
        with doing(self.what), open_folder(self.path) as folder:
            pointer = read_pointer(folder)
            if pointer is None:
                raise not_found(folder)
        return {"pointer": list(pointer)}

    # ---- matching ------------------------------------------------------------------------------------------

    def _match_all(self, state_dict: dict[str, Any], pointer: Pointer) -> Message:
        with doing(self.what), open_folder(self.path) as folder:
            self._manifest = read_generation(folder, pointer, self.options.manifest_sha256).manifest
        return self._match(state_dict)

    def _match(self, state_dict: dict[str, Any]) -> Message:
        self._tree, self._wanted = flatten(state_dict), Request()
        wanted, manifest = self._wanted, self._manifest
        self._stored = stored_in(manifest)
        wanted.problems += self._tree.problems
        stored = {leaf.key: self.options.stored_key(leaf.key) for leaf in self._tree.tensors.values()}
        # Of tied weights one name is enough. A rank without rows cannot tell them apart; the others can.
        filled = {_memory_of(t.value) for t in self._tree.tensors.values() if stored[t.key] in manifest.tensors}
        for leaf in [*self._tree.tensors.values(), *self._tree.values.values()]:
            if any(leaf.path[: len(path)] == path for path, _ in self._tree.open):
                continue
            key = self.options.stored_key(leaf.key)
            if isinstance(leaf.value, DTensor):
                wanted.meshes[key] = leaf.value.device_mesh
            if key in self._stored and isinstance(leaf.value, Tensor):
                self._match_wrapped(leaf.key, leaf.value, self._stored[key])
                continue
            wanted.keys.add(key)
            if key in manifest.tensors:
                self._match_tensor(leaf.key, leaf.value, manifest.tensors[key])
            elif key in manifest.values:
                self._match_value(leaf, manifest.values[key].value)
            elif isinstance(leaf.value, Tensor) and _memory_of(leaf.value) in filled:
                continue
            elif not matches(leaf.key, self.options.allow_missing):
                wanted.problems.append(f"missing: {leaf.key}" + ("" if key == leaf.key else f" (as {key})"))
        for path, state in self._tree.open:
            self._match_open(path, state)
        meshes: dict[tuple[int, ...], list[str]] = {}
        for key, mesh in wanted.meshes.items():
            meshes.setdefault(tuple(mesh.mesh.flatten().tolist()), []).append(key)
        on = [[len(ranks), str(hash(ranks)), keys] for ranks, keys in meshes.items()]
        return {"keys": sorted(wanted.keys), "problems": wanted.problems, "meshes": on}

    def _refuse_differences(self, heard: Heard) -> Message:
        """Raise, on the first rank, the problems of all ranks, and the stored keys that no rank asked for."""
        messages = heard.messages
        problems = dict.fromkeys(problem for message in messages for problem in message["problems"])
        unexpected = set(self._manifest.keys).difference(*(message["keys"] for message in messages))
        for key in sorted(unexpected):
            if not matches(key, self.options.allow_unexpected) and not key.startswith(f"{ROOM}."):
                problems[f"unexpected: {key}"] = None
        for key, ranks in asked_by_some(heard.groups).items():
            if not matches(key, self.options.on_some_ranks):
                others = sorted(set(range(self.messenger.world)).difference(ranks))
                problems[f"different: {key} is asked for by {shown_ranks(ranks)}, not by {shown_ranks(others)}"] = None
        if problems:
            raise CheckpointMismatch(f"{self.what}: {_EXPECTED}", list(problems), _REMEDY)
        return {}

    def _match_open(self, path: KeyPath, state: OpenState) -> None:
        """Match the stored state of an optimizer's parameters: into its tensors where they fit, else into new ones."""
        stored: dict[str, list[str]] = {}
        paths = {key: entry.path for key, entry in self._manifest.tensors.items()}
        paths |= {key: entry.path for key, entry in self._manifest.values.items()}
        for wrapper in self._stored.values():
            paths = {key: entry_path for key, entry_path in paths.items() if key not in wrapper.keys}
            paths[wrapper.key] = wrapper.path
        for key, entry_path in paths.items():
            stored.setdefault(key_of(_entry(entry_path)[:-1]), []).append(key)
        for name, parameter in state.like.items():
            for key in stored.get(self.options.stored_key(key_of((*path, name))), ()):
                if isinstance(parameter, DTensor):
                    self._wanted.meshes[key] = parameter.device_mesh
                if key in self._stored:
                    self._match_new_wrapper(state, name, parameter, self._stored[key])
                    continue
                self._wanted.keys.add(key)
                tensor, value = self._manifest.tensors.get(key), self._manifest.values.get(key)
                item = paths[key][len(_entry(paths[key])) - 1 :]
                if tensor is None:
                    assert value is not None
                    self._wanted.new.append((state, name, item, value.value))
                    continue
                held = state.get(name, {}).get(str(item[0])) if len(item) == 1 else None
                if not isinstance(held, Tensor) or not _fits(held, tensor):
                    # Those in lists are whole, whatever their shape is.
                    held = new_state(parameter if len(item) == 1 else torch.empty(0), tensor)
                self._wanted.new.append((state, name, item, held))
                self._match_tensor(key, held, tensor)

    def _match_tensor(self, key: str, held: Any, entry: TensorEntry) -> None:
        wanted = self._wanted
        if not isinstance(held, Tensor):
            wanted.problems.append(f"type: {key} is a {kind_of(held)} here, a tensor in the checkpoint")
            return
        part = part_of(held)
        if isinstance(part, str):
            wanted.problems.append(f"{key}: {part}")
            return
        if part.shape != entry.shape:
            wanted.problems.append(f"shape: {key} is {part.shape} here, {entry.shape} in the checkpoint")
        if part.dtype != entry.dtype and not (self.options.cast and _may_cast(part.dtype, entry.dtype)):
            wanted.problems.append(f"dtype: {key} is {part.dtype} here, {entry.dtype} in the checkpoint")
        wanted.tensors.append((entry, part))
        wanted.held.append(held)

    def _match_wrapped(self, key: str, held: Tensor, stored: Stored) -> None:
        """Match a tensor of the state with a wrapper in the checkpoint: both of the same class and blocks, or both
        plain."""
        wanted, place = self._wanted, place_of(held)
        wanted.keys.update(stored.keys)
        if isinstance(held, DTensor):
            wanted.meshes.update(dict.fromkeys(stored.keys, held.device_mesh))
        if isinstance(place, str):
            wanted.problems.append(f"{key}: {place}")
        elif place.shape != stored.shape:
            wanted.problems.append(f"shape: {key} is {place.shape} here, {stored.shape} in the checkpoint")
        elif place.box is not None and place.local is not None:
            what = taken(stored, place.box)
            inner = destinations(stored, what, place.local)
            if isinstance(inner, str):
                wanted.problems.append(f"type: {key} is {inner}")
                return
            for entry, box, local in inner:
                wanted.tensors.append((entry, Part(entry.dtype, entry.shape, box, local)))
            wanted.held.append(held)

    def _match_new_wrapper(self, state: OpenState, name: str, parameter: Tensor, stored: Stored) -> None:
        wanted, item, place = self._wanted, str(stored.path[-1]), place_of(parameter)
        wanted.keys.update(stored.keys)
        if isinstance(parameter, DTensor):
            wanted.meshes.update(dict.fromkeys(stored.keys, parameter.device_mesh))
        kind = stored.kind()
        if isinstance(kind, str):
            wanted.problems.append(f"type: {stored.key}: {kind}")
        elif isinstance(place, str) or place.shape != stored.shape:
            found = place if isinstance(place, str) else f"{place.shape} here"
            wanted.problems.append(f"shape: {stored.key} is {found}, {stored.shape} in the checkpoint")
        elif place.box is not None:
            what, parts = taken(stored, place.box), list[dict[str, int]]()
            for segment in what.segments:
                parts.append({})
                for part, box in segment.inner.items():
                    entry = stored.rest if segment.blocks is None else stored.inner[part]
                    assert entry is not None
                    parts[-1][part] = len(wanted.tensors)
                    wanted.tensors.append((entry, Part(entry.dtype, entry.shape, box, None)))
            wanted.wrapped.append(Wrapped(stored, what, parts, parameter, state, name, item))

    def _match_value(self, leaf: Leaf, value: Any) -> None:
        wanted = self._wanted
        if isinstance(leaf.value, Tensor):
            wanted.problems.append(f"type: {leaf.key} is a tensor here, a {kind_of(value)} in the checkpoint")
        elif None is not leaf.value and value is not None and kind_of(leaf.value) != kind_of(value):
            wanted.problems.append(
                f"type: {leaf.key} is a {kind_of(leaf.value)} here, a {kind_of(value)} in the checkpoint"
            )
        else:
            wanted.values.append((leaf, value))

    # ---- reading -------------------------------------------------------------------------------------------

    def _read_all(self, pointer: Pointer) -> Message:
        threads = _REQUESTS if is_url(self.path) else spare_cores(self.messenger.world)
        progress = self.options.progress
        parts = [(entry, part) for entry, part in self._wanted.tensors if part.box is not None]
        with doing(self.what), open_folder(self.path) as folder:
            with CheckpointReader(folder.sub(pointer.generation), self._manifest) as data:
                if not self._wanted.wrapped:
                    with contextlib.suppress(NotResident):
                        requests = [(entry, part.box, part.local) for entry, part in parts]
                        self._copies = data.lend_each(requests, threads, progress)  # type: ignore[arg-type]
                        return {}
                staged = self._memory(parts)
                requests = [(entry, part.box, made) for (entry, part), made in zip(parts, staged, strict=True)]
                data.read_each(requests, threads, progress)  # type: ignore[arg-type]
        by_index = iter(staged)
        self._take([torch.empty(0) if part.box is None else next(by_index) for _, part in self._wanted.tensors])
        return {}

    def _memory(self, parts: Sequence[tuple[TensorEntry, Part]]) -> list[Tensor]:
        with doing(f"{self.what}: memory for what is read"):
            return staging([(entry.dtype, part.box.lengths) for entry, part in parts])  # type: ignore[union-attr]

    def _take(self, staged: Sequence[Tensor]) -> None:
        """Take over what was read of each of the wanted tensors."""
        with doing(f"{self.what}: tensors of other classes"), torch.inference_mode(False), torch.no_grad():
            for one in self._wanted.wrapped:
                self._wanted.new.append((one.state, one.name, (one.item,), one.make(staged)))
        parts = [part for _, part in self._wanted.tensors]
        self._copies = [(p.local, read) for p, read in zip(parts, staged, strict=True) if p.local is not None]


def asked_by_some(groups: Sequence[tuple[list[int], Message]]) -> dict[str, list[int]]:
    """Keys that not all ranks ask for, with those that do, where that would leave ranks with different state. `groups`:
    the ranks of each different message.

    The ranks of a DTensor's mesh have to ask together. Of other keys ranks may have some of their own, as stages of a
    pipeline do; but a rank that asks for nothing beyond what another one asks for lacks the rest."""
    asked = [set(message["keys"]) for _, message in groups]
    by_key: dict[str, list[int]] = {}
    for key in sorted(set().union(*asked).difference(set.intersection(*asked))):
        by_key[key] = [number for number, keys in enumerate(asked) if key in keys]
    if not by_key:
        return {}
    meshes = [{key: (n, ranks) for n, ranks, keys in message["meshes"] for key in keys} for _, message in groups]
    own = [keys & by_key.keys() for keys in asked]
    lacking: list[tuple[int, set[str]]] = []  # a group, and those of its keys that another one lacks
    if not all(own):
        lacking = list(enumerate(own))
    for mine in filter(None, own):
        # Only those that ask for its rarest key can ask for all of its keys.
        for other in min((by_key[key] for key in mine), key=len):
            if mine < own[other]:
                lacking.append((other, own[other] - mine))
    found = {key for number, keys in lacking for key in keys if key not in meshes[number]}
    for key, numbers in by_key.items():
        together = Counter[tuple[int, str]]()
        for number in numbers:
            if key in meshes[number]:
                together[meshes[number][key]] += len(groups[number][0])
        if any(n != there for (n, _), there in together.items()):
            found.add(key)
    return {key: sorted(rank for number in by_key[key] for rank in groups[number][0]) for key in sorted(found)}


def write(tree: Tree, wanted: Request, copies: Sequence[Copy], source: str = "") -> None:
    """Copy the read data to its destination; nothing here is expected to fail. `source`: the id of the save."""
    with torch.inference_mode(False), torch.no_grad():
        for into, read in copies:
            into.copy_(read)
    for leaf, value in wanted.values:
        leaf.put(value)
    for _, state in tree.open:
        state.clear()
    made: dict[tuple[int, str], tuple[OpenState, dict[KeyPath, Any]]] = {}
    for state, name, item, value in wanted.new:
        made.setdefault((id(state), name), (state, {}))[1][item] = value
    for (_, name), (state, leaves) in made.items():
        state[name] = nested(leaves)
    for stateful, state_dict in tree.stateful:
        stateful.load_state_dict(state_dict)
    with contextlib.suppress(ValueError):  # no sharded parameter among them
        mark_restored(wanted.held, source=source and f"the checkpoint of save {source}")


def _entry(path: KeyPath) -> KeyPath:
    """`path` up to the last name in it: without places in lists."""
    return path if isinstance(path[-1], str) else _entry(path[:-1])


def new_state(parameter: Tensor, entry: TensorEntry) -> Tensor:
    """Uninitialised memory for a tensor of an optimizer: with its parameter's placements if the shapes match, else
    whole on the host (where optimizers keep their counters; they move other tensors to their device)."""
    if tuple(parameter.shape) != entry.shape:
        return torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
    like = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    return placed(parameter, torch.empty_like(like, dtype=dtype_of(entry.dtype), requires_grad=False))


def placed(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor with the placements of `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    made = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    # `from_local` moves an offloaded tensor to the device of the mesh.
    return dtensor_like(made, local)


def _memory_of(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """The same for tensors that are tied: where their rows on this rank are, and the shape."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    # A tensor around tensors has no memory of its own.
    if local.is_meta or local.layout is not torch.strided or hasattr(type(local), "__tensor_flatten__"):
        return id(tensor), 0, tuple(tensor.shape)
    return local.untyped_storage().data_ptr(), int(local.storage_offset()), tuple(tensor.shape)


def _fits(held: Tensor, entry: TensorEntry) -> bool:
    return tuple(held.shape) == entry.shape and dtype_name(held.dtype) == entry.dtype


def _may_cast(a: str, b: str) -> bool:
    return dtype_of(a).is_floating_point and dtype_of(b).is_floating_point
