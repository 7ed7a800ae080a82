"""State as nested dicts: of a model and its optimizers under the names of the plain model; as lists of leaves; and the
part of each tensor that is in this rank's memory.

    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=...)

Tensors share memory with model and optimizer, so a load writes into them. An optimizer's state is
`{"state": {name of the parameter: {...}}, "param_groups": [{"params": [names], "lr": ...}]}`, the same for every world.

`{"model": {"w": t}, "step": 3}` has the leaves `model.w` and `step`. Dicts with string keys are descended, and lists if
they contain a tensor. An object with `state_dict` and `load_state_dict` (a module, a scheduler, a data loader) is
replaced by its state dict. Everything else that is not a tensor is one value.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import cut_dim, loads_as_torch, local_of, settled
from ..api import is_copy
from ..layout import itemsize, known_dtypes
from ..policy.arguments import expect_dict, expect_keys, expect_module, expect_optimizers, expect_state
from .algorithms import other_algorithm, other_state
from .companions import ModelState, is_companion
from .errors import CheckpointMismatch
from .manifest import encode
from .plan import Box, Cut, KeyPath, key_of, local_box, matches, whole
from .rules import Rule, rule_of

# Name parts that wrappers insert: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
# Below this size, memory comes from the usual allocator. The alignment is a multiple of every itemsize.
_OWN_MAP_NBYTES, _ALIGNMENT = 4 << 20, 64

_REMEDY = (
    "set_state_dict takes allow_missing=[...] (parameters that were frozen when it was saved begin with fresh state) "
    "and allow_unexpected=[...] (parameters that are frozen now), names in which * stands for anything"
)

Optimizers = Optimizer | Iterable[Optimizer]


def get_state_dict(model: nn.Module, optimizers: Optimizers = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of `model` and of `optimizers` (one or several). No communication, no changes, no prior step needed.

    Names are those of the plain model: without those of DistributedDataParallel, torch.compile and activation
    checkpointing. `load` fills an optimizer's state as the checkpoint has it, even if the optimizer has not stepped
    yet; `set_state_dict` then loads it into the optimizer. A save of the first one also stores the configuration of a
    model of transformers (`companions`).
    """
    expect_module("model", model)
    optimizers = all_of(optimizers)
    names = parameter_names(model, optimizers)
    state, groups = dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for optimizer in optimizers:
        taken, numbered = optimizer.state_dict(), names_in_order(optimizer, names)
        # A stage before names them, so that each is in one group.
        copies = {number for number, parameter in enumerate(_owned(optimizer)) if is_copy(parameter)}
        for number, entries in taken["state"].items():
            if entries:  # else another rank has it whole (step_on_owners)
                state[numbered[number]] = dict(entries)
        for group in taken["param_groups"]:
            groups.append({**group, "params": [numbered[n] for n in group["params"] if n not in copies]})
    like: dict[str, Tensor] = {names[p]: p for optimizer in optimizers for p in _owned(optimizer)}
    named = {_name_in(model, name): value for name, value in model.state_dict().items()}
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return ModelState(named, inner), {"state": OpenState(state, like), "param_groups": groups}


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers = (),
    *,
    model_state_dict: dict[str, Any] | None = None,
    optim_state_dict: dict[str, Any] | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> None:
    """Load state, as `get_state_dict` returned it and `load` filled it, into `model` and `optimizers`.

    Every parameter and buffer of the model has to be present, and every parameter of an optimizer in one of the stored
    groups, which have to be those of such an optimizer; otherwise `CheckpointMismatch` says what is missing, or names
    both optimizers, and nothing is changed. Optimizer state that `optim_state_dict` lacks is removed. Dtypes stay as
    stored.

    allow_missing: names of parameters (* matches anything) that were not in the stored optimizers, because they were
        frozen: they begin with fresh state, and take the settings of the stored parameters in their group.
    allow_unexpected: names of parameters whose stored state is left out, because no optimizer has them now.
    """
    expect_module("model", model)
    expect_optimizers("optimizers", optimizers)
    expect_dict("model_state_dict", model_state_dict, or_none=True)
    tolerated = expect_keys("allow_missing", allow_missing), expect_keys("allow_unexpected", allow_unexpected)
    if optim_state_dict is not None:
        expect_state("optim_state_dict", optim_state_dict, {"state", "param_groups"})
    loads = (
        [] if optim_state_dict is None else _optimizer_loads(model, all_of(optimizers), optim_state_dict, *tolerated)
    )
    if model_state_dict is not None:
        here = model.state_dict()
        raw = {_name_in(model, name): name for name in here}
        problems = [f"missing: {name}" for name in sorted(raw.keys() - model_state_dict.keys())]
        problems += [f"unexpected: {name}" for name in sorted(model_state_dict.keys() - raw.keys())]
        if problems:
            raise CheckpointMismatch("set_state_dict: expected the state of this model, found", problems)
        given = {raw[name]: value for name, value in model_state_dict.items()}
        added = _added_by_modules(model, here)
        again = model.state_dict() if added else {}
        for name in added:
            # A view of what the module has is written; a copy of it would have no effect.
            if again[name].data_ptr() != here[name].data_ptr() and not torch.equal(
                given[name].to(here[name]), here[name]
            ):
                problems.append(f"{name}: its module saves it and does not load it, and has other values")
        if problems:
            raise CheckpointMismatch("set_state_dict: expected state that this model loads, found", problems)
        with torch.no_grad():
            for name in added:
                here[name].copy_(given.pop(name))
        model.load_state_dict(given)
    for optimizer, state in loads:
        optimizer.load_state_dict(state)
        _keep_dtypes(optimizer, state)


