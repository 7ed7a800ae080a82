"""`materialize`: initialise a model on the meta device unit by unit, with the same values at any world size."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..agree.ledger import TENSOR, stated
from ..agree.structure import Drift as Drift
from ..agree.structure import find_drift as _find_drift
from ..agree.structure import ranks_of, refuse_differences
from ..comm import broadcast_over, largest_over, sum_over, together_over
from ..engine import Unit, unit_of
from ..engine.names import clean_name
from ..engine.state_dict import noting_emptied
from ..engine.uninitialized import (
    Conversion,
    allocate_buffers,
    find_uninitialized,
    foreign_initialisers,
    kept,
    note_uninitialized,
    recompute_buffers,
    shown,
    takes_no_argument,
)
from ..engine.unit import module_units
from ..param import ParamGroup, ShardedParam, can_digest, fingerprints, local_data, note_loaded, poison
from ..peers import scope_of
from ..policy.arguments import expect, expect_callable, expect_flag, expect_module, expect_whole
from . import validate

# ---- sync ------------------------------------------------------------------------------------------------------------
# `sync_module_states` makes values equal on all ranks; `find_drift` reports where they differ.

T = TypeVar("T", bound=nn.Module)


def sync_module_states(
    model: T, mesh: DeviceMesh | None = None, from_rank: int = 0, *, buffers_only: bool = False
) -> T:
    """Broadcast one rank's parameters and buffers to all ranks, before `fully_shard`.

        model = Transformer(config)            # or, on all ranks but one, under torch.device("meta")
        fullshard.sync_module_states(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    mesh: the ranks that take part; None: all of the default process group. With other parallelism around (tensor
        parallelism, a pipeline), the mesh that `fully_shard` gets.
    from_rank: the position in `mesh` of the rank that sends its values; in the default group, its rank.
    buffers_only: leave parameters alone. Allowed after `fully_shard` too, to synchronise buffers that drifted apart in
        training (`find_drift`).

    Writes in place; meta tensors of a receiving rank get memory on the device of the mesh, and tied parameters stay
    tied. Needs one buffer of 16 MiB. Collective. Returns `model`.

    Raises `RuntimeError` after `fully_shard`, unless `buffers_only`, because no rank has all rows; `RanksDisagree` if
    names, shapes or dtypes differ; `ValueError` for a `from_rank` outside of the mesh, or one that has tensors on the
    meta device; `TypeError` for tensor subclasses other than DTensor. Source: the argument `sync_module_states` of
    FSDP1's constructor; FSDP2 has no equivalent.
    """
    expect_module("model", model)
    expect_whole("from_rank", from_rank)
    expect_flag("buffers_only", buffers_only)
    if not buffers_only and module_units(model):
        raise RuntimeError(
            "model: expected one before fully_shard, found sharded modules, so no rank has all rows of their "
            "parameters; call sync_module_states before the first fully_shard, load a checkpoint, or pass "
            "buffers_only=True"
        )
    mesh = validate.resolve_mesh(None) if mesh is None else mesh
    expect("mesh", isinstance(mesh, DeviceMesh), "a DeviceMesh or None", mesh, "use init_device_mesh")
    if not 0 <= from_rank < mesh.size():
        raise ValueError(f"from_rank: expected a position in the mesh, from 0 to {mesh.size() - 1}, found {from_rank}")
    if mesh.size() == 1:
        return model
    with together_over([mesh], "sync_module_states"):
        tensors = dict(_tensors(model, buffers_only=buffers_only))
        _check_kinds(tensors)
        _refuse_other_names(mesh, tensors)
        _refuse_missing(mesh, tensors, from_rank)
        if any(tensor.is_meta for tensor in tensors.values()):
            _allocate_meta(model, validate.device_of(mesh), buffers_only=buffers_only)
            tensors = dict(_tensors(model, buffers_only=buffers_only))
        broadcast_over(mesh, [local_data(tensor) for tensor in tensors.values()], from_rank, "sync_module_states")
    return model


def find_drift(model: nn.Module) -> tuple[Drift, ...]:
    """Find tensors that should be equal on all ranks and are not: buffers, replicas of shards, unsharded parameters.

    Buffers and `ignored_params` are compared over the mesh of their unit, shards over their replicas (HSDP). The
    comparison is bitwise, by 64-bit digests; no tensor is sent. It skips names that only some ranks have, and tensors
    without data.

    Collective. Each item has `name`, `kind` ("buffer", "replica", "unsharded parameter") and `ranks`, grouped by equal
    values, the largest group first. Empty if nothing differs. Raises `ValueError` if nothing in `model` is sharded.
    """
    expect_module("model", model)
    units = module_units(model)
    if not units:
        raise ValueError(
            f"model: expected one with sharded modules in it, found {type(model).__name__} without; "
            f"call fully_shard first"
        )
    return tuple(_find_drift(units, model))


# ---- tensors of a model --------------------------------------------------------------------------------------


def _tensors(model: nn.Module, *, buffers_only: bool) -> Iterator[tuple[str, Tensor]]:
    if not buffers_only:
        yield from ((clean_name(name), parameter) for name, parameter in model.named_parameters())
    yield from ((clean_name(name), buffer) for name, buffer in model.named_buffers())


def _check_kinds(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        local = local_data(tensor)
        if not can_digest(local) and not (local.is_meta and type(local) in (Tensor, nn.Parameter)):
            raise TypeError(
                f"{name}: expected a plain tensor or a DTensor, found {type(local).__name__} ({local.layout}); give "
                f"all ranks the same values yourself"
            )
        if isinstance(tensor, DTensor) and local.is_meta:
            raise TypeError(
                f"{name}: expected a DTensor with data, found one on the meta device; call to_empty and give all ranks "
                f"the same values yourself, or call sync_module_states before the model is made tensor-parallel"
            )


def _refuse_other_names(mesh: DeviceMesh, tensors: dict[str, Tensor]) -> None:
    scope = scope_of(ranks_of(mesh))
    if scope is None:
        return
    statements = [
        stated(TENSOR, name, {"shape": str(tuple(local.shape)), "dtype": str(local.dtype).removeprefix("torch.")})
        for name, tensor in tensors.items()
        for local in (local_data(tensor),)
    ]
    refuse_differences(scope, "the tensors of sync_module_states", statements)


def _refuse_missing(mesh: DeviceMesh, tensors: dict[str, Tensor], source: int) -> None:
    """Raise on all ranks if the source rank has tensors on the meta device."""
    mine = mesh.mesh.flatten()[source].item() == torch.distributed.get_rank()
    lost = torch.tensor([mine and tensor.is_meta for tensor in tensors.values()], dtype=torch.int32)
    missing = [
        name for name, count in zip(tensors, sum_over(mesh, lost, "sync_module_states").tolist(), strict=True) if count
    ]
    if missing:
        raise ValueError(
            f"from_rank: expected a rank with values, found that rank {source} has {shown(missing)} on the meta "
            f"device; name the rank that built or loaded the model"
        )


def _allocate_meta(model: nn.Module, device: torch.device, *, buffers_only: bool) -> None:
    """Allocate memory for meta tensors; a tensor shared by several modules stays shared."""
    # Keep the old tensors alive, so that their ids are not reused.
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty_like(old, device=device, requires_grad=False)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            made[id(old)] = old, new
        return made[id(old)][1]

    for module in model.modules():
        own = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        if not buffers_only:
            own |= module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in own.items():
            if tensor.is_meta:
                setattr(module, name, empty(tensor))


# ---- materialize -----------------------------------------------------------------------------------------------------


Init = Callable[[nn.Module], object]

# Units whose modules hold full, plain parameters for an initialiser.
filling: set[Unit] = set()
# torch's generators are per process, and ranks may be threads of one process.
_GENERATORS = threading.RLock()


def materialize(
    model: T, *, device: torch.device | str | None = None, init: Init | None = None, seed: int | None = None
) -> T:
    """Allocate and initialise the tensors of `model` that are on the meta device or unwritten since `to_empty`.

        with torch.device("meta"):
            model = Transformer(config)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fullshard.materialize(model, seed=0)

    Units are initialised one after the other. Each initialiser sees full, plain parameters in the storage dtype, as in
    a single process; then every rank keeps its rows and frees the rest. So at most the full parameters of the largest
    unit exist at once, each rank draws all values, and only a few numbers are sent. Each module has its own seed,
    derived from `seed` and its dotted name: values depend neither on the world size, nor on the division into units,
    nor on the order of modules, and equal those of an unsharded model. torch's random generators keep their state.

    device: where to allocate; None: the device of the mesh, or the CPU for a model without units.
    init: called with each module that contains an uninitialised tensor (in itself or below, within its unit), children
        first, as by `nn.Module.apply`. It may initialise in place, through `.data`, or by setting a new parameter on
        the module. None: `reset_parameters()` of each module that owns an uninitialised tensor, then
        `init_weights()` of each that has it; `_init_weights` of the model around it for modules of transformers, and
        the adapter's own reset for LoRA layers of PEFT.
    seed: an int, equal on all ranks; None: `torch.initial_seed()`, the last value given to `torch.manual_seed`.

    Tensors that have a value keep it. Non-persistent buffers that `init` leaves uninitialised are computed by the reset
    hook of modules without parameters. A later checkpoint may fill the rest: the first forward names tensors that are
    still uninitialised. Collective.

    Returns `model`. Raises `ValueError` (no initialiser for a module, an `init_weights` that cannot be called within
    one unit, different seeds on the ranks, a device other than the mesh's) and `RuntimeError` (an initialiser wrote
    parameters of other units, or set a parameter of another shape on a module). Source: torch's meta-device flow
    (`to_empty`, `reset_parameters`), which leaves all of this to the caller.
    """
    expect_module("model", model)
    expect_callable("init", init, "a function of a module", or_none=True)
    units = list(dict.fromkeys(module_units(model)))
    with together_over((param.spec.mesh for unit in units for param in unit.params), "materialize"):
        _materialize(model, units, device, init, seed)
    return model


def _materialize(
    model: nn.Module, units: Sequence[Unit], device: torch.device | str | None, init: Init | None, seed: int | None
) -> None:
    target = _target_device(device, units)
    value = _agreed_seed(seed, units)
    _reshard(units)
    stages = _stages(model)
    _allocate(model, units, target)
    lost = {id(tensor) for tensor in find_uninitialized(units, model).tensors}
    foreign = {} if init is not None else foreign_initialisers(model)
    for stage in stages:
        found = [_call_for(module, stage, lost, init, foreign) for module in stage.modules]
        stage.calls.extend(call for call in found if call is not None)
    valued = (t for t in (*model.parameters(), *model.buffers()) if foreign and id(t) not in lost)
    with kept(valued):
        for stage in stages:
            if stage.calls:
                with _full(stage.unit, lost):
                    for module, call in stage.calls:
                        _run(call, _seed_of(value, stage.names[module]), target, _crossed(module, stage.unit))
    recompute_buffers(model, target)


def _reshard(units: Iterable[Unit]) -> None:
    for unit in units:
        if unit.root is not None:
            unit.root.reshard(unit)


def allocate(model: nn.Module) -> None:
    """Allocate what is on the meta device, as `materialize` does, and initialise nothing. No communication."""
    units = list(dict.fromkeys(module_units(model)))
    _reshard(units)
    _allocate(model, units, _target_device(None, units))


def forget_values(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Make `tensors` of `model` uninitialised memory again: a forward refuses them until they are written."""
    for tensor in tensors:
        poison(tensor)
    for unit in dict.fromkeys(module_units(model)):
        note_uninitialized(unit)


def mark_initialized(module: nn.Module) -> None:
    """Accept tensors unwritten since `to_empty`: the next forward does not check for them.

    Unwritten memory holds NaN (integers: bytes 0xA5), also for buffers on the meta device. Meant for parameters and
    buffers that are never read, and for rows that some ranks need not write. Call it on all ranks, after `to_empty`.
    Raises `ValueError` if nothing in `module` is sharded.
    """
    expect_module("module", module)
    units = module_units(module)
    if not units:
        raise ValueError(
            f"module: expected one with sharded modules in it, found {type(module).__name__} without; "
            f"call fully_shard first"
        )
    allocate_buffers(module, units[0].device)
    for unit in units:
        unit.unproven = False
    for unit in units:
        if unit.root is not None:
            unit.root.some_unproven = any(other.unproven for other in unit.root.units)


# ---- initialisers to call ------------------------------------------------------------------------------------

_Call = tuple[nn.Module, Callable[[], object]]
_PRIVATE_RESET = "_reset_parameters"


class _Stage(NamedTuple):
    """The modules of one unit, children first; `unit` None: the modules outside of all units."""

    unit: Unit | None
    modules: list[nn.Module]
    names: dict[nn.Module, str]
    calls: list[_Call]


def _stages(model: nn.Module) -> list[_Stage]:
    stages: dict[Unit | None, _Stage] = {}
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, above: Unit | None) -> None:
        seen.add(module)
        unit = unit_of(module) or above
        for child_name, child in module.named_children():
            if child not in seen:
                walk(f"{name}.{child_name}" if name else child_name, child, unit)
        stage = stages.setdefault(unit, _Stage(unit, [], {}, []))
        stage.modules.append(module)
        stage.names[module] = clean_name(name)

    walk("", model, None)
    return list(stages.values())


