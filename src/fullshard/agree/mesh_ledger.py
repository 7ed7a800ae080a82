"""Compares what one root does on one mesh among its ranks (ledger.py). Each mesh has its own: the ranks of a pipeline
stage or an expert agree among themselves.

    MessageOrder   each message, before it is sent. In the steady state that costs about a microsecond, and nothing is
                   sent. Roots on one mesh share the order, because their messages wait for one another
    MeshLedger     what is done to shards, by a digest that travels with the first reduction of a backward
                   (comm/comparison.py); on a device the result is read one step later, when its event is done
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._torch import current_backward
from ..comm import Comparison, Links, ReduceChannel, alike
from ..engine.names import clean_name, first_few, names_elsewhere
from ..engine.unit import AnyRoot, Unit
from ..param import PendingGrad
from ..peers import RanksDisagree, Scope, scope_of, shown_ranks
from .differences import ADVICE, deviation, differences, disagreement, first_unlike, phrase
from .ledger import (
    CALL,
    Action,
    Fact,
    Ledger,
    Order,
    Program,
    Sealed,
    called,
    loads,
    program_of,
    read,
    read_question,
)
from .recovery import Peers, lost_error
from .structure import Drift, buffers_on, digests_of, ignored_by, replicas_of, unsharded_on, warn_of_buffers

# ---- messages --------------------------------------------------------------------------------------------------------

# Cached actions and sizes per root; the cache is cleared beyond that.
_REMEMBERED = 50_000
_ORDER = "order"


class MessageOrder:
    """The messages of one root over the mesh of `scope`: `members[unit]` are the positions of a unit's groups there.

    Raises `RanksDisagree` on every rank of the scope if one of them is about to send something else, and `PeerFailed`
    if a rank failed.
    """

    def __init__(self, scope: Scope, members: dict[Unit, list[int]]) -> None:
        self.scope, self.members = scope, members
        self.program = order_on(scope)
        # Whether ranks may compare by a collective: not where the messages equal those of torch's FSDP2, one for one.
        self._in_band = not all(map(_is_native, members))
        # A function that takes unexpected actions, which are compared when a reduction arrives: on a device.
        self.later: Callable[[int, Action], None] | None = None
        # The root's name in actions.
        self.root = ""
        # Caches of sizes ("" if nothing is sent) and of actions.
        self._sizes: dict[tuple[object, ...], str] = {}
        self._actions: dict[tuple[object, ...], Action] = {}

    def name_root(self) -> None:
        """The ranks just compared the structure of the root, all of them as the same question: that is its name."""
        self.root = f"{self.scope.epoch}-{self.scope.asked}"

    def before(self, unit: Unit, kind: str, flags: tuple[str, ...] = (), sizes: str | None = None) -> None:
        """`unit` is about to send. `sizes`: of a message that has neither parameters nor gradients."""
        reduces = kind == "reduce"
        if sizes is None:
            layout = ("keep" in flags, *map(attrgetter("trainable"), unit.groups)) if reduces else ()
            key = (kind, unit, layout, unit.channels.times_made)
            sizes = self._sizes.get(key)
            if sizes is None:
                if len(self._sizes) > _REMEMBERED:
                    self._sizes.clear()
                sizes = self._sizes[key] = sizes_of(unit, self.members[unit], kind, keep="keep" in flags)
            if not sizes:
                return
        program, record = self.program, unit.record
        if program.epoch != self.scope.epoch:
            program.restart(self.scope.epoch)
        if reduces and (added := self._is_added(unit)) is not program.added:
            program.added = added
            flags += ("added",) if added else ("cleared",)
        if program.stepped or program.begun is not None:
            flags = (*program.flags(self.root), *flags)
        same = (kind, record.index, sizes, flags)
        action = self._actions.get(same)
        if action is None:
            if len(self._actions) > _REMEMBERED:
                self._actions.clear()
            action = self._actions[same] = Action(kind, self.root, record.index, record.name, sizes, flags)
        if not program.order.follows(action, doubts=self._in_band and self.later is None):
            compare_action(self.scope, program.order, action, in_band=self._in_band, later=self.later)

    def _is_added(self, unit: Unit) -> bool:
        """Whether the unit's gradients will be added to those of earlier backwards. Messages carry
        grad-present flags, so it is the same on all ranks, and one parameter per group is representative."""
        for position in self.members[unit]:
            group = unit.groups[position]
            if group.trainable and not isinstance(
                group.params[group.trainable[0]].sharded.grad, NoneType | PendingGrad
            ):
                return True
        return False


def sizes_of(unit: Unit, positions: Sequence[int], kind: str, *, keep: bool = False) -> str:
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
            levels = f"/{links.shard.ways.gather}" if links.shard.levels is not None and block is None else ""
            texts.append(f"{_name(group.precision.compute)}*{group.pack.padded_local_numel}{among}{levels}")
    return "+".join(texts)


def _way(unit: Unit, links: Links) -> str:
    """The suffix for how gradients are reduced, unless in one exchange."""
    if _is_native(unit):
        return "/torch"
    if links.in_levels:
        return f"/{links.reducing.ways.reduce}"
    return "" if links.shard.world == 1 or links.exchanges else "/native"


def _is_native(unit: Unit) -> bool:
    """Whether the messages of `unit` equal those of torch's FSDP2, one for one."""
    return unit.channels.strategy == "torch"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def order_on(scope: Scope) -> Program:
    """The program of `scope`, whose waits are explained from now on by the order of messages."""
    scope.explained_by[_ORDER] = _while_waiting
    return program_of(scope)


