"""Accompanies each root that `fully_shard` made: the other side of `engine/seam.py`.

Connected    with FULLSHARD_GUARD=off, and without peers: opens connections, and reports failures. Nothing of it runs
             in a step in which nothing fails
Comparing    otherwise: also compares what the ranks of each mesh do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..comm import Comparison, ReduceChannel
from ..engine.seam import Companion
from ..engine.unit import AnyRoot, Unit
from ..peers import Scope, mode, scope_of
from .calls import Calls, note_stepped, own_by_root
from .ledger import program_of
from .mesh_ledger import MeshLedger, MessageOrder
from .recovery import Peers, Recovery, units_restored
from .structure import refuse_other_structure, refuse_other_values


def accompany(root: AnyRoot) -> Companion:
    """Returns the companion of `root`, which is about to form."""
    peers, compared = Peers(root.units, root.thread), mode()
    alone = all(len(links.everyone) < 2 for unit in root.units for links in unit.links)
    return Connected(root, peers, compared) if alone or compared == "off" else Comparing(root, peers, compared)


class Connected(Companion):
    """Connects the units of `root`, and reports failures to `peers`. `mode`: what ranks compare."""

    _compares = False

    def __init__(self, root: AnyRoot, peers: Peers, mode: str) -> None:
        self._root, self.peers, self._mode = root, peers, mode
        self.scopes: Sequence[Scope] = peers.scopes
        # A record of what a load has to write after an abort on a device; None on a CPU.
        self.recovery: Recovery | None = None
        self._is_formed = False

    def forms(self) -> None:
        refuse_other_structure(self._root, self.peers, self._mode)

    def connects(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.peers.open(unit)
        if not self._is_formed:
            self._is_formed = True
            self._formed()

    def _formed(self) -> None:
        """No rank differs, and connections are there."""
        own_by_root(self._root, self.peers.scopes, compares=self._compares)
        first = self._root.units[0]
        if first.device.type != "cpu" and self.scopes and not self._root.provisional:
            self.recovery = Recovery(first.module, self._root.units, self.peers.scopes)

    def meets(self) -> bool:
        return self.peers.meet()

    def unproven(self, units: Sequence[Unit], some: bool) -> bool:
        # Ranks may differ: rank 0 may build the model with values, the others on the meta device. Asks one question for
        # each scope if ranks are equal.
        mine = "".join("01"[unit.unproven] for unit in units)
        for scope in self.peers.scopes:
            differing = scope.agree("units with memory that was made without values", f"{int(some)} {mine}")
            for theirs in (differing or {}).values():
                any_, _, bits = theirs.partition(" ")
                some = some or any_ == "1"
                for unit, bit in zip(units, bits, strict=False):
                    # Only units of this scope: other scopes may have other units.
                    unit.unproven = unit.unproven or bit == "1"
        return some

    def failed(self, error: BaseException | None, where: str) -> None:
        self.peers.publish(error, where)


class Comparing(Connected):
    """Compares what the ranks of each mesh of `root` have and do."""

    _compares = True

    def __init__(self, root: AnyRoot, peers: Peers, mode: str) -> None:
        super().__init__(root, peers, mode)
        members: dict[Scope, dict[Unit, list[int]]] = {}
        for unit in root.units:
            for position, links in enumerate(unit.links):
                scope = scope_of(links.everyone)
                if scope is not None:
                    members.setdefault(scope, {}).setdefault(unit, []).append(position)
        self.orders = [MessageOrder(scope, here) for scope, here in members.items()]
        self._orders_of = {unit: [order for order in self.orders if unit in order.members] for unit in root.units}
        # The ledgers by the ranks of their mesh, and for each group of a unit; without any nothing is recorded.
        self.meshes: dict[tuple[int, ...], MeshLedger] = {}
        self._meshes_of: dict[Unit, list[MeshLedger | None]] = {}
        self.calls = Calls(root, self.meshes)
        # Whether initial values are still to be compared.
        self._compares_values = mode == "full"
        # Whether the running outermost forward, or the last one, had gradients.
        self._with_gradients = True

    def forms(self) -> None:
        super().forms()
        for order in self.orders:
            order.name_root()

    def _formed(self) -> None:
        root = self._root
        if self._mode == "full" and not root.provisional:
            for unit in root.units:
                self._meshes_of[unit] = [self._mesh(unit, i, links.everyone) for i, links in enumerate(unit.links)]
            self.calls.begin()
            if root.units[0].device.type != "cpu":
                for order in self.orders:
                    order.later = self.meshes[order.scope.ranks].note_message
        super()._formed()

    def _mesh(self, unit: Unit, position: int, everyone: Sequence[int]) -> MeshLedger | None:
        """The ledger of group `position` of `unit`; None for a single rank."""
        ranks = tuple(sorted(everyone))
        if len(ranks) < 2:
            return None
        if ranks not in self.meshes:
            self.meshes[ranks] = MeshLedger(self._root, self.peers, ranks, partial(self.calls.listed_on, ranks))
        self.meshes[ranks].members.setdefault(unit, []).append(position)
        return self.meshes[ranks]

    def forward_begins(self, unit: Unit, *, nested: bool) -> None:
        grad = torch.is_grad_enabled()
        records = grad and unit.record.index == 0 and not nested
        trains = records and unit.modules[0].training
        if self._compares_values:
            warned = refuse_other_values(self._root, self.peers)
            for ranks, mesh in self.meshes.items():
                mesh.compares_buffers = ranks not in warned
            self._compares_values = False
        if not nested:
            for mesh in self.meshes.values():
                mesh.forward_begins(trains=trains, records=records)
        for order in self.orders:
            program_of(order.scope).begun = grad
        self._with_gradients = grad

    def forward_ends(self, *, raised: bool = False) -> None:
        # A forward that sent nothing is not compared: one rank alone may evaluate a model that is already unsharded.
        for order in self.orders:
            order.program.begun = None
        if not raised and not self._with_gradients:
            for mesh in self.meshes.values():
                mesh.forward_ends()

    def before(self, unit: Unit, kind: str, flags: tuple[str, ...] = ()) -> None:
        for order in self._orders_of[unit]:
            order.before(unit, kind, flags)

    def carry(self, unit: Unit, position: int, channel: ReduceChannel, *, keep: bool) -> Comparison | None:
        mesh = self._meshes_of[unit][position] if self._meshes_of else None
        return None if mesh is None else mesh.carry(unit, channel, keep=keep)

    def backward_ends(self) -> None:
        for mesh in self.meshes.values():
            mesh.backward_ends()

    def discards(self) -> None:
        for mesh in self.meshes.values():
            mesh.sent = None

    def did(self, what: str, unit: Unit | None = None, position: int = 0, name: str = "") -> None:
        if what == "step":
            for order in self.orders:
                note_stepped(order.scope, self._root.thread)
        elif what == "settings":
            for mesh in self.meshes.values():
                mesh.change_settings()
        elif unit is not None and self._meshes_of and (own := self._meshes_of[unit][position]) is not None:
            own.ledger.hooked.append(f"{unit.record.name}.{name}".lstrip("."))


def loaded(unit: Unit, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
    """Parameters of `unit` were loaded: `names` of its model. `values`: those loaded from full tensors."""
    root = unit.root
    if root is not None and not root.provisional and isinstance(root.companion, Comparing):
        root.companion.calls.loaded(unit, names, values)
    units_restored([unit])


def about_to_count(root: AnyRoot, sizes: str) -> None:
    """All ranks are about to count something over the meshes of `root`, by a message of `sizes`."""
    if isinstance(root.companion, Connected):
        root.companion.meets()
    if isinstance(root.companion, Comparing):
        for order in root.companion.orders:
            order.before(root.units[0], "count", sizes=sizes)
