"""Messages of NCCL as one device can have them: rank 0 of `world`, each message on a stream of its own for as long as a
ring of that bandwidth takes.

    link = start(device, world=8)        a fake default group, and the group of the mesh: `link.mesh`
    link.bandwidth = 50e9                bytes per second of each link of the ring, from the next message on; inf: none
    ...                                  train with torch's FSDP2 or with fullshard on `link.mesh`

A message is what NCCL makes of it, as far as the two libraries can notice:

    order     it begins after what the caller's stream has queued, and after the messages before it, and `wait` orders
              the current stream after it; the host waits for nothing
    time      latency + ring share of the bytes / bandwidth: (n-1)/n for gathers, reductions and exchanges, twice that
              for an all-reduce. Coalesced ones have one latency
    memory    it holds inputs and outputs until a stream waits for it
    values    those of `world` equal ranks: a gather brings this rank's piece `world` times, a sum is `world` times its
              part. Versions of tensors do not change
    names     its group says "nccl", so fullshard chooses what it chooses for NCCL

What differs from NCCL: a message writes with one copy at the speed of memory and then waits on one multiprocessor,
where NCCL's kernels hold some twenty for the whole time; ranks are never late; a call costs what Python costs, for both
libraries alike (`Link.alone` measures it). The default group is a fake one, so fullshard finds no peers: it opens no
data groups, and compares nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.device import Clock, module_of, start_fake, synchronize

BACKEND = "timed"
# A collective of eight devices of one machine: assumed, the same for both libraries.
LATENCY_SECONDS = 15e-6

# The time of the device itself, whatever its clock rate. `until` waits for `ns` after `begin` of the same message.
_SOURCE = r"""
extern "C" __device__ __forceinline__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
extern "C" __global__ void begin(unsigned long long* at) { *at = now(); }
extern "C" __global__ void until(unsigned long long* at, int ns) {
    unsigned long long end = *at + (unsigned long long)ns;
    while (now() < end) __nanosleep(500);
}
"""


def ring_seconds(kind: str, ranks: int, nbytes: float, bandwidth: float, latency: float = LATENCY_SECONDS) -> float:
    """Of a collective of so many bytes, on all ranks together or on each, around a ring of links of that bandwidth."""
    if math.isinf(bandwidth):
        return 0.0
    share = (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    return latency + share * nbytes / bandwidth


class Timer:
    """Lets a stream of the device wait. `kind`: how; "none" without hardware."""

    def __init__(self, device: torch.device) -> None:
        self.kind, self._device = "none", device
        self._begin: Any = None
        self._until: Any = None
        self._cycles = 0.0
        if device.type != "cuda":
            return
        from torch.utils import cpp_extension

        try:
            compile_kernel: Any = torch.cuda._compile_kernel  # type: ignore[attr-defined]
            # It asks for the headers of a toolkit, which wheels lack and these kernels do not include.
            home = cpp_extension.CUDA_HOME or "/usr"
            with mock.patch.object(cpp_extension, "CUDA_HOME", home):
                self._begin, self._until = compile_kernel(_SOURCE, "begin"), compile_kernel(_SOURCE, "until")
            at = torch.zeros(1, dtype=torch.int64, device=device)
            self.begin(at)
            self.until(at, 1e-6)
            synchronize(device)
            self.kind = "globaltimer"
        except Exception as error:  # without NVRTC, or under another name
            self._begin = self._until = None
            self._cycles = self._calibrated()
            self.kind = f"cycles at {self._cycles / 1e9:.2f} GHz ({type(error).__name__}: {str(error)[:80]})"

    def _calibrated(self) -> float:
        """Cycles of `torch.cuda._sleep` in a second, at the clock rate of now."""
        clock = Clock(self._device)
        for _ in range(5):
            clock.mark()
            torch.cuda._sleep(20_000_000)
            clock.mark()
        return 20_000_000 / statistics.median(clock.seconds())

    def begin(self, at: Tensor) -> None:
        """A message begins, on the current stream; `at` (1,) int64 of the device."""
        if self._begin is not None:
            self._begin(grid=(1, 1, 1), block=(1, 1, 1), args=[at], stream=torch.cuda.current_stream())

    def until(self, at: Tensor, seconds: float) -> None:
        """The current stream waits until so long after `begin`; where there are only cycles, for so long."""
        if self._until is not None:
            ns = min(int(1e9 * seconds), (1 << 31) - 1)
            self._until(grid=(1, 1, 1), block=(1, 1, 1), args=[at, ns], stream=torch.cuda.current_stream())
        elif self._cycles:
            torch.cuda._sleep(int(seconds * self._cycles))


class _Done(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True


class _TimedWork(dist.Work):
    def __init__(self, device: torch.device, event: Any, kept: list[Tensor]) -> None:
        super().__init__()
        self._device, self._event, self._kept = device, event, kept

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]  # noqa: ARG002
        module_of(self._device).current_stream(self._device).wait_event(self._event)
        self._kept.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed()


class TimedGroup(dist.ProcessGroup):
    """See the module. `messages`: how many were sent, by kind."""

    supports_coalescing = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)
        self.bandwidth, self.latency = math.inf, LATENCY_SECONDS
        self.messages: dict[str, int] = {}
        self._name = ""
        self._device = device
        self.timer = Timer(device)
        self._stream: Any = module_of(device).Stream(device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)

    def seconds(self, kind: str, nbytes: int) -> float:
        """What a message takes of which the whole, on all ranks together or on each, has so many bytes."""
        return ring_seconds(kind, self.size(), nbytes, self.bandwidth, self.latency)

    def _send(self, kind: str, whole: Sequence[Tensor], others: Sequence[Tensor], act: Callable[[], None]) -> dist.Work:
        """`whole`: the tensors whose bytes are the message."""
        name = f"coalesced {kind}" if len(whole) > 1 else kind
        self.messages[name] = self.messages.get(name, 0) + 1
        if whole[0].device.type != self._device.type:
            with torch.no_grad():
                act()
            return _Done()
        seconds = self.seconds(kind, sum(tensor.nbytes for tensor in whole))
        self._stream.wait_stream(module_of(self._device).current_stream(self._device))
        with module_of(self._device).stream(self._stream), torch.no_grad():
            if seconds:
                self.timer.begin(self._at)
            act()
            if seconds:
                self.timer.until(self._at, seconds)
            event = self._stream.record_event()
        return _TimedWork(self._device, event, [*whole, *others])

    # ---- messages, by the names of torch up to 2.12 ----

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002, ARG002
        return self.allgather_into_tensor_coalesced([output], [input])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        outs, pieces = list(outputs), list(inputs)

        def act() -> None:
            for out, piece in zip(outs, pieces, strict=True):
                # `data`: NCCL does not count as a change in place.
                chunks, own = out.data.view(self.size(), -1), piece.data.reshape(-1)
                rank = self.rank() if own.data_ptr() == chunks[self.rank()].data_ptr() else -1
                for part in (chunks,) if rank < 0 else (chunks[:rank], chunks[rank + 1 :]):
                    if part.numel():
                        part.copy_(own.expand_as(part))

        return self._send("all-gather", outs, pieces, act)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        outs, pieces = list(outputs), list(inputs)
        factor = self.size() if _is_sum(opts) else 1

        def act() -> None:
            for out, piece in zip(outs, pieces, strict=True):
                torch.mul(piece.data.reshape(self.size(), -1)[self.rank()], factor, out=out.data.view(-1))

        return self._send("reduce-scatter", pieces, outs, act)

    def alltoall_base(self, output: Tensor, input: Tensor, *_: Any) -> dist.Work:  # noqa: A002
        return self._send("all-to-all", [input], [output], lambda: output.data.copy_(input.data.view_as(output)))

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        found = list(tensors)
        factor = self.size() if _is_sum(opts) else 1

        def act() -> None:
            if factor != 1:
                torch._foreach_mul_([tensor.data for tensor in found], factor)

        return self._send("all-reduce", found, [], act)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        outs, pieces = list(outputs[0]), list(inputs)

        def act() -> None:
            for out in outs:
                out.data.copy_(pieces[0].data)

        return self._send("all-gather", outs, pieces, act)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return self._send("broadcast", list(tensors), [], lambda: None)

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return _Done()

    # ---- and of later ones ----

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # ---- names ----

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name


def _is_sum(opts: Any) -> bool:
    return opts is None or opts.reduceOp == dist.ReduceOp.SUM


class Link:
    """The group, and the mesh of it."""

    def __init__(self, group: TimedGroup, mesh: DeviceMesh, device: torch.device) -> None:
        self.group, self.mesh, self.device = group, mesh, device

    @property
    def bandwidth(self) -> float:
        """Bytes per second; inf: messages take no time beyond their copies."""
        return self.group.bandwidth

    @bandwidth.setter
    def bandwidth(self, value: float) -> None:
        self.group.bandwidth = value

    def alone(self, numel: int, rounds: int = 5) -> dict[str, float]:
        """Seconds of a gather into (numel,) bfloat16: as asked for, as events of the device measured it without
        compute, and of the host for the call."""
        out = torch.zeros(numel, dtype=torch.bfloat16, device=self.device)
        piece = torch.ones(numel // self.group.size(), dtype=torch.bfloat16, device=self.device)
        clock, host = Clock(self.device), []
        for _ in range(rounds):
            synchronize(self.device)
            clock.mark()
            begun = time.perf_counter()
            work = self.group._allgather_base(out, piece)
            host.append(time.perf_counter() - begun)
            work.wait()
            clock.mark()
        return {
            "asked": self.group.seconds("all-gather", out.nbytes),
            "measured": statistics.median(clock.seconds()),
            "host": statistics.median(host),
        }

    def close(self) -> None:
        """Destroy both groups."""
        dist.destroy_process_group()


def start(device: torch.device, world: int) -> Link:
    """Be rank 0 of `world`; this process must have no process group. See the module."""
    start_fake(device, world)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND,
            lambda store, rank, size, timeout: TimedGroup(rank, size, device),  # noqa: ARG005
            devices=[device.type],
        )
    group = dist.new_group(list(range(world)), backend=BACKEND)
    assert isinstance(group, TimedGroup)
    # By this name fullshard chooses how to send, and FSDP2 how to divide.
    dist.distributed_c10d._world.pg_backend_config[group] = f"{device.type}:nccl"
    return Link(group, DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",)), device)
