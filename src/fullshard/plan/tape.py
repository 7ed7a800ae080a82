"""The tape of a step: every operation and every storage of a plain model's forward and backward, on the meta device.

The module of an operation in backward is that of the forward that recorded its node: nodes are numbered in the order in
which forwards make them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import (
    TorchDispatchMode,
    base_of,
    collect_garbage,
    current_node,
    is_write,
    next_node_number,
    node_number,
    operation_name,
    storage_key,
)
from ..program import Program
from . import recurrent
from .description import MESSAGE, OUTSIDE, Kind, Line, Tape
from .ends import with_ends, with_gradients
from .graph_hooks import GraphHooks
from .kernels import Kernels, grouped, operations
from .recomputation import FROM_HOST, TO_HOST
from .slots import Slot, show, slots_of
from .values import Values, needs_value, picked, unknown

META = torch.device("meta")
_OWN_MEMORY = (Tensor, nn.Parameter)
# Puts the result of a message under way into a tensor that waits for it.
_WRAP = f"{MESSAGE}_wrap_tensor_autograd"


def record(
    program: Program,
    model: nn.Module,
    batch: Any,
    place: dict[int, int],
    unit_of: dict[int, int],
    compute: torch.dtype | None,
    on_host: Container[int] = (),
    loss_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    known: Iterable[tuple[Tensor, Tensor]] = (),
    on_cpu: bool = False,
    shards: Mapping[int, nn.Parameter] = MappingProxyType({}),
) -> Tape:
    """`place`, `unit_of`: the unit of a module, and of a parameter, by id. `shards`: by id, what a parameter is outside
    of the forward of its unit, where its dtype may be asked for. `on_host`: units whose forwards keep on the
    host what autograd saves. `loss_context`: where loss and backward run. `known`: tensors of the batch, with what is
    in them. `on_cpu`: the step runs on a CPU, whose fused attention and dropout differ from those of a device.
    Parameters may be DTensors of a model that is divided over a fake group: then the tape is that of one of its ranks,
    and messages are operations.

    Of a stage of a pipeline `program.loss` returns its backward instead of a loss: a function that is called with one
    that makes a tensor that was received, and one to call where gradients of weights begin, if these are apart."""
    divided = any(isinstance(p, DTensor) for p in model.parameters())

    def once() -> Tape:
        others = [*model.buffers(), *tensors_in([batch])]
        recorder = (_DividedRecorder if divided else _Recorder)([*_plain(model.parameters())], others)
        for tensor, value in known:
            recorder.results.values.set(tensor, value)
        recorder.results.values.names = {id(module): dotted for dotted, module in model.named_modules()}
        # Attention over a part of a sequence calls attention over what it has, by these kernels.
        slots = slots_of(model, unit_of, shards)
        kernels, forwards = Kernels(on_cpu), _wrapped(model, place, recorder, compute, on_host, slots)
        with kernels, loss_context(), forwards, recorder, _noting(recorder):
            loss: Any = program.loss(model, batch)
            recorder.write(Line(Kind.LOSS, OUTSIDE))
            # A program that computes a unit's forward again in backward meets the parameters that backward gathered.
            show([slot for each in slots.values() for slot in each], full=True)
            recorder.backward = True
            if callable(loss):
                loss(recorder.received, lambda: recorder.write(Line(Kind.WEIGHTS, OUTSIDE)))
            elif isinstance(loss, Tensor) and loss.numel() == 1:
                loss.backward()
            else:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"expected a loss of one element, found {what}")
            recorder.backward = False
        return _tape(recorder, model, batch, unit_of, others)

    if divided:
        # torch finds the layouts of each operation when it first meets it, by running it on other tensors.
        once()
        model.zero_grad(set_to_none=True)
    return once()


def _tape(recorder: _Recorder, model: nn.Module, batch: Any, unit_of: dict[int, int], others: list[Tensor]) -> Tape:
    gradients = {
        recorder.number(gradient): unit_of.get(id(p), 0)
        for p in model.parameters()
        for gradient in _plain([p.grad] if p.grad is not None else [])
        if recorder.number(gradient) >= 0
    }
    lines = recorder.close()
    nbytes = sum(t.nbytes for t in tensors_in([batch]))
    brought = [(unit_of.get(id(p), 0), found) for p in model.parameters() if (found := _brought(p)) is not None]
    return Tape(
        with_gradients(with_ends(lines), gradients),
        gradients,
        tuple(frozenset(found) for found in recorder.inputs),
        tuple(frozenset(found) for found in recorder.outputs),
        nbytes,
        recorder.last_read,
        {recorder.number(tensor): tensor.untyped_storage().nbytes() for tensor in others},
        tuple(found for _, found in brought),
        tuple(unit for unit, _ in brought),
        tuple(recorder.results.values.assumed),
    )


_noted: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def _noting(recorder: _Recorder) -> Iterator[None]:
    token = _noted.set(recorder)
    try:
        yield
    finally:
        _noted.reset(token)


def note(axis: str, operation: str, nbytes: int, *, once: bool = False) -> None:
    """Write a message of `nbytes` that leave this rank along `axis` onto the tape that is recorded, if one is. `once`:
    it is not sent again where its unit is computed again."""
    recorder = _noted.get()
    if recorder is not None:
        recorder.message(axis, operation, nbytes, once=once)


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors with memory: of a DTensor its local one, of a message under way its result."""
    for tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = (getattr(tensor, name) for name in names)
            yield from _plain(part for part in inner if isinstance(part, Tensor))
        else:
            yield tensor


