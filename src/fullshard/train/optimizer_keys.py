"""Keys of the optimizer and of its learning rate, and the rules between them. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fullshard.keys import invalid, setting, show

# Optimizers that need whole matrices: each is stepped on its owner.
ON_OWNERS = ("muon", "adafactor")
# The keys that only some optimizers and schedules have, with these.
_NAMES = {
    "beta1": ("adamw", "muon"),
    "beta2": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
}
_SCHEDULES = {"min_lr_ratio": ("cosine", "linear", "wsd", "inverse_sqrt"), "decay_steps": ("wsd",)}


@dataclass(frozen=True, slots=True)
class OptimizerKeys:
    name: str = setting(
        "adamw",
        '"adamw", "sgd", or stepped on owners of whole matrices "adafactor" and "muon" (AdamW for what is no matrix)',
        choices=("adamw", "sgd", "muon", "adafactor"),
    )
    lr: float = setting(2e-3, "highest learning rate", above=0.0)
    schedule: str = setting(
        "cosine",
        'after the warm-up: "cosine" and "linear" fall to the last step, "wsd" over decay_steps, "inverse_sqrt" as '
        'sqrt(warmup_steps / step), "constant" not',
        choices=("cosine", "linear", "constant", "wsd", "inverse_sqrt"),
    )
    min_lr_ratio: float = setting(0.1, "the rate falls to this fraction of lr", least=0.0, most=1.0)
    warmup_steps: int = setting(20, "steps of linear warm-up", least=0)
    decay_steps: int = setting(0, 'last steps, in which the rate of "wsd" falls; 0 = a tenth of all', least=0)
    beta1: float = setting(0.9, "decay of AdamW's first moment", least=0.0, most=0.9999999)
    beta2: float = setting(0.95, "decay of AdamW's second moment", least=0.0, most=0.9999999)
    eps: float = setting(1e-8, "added to the root of AdamW's second moment", above=0.0)
    momentum: float = setting(0.95, 'of "muon" and "sgd"', least=0.0, most=0.9999999)
    weight_decay: float = setting(
        0.1,
        'decay of matrices; norm weights are not decayed; decoupled, but for "sgd" added to the gradient',
        least=0.0,
    )


def refuse_8_bits(name: str, value: Any) -> None:
    """Raise `ConfigError` where `name` is optimizer.name and `value` one with a state in 8 bits."""
    if name == "optimizer.name" and isinstance(value, str) and re.search(r"8_?-?bit|fp8", value.lower()):
        problem = (
            "quantises blocks of what a rank holds, so losses would depend on the number of processes; torchao's "
            "AdamW8bit trains in a program with fully_shard"
        )
        raise invalid(name, value, problem, show("adafactor"))


def check_optimizer(config: Any) -> None:
    """Rules between keys, for a `Config`. Raises `ConfigError`."""
    keys, usual = config.optimizer, OptimizerKeys()
    for has, by, value in ((_NAMES, "name", keys.name), (_SCHEDULES, "schedule", keys.schedule)):
        for key, users in has.items():
            given, default = getattr(keys, key), getattr(usual, key)
            if value not in users and given != default:
                problem = f"has no effect with optimizer.{by} = {show(value)}"
                raise invalid(f"optimizer.{key}", given, problem, show(default))
    steps = config.training.steps
    if keys.decay_steps > max(steps - keys.warmup_steps, 0):
        problem = f"must be at most training.steps - optimizer.warmup_steps = {max(steps - keys.warmup_steps, 0)}"
        raise invalid("optimizer.decay_steps", keys.decay_steps, problem, str(max(steps - keys.warmup_steps, 0)))
    if keys.name != "adamw" and config.sharding.parallelism.beyond_data:
        problem = "the trainer has it with data parallelism alone"
        raise invalid("optimizer.name", keys.name, problem, show("adamw"))