def _while_waiting(question: str, asking: Sequence[int], here: int, where: str) -> str:
    return deviation(read_question(question), asking, here, where)


def compare_action(
    scope: Scope,
    order: Order,
    action: Action,
    *,
    in_band: bool = True,
    later: Callable[[int, Action], None] | None = None,
) -> None:
    """Compare an unexpected `action` with the other ranks; raises `RanksDisagree` on all if they differ.

    `in_band=False`: use no collective, for programs that count them. `later`: takes actions that are compared when a
    reduction arrives, so that the host need not wait for a device."""
    # What is in doubt is compared by a small message or not at all.
    expected = order.expected(doubts=in_band and later is None)
    if later is not None and expected is None:
        later(order.place, action)
        order.enter(action)
        return
    with scope.within(lambda: f"a comparison, about to {phrase(action)}"):
        if in_band and expected is None and alike(scope, f"{order.place}: {action}"):
            order.enter(action)
            return
        answers = scope.agree(_ORDER, order.question(action).text)
    if answers is None:
        order.enter(action)
        return
    # Some ranks may have sent messages that others did not.
    scope.failures.must_meet = True
    questions = {rank: read_question(text) for rank, text in answers.items()}
    raise RanksDisagree(disagreement(questions), what=_ORDER, by_rank=answers)


# ---- full params -----------------------------------------------------------------------------------------------------
# `full_params` is compared before it is sent, like the messages of a step: one that a rank enters alone raises on all
# ranks.
#
# `full_tensor()` and `redistribute()` of a parameter are DTensor's, over the user's process group (ADR 0016): a rank
# that is alone in one is named to those that wait for it (peers/diagnosis.py).


def before_opening(model: nn.Module, units: Iterable[Unit]) -> None:
    """All ranks are about to gather `units` of `model` for `full_params`.

    Raises `RanksDisagree` on all ranks of a mesh if one of them is about to send something else, or if the model is
    lost, and `PeerFailed` if a rank failed."""
    names = {module: clean_name(name) or "root" for name, module in model.named_modules()}
    opened: dict[Scope, list[Unit]] = {}
    for unit in units:
        for scope in dict.fromkeys(scope_of(links.everyone) for links in unit.links):
            if scope is not None:
                opened.setdefault(scope, []).append(unit)
    for scope, here in opened.items():
        known = [names.get(unit.module, "?") for unit in here]
        digest = hashlib.blake2s("\n".join(known).encode(), digest_size=6).hexdigest()
        _compare_opening(here[0], scope, Action("open", "0", 0, known[0], f"{len(here)}*{digest}"))
        if scope.losses.current is not None:
            raise lost_error(scope)


def _compare_opening(unit: Unit, scope: Scope, action: Action) -> None:
    # Messages of other threads are not part of the order of the model's thread.
    root = unit.root
    if scope.watch.settings.mode == "off" or (root is not None and root.thread != threading.get_ident()):
        return
    if current_backward() == -1 and scope.failures.must_meet:
        renewed = scope.resume()
        if root is not None:
            root.met_by_hand(renewed=renewed)
    order = order_on(scope).order
    if not order.follows(action):
        compare_action(scope, order, action)


