"""What docs/troubleshooting.md says for machines with a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.threads.test_troubleshooting import Row, build


@pytest.fixture
def default_group(tmp_path: Path) -> Iterator[None]:
    """One rank, without a backend for the device."""
    dist.init_process_group(init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_wrong_device_or_backend(default_group: None) -> None:
    """The page's code says cuda; on another device its name is put there."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    kind = accelerator.type
    row = Row("The wrong device or backend", model=build())
    row.code = [code.replace("cuda", kind) for code in row.code]
    row.mend()
    device_type, backends = row.see()
    assert device_type == kind and f"{kind}:{dist.get_default_backend_for_device(kind)}" in backends
    assert all(parameter.to_local().device.type == kind for parameter in row["model"].parameters())
