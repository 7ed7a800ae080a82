"""Loading: everything is read and proven into memory of its own, all ranks agree, and only then is anything written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import dtensor_like, local_of
from ..comm import Messenger
from .directory import Pointer, open_folder, proven, read_current
from .errors import CheckpointMismatch
from .files import doing
from .manifest import MANIFEST_NAME, Path, TensorEntry, key_of
from .merge import matches
from .reader import Reader, in_file_order
from .saving import spare_cores
from .tensors import Part, dtype_name, dtype_of, part_of, staging
from .together import Message, agree
from .tree import Leaf, OpenState, Tree, flatten
from .values import kind_of

_EXPECTED = "expected a checkpoint that fits the state, found"
_REMEDY = (
    "what may differ is said to load(): allow_missing and allow_unexpected take keys in which * stands for anything, "
    "rename maps keys of the state to those of the checkpoint, cast=True lets floating dtypes differ"
)

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class LoadOptions:
    """What a load lets pass; by default nothing. Patterns are keys in which * stands for anything."""

    # Stored in another floating dtype than the state has.
    cast: bool = False
    # Keys of the state that the checkpoint may lack, which keep what they have.
    allow_missing: Sequence[str] = ()
    # Keys of the checkpoint that nobody has to ask for.
    allow_unexpected: Sequence[str] = ()
    # From a key of the state to that of the checkpoint.
    rename: Rename | None = None
    manifest_sha256: str | None = None

    def stored_key(self, key: str) -> str:
        if self.rename is None:
            return key
        return self.rename.get(key, key) if isinstance(self.rename, Mapping) else self.rename(key)


@dataclass
class Wanted:
    """What one rank takes from a checkpoint: of each stored tensor the part of it, and where it goes."""

    # By key of the checkpoint: tied weights may take one stored tensor twice.
    tensors: list[tuple[TensorEntry, Part]] = field(default_factory=list)
    values: list[tuple[Leaf, Any]] = field(default_factory=list)
    # New tensors of optimizers: (their state, name of the parameter, name in its state, the tensor or value).
    new: list[tuple[OpenState, str, str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    # What was there for them.
    held: list[Tensor] = field(default_factory=list)


class LoadJob:
    """One load on one rank. `run` is a call of all ranks of `messenger`."""

    def __init__(self, path: str, messenger: Messenger, options: LoadOptions) -> None:
        self.path, self.messenger, self.options = os.path.abspath(path), messenger, options
        self.what = f"loading {self.path}"
        self._tree, self._wanted = Tree(), Wanted()
        self._staged: list[Tensor] = []

    def run(self, state_dict: dict[str, Any]) -> None:
        """Write what is stored into `state_dict`. On an error nothing was written, on any rank."""
        found = agree(self.messenger, self.what, dict, self._read_manifest)
        pointer = Pointer(*found["pointer"])
        agree(self.messenger, self.what, lambda: self._match_all(state_dict, pointer, found), self._refuse_differences)
        agree(self.messenger, self.what, lambda: self._read_all(pointer), lambda _: {})
        write(self._tree, self._wanted, self._staged, self._manifest.save_id)

    def _read_manifest(self, _: list[Message]) -> Message:
        """On the first rank: others get the same bytes, whatever a saver does meanwhile."""
        with doing(self.what), open_folder(self.path) as folder:
            found = read_current(folder, self.options.manifest_sha256)
        return {"pointer": list(found.pointer), "manifest": found.data.decode()}

    # ---- what goes where -----------------------------------------------------------------------------------

    def _match_all(self, state_dict: dict[str, Any], pointer: Pointer, found: Message) -> Message:
        where = f"{self.path}/{pointer.generation}/{MANIFEST_NAME}"
        self._manifest = proven(pointer, found["manifest"].encode(), where, self.options.manifest_sha256)
        return self._match(state_dict)

    def _match(self, state_dict: dict[str, Any]) -> Message:
        self._tree, self._wanted = flatten(state_dict), Wanted()
        wanted, manifest = self._wanted, self._manifest
        wanted.problems += self._tree.problems
        for leaf in [*self._tree.tensors.values(), *self._tree.values.values()]:
            if any(leaf.path[: len(path)] == path for path, _ in self._tree.open):
                continue
            key = self.options.stored_key(leaf.key)
            wanted.keys.add(key)
            if key in manifest.tensors:
                self._match_tensor(leaf.key, leaf.value, manifest.tensors[key])
            elif key in manifest.values:
                self._match_value(leaf, manifest.values[key].value)
            elif not matches(leaf.key, self.options.allow_missing):
                wanted.problems.append(f"missing: {leaf.key}" + ("" if key == leaf.key else f" (as {key})"))
        for path, state in self._tree.open:
            self._match_open(path, state)
        return {"keys": sorted(wanted.keys), "problems": wanted.problems}

    def _refuse_differences(self, messages: list[Message]) -> Message:
        """On the first rank: what any rank found, and what is stored and no rank asked for."""
        problems = dict.fromkeys(problem for message in messages for problem in message["problems"])
        unexpected = set(self._manifest.keys).difference(*(message["keys"] for message in messages))
        for key in sorted(unexpected):
            if not matches(key, self.options.allow_unexpected):
                problems[f"unexpected: {key}"] = None
        if problems:
            raise CheckpointMismatch(f"{self.what}: {_EXPECTED}", list(problems), _REMEDY)
        return {}

    def _match_open(self, path: Path, state: OpenState) -> None:
        """What is stored for the parameters of an optimizer: into its tensors where they fit, else into new ones."""
        stored: dict[str, list[str]] = {}
        paths = {key: entry.path for key, entry in self._manifest.tensors.items()}
        paths |= {key: entry.path for key, entry in self._manifest.values.items()}
        for key, entry_path in paths.items():
            stored.setdefault(key_of(entry_path[:-1]), []).append(key)
        for name, parameter in state.like.items():
            for key in stored.get(self.options.stored_key(key_of((*path, name))), ()):
                self._wanted.keys.add(key)
                tensor, value = self._manifest.tensors.get(key), self._manifest.values.get(key)
                if tensor is None:
                    assert value is not None
                    self._wanted.new.append((state, name, str(value.path[-1]), value.value))
                    continue
                item = str(tensor.path[-1])
                held = state.get(name, {}).get(item)
                if not isinstance(held, Tensor) or not _fits(held, tensor):
                    held = new_state(parameter, tensor)
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
        wanted = self._wanted.tensors
        order = in_file_order(self._manifest, list(dict.fromkeys(entry.key for entry, _ in wanted)))
        place = {key: position for position, key in enumerate(order)}
        indices = [i for i in range(len(wanted)) if wanted[i][1].box is not None]
        indices.sort(key=lambda i: place[wanted[i][0].key])
        with doing(f"{self.what}: memory for what is read"):
            memory = staging([(wanted[i][0].dtype, wanted[i][1].box.lengths) for i in indices])  # type: ignore[union-attr]
        self._staged = [torch.empty(0)] * len(wanted)
        for index, tensor in zip(indices, memory, strict=True):
            self._staged[index] = tensor
        threads = min(spare_cores(self.messenger.world), len(indices)) or 1
        if threads == 1:
            self._read_some(pointer, indices)
            return {}
        with ThreadPoolExecutor(threads, "fullshard-load") as pool:
            # Each has files of its own, and reads what lies together.
            shares = [indices[len(indices) * n // threads : len(indices) * (n + 1) // threads] for n in range(threads)]
            for share in [pool.submit(self._read_some, pointer, one) for one in shares]:
                share.result()
        return {}

    def _read_some(self, pointer: Pointer, indices: Sequence[int]) -> None:
        with doing(self.what), open_folder(self.path) as folder:
            with Reader(folder.sub(pointer.generation), self._manifest) as data:
                for index in indices:
                    entry, part = self._wanted.tensors[index]
                    assert part.box is not None
                    data.read(entry, part.box, self._staged[index])


def write(tree: Tree, wanted: Wanted, staged: Sequence[Tensor], source: str = "") -> None:
    """Copy what was read to where it belongs; nothing in here is expected to fail. `source`: the save that it is of."""
    with torch.inference_mode(False), torch.no_grad():
        for (_, part), tensor in zip(wanted.tensors, staged, strict=True):
            if part.local is not None:
                part.local.copy_(tensor)
    for leaf, value in wanted.values:
        leaf.put(value)
    for _, state in tree.open:
        state.clear()
    for state, name, item, value in wanted.new:
        state.setdefault(name, {})[item] = value
    for stateful, state_dict in tree.stateful:
        stateful.load_state_dict(state_dict)
    from .. import mark_restored

    with contextlib.suppress(ValueError):  # nothing sharded is among them
        mark_restored(wanted.held, source=source and f"the checkpoint of save {source}")


def new_state(parameter: Tensor, entry: TensorEntry) -> Tensor:
    """Uninitialised memory for a tensor of an optimizer: placed as its parameter where it has the shape of it, else
    whole on the host (where optimizers keep their counters, and from where they take others to their device)."""
    if tuple(parameter.shape) != entry.shape:
        return torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype_of(entry.dtype), requires_grad=False)
    local = torch.empty_like(local_of(parameter), dtype=dtype_of(entry.dtype), requires_grad=False)
    made = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    # `from_local` brings what is offloaded to the device of the mesh.
    return dtensor_like(made, local)


def _fits(held: Tensor, entry: TensorEntry) -> bool:
    return tuple(held.shape) == entry.shape and dtype_name(held.dtype) == entry.dtype


def _may_cast(a: str, b: str) -> bool:
    return dtype_of(a).is_floating_point and dtype_of(b).is_floating_point
