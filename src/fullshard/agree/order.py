"""Compares each message of a root with the order that its ranks agreed on, before it is sent.

`actions.py` decides which message is expected; this module describes the messages of units and asks the other
ranks. Each mesh has its own order: the ranks of a pipeline stage or an expert agree among themselves. Roots on one mesh
share its order, because their messages wait for one another.

In the steady state a message costs about a microsecond here, and nothing is sent.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch import current_backward
from ..comm import Links, alike
from ..engine.names import clean_name, parameter_names
from ..engine.optimizer_steps import optimizer_steps, tell_each_step
from ..param import Owner, PendingGrad, claim
from ..peers import RanksDisagree, Scope, is_current, scope_of
from .actions import Action, Order, deviation, disagreement, parse_question
from .optimizer_facts import changes_parameters
from .recovery import lost_error, steps_taken

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..engine.unit import AnyRoot, Unit
    from .step_facts import StepFacts


# Cached actions and sizes per root; the cache is cleared beyond that.
_REMEMBERED = 50_000
# After so many forwards without an optimizer step, each forward starts a new program: it may update parameters itself.
_FORWARDS = 64
# More optimizer steps than this between two messages count as this many.
_MOST_STEPS = 16


class _ScopeOrder:
    """The order of one scope in its current epoch, and the flags of the next action. Does not hold its scope."""

    def __init__(self, scope: Scope) -> None:
        scope.explained_by["order"] = _while_waiting
        self.epoch = scope.epoch
        self.order = Order()
        # Optimizer steps since the last action.
        self.stepped = 0
        self.last_step = -1
        # An outermost forward began and sent nothing yet: with gradients or not; None: no such forward.
        self.begun: bool | None = None
        # Forwards with gradients since the program was restarted.
        self.forwards = 0
        # Roots whose last forward with messages had gradients.
        self.trained: set[str] = set()
        # The last reduction was added to existing gradients.
        self.added = False

    def restart(self, epoch: int) -> None:
        """A new epoch began: after a failure some ranks were further than others."""
        self.epoch = epoch
        self.order = Order()
        self.stepped, self.begun, self.forwards = 0, None, 0
        self.trained.clear()
        self.added = False

    def flags(self, root: str) -> tuple[str, ...]:
        """The flags that describe the program around the next action. Consumed by the call."""
        flags: tuple[str, ...] = ("stepped",) * min(self.stepped, _MOST_STEPS)
        if self.begun is False:
            flags += ("eval",)
            self.trained.discard(root)
        elif self.begun:
            self.forwards += 1
            if root not in self.trained or self.forwards > _FORWARDS:
                flags += ("train",)
                self.trained.add(root)
        if self.stepped or self.begun is False:
            self.forwards = 0
        self.stepped, self.begun = 0, None
        return flags

    def grad_flag(self, added: bool) -> tuple[str, ...]:
        """The flag of a reduction if it differs from the last one in whether it is `added` to an existing `.grad`."""
        if added is self.added:
            return ()
        self.added = added
        return ("added",) if added else ("cleared",)


def _explained(answers: dict[int, str]) -> str:
    ordered = {rank: text.removeprefix("order: ") for rank, text in answers.items() if text.startswith("order: ")}
    others = [rank for rank in answers if rank not in ordered]
    if ordered and others:  # the others ask about something else than the order of messages
        asked = next(iter(ordered.values()))
        return _while_waiting(asked, [rank for rank, text in ordered.items() if text == asked], others[0])
    return disagreement({rank: parse_question(text) for rank, text in answers.items()})


def _while_waiting(question: str, asking: Sequence[int], here: int) -> str:
    return deviation(parse_question(question), asking, here)


_orders: weakref.WeakKeyDictionary[Scope, _ScopeOrder] = weakref.WeakKeyDictionary()


def _shared_order(scope: Scope) -> _ScopeOrder:
    shared = _orders.get(scope) or _orders.setdefault(scope, _ScopeOrder(scope))
    if shared.epoch != scope.epoch:
        shared.restart(scope.epoch)
    return shared


def _compare(
    scope: Scope,
    order: Order,
    action: Action,
    *,
    in_band: bool = True,
    later: Callable[[Scope, int, Action], None] | None = None,
) -> None:
    """Compare an unexpected `action` with the other ranks; raises `RanksDisagree` on all if they differ.

    `in_band=False`: use no collective, for programs that count them. `later`: takes actions that are compared when a
    reduction arrives, so that the host need not wait for a device."""
    # What is in doubt is compared by a small message or not at all.
    expected = order.expected(doubts=in_band and later is None)
    if later is not None and expected is None:
        later(scope, order.place, action)
        order.enter(action)
        return
    doing, scope.doing = scope.doing, action.doing
    try:
        if in_band and expected is None and alike(scope, f"{order.place}: {action}"):
            order.enter(action)
            return
        answers = scope.agree("order", str(order.question(action)))
    finally:
        scope.doing = doing
    if answers is None:
        order.enter(action)
        return
    # Some ranks may have sent messages that others did not.
    scope.failures.must_meet = True
    raise RanksDisagree(_explained(answers), what="order", by_rank=answers)


def compare(scope: Scope, action: Action) -> None:
    """Compare `action`, which belongs to no root, before it is sent. Raises `RanksDisagree` on all ranks of `scope` if
    one of them is about to send something else, and `PeerFailed` if a rank failed."""
    order = _shared_order(scope).order
    if not order.follows(action):
        _compare(scope, order, action)


class _Lane:
    """The units of one root in one scope: `members[unit]` are the positions of its groups there."""

    def __init__(self, scope: Scope, first: Unit, members: dict[Unit, list[int]]) -> None:
        self.scope = scope
        self.shared = _shared_order(scope)
        # The root's own unit.
        self._first = first
        self._in_band = not all(_is_native(unit) for unit in members)
        self.later: Callable[[Scope, int, Action], None] | None = None
        self._members = members
        # The root's name in actions.
        self.root = ""
        # Caches: sizes ("" if nothing is sent) and actions.
        self._sizes: dict[tuple[object, ...], str] = {}
        self._actions: dict[tuple[object, ...], Action] = {}

    def name_root(self) -> None:
        """The ranks just compared the structure of the root, all of them as the same question: that is its name."""
        self.root = f"{self.scope.epoch}-{self.scope.asked}"

    def before(self, unit: Unit, kind: str, flags: tuple[str, ...] = (), layout: tuple[object, ...] = ()) -> None:
        """`unit` is about to send. `layout`: what determines the sizes besides the unit's channels."""
        key = (kind, unit, layout, unit.channels.times_made)
        sizes = self._sizes.get(key)
        if sizes is None:
            if len(self._sizes) > _REMEMBERED:
                self._sizes.clear()
            sizes = self._sizes[key] = _sizes(unit, self._members[unit], kind, keep="keep" in flags)
        if sizes:
            if kind == "reduce":
                if self.shared.epoch != self.scope.epoch:
                    self.shared.restart(self.scope.epoch)
                flags += self.shared.grad_flag(self._is_added(unit))
            self._next(kind, unit.record.index, unit.record.name, sizes, flags)

    def _is_added(self, unit: Unit) -> bool:
        """Whether the unit's gradients will be added to those of earlier backwards. Messages carry
        grad-present flags, so it is the same on all ranks, and one parameter per group is representative."""
        for position in self._members[unit]:
            group = unit.groups[position]
            if group.trainable and not isinstance(
                group.params[group.trainable[0]].sharded.grad, NoneType | PendingGrad
            ):
                return True
        return False

    def announce(self, kind: str, sizes: str) -> None:
        """The root is about to send something other than parameters or gradients of a unit."""
        self._next(kind, 0, self._first.record.name, sizes, ())

    def _next(self, kind: str, index: int, name: str, sizes: str, flags: tuple[str, ...]) -> None:
        shared = self.shared
        if shared.epoch != self.scope.epoch:
            shared.restart(self.scope.epoch)
        order = shared.order
        if shared.stepped or shared.begun is not None:
            flags = (*shared.flags(self.root), *flags)
        key = (kind, index, sizes, flags)
        action = self._actions.get(key)
        if action is None:
            if len(self._actions) > _REMEMBERED:
                self._actions.clear()
            action = self._actions[key] = Action(kind, self.root, index, name, sizes, flags)
        if not order.follows(action, doubts=self._in_band and self.later is None):
            _compare(self.scope, order, action, in_band=self._in_band, later=self.later)