def _call_for(
    module: nn.Module,
    stage: _Stage,
    lost: set[int],
    init: Init | None,
    foreign: Mapping[nn.Module, Callable[[], object]],
) -> _Call | None:
    """The initialisers to call for `module`, or None."""
    if not any(id(tensor) in lost for inner in _inside(module, stage) for tensor in _own_tensors(inner)):
        return None
    if init is not None:
        return module, lambda: init(module)
    if module in foreign:
        return module, foreign[module]
    where = f"{stage.names[module] or 'the model'} ({type(module).__name__})"
    missing = [name for name, tensor in _own_named(module) if id(tensor) in lost]
    # torch's attention and its Transformer have theirs under a private name.
    reset = getattr(module, "reset_parameters", getattr(module, _PRIVATE_RESET, None))
    weights = getattr(module, "init_weights", getattr(module, _PRIVATE_RESET, None) if not missing else None)
    hooks: list[Callable[[], object]] = []
    if missing and callable(reset) and takes_no_argument(reset):
        hooks.append(reset)
    if callable(weights):
        others = _crossed(module, stage.unit)
        if others or not takes_no_argument(weights):
            named = getattr(weights, "__name__", "init_weights")
            why = f"reaches into {len(others)} other units" if others else "takes arguments"
            raise ValueError(
                f"init: expected initialisers that take no argument and stay within one unit, found {where}, whose "
                f"{named} {why}; pass init=, a function that initialises the module it is given, or call "
                f"to_empty(device=...) and initialise the shards yourself"
            )
        hooks.append(weights)
    if missing and not hooks:
        raise ValueError(
            f"init: expected reset_parameters() or init_weights() on each module that owns parameters or buffers "
            f"without a value, found none on {where} for {shown(missing)}; write one, or pass init="
        )
    return (module, lambda: [hook() for hook in hooks]) if hooks else None


