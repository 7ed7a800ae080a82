"""What the units of one root are about to send, compared with what its ranks agreed on before it is sent.

`guard/order.py` decides what is expected; here actions are made of units, and the others are asked. Each mesh has
an order of its own: the ranks of a pipeline stage, or of an expert, agree among themselves alone. Roots on one mesh
share its order, because a message of one waits for those of the other.

In the steady state a message costs about a microsecond here, and nothing is sent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING

import torch

from ..comm import Links, alike, exchanges
from ..guard import Action, Order, RanksDisagree, Scope, deviation, disagreement, parse_question, scope_of
from ..param import PendingGrad
from ..policy import Options
from .optimizer_facts import steps_taken
from .optimizer_steps import optimizer_steps

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..param import ShardedParam
    from .step_facts import StepFacts
    from .unit import Unit


# How many actions and sizes are kept of a root; a program that makes more of them makes them again.
_REMEMBERED = 50_000
# A program with so many forwards and no optimizer step begins anew with each: it may update its parameters by hand.
_FORWARDS = 64
# More optimizer steps than these between two messages are not told apart.
_MOST_STEPS = 16


class _ScopeOrder:
    """The order of one scope: that of this epoch, and what the next action has to say. Does not keep its scope."""

    def __init__(self, scope: Scope) -> None:
        scope.explained_by["order"] = _while_waiting
        self._epoch = scope.epoch
        self.order = Order()
        # Optimizer steps since the last action.
        self.stepped = 0
        self.last_step = -1
        # An outermost forward began, with or without gradients, and sent nothing yet.
        self.begun: bool | None = None
        # Forwards with gradients since the program began anew.
        self.forwards = 0
        # Roots whose last forward that sent something was one with gradients.
        self.trained: set[int] = set()
        # The last reduction was of gradients that are added to others.
        self.added = False

    def current(self, epoch: int) -> Order:
        """The order of the epoch that is now. After a failure ranks begin anew: some were further than others."""
        if self._epoch != epoch:
            self._epoch = epoch
            self.order = Order()
            self.stepped, self.begun, self.forwards = 0, None, 0
            self.trained.clear()
            self.added = False
        return self.order

    def flags(self, family: int) -> tuple[str, ...]:
        """What the next action says of the program around it. Once."""
        flags: tuple[str, ...] = ("stepped",) * min(self.stepped, _MOST_STEPS)
        if self.begun is False:
            flags += ("eval",)
            self.trained.discard(family)
        elif self.begun:
            self.forwards += 1
            if family not in self.trained or self.forwards > _FORWARDS:
                flags += ("train",)
                self.trained.add(family)
        if self.stepped or self.begun is False:
            self.forwards = 0
        self.stepped, self.begun = 0, None
        return flags

    def grad_flag(self, added: bool) -> tuple[str, ...]:
        """What a reduction says of the `.grad` that its sums are `added` to, or not: something where that changed."""
        if added is self.added:
            return ()
        self.added = added
        return ("added",) if added else ("cleared",)


def _explained(answers: dict[int, str]) -> str:
    ordered = {rank: text.removeprefix("order: ") for rank, text in answers.items() if text.startswith("order: ")}
    others = [rank for rank in answers if rank not in ordered]
    if ordered and others:  # these ask for something else than the order of messages
        asked = next(iter(ordered.values()))
        return _while_waiting(asked, [rank for rank, text in ordered.items() if text == asked], others[0])
    return disagreement({rank: parse_question(text) for rank, text in answers.items()})


def _while_waiting(question: str, asking: Sequence[int], here: int) -> str:
    return deviation(parse_question(question), asking, here)


_orders: weakref.WeakKeyDictionary[Scope, _ScopeOrder] = weakref.WeakKeyDictionary()


def _shared_order(scope: Scope) -> _ScopeOrder:
    return _orders.get(scope) or _orders.setdefault(scope, _ScopeOrder(scope))


def _compare(
    scope: Scope,
    order: Order,
    action: Action,
    *,
    in_band: bool = True,
    later: Callable[[Scope, int, Action], None] | None = None,
) -> None:
    """Compare `action`, which is not expected, with what the others are about to do; `RanksDisagree` on all. `in_band`
    off: by no message, for programs that count them. `later`: takes what is compared when a reduction arrives, where
    the host would have to wait for a device."""
    if later is not None and order.expected is None:
        later(scope, order.place, action)
        order.enter(action)
        return
    doing, scope.doing = scope.doing, action.doing
    try:
        if in_band and order.expected is None and alike(scope, f"{order.place}: {action}"):
            order.enter(action)
            return
        answers = scope.agree("order", str(order.question(action)))
    finally:
        scope.doing = doing
    if answers is None:
        order.enter(action)
        return
    # Some may have sent what others did not.
    scope.must_meet = True
    raise RanksDisagree(_explained(answers), what="order", by_rank=answers)


def compare(scope: Scope, action: Action) -> None:
    """`action`, of no root, is about to be sent. Raises `RanksDisagree` on all ranks of `scope` when one of them is
    about to send something else, and `PeerFailed` when one does not come because it failed."""
    order = _shared_order(scope).current(scope.epoch)
    if not order.follows(action):
        _compare(scope, order, action)


class _Lane:
    """The units of one root in one scope: `members[unit]` are the positions of its groups there."""

    def __init__(self, scope: Scope, first: Unit, members: dict[Unit, list[int]]) -> None:
        self.scope = scope
        self.shared = _shared_order(scope)
        # Of the root.
        self._first = first
        self._in_band = not all(_is_native(unit) for unit in members)
        self.later: Callable[[Scope, int, Action], None] | None = None
        self._members = members
        self._family = -1
        # In which it was introduced.
        self._order: Order | None = None
        # What is sent, "" for nothing, and the actions: made once.
        self._sizes: dict[tuple[object, ...], str] = {}
        self._actions: dict[tuple[object, ...], Action] = {}

    def before(self, unit: Unit, kind: str, flags: tuple[str, ...] = (), layout: tuple[object, ...] = ()) -> None:
        """`unit` is about to send. `layout`: beside the channels of the unit, what decides about sizes."""
        key = (kind, unit, layout, unit.channels.times_made)
        sizes = self._sizes.get(key)
        if sizes is None:
            if len(self._sizes) > _REMEMBERED:
                self._sizes.clear()
            sizes = self._sizes[key] = _sizes(unit, self._members[unit], kind, keep="keep" in flags)
        if sizes:
            if kind == "reduce":
                self.shared.current(self.scope.epoch)
                flags += self.shared.grad_flag(self._is_added(unit))
            self._next(kind, unit.record.index, unit.record.name, sizes, flags)

    def _is_added(self, unit: Unit) -> bool:
        """Whether its gradients will be added to those of earlier backwards. Which exist is equal on all ranks that
        did the same: presence travels with messages. So one for each group is looked at."""
        for position in self._members[unit]:
            group = unit.groups[position]
            if group.trainable and not isinstance(
                group.params[group.trainable[0]].sharded.grad, NoneType | PendingGrad
            ):
                return True
        return False

    def announce(self, kind: str, sizes: str) -> None:
        """The root is about to send something that is none of a unit's parameters or gradients."""
        self._next(kind, 0, self._first.record.name, sizes, ())

    def _next(self, kind: str, index: int, name: str, sizes: str, flags: tuple[str, ...]) -> None:
        shared = self.shared
        order = shared.current(self.scope.epoch)
        if order is not self._order:
            self._introduce(order)
        if shared.stepped or shared.begun is not None:
            flags = (*shared.flags(self._family), *flags)
        key = (kind, index, sizes, flags)
        action = self._actions.get(key)
        if action is None:
            if len(self._actions) > _REMEMBERED:
                self._actions.clear()
            action = self._actions[key] = Action(kind, self._family, index, name, sizes, flags)
        if not order.follows(action):
            _compare(self.scope, order, action, in_band=self._in_band, later=self.later)

    def _introduce(self, order: Order) -> None:
        known = [
            (kind, unit.record.index, unit.record.name, sizes)
            for unit, positions in self._members.items()
            for kind in ("gather", "widen", "reduce")
            if (sizes := _sizes(unit, positions, kind, now=False))
        ]
        form = order.introduce(self._first.record.name, known)
        if not order.follows(form):
            _compare(self.scope, order, form, in_band=self._in_band)
        order.introduced()
        self._order, self._family = order, form.family
        self._actions = {}


