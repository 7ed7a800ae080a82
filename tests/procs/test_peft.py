"""PEFT: LoRA adapters in float32 on a frozen bfloat16 base, in one unit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, for_each_implementation
from tests.harness.models import adamw, assert_same_training, collect, seeded
from tests.harness.packages import llama, loss_of, own, sharded, tokens, train
from tests.harness.pool import pool

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
WORLD, STEPS = 2, 3
TIMEOUT = 110.0


def _adapted() -> Any:
    """A bfloat16 Llama with adapters at two projections of each block; their second factor is not zero."""
    base = llama(tied=False).to(torch.bfloat16)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return seeded(lambda: get_peft_model(copy.deepcopy(base), config))


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _training(rank: int, impl: str) -> tuple[Any, Any, set[str], set[Any]]:
    plain, model = _adapted(), _adapted()
    sharded(IMPLEMENTATIONS[impl].fully_shard, model)
    loss_of(model, own(tokens(9, dist.get_world_size()), rank)).backward()
    with_gradient = {name for name, param in model.named_parameters() if param.grad is not None}
    dtypes = {(param.dtype, param.requires_grad, isinstance(param, DTensor)) for param in model.parameters()}
    model.zero_grad()
    optimizer, whole = adamw(_trainable(model)), adamw(_trainable(plain))
    train(model, optimizer, rank, dist.get_world_size(), STEPS)
    train(plain, whole, None, dist.get_world_size(), STEPS)
    return collect(model, optimizer), collect(plain, whole), with_gradient, dtypes


@pytest.mark.slow
@behaviour("PEFT: LoRA, a frozen base of another dtype than the adapters", area="packages")
@for_each_implementation
def test_adapters_train_as_in_one_process(impl: Any) -> None:
    for actual, expected, with_gradient, dtypes in pool(WORLD).run(_training, impl.name, timeout=TIMEOUT):
        assert_same_training(actual, expected)
        assert len(with_gradient) == 8 and all("lora_" in name for name in with_gradient)
        assert dtypes == {(torch.bfloat16, False, True), (torch.float32, True, True)}


def _sent(rank: int) -> tuple[dict[str, list[str]], float]:
    """What a step gathers and reduces, and the bytes of optimizer state here per adapter element here."""
    from fullshard.observe import record

    model = sharded(fullshard.fully_shard, _adapted())
    optimizer = adamw(_trainable(model))
    train(model, optimizer, rank, WORLD, 1)
    with record(model) as trace:
        loss_of(model, own(tokens(1, WORLD), rank)).backward()
    commands = [line.split() for line in str(trace).splitlines() if not line.startswith(">")]
    kinds: dict[str, list[str]] = {}
    for kind, unit, *_ in commands:
        kinds.setdefault(kind, []).append(unit)
    return kinds, sum(unit.full_nbytes_live for unit in fullshard.report(model).units)


@pytest.mark.slow
def test_a_frozen_base_is_gathered_and_never_reduced() -> None:
    """The root holds frozen parameters alone: nothing of it is reduced, and no base stays full after the step."""
    for kinds, full_nbytes in pool(WORLD).run(_sent, timeout=TIMEOUT):
        assert len(kinds["reduce"]) == 2 and not any(name == "root" for name in kinds["reduce"])
        assert any(name == "root" for name in kinds["unshard"])
        assert full_nbytes == 0


def _added_after(rank: int) -> tuple[str, str]:
    """A plain loop over a model as `from_pretrained` returns it, in evaluation mode, with adapters added too late."""
    from peft import LoraConfig, get_peft_model

    base = sharded(fullshard.fully_shard, llama(tied=False)).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(0)
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW(_trainable(model), lr=1e-2)
    with pytest.raises(fullshard.RanksDisagree) as raised:
        train(model, optimizer, rank, dist.get_world_size(), STEPS)
    return raised.value.what, str(raised.value)


@pytest.mark.slow
def test_adapters_that_are_added_after_sharding_are_named() -> None:
    for what, text in pool(WORLD).run(_added_after, timeout=TIMEOUT):
        assert what.endswith("lora_B.default.weight") and "get_peft_model first" in text


def _saving(rank: int, folder: str) -> tuple[str, bool, bool]:
    """Save adapters, load them onto a new base."""
    plain, model = _adapted(), sharded(fullshard.fully_shard, _adapted())
    from peft import PeftModel
    from safetensors.torch import load_file

    error = ""
    try:
        model.save_pretrained(folder + "-refused")
    except RuntimeError as raised:
        error = str(raised)
    with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):
        if rank == 0:
            model.save_pretrained(folder)
    dist.barrier()
    names = set(load_file(f"{folder}/adapter_model.safetensors"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        back = PeftModel.from_pretrained(llama(tied=False).to(torch.bfloat16), folder)
    values = plain.state_dict()
    same = all(torch.equal(value, values[name]) for name, value in back.state_dict().items())
    return error, same, len(names) == 8 and all("lora_" in name for name in names)


@pytest.mark.slow
@behaviour(
    "PEFT: adapters are saved in full, or `save_pretrained` says how",
    area="packages",
    torch="none",
    reason="torch's FSDP2 ends in 'invalid python storage'; with a full state dict it works, too",
)
def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    folder = str(tmp_path / "adapter")
    for error, same, adapters_alone in pool(WORLD).run(_saving, folder, timeout=TIMEOUT):
        assert "full_params" in error and same and adapters_alone
    assert not Path(folder + "-refused").exists()