def _added_by_modules(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Tensors in its state dict that its modules add when they save, and are not loaded: bitsandbytes' statistics of
    4-bit weights."""
    modules = {
        plain_name(f"{name}.").rstrip("."): module for name, module in model.named_modules(remove_duplicate=False)
    }
    known = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    found = []
    for name, value in state.items():
        plain = owner = plain_name(name)
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        if plain in known or "_extra_state" in plain or not loads_as_torch(modules[owner]):
            continue
        if isinstance(value, Tensor):
            found.append(name)
    return found


def parameter_names(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, str]:
    """The name of each parameter in the plain model; the first one of tied weights."""
    names = {parameter: _name_in(model, name) for name, parameter in model.named_parameters()}
    if any(parameter not in names for optimizer in optimizers for parameter in _owned(optimizer)):
        # Between forward and backward full parameters may be on the modules; a state dict has those of the optimizer.
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                names.setdefault(value, _name_in(model, name))
    return names


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers themselves, under the names of the plain model; tied ones under each."""
    state = model.state_dict(keep_vars=True)
    return {_name_in(model, name): value for name, value in state.items() if isinstance(value, Tensor)}


def plain_name(name: str) -> str:
    """`name` without the parts that torch.compile, activation checkpointing and FSDP1 insert."""
    return _WRAPPERS.sub("", name)


def _name_in(model: nn.Module, name: str) -> str:
    """The name in the plain model, which DistributedDataParallel wraps as its `module`."""
    return plain_name(name).removeprefix("module." if isinstance(model, DistributedDataParallel) else "")


def all_of(optimizers: Optimizers) -> list[Optimizer]:
    return expect_optimizers("optimizers", optimizers)


def _owned(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_in_order(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> list[str]:
    """Names in the order in which the optimizer numbers its parameters."""
    parameters = _owned(optimizer)
    others = sum(parameter not in names for parameter in parameters)
    if others:
        raise ValueError(
            f"expected an optimizer of the parameters of this model, found {others} of {len(parameters)} that are "
            f"not in it; build the optimizer after fully_shard, or call fullshard.rebind_optimizer(optimizer, model)"
        )
    return [names[parameter] for parameter in parameters]


def _optimizer_loads(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    stored: dict[str, Any],
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """The state dict for each optimizer's own `load_state_dict`, with parameters by number again."""
    names = parameter_names(model, optimizers)
    group_of = {name: group for group in stored["param_groups"] for name in group["params"]}
    loads, problems = [], []
    for optimizer in optimizers:
        numbered = names_in_order(optimizer, names)
        number_of = {name: number for number, name in enumerate(numbered)}
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            own = [names[parameter] for parameter in group["params"]]
            lacking = [names[p] for p in group["params"] if names[p] not in group_of and not is_copy(p)]
            problems += [
                f"missing: {name}, in no stored group of parameters"
                for name in lacking
                if not matches(name, allow_missing)
            ]
            found = [group_of[name] for name in own if name in group_of]
            settings = [{key: value for key, value in one.items() if key != "params"} for one in found]
            if any(one != settings[0] for one in settings[1:]):
                problems.append(f"group {index}: its parameters were stored in groups of different settings")
            if found and (why := other_algorithm(optimizer, group, settings[0])):
                problems.append(f"group {index}: {why}")
            # An empty group cannot be matched, and keeps its settings.
            chosen = settings[0] if settings else {key: value for key, value in group.items() if key != "params"}
            groups.append({**chosen, "params": [number_of[name] for name in own]})
        state = {number_of[name]: entries for name, entries in stored["state"].items() if name in number_of}
        if why := other_state(optimizer, state):
            problems.append(why)
        for parameter, name in zip(_owned(optimizer), numbered, strict=True):
            if name not in group_of and parameter in optimizer.state:
                # What an optimizer prepares when it is built, as Adagrad does.
                state[number_of[name]] = dict(optimizer.state[parameter])
        loads.append((optimizer, {"state": state, "param_groups": groups}))
    known = {names[p] for optimizer in optimizers for p in _owned(optimizer)}
    problems += [
        f"unexpected: state of {name}"
        for name in sorted(stored["state"].keys() - known)
        if not matches(name, allow_unexpected)
    ]
    if problems:
        raise CheckpointMismatch("set_state_dict: expected the state of these optimizers, found", problems, _REMEDY)
    return loads


def _keep_dtypes(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Undo the cast of torch's `load_state_dict` to the parameter's dtype, where the state had another one."""
    parameters = _owned(optimizer)
    for number, entries in state["state"].items():
        held = optimizer.state[parameters[number]]
        for name, value in entries.items():
            now = held.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype is not value.dtype:
                with torch.no_grad():
                    held[name] = value.detach().to(now.device)


# ---- leaves ----------------------------------------------------------------------------------------------------


@dataclass
class Leaf:
    """A tensor or a value at `path`: `container[name]`."""

    path: KeyPath
    value: Any
    container: Any
    name: str | int

    @property
    def key(self) -> str:
        return key_of(self.path)

    def put(self, value: Any) -> None:
        """Replace the current contents by `value`."""
        held = self.container[self.name]
        if isinstance(held, dict) and type(held) is not dict and isinstance(value, dict):
            # A Counter stays a Counter: the program's object, with the saved contents.
            held.clear()
            for name, item in value.items():
                held[name] = item
        else:
            self.container[self.name] = value


@dataclass
class Tree:
    """The leaves of a state dict, by key. `problems`: entries that cannot be saved, and why; they are left out."""

    tensors: dict[str, Leaf] = field(default_factory=dict)
    values: dict[str, Leaf] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # Objects that load their state by `load_state_dict`, innermost first, each with the state dict that was flattened.
    stateful: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    # Optimizer states that accept everything stored for their parameters: (path, the state).
    open: list[tuple[KeyPath, OpenState]] = field(default_factory=list)
    # Models, tokenizers and the like, whose files a save stores beside the state.
    owners: list[tuple[KeyPath, Any]] = field(default_factory=list)


class OpenState(dict[str, dict[str, Any]]):
    """The state of an optimizer by parameter, `{name: {"exp_avg": ...}}`, which a load fills as the checkpoint has it.

    An optimizer that has not stepped has no state yet, and only the optimizer knows its future state. `like`: the
    parameter of each name. A stored tensor of a parameter's shape keeps its dtype and gets the parameter's placements.
    """

    def __init__(self, state: dict[str, dict[str, Any]], like: dict[str, Tensor]) -> None:
        super().__init__(state)
        self.like = like


def flatten(state_dict: dict[str, Any]) -> Tree:
    """The leaves of `state_dict`. Never raises because of its contents: `problems` lists those."""
    tree = Tree()

    def descend(path: KeyPath, container: Any, name: str | int, value: Any) -> None:
        if is_companion(value):
            tree.owners.append((path, value))
        elif _is_stateful(value):
            if isinstance(value, torch.optim.Optimizer):
                tree.problems.append(
                    f"{key_of(path)}: expected the state of an optimizer under the names of its parameters, found an "
                    f"optimizer, which numbers them; take it with get_state_dict(model, optimizer)"
                )
                return
            try:
                state = value.state_dict()
            except Exception as error:
                tree.problems.append(f"{key_of(path)}: its state_dict() raised {type(error).__name__}: {error}")
                return
            if isinstance(value, nn.Module):
                tree.owners.append((path, value))
            descend_all(path, state, list(state.items()))
            tree.stateful.append((value, state))
        elif _is_numbered(value):
            tree.problems.append(
                f"{key_of(path)}: expected the state of an optimizer under the names of its parameters, found the "
                f"result of optimizer.state_dict(), which numbers them; take it with get_state_dict(model, optimizer)"
            )
        elif isinstance(value, OpenState) or (
            isinstance(value, dict) and value and all(isinstance(key, str) for key in value)
        ):
            if isinstance(value, OpenState):
                tree.open.append((path, value))
            if isinstance(value, ModelState):
                tree.owners.append((path, value.model))
            descend_all(path, value, list(value.items()))
        elif isinstance(value, list) and any(map(holds_tensor, value)):
            descend_all(path, value, list(enumerate(value)))
        else:
            leaf(Leaf(path, value, container, name))

    def descend_all(path: KeyPath, container: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for name, item in items:
            descend((*path, name), container, name, item)

    def leaf(found: Leaf) -> None:
        key, problem = found.key, _problem(found.path, found.value)
        if key in tree.tensors or key in tree.values:
            problem = "a second entry whose path has the same spelling; rename one of the two keys"
        if problem:
            tree.problems.append(f"{key}: {problem}")
        else:
            (tree.tensors if isinstance(found.value, Tensor) else tree.values)[key] = found

    if isinstance(state_dict, ModelState):
        tree.owners.append(((), state_dict.model))
    descend_all((), state_dict, list(state_dict.items()))
    return tree


def _problem(path: KeyPath, value: Any) -> str | None:
    try:
        key_of(path).encode()
    except UnicodeEncodeError:
        return "expected a name that is text, found half of a surrogate pair in it"
    if isinstance(value, Tensor):
        return None
    if holds_tensor(value):
        return (
            f"expected tensors in dicts with string keys and in lists, found one in a {type(value).__name__}"
            f"{' with other keys' if isinstance(value, dict) else ''}, where it could not be loaded in place"
        )
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _is_numbered(value: Any) -> bool:
    """Whether `value` is what the `state_dict` of an optimizer with state returns."""
    inner = value.get("state") if isinstance(value, dict) and "param_groups" in value else None
    return isinstance(inner, dict) and bool(inner) and all(isinstance(key, int) for key in inner)


def _is_stateful(value: Any) -> bool:
    return (
        not isinstance(value, (dict, Tensor))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def holds_tensor(value: Any, depth: int = 0) -> bool:
    """Whether a tensor, or an object with a state dict, is somewhere in `value`."""
    if isinstance(value, Tensor):
        return True
    if depth > 64:  # circular: encode() raises a clear error
        return False
    if isinstance(value, dict):
        return any(holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_tensor(item, depth + 1) for item in value)
    return _is_stateful(value)


class _Node(dict[Any, Any]):
    """A dict or list under construction; a dict of another type is a value."""


def nested(leaves: dict[KeyPath, Any]) -> dict[str, Any]:
    """The nested state dict from which `leaves` were taken: dicts for strings, lists for numbers."""
    root = _Node()
    for path, value in leaves.items():
        current = root
        for part in path[:-1]:
            current = current.setdefault(part, _Node())
        current[path[-1]] = value
    made: dict[str, Any] = _plain(root)
    return made


def _plain(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_plain(node[key]) for key in sorted(node)]
    return {key: _plain(item) for key, item in node.items()}


# ---- tensors ---------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """This rank's part of a tensor: `local` is `box` of a tensor of `shape`. Both are None if the tensor is on a mesh
    of other ranks."""

    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    local: Tensor | None
    # The place of a tensor inside of another one (wrapped.py): the rows of that one to which it belongs, and its shape.
    # `box` is then at offset 0, and `shape` of no meaning.
    around: tuple[tuple[int, int], tuple[int, ...]] | None = None
    # How a DTensor is cut, with ranks of the default group.
    rule: Rule | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.local is None else self.local.numel() * self.local.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without `torch.`: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a manifest names."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class Place(NamedTuple):
    """Where this rank's part of a tensor is in it; both are None if the tensor is on a mesh of other ranks."""

    shape: tuple[int, ...]
    box: Box | None
    local: Tensor | None
    rule: Rule | None = None


def part_of(tensor: Tensor) -> Part | str:
    """This rank's part of `tensor`, sharing its memory; or why it cannot be saved or loaded."""
    place = place_of(tensor)
    if isinstance(place, str):
        return place
    return (place.local is not None and _unusual(place.local)) or Part(
        dtype_name(tensor.dtype), place.shape, place.box, place.local, rule=place.rule
    )


def place_of(tensor: Tensor) -> Place | str:
    """The place that `part_of` has, whatever the local tensor is."""
    tensor = settled(tensor.detach())
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Place(shape, whole(shape), tensor)
    mesh, cuts = tensor.device_mesh, []
    for placement in tensor.placements:
        dim = cut_dim(placement)
        if dim is None and not placement.is_replicate():
            return f"expected Shard and Replicate, found placements {tensor.placements}; redistribute it first"
        # Only a placement that splits after axes to its right has a `split_factor`.
        cuts.append(None if dim is None else Cut(dim % len(shape), getattr(placement, "split_factor", 1)))
    coordinate, rule = mesh.get_coordinate(), _rule_of(mesh, tuple(cuts))
    if coordinate is None:
        return Place(shape, None, None, rule)
    local = settled(local_of(tensor)).detach()
    box = local_box(shape, tuple(mesh.shape), coordinate, cuts)
    if tuple(local.shape) != box.lengths:
        return (
            f"expected {box.lengths} of {shape} on this rank by placements {tensor.placements} on a mesh of "
            f"{tuple(mesh.shape)}, found a local tensor of {tuple(local.shape)}"
        )
    return Place(shape, box, local, rule)


# A model has thousands of tensors on one mesh, of thousands of ranks. By the mesh itself: an axis of a mesh equals that
# of a rank in another row, which is another thread in tests.
_rules: Any = WeakIdKeyDictionary()


def _rule_of(mesh: DeviceMesh, cuts: tuple[Cut | None, ...]) -> Rule:
    known: dict[tuple[Cut | None, ...], Rule] = _rules.setdefault(mesh, {})
    if cuts not in known:
        known[cuts] = rule_of(tuple(mesh.shape), mesh.mesh.flatten().tolist(), cuts)
    return known[cuts]


def _unusual(tensor: Tensor) -> str | None:
    """Why the bytes of `tensor` are not plain memory; None if they are."""
    if tensor.is_meta:
        return "expected a tensor with memory, found one on the meta device; materialize the model first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"expected a dense tensor, found {tensor.layout}{' quantized' if tensor.is_quantized else ''}"
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"expected a plain tensor or a DTensor, found {type(tensor).__name__}; unwrap it"
    if dtype_name(tensor.dtype) not in known_dtypes():
        return f"expected a dtype of whole bytes, found {tensor.dtype}"
    return None


def on_host(local: Tensor) -> Tensor:
    """`local`, contiguous in host memory; itself if it is that already."""
    return local.resolve_conj().resolve_neg().to("cpu").contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, which the view keeps alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def staging(wanted: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """Uninitialised contiguous tensors on the host, one per (name of dtype, shape), in one allocation that is freed
    with the last of them.

    New memory costs a page fault at the first touch: with 4 KiB pages a quarter of a load's CPU time. So huge pages are
    requested where the system has them. Raises `OSError` if no memory is left.
    """
    starts, nbytes = list[int](), 0
    for dtype, shape in wanted:
        starts.append(nbytes)
        nbytes += -(-whole(tuple(shape)).numel * itemsize(dtype) // _ALIGNMENT) * _ALIGNMENT
    memory = _mapped(nbytes) if nbytes >= _OWN_MAP_NBYTES else torch.empty(nbytes, dtype=torch.uint8)
    made = []
    for start, (dtype, shape) in zip(starts, wanted, strict=True):
        size = whole(tuple(shape)).numel * itemsize(dtype)
        made.append(memory[start : start + size].view(dtype_of(dtype)).view(tuple(shape)))
    return made


def _mapped(nbytes: int) -> Tensor:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if (huge := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(huge)
    return torch.frombuffer(pages, dtype=torch.uint8)
