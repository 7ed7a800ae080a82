"""Compiled steps of torch's optimizers over sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation
from tests.harness.threads import run_ranks
from tests.threads.test_optimizer import _model, _train


@behaviour(
    "`torch.compile(optimizer.step)` of an optimizer over sharded parameters takes the steps that it takes by itself",
    area="compile",
    torch="same",
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
def test_a_compiled_step_of_an_optimizer_of_torchs(impl: Implementation) -> None:
    def ranks(rank: int, compiled: bool) -> Any:
        model: Any = _model()
        for module in (model[0], model[2], model):
            impl.fully_shard(module)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        _train(model, optimizer, range(3), rank, 1)
        return [p.to_local() for p in model.parameters()]

    # The compiler is not meant for several threads.
    for mine, plain in zip(run_ranks(1, ranks, True)[0], run_ranks(1, ranks, False)[0], strict=True):
        tolerance.assert_close(mine, plain)
