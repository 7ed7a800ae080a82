"""A user's model as data: units, parameters, and the tape of one step on the meta device (`tape`), where tensors have
shapes and no memory, so that a model of any size does. Also what this machine reaches, measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from .._torch import dtensor_like, fake_group, local_of
from ..program import BATCH_NORM, OwnDtype, Program, ProgramError, modules_of, to_device
from .description import Few, Kind, Model, Parameter, Stage, Tape, UnitShape
from .machine import Hardware
from .recomputation import NONE, is_matmul, is_on_host, recorded_on_host
from .repeats import KEPT, WORTH, as_stage, pipeline_model
from .tape import META, record, tensors_in
from .values import MOST_NUMEL, UnknownValueError


class _Call(NamedTuple):
    """One call of `fully_shard` by the program."""

    modules: tuple[nn.Module, ...]
    given: dict[str, Any]


def describe(
    program: Program,
    name: str,
    *,
    samples: int | None = None,
    compute: str = "",
    alone: bool = False,
    recompute: str | Sequence[str] = NONE,
    keep_float32: Sequence[str] = (),
    tensor: int = 1,
    on_cpu: bool = False,
    shared: bool = False,
    blocks: int = 0,
) -> Model:
    """The model of `program` as data, with the tape of a step on batch 0.

    samples: the size of the batch, None for that of `program`: its tensors get another first dim. compute: the dtype
    of full parameters (`param_dtype`), "" for their own. alone: nothing but the model is a unit. recompute: ways
    (`recomputation`), of which those with everything on the host are part of the tape. keep_float32: names of classes
    (`program.modules_of`) whose modules compute in the dtype of their parameters; so do parameters for which a
    `param_dtype_override_fn` says so that `shard` passes. tensor: ranks over which `parallelize` of the program divides
    the model; what is described is the part of one of them, and no process group may be there. on_cpu: the step runs on
    a CPU. shared: `parallelize` divides also with one of these ranks: experts, and attention over parts of sequences.
    blocks: so many of the largest list of equal blocks are described, for `repeats`, if it has many more and the
    program can do with these; 0: all.
    Raises `ProgramError` for a model that cannot be built on the meta device, for a name of no class in it, and for a
    step that needs values that are not known (`values`).
    """
    ways = [recompute] if isinstance(recompute, str) else recompute
    if tensor > 1 and any(map(is_on_host, ways)):
        raise ProgramError(f"{name}: activations on the host are not planned for layers that are divided over ranks")
    with nullcontext() if not shared and tensor == 1 else fake_group(tensor):
        given = samples, compute, alone, recompute, keep_float32, 0 if not shared and tensor == 1 else tensor, on_cpu
        if blocks:
            try:
                return _describe(program, name, *given, blocks)
            except ProgramError:
                pass  # it asks for a block that was left out, or fails with all of them
        return _describe(program, name, *given, 0)


class StagePrograms(Protocol):
    """The programs of the stages of a pipeline, as `migrate.stage_programs` makes them: each is described before the
    next one is asked for, which begins with what it made. `splits`: whether the schedule has gradients of weights
    apart."""

    count: int
    splits: bool
    program: Program
    model: nn.Module
    # Shape and dtype of what the program of each stage gave when it ran.
    made: dict[int, Any]

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]: ...

    def made_nbytes(self, number: int) -> int: ...

    def of(self, number: int, *, halves: bool = False) -> Program: ...

    def with_stage(self, part: tuple[str, ...]) -> tuple[Any, int]: ...


# Descriptions of stages that stand for others, and what these gave: by kinds of stages, and what they are described at.
Alike = dict[tuple[object, ...], tuple[Model, Any]]


def describe_stages(programs: StagePrograms, name: str, *, alike: Alike | None = None, **sizes: Any) -> Model:
    """The model of a pipeline as data, with the tape of each stage. `sizes`: as for `describe`. `alike`: stages of
    equal blocks are described by one of them, which is kept there for other pipelines of the same model; `Sizes` has
    the condition and makes the model of it."""
    stages: list[Stage] = []
    given = 0
    blocks = None if alike is None or programs.splits else _list_of_many(programs.model)
    for number in range(programs.count):
        kind = None if blocks is None else _kind_of(programs, number, *blocks)
        halves = None
        if alike is None or kind is None:
            model = as_stage(describe(programs.of(number), name, **sizes), number)
            if programs.splits:
                halves = as_stage(describe(programs.of(number, halves=True), name, **sizes), number)
        else:
            shown = tuple(sorted((key, str(value)) for key, value in sizes.items()))
            key = (kind.key, programs.made.get(number - 1), shown)
            if key not in alike:
                others, place = programs.with_stage(kind.part)
                others.made = {place - 1: programs.made.get(number - 1)}
                alike[key] = describe(others.of(place), name, **sizes), others.made[place]
            model, programs.made[number] = alike[key]
        made = programs.made_nbytes(number)
        stages.append(Stage(model, halves, given, made, None if kind is None else kind.few))
        given = made
    batch = to_device(programs.program.batch(0), META)
    if (samples := sizes.get("samples")) is not None:
        batch = _resized(batch, _sizes(batch)[0], samples)
    return pipeline_model(tuple(stages), sum(tensor.nbytes for tensor in tensors_in([batch])))


class _Kind(NamedTuple):
    """A kind of stages. `part`: modules of one that stands for all of them; `few`: which blocks the stage has."""

    key: tuple[object, ...]
    part: tuple[str, ...]
    few: Few


def _kind_of(programs: StagePrograms, number: int, name: str, total: int) -> _Kind | None:
    """The kind of a stage with some of the `total` blocks of the list `name`; None for another one. Blocks at the ends
    of the list may differ, so that stages which have them are kinds of their own."""
    part = programs.parts[number]
    head = f"{name}." if name else ""
    places = [i for i, each in enumerate(part) if each.startswith(head) and each.removeprefix(head).isdigit()]
    own = [int(part[i].removeprefix(head)) for i in places]
    ends = 0 in own, total - 1 in own
    begin, count = own[0] if own else 0, len(own) if len(own) < 2 else KEPT
    at = places[0] if places else 0
    if all(ends) or own != [*range(begin, begin + len(own))] or places != [*range(at, at + len(own))]:
        return None
    first = 0 if ends[0] else total - count if ends[1] else min(begin, total - 1 - count)
    before, after = part[:at], part[at + len(own) :]
    standing = (*before, *(f"{head}{first + k}" for k in range(count)), *after)
    more = sum(_buffers_in(programs.model, part)) - sum(_buffers_in(programs.model, standing))
    key = (before, after, count, *ends, number == 0, number == programs.count - 1)
    return _Kind(key, standing, Few(name, begin, len(own), more))


def _buffers_in(model: nn.Module, part: Sequence[str]) -> Iterable[int]:
    """Bytes of each buffer of some modules."""
    found = {id(buffer): buffer.nbytes for name in part for buffer in model.get_submodule(name).buffers()}
    return found.values()


def _describe(
    program: Program,
    name: str,
    samples: int | None,
    compute: str,
    alone: bool,
    recompute: str | Sequence[str],
    keep_float32: Sequence[str],
    tensor: int,
    on_cpu: bool,
    blocks: int,
) -> Model:
    dtype: torch.dtype | None = getattr(torch, compute) if compute else None
    torch.manual_seed(0)
    try:
        with META:
            model = program.model()
    except Exception as error:
        raise ProgramError(f"{name}: the model cannot be built on the meta device: {_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ProgramError(f"{name}: expected `model` to build an nn.Module, found a {type(model).__name__}")
    model.to(META)
    undivided = sum(p.numel() for p in model.parameters()) if tensor else 0
    buffers = _buffers(model)
    cut = _cut(model, blocks) if blocks else None
    buffers -= _buffers(model)  # those of blocks that are left out
    loss_context = _divided(program, model, name, tensor) if tensor else nullcontext
    calls = [_Call((model,), {})] if alone else _calls(program, model, name)
    calls = [*_divided_further(model), *calls]
    names = {id(module): dotted for dotted, module in model.named_modules()}
    if not calls:
        raise ProgramError(f"{name}: expected `shard` to call fully_shard at least once, found no call")
    order = {id(module): i for i, module in enumerate(model.modules())}
    inner = sorted((call for call in calls if model not in call.modules), key=lambda call: order[id(call.modules[0])])
    own = next((call.given for call in calls if model in call.modules), {})
    owned = _owned(model, [call.modules for call in inner], calls)
    for dotted in (dotted for found in owned for dotted, p in found.items() if not p.ndim):
        raise ProgramError(
            f"{name}: {dotted}: expected a parameter with at least one dim, found a scalar, which fully_shard refuses; "
            f"make it a tensor of one element, or name it in ignored_params"
        )
    places = {dotted: i for i, (dotted, _) in enumerate(model.named_parameters())}
    keeps = _keeps(model, name, keep_float32)
    units = [_unit("", model, owned[0], own, places, keeps)]
    units += [
        _unit("+".join(names[id(m)] for m in call.modules), call.modules[0], found, call.given, places, keeps)
        for call, found in zip(inner, owned[1:], strict=True)
    ]
    shapes = tuple(units)
    place: dict[int, int] = {id(model): 0}
    place |= {id(module): i for i, call in enumerate(inner, 1) for module in call.modules}
    unit_of = {id(p): i for i, found in enumerate(owned) for p in found.values()}
    buffers += _buffers(model)
    own_parameters = list(model.parameters())
    parameters = _convert(model, dtype, {p.name for unit in units for p in unit.parameters if p.kept})
    try:
        own = program.batch(0)
        there = _sizes(own)[0]
        batch = to_device(own, META)
        if samples is not None:
            batch = _resized(batch, there, samples)
        by_id = {id(parameter): parameter for parameter in own_parameters}
        unit_of_new = {id(new): unit_of.get(old, 0) for old, new in parameters}
        on_host = {number for number in range(len(units)) if recorded_on_host(recompute, number)}
        known = _known(own, batch)
        tape = record(
            program,
            model,
            batch,
            place,
            unit_of_new,
            dtype,
            on_host,
            loss_context,
            known=known,
            on_cpu=on_cpu,
            shards={id(new): by_id[old] for old, new in parameters},
        )
        reached = {dotted for dotted, p in model.named_parameters() if p.grad is not None}
    except ProgramError:
        raise
    except UnknownValueError as error:
        raise ProgramError(f"{name}: {error}") from error
    except Exception as error:
        raise ProgramError(f"{name}: a step on the meta device raised {_line(error)}") from error
    samples_there, tokens = _sizes(batch)
    shapes = tuple(
        replace(u, parameters=tuple(replace(p, reached=p.name in reached) for p in u.parameters)) for u in shapes
    )
    return Model(
        name,
        shapes,
        tape,
        buffers,
        samples_there,
        tokens,
        compute,
        _attention(model, batch, max(tensor, 1)),
        _multiplied(tape, tokens),
        undivided,
        cut,
    )


def _buffers(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())


def _cut(model: nn.Module, blocks: int) -> tuple[str, int] | None:
    """Leave the first and the last of the largest list of many modules, `blocks` in all: the name of the list, and how
    many it had."""
    found = _list_of_many(model)
    if found is not None:
        del model.get_submodule(found[0])[blocks // 2 : found[1] - blocks // 2]  # type: ignore[operator]
    return found


def _list_of_many(model: nn.Module) -> tuple[str, int] | None:
    """The largest list of many modules of one class: its name, and how many it has."""
    lists = {
        dotted: module
        for dotted, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= WORTH and len({type(each) for each in module}) == 1
    }
    name = max(lists, key=lambda dotted: sum(p.numel() for p in lists[dotted].parameters()), default=None)
    return None if name is None else (name, len(lists[name]))


def _divided(program: Program, model: nn.Module, name: str, tensor: int) -> Callable[[], AbstractContextManager[Any]]:
    """Let the program divide its model over a fake group of `tensor` ranks; where its loss and backward run."""
    if program.parallelize is None:
        raise ProgramError(f"{name}: expected a program that says how its model is divided over ranks (`parallelize`)")
    mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tp",))
    try:
        found = program.parallelize(model, mesh)
    except Exception as error:
        raise ProgramError(f"{name}: the model cannot be divided over {tensor} ranks: {_line(error)}") from error
    return found if callable(found) else nullcontext


def _own(parameter: Tensor) -> Tensor:
    """The part of `parameter` that this rank has of it beside sharding."""
    return local_of(parameter) if isinstance(parameter, DTensor) else parameter


def _divided_further(model: nn.Module) -> list[_Call]:
    """Modules whose parameters are cut over fewer ranks than others: units of their own, before those around them."""
    found = []
    for module in model.modules():
        cut = {getattr(p, "cut_over", None) for p in module.parameters(recurse=False)} - {None}
        if cut:
            found.append(_Call((module,), {"shard_placement_fn": lambda p: _Placed(p.cut_over[1])}))
    return found


class _Placed(NamedTuple):
    dim: int


# ---- units -----------------------------------------------------------------------------------------------------------


def _calls(program: Program, model: nn.Module, name: str) -> list[_Call]:
    """The calls of `fully_shard` that the program makes; nothing is sharded."""
    calls: list[_Call] = []

    def shard(module: Any, **given: Any) -> Any:
        modules = (module,) if isinstance(module, nn.Module) else tuple(module)
        calls.append(_Call(modules, given))
        return module

    try:
        program.shard(model, shard)
    except Exception as error:
        raise ProgramError(f"{name}: `shard` raised {_line(error)}") from error
    return calls


def _owned(model: nn.Module, groups: list[tuple[nn.Module, ...]], calls: list[_Call]) -> list[dict[str, nn.Parameter]]:
    """The parameters of the root and of each group, by name: each belongs to the innermost unit that was sharded
    first."""
    ignored = {id(p) for call in calls for p in call.given.get("ignored_params") or ()}
    first = {id(m): i for i, modules in enumerate(groups, 1) for m in modules}
    sharded_in = [[id(m) for m in call.modules] for call in calls]
    dotted = {id(p): n for n, p in model.named_parameters()}
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(len(groups) + 1)]
    taken: set[int] = set(ignored)
    for modules in sharded_in:
        unit = next((first[m] for m in modules if m in first), 0)
        for module in model.modules():
            if id(module) in modules:
                for parameter in module.parameters():
                    if id(parameter) not in taken:
                        taken.add(id(parameter))
                        found[unit][dotted[id(parameter)]] = parameter
    return found


def _unit(
    name: str,
    module: nn.Module,
    found: dict[str, nn.Parameter],
    given: dict[str, Any],
    places: dict[str, int],
    keeps: OwnDtype,
) -> UnitShape:
    placing = given.get("shard_placement_fn")
    chosen = getattr(given.get("mp_policy"), "param_dtype_override_fn", None) or keeps
    parameters = []
    for dotted, p in found.items():
        placed = None if placing is None else placing(p)
        dim = getattr(placed, "dim", 0)
        parameters.append(
            Parameter(
                dotted,
                tuple(_own(p).shape),
                str(p.dtype).removeprefix("torch."),
                p.requires_grad,
                dim % max(p.ndim, 1),
                places[dotted],
                p.is_floating_point() and p.dtype in (keeps(p), chosen(p)),
                getattr(p, "cut_over", (0,))[0],
            )
        )
    return UnitShape(name, type(module).__name__, tuple(parameters), given.get("reshard_after_forward"))


def _keeps(model: nn.Module, name: str, classes: Sequence[str]) -> OwnDtype:
    for each in classes:
        if each != BATCH_NORM and not modules_of(model, (each,)):
            raise ProgramError(f"{name}: expected names of classes of its modules, found {each!r}, which none has")
    return OwnDtype(modules_of(model, classes))


def _convert(model: nn.Module, dtype: torch.dtype | None, kept: set[str]) -> list[tuple[int, nn.Parameter]]:
    """Put the full parameters on the modules, in the dtype of computation, those with names in `kept` in their own: (id
    of the former one, new one)."""
    made: dict[int, nn.Parameter] = {}
    own = {id(parameter) for dotted, parameter in model.named_parameters() if dotted in kept}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                casts = dtype is not None and parameter.is_floating_point() and id(parameter) not in own
                kind = dtype if casts else parameter.dtype
                full = torch.empty(_own(parameter).shape, dtype=kind, device=META)
                full = dtensor_like(parameter, full) if isinstance(parameter, DTensor) else full
                made[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
    return list(made.items())


def _multiplied(tape: Tape, tokens: int) -> float:
    """The elements of parameters by which each of `tokens` is multiplied in the forward."""
    flop = 0
    for line in tape.lines:
        if line.kind is Kind.LOSS:
            break
        if line.kind is Kind.OP and is_matmul(line.name) and "attention" not in line.name:
            flop += line.a
    return flop / 2 / tokens


def samples_of(batch: Any) -> int:
    """The samples of a batch: the first dim of its first tensor."""
    return _sizes(batch)[0]


def _sizes(batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch: the first dim of its first tensor, and its elements if they are numbers of
    tokens."""
    found = list(tensors_in([batch]))
    if not found or not found[0].ndim:
        return 1, 1
    first = found[0]
    tokens = first.numel() if not first.is_floating_point() and first.ndim > 1 else len(first)
    return len(first), tokens


