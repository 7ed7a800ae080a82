"""Faults of the engine: each changes one line of one method.

    FAULTS["a gather's wait is dropped"]     only a device shows it: what it changes, and the setup that runs it
    PROVEN["a tie is lost"]                  wrong numbers: what it changes, and what `fullshard verify` must say
    with seeded(fault):                      the method is as the fault makes it
        ...

The tier of devices must find every one of FAULTS, by an unordered access, a message that ran into changed memory, wrong
numbers or an error (tests/device/test_seeded_faults.py). `side()` in the new text is another stream. `fullshard verify`
must find and name every one of PROVEN (tests/procs/test_verify.py). planted_faults.py has more for it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard._torch import current_backward
from tests.harness.on_device import Setup


@dataclass(frozen=True)
class SeededFault:
    """In the method `where` ("comm.gather:PlannedGather.complete"), `old` becomes `new`, in which `here` is the module
    `helpers`."""

    where: str
    old: str
    new: str
    setup: Setup = Setup()
    world: int = 2
    helpers: str = __name__


def source_of(fault: SeededFault) -> tuple[Any, str, Any, str]:
    """Owner, name, function and text of the method of `fault`; raises `ValueError` where its text has moved."""
    module_name, _, path = fault.where.partition(":")
    owner: Any = importlib.import_module(f"fullshard.{module_name}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function = inspect.unwrap(inspect.getattr_static(owner, name))
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.where}: expected {fault.old!r} once, found it {text.count(fault.old)} times; adapt it"
        )
    return owner, name, function, text


@contextmanager
def seeded(fault: SeededFault) -> Iterator[None]:
    """The method of `fault` is faulty inside."""
    owner, name, function, text = source_of(fault)
    sound = inspect.getattr_static(owner, name)
    made: dict[str, Any] = {}
    names = {**function.__globals__, "side": _side, "here": importlib.import_module(fault.helpers)}
    text = "from __future__ import annotations\n" + text.replace(fault.old, fault.new)
    exec(compile(text, fault.where, "exec"), names, made)
    faulty = made[name]
    setattr(owner, name, faulty)
    _replace_elsewhere(sound, faulty)
    try:
        yield
    finally:
        setattr(owner, name, sound)
        _replace_elsewhere(faulty, sound)


def _replace_elsewhere(old: Any, new: Any) -> None:
    """In the modules that import a function by name."""
    for path, module in tuple(sys.modules.items()):
        if path.partition(".")[0] == "fullshard":
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)


def _side() -> torch.Stream:
    return torch.Stream(device="simulated")


_MIXED = Setup(dtype="bfloat16", reduce_dtype="float32")
_OFFLOAD = Setup(offload=True)
_HSDP = Setup(replicas=2)
_HPZ = Setup(reshard=2)
_MICRO = Setup(micro=2)
_ONE = Setup(calls=(("set_communication", "torch"),))
_EXCHANGE = Setup(calls=(("set_communication", "all-to-all"),))
_TRANSFORMER = Setup("transformer")
_UNEVEN = Setup("uneven_mlp")
_ALONE = Setup("alone")
_RECORD = "    self._event = torch.accelerator.current_stream(source.device).record_event()\n"
_COPY = "    self._host.copy_(source, non_blocking=True)\n"
_REPLICAS = "        self._work = replicate.all_reduce(total, MEAN if channel.sums.averages else SUM)\n"
_GATHER, _SUM = "comm.gather:PlannedGather", "comm.reduce:StagedReduction"
_LINK = "comm.offload:HostLink"

FAULTS: dict[str, SeededFault] = {
    # ---- waits that are dropped ----
    "a gather's wait is dropped": SeededFault(f"{_GATHER}.complete", "self.arrive()", "pass"),
    "a gather's wait is dropped, mixed precision": SeededFault(f"{_GATHER}.complete", "self.arrive()", "pass", _MIXED),
    "a gather's wait is dropped, transformer": SeededFault(
        f"{_GATHER}.complete", "self.arrive()", "pass", _TRANSFORMER
    ),
    "a gather's wait is dropped, one collective": SeededFault(f"{_GATHER}.complete", "self.arrive()", "pass", _ONE),
    "a gather's wait is dropped, hpZ": SeededFault(f"{_GATHER}.complete", "self.arrive()", "pass", _HPZ, 4),
    "a gather's wait is dropped, offload": SeededFault(f"{_GATHER}.complete", "self.arrive()", "pass", _OFFLOAD),
    "a gather's last wait is dropped": SeededFault(
        f"{_GATHER}.complete", "    self.arrive()", "    self.works = self.works[:-1]\n    self.arrive()"
    ),
    "a gather's first wait is dropped": SeededFault(
        f"{_GATHER}.complete", "    self.arrive()", "    self.works = self.works[1:]\n    self.arrive()", _TRANSFORMER
    ),
    "the wait command does nothing": SeededFault("engine.executor:Executor._wait", "channel.complete()", "pass"),
    "the wait of one unit does nothing": SeededFault(
        "engine.executor:Executor._wait", "channel.complete()", "unit.record.index == 2 or channel.complete()"
    ),
    "a reduction's wait is dropped": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass"),
    "a reduction's wait is dropped, mixed precision": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass", _MIXED),
    "a reduction's wait is dropped, micro-batches": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass", _MICRO),
    "a reduction's wait is dropped, one collective": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass", _ONE),
    "a reduction's wait is dropped, large gradients": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass", _ALONE),
    "a gather's wait is dropped, large parameters": SeededFault(f"{_GATHER}.complete", "self.arrive()", "pass", _ALONE),
    "a reduction's wait is dropped, offload": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass", _OFFLOAD),
    "a reduction's last wait is dropped": SeededFault(
        f"{_SUM}._advanced", "    self.arrive()", "    self.works = self.works[:-1]\n    self.arrive()", _UNEVEN
    ),
    "the replicas' wait is dropped": SeededFault(f"{_SUM}.collect", "self._work.wait()", "pass", _HSDP, 4),
    "the replicas' wait is dropped, micro-batches": SeededFault(
        f"{_SUM}.collect", "self._work.wait()", "pass", Setup("transformer", replicas=2, micro=2), 4
    ),
    "an exchange's wait is dropped": SeededFault(f"{_SUM}._advanced", "self.arrive()", "pass", _EXCHANGE),
    "the digest's wait is dropped": SeededFault("comm.comparison:Comparison.answered", "work.wait()", "pass"),
    "the digest is read before its event": SeededFault(
        "comm.comparison:HostCopy.flags", "self._event.synchronize()", "pass"
    ),
    "downloads are not waited for": SeededFault(
        f"{_LINK}.finish", "self._downloaded.synchronize()", "pass", Setup(offload=True, queries=False)
    ),
    "uploads are not waited for": SeededFault(
        f"{_LINK}.settle", "self._uploaded.synchronize()", "pass", Setup(offload=True, evaluate=True)
    ),
    "uploads are forgotten": SeededFault(
        f"{_LINK}.ahead",
        "uploading[id(self)] = weakref.ref(self, partial(_forget, id(self)))",
        "pass",
        Setup(offload=True, evaluate=True),
    ),
    "the optimizer's event is not waited for": SeededFault(
        "engine.root:Root._wait_for_optimizer", "event.wait()", "pass", Setup(optimizer_stream=True)
    ),
    "flags of missing gradients are not waited for": SeededFault(
        "comm.comparison:HostCopy.flags",
        "self._event.synchronize()",
        "pass",
        Setup(unused=("1", "2"), unused_on=(1,)),
    ),
    "absent gradients are kept": SeededFault(
        "engine.executor:Executor._drop_absent",
        "if not there:",
        "if False:",
        Setup(unused=("1", "2"), unused_on=(0, 1)),
    ),
    # ---- waits on another stream ----
    "a gather is waited for on another stream": SeededFault(
        f"{_GATHER}.complete", "    self.arrive()", "    with side():\n        self.arrive()"
    ),
    "a reduction is waited for on another stream": SeededFault(
        f"{_SUM}._advanced", "    self.arrive()", "    with side():\n        self.arrive()"
    ),
    "an exchange is waited for on another stream": SeededFault(
        f"{_SUM}._advanced",
        "    self.arrive()",
        "    with side():\n        self.arrive()",
        _EXCHANGE,
    ),
    "the replicas are waited for on another stream": SeededFault(
        f"{_SUM}.collect",
        "            self._work.wait()",
        "            with side():\n                self._work.wait()",
        _HSDP,
        4,
    ),
    # ---- work on another stream ----
    "gathers are issued on another stream": SeededFault(
        "engine.executor:Executor._unshard",
        "        channel.issue()",
        "        with side():\n            channel.issue()",
    ),
    "gathers are completed on another stream": SeededFault(
        "engine.executor:Executor._wait",
        "        channel.complete()",
        "        with side():\n            channel.complete()",
        _TRANSFORMER,
    ),
    "shards are cast on another stream": SeededFault(
        f"{_GATHER}.send", "    if self._casts:", "    with side():\n      if self._casts:", _MIXED
    ),
    "parameters are copied out on another stream": SeededFault(
        f"{_GATHER}.complete",
        "            torch._foreach_copy_(",
        "            with side(): torch._foreach_copy_(",
        _ONE,
    ),
    "gradients are copied in on another stream": SeededFault(
        "comm.reduce:MessageReduce.fill",
        "        torch._foreach_copy_(destinations, sources)",
        "        with side():\n            torch._foreach_copy_(destinations, sources)",
        _TRANSFORMER,
    ),
    "flags are written on another stream": SeededFault(
        "comm.reduce:MessageReduce.fill",
        "        grad_present.fill_(1)",
        "        with side():\n            grad_present.fill_(1)",
    ),
    "reductions are issued on another stream": SeededFault(
        "comm.reduce:NativeReduce.send",
        "    flight.works = self.group",
        "    with side():\n     flight.works = self.group",
    ),
    "sums are divided on another stream": SeededFault(
        f"{_SUM}._advanced",
        "        total.div_(",
        "        with side(): total.div_(",
        _EXCHANGE,
    ),
    "sums are made on another stream": SeededFault(
        "comm.reduce:ExchangeReduce.total",
        "    return sum_in_order(",
        "    with side(): return sum_in_order(",
        _EXCHANGE,
    ),
    "results are received on another stream": SeededFault(
        "engine.executor:Executor._collect",
        "    parts = flight.reduction.collect()",
        "    with side(): parts = flight.reduction.collect()",
    ),
    "uploads do not wait for the compute before them": SeededFault(
        f"{_LINK}.ahead", "streams.up.wait_stream(streams.module.current_stream(self.device))", "pass", _OFFLOAD
    ),
    "downloads do not wait for their gradients": SeededFault(
        f"{_LINK}.download", "streams.down.wait_stream(current)", "pass", _OFFLOAD
    ),
    "compute does not wait for an upload": SeededFault(
        f"{_LINK}.arrived",
        "self._streams.module.current_stream(self.device).wait_event(self._uploaded)",
        "pass",
        Setup(offload=True, dtype="bfloat16"),
        1,
    ),
    "the hook does not wait for the gradients": SeededFault(
        "comm.reduce:_call", "stream.wait_stream(current)", "pass", Setup(hook_stream=True)
    ),
    "the gradients do not wait for the hook": SeededFault(
        "comm.reduce:_call", "current.wait_stream(stream)", "pass", Setup(hook_stream=True)
    ),
    # ---- events recorded too early ----
    "the digest's event is recorded before its copy": SeededFault(
        "comm.comparison:HostCopy.__init__",
        _COPY + _RECORD,
        _RECORD + _COPY,
    ),
    "a download's event is recorded before its copy": SeededFault(
        f"{_LINK}.download",
        "    with streams.module.stream(streams.down):\n        self._copy(host, source)\n"
        "    self._downloaded = streams.down.record_event()\n",
        "    self._downloaded = streams.down.record_event()\n"
        "    with streams.module.stream(streams.down):\n        self._copy(host, source)\n",
        _OFFLOAD,
    ),
    "an upload's event is recorded before its copy": SeededFault(
        f"{_LINK}.ahead",
        "    with streams.module.stream(streams.up):\n        yield\n    self._uploaded = streams.up.record_event()\n",
        "    self._uploaded = streams.up.record_event()\n    with streams.module.stream(streams.up):\n        yield\n",
        Setup(offload=True, evaluate=True),
    ),
    # ---- memory that goes too early, or is written meanwhile ----
    "full parameters are freed while they arrive": SeededFault(
        f"{_GATHER}.send",
        "    if staging is not None and",
        "    self._full.release()\n    if staging is not None and",
        _ALONE,
    ),
    "full parameters are freed before they are used": SeededFault(
        "engine.executor:Executor._wait",
        "    self._expose(unit)\n",
        "    self._expose(unit)\n    for group in unit.groups:\n        group.memory.release()\n",
    ),
    "full parameters of one unit are freed too early": SeededFault(
        "engine.executor:Executor._unshard",
        "        channel.issue()\n",
        "        channel.issue()\n    if unit.record.index == 2:\n        unit.groups[0].memory.release()\n",
        _ALONE,
    ),
    "uploaded shards are freed before they are sent": SeededFault(
        "comm.offload:OffloadedGather.complete",
        "    self._inner.complete()\n    self._shard.release()",
        "    self._shard.release()\n    self._inner.complete()",
        _OFFLOAD,
    ),
    "gradients are freed while they are downloaded": SeededFault(
        f"{_LINK}.download", "host, source))", "host, host))", _OFFLOAD
    ),
    "downloads are let go of without an order": SeededFault(
        "comm.offload:_CopyStreams.release",
        "current.wait_event(event)",
        "pass",
        Setup("transformer", offload=True, queries=False),
    ),
    "a message is overwritten after it was issued": SeededFault(
        "comm.reduce:NativeReduce.send",
        "    if flight.carried is not None:",
        "    send.tensor.zero_()\n    if flight.carried is not None:",
    ),
    "a result is overwritten while it arrives": SeededFault(
        "comm.reduce:NativeReduce.send",
        "    if flight.carried is not None:",
        "    out.zero_()\n    if flight.carried is not None:",
    ),
    "a gradient is overwritten while it is sent": SeededFault(
        "comm.reduce:NativeReduce.send",
        "    if flight.carried is not None:",
        "    for gradient in large:\n        gradient.mul_(2)\n    if flight.carried is not None:",
        _ALONE,
    ),
    "the digest is overwritten while it is sent": SeededFault(
        "comm.comparison:Comparison._ask",
        "    self._work = group",
        "    work = group.all_reduce(values, dist.ReduceOp.MAX)\n    values.add_(0)\n    self._work = work or group",
    ),
    "sums are changed while replicas add them": SeededFault(
        f"{_SUM}._advanced",
        _REPLICAS,
        f"{_REPLICAS}        total.mul_(1)\n",
        _HSDP,
        4,
    ),
    "shards are written while they are sent": SeededFault(
        f"{_GATHER}.send",
        "        works += self._group.gather_each(outs, pieces)",
        "        works += self._group.gather_each(outs, pieces)\n        [own.mul_(1) for own in self._own]",
        _ALONE,
    ),
    "staged parameters are overwritten while they arrive": SeededFault(
        f"{_GATHER}.send",
        "self._group.gather_into(staging.tensor, leaving)",
        "[self._group.gather_into(staging.tensor, leaving), staging.tensor.zero_()][0]",
        _TRANSFORMER,
    ),
    # ---- the wrong bytes ----
    "shards are not cast": SeededFault(f"{_GATHER}.send", "if self._casts:", "if False:", _MIXED),
    "parameters are not copied out": SeededFault(f"{_GATHER}.complete", "if destinations:", "if False:", _ONE),
    "the upload comes after the message": SeededFault(
        "comm.offload:OffloadedGather._uploaded",
        "        self._link.upload(self._shard.flat, self._host)\n        yield",
        "        yield\n        self._link.upload(self._shard.flat, self._host)",
        _OFFLOAD,
    ),
}


# ---- wrong numbers ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A fault, the strategy that runs it, and what `fullshard verify` must say: phase, name and cause. `program`: a
    function of tests/harness/verified.py."""

    fault: SeededFault
    strategy: str
    phase: str
    name: str
    cause: str
    world: int = 2
    program: str = "program"


