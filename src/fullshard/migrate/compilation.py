"""Compiling the blocks of a model beside the other axes, and what torch gets wrong there.

The order is: layers are divided, activations are recomputed, blocks are compiled, then sharded, and the optimizer gets
the result. torch's faults are refused by name here, so that no run ends in an error from inside torch, or trains
with a gradient that is missing. tests/procs/test_compiled_axes.py reproduces each of them without this package.
"""

from __future__ import annotations

import torch
from torch import nn

from ..keys import ConfigError, invalid
from .config import ShardingConfig
from .tensor_parallel import Division
from .tree import Tree
from .wrapping import UnitPlan

# Whether torch recomputes compiled blocks whose layers are divided.
RECOMPUTES = torch.torch_version.TorchVersion(torch.__version__) >= "2.14"


def compile_block(module: nn.Module, how: bool | str) -> None:
    """Compile `module` in place, by the backend `how` or torch's own choice; its name stays."""
    module.compile(backend="inductor" if how is True else how)


def is_block(plan: UnitPlan) -> bool:
    """Whether a unit is neither the root, nor an embedding, nor experts, nor the last one."""
    return plan.why not in ("embedding", "root", "experts") and not plan.last


def refuse_faults(tree: Tree, config: ShardingConfig, division: Division) -> None:
    """Raise `ConfigError` for what torch computes wrongly, or fails in, with compiled blocks beside divided layers."""
    if not config.wrap.compile:
        return
    for name in ("pipeline_parallel_degree", "expert_parallel_degree", "context_parallel_degree"):
        if getattr(config.parallelism, name) > 1:
            problem = "was not run with compiled blocks; compile them in your own code"
            raise invalid(f"parallelism.{name}", getattr(config.parallelism, name), problem, "compile = false")
    cut = [name for name, style in division.styles.items() if style.divides and _looks_up(tree.modules[name])]
    if cut:
        raise ConfigError(
            f"wrap.compile: expected embeddings that are whole beside compiled blocks, found {cut[0]} divided as "
            f'"{division.styles[cut[0]]}": in torch the gradient that comes back from a compiled block is no DTensor, '
            f"and backward raises AttributeError (with torch's FSDP2 the embedding silently gets none); nearest valid: "
            f'parallelism.styles = {{"{cut[0]}" = "keep"}} with enable_sequence_parallel = false, or compile = false'
        )
    keys = config.activation_checkpointing
    if division.styles and keys.at != "none" and keys.recompute and not RECOMPUTES:
        raise ConfigError(
            "wrap.compile: expected no recomputation of compiled blocks whose layers are divided: torch before 2.14 "
            "raises AssertionError for what their forward saves; nearest valid: activation_checkpointing = false, or "
            "compile = false"
        )


def _looks_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
