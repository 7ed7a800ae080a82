"""`sleep` and `wake`: give the device's memory of a model and its optimizer away, and take it back."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import (
    current_backward,
    local_of,
    set_local,
)
from ..comm import ShardGroup, all_reduce_over, settle_uploads
from ..engine.asleep import AsleepTensor, AsleepUnit, HeldOptimizers, asleep_in_place
from ..engine.foreign import ON_SHARDS
from ..engine.names import clean_name, first_few
from ..engine.unit import Unit, module_units
from ..param import PendingGrad, digest, local_data
from ..peers import RanksDisagree, Scope, ask, scope_of, shown_ranks
from ..policy.arguments import expect, expect_callable, expect_flag, expect_module, expect_optimizers
from .average import Average
from .slept_memory import SleptMemory, tensors_in

_REPLICAS: Literal["replicas"] = "replicas"


class Slept(NamedTuple):
    """The bytes of this rank that `sleep` gave away, or `wake` took back."""

    # Copied to the host, from a device to page-locked memory; given up without a copy; given back, of both.
    moved_nbytes: int
    dropped_nbytes: int
    freed_nbytes: int
    # Where they were: on the host, or on the device where a tensor of the program holds them.
    stayed_nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.freed_nbytes:,} bytes freed ({self.moved_nbytes:,} moved to the host, {self.dropped_nbytes:,} "
            f"dropped); {self.stayed_nbytes:,} stay where they were"
        )


class _Sleeping:
    """A model that is asleep."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], average: Average | None, drop: Drop) -> None:
        self.units = module_units(model)
        # Whether `wake` has to load; and of parameters with replicas those, by id.
        self.drop, self.by_replicas = drop is True, drop == _REPLICAS
        self._replicas = _replicas(self.units) if drop == _REPLICAS else {}
        # The tensors that have equal values on all replicas, by name.
        self._alike: dict[ShardGroup, list[tuple[str, Tensor]]] = {}
        # One for all tensors that share it, such as the shards of a unit.
        self._memory: dict[tuple[torch.device, int], SleptMemory] = {}
        # The memory of shards, by id of the local tensor.
        self._flat: dict[int, tuple[torch.device, int]] = {}
        # Undoes what shows that it is asleep.
        self._shown: list[Callable[[], None]] = []
        self._held: HeldOptimizers | None = None
        self._marks: list[Callable[[], None]] = []
        self._of_model: list[Tensor] = []
        self._optimizers = optimizers
        self._find(model, average)

    # ---- what there is -------------------------------------------------------------------------------------

    def _find(self, model: nn.Module, average: Average | None) -> None:
        sharded = {id(param.sharded) for unit in self.units for param in unit.params}
        for group in (group for unit in self.units for group in unit.groups):
            if group.flat.numel() and not group.flat.is_meta:
                replicas = self._replicas.get(id(group.params[0].sharded))
                key = group.flat.device, group.flat.untyped_storage().data_ptr()
                self._memory[key] = SleptMemory(group.flat, drops=self.drop, replicas=replicas, group=group)
                self._flat |= {id(param.local): key for param in group.params}
        names: dict[int, str] = {}
        for module_name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                name = clean_name(f"{module_name}.{key}".lstrip("."))
                self._of_model.append(parameter)
                names[id(parameter)] = name
                is_sharded = id(parameter) in sharded
                replicas = self._replicas.get(id(parameter))
                self._take(parameter, name, replicas, drops=self.drop and is_sharded)
                if parameter.grad is not None and not isinstance(parameter.grad, PendingGrad):
                    self._take(parameter.grad, f"the gradient of {name}")
        for unit in self.units:
            for param in unit.params:
                for kept in (param.gradients.live_held(), param.gradients.live_partial()):
                    if kept is not None:
                        self._take(kept, f"the gradient of {param.name}")
        for module_name, module in model.named_modules():
            for name, tensor in module.named_buffers(recurse=False):
                self._take(tensor, clean_name(f"{module_name}.{name}".lstrip(".")))
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for entry, value in tensors_in(state):
                    name = f"{entry} of {names.get(id(parameter), 'a parameter')} in {type(optimizer).__name__}"
                    # Other state, such as that of an owner of whole matrices, is this rank's own.
                    replicas = self._replicas.get(id(parameter)) if isinstance(value, DTensor) else None
                    self._take(value, name, replicas, drops=self.drop)
        if average is not None:
            current = average._current()
            for name, mean in average._means.items():
                replicas = self._replicas.get(id(current[name]))
                self._take(mean, f"the average of {name}", replicas)
        for memory in self._memory.values():
            memory.settle()

    def _take(self, tensor: Tensor, name: str, replicas: ShardGroup | None = None, *, drops: bool = False) -> None:
        """Note the memory of `tensor`. `replicas`: ranks that have the same values."""
        local = local_data(tensor)
        if local.is_meta or not (type(local) is Tensor or isinstance(local, nn.Parameter)):
            raise NotImplementedError(
                f"{name}: expected a plain tensor with values, found {type(local).__name__} on {local.device}; sleep "
                f"moves memory of plain tensors"
            )
        storage = local.untyped_storage()
        if not storage.nbytes():
            return
        key = self._flat.get(id(local)) or (local.device, storage.data_ptr())
        memory = self._memory.get(key) or self._memory.setdefault(
            key, SleptMemory(local, drops=drops, replicas=replicas)
        )
        if memory.replicas is not replicas:
            memory.replicas = None
        if memory.replicas is not None:
            self._alike.setdefault(memory.replicas, []).append((name, local))
        if id(local) not in memory.tensors:
            memory.tensors[id(local)] = name, local
            self._marks.append(lambda: self._shown.append(asleep_in_place(local, name)))
        if isinstance(tensor, DTensor):
            asleep = AsleepTensor.of(local, name)

            def mark() -> None:
                set_local(tensor, asleep)
                self._shown.append(lambda: set_local(tensor, local))

            self._marks.append(mark)

    @property
    def held(self) -> list[str]:
        """The names of tensors whose memory has to stay, because the program holds others of it."""
        return [name for memory in self._memory.values() for name in memory.held]

    @property
    def report(self) -> Slept:
        """The bytes of this rank."""
        memory = self._memory.values()
        return Slept(
            sum(m.kept_nbytes for m in memory),
            sum(m.dropped_nbytes for m in memory),
            sum(m.nbytes for m in memory if m.frees),
            sum(m.nbytes for m in memory if not m.frees),
        )

    def compare(self) -> None:
        """Raise `RanksDisagree` if replicas differ: then a part of one is none of the other. Collective."""
        for group, tensors in self._alike.items():
            names, ranks = [name for name, _ in tensors], tuple(sorted(group.ranks))
            scope = scope_of(ranks)
            told = None if scope is None else ask(scope, "fullshard.sleep: replicas", "\n".join(names))
            if told is not None:
                raise RanksDisagree(
                    f"sleep: expected the same tensors in the optimizer's state on {shown_ranks(ranks)}, which are "
                    f"replicas, found others; step and load on all ranks, or call sleep without drop",
                    what="fullshard.sleep",
                    by_rank=told,
                )
            own = torch.tensor([int(digest(tensor)) for _, tensor in tensors])
            both = torch.cat([own, ~own])
            all_reduce_over(both, group.origin, dist.ReduceOp.MAX, "fullshard.sleep")
            most, least = both[: len(own)], ~both[len(own) :]
            other = [name for name, same in zip(names, most.eq(least).tolist(), strict=True) if not same]
            if other:
                raise RanksDisagree(
                    f"sleep: expected equal values on {shown_ranks(ranks)}, which are replicas, found other ones of "
                    f"{first_few(other)}; load a checkpoint, or call sleep without drop, which keeps each rank's own",
                    what="fullshard.sleep",
                    by_rank={},
                )

    # ---- there and back ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Give the memory away."""
        _synchronize(self.units)
        with torch.inference_mode(False), torch.no_grad():
            for memory in self._memory.values():
                memory.save()
            _synchronize(self.units)
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        for memory in self._memory.values():
            memory.free()
        for mark in self._marks:
            mark()
        for unit in self.units:
            unit.opened = AsleepUnit(unit)
        self._held = HeldOptimizers(self._of_model, self._optimizers)
        _empty_cache(self.units)

    def allocate(self) -> str:
        """Take the memory back. Returns why that is impossible, if so; then nothing was taken."""
        done: list[SleptMemory] = []
        for memory in self._memory.values():
            try:
                memory.allocate()
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
                for one in done:
                    one.free()
                _empty_cache(self.units)
                return str(error).partition("\n")[0] or type(error).__name__
            done.append(memory)
        return ""

    def gather(self) -> None:
        """Bring back what replicas keep for each other. Collective."""
        with torch.inference_mode(False), torch.no_grad():
            for memory in self._memory.values():
                memory.gather()
            _synchronize(self.units)

    def free(self) -> None:
        """Give what `allocate` took away again."""
        for memory in self._memory.values():
            memory.free()
        _empty_cache(self.units)

    def end(self, load: Callable[[], object] | None) -> None:
        """Put the values back, and let the model be used. If `load` raises, it is asleep as before."""
        with torch.inference_mode(False), torch.no_grad():
            for memory in self._memory.values():
                memory.restore()
        _synchronize(self.units)
        while self._shown:
            self._shown.pop()()
        for unit in self.units:
            unit.opened = None
        assert self._held is not None
        self._held.release()
        if load is None:
            return
        try:
            load()
            untouched = [param.name for unit in self.units for param in unit.params if _is_unwritten(param.sharded)]
            if untouched:
                raise RuntimeError(
                    f"wake: expected load() to write every parameter that was dropped, found {len(untouched)} without "
                    f"values, among them {', '.join(untouched[:4])}; load the whole model there"
                )
        except BaseException:
            self._fall_asleep()
            raise


