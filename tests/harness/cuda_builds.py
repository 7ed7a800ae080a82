"""Torch's builds for CUDA on a machine without a device: what has to happen first in a process of tests."""

from __future__ import annotations

import sys
import warnings


def settle() -> None:
    """Run a backward, then enter a fake mode, in a process with one thread. Nothing on a build for CPUs, or again.

    The first backward starts a thread for each device, and forks of a process with such threads refuse every backward.
    The first fake mode, which DTensor enters for each new operation, replaces the guard of CUDA devices by one that
    counts a device: a first backward after it would start a thread for that one. And up to 2.11 two threads that
    replace the guard at once crash.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    count_devices()
    torch.ones(1, requires_grad=True).sum().backward()
    with FakeTensorMode():
        pass


def count_devices() -> None:
    """From 2.15 on the first count of devices in a process warns that there are none; often a backward counts first."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA initialization", UserWarning)
        torch.cuda.device_count()
        torch.accelerator.is_available()


def settle_if_imported() -> None:
    """As `settle`, where torch is imported: the tests of the pure tier may do without."""
    if "torch" in sys.modules:
        settle()