def _brought(parameter: Tensor) -> tuple[str, int] | None:
    """The message that gives the gradient of a divided parameter the parameter's own layout, if one has to."""
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return None
    (own,), (found,) = parameter.placements, gradient.placements
    if found == own or found.is_replicate():
        return None
    elements = next(_plain([gradient])).numel()
    if found.is_partial():
        return ("all_reduce" if own.is_replicate() else "reduce_scatter_tensor"), elements
    return ("all_gather_into_tensor" if own.is_replicate() else "all_to_all_single"), elements


class _Packed(NamedTuple):
    """A tensor that is on the host."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Recorder(TorchDispatchMode):
    """Writes the tape. Storages are numbered in the order in which they come. Those that were there before are -1 for
    `parameters`, and less for `others`."""

    def __init__(self, parameters: list[Tensor], others: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines: list[Line] = []
        # The numbers by the address of a storage's implementation, which is another's once the storage went.
        self._numbers = {storage_key(tensor.untyped_storage()): -1 for tensor in parameters}
        self._numbers |= {storage_key(tensor.untyped_storage()): -number for number, tensor in enumerate(others, 2)}
        self._known = [*parameters, *others]
        self._count = 0
        self._open: list[int] = []
        # The number of the first node of each use, and the one after its last.
        self.ranges: list[list[int]] = []
        self.inputs: list[set[int]] = []
        self.outputs: list[set[int]] = []
        self.backward = False
        # Tells for each storage how many operations ran before the one of the forward that reads it last.
        self.last_read: dict[int, int] = {}
        self._ran = 0
        self._now = OUTSIDE
        self._is_closed = False
        self._pauses = False
        self.results = _Results()

    def write(self, line: Line) -> None:
        self._lines.append(line)

    def to_host(self, tensor: Tensor) -> _Packed:
        """A copy of `tensor` goes to the host; nothing here holds it."""
        self._copied(tensor, TO_HOST)
        self._pauses = True
        packed = _Packed(tensor.shape, torch.empty_like(tensor).stride(), tensor.dtype)
        self._pauses = False
        return packed

    def from_host(self, packed: _Packed) -> Tensor:
        """Returns the tensor, on the device again."""
        if self.backward:
            self._switch()
        self._pauses = True
        tensor = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=META)
        self._pauses = False
        self._born(tensor.untyped_storage(), self._use)
        self._copied(tensor, FROM_HOST)
        return tensor

    def _copied(self, tensor: Tensor, name: str) -> None:
        self.write(Line(Kind.OP, self._use, 0, _nbytes(tensor), name))
        self._ran += 1

    def message(self, axis: str, operation: str, nbytes: int, *, once: bool) -> None:
        """Record a message of an axis whose messages torch does not dispatch here."""
        if self.backward:
            self._switch()
        use = OUTSIDE if once else self._use
        self.write(Line(Kind.OP, use, nbytes, 0, f"{MESSAGE}{axis}:{operation}"))
        self._ran += 1

    def received(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like `tensor` of memory that was there before."""
        self._pauses = True
        found = torch.empty_like(next(_plain([tensor])))
        self._pauses = False
        self._numbers[storage_key(found.untyped_storage())] = -1
        return found

    def number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage; below 0 if it was there before."""
        return self._numbers.get(storage_key(tensor.untyped_storage()), -1)

    def enter(self, unit: int, inputs: list[Tensor]) -> int:
        use = len(self.ranges)
        self.ranges.append([next_node_number(), 1 << 62])
        self.inputs.append({n for t in _plain(inputs) if (n := self.number(t)) != -1})
        self.outputs.append(set())
        self._open.append(use)
        self.write(Line(Kind.ENTER, use, unit))
        return use

    def leave(self, use: int, outputs: list[Tensor]) -> None:
        self.ranges[use][1] = next_node_number()
        self.outputs[use] = {n for t in _plain(outputs) if (n := self.number(t)) >= 0}
        self.write(Line(Kind.EXIT, use))
        self._open.remove(use)

    def hooks(self, use: int, inputs: Iterable[Tensor]) -> GraphHooks:
        """The hooks on a use that begins, which write to the tape."""
        report = [lambda use, kind=kind: self.write(Line(kind, use)) for kind in (Kind.REACHED, Kind.INPUTS_REACHED)]
        return GraphHooks(use, inputs, *report)

    def close(self) -> list[Line]:
        self._is_closed = True
        return self._lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pauses:
            return func(*args, **(kwargs or {}))
        if self.backward:
            self._switch()
        inputs = list(tensors_in([*args, *(kwargs or {}).values()]))
        given = {storage_key(t.untyped_storage()) for t in inputs}
        if not self.backward:
            self._read(given)
        known = self._known_result(func, args, kwargs or {})
        args = picked(self.results.values, func, args)
        if operation_name(func) == "aten._local_scalar_dense" and known is not None:
            return known
        if inputs and inputs[0].is_meta and needs_value(func, args, kwargs or {}):
            if known is None:
                raise unknown(func, self.results.values.names)
            if operation_name(func) == "aten._to_copy":
                return known  # to a list
        result = self.results.of(func, args, kwargs or {}, given, known)
        made = [t for t in tensors_in([result]) if storage_key(t.untyped_storage()) not in given]
        writes = is_write(func)
        if not made and not writes:
            return result  # a view
        use = self._use
        name = operation_name(func)
        flop = (
            _message_nbytes(name, args[0], made)
            if name.startswith(MESSAGE)
            else operations(func, args, kwargs or {}, result)
        )
        moved = sum(map(_nbytes, tensors_in([*args, *(kwargs or {}).values()]))) + sum(map(_nbytes, made))
        # What comes is there before the operation's inputs can go.
        for tensor in made:
            self._born(tensor.untyped_storage(), use)
        self.results.values.keep(func, args, kwargs or {}, inputs, made, known)
        self.write(Line(Kind.OP, use, flop, moved, name))
        self._ran += 1
        return result

    def _known_result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._pauses = True
        try:
            return self.results.values.compute(func, args, kwargs)
        finally:
            self._pauses = False

    def _read(self, storages: set[int]) -> None:
        for key in storages:
            if (number := self._numbers.get(key, -1)) >= 0:
                self.last_read[number] = self._ran

    @property
    def _use(self) -> int:
        return self._now if self.backward else self._open[-1] if self._open else OUTSIDE

    def _switch(self) -> None:
        """Note which use's backward runs, from the node that runs."""
        node = current_node()
        number = -1 if node is None else node_number(node)
        if number < 0:
            return  # an accumulation belongs to what came before it
        inside = [use for use, (first, stop) in enumerate(self.ranges) if first <= number < stop]
        use = inside[-1] if inside else OUTSIDE
        if use != self._now:
            self._now = use
            for one in inside:
                self.write(Line(Kind.BACKWARD, one))

    def _born(self, storage: torch.UntypedStorage, use: int) -> int:
        key = storage_key(storage)
        found = self._numbers.get(key)
        if found is not None:
            return found
        number = self._numbers[key] = self._count
        self._count += 1
        self.write(Line(Kind.ALLOCATE, use, number, storage.nbytes()))
        self.last_read[number] = self._ran
        weakref.finalize(storage, self._gone, key, number)
        return number

    def _gone(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
            self.results.values.forget(address)
        if not self._is_closed:
            self.write(Line(Kind.FREE, self._use, number))


class _DividedRecorder(_Recorder):
    """Records a model of DTensors: operations on them are made of ones on local tensors, and of messages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in _OWN_MEMORY for kind in types):
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # it comes again, in parts
            return func(*args, **(kwargs or {}))  # to find shapes
        if operation_name(func) == _WRAP:
            return args[0].detach()  # the same memory, which torch's kernel for shapes does not know
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Results:
    """The results of operations on the meta device, by their arguments. A model's blocks are alike, and torch finds a
    result's shape in Python, which takes longer than all else that is done here for an operation."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[bool, list[tuple[Any, ...]]]] = {}
        self.values = Values()

    def of(self, func: Any, args: Any, kwargs: dict[str, Any], given: set[int], found: Any = None) -> Any:
        """`found`: the result on a CPU, of an operation whose values are known; it says how many rows there are."""
        if operation_name(func) in _BY_VALUE and found is not None:
            made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META) for t in tensors_in([found])]
            return made[0] if isinstance(found, Tensor) else tuple(made)
        if operation_name(func) == "aten._grouped_mm":
            return grouped(*args[:3])
        if operation_name(func) in (recurrent.LAYER, recurrent.LAYER_BACKWARD):
            return recurrent.made(operation_name(func), args)
        try:
            key: Hashable = (func, _described(args), _described(kwargs))
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if known is not None:
            single, results = known
            made = [torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype in results]
            return made[0] if single else tuple(made)
        result = func(*args, **kwargs)
        single = isinstance(result, Tensor)
        each = [result] if single else list(result) if isinstance(result, tuple) else []
        if each and not is_write(func) and _are_new(each, given):
            self._known[key] = (single, [(tuple(t.shape), t.stride(), t.dtype) for t in each])
        return result


