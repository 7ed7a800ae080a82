"""Faults of the executor and the channels that only a device shows: each changes one line of one method.

    FAULTS["a gather's wait is dropped"]     what it changes, and the setup that runs it
    with seeded(fault):                      the method is as the fault makes it
        ...

The tier of devices must find every one of them, by an unordered access, a message that ran into changed memory, wrong
numbers or an error (tests/device/test_seeded_faults.py). `side()` in the new text is another stream.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.harness.on_device import Setup


@dataclass(frozen=True)
class SeededFault:
    """In the method `where` ("comm.gather:PlannedGather.complete"), `old` becomes `new`."""

    where: str
    old: str
    new: str
    setup: Setup = Setup()
    world: int = 2


@contextmanager
def seeded(fault: SeededFault) -> Iterator[None]:
    """The method of `fault` is faulty inside."""
    module_name, _, path = fault.where.partition(":")
    owner: Any = importlib.import_module(f"fullshard.{module_name}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    sound = inspect.getattr_static(owner, name)
    function = inspect.unwrap(sound)
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.where}: expected {fault.old!r} once, found it {text.count(fault.old)} times; adapt it"
        )
    made: dict[str, Any] = {}
    names = {**function.__globals__, "side": _side}
    text = "from __future__ import annotations\n" + text.replace(fault.old, fault.new)
    exec(compile(text, fault.where, "exec"), names, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, sound)


def _side() -> torch.Stream:
    return torch.Stream(device="pretend")


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
_REPLICAS = "        self._work = replicate.all_reduce(total, MEAN if self._after.averages else SUM)\n"
_GATHER, _NATIVE, _SUM = "comm.gather:PlannedGather", "comm.reduce:_Native", "comm.reduction:StagedReduction"
_LINK = "comm.offload:HostLink"

FAULTS: dict[str, SeededFault] = {
    # ---- waits that are dropped ----
    "a gather's wait is dropped": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass"),
    "a gather's wait is dropped, mixed precision": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass", _MIXED),
    "a gather's wait is dropped, transformer": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass", _TRANSFORMER),
    "a gather's wait is dropped, one collective": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass", _ONE),
    "a gather's wait is dropped, hpZ": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass", _HPZ, 4),
    "a gather's wait is dropped, offload": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass", _OFFLOAD),
    "a gather's last wait is dropped": SeededFault(f"{_GATHER}.complete", "in works:", "in works[:-1]:"),
    "a gather's first wait is dropped": SeededFault(f"{_GATHER}.complete", "in works:", "in works[1:]:", _TRANSFORMER),
    "the wait command does nothing": SeededFault("engine.executor:Executor._wait", "channel.complete()", "pass"),
    "the wait of one unit does nothing": SeededFault(
        "engine.executor:Executor._wait", "channel.complete()", "unit.record.index == 2 or channel.complete()"
    ),
    "a reduction's wait is dropped": SeededFault(f"{_NATIVE}.total", "work.wait()", "pass"),
    "a reduction's wait is dropped, mixed precision": SeededFault(f"{_NATIVE}.total", "work.wait()", "pass", _MIXED),
    "a reduction's wait is dropped, micro-batches": SeededFault(f"{_NATIVE}.total", "work.wait()", "pass", _MICRO),
    "a reduction's wait is dropped, one collective": SeededFault(f"{_NATIVE}.total", "work.wait()", "pass", _ONE),
    "a reduction's wait is dropped, large gradients": SeededFault(f"{_NATIVE}.total", "work.wait()", "pass", _ALONE),
    "a gather's wait is dropped, large parameters": SeededFault(f"{_GATHER}.complete", "work.wait()", "pass", _ALONE),
    "a reduction's wait is dropped, offload": SeededFault(f"{_NATIVE}.total", "work.wait()", "pass", _OFFLOAD),
    "a reduction's last wait is dropped": SeededFault(f"{_NATIVE}.total", "in works:", "in works[:-1]:", _UNEVEN),
    "the replicas' wait is dropped": SeededFault(f"{_SUM}.collect", "self._work.wait()", "pass", _HSDP, 4),
    "the replicas' wait is dropped, micro-batches": SeededFault(
        f"{_SUM}.collect", "self._work.wait()", "pass", Setup("transformer", replicas=2, micro=2), 4
    ),
    "an exchange's wait is dropped": SeededFault("comm.reduce:_Exchange.total", "self._work.wait()", "pass", _EXCHANGE),
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
        f"{_LINK}.ahead", "uploading.add(self)", "pass", Setup(offload=True, evaluate=True)
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
        f"{_GATHER}.complete", "        work.wait()", "        with side():\n            work.wait()"
    ),
    "a reduction is waited for on another stream": SeededFault(
        f"{_NATIVE}.total", "        work.wait()", "        with side():\n            work.wait()"
    ),
    "an exchange is waited for on another stream": SeededFault(
        "comm.reduce:_Exchange.total",
        "    self._work.wait()",
        "    with side():\n        self._work.wait()",
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
        "engine.executor:Executor._issue",
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
        "comm.reduction:MessageReduce.fill",
        "        torch._foreach_copy_(destinations, sources)",
        "        with side():\n            torch._foreach_copy_(destinations, sources)",
        _TRANSFORMER,
    ),
    "flags are written on another stream": SeededFault(
        "comm.reduction:MessageReduce.fill",
        "        grad_present.fill_(1)",
        "        with side():\n            grad_present.fill_(1)",
    ),
    "reductions are issued on another stream": SeededFault(
        "comm.reduce:NativeReduce.send",
        "    works = self.group",
        "    with side():\n     works = self.group",
    ),
    "sums are divided on another stream": SeededFault(
        "comm.reduce:_Exchange.total",
        "        total.div_(",
        "        with side(): total.div_(",
        _EXCHANGE,
    ),
    "sums are made on another stream": SeededFault(
        "comm.reduce:_Exchange.total",
        "    total = sum_in_order(",
        "    with side(): total = sum_in_order(",
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
        "comm.reduction:_call", "stream.wait_stream(current)", "pass", Setup(hook_stream=True)
    ),
    "the gradients do not wait for the hook": SeededFault(
        "comm.reduction:_call", "current.wait_stream(stream)", "pass", Setup(hook_stream=True)
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
        "    unit.show_full()\n",
        "    unit.show_full()\n    for group in unit.groups:\n        group.memory.release()\n",
    ),
    "full parameters of one unit are freed too early": SeededFault(
        "engine.executor:Executor._issue",
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
        "    if carried is not None:",
        "    send.tensor.zero_()\n    if carried is not None:",
    ),
    "a result is overwritten while it arrives": SeededFault(
        "comm.reduce:NativeReduce.send", "    if carried is not None:", "    out.zero_()\n    if carried is not None:"
    ),
    "a gradient is overwritten while it is sent": SeededFault(
        "comm.reduce:NativeReduce.send",
        "    if carried is not None:",
        "    for gradient in large:\n        gradient.mul_(2)\n    if carried is not None:",
        _ALONE,
    ),
    "the digest is overwritten while it is sent": SeededFault(
        "comm.comparison:Comparison.ask_sharers",
        "    self._work = shard",
        "    work = shard.all_reduce(self._extremes, dist.ReduceOp.MAX)\n    self._extremes.add_(0)\n"
        "    self._work = work or shard",
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
        "    if staging is not None and",
        "    [own.mul_(1) for own in direct.own]\n    if staging is not None and",
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
        "comm.offload:OffloadedGather.issue",
        "        self._link.upload(self._shard.flat, self._host)\n        self._inner.send()",
        "        self._inner.send()\n        self._link.upload(self._shard.flat, self._host)",
        _OFFLOAD,
    ),
}