def _resized(value: Any, there: int, samples: int) -> Any:
    """`value` with `samples` in the first dim of its tensors, where they have as many as the batch."""
    if isinstance(value, Tensor):
        return value.new_empty(samples, *value.shape[1:]) if value.ndim and len(value) == there else value
    if isinstance(value, dict):
        return type(value)({key: _resized(item, there, samples) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_resized(item, there, samples) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_resized(item, there, samples) for item in value)
    return value


def _known(own: Any, batch: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of `batch` that are not floating-point, each with the values that it has in `own`; where samples were
    added, those of the first ones again."""
    found = []
    for value, tensor in zip(tensors_in([own]), tensors_in([batch]), strict=True):
        if value.is_meta or value.is_floating_point() or tensor.numel() > MOST_NUMEL or not value.numel():
            continue
        if value.shape != tensor.shape:
            value = value[torch.arange(len(tensor)) % len(value)]
        found.append((tensor, value))
    return found


def _attention(model: nn.Module, batch: Any, tensor: int) -> tuple[int, int, int] | None:
    """(length, layers, width of one of `tensor` ranks) of a decoder, from what its configuration says."""
    shape: Any = getattr(model, "shape", None) or getattr(model, "config", None)
    layers = getattr(shape, "layers", None) or getattr(shape, "num_hidden_layers", None)
    width = getattr(shape, "dim", None) or getattr(shape, "hidden_size", None)
    first = next(tensors_in([batch]), None)
    if not isinstance(layers, int) or not isinstance(width, int) or first is None or first.ndim != 2:
        return None
    return int(first.shape[1]), layers, width // tensor


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


# ---- this machine ----------------------------------------------------------------------------------------------------


def physical_nbytes() -> float:
    """The memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measured_cpu(base: Hardware) -> Hardware:
    """`base` with what this CPU reaches, in the threads that torch uses now: the products of a linear layer, attention
    (in float32) beside them, both forward and backward, memory, and the host time of an operation. Takes a second."""
    # A context of 1,024: shorter ones reach less of the peak, but there attention is a small part of a step.
    found = _rates(torch.device("cpu"), rows=1024, width=768, attention_dtype=torch.float32, numel=1 << 24)
    return replace(
        base,
        name="this machine",
        flops2=found.products[0],
        flops4=found.products[1],
        matmul=1.0,
        attention=found.attention / found.products[1],
        bandwidth=found.bandwidth,
        stream=1.0,
        launch=found.launch,
    )


def measured_device(base: Hardware, device: torch.device, *, rows: int = 8192, width: int = 8192) -> Hardware:
    """`base` with the shares of its peaks that `device` reaches, its memory as torch sees it, and copies to the host.
    Takes some seconds."""
    found = _rates(device, rows=rows, width=width, attention_dtype=torch.bfloat16, numel=rows * width)
    there = torch.ones(rows, width, device=device)
    host = torch.empty(rows, width, pin_memory=device.type == "cuda")
    copied = there.nbytes / _best(lambda: host.copy_(there), device)
    memory = base.memory
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    return replace(
        base,
        name=f"measured {base.name}",
        memory=memory,
        matmul=found.products[0] / base.flops2,
        attention=found.attention / base.flops2,
        stream=found.bandwidth / base.bandwidth,
        launch=found.launch,
        host=copied,
    )


class _Rates(NamedTuple):
    """Operations per second of products in bfloat16 and float32 and of attention, bytes per second, seconds."""

    products: tuple[float, float]
    attention: float
    bandwidth: float
    launch: float


def _best(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    taken = []
    for _ in range(repeats + 1):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _rates(device: torch.device, *, rows: int, width: int, attention_dtype: torch.dtype, numel: int) -> _Rates:
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(rows, width, dtype=dtype, device=device)
        weight = torch.ones(width, width, dtype=dtype, device=device)
        taken = _best(lambda x=x, w=weight: (x @ w.t(), x @ w, x.t() @ x), device)  # type: ignore[misc]
        rates.append(3 * 2 * rows * width**2 / taken)
    length, heads = 1024, 8
    wide = min(width, 1024)
    q = torch.ones(2, heads, length, wide // heads, dtype=attention_dtype, device=device, requires_grad=True)
    taken = _best(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward(), device)
    # Two products forward and five backward, as a tape counts them, of half of the square.
    attention = 7 * 2 * length**2 * wide / taken
    # Written over, and far larger than caches: a new block of this size would measure page faults, which a step that
    # uses the same memory again does not pay.
    long, over = torch.ones(numel, device=device), torch.ones(numel, device=device)
    bandwidth = 2 * long.nbytes / _best(lambda: torch.neg(long, out=over), device)
    small = torch.ones(8, device=device)
    launch = _best(lambda: [torch.neg(small) for _ in range(1000)], device) / 1000
    return _Rates((rates[0], rates[1]), attention, bandwidth, launch)