# Operations whose results have a shape that depends on values.
_BY_VALUE = ("aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_consecutive", "aten.repeat_interleave")


def _described(value: Any) -> Hashable:
    """A key for arguments: of a tensor what the meta device knows."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, type(value))
    if isinstance(value, list | tuple):
        return (type(value), *map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(item)) for name, item in value.items())
    return (type(value), value)


def _are_new(results: list[Any], given: set[int]) -> bool:
    """Whether each result is a plain tensor on the meta device with all of a storage of its own."""
    if not all(type(t) is Tensor and t.device == META and t.storage_offset() == 0 for t in results):
        return False
    keys = {storage_key(t.untyped_storage()) for t in results}
    return (
        len(keys) == len(results)
        and keys.isdisjoint(given)
        and all(
            t.untyped_storage().nbytes()
            == torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META).untyped_storage().nbytes()
            for t in results
        )
    )


class _OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Keeps on the host what autograd saves inside, as with `migrate.activations.OnHost`: parameters stay, each tensor
    is copied each time that it is saved, and comes back for the operation that needs it."""

    def __init__(self, recorder: _Recorder) -> None:
        def to_host(tensor: Tensor) -> Tensor | _Packed:
            base = base_of(tensor)
            stays = isinstance(tensor if base is None else base, nn.Parameter)
            return tensor if stays else recorder.to_host(tensor)

        def from_host(packed: Tensor | _Packed) -> Tensor:
            return packed if isinstance(packed, Tensor) else recorder.from_host(packed)

        super().__init__(to_host, from_host)