RECEIVE, REDUCED = "param.group:ParamGroup.receive", "gradients.reduced = part if"
_EACH = "gradients = self.params[i].gradients"
TAKE, SENT_FRESH = "param.group:ParamGroup.take_gradients", "else gradients.fresh)"
_LEAVES = "leaving = packed = self._packed\n"
_FILL, _ROWS = "comm.reduce:MessageReduce.fill", "gradient.reshape(*rows)"
_ARRIVED = "staging.views[: len(destinations)]"
_RANK = "torch.distributed.get_rank()"
# Each rank's part of embedding.weight, as messages have it: 19 rows of 16.
_EMBEDDING = (2, 19 * 16)


def swapped(view: Tensor) -> Tensor:
    """The two ranks' parts of embedding.weight in each other's place."""
    return view.flip(0) if view.shape == _EMBEDDING else view


def off_by_one(view: Tensor) -> Tensor:
    """embedding.weight with each row where the next belongs."""
    return view.reshape(38, 16).roll(1, 0).reshape(_EMBEDDING) if view.shape == _EMBEDDING else view


def first(owner: Any, value: Any) -> Any:
    """What `value` was when this was first called for `owner`."""
    return vars(owner).setdefault("first", [v.clone() for v in value] if isinstance(value, list) else value.clone())