def _sizes(unit: Unit, positions: Sequence[int], kind: str, *, keep: bool = False) -> str:
    """The message sizes of `unit`, by group: dtype and elements of one rank's part; "" if nothing is sent."""
    texts = []
    for position in positions:
        group, links = unit.groups[position], unit.links[position]
        if kind == "reduce":
            trainable = group.trainable
            to_replicas = links.replicate is not None and links.replicate.world > 1 and not keep
            if trainable and (links.shard.world > 1 or to_replicas):
                numel = sum(group.pack.segments[i].padded_numel for i in trainable)
                which = "" if len(trainable) == len(group.params) else "@" + ".".join(map(str, trainable))
                texts.append(f"{_name(group.precision.wire)}*{numel}{which}{_way(unit, links)}")
            continue
        block = links.block if kind == "unshard_secondary" else None
        if kind == "unshard_secondary" and not unit.record.plan.keeps_secondary:
            continue
        if links.shard.world > 1:
            among = f"/{block.group.world}" if block is not None else ""
            texts.append(f"{_name(group.precision.compute)}*{group.pack.padded_local_numel}{among}")
    return "+".join(texts)


def _way(unit: Unit, links: Links) -> str:
    """The suffix for how gradients are reduced, unless in one exchange."""
    if unit.channels.strategy == "torch":
        return "/torch"
    return "" if links.shard.world == 1 or links.exchanges else "/native"