@contextmanager
def _wrapped(
    model: nn.Module,
    place: dict[int, int],
    recorder: _Recorder,
    compute: torch.dtype | None,
    on_host: Container[int],
    slots: dict[int, list[Slot]],
) -> Iterator[None]:
    """The forwards of the units tell the recorder when they begin and end, and cast as mixed precision does."""
    modules = [module for module in model.modules() if id(module) in place]
    for module in modules:
        unit = place[id(module)]
        own = slots.get(unit, [])
        module.forward = partial(_forward, module.forward, unit, recorder, compute, unit in on_host, own)
    collect_garbage()
    every = [slot for each in slots.values() for slot in each]
    show(every, full=False)
    try:
        yield
    finally:
        show(every, full=True)
        for module in modules:
            del module.forward


def _forward(
    forward: Callable[..., Any],
    unit: int,
    recorder: _Recorder,
    compute: torch.dtype | None,
    on_host: bool,
    slots: list[Slot],
    *args: Any,
    **kwargs: Any,
) -> Any:
    use = recorder.enter(unit, list(tensors_in([args, kwargs])))
    if compute is not None:
        args, kwargs = _cast(args, compute), _cast(kwargs, compute)
    hooks = recorder.hooks(use, tensors_in([args, kwargs]))
    show(slots, full=True)
    with _OnHost(recorder) if on_host else nullcontext():
        out = forward(*args, **kwargs)
    show(slots, full=False)
    outputs = list(tensors_in([out]))
    recorder.leave(use, outputs)
    hooks.leave(outputs)
    return out


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _message_nbytes(name: str, given: Any, made: list[Tensor]) -> int:
    """Bytes of the whole tensor of a message: what a gather makes, and what others are given."""
    return sum(map(_nbytes, made if "all_gather" in name else tensors_in([given])))


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_in(value)
        elif hasattr(value, "__dataclass_fields__"):
            yield from tensors_in(vars(value))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