Drop = bool | Literal["replicas"]
_asleep: weakref.WeakKeyDictionary[nn.Module, _Sleeping] = weakref.WeakKeyDictionary()


def sleep(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    average: Average | None = None,
    drop: Drop = False,
) -> Slept:
    """Move what a sharded model holds on its device to page-locked host memory, and give the device its memory back.

        fullshard.sleep(model, optimizer)
        rollout()
        fullshard.wake(model)

    That is shards, gradients (those that are still accumulated, too), buffers, parameters that are not sharded, and the
    state of `optimizer`; full parameters are freed. Tensors keep their identity, so that optimizers, views and hooks
    hold; after `wake` all bits are those of before. Until then a forward, a backward, `unshard`, `full_params`, a state
    dict, a checkpoint, an optimizer's step and an operation on a parameter, gradient or state raise `RuntimeError`
    with its name. Where the program made a tensor of one of these, such as `p.to_local()` or a view, memory stays, and
    a warning names it.

    model: the outermost sharded module. All ranks call this together, outside of a step; nothing is sent but questions
        whether all do.
    optimizer: one or several; None leaves their state where it is.
    average: of `fullshard.average`, moved too.
    drop: True: give parameters and the optimizer's state up without a copy. `wake` then needs a `load`. Gradients have
        to be cleared before.
        "replicas": of what R replicas have alike (HSDP, `replicate`) each keeps one R-th, and gives up the rest, which
        `wake` brings back from the others: parameters, average, and state that is sharded like its parameter. Their
        values are compared first, by a digest of 8 bytes for each tensor.
    What is in host memory stays there, on a CPU and with CPU offload: its use is refused too, and nothing is freed,
    except what `drop` gives up and torch can resize. Returns the bytes of this rank.

    What a failed step left is discarded first. Raises `RuntimeError` if it is asleep, in a step, or with reductions
    under way, `RanksDisagree` if arguments or the values of replicas differ (`PeerFailed` on ranks that have other
    ones), `ValueError` for replicas of a model that has none, and `NotImplementedError` for tensor subclasses.
    """
    expect_module("model", model)
    if drop != _REPLICAS:
        fits = not isinstance(drop, str)
        expect("drop", fits, f"True, False or {_REPLICAS!r}", drop, "pass one of them", ValueError)
        drop = expect_flag("drop", drop)
    optimizers = [] if optimizer is None else expect_optimizers("optimizer", optimizer)
    fits = average is None or isinstance(average, Average)
    expect("average", fits, "what fullshard.average returned, or None", average, "leave it out")
    units = module_units(model)
    if not units:
        raise ValueError(
            f"model: expected one that fully_shard was applied to, found a {type(model).__name__}; give the outermost "
            f"sharded module"
        )
    for unit in units:
        _refuse_now(unit)
    if drop == _REPLICAS and not any(links.replicate is not None for unit in units for links in unit.links):
        raise ValueError(
            f"drop: expected a model with replicas for {_REPLICAS!r}, found one whose mesh has no axis of them; leave "
            f"drop out, or shard on a mesh (replicate, shard)"
        )
    scopes = _scopes(units)
    _meet(units, scopes)
    text = f"optimizers={len(optimizers)}, average={average is not None}, drop={drop}"
    for scope in scopes:
        found = ask(scope, "fullshard.sleep", text)
        if found is not None:
            raise RanksDisagree(
                "sleep: expected the same arguments on every rank, found others; call fullshard.sleep with the same "
                "arguments on all ranks",
                what="fullshard.sleep",
                by_rank=found,
            )
    for unit in units:
        if unit.root is not None:
            unit.root.reshard(unit)
        unit.repair()
        if unit.host_link is not None:
            unit.host_link.settle()
    settle_uploads()
    if drop is True and any(p.grad is not None for p in model.parameters()):
        raise RuntimeError("sleep: expected no gradients with drop=True, found some; call optimizer.zero_grad() first")
    for one in optimizers:
        vars(one).get(ON_SHARDS, {}).clear()  # views of shards, made again by the next step
    sleeping = _Sleeping(model, optimizers, average, drop)
    held = sleeping.held
    if drop == _REPLICAS:
        with _together(scopes, "fullshard.sleep: replicas"):
            if held:
                raise RuntimeError(f"sleep: expected that nothing else holds the memory, {_shown(held)}")
            sleeping.compare()
    elif held:
        warnings.warn(f"sleep: memory stays on the device: {_shown(held)}", stacklevel=2)
    sleeping.begin()
    _asleep[model] = sleeping
    return sleeping.report


