"""What accompanies each root that `fully_shard` made: the other side of `engine/seam.py`.

Connected    with FULLSHARD_GUARD=off, and without peers: opens connections, and reports failures. Nothing of it runs
             in a step in which nothing fails
Comparing    otherwise: also compares what the ranks of each mesh do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ..comm import Comparison, ReduceChannel
from ..engine.seam import Companion
from ..engine.unit import AnyRoot, Unit
from ..peers import Scope, mode
from .order import MessageOrder, own_by_root
from .recovery import Peers, Recovery, units_restored
from .step_facts import StepFacts
from .structure import Agreement


def accompany(root: AnyRoot) -> Companion:
    """What accompanies `root`, which is about to form."""
    peers, compared = Peers(root.units, root.thread), mode()
    alone = all(len(links.everyone) < 2 for unit in root.units for links in unit.links)
    return Connected(root, peers, compared) if alone or compared == "off" else Comparing(root, peers, compared)


class Connected(Companion):
    """Connects the units of `root`, and reports failures to `peers`. `mode`: what ranks compare."""

    _compares_order = False

    def __init__(self, root: AnyRoot, peers: Peers, mode: str) -> None:
        self._root, self.peers = root, peers
        self.scopes: Sequence[Scope] = peers.scopes
        # Pending comparisons; None when nothing is left.
        self.agreement: Agreement | None = Agreement(root, peers, mode)
        # On a device: what a load has to write after an abort there.
        self.recovery: Recovery | None = None
        self._is_formed = False

    def forms(self) -> None:
        assert self.agreement is not None
        self.agreement.refuse_other_structure()

    def connects(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.peers.open(unit)
        if not self._is_formed:
            self._is_formed = True
            self._formed()

    def _formed(self) -> None:
        """No rank differs, and connections are there."""
        own_by_root(self._root, self.peers.scopes, compares_order=self._compares_order)
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

    _compares_order = True

    def __init__(self, root: AnyRoot, peers: Peers, mode: str) -> None:
        super().__init__(root, peers, mode)
        self.order = MessageOrder(root.units)
        self.facts = StepFacts(root, peers, compares=mode == "full")
        # Whether the running outermost forward, or the last one, had gradients.
        self._with_gradients = True

    def forms(self) -> None:
        super().forms()
        self.order.formed()

    def _formed(self) -> None:
        self.facts.begin()
        if self.facts.compares and self._root.units[0].device.type != "cpu":
            self.order.compare_later(self.facts)
        super()._formed()

    def forward_begins(self, unit: Unit, *, nested: bool) -> None:
        grad = torch.is_grad_enabled()
        records = grad and unit.record.index == 0 and not nested
        trains = records and unit.modules[0].training
        if self.agreement is not None and not self.agreement.forward_begins(trains=trains):
            self.agreement = None
        if not nested:
            self.facts.forward_begins(trains=trains, records=records)
        self.order.forward_begins(grad=grad)
        self._with_gradients = grad

    def forward_ends(self, *, raised: bool = False) -> None:
        self.order.forward_ends()
        if not raised and not self._with_gradients:
            self.facts.forward_ends()

    def before(self, unit: Unit, kind: str, flags: tuple[str, ...] = ()) -> None:
        layout = ("keep" in flags, *map(attrgetter("trainable"), unit.groups)) if kind == "reduce" else ()
        for lane in self.order.lanes_of[unit]:
            lane.before(unit, kind, flags, layout)

    def carry(self, unit: Unit, position: int, channel: ReduceChannel, *, keep: bool) -> Comparison | None:
        return self.facts.carry(unit, position, channel, keep=keep)

    def backward_ends(self) -> None:
        self.facts.compare()

    def discards(self) -> None:
        self.facts.discard()

    def did(self, what: str, unit: Unit | None = None, position: int = 0, name: str = "") -> None:
        if what == "step":
            self.order.stepped()
        elif what == "settings":
            self.facts.settings_changed()
        elif unit is not None:
            self.facts.hooked(unit, position, name)


def loaded(unit: Unit, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
    """Parameters of `unit` were loaded: `names` of its model. `values`: those loaded from full tensors."""
    root = unit.root
    if root is not None and not root.provisional and isinstance(root.companion, Comparing):
        root.companion.facts.loaded(unit, names, values)
    units_restored([unit])


def about_to_count(root: AnyRoot, sizes: str) -> None:
    """All ranks are about to count something over the meshes of `root`, by a message of `sizes`."""
    if isinstance(root.companion, Connected):
        root.companion.meets()
    if isinstance(root.companion, Comparing):
        root.companion.order.announce("count", sizes)