def half_new(owner: Any, value: Tensor) -> Tensor:
    """The first half of `value`, and the second half of what it was at first."""
    half = value.numel() // 2
    return torch.cat([value[:half], first(owner, value)[half:]])


def untied(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """One entry per slot: for the second slot of a tie another parameter on the same memory."""
    seen: set[int] = set()
    found = []
    for parameter in parameters:
        found.append(nn.Parameter(parameter.detach()) if id(parameter) in seen else parameter)
        seen.add(id(parameter))
    return found


def parted(parameter: nn.Parameter, slots: list[Any]) -> list[tuple[nn.Parameter, str, tuple[Any, ...]]]:
    """A parameter of its own for each slot."""
    places = [(parameter, slots[0]), *((nn.Parameter(parameter.detach().clone()), slot) for slot in slots[1:])]
    return [(each, slot.name, (slot,)) for each, slot in places]


def buffers_put_back(module: nn.Module) -> None:
    """The module's buffers are again what they were after its first forward."""
    for buffer in module.buffers():
        buffer.copy_(first(buffer, buffer))


def in_backward() -> bool:
    """Whether a backward runs."""
    return current_backward() != -1


PROVEN: dict[str, Case] = {
    # ---- reductions ----
    "the result is doubled": Case(
        SeededFault(RECEIVE, REDUCED, "gradients.reduced = part * 2 if"),
        "zero3",
        "backward",
        "norm.norm.bias",
        "2 times too large",
    ),
    "the divisor is too large": Case(
        SeededFault(RECEIVE, REDUCED, "gradients.reduced = part / 2 if"),
        "zero2",
        "backward",
        "norm.norm.bias",
        "2 times too small",
    ),
    "the result is zero": Case(
        SeededFault(RECEIVE, REDUCED, "gradients.reduced = part * 0 if"),
        "zero3",
        "backward",
        "norm.norm.bias",
        "it is zero",
    ),
    "a reduction is dropped": Case(
        SeededFault(RECEIVE, "part is None:", "part is None or self.params[i].name.endswith('norm.norm.bias'):"),
        "zero3",
        "backward",
        "norm.norm.bias",
        "no gradient: it was dropped",
    ),
    "a rank sends zeros": Case(
        SeededFault(TAKE, SENT_FRESH, f"else gradients.fresh * (0 == {_RANK}))"),
        "zero3",
        "backward",
        "norm.norm.bias",
        "the part of rank 1 is missing",
    ),
    "a rank sends too much": Case(
        SeededFault(TAKE, SENT_FRESH, f"else gradients.fresh * (1 + {_RANK}))"),
        "zero3+bf16",
        "backward",
        "norm.norm.bias",
        "the part of rank 1 was added twice",
    ),
    "held gradients are dropped": Case(
        SeededFault(
            TAKE,
            "sums[i] if i in sums else gradients.sum_with_held() if with_held else gradients.fresh",
            "gradients.fresh",
        ),
        "zero3+micro=2",
        "backward",
        "norm.norm.bias",
        "micro-batch 0 is missing",
    ),
    "held gradients are added twice": Case(
        SeededFault(TAKE, "sums[i] if", "sums[i] + gradients.live_held() if"),
        "zero2+micro=2",
        "backward",
        "norm.norm.bias",
        "micro-batch 0 was added twice",
    ),
    "the result is rounded": Case(
        SeededFault(RECEIVE, REDUCED, "gradients.reduced = part.bfloat16().to(part.dtype) if"),
        "zero3+bf16",
        "backward",
        "norm.norm.bias",
        "numbers of bfloat16",
    ),
    "replicas are not summed": Case(
        SeededFault(f"{_SUM}._advanced", "    if self.has_next:", "    self.has_next = False\n    if False:"),
        "zero3+hsdp=2",
        "backward",
        "norm.norm.bias",
        "no all-reduce over the replicas",
        4,
    ),
    "shards are sent in each other's place": Case(
        SeededFault(_FILL, _ROWS, f"here.swapped({_ROWS})"),
        "zero3",
        "backward",
        "embedding.weight",
        "the shards of rank 0 and rank 1 are in each other's place",
    ),
    "rows are sent off by one": Case(
        SeededFault(_FILL, _ROWS, f"here.off_by_one({_ROWS})"),
        "zero2",
        "backward",
        "embedding.weight",
        "rows are off by one",
    ),
    # ---- gathers ----
    "weights are stale": Case(
        SeededFault("comm.gather:PlannedGather.complete", _ARRIVED, f"here.first(self, {_ARRIVED})"),
        "zero3",
        "forward",
        "embedding.weight",
        "stale weights",
    ),
    "a rank sends stale shards": Case(
        SeededFault(
            "comm.gather:PlannedGather.send",
            _LEAVES,
            f"{_LEAVES}    leaving = here.first(self, leaving) if packed is not None and {_RANK} else leaving\n",
        ),
        "zero3",
        "forward",
        "embedding.weight",
        "half-updated weights: rows 19 to 37, of rank 1, have the values from before the last step",
    ),
    "half of the shards are sent before the step": Case(
        SeededFault(
            "comm.gather:PlannedGather.send",
            _LEAVES,
            f"{_LEAVES}    leaving = None if leaving is None else here.half_new(self, leaving)\n",
        ),
        "zero3+offload",
        "forward",
        "embedding.weight",
        "half-updated weights: rows 10 to 37, of rank 0, 1, have the values from before the last step",
    ),
    "shards arrive in each other's place": Case(
        SeededFault("comm.gather:PlannedGather.complete", _ARRIVED, f"[here.swapped(view) for view in {_ARRIVED}]"),
        "zero3",
        "forward",
        "embedding.weight",
        "the shards of rank 0 and rank 1 are in each other's place",
    ),
    "rows arrive off by one": Case(
        SeededFault("comm.gather:PlannedGather.complete", _ARRIVED, f"[here.off_by_one(view) for view in {_ARRIVED}]"),
        "zero3+bf16",
        "forward",
        "embedding.weight",
        "rows are off by one",
    ),
    "shards are not cast for backward": Case(
        SeededFault(
            "comm.gather:PlannedGather.send",
            "torch._foreach_copy_(places, own)",
            "here.in_backward() or torch._foreach_copy_(places, own)",
        ),
        "zero3+bf16+recompute",
        "backward",
        "blocks.0.0.weight",
        "unknown",
    ),
    # ---- forwards, ties, buffers ----
    "a cast of inputs is skipped in recomputation": Case(
        SeededFault(
            "engine.hooks:UnitHooks._forward_begins",
            "policy.param_dtype if policy.cast_forward_inputs else",
            "policy.param_dtype if policy.cast_forward_inputs and not here.in_backward() else",
        ),
        "zero3+bf16+recompute",
        "backward",
        "blocks.1.waves.project.weight",
        "a forward that was computed again in backward did not cast its inputs",
        program="timed",
    ),
    "a tie is lost in the modules": Case(
        SeededFault(
            "param.group:ParamGroup._make_full",
            "self.swap.fulls = self.swap.spread(self.fulls)",
            "self.swap.fulls = here.untied(self.swap.spread(self.fulls))",
        ),
        "zero3",
        "backward",
        "embedding.weight",
        "a tie was broken: the gradient of its use as head.weight is missing",
    ),
    "a tie is lost where parameters are found": Case(
        SeededFault(
            "api.fully_shard:managed_parameters",
            "Found(parameter, name, tuple(slots)) for parameter, name, slots in found.values()",
            "Found(*each) for parameter, name, slots in found.values() for each in here.parted(parameter, slots)",
        ),
        "zero3",
        "initial values",
        "head.weight",
        "a tie was broken",
    ),
    "a buffer is moved where nothing is to move": Case(
        SeededFault(
            "api.fully_shard:move_unsharded",
            "if not buffer.is_meta and buffer.device != device:\n"
            "                setattr(module, name, buffer.to(device))",
            "if not buffer.is_meta:\n                setattr(module, name, buffer.to(device, copy=True))",
        ),
        "zero3",
        "buffers",
        "norm.mean",
        "a stale buffer",
        program="aliased",
    ),
    "buffers are put back after a forward": Case(
        SeededFault(
            "engine.hooks:UnitHooks._forward_ends",
            "    return output\n",
            "    here.buffers_put_back(module)\n    return output\n",
        ),
        "zero2",
        "buffers",
        "norm.mean",
        "a stale buffer",
    ),
    # ---- generators ----
    "random numbers are drawn": Case(
        SeededFault(RECEIVE, _EACH, f"{_EACH}; torch.rand(1)"),
        "zero3",
        "generators",
        "micro-batch 0",
        "other random numbers, of torch",
    ),
    "random numbers of Python are drawn": Case(
        SeededFault(RECEIVE, _EACH, f"{_EACH}; __import__('random').random()"),
        "zero3",
        "generators",
        "micro-batch 0",
        "other random numbers, of Python",
    ),
    "random numbers of numpy are drawn": Case(
        SeededFault(RECEIVE, _EACH, f"{_EACH}; __import__('numpy').random.rand()"),
        "zero3",
        "generators",
        "micro-batch 0",
        "other random numbers, of numpy",
    ),
}