def wake(model: nn.Module, *, load: Callable[[], object] | None = None) -> Slept:
    """Undo `sleep`: take the device's memory back, with the values of before. All ranks call this together.

    load: called when the memory is there, for a model that was put to sleep with `drop=True`: it has to write all
        parameters, from a checkpoint for example, `lambda: checkpoint.load({"model": model.state_dict()},
        checkpoint_id=path)`, and the optimizer's state. Without it what was dropped would be NaN. If it raises, the
        model is asleep as before.
    Returns the bytes of this rank. Raises `RuntimeError` if the model is not asleep, and, on all ranks, if a rank has
    no room: then all are asleep as before.
    """
    expect_module("model", model)
    expect_callable("load", load, "a function without arguments", or_none=True)
    sleeping = _asleep.get(model)
    if sleeping is None:
        raise RuntimeError(
            f"wake: expected a model that is asleep, found {type(model).__name__} awake; call fullshard.sleep first, "
            f"with the same module"
        )
    if sleeping.drop is (load is None):
        found, remedy = ("dropped", "pass load=") if sleeping.drop else ("kept", "leave load out")
        raise ValueError(
            f"wake: expected load for values that were dropped alone, found that they were {found}; {remedy}"
        )
    scopes = _scopes(sleeping.units)
    _meet(sleeping.units, scopes)
    problem = sleeping.allocate()
    without: list[int] = [0] if problem else []
    for scope in scopes:
        try:
            answers = scope.agree("fullshard.wake", "no room" if problem else "room")
        except BaseException:
            if not problem:
                sleeping.free()
            raise
        if answers is not None:
            without = sorted(rank for rank, told in answers.items() if told == "no room")
        elif problem:
            without = list(scope.ranks)
    if without:
        if not problem:
            sleeping.free()
        raise RuntimeError(
            f"wake: expected room for {sleeping.report.freed_nbytes:,} bytes on this rank, found none on "
            f"{shown_ranks(without)}{f' ({problem})' if problem else ''}; all ranks are asleep as before: free the "
            f"device's memory, and wake again"
        )
    try:
        with _together(scopes, "fullshard.wake: replicas") if sleeping.by_replicas else nullcontext():
            sleeping.gather()
    except BaseException:
        sleeping.free()
        raise
    sleeping.end(load)
    del _asleep[model]
    return sleeping.report