def _sizes(unit: Unit, positions: Sequence[int], kind: str, *, keep: bool = False, now: bool = True) -> str:
    """What `unit` sends, by group: dtype and elements of one rank's part. "": nothing. `now` off: what it would send
    with the parameters that require gradients, before it was full for the first time."""
    texts = []
    for position in positions:
        group, links = unit.groups[position], unit.links[position]
        if kind == "reduce":
            trainable = group.trainable if now else tuple(i for i, p in enumerate(group.params) if _trains(p))
            to_replicas = links.replicate is not None and links.replicate.world > 1 and not keep
            if trainable and (links.shard.world > 1 or to_replicas):
                numel = sum(group.pack.segments[i].padded_numel for i in trainable)
                which = "" if len(trainable) == len(group.params) else "@" + ".".join(map(str, trainable))
                texts.append(f"{_name(group.precision.wire)}*{numel}{which}{_way(unit, links)}")
            continue
        block = links.block if kind == "widen" else None
        if kind == "widen" and not unit.record.narrows:
            continue
        if links.shard.world > 1:
            among = f"/{block.group.world}" if block is not None else ""
            texts.append(f"{_name(group.precision.compute)}*{group.pack.padded_local_numel}{among}")
    return "+".join(texts)


def _way(unit: Unit, links: Links) -> str:
    """How gradients are reduced, where that is not in one exchange."""
    assert unit.root is not None
    strategy = unit.settings.controls.strategy(unit.root.options.communication)
    if strategy == "torch":
        return "/torch"
    return "" if links.shard.world == 1 or exchanges(links, strategy) else "/native"


