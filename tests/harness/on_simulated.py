"""A pytest plugin: this session's machine has the device "simulated", and NCCL belongs to it.

    python -m pytest -p tests.harness.on_simulated tests/gpu

So the tests of the tier `gpu` run as they are where there is no hardware.
"""

from __future__ import annotations

import torch

from tests.harness import nccl

nccl.register()
# Otherwise torch unties parameters that it moves to a device of this kind; those of CUDA stay tied.
torch.__future__.set_swap_module_params_on_conversion(True)
