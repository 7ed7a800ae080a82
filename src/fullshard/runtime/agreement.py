"""Ranks agree at the beginning: what is about to be trained is the same on all of them, or an error says what is not.

    structure    when a root forms, before connections are made; of a unit that `unshard` gathers earlier: describe.py.
    values       in the first forward of the root: the digests of full parameters that `fully_shard` noted
                 (param/initial.py), but for those whose shards were written since, on any rank
    buffers      in the first forward, where other numbers are an error, and other integers (indices, masks, which ranks
                 may have of their own) a warning; and in the 2nd, 16th, 128th, ... that trains, until a warning was
                 given: drift.py

A question is one small message for each mesh (comm/control.py: three requests to the store), the digest of everything;
only where that differs do ranks tell more. All ranks of a mesh come to the same answer, so all of them raise or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm import sum_over
from ..guard import RanksDisagree, Scope, ask, first_difference, scope_of, shown_ranks, structure, tell, variants
from ..param import ShardedParam, full_digests, is_written
from .describe import describe, meshes_of, ranks_of
from .drift import Drift, buffers_on, differing, shown
from .names import parameter_names

if TYPE_CHECKING:
    from .root import Root

# Later looks at the buffers: the 2nd forward that trains, and then each time after eight times as many.
_FIRST_LOOK, _LOOKS = 2, 8


class _OnMesh(NamedTuple):
    """A mesh of the root, and its ranks as those who answer."""

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    scope: Scope


class _Looks:
    """When the buffers of a scope are looked at again, at the same forward on all of its ranks: after a failure these
    may have begun other numbers of forwards, and therefore count from their last meeting on."""

    def __init__(self, on: _OnMesh) -> None:
        self.on = on
        self._epoch = on.scope.epoch
        self._trained, self._next = 0, _FIRST_LOOK

    def is_due(self) -> bool:
        """A forward that trains begins; whether it is one of those."""
        if self._epoch != self.on.scope.epoch:
            self._epoch = self.on.scope.epoch
            self._trained, self._next = 0, _FIRST_LOOK
        self._trained += 1
        due = self._trained == self._next
        if due:
            self._next *= _LOOKS
        return due


class Agreement:
    """What one root still has to compare with its peers."""

    def __init__(self, root: Root) -> None:
        self._root = root
        kind, meshes = root.guard_mode, meshes_of(root.units)
        found = ((mesh, ranks, scope_of(ranks)) for ranks, mesh in meshes.items())
        self._scopes = [_OnMesh(mesh, ranks, scope) for mesh, ranks, scope in found if scope is not None]
        self._values = kind == "full" and bool(self._scopes)
        # Of those whose buffers were equal so far.
        self._looks = [_Looks(scope) for scope in self._scopes] if kind == "full" else []

    def refuse_other_structure(self) -> None:
        """Before anything is sent, and before connections are made. Raises `RanksDisagree` on all ranks of a mesh."""
        self._root.peers.meet()
        self._for_each_scope(_refuse_other_structure)

    def forward_begins(self, *, trains: bool) -> bool:
        """A forward begins, and everything has a value; whether anything is left to be compared in later ones.

        trains: it is one of the whole model, in training mode, with gradients. Raises `RanksDisagree`.
        """
        if self._values:
            self._for_each_scope(_refuse_other_values)
            self._for_each_scope(self._refuse_other_buffers)
            self._values = False
            for unit in self._root.units:
                for param in unit.params:
                    param.initial = None
        for looks in list(self._looks) if trains else ():
            if looks.is_due():
                found = self._differing_buffers(looks.on)
                self._warn_of(looks.on, found, "since the training began: nothing averages them")
        return bool(self._looks)

    def _for_each_scope(self, refuse: Callable[[Root, _OnMesh], None]) -> None:
        for scope in self._scopes:
            try:
                refuse(self._root, scope)
            except RanksDisagree as error:
                self._root.peers.disagree_on(scope.scope, error)
                scope.scope.has_raised = True
                raise

    def _differing_buffers(self, scope: _OnMesh) -> list[Drift]:
        return differing(scope.scope, "buffer", buffers_on(self._root.units[0].module, scope.ranks))

    def _refuse_other_buffers(self, root: Root, scope: _OnMesh) -> None:
        found = self._differing_buffers(scope)
        buffers = buffers_on(root.units[0].module, scope.ranks)
        refused = [one for one in found if buffers[one.name].is_floating_point() or buffers[one.name].is_complex()]
        if refused:
            raise RanksDisagree(
                f"{shown(refused)}: expected the same values of a buffer on every rank, found others; call "
                f"torch.manual_seed with the same number on all ranks before the model is built, or "
                f"fullshard.sync_module_states(model, buffers_only=True) (FULLSHARD_GUARD=structure: do not compare "
                f"values)",
                what=f"{refused[0].name} initial values",
            )
        self._warn_of(scope, found, "from the beginning")

    def _warn_of(self, scope: _OnMesh, found: Sequence[Drift], when: str) -> None:
        if found:
            self._looks = [looks for looks in self._looks if looks.on is not scope]
            warnings.warn(
                f"buffers differ between ranks {when}: {shown(found)}. If they should be equal: SyncBatchNorm in the "
                f"place of BatchNorm, or fullshard.sync_module_states(model, buffers_only=True) before evaluation and "
                f"before a checkpoint; fullshard.find_drift(model) looks again",
                stacklevel=2,
            )


def _refuse_other_structure(root: Root, scope: _OnMesh) -> None:
    text = structure.dumps(describe(root, scope.ranks))
    digests = ask(scope.scope, "the units and parameters of the model", text)
    if digests is None:
        return
    # One rank of each variant tells what it has.
    tells = {ranks[0] for ranks in variants(digests).values()}
    told = tell(scope.scope, "units and parameters in full", text if scope.scope.rank in tells else "")
    items = {digests[rank]: structure.loads(told[rank]) for rank in tells}
    difference = first_difference({rank: items[digest] for rank, digest in digests.items()})
    assert difference is not None
    raise RanksDisagree(
        difference.text,
        what=f"{difference.item.name} {difference.fact}".strip(),
        by_rank={rank: value or "" for ranks, value in difference.values for rank in ranks},
    )


def _refuse_other_values(root: Root, scope: _OnMesh) -> None:
    params = [
        (param, group.placing.world)
        for unit in root.units
        for group in unit.groups
        if ranks_of(group.placing.mesh) == scope.ranks
        for param in group.params
    ]
    noted = full_digests([param for param, _ in params])
    if ask(scope.scope, "the initial values of the model", repr(noted)) is None:
        return
    # Not those that some rank wrote since, or had no value of: one without rows of a parameter sees nothing of it.
    mine = torch.tensor([is_written(param) for param, _ in params], dtype=torch.int32)
    written = sum_over(scope.mesh, mine).tolist()
    asked = [i for i, count in enumerate(written) if not count]
    if any(written):
        # Values were loaded. What one rank has alone may have been given the value that it had, which leaves no trace.
        asked = [i for i in asked if not _is_one_rank_s(*params[i], len(scope.ranks))]
    text = ",".join(_hexadecimal(noted[i]) for i in asked)
    if ask(scope.scope, "initial values that nobody wrote since", text) is None:
        return
    told = {rank: values.split(",") for rank, values in tell(scope.scope, "initial values in full", text).items()}
    columns = {i: {rank: values[place] for rank, values in told.items()} for place, i in enumerate(asked)}
    differ = [i for i, values in columns.items() if len(set(values.values())) > 1]
    name = parameter_names(root.units[0].module, root.units)[params[differ[0]][0]]
    groups = list(variants(columns[differ[0]]).values())
    found = "each rank's are others" if len(groups) == len(scope.ranks) > 2 else _unlike(groups)
    raise RanksDisagree(
        f"{name}: expected the same values on every rank when fully_shard cut it, found that {found} "
        f"({len(differ)} of {len(params)} parameters differ): the model would be made of pieces of several; call "
        f"torch.manual_seed with the same number on all ranks before the model is built (with materialize: before "
        f"each init, which may not depend on the rank), or fullshard.sync_module_states(model) before fully_shard, or "
        f"load a checkpoint before the first forward (FULLSHARD_GUARD=structure: do not compare values)",
        what=f"{name} initial values",
        by_rank=columns[differ[0]],
    )


def _unlike(groups: Sequence[Sequence[int]]) -> str:
    return f"{shown_ranks(groups[0])} had others than " + ", and these than ".join(map(shown_ranks, groups[1:4]))


def _is_one_rank_s(param: ShardedParam, world: int, ranks: int) -> bool:
    """Whether one of the `ranks` of the mesh, `world` of which share it, has all rows of `param`."""
    return world == ranks and sum(param.layout.rows(rank) > 0 for rank in range(world)) == 1


def _hexadecimal(digest: int | None) -> str:
    return "none" if digest is None else f"{digest & (1 << 64) - 1:016x}"