# ---- statements ------------------------------------------------------------------------------------------------------

# Values outside of units join the first and second comparison, then at intervals that grow eightfold; buffers from the
# second one on, because the first forward compares them (structure.py).
_SECOND, _INTERVALS = 2, 8
_QUESTION = "facts"
_FINALIZES = "set_manual_backward_finalization"
_log = logging.getLogger("fullshard")


class _Carried(NamedTuple):
    """A comparison in flight, and the statements that it covers."""

    comparison: Comparison
    sealed: Sealed


@dataclass(eq=False)
class _SinceMeeting:
    """Counts what was compared since ranks began, or began anew after a failure, when some of them were further than
    others; and knows when values are compared next."""

    epoch: int
    # The comparisons so far, and the next one that includes values outside of units.
    count: int = 0
    next_values: int = 1
    # The training forwards so far, and the next one at which ranks compare (`forward_begins`).
    forwards: int = 0
    next_question: int = 1
    values_asked: bool = True
    # The versions of the parameters of each unit at the last comparison, and the writes up to it.
    written: dict[Unit, int] = field(default_factory=dict)
    writes: dict[Unit, int] = field(default_factory=dict)
    # Comparisons of earlier backwards, whose result was not read yet.
    earlier: deque[_Carried] = field(default_factory=deque)
    # Whether unexpected messages were sent since the last comparison (`note_message`).
    has_unexpected: bool = False


