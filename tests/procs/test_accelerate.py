"""Accelerate: `fsdp2_prepare_model` and what `prepare` does around it, on an optimizer that was built before.

Accelerate makes plain data parallelism of any run on a CPU, so the step of `prepare` that is for FSDP2 is called by
itself, with the state that it has on an accelerator. The names of torch that it imports are ours after `install()`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import for_each_implementation
from tests.harness.models import adamw, assert_same_training, collect, full_copy
from tests.harness.packages import llama, loss_of, own, tokens
from tests.harness.pool import pool

# Imports of packages take longer than what is tested.
pytestmark = pytest.mark.slow

WORLD, STEPS = 2, 3
TIMEOUT = 110.0


@contextlib.contextmanager
def accelerator_of(rank: int, impl: str, **options: Any) -> Iterator[Any]:
    """An Accelerator that believes it is on machines with FSDP2; `options` of its plugin, and mixed_precision."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    # The address is only looked for: the group that the ranks are in already is used.
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    import accelerate
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    mixed = options.pop("mixed_precision", "no")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True, **options
    )
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):  # both are asked, and the one is filled from the other
            state.distributed_type = DistributedType.FSDP
        if impl == "fullshard":
            with warnings.catch_warnings():
                # Of an earlier job of this process; nothing here calls transformers' own sharding.
                warnings.filterwarnings("ignore", "install: .* found transformers.distributed.fsdp.fully_shard, which")
                fullshard.install()
        yield accelerator
    finally:
        fullshard.uninstall()
        AcceleratorState._reset_state(True)


def _prepared(rank: int, impl: str, tied: bool, options: dict[str, Any]) -> Any:
    with accelerator_of(rank, impl, **options) as accelerator:
        plain, model = llama(tied=tied), llama(tied=tied)
        whole, optimizer = adamw(plain.parameters()), adamw(model.parameters())
        model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
        assert accelerator.is_fsdp2 and isinstance(model, torch.distributed.fsdp.FSDPModule)
        assert isinstance(model, fullshard.FSDPModule) is (impl == "fullshard")
        units = sum(isinstance(module, torch.distributed.fsdp.FSDPModule) for module in model.modules())
        norms = []
        for step in range(STEPS):
            for micro in range(2):
                batch = tokens(2 * step + micro, dist.get_world_size())
                with accelerator.no_sync(model) if micro == 0 else contextlib.nullcontext():
                    accelerator.backward(loss_of(model, own(batch, rank)))
                loss_of(plain, batch).backward()
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            norms.append((full_copy(norm), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
            for each in (optimizer, whole):
                each.step()
                each.zero_grad()
        saved = accelerator.get_state_dict(model)
        again = _left_alone(accelerator, model)
        inner = optimizer.optimizer
        return collect(model, inner), collect(plain, whole), norms, saved, dict(plain.state_dict()), units, again


def _left_alone(accelerator: Any, model: Any) -> bool:
    """Whether a model that is sharded already is left as it is."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    return fsdp2_prepare_model(accelerator, model) is model


@behaviour(
    "Accelerate: `prepare`, an optimizer built before, accumulation, clipping, a full state dict", area="packages"
)
@for_each_implementation
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("lean", [False, True], ids=["from every rank", "from rank 0"])
def test_prepared_by_accelerate(impl: Any, tied: bool, lean: bool) -> None:
    """lean: the model goes to the meta device, and comes from rank 0 one tensor at a time; ties are tied again."""
    options = {"cpu_ram_efficient_loading": lean}
    ranks = pool(WORLD).run(_prepared, impl.name, tied, options, timeout=TIMEOUT)
    for rank, (actual, expected, norms, saved, whole, units, again) in enumerate(ranks):
        assert_same_training(actual, expected)
        for norm, plain in norms:
            tolerance.assert_close(norm, plain, what="norm")
        assert saved.keys() == (set() if rank else whole.keys())
        for name, value in saved.items():
            tolerance.assert_close(value, whole[name], what=name)
        # Two blocks; the embedding with head and norm, or the embedding, and head and norm; the model.
        assert units == 6 and again


def _mixed(rank: int, impl: str) -> tuple[list[float], set[torch.dtype], torch.dtype]:
    options = {"cpu_ram_efficient_loading": True, "mixed_precision": "bf16", "activation_checkpointing": True}
    with accelerator_of(rank, impl, **options) as accelerator:
        model = llama(tied=False).to(torch.bfloat16)
        model, optimizer = accelerator._prepare_fsdp2(model, adamw(model.parameters()))
        losses = []
        for _ in range(6):
            output = model(
                input_ids=own(tokens(0, dist.get_world_size()), rank),
                labels=own(tokens(0, dist.get_world_size()), rank),
            )
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.item())
        return losses, {param.dtype for param in model.parameters()}, output.logits.dtype


@behaviour("Accelerate: bf16 with recomputation, masters in float32", area="packages")
@for_each_implementation
def test_mixed_precision_by_accelerate(impl: Any) -> None:
    for losses, storage, output in pool(WORLD).run(_mixed, impl.name, timeout=TIMEOUT):
        assert storage == {torch.float32} and output == torch.bfloat16
        assert losses[-1] < losses[0] - 1
