"""Hardware as data: what a device computes, moves and holds, and what a message costs.

Peaks are those of the vendors' data sheets, dense, per device. Efficiencies are the share of a peak that kernels reach
in training; they are fitted to published training speeds, not measured here (docs/plan.md says to which). A user's own
profile is a TOML file with the names of the fields:

    name = "my cluster"
    base = "h100-80g"              # what is not said is taken from there
    inter_node = 25e9
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields, replace
from math import ceil, isfinite, log2
from pathlib import Path
from typing import NamedTuple

# NCCL's documented defaults, as in `observe/expected.py`: bytes of a channel's buffer, channels of a communicator.
COMMUNICATOR_NBYTES = (4 << 20) * 32
# The share of the bandwidth of messages that a collective reaches, by its kind.
_SHARES = {"all-to-all": "exchanging", "reduce-scatter": "scattering", "all-reduce": "summing"}


@dataclass(frozen=True)
class Hardware:
    """One kind of device in a cluster. Bytes, bytes per second, operations per second, seconds.

    memory: of a device. flops2, flops4: peak of matrix products in 16-bit dtypes and in float32 (TF32 where it is on by
    default for nobody, so plain float32). bandwidth: of device memory. matmul, attention, stream: the share of the peak
    that matrix products and that attention reach, and of the bandwidth that all other operations reach.
    launch: host time of one operation. node: devices of a node, which NVLink or the like joins. intra_node: what a
    device receives in a collective inside of a node. inter_node: a device's share of what the NICs of its node
    receive; a collective with all devices of a node has that of all. latency: of a message, `hop`: more for each node.
    host: between host and device. storage: what one device's process writes to or reads from storage. backend: of
    messages. reserved: taken on the device by driver, context and libraries; fragmentation: allowance of the allocator,
    a share. host_memory: of the host, for one device's process; 0 if it is not known. fused: of the bytes that other
    operations read and write, the share that is left where `torch.compile` fuses them. float8: how many times faster
    linear layers are in float8, with their casts; 0 if the device has none. stream2, attention2: as stream and
    attention, in 16-bit dtypes; 0: the same share. step: the share of the bandwidth that an optimizer's step reaches;
    0: that of other operations. step_launch: host time of a parameter's step. exchanging, scattering,
    summing: the shares of `intra_node` and `inter_node` that all-to-all, reduce-scatter and all-reduce reach.
    """

    name: str
    memory: float
    flops2: float
    flops4: float
    bandwidth: float
    matmul: float
    attention: float
    stream: float
    launch: float
    node: int
    intra_node: float
    inter_node: float
    latency: float
    hop: float
    host: float
    storage: float
    backend: str
    reserved: float
    fragmentation: float
    # The share of the device that messages in flight take from compute: kernels of collectives occupy it.
    contention: float
    blocking: bool = False  # the host waits where the device would (a CPU)
    host_memory: float = 0.0
    # The shares by which times and bytes of such plans were wrong (docs/plan.md), and the share of its peak by which a
    # plan has to be below the budget: bytes were too high, hardly ever too low.
    margin: float = 0.0
    time_error: float = 0.0
    memory_error: float = 0.0
    fused: float = 1.0
    float8: float = 0.0
    stream2: float = 0.0
    attention2: float = 0.0
    step: float = 0.0
    step_launch: float = 0.0
    exchanging: float = 1.0
    scattering: float = 1.0
    summing: float = 1.0

    def memory_rate(self, itemsize: int) -> float:
        """Bytes per second of operations that are no products."""
        return self.bandwidth * (self.stream2 if itemsize <= 2 and self.stream2 else self.stream)

    @property
    def step_rate(self) -> float:
        """Bytes per second of an optimizer's step."""
        return self.bandwidth * (self.step or self.stream)

    def attention_flops(self, itemsize: int) -> float:
        """Operations per second of attention."""
        share = self.attention2 if itemsize <= 2 and self.attention2 else self.attention
        return self.peak_flops(itemsize) * share

    def peak_flops(self, itemsize: int) -> float:
        """Operations per second at most."""
        return self.flops2 if itemsize <= 2 else self.flops4

    def communicators_nbytes(self, *axes: int) -> int:
        """Bytes of the communicators of a rank, one for each of the axes that has several ranks, and that of all."""
        there = sum(ranks > 1 for ranks in axes)
        return (there + 1) * COMMUNICATOR_NBYTES if there and self.backend == "nccl" else 0

    def collective(self, kind: str, ranks: int, stride: int, nbytes: float) -> float:
        """Seconds of a collective of `ranks` devices, each `stride` ranks apart. `nbytes`: of the whole message, of
        which a device sends all but its own part.

        Rings pass a node once, and use the NICs of all of its devices; groups beside each other share these. An
        all-reduce takes the faster of a ring and of two trees. In an all-to-all each device sends by its own NIC what
        goes to other nodes. `send`: each device sends all of `nbytes` to the next one of the group.
        """
        nodes = -(-ranks * stride // self.node)
        if kind in _SHARES:
            nbytes /= getattr(self, _SHARES[kind])
        if kind == "send":
            crosses = nodes > 1
            return nbytes / (self.inter_node if crosses else self.intra_node) + self.latency + self.hop * crosses
        share = nbytes * (ranks - 1) / ranks
        if kind == "all-reduce":
            share *= 2
        if nodes <= 1:
            return share / self.intra_node + self.latency * (2 if kind == "all-reduce" else 1)
        within = min(ranks, max(self.node // stride, 1))
        crossing = -(-ranks // within)
        if kind == "all-to-all":
            outside = nbytes * (ranks - within) / ranks
            return max(outside / self.inter_node, share / self.intra_node) + self.latency + self.hop * crossing
        bandwidth = min(self.intra_node, self.inter_node * within)
        around = self.latency + self.hop * crossing
        if kind == "all-reduce":
            # Twice around a ring, or up and down a tree of nodes.
            return share / bandwidth + min(2 * around, 2 * (self.latency + self.hop * ceil(log2(crossing))))
        return share / bandwidth + around


class Shares(NamedTuple):
    """The share of the peak that a GPU's kernels reach in training in matrix products and in attention, and of the
    bandwidth of memory in all other operations. `time_error`, `memory_error`: as in `Hardware`."""

    matmul: float
    attention: float
    stream: float
    time_error: float = 0.20
    memory_error: float = 0.15


# `matmul` and `stream` of A100 and H100: by the fitted half of benchmarks/published_runs.toml (`python -m
# benchmarks.plan_truth --fit`). `matmul` of others: the share that the largest products reach alone (A100 86.9 %, H100
# and H200 80.3 %, B200 77.6 %, MI300X 60.1 %: stas00/ml-engineering, compute/accelerator/README.md), times 0.81, what
# training on A100 has of its own.
#
# `attention` is that of torch's kernel, FlashAttention-2, forward and backward together, causal, heads of width 128. On
# an H100 0.29 (284 and 287 TFLOP/s: Dao-AILab/flash-attention#1791) to 0.33 (333 and 318: FlashAttention-3,
# arXiv:2407.08608, figures 5 and 6), at 8,192 tokens; of 2,048 tokens nine tenths of that, and of heads of width 64. On
# an A100 the lower end of 0.50 to 0.73 (FlashAttention-2, arXiv:2307.08691). B200: an assumption between
# FlashAttention-2 (0.15, flash-attention#1589) and newer kernels (0.56, flash-attention#2280). MI300X: assumed as H100.
#
# Errors: nine of ten lines of the hardware on data parallelism that were not fitted are within `time_error`, and nine
# of ten with memory within `memory_error`; of hardware without any, nine of ten of all. B200 has one line and MI300X
# none (benchmarks/plan_truth_2026-11-28.md).
_H100, _A100 = Shares(0.54, 0.30, 0.50, time_error=0.15), Shares(0.70, 0.50, 0.90, time_error=0.15)
_H100_96 = Shares(0.66, 0.30, 0.58, time_error=0.15, memory_error=0.10)
_H200 = Shares(0.65, 0.30, 0.58, memory_error=0.20)
_B200, _MI300X = Shares(0.63, 0.50, 0.58), Shares(0.48, 0.30, 0.58)


def _gpu(
    name: str,
    memory: float,
    flops2: float,
    flops4: float,
    bandwidth: float,
    intra: float,
    nic: float,
    host: float,
    shares: Shares,
    *,
    nics: int = 8,
    float8: float = 0.0,
) -> Hardware:
    node = 8
    return Hardware(
        name,
        memory=memory,
        flops2=flops2,
        flops4=flops4,
        bandwidth=bandwidth,
        launch=6e-6,
        node=node,
        intra_node=intra,
        inter_node=nics * nic * _NIC_SHARE / node,
        latency=25e-6,
        hop=4e-6,
        host=20e9,
        storage=1e9,
        backend="nccl",
        reserved=1.5e9,
        # In seven steps on an H100 and an H200 the allocator reserved 3 % to 32 % more than was in use, in the median
        # 4.7 % (benchmarks/gpu_h100_2026-11-26.md).
        fragmentation=0.04,
        contention=0.06,
        host_memory=host,
        margin=0.05,
        fused=_FUSED,
        float8=float8,
        **shares._asdict(),
    )


# Of what the NICs of a node could receive: 200 to 340 GB/s of 400 in an all-reduce over 256 H100 (NVIDIA/nccl#1218), 85
# to 96 of 100 with four NICs (nccl-tests#119); the middle of each is 0.68 and 0.9.
_NIC_SHARE = 0.75
# Not fitted: no compiled line is in the fitted half, so that two fifths of the bytes are left is an assumption. torchao
# states that one linear layer of 4,096 x 8,192 x 16,384 is 1.39 times faster in float8 on an H100.
_FUSED, _FLOAT8 = 0.40, 1.39
GB, TB = 1e9, 1e12
# memory as the driver reports it to torch; intra_node: bus bandwidth of NCCL's collectives; NICs: 8 of a node, of 200
# Gb/s beside A100 and of 400 beside others. host_memory: an eighth of the system memory of NVIDIA's own node with 8
# such devices, by its data sheets: DGX A100 320GB 1 TB, DGX A100 640GB, DGX H100 and DGX H200 2 TB, DGX B200 2 TB (it
# takes up to 4). AMD sells no such node.
PROFILES = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100-40g", 42.3 * GB, 312e12, 19.5e12, 1.555 * TB, 230 * GB, 25 * GB, 125 * GB, _A100),
        _gpu("a100-80g", 85.1 * GB, 312e12, 19.5e12, 2.039 * TB, 230 * GB, 25 * GB, 250 * GB, _A100),
        _gpu("h100-80g", 85.0 * GB, 989e12, 67e12, 3.35 * TB, 360 * GB, 50 * GB, 250 * GB, _H100, float8=_FLOAT8),
        # That of torchtitan's benchmarks: HBM2e, 500 W.
        _gpu("h100-96g", 102.0 * GB, 989e12, 67e12, 2.4 * TB, 360 * GB, 50 * GB, 250 * GB, _H100_96, float8=_FLOAT8),
        _gpu("h200-141g", 150.1 * GB, 989e12, 67e12, 4.8 * TB, 360 * GB, 50 * GB, 250 * GB, _H200, float8=_FLOAT8),
        _gpu("b200-180g", 191.5 * GB, 2250e12, 80e12, 8.0 * TB, 720 * GB, 50 * GB, 250 * GB, _B200, float8=_FLOAT8),
        _gpu("mi300x-192g", 205.8 * GB, 1300e12, 163e12, 5.3 * TB, 310 * GB, 50 * GB, 0.0, _MI300X, float8=_FLOAT8),
        Hardware(
            "cpu",
            memory=16 * GB,
            flops2=4e10,
            flops4=6e10,
            bandwidth=1.2e10,
            matmul=1.0,
            attention=0.5,
            stream=0.5,
            launch=6e-6,
            node=1 << 20,
            intra_node=1.5e9,
            inter_node=1e9,
            latency=2e-4,
            hop=1e-4,
            host=1.2e10,
            storage=1e9,
            backend="gloo",
            reserved=0.0,
            fragmentation=0.0,
            contention=0.5,
            blocking=True,
        ),
    )
}
_SHORT = {"a100": "a100-80g", "h100": "h100-80g", "h200": "h200-141g", "b200": "b200-180g", "mi300x": "mi300x-192g"}


def find_hardware(name: str) -> Hardware:
    """The profile of that name, or of that TOML file. Raises `ValueError`, one line, for another name, an unknown field
    and a value that is no positive number."""
    if not name.endswith(".toml"):
        return _named(name)
    try:
        told = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name}: cannot read the hardware profile: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: not valid TOML: {error}") from None
    base = _named(str(told.pop("base", "h100-80g")))
    kinds = {field.name: type(getattr(base, field.name)) for field in fields(Hardware)}
    for key, value in told.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise ValueError(f"{name}: {key}: there is no such field of a hardware profile; nearest valid: {near}")
        kind = kinds[key]
        accepted = (int, float) if kind is float else (kind,)
        least = 0 if key in _MAY_BE_0 else 1e-12
        is_number = kind in (int, float)
        if type(value) not in accepted or (is_number and not (isfinite(value) and value >= least)):
            expected = {int: "a whole number above 0", float: "a number above 0", str: "a text", bool: "true or false"}[
                kind
            ]
            raise ValueError(f"{name}: {key} = {value!r}: expected {expected}")
    return replace(base, **{"name": Path(name).stem, **{key: kinds[key](value) for key, value in told.items()}})


_MAY_BE_0 = (
    "reserved",
    "fragmentation",
    "latency",
    "hop",
    "launch",
    "contention",
    "host_memory",
    "time_error",
    "memory_error",
    "float8",
    "margin",
    "stream2",
    "attention2",
    "step",
    "step_launch",
)


def _named(name: str) -> Hardware:
    found = PROFILES.get(_SHORT.get(name.lower(), name.lower()))
    if found is None:
        near = difflib.get_close_matches(name.lower(), PROFILES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"hardware {name!r}: expected one of {', '.join(PROFILES)}, or a TOML file; nearest valid: {near}"
        )
    return found