# ---- shared ----------------------------------------------------------------------------------------------------------


def _is_unwritten(tensor: Tensor) -> bool:
    """Whether `tensor` has what `_Memory.restore` put where values were dropped."""
    local = local_of(tensor).detach()
    return local.numel() > 0 and bool(local.contiguous().view(-1).view(torch.uint8).eq(255).all())


def _shown(held: list[str]) -> str:
    return (
        f"found tensors of the program, such as a state dict or p.to_local(), on {first_few(held)}; delete them before "
        f"fullshard.sleep, and pass it all optimizers of the model"
    )


def _refuse_now(unit: Unit) -> None:
    """Raise `RuntimeError` if `unit` cannot be put to sleep now."""
    name, root = unit.record.name, unit.root
    if isinstance(unit.opened, AsleepUnit):
        raise RuntimeError(f"sleep: expected a model that is awake, found {name} asleep; call fullshard.wake first")
    if unit.opened is not None:
        raise RuntimeError(f"sleep: expected sharded parameters, found {name} open; leave full_params first")
    if current_backward() != -1 or unit.record.pins.running:
        raise RuntimeError(
            f"sleep: expected no forward and no backward, found one of {name} running; call it between steps"
        )
    if root is not None and (root.run.ending.waits or root.run.ending.sent):
        raise RuntimeError(
            f"sleep: expected gradients that are there, found reductions of {name} under way; call "
            f"finalize_backward first"
        )


