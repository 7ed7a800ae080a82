"""Choices of the runtime that are not arguments of `fully_shard`: read once, when a root first runs.

FULLSHARD_PREFETCH        how many units a forward gathers ahead along the recorded order (default 1; 0: none)
FULLSHARD_PREFETCH_BYTES  in its place, and in backward too: how many bytes of gathers may be ahead (default: none set)
FULLSHARD_REDUCTIONS      how many reductions may be in flight before the oldest is waited for (default 2)
FULLSHARD_GRADIENT_BYTES  how many bytes unreduced gradients and their messages may take (default: none set)
FULLSHARD_COMMUNICATION   "auto" (default): the fastest strategy measured for the backend, in two hops between nodes;
                          "torch": one all-gather and one reduce-scatter per unit, as FSDP2;
                          "all-to-all": "auto", and gradients in one hop wherever ranks are;
                          "hierarchical": "auto", and gradients in two hops: within nodes, then between them
FULLSHARD_LOCAL_WORLD_SIZE  how many consecutive ranks are on a node (default: LOCAL_WORLD_SIZE, which torchrun sets;
                          where there is neither, they are all on one)
FULLSHARD_PARTIAL_SUMS    "sum" (default): what a node has of a gradient goes to others in the dtype of sums (float32);
                          "wire": as its gradients did, where that is bfloat16
FULLSHARD_WATCH           "auto" (default): saved weights are watched in a unit's first forwards, and as long as its
                          backward reads weights that no gradient of an output announced; "always"; "never"
FULLSHARD_EVAL_ROOT       "free" (default): a root that stays full between forward and backward by default (not by an
                          explicit reshard_after_forward=False) is freed after a forward that no backward can follow;
                          "keep": it stays, as in FSDP2, for the next forward
FULLSHARD_CHECK           1: check every command against the lifecycle's invariants (slower)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

COMMUNICATION = ("auto", "torch", "all-to-all", "hierarchical")
PARTIAL_SUMS = ("sum", "wire")
WATCH = ("auto", "always", "never")
EVAL_ROOT = ("free", "keep")


@dataclass(frozen=True)
class Options:
    """The resolved choices of one root."""

    prefetch_depth: int = 1
    prefetch_nbytes: int | None = None
    gradient_nbytes: int | None = None
    reductions_in_flight: int = 2
    communication: str = "auto"
    local_world: int | None = None
    partial_sums: str = "sum"
    watch: str = "auto"
    eval_root: str = "free"
    check: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Options:
        """Read the variables above; `ValueError` names the variable, its value and what it may be."""
        source = os.environ if environ is None else environ
        return cls(
            prefetch_depth=_count(source, "FULLSHARD_PREFETCH", 1, at_least=0),
            prefetch_nbytes=_count(source, "FULLSHARD_PREFETCH_BYTES", None, at_least=0),
            gradient_nbytes=_count(source, "FULLSHARD_GRADIENT_BYTES", None, at_least=0),
            reductions_in_flight=_count(source, "FULLSHARD_REDUCTIONS", 2, at_least=1),
            communication=_choice(source, "FULLSHARD_COMMUNICATION", COMMUNICATION),
            local_world=_local_world(source),
            partial_sums=_choice(source, "FULLSHARD_PARTIAL_SUMS", PARTIAL_SUMS),
            watch=_choice(source, "FULLSHARD_WATCH", WATCH),
            eval_root=_choice(source, "FULLSHARD_EVAL_ROOT", EVAL_ROOT),
            check=_count(source, "FULLSHARD_CHECK", 0, at_least=0) > 0,
        )


def _choice(source: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = source.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")
    return value


def _local_world(source: Mapping[str, str]) -> int | None:
    chosen = _count(source, "FULLSHARD_LOCAL_WORLD_SIZE", None, at_least=1)
    return chosen if chosen is not None else _count(source, "LOCAL_WORLD_SIZE", None, at_least=1)


@overload
def _count(source: Mapping[str, str], name: str, default: int, *, at_least: int) -> int: ...
@overload
def _count(source: Mapping[str, str], name: str, default: None, *, at_least: int) -> int | None: ...
def _count(source: Mapping[str, str], name: str, default: int | None, *, at_least: int) -> int | None:
    text = source.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise ValueError(f"{name}: expected a whole number >= {at_least}, found {text!r}")
    return value