class MeshLedger:
    """Records what this rank does to the shards of `root` on the mesh of `ranks`. `peers`: of the root. `listed`
    returns the names of the parameters in optimizers, for an error."""

    def __init__(self, root: AnyRoot, peers: Peers, ranks: tuple[int, ...], listed: Callable[[], str]) -> None:
        self._root, self._peers, self.ranks, self._listed = root, peers, ranks, listed
        self.scope = scope_of(ranks)
        if self.scope is not None:
            self.scope.explained_by[_QUESTION] = _asked_alone
        self.ledger = Ledger()
        self.since = _SinceMeeting(-1 if self.scope is None else self.scope.epoch)
        # The positions of the groups on this mesh, by unit.
        self.members: dict[Unit, list[int]] = {}
        # The comparison of the running backward.
        self.sent: _Carried | None = None
        # A cache of digests as message elements.
        self._rows: dict[tuple[object, int], dict[torch.dtype, Tensor]] = {}
        # Whether all messages are native ones, which carry no digest; None: settings changed since that was known.
        self.only_native: bool | None = None
        self.settings_changed = True
        # The names of what rightly differs between ranks, and is not compared again.
        self.own: set[str] = set()
        self.compares_buffers = True
        # The parameters in optimizers that no unit shards, by name.
        self.beside: dict[str, Tensor] = {}

    # ---- calls ---------------------------------------------------------------------------------------------

    def note_message(self, place: int, action: Action) -> None:
        """An unexpected message is about to be sent on a device: compare it later, without waiting."""
        self.since.has_unexpected = True
        self.ledger.do(called("a message", [Fact("order", f"message {place}", str(action))]))

    def change_settings(self) -> None:
        """The user changed a setting of reductions."""
        self.settings_changed, self.only_native = True, None

    # ---- comparisons ---------------------------------------------------------------------------------------

    def carry(self, unit: Unit, channel: ReduceChannel, *, keep: bool) -> Comparison | None:
        """A reduction of a group is about to be sent. Returns the comparison that it carries, if any."""
        if self.sent is not None or keep or not channel.carries:
            return None
        sealed = self.seal()
        key = unit.device, sealed.digest
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) > 8:
                self._rows.clear()
            rows = self._rows[key] = {}
        self.sent = _Carried(Comparison(sealed.digest, unit.device, sealed.shared, rows), sealed)
        return self.sent.comparison

    def backward_ends(self) -> None:
        """All messages of the backward arrived. Raises `RanksDisagree` on all ranks if a fact differs."""
        earlier = self.since.earlier
        sent, self.sent = self.sent, None
        if sent is not None:
            earlier.append(sent)
        while earlier and (earlier[0] is not sent or sent.comparison.is_here):
            read_now = earlier.popleft()
            if read_now.comparison.differs() and self.scope is not None:
                self.refuse(self.scope, read_now.sealed.text)

    def forward_begins(self, *, trains: bool, records: bool = False) -> None:
        """A forward begins; `trains`: of the whole model, with gradients; `records`: also in `eval()`.

        Where no message carries a digest, ranks compare at the first, 2nd, 16th, 128th, ... training forward: where all
        messages are native (`communication="torch"`; also after a load or a change of settings), and where nothing that
        is sharded trains, so that nothing is reduced, but something beside it does (adapters added after
        `fully_shard`). Raises `RanksDisagree` on all ranks.
        """
        if self.only_native is None:
            self.only_native = all(map(_is_native, self.members))
        if self.scope is None:
            return
        # In `eval()` only where no rank can be alone in it.
        counts = trains or (records and self.gathers() and not self.only_native)
        if not self.only_native and (not counts or self._reduces):
            return
        since = self.since
        since.forwards += counts
        is_due = counts and since.forwards >= since.next_question
        if not is_due and not (self.only_native and (since.values_asked or self.settings_changed)):
            return
        if is_due:
            since.next_question = 2 if since.forwards < 2 else since.next_question * _INTERVALS
            # Few forwards ask, and only they can find that values outside drift apart.
            since.next_values = since.count + 1
        if self.only_native or self._trains_outside():
            self.refuse(self.scope, self.seal().text)

    def forward_ends(self) -> None:
        """A forward without gradients is over. If it sent unexpected messages, no reduction will carry that: ranks
        compare 16 bytes before its outputs are handed over. Raises `RanksDisagree` on all ranks."""
        if self.since.has_unexpected and self.scope is not None:
            sealed = self.seal()
            if not alike(self.scope, f"forward: {sealed.digest:x}"):
                self.refuse(self.scope, sealed.text)

    @property
    def _reduces(self) -> bool:
        """Whether a backward may reduce gradients over the mesh. Before the first forward of a unit: by
        `requires_grad`."""
        for unit in self.members:
            known = unit.gradients.is_known
            if unit.record.plan.trainable if known else any(p.sharded.requires_grad for p in unit.params):
                return True
        return False

    def gathers(self) -> bool:
        """Whether each group is gathered from all ranks of the mesh, so that no rank runs a forward alone."""
        members = [unit.links[position] for unit, positions in self.members.items() for position in positions]
        return all(links.shard.world == len(self.ranks) for links in members)

    def _trains_outside(self) -> bool:
        """Whether something trains that no unit has, of which the user alone averages the gradients."""
        return any(tensor.requires_grad for tensor in {**self.outside(), **self.beside}.values())

    def refuse(self, scope: Scope, text: str) -> None:
        """Exchange statements (`text`: this rank's) with the other ranks; raise for a difference that is not allowed,
        and warn of buffers."""
        answers = scope.agree(_QUESTION, text)
        if answers is None:
            return
        found = list(differences(read(answers)))
        buffers: list[Drift] = []
        for difference in found:
            fact = difference.fact
            # Allowed: names that some ranks do not have, and ignored parameters that differ from the start.
            some_lack = fact.kind in ("outside", "buffers") and any(value == "none" for _, value in difference.values)
            if fact.kind == "ignored" or some_lack:
                self.own.add(fact.name)
                if fact.kind == "ignored" and scope.rank == scope.ranks[0]:
                    # Only logged: rank-specific experts are legitimate, and a warning may be turned into an error.
                    _log.warning("ignored_params: %s", difference.text)
                continue
            if fact.kind == "buffers":
                buffers.append(Drift(fact.name, "buffer", tuple(ranks for ranks, _ in difference.values)))
                continue
            error_text = difference.text
            if fact.kind == "parameters":
                answers = scope.agree("parameters of optimizers", self._listed())
                names = {rank: names.split("\n") for rank, names in (answers or {}).items()}
                error_text = error_text.replace(";", f" ({first_unlike(names)});", 1) if names else error_text
            if fact.name in self.beside:
                parameter = self.beside[fact.name]
                error_text = f"{names_elsewhere([parameter])[id(parameter)]}, {error_text}"
            if fact.kind == "outside":
                more = [other.fact.name for other in found if other.fact.kind == "outside" and other is not difference]
                error_text = error_text.replace(";", f" (and {first_few(more)});", 1) if more else error_text
            with self._peers.disagreeing(scope):
                raise RanksDisagree(error_text, what=fact.name, by_rank=difference.by_rank)
        if buffers:
            self.compares_buffers = False
            warn_of_buffers(buffers, "since the training began: nothing averages them")

    # ---- what holds now ------------------------------------------------------------------------------------

    def seal(self) -> Sealed:
        """The statements that are compared now."""
        if self.scope is not None and self.scope.epoch != self.since.epoch:
            # After a failure some ranks were further than others.
            self.ledger.forget()
            self.since = _SinceMeeting(self.scope.epoch)
        since = self.since
        since.has_unexpected = False
        since.count += 1
        if self.settings_changed:
            self.settings_changed = False
            for unit in self.members:
                self.ledger.stand(Fact("controls", f"settings of {unit.record.name}", unit.settings.controls.text))
        ending = self._root.run.ending
        if ending.is_manual or _FINALIZES in self.ledger.now:
            self.ledger.stand(Fact("controls", _FINALIZES, str(ending.is_manual)))
        if self.scope is not None and (source := program_of(self.scope).source):
            self.ledger.stand(Fact("load", "state that was loaded", source))
        self._note_written()
        if since.values_asked or since.count >= since.next_values:
            self.note_values(again=since.values_asked)
            since.values_asked = False
            since.next_values = _SECOND if since.count < _SECOND else since.next_values * _INTERVALS
        return self.ledger.seal()

    def _note_written(self) -> None:
        """Record the change in the number of writes to each unit's parameters between comparisons.

        The number itself depends on how the optimizer steps (foreach, fused), which may differ between ranks. After a
        failure only some ranks had made the last comparison, so counting restarts.
        """
        since = self.since
        for unit, positions in self.members.items():
            versions = unit.seal.versions
            if len(versions) != len(unit.groups):
                continue
            written = 0
            for position in positions:
                written += sum(versions[position])
            before, since.written[unit] = since.written.get(unit), written
            value = "counted from here"
            if before is not None:
                usual, since.writes[unit] = since.writes.get(unit), written - before
                if usual is not None:
                    more = written - before - usual
                    value = f"{abs(more)} times {'more' if more > 0 else 'less'} often than before"
                    value = value if more else "as often as before"
            self.ledger.stand(Fact("written", f"times that parameters of {unit.record.name} were written", value))

    def note_values(self, *, again: bool) -> None:
        """Record values that should be equal: parameters outside of units, buffers, and with `again` replicas."""
        units, top = self._root.units, self._root.units[0].module
        first = self.since.count == 1
        outside = {name: one for name, one in {**self.outside(), **self.beside}.items() if name not in self.own}
        meant = ignored_by(units) if first and outside else frozenset()
        facts = [Fact("ignored" if n in meant else "outside", n, text) for n, text in digests_of(outside).items()]
        if self.compares_buffers and not first:
            buffers = {name: one for name, one in buffers_on(top, self.ranks).items() if name not in self.own}
            facts += [Fact("buffers", name, text) for name, text in digests_of(buffers).items()]
        # Also without any: ranks may differ in what they have beside the units.
        self.ledger.do(called("values outside of units", facts))
        replicas = replicas_of(units, top) if again else {}
        for ranks, shards in replicas.items():
            if set(ranks) <= set(self.ranks):
                facts = [Fact("replicas", f"shard of {n}", text) for n, text in digests_of(shards).items()]
                self.ledger.share(",".join(map(str, ranks)), facts)

    def outside(self) -> dict[str, Tensor]:
        """Parameters that no unit shards, by dotted name; excludes full parameters, on modules during a backward."""
        units = self._root.units
        ours = {id(tensor) for unit in units for param in unit.params for tensor in (param.full, param.kept)}
        found = unsharded_on(units[0].module, self.ranks)
        return {name: parameter for name, parameter in found.items() if id(parameter) not in ours}


def _asked_alone(text: str, asking: Sequence[int], here: int, where: str) -> str:
    """The error text of rank `here`, which waits in `where` while ranks `asking` compare the statements of `text`."""
    done: list[str] = []
    with suppress(ValueError):  # cut short
        done = [one.name for one in loads(text) if one.place == CALL and one.facts]
    return (
        f"calls since the last comparison: expected the same on every rank, found {shown_ranks(asking)} comparing "
        f"facts ({', '.join(done) or 'settings that changed'}) and rank {here} in {where}; {ADVICE['calls']}"
    )
