"""What benchmarks/recompute.py counts of a plain model is what the trainer's sharded one keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.recompute import TRAINER, Kept, count
from fullshard.engine import unit_of
from fullshard.train.config import load_config
from fullshard.train.model import llama_shape, sharded_model
from tests.harness.fake import fake_world

SEQUENCES = 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "units"])
def test_a_sharded_model_keeps_what_is_counted(recompute: str, dtype: str) -> None:
    config = load_config(None, [f"sharding.activation_checkpointing={recompute}", f"sharding.precision.param={dtype}"])
    assert llama_shape(config, 256) == TRAINER, "the script says that these are the trainer's defaults"
    expected = count(TRAINER, SEQUENCES, getattr(torch, dtype), {"none": "none", "units": "each block"}[recompute])
    with fake_world(2):
        model = sharded_model(config, 256, init_device_mesh("cpu", (2,)), torch.device("cpu"))
        tokens = torch.zeros(SEQUENCES, TRAINER.context, dtype=torch.int64)
        kept = Kept(model)
        for module in model.modules():
            unit = unit_of(module)
            for group in unit.groups if unit is not None else ():
                kept.leave_out(group.memory.flat)  # full parameters come and go, and are not activations
        with kept:
            F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    assert kept.nbytes == expected.kept_nbytes
