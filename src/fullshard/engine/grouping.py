"""Which parameters of a unit travel together: each group has one mesh, and parameters of equal dtypes.

Several dtypes in a unit are several groups, each with its own flat buffer and messages: storage dtypes, compute dtypes
that `param_dtype_override_fn` chose, and `grad_dtype` of parameters. Packed bits and numbers are apart, and each tensor
extension is alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._torch import grad_dtype_of
from ..param import ExtensionGroup, Found, ParamGroup, Placing, has_extension, holds_bits
from ..policy import Precision, Wanted, resolve_precision, wanted_of
from ..policy.policies import GradDtype, MixedPrecisionLike


def grouped(
    found: Sequence[Found], placing: Placing, policy: MixedPrecisionLike, follows: str
) -> Iterator[tuple[list[Found], ParamGroup]]:
    """The groups of `found`, in the order of their first parameters. `follows`: as in `Wanted`.

    Calls the policy's `param_dtype_override_fn` with each parameter, in their order; `ValueError` for a wrong result.
    """
    wanted = [wanted_of(policy, item.parameter, item.name, follows) for item in found]
    # A cast would destroy packed bits.
    wanted = [Wanted(follows=follows) if holds_bits(f.parameter) else w for f, w in zip(found, wanted, strict=True)]
    wanted = _reduced_together([f.parameter for f in found], wanted)
    groups: dict[object, list[Found]] = {}
    precisions: dict[object, Precision] = {}
    for item, each in zip(found, wanted, strict=True):
        alone = has_extension(item.parameter, item.name)
        key: object = id(item) if alone else (item.parameter.dtype, holds_bits(item.parameter), each)
        groups.setdefault(key, []).append(item)
        precisions[key] = resolve_precision(each, item.parameter.dtype)
    for key, same in groups.items():
        yield same, _group(same, precisions[key], placing, policy)


def _reduced_together(parameters: Sequence[nn.Parameter], wanted: Sequence[Wanted]) -> list[Wanted]:
    """`wanted` of each of `parameters`, which knows of the others that are reduced in the same dtype."""
    kinds: dict[torch.dtype, dict[GradDtype, None]] = {}
    for parameter, each in zip(parameters, wanted, strict=True):
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, {})[each.grad_dtype] = None
    found = []
    for parameter, each in zip(parameters, wanted, strict=True):
        beside = tuple(kind for kind in kinds.get(parameter.dtype, ()) if kind != each.grad_dtype)
        found.append(each._replace(beside=beside))
    return found


def _group(found: Sequence[Found], precision: Precision, placing: Placing, policy: Any) -> ParamGroup:
    if has_extension(found[0].parameter, found[0].name):
        return ExtensionGroup(found, precision, placing, policy)
    return ParamGroup(found, precision, placing)


def regrouped(groups: Sequence[ParamGroup]) -> list[tuple[int, ParamGroup]] | None:
    """The groups anew, each with the position of the one that it was part of, if the user set or changed the
    `grad_dtype` of sharded parameters since `groups` were made; else None."""
    found = [[grad_dtype_of(param.sharded) for param in group.params] for group in groups]
    if all(kind == group.precision.wanted.grad_dtype for group, row in zip(groups, found, strict=True) for kind in row):
        return None
    wanted: dict[int, Wanted] = {}
    for placing in {id(group.placing): group.placing for group in groups}.values():
        params = [
            (param.sharded, group.precision.wanted._replace(grad_dtype=kind))
            for group, row in zip(groups, found, strict=True)
            if group.placing is placing
            for param, kind in zip(group.params, row, strict=True)
        ]
        together = _reduced_together([parameter for parameter, _ in params], [each for _, each in params])
        wanted |= {id(parameter): each for (parameter, _), each in zip(params, together, strict=True)}
    made = []
    for position, group in enumerate(groups):
        parts: dict[Wanted, list[Any]] = {}
        for param in group.params:
            parts.setdefault(wanted[id(param.sharded)], []).append(param)
        for each, same in parts.items():
            precision = resolve_precision(each, group.precision.storage)
            made.append((position, group.converted(precision, None if len(parts) == 1 else same)))
    return made
