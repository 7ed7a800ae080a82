"""The levels of data parallelism under the names that FSDP1, DeepSpeed and others have for them. No torch.

Source: seed 000's table of sharding strategies; torch 2.13 `ShardingStrategy`; DeepSpeed's `zero_optimization.stage`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ..keys import ConfigError


@dataclass(frozen=True, slots=True)
class Level:
    """One level, and the settings that it stands for.

    shard, replicate: degrees, -1 for all ranks that are left; 0 where the caller must give the degree.
    reshard_after_forward: None where the caller must give a number of ranks.
    """

    fsdp1: str
    deepspeed: str
    shard: int
    replicate: int
    reshard_after_forward: bool | None
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.fsdp1, self.deepspeed) if name)


LEVELS = (
    Level("FULL_SHARD", "ZeRO-3", -1, 1, True),
    Level("SHARD_GRAD_OP", "ZeRO-2", -1, 1, False),
    Level("HYBRID_SHARD", "MiCS", -1, 0, True, "the replicate degree is the number of nodes in FSDP1; give it"),
    Level("_HYBRID_SHARD_ZERO2", "", -1, 0, False, "the replicate degree is the number of nodes in FSDP1; give it"),
    Level("NO_SHARD", "ZeRO-0", 1, -1, False, "replicas with averaged gradients, as DDP has them"),
    Level("", "ZeRO++ hpZ", -1, 1, None, "reshard_after_forward is the number of ranks in the secondary partition"),
    Level("", "ZeRO-1", -1, 1, False, "gradients are sharded too: the same values in less memory"),
)

# Spellings beside the names themselves.
_SPELLINGS = {"ddp": "NO_SHARD", "hpz": "ZeRO++ hpZ", "zeroplusplus": "ZeRO++ hpZ", "hsdp": "HYBRID_SHARD"}


def find_level(key: str, name: object) -> Level:
    """The level of a name: FSDP1's ("FULL_SHARD", also "ShardingStrategy.FULL_SHARD" and lower case) or DeepSpeed's
    ("ZeRO-3", "zero3", "stage 3"). Raises `ConfigError` for any other, and for a bare number, which Accelerate and
    DeepSpeed read differently."""
    if not isinstance(name, str):
        raise ConfigError(
            f"{key} = {name}: expected a name such as FULL_SHARD or ZeRO-3: the number 3 is NO_SHARD in Accelerate and "
            f"full sharding in DeepSpeed"
        )
    folded = {_folded(given): level for level in LEVELS for given in level.names}
    folded |= {spelling: folded[_folded(given)] for spelling, given in _SPELLINGS.items()}
    wanted = _folded(name.rpartition("ShardingStrategy.")[2])
    wanted = re.sub(r"^(zero)?stage", "zero", wanted)
    if wanted not in folded:
        nearest = folded[difflib.get_close_matches(wanted, folded, n=1, cutoff=0.0)[0]].names[0]
        raise ConfigError(f'{key} = "{name}": there is no such level; nearest valid: "{nearest}"')
    return folded[wanted]


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("++", "plusplus"))
