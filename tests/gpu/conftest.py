"""What the tests on one accelerator share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """This machine's accelerator, with a default process group of one rank on the backend that belongs to it."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield torch.device(accelerator.type, 0)
    finally:
        dist.destroy_process_group()


@contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """Fails where the host waits for the device."""
    if device.type == "simulated":
        from tests.harness import simulated

        with simulated.watched() as seen:
            yield
        assert not seen.waits, seen.waits
        return
    if device.type != "cuda":
        pytest.skip(f"{device.type} does not tell where the host waits")
    with torch.cuda.device(device):
        before = torch.cuda.get_sync_debug_mode()
        try:
            # Its first call in a process warns of itself; raised as an error, that would leave the mode set.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
