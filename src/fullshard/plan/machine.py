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
from math import isfinite
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """One kind of device in a cluster. Bytes, bytes per second, operations per second, seconds.

    memory: of a device. flops2, flops4: peak of matrix products in 16-bit dtypes and in float32 (TF32 where it is on by
    default for nobody, so plain float32). bandwidth: of device memory. matmul, attention, stream: the share of the peak
    that matrix products and that attention reach, and of the bandwidth that all other operations reach.
    launch: host time of one operation. node: devices of a node. intra_node, inter_node: what a device receives in
    a collective inside of a node, and between nodes. latency: of a message, `hop`: more for each node of a ring. host:
    between host and device. storage: what one device's process writes to or reads from storage. backend: of messages.
    reserved: taken on the device by driver, context and libraries; fragmentation: allowance of the allocator, a share.
    host_memory: of the host, for one device's process; 0 if it is not known.
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

    def peak_flops(self, itemsize: int) -> float:
        """Operations per second at most."""
        return self.flops2 if itemsize <= 2 else self.flops4

    def ring(self, ranks: int, stride: int) -> tuple[float, float]:
        """(bytes per second, seconds of latency) of a collective of `ranks` devices, each `stride` ranks apart."""
        nodes = -(-ranks * stride // self.node)
        within = min(ranks, max(self.node // stride, 1))
        if nodes <= 1:
            return self.intra_node, self.latency
        crossing = -(-ranks // within)
        # The links of a node are used by its devices together: each has its own share.
        return min(self.intra_node, self.inter_node), self.latency + self.hop * crossing


def _gpu(
    name: str, memory: float, flops2: float, flops4: float, bandwidth: float, intra: float, inter: float, host: float
) -> Hardware:
    return Hardware(
        name,
        memory=memory,
        flops2=flops2,
        flops4=flops4,
        bandwidth=bandwidth,
        matmul=0.50,
        attention=0.50,
        stream=0.60,
        launch=6e-6,
        node=8,
        intra_node=intra,
        inter_node=inter,
        latency=25e-6,
        hop=4e-6,
        host=20e9,
        storage=1e9,
        backend="nccl",
        reserved=1.5e9,
        fragmentation=0.04,
        contention=0.06,
        host_memory=host,
    )


GB, TB = 1e9, 1e12
# memory as the driver reports it to torch; intra_node: bus bandwidth of NCCL's collectives; inter_node: a NIC per
# device. host_memory: an eighth of the system memory of NVIDIA's own node with 8 such devices, by its data sheets: DGX
# A100 320GB 1 TB, DGX A100 640GB, DGX H100 and DGX H200 2 TB, DGX B200 2 TB (it takes up to 4). AMD sells no such node.
PROFILES = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100-40g", 42.3 * GB, 312e12, 19.5e12, 1.555 * TB, 230 * GB, 21 * GB, 125 * GB),
        _gpu("a100-80g", 85.1 * GB, 312e12, 19.5e12, 2.039 * TB, 230 * GB, 21 * GB, 250 * GB),
        _gpu("h100-80g", 85.0 * GB, 989e12, 67e12, 3.35 * TB, 360 * GB, 45 * GB, 250 * GB),
        _gpu("h200-141g", 150.1 * GB, 989e12, 67e12, 4.8 * TB, 360 * GB, 45 * GB, 250 * GB),
        _gpu("b200-180g", 191.5 * GB, 2250e12, 80e12, 8.0 * TB, 720 * GB, 45 * GB, 250 * GB),
        _gpu("mi300x-192g", 205.8 * GB, 1300e12, 163e12, 5.3 * TB, 310 * GB, 45 * GB, 0.0),
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


_MAY_BE_0 = ("reserved", "fragmentation", "latency", "hop", "launch", "contention", "host_memory")


def _named(name: str) -> Hardware:
    found = PROFILES.get(_SHORT.get(name.lower(), name.lower()))
    if found is None:
        near = difflib.get_close_matches(name.lower(), PROFILES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"hardware {name!r}: expected one of {', '.join(PROFILES)}, or a TOML file; nearest valid: {near}"
        )
    return found