def _is_native(unit: Unit) -> bool:
    """Whether its messages are those of torch's FSDP2, one for one."""
    options = unit.root.options if unit.root is not None else Options.current()
    return unit.settings.controls.strategy(options.communication) == "torch"


def _trains(param: ShardedParam) -> bool:
    return bool(param.sharded.requires_grad)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MessageOrder:
    """What the units of one root are about to send, for all of their scopes. Call each method before it is sent.

    Raises `RanksDisagree` on every rank of a scope when one of them is about to send something else, and `PeerFailed`
    when one does not come because it failed. Where nobody is to be asked nothing is done.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        members: dict[Scope, dict[Unit, list[int]]] = {}
        for unit in units:
            for position, links in enumerate(unit.links):
                scope = scope_of(links.everyone)
                if scope is not None:
                    members.setdefault(scope, {}).setdefault(unit, []).append(position)
        # Runs the model, and steps it. What a backward reports may come from a thread of the engine.
        self._thread = threading.get_ident()
        self._lanes = [_Lane(scope, units[0], here) for scope, here in members.items()]
        self._of = {
            unit: tuple(lane for lane, here in zip(self._lanes, members.values(), strict=True) if unit in here)
            for unit in units
        }

    def compare_later(self, facts: StepFacts) -> None:
        """On a device: what no script is known for is compared with the facts of a step (guard/facts.py)."""
        for lane in self._lanes:
            lane.later = facts.sent

    def gather(self, unit: Unit) -> None:
        """The parameters of `unit` are about to be gathered."""
        for lane in self._of[unit]:
            lane.before(unit, "gather")

    def widen(self, unit: Unit) -> None:
        """What is kept of them is."""
        for lane in self._of[unit]:
            lane.before(unit, "widen")

    def reduce(self, unit: Unit, *, accumulated: bool, partials: bool, keep: bool) -> None:
        """The gradients of `unit` are about to be sent."""
        lanes = self._of[unit]
        if not lanes:
            return
        flags: tuple[str, ...] = ("accumulated",) if accumulated else ()
        if partials or keep:
            flags += ("partials",) * partials + ("keep",) * keep
        layout = (keep, *(group.trainable for group in unit.groups))
        for lane in lanes:
            lane.before(unit, "reduce", flags, layout)

    def announce(self, kind: str, sizes: str) -> None:
        """Something else is about to be sent, over every mesh of the root; `kind` and `sizes` are words."""
        for lane in self._lanes:
            lane.announce(kind, sizes)

    def forward_begins(self, *, grad: bool) -> None:
        """An outermost forward does; `grad`: a backward may follow."""
        for lane in self._lanes:
            lane.shared.current(lane.scope.epoch)
            lane.shared.begun = grad

    def forward_ends(self) -> None:
        """It is over. When it sent nothing it is no matter of the others: what is full already may be evaluated by one
        rank alone."""
        for lane in self._lanes:
            lane.shared.begun = None

    def stepped(self) -> None:
        """Parameters of the root took an optimizer step, the last one of the thread that runs it."""
        for lane in self._lanes:
            note_stepped(lane.scope, self._thread)


def note_stepped(scope: Scope, thread: int) -> None:
    """Parameters on the mesh of `scope` took an optimizer step, the last one of `thread`, which runs their model."""
    shared, step = _shared_order(scope), optimizer_steps(thread)
    shared.current(scope.epoch)
    # An optimizer may have parameters of several roots on one mesh.
    if shared.last_step != step:
        shared.last_step = step
        shared.stepped += 1
        steps_taken(scope).count += 1


def changes_parameters(optimizer: Optimizer) -> bool:
    """Whether its steps do. torch makes the state of an optimizer that has none by a step with a rate of zero, when a
    checkpoint is loaded into it or written from it: on those ranks alone that have none."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    # A rate that lives on a device is not asked for: that would wait for the device.
    known = [rate for rate in rates if not (isinstance(rate, torch.Tensor) and rate.device.type != "cpu")]
    return len(known) < len(rates) or any(rate is None or float(rate) != 0.0 for rate in known)