def _inside(module: nn.Module, stage: _Stage) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner in stage.names)


def _own_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for _, tensor in _own_named(module))


def _crossed(module: nn.Module, unit: Unit | None) -> list[Unit]:
    """The units below `module` other than `unit`."""
    return [other for other in dict.fromkeys(module_units(module)) if other is not unit]


def _target_device(device: torch.device | str | None, units: Sequence[Unit]) -> torch.device:
    placed = next((group.placing.device for unit in units for group in unit.groups), None)
    if device is None:
        return placed or torch.device("cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        found = device if isinstance(device, (str, int)) else type(device)
        raise type(error)(
            f"device: expected a torch.device or its name, found {found!r} ({error}); leave it out, or name a device"
        ) from None
    if placed is not None and wanted.type != placed.type:
        raise ValueError(
            f"device: expected {placed}, where the mesh of the sharded modules is, found {wanted}; leave it out"
        )
    return wanted if placed is None else placed


# ---- memory --------------------------------------------------------------------------------------------------


def _allocate(model: nn.Module, units: Sequence[Unit], device: torch.device) -> None:
    """Allocate shards, buffers and unsharded parameters, filled with the pattern that marks unwritten memory."""
    # With CPU offload, shards are on another device than full parameters and buffers.
    places = {id(p.sharded): g.placing.shard_device for u in units for g in u.groups for p in g.params}
    conversion = Conversion(lambda t: torch.empty_like(t, device=places.get(id(t), device)) if t.is_meta else t)
    tied = _tied(model)
    on_meta = {unit: [param for param in unit.params if param.sharded.is_meta] for unit in units}
    for name, module in model.named_modules():
        if any(tensor.is_meta for tensor in _own_tensors(module)):
            with noting_emptied(unit_of(model), module, name=name):
                module._apply(conversion, recurse=False)
    for (module, name), *others in tied:
        for other, other_name in others:
            setattr(other, other_name, getattr(module, name))
    if conversion.emptied:
        for unit in units:
            unit.repair()
            note_uninitialized(unit, on_meta[unit])


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places that share a parameter outside of all units: torch's `_apply` on the meta device would untie them."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta and not isinstance(parameter, DTensor):
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


@contextmanager
def _full(unit: Unit | None, lost: set[int]) -> Iterator[None]:
    """Put full parameters on the modules of `unit`; at exit, keep this rank's shard of those in `lost`."""
    groups = [] if unit is None else [g for g in unit.groups if any(id(p.sharded) in lost for p in g.params)]
    fulls = [[_full_parameter(group, param) for param in group.params] for group in groups]
    for group, parameters in zip(groups, fulls, strict=True):
        group.swap.put(group.swap.spread(parameters))
    if unit is not None:
        filling.add(unit)
    try:
        yield
        for group, parameters in zip(groups, fulls, strict=True):
            for param, full in zip(group.params, parameters, strict=True):
                source = _written(param, full)
                if id(param.sharded) in lost:
                    _keep_part(group, param, source)
                    if unit is not None and unit.settings.notes_values:
                        note_loaded(param, source)
    finally:
        if unit is not None:
            filling.discard(unit)
        for group in groups:
            group.swap.put(group.swap.spread([param.sharded for param in group.params]))


def _keep_part(group: ParamGroup, param: ShardedParam, source: Tensor) -> None:
    own = param.own_spec
    if own is not None:
        source = distribute_tensor(source.detach(), own.mesh, own.placements, src_data_rank=None)
    group.fill(param, source)


def _full_parameter(group: ParamGroup, param: ShardedParam) -> nn.Parameter:
    # Full and plain even under tensor parallelism, so that values do not depend on it either.
    full = nn.Parameter(
        torch.empty(param.spec.shape, dtype=group.precision.storage, device=group.placing.device),
        requires_grad=param.sharded.requires_grad,
    )
    poison(full)
    # Attributes that initialisers read.
    full.__dict__.update(param.sharded.__dict__)
    return full


def _written(param: ShardedParam, full: nn.Parameter) -> nn.Parameter:
    """The parameter after its initialiser ran: `full`, or the one that replaced it."""
    for slot in param.slots:
        standing = slot.get()
        if standing is full:
            continue
        if not isinstance(standing, nn.Parameter) or isinstance(standing, DTensor) or standing.shape != full.shape:
            found = "nothing" if standing is None else f"{type(standing).__name__} of shape {tuple(standing.shape)}"
            raise RuntimeError(
                f"{param.name}: expected a plain parameter of shape {tuple(full.shape)} after its initialiser ran, "
                f"found {found}; initialise it in place"
            )
        return standing
    return full


# ---- values --------------------------------------------------------------------------------------------------


def _agreed_seed(seed: int | None, units: Sequence[Unit]) -> int:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed: expected an int or None, found {type(seed).__name__}; pass a number")
    with _GENERATORS:
        value = (torch.initial_seed() if seed is None else seed) & ((1 << 62) - 1)
    for mesh in dict.fromkeys(param.spec.mesh for unit in units for param in unit.params):
        most, least = largest_over(mesh, torch.tensor([value, -value]), "materialize").tolist()
        if most != -least:
            raise ValueError(
                f"seed: expected the same one on all ranks, found {value} here and another one elsewhere; pass seed=, "
                f"or call torch.manual_seed with the same number on all ranks first"
            )
    return value


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _run(call: Callable[[], object], seed: int, device: torch.device, others: Sequence[Unit]) -> None:
    """Run one initialiser with its own seed; it must not write the parameters of `others`."""
    before = [_fingerprint(unit) for unit in others]
    with _GENERATORS, _seeded(seed, device), torch.no_grad(), torch.device(device):
        call()
    written = any(_fingerprint(unit) != was for unit, was in zip(others, before, strict=True))
    # A rank that owns no written row detects nothing itself.
    if others and _on_any_rank(written, others):
        raise RuntimeError(
            f"init: expected a function that initialises the module it is given and what is in the same unit, found "
            f"that it wrote shards of one of the {len(others)} other units below, where values would depend on the "
            f"world size; leave alone what is sharded (a DTensor), or return early for modules that contain others"
        )


def _on_any_rank(flag: bool, units: Sequence[Unit]) -> bool:
    total = torch.tensor([int(flag)], dtype=torch.int32)
    for mesh in dict.fromkeys(param.spec.mesh for unit in units for param in unit.params):
        total = sum_over(mesh, total, "materialize")
    return bool(total.item())


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of `device`, and restore their state at exit."""
    state = torch.default_generator.get_state()
    # Not torch.manual_seed: it would reseed every other device.
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    accelerator_state = None if accelerator is None else accelerator.get_rng_state(device)
    try:
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            accelerator.manual_seed(seed)
        yield
    finally:
        torch.default_generator.set_state(state)
        if accelerator is not None:
            accelerator.set_rng_state(accelerator_state, device)


def _fingerprint(unit: Unit) -> list[int]:
    """Fingerprints of this rank's shards. Version counters would miss writes through `.data`."""
    return fingerprints(param.local for param in unit.params)
