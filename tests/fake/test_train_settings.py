"""What the trainer's keys make of its model and of its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.migrate.activations import Checkpointed
from fullshard.train.config import load_config
from fullshard.train.model import Llama, sharded_model
from fullshard.train.planned import strategy_of
from tests.harness.fake import fake_world

AC = "sharding.activation_checkpointing"
BOTH = ("model.layers=5", f"{AC}.at=units", f"{AC}.every=2")


def test_recomputation_and_offload_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[nn.Module, Any]] = []

    def noted(module: nn.Module, **options: Any) -> Any:
        given.append((module, options))
        return fullshard.fully_shard(module, **options)

    monkeypatch.setattr("fullshard.train.model.fully_shard", noted)
    config = load_config(None, [*BOTH, "sharding.cpu_offload=true", "sharding.reshard_after_forward=2"])
    with fake_world(4):
        model = sharded_model(config, 256, init_device_mesh("cpu", (4,)), torch.device("cpu"))
        runs: list[int] = []
        for number, block in enumerate(model.layers):
            block.ffn.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert isinstance(model, Llama) and [module for module, _ in given] == [*model.layers, model]
    assert {type(options["offload_policy"]) for _, options in given} == {fullshard.CPUOffloadPolicy}
    assert [options["reshard_after_forward"] for _, options in given] == [2] * 5 + [None]
    assert [runs.count(number) for number in range(5)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_activations_on_the_host_reach_the_blocks(recompute: str) -> None:
    config = load_config(None, [f"{AC}.at=units", f"{AC}.offload=true", f"{AC}.recompute={recompute}"])
    with fake_world(2):
        model: Any = sharded_model(config, 256, init_device_mesh("cpu", (2,)), torch.device("cpu"))
        for block in model.layers:
            assert isinstance(block.forward, Checkpointed)
            assert block.forward.run.keywords["offload"] is True
            assert block.forward.run.keywords["recompute"] == (recompute == "true")


def test_saved_results_are_not_computed_again() -> None:
    """Products of the blocks are made once in forward; with what is saved, not once more in backward."""
    counted = []
    for saved in ("[]", '["aten.mm"]'):
        config = load_config(None, [f"{AC}.at=units", f"{AC}.save={saved}"])
        with fake_world(2):
            model = sharded_model(config, 256, init_device_mesh("cpu", (2,)), torch.device("cpu"))
            with _Products() as products:
                model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        counted.append(products.number)
    # Seven products in a block; the last one's result is nobody's input in backward, so it is not made again.
    assert counted[0] - counted[1] == 4 * 6


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_the_plan_has_the_settings() -> None:
    found = strategy_of(
        load_config(None, [*BOTH, "sharding.cpu_offload=true", "sharding.reshard_after_forward=2"]), 4, "gloo"
    )
    assert found.recompute == ("none", "none", "whole", "none", "whole", "none")
    assert (found.offload, found.reshard, found.root_reshard) == (True, 2, None)
    found = strategy_of(load_config(None, [f"{AC}.at=units", f'{AC}.save=["aten.mm"]']), 2, "")
    assert (found.recompute, found.reshard, found.root_reshard, found.offload) == ("keep:aten.mm", True, None, False)
    host = f"{AC}.offload=true"
    ways = {(f"{AC}.at=units", f"{AC}.recompute=false"): "none+host", (f"{AC}.at=units",): "whole+host"}
    assert {given: strategy_of(load_config(None, [host, *given]), 2, "").recompute for given in ways} == ways
    every = strategy_of(load_config(None, [*BOTH, host]), 4, "gloo").recompute
    assert every == ("none", "none", "whole+host", "none", "whole+host", "none")
    # The trainer steps all parameters in one call.
    assert found.optimizer == "adamw-foreach"
    words = {"never": (False, False), "always": (True, True)}
    for word, (blocks, root) in words.items():
        found = strategy_of(load_config(None, [f"sharding.reshard_after_forward={word}"]), 2, "gloo")
        assert (found.reshard, found.root_reshard) == (blocks, root)
