"""What `full_params` holds, counted tensor by tensor at every gather."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import full_params, fully_shard
from tests.harness.fake import fake_world

WIDTH, LAYERS = 64, 6


def _held() -> int:
    """How many plain tensors of a whole weight exist and have memory."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and tuple(t.shape) == (WIDTH, WIDTH)]
    return len({t.untyped_storage().data_ptr() for t in found if t.untyped_storage().nbytes()})


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """The collector looks at new objects only: the others of a test session take a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_held_are_the_full_parameters_and_in_passing_one_more(
    rank: int, rank0_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = LAYERS if rank == 0 or not rank0_only else 0
    with fake_world(4, rank=rank):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        before, seen = _held(), []
        gather = DTensor.full_tensor

        def counted(self: DTensor, **options: Any) -> Tensor:
            full = gather(self, **options)
            seen.append(_held() - before)
            return full

        monkeypatch.setattr(DTensor, "full_tensor", counted)
        with full_params(model, rank0_only=rank0_only):
            assert _held() - before == kept
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters() if type(p) is nn.Parameter)
        assert seen == [min(kept, i) + 1 for i in range(LAYERS)]
        assert _held() == before
        # One unit at a time.
        seen.clear()
        for layer in model:
            with full_params(layer):
                pass
        assert seen == [1] * LAYERS
        assert torch.is_grad_enabled()
