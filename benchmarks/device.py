"""The device of a benchmark: "cpu", "cuda" or another accelerator, or "simulated", which needs no hardware.

On "simulated" (tests/harness/simulated.py) every line of a script runs, with real storages, streams and messages, but
operators run on the host: bytes are those of a device, and times mean nothing, so they are neither printed nor kept.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

SIMULATED = "simulated"


def device_of(kind: str, index: int = 0) -> torch.device:
    """The device of this kind, current from now on. Exits where there is none."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind == SIMULATED:
        from tests.harness import nccl

        nccl.register()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != kind:
        raise SystemExit(
            f"expected a device {kind}, found {found.type if found else 'none'}; run it on a machine with one, or try "
            f"the script with --device cpu --tiny or --device {SIMULATED} --tiny"
        )
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(index)
    return device


def count_of(kind: str) -> int:
    """How many devices of this kind a run takes: one, or two where there are two."""
    return 2 if kind == SIMULATED else 1 if kind == "cpu" else min(2, torch.accelerator.device_count())


def has_times(device: torch.device) -> bool:
    """Whether times mean anything."""
    return device.type != SIMULATED


def name_of(device: torch.device) -> str:
    """What the hardware is called."""
    named = getattr(module_of(device), "get_device_name", None)
    return str(named(device)) if named is not None else device.type


def machine(device: torch.device) -> dict[str, Any]:
    """What figures on this device depend on: its name, memory, versions. What cannot be asked is left out."""
    from benchmarks.common import facts

    found: dict[str, Any] = {"device": name_of(device), **facts()}
    if device.type == "cuda":
        with suppress(Exception):
            found["cuda"] = torch.version.cuda
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(Exception):
            found["memory_gb"] = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
        with suppress(Exception):
            found["devices"] = torch.cuda.device_count()
    return found


def module_of(device: torch.device) -> Any:
    """`torch.cuda` or its like; None for a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def start_fake(device: torch.device, world: int) -> None:
    """The first of `world` ranks; messages take no time and bring nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Where torch does not know it, as of a device that a test made.
    known = dist.Backend.backend_capability["fake"]
    if device.type not in known:
        known.append(device.type)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


class Clock:
    """Seconds between two marks on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = device.type != "cpu" and has_times(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._events:
            event = module_of(self._device).Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each pair of marks. Waits for the device."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 if self._events else end - begin for begin, end in pairs]


def spelt(value: float | None, form: str, width: int) -> str:
    """A figure in a column of this width; "-" for None."""
    return "-".rjust(width) if value is None else format(value, form).rjust(width)


@contextmanager
def waits_noted(device: torch.device) -> Iterator[list[str]]:
    """Where the host waits for the device inside: filled when the block ends, one entry for each wait.

    CUDA's own mode warns; what a thread of autograd meets is warned of when the backward ends. It does not see
    `torch.cuda.synchronize`, nor waits for events.
    """
    found: list[str] = []
    if device.type == SIMULATED:
        from tests.harness import simulated

        with simulated.watched() as seen:
            yield found
        found += [
            f"{what} at {places[-1] if places else '?'}" for (what, places), n in seen.waits.items() for _ in range(n)
        ]
        return
    if device.type != "cuda":
        raise RuntimeError(f"{device.type} does not tell where the host waits")
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Warns once of itself.
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{os.path.basename(one.filename)}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]