def _is_native(unit: Unit) -> bool:
    """Whether the messages of `unit` equal those of torch's FSDP2, one for one."""
    return unit.channels.strategy == "torch"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MessageOrder:
    """The message order of one root, in all of its scopes. Ask the lanes of a unit before each of its messages.

    Raises `RanksDisagree` on every rank of a scope if one of them is about to send something else, and `PeerFailed` if
    a rank failed. Does nothing without other ranks.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        members: dict[Scope, dict[Unit, list[int]]] = {}
        for unit in units:
            for position, links in enumerate(unit.links):
                scope = scope_of(links.everyone)
                if scope is not None:
                    members.setdefault(scope, {}).setdefault(unit, []).append(position)
        # Runs and steps the model. Events of a backward may come from a thread of the autograd engine.
        self._thread = threading.get_ident()
        self._lanes = [_Lane(scope, units[0], here) for scope, here in members.items()]
        self.lanes_of = {
            unit: tuple(lane for lane, here in zip(self._lanes, members.values(), strict=True) if unit in here)
            for unit in units
        }

    def formed(self) -> None:
        """All ranks compared the structure of the root: name it by that comparison, which all of them made."""
        for lane in self._lanes:
            lane.name_root()

    def compare_later(self, facts: StepFacts) -> None:
        """On a device: compare messages without a known order together with the facts of a step (facts.py)."""
        for lane in self._lanes:
            lane.later = facts.sent

    def announce(self, kind: str, sizes: str) -> None:
        """Another message is about to be sent over every mesh of the root; `kind` and `sizes` are words."""
        for lane in self._lanes:
            lane.announce(kind, sizes)

    def forward_begins(self, *, grad: bool) -> None:
        """An outermost forward begins; `grad`: a backward may follow."""
        for lane in self._lanes:
            if lane.shared.epoch != lane.scope.epoch:
                lane.shared.restart(lane.scope.epoch)
            lane.shared.begun = grad

    def forward_ends(self) -> None:
        """The outermost forward is over. One that sent nothing is not compared: one rank alone may evaluate a model
        that is already unsharded."""
        for lane in self._lanes:
            lane.shared.begun = None

    def stepped(self) -> None:
        """The last optimizer step of the root's thread changed parameters of the root."""
        for lane in self._lanes:
            note_stepped(lane.scope, self._thread)


def note_stepped(scope: Scope, thread: int) -> None:
    """The last optimizer step of `thread`, which runs the model, changed parameters on the mesh of `scope`."""
    shared, step = _shared_order(scope), optimizer_steps(thread)
    # An optimizer may have parameters of several roots on one mesh.
    if shared.last_step != step:
        shared.last_step = step
        shared.stepped += 1
        steps_taken(scope).count += 1