def _meet(units: Iterable[Unit], scopes: Iterable[Scope]) -> None:
    """After a failure: wait for all ranks, and discard what a failed step left, as the next forward would."""
    renewed = any([scope.resume() for scope in scopes if scope.failures.must_meet])
    for root in dict.fromkeys(unit.root for unit in units):
        if root is not None:
            root.met_by_hand(renewed=renewed)


def _scopes(units: Iterable[Unit]) -> list[Scope]:
    """The ranks that share parameters of `units`, in one order on all of them."""
    found = {tuple(sorted(links.everyone)) for unit in units for links in unit.links}
    scopes = (scope_of(ranks) for ranks in sorted(found, key=lambda ranks: (len(ranks), ranks)))
    return [scope for scope in scopes if scope is not None]


def _replicas(units: Iterable[Unit]) -> dict[int, ShardGroup]:
    """The ranks that have the same shards as this one, by id of the sharded parameter."""
    return {
        id(param.sharded): links.replicate
        for unit in units
        for group, links in zip(unit.groups, unit.links, strict=True)
        if links.replicate is not None and links.replicate.world > 1
        for param in group.params
    }


@contextmanager
def _together(scopes: Sequence[Scope], what: str) -> Iterator[None]:
    """All ranks of `scopes` do `what` inside and leave together: if one raises, all raise."""
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope.together(what))
        yield
        for scope in scopes:
            scope.agree(what, "")


def _devices(units: Iterable[Unit]) -> set[torch.device]:
    return {unit.device for unit in units if unit.device.type != "cpu"}


def _synchronize(units: Iterable[Unit]) -> None:
    for device in _devices(units):
        torch.accelerator.synchronize(device)


def _empty_cache(units: Iterable[Unit]) -> None:
    """Return freed blocks to the device, where other processes can have them."""
    for device in _devices(units):
        empty = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty is not None:
            empty()