# ---- full params -----------------------------------------------------------------------------------------------------
# `full_params` is compared before it is sent, like the messages of a step: one that a rank enters alone
# raises on all ranks.
#
# `full_tensor()` and `redistribute()` of a parameter are DTensor's, over the user's process group (ADR 0016): a rank
# that is alone in one is named to those that wait for it (peers/diagnosis.py).


def before_opening(model: nn.Module, units: Iterable[Unit]) -> None:
    """All ranks are about to gather `units` of `model` for `full_params`. Raises like `compare`, and if it is lost."""
    names = {module: clean_name(name) or "root" for name, module in model.named_modules()}
    opened: dict[Scope, list[Unit]] = {}
    for unit in units:
        for scope in dict.fromkeys(scope_of(links.everyone) for links in unit.links):
            if scope is not None:
                opened.setdefault(scope, []).append(unit)
    for scope, here in opened.items():
        known = [names.get(unit.module, "?") for unit in here]
        digest = hashlib.blake2s("\n".join(known).encode(), digest_size=6).hexdigest()
        thread = None if here[0].root is None else here[0].root.thread
        _compare_opening(here[0], scope, thread, Action("open", "0", 0, known[0], f"{len(here)}*{digest}"))
        if scope.losses.current is not None:
            raise lost_error(scope)


def _compare_opening(unit: Unit | None, scope: Scope, thread: int | None, action: Action) -> None:
    """`thread`: runs the model. `unit`: of the model, if it still exists."""
    # Messages of other threads are not part of the order of the model's thread.
    if scope.watch.settings.mode == "off" or thread not in (None, threading.get_ident()):
        return
    if current_backward() == -1 and scope.failures.must_meet:
        renewed = scope.resume()
        if unit is not None and unit.root is not None:
            unit.root.met_by_hand(renewed=renewed)
    compare(scope, action)


# ---- owners ----------------------------------------------------------------------------------------------------------
# The steps of an optimizer are reported to the order of the ranks that share its parameters, as long as it holds them,
# even after their model is gone: garbage collection differs between ranks.


class _Formed:
    """The thread that runs a root, and its scopes: kept as long as any of its parameters is held."""

    def __init__(self, thread: int, scopes: Iterable[Scope]) -> None:
        self.thread = thread
        # Weak: the watch of their process group keeps them as long as it exists.
        self.scopes = [weakref.ref(scope) for scope in scopes]


class _Owned(Owner):
    """The owner of one parameter. Knows no unit: holding a parameter must not hold the model."""

    formed: _Formed | None = None


def own_parameters(unit: Unit) -> None:
    """Attach an owner to each sharded parameter of `unit`."""
    for position, group in enumerate(unit.groups):
        for param in group.params:
            param.owner = _Owned(param.name, unit.links[position].everyone)
            claim(param.sharded, param.owner)


def own_by_root(root: AnyRoot, scopes: Iterable[Scope], *, compares_order: bool) -> None:
    """`root` formed, on the meshes of `scopes`: name its parameters as its model does. `compares_order`: report their
    optimizer steps to the order of messages."""
    names = parameter_names(root.units[0].module, root.units)
    formed = _Formed(root.thread, scopes)
    for param, name in names.items():
        if isinstance(param.owner, _Owned):
            param.owner.name, param.owner.formed = name, formed
    if compares_order:
        tell_each_step(_optimizer_stepped)


def _optimizer_stepped(optimizer: Optimizer) -> None:
    roots: dict[_Formed, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # `Owner.of`, without a call for each parameter in each step.
            owner = getattr(parameter.untyped_storage(), Owner.ATTRIBUTE, None) if type(parameter) is DTensor else None
            if isinstance(owner, _Owned) and owner.formed is not None:
                roots[owner.formed] = None
    thread = threading.get_ident()
    scopes: dict[Scope, None] = {}
    for formed in roots:
        if formed.thread == thread:
            for reference in formed.scopes:
                scope = reference()
                if scope is not None and is_current(scope.watch):
                    scopes[scope] = None
    if scopes and changes_parameters(optimizer.param_groups):
        for scope in scopes:
            note_stepped(scope, thread)
