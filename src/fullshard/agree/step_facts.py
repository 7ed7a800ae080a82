"""Records operations on the shards of one root and compares them across ranks (ledger.py).

    optimizer_stepped, clipped, scaled, hooked, loaded     calls of the user, which are recorded
    carry      the first reduction of a backward, on each mesh: the digest of all recorded facts travels with that
               reduction (comm/comparison.py)
    compare    the end of the backward, before gradients are written: if digests differ, all ranks of the mesh exchange
               their facts and raise `RanksDisagree`
    forward_ends     of one without gradients: if it sent what nothing foretold (on a device), by 16 bytes
    forward_begins   if no message carries a digest, ranks compare at the first, 2nd, 16th, 128th, ... training forward:
               where all messages are native (`communication="torch"`; also after a load or a change of settings), and
               where nothing that is sharded trains, so that nothing is reduced, but something beside it does (adapters
               added after `fully_shard`)

Each mesh has its own ledger: the ranks of a pipeline stage or an expert compare among themselves. On a device the
result is read one step later, at the same place on all ranks, when its event is done.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Comparison, Digits, ReduceChannel, alike
from ..engine.names import clean_name, first_few, parameter_names
from ..engine.names_elsewhere import names_elsewhere
from ..engine.optimizer_steps import tell_optimizer_steps
from ..engine.unit import AnyRoot, Unit
from ..peers import RanksDisagree, Scope, is_current, scope_of, shown_ranks
from .actions import Action
from .ledger import (
    ADVICE,
    CALL,
    Fact,
    Ledger,
    Sealed,
    Statement,
    called,
    differences,
    digest_of,
    first_unlike,
    loads,
    read,
)
from .optimizer_facts import OptimizerFacts, listed, text_of
from .recovery import Peers, steps_taken
from .structure import digests_of, replicas_of, unsharded_on

# Values outside of units join the first and second comparison, then at intervals that grow eightfold.
_SECOND_LOOK, _LOOKS = 2, 8
_QUESTION = "facts"
_FINALIZES = "set_manual_backward_finalization"
_log = logging.getLogger("fullshard")
_by_thread: dict[int, weakref.WeakSet[StepFacts]] = {}


class _Carried(NamedTuple):
    """A comparison in flight, and the facts it covers."""

    comparison: Comparison
    sealed: Sealed


class _Comparisons:
    """What was compared since ranks began, or began anew after a failure, and when values are compared next."""

    def __init__(self) -> None:
        # Comparisons so far, and the next one that includes values outside of units.
        self.count, self.next_look = 0, 1
        # Training forwards so far, and the next one at which ranks compare (`forward_begins`).
        self.forwards, self.next_question = 0, 1
        self.values_asked = True
        # By unit: versions of its parameters at the last comparison, and the writes up to it.
        self.written: dict[Unit, int] = {}
        self.writes: dict[Unit, int] = {}


class _Mesh:
    """The facts of one mesh of the root."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.scope: Scope | None = scope_of(ranks)
        self.epoch = -1 if self.scope is None else self.scope.epoch
        self.ledger = Ledger()
        # Whether a forward of one rank needs all the others: each gathers its parameters from all of them.
        self.gathers = True
        # Positions of the groups on this mesh, by unit.
        self.members: dict[Unit, list[int]] = {}
        # Comparison of the running backward, and earlier ones whose result was not read yet.
        self.sent: _Carried | None = None
        self.earlier: deque[_Carried] = deque()
        self.looks = _Comparisons()
        # Whether messages were sent since the last comparison that nothing foretold (`StepFacts.sent`).
        self.sends_unforetold = False
        # Gradients changed by user hooks since the last call.
        self.hooked: list[str] = []
        self.digits: dict[tuple[object, int], Digits] = {}
        # Whether all messages are native ones, which carry no digest; None: settings changed since that was known.
        self.only_native: bool | None = None
        # Ignored parameters that are rank-specific from the start, which is allowed.
        self.own: set[str] = set()
        # Unsharded parameters in the optimizers, by name.
        self.beside: dict[str, Tensor] = {}

    def note_hooks(self) -> None:
        """Record the gradients that hooks changed as one call."""
        if self.hooked:
            names = f"{', '.join(self.hooked[:4])} ({len(self.hooked)}, {digest_of(chr(10).join(self.hooked)):016x})"
            self.ledger.do(called("hooks", [Fact("hooks", "gradients that hooks changed", names)]))
            self.hooked = []

    def begin_anew(self) -> None:
        """Forget everything: after a failure some ranks were further than others."""
        self.ledger.forget()
        self.hooked = []
        self.earlier.clear()
        self.looks = _Comparisons()


class StepFacts:
    """The facts of one root. Free of cost without other ranks."""

    def __init__(self, root: AnyRoot, peers: Peers, *, compares: bool = True) -> None:
        """`compares`: whether ranks compare what they do in each step; otherwise nothing is recorded."""
        self._root, self._peers = root, peers
        self.compares = compares and not root.provisional
        self._units = root.units
        self._meshes: dict[tuple[int, ...], _Mesh] = {}
        self._of: dict[Unit, tuple[_Mesh | None, ...]] = {}
        self._known: weakref.WeakKeyDictionary[Optimizer, OptimizerFacts] = weakref.WeakKeyDictionary()
        self._places: dict[int, tuple[tuple[int, ...], str]] = {}
        self._placed: list[Tensor] = []
        # ids of parameters -> their text in a fact, on each mesh.
        self._listed_places: dict[tuple[int, ...], dict[tuple[int, ...], str]] = {}
        self._channels = -1
        self._settings_changed = True

    def begin(self) -> None:
        """The root formed: record from now on."""
        if not self.compares:
            return
        for unit in self._units:
            meshes: list[_Mesh | None] = []
            for position, links in enumerate(unit.links):
                ranks = tuple(sorted(links.everyone))
                mesh = self._meshes.setdefault(ranks, _Mesh(ranks)) if len(ranks) > 1 else None
                if mesh is not None:
                    mesh.members.setdefault(unit, []).append(position)
                    mesh.gathers = mesh.gathers and links.shard.world == len(ranks)
                meshes.append(mesh)
            self._of[unit] = tuple(meshes)
        for mesh in self._meshes.values():
            if mesh.scope is not None:
                mesh.scope.explained_by[_QUESTION] = _asked_alone
        if self._meshes:
            tell_optimizer_steps(self._root.thread, self)
            _by_thread.setdefault(self._root.thread, weakref.WeakSet()).add(self)

    # ---- calls ---------------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: Optimizer) -> bool:
        """`optimizer` took a step. Returns whether to report later steps."""
        scope = next(iter(self._meshes.values())).scope
        if scope is not None and not is_current(scope.watch):
            return False
        known = self._known.get(optimizer)
        if known is None or not known.holds(optimizer):
            known = self._known[optimizer] = OptimizerFacts(optimizer, self._placed_now())
            if len(known.parts) == 1:
                (ranks,) = known.parts
                self._meshes[ranks].beside |= known.strangers
        if known.parts:
            known.stepped(optimizer, self._do)
        return True

    def _do(self, ranks: tuple[int, ...], call: Statement) -> None:
        mesh = self._meshes[ranks]
        mesh.note_hooks()
        mesh.ledger.do(call)

    def done_to(self, parameters: Iterable[Tensor], name: str, facts: Sequence[Fact]) -> None:
        """Record the operation `name` on `parameters`, some of which may belong to the root."""
        places = self._placed_now()
        done_to = tuple(map(id, parameters))
        if done_to not in self._listed_places:
            names: dict[tuple[int, ...], list[str]] = {}
            for place in (places[one] for one in done_to if one in places):
                names.setdefault(place[0], []).append(place[1])
            if len(self._listed_places) > 8:
                self._listed_places.clear()
            self._listed_places[done_to] = {ranks: listed(found) for ranks, found in names.items()}
        for ranks, text in self._listed_places[done_to].items():
            self._do(ranks, called(name, [*facts, Fact(facts[0].kind, f"parameters of {name}", text)]))

    def hooked(self, unit: Unit, position: int, name: str) -> None:
        """A user hook changed a parameter or its gradient."""
        mesh = self._of[unit][position] if self._of else None
        if mesh is not None:
            mesh.hooked.append(f"{unit.record.name}.{name}".lstrip("."))

    def loaded(self, unit: Unit, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Parameters of `unit` were loaded; `values`: those loaded from full tensors."""
        for mesh in dict.fromkeys(self._of.get(unit, ())):
            if mesh is not None:
                mesh.looks.values_asked = True
                facts = [Fact("load", "names that load_state_dict loaded", ", ".join(names))]
                facts += [Fact("load", f"loaded values of {n}", text) for n, text in digests_of(values).items()]
                mesh.ledger.do(called("load_state_dict", facts))

    def sent(self, scope: Scope, place: int, action: Action) -> None:
        """A message without a known order is about to be sent on a device: compare it later, without waiting."""
        for mesh in self._meshes.values():
            if mesh.scope is scope:
                mesh.sends_unforetold = True
                mesh.ledger.do(called("a message", [Fact("order", f"message {place}", str(action))]))

    def settings_changed(self) -> None:
        """The user changed a setting of reductions."""
        self._settings_changed = True
        for mesh in self._meshes.values():
            mesh.only_native = None

    # ---- the comparison ------------------------------------------------------------------------------------

    def carry(self, unit: Unit, position: int, channel: ReduceChannel, *, keep: bool) -> Comparison | None:
        """A reduction of a group is about to be sent. Returns the comparison that it carries, if any."""
        mesh = self._of[unit][position] if self._of else None
        if mesh is None or mesh.sent is not None or keep or not channel.carries:
            return None
        sealed = self._seal(mesh)
        key = unit.device, sealed.digest
        digits = mesh.digits.get(key)
        if digits is None:
            if len(mesh.digits) > 8:
                mesh.digits.clear()
            digits = mesh.digits[key] = Digits(sealed.digest, unit.device)
        mesh.sent = _Carried(Comparison(digits, sealed.shared), sealed)
        return mesh.sent.comparison

    def compare(self) -> None:
        """All messages of the backward arrived. Raises `RanksDisagree` on all ranks of a mesh if a fact differs."""
        for mesh in self._meshes.values():
            while mesh.earlier:
                self._look(mesh, mesh.earlier.popleft())
            sent, mesh.sent = mesh.sent, None
            if sent is not None:
                if sent.comparison.is_here:
                    self._look(mesh, sent)
                else:
                    mesh.earlier.append(sent)

    def discard(self) -> None:
        """The backward failed: drop its comparisons."""
        for mesh in self._meshes.values():
            mesh.sent = None

    def forward_begins(self, *, trains: bool, records: bool = False) -> None:
        """A forward begins; `trains`: of the whole model, with gradients; `records`: also in `eval()`. If no message
        can carry a digest, ranks compare at some forwards. Raises `RanksDisagree` on all ranks of a mesh."""
        for mesh in self._meshes.values():
            if mesh.only_native is None:
                mesh.only_native = self._is_only_native(mesh)
            if mesh.scope is None:
                continue
            # In `eval()` only where no rank can be alone in it.
            counts = trains or (records and mesh.gathers and not mesh.only_native)
            if not mesh.only_native and (not counts or _reduces(mesh)):
                continue
            looks = mesh.looks
            looks.forwards += counts
            is_due = counts and looks.forwards >= looks.next_question
            if not is_due and not (mesh.only_native and (looks.values_asked or self._settings_changed)):
                continue
            if is_due:
                looks.next_question = 2 if looks.forwards < 2 else looks.next_question * _LOOKS
                # Few forwards ask, and only they can find that values outside drift apart.
                looks.next_look = looks.count + 1
            if mesh.only_native or self._trains_outside(mesh):
                self._refuse(mesh, mesh.scope, self._seal(mesh).text)

    def forward_ends(self) -> None:
        """A forward without gradients is over. If it sent what nothing foretold, no reduction will carry that: ranks
        compare before its outputs are handed over. Raises `RanksDisagree` on all ranks of a mesh."""
        for mesh in self._meshes.values():
            if mesh.sends_unforetold and mesh.scope is not None:
                sealed = self._seal(mesh)
                if not alike(mesh.scope, f"forward: {sealed.digest:x}"):
                    self._refuse(mesh, mesh.scope, sealed.text)

    def _is_only_native(self, mesh: _Mesh) -> bool:
        return all(unit.channels.strategy == "torch" for unit in mesh.members)

    def _trains_outside(self, mesh: _Mesh) -> bool:
        """Whether something trains that no unit has, of which the user alone averages the gradients."""
        return any(tensor.requires_grad for tensor in {**self._outside(mesh), **mesh.beside}.values())

    def _look(self, mesh: _Mesh, sent: _Carried) -> None:
        if sent.comparison.differs() and mesh.scope is not None:
            self._refuse(mesh, mesh.scope, sent.sealed.text)

    def _refuse(self, mesh: _Mesh, scope: Scope, text: str) -> None:
        """Exchange facts with the other ranks, and raise for a difference that is not allowed."""
        answers = scope.agree(_QUESTION, text)
        if answers is None:
            return
        elsewhere = {rank: told for rank, told in answers.items() if not told.startswith("[")}
        if elsewhere:
            raise RanksDisagree(f"expected all ranks to compare facts, found {elsewhere}", by_rank=answers)
        found = list(differences(read(answers)))
        for difference in found:
            fact = difference.fact
            # Allowed: names that some ranks do not have, and ignored parameters that differ from the start.
            some_lack = fact.kind == "outside" and any(value == "none" for _, value in difference.values)
            if fact.kind == "ignored" or some_lack:
                mesh.own.add(fact.name)
                if fact.kind == "ignored" and scope.rank == scope.ranks[0]:
                    # Only logged: rank-specific experts are legitimate, and a warning may be turned into an error.
                    _log.warning("ignored_params: %s", difference.text)
                continue
            said = difference.text
            if fact.kind == "parameters":
                told = scope.agree("parameters of optimizers", self._listed(mesh))
                names = {rank: names.split("\n") for rank, names in (told or {}).items()}
                said = said.replace(";", f" ({first_unlike(names)});", 1) if names else said
            if fact.name in mesh.beside:
                parameter = mesh.beside[fact.name]
                said = f"{names_elsewhere([parameter])[id(parameter)]}, {said}"
            if fact.kind == "outside":
                more = [other.fact.name for other in found if other.fact.kind == "outside" and other is not difference]
                said = said.replace(";", f" (and {first_few(more)});", 1) if more else said
            error = RanksDisagree(said, what=fact.name, by_rank=difference.by_rank)
            self._peers.disagree_on(scope, error)
            raise error

    def _listed(self, mesh: _Mesh) -> str:
        parts = [known.parts[mesh.ranks] for known in self._known.values() if mesh.ranks in known.parts]
        return "\n".join(sorted(name.partition(".")[2] for part in parts for name in part.names))

    # ---- what holds now ------------------------------------------------------------------------------------

    def _seal(self, mesh: _Mesh) -> Sealed:
        if mesh.scope is not None and mesh.scope.epoch != mesh.epoch:
            mesh.epoch = mesh.scope.epoch
            mesh.begin_anew()
        mesh.note_hooks()
        mesh.sends_unforetold = False
        looks = mesh.looks
        looks.count += 1
        if self._settings_changed:
            self._settings_changed = False
            for each in self._meshes.values():
                for unit in each.members:
                    each.ledger.stand(Fact("controls", f"settings of {unit.record.name}", unit.settings.controls.text))
        ending = self._root.run.ending
        if ending.is_manual or mesh.ledger.stands(_FINALIZES):
            mesh.ledger.stand(Fact("controls", _FINALIZES, str(ending.is_manual)))
        source = "" if mesh.scope is None else steps_taken(mesh.scope).source
        if source:
            mesh.ledger.stand(Fact("load", "state that was loaded", source))
        self._note_written(mesh)
        if looks.values_asked or looks.count >= looks.next_look:
            self._note_values(mesh, again=looks.values_asked)
            looks.values_asked = False
            looks.next_look = _SECOND_LOOK if looks.count < _SECOND_LOOK else looks.next_look * _LOOKS
        return mesh.ledger.seal()

    def _note_written(self, mesh: _Mesh) -> None:
        """Record the change in the number of writes to each unit's parameters between comparisons.

        The number itself depends on how the optimizer steps (foreach, fused), which may differ between ranks. After a
        failure only some ranks had made the last comparison, so counting restarts.
        """
        for unit, positions in mesh.members.items():
            versions = unit.seal.versions
            if len(versions) != len(unit.groups):
                continue
            written = 0
            for position in positions:
                written += sum(versions[position])
            before, mesh.looks.written[unit] = mesh.looks.written.get(unit), written
            if before is None:
                value = "counted from here"
            else:
                since = written - before
                usual, mesh.looks.writes[unit] = mesh.looks.writes.get(unit), since
                value = "counted from here" if usual is None else _more(since - usual)
            mesh.ledger.stand(Fact("written", f"times that parameters of {unit.record.name} were written", value))

    def _note_values(self, mesh: _Mesh, *, again: bool) -> None:
        outside = {n: tensor for n, tensor in {**self._outside(mesh), **mesh.beside}.items() if n not in mesh.own}
        if outside:
            meant = self._ignored() if mesh.looks.count == 1 else frozenset()
            facts = [Fact("ignored" if n in meant else "outside", n, text) for n, text in digests_of(outside).items()]
            mesh.ledger.do(called("values outside of units", facts))
        replicas = replicas_of(self._units, self._root.units[0].module) if again else {}
        for ranks, shards in replicas.items():
            if set(ranks) <= set(mesh.ranks):
                facts = [Fact("replicas", f"shard of {n}", text) for n, text in digests_of(shards).items()]
                mesh.ledger.share(",".join(map(str, ranks)), facts)

    def _outside(self, mesh: _Mesh) -> dict[str, Tensor]:
        """Parameters that no unit shards, by dotted name; excludes full parameters, on modules during a backward."""
        ours = {id(tensor) for unit in self._units for param in unit.params for tensor in (param.full, param.kept)}
        found = unsharded_on(self._root.units[0].module, mesh.ranks)
        return {name: parameter for name, parameter in found.items() if id(parameter) not in ours}

    def _ignored(self) -> frozenset[str]:
        """Dotted names of the user's `ignored_params`."""
        prefixes = {
            module: f"{clean_name(name)}." if name else ""
            for name, module in self._root.units[0].module.named_modules()
        }
        return frozenset(
            prefixes.get(unit.module, "") + clean_name(name)
            for unit in self._units
            for name in unit.settings.ignored_names
        )

    def _placed_now(self) -> dict[int, tuple[tuple[int, ...], str]]:
        """Mesh and name of each parameter, by id; rebuilt when shards were replaced."""
        made = sum([unit.channels.times_made for unit in self._units])
        if made != self._channels:
            self._channels = made
            names = parameter_names(self._root.units[0].module, self._units)
            self._places, self._placed, self._listed_places = {}, [], {}
            for mesh in self._meshes.values():
                for name, parameter in self._outside(mesh).items():
                    self._place(parameter, mesh, name)
                for unit, positions in mesh.members.items():
                    for position in positions:
                        for param in unit.groups[position].params:
                            self._place(param.sharded, mesh, names[param])
        return self._places

    def _place(self, parameter: Tensor, mesh: _Mesh, name: str) -> None:
        self._places[id(parameter)] = mesh.ranks, name
        self._placed.append(parameter)  # keep it alive, so that its id stays unique


def _reduces(mesh: _Mesh) -> bool:
    """Whether a backward may reduce gradients over the mesh. Before the first forward of a unit: by `requires_grad`."""
    for unit in mesh.members:
        if unit.record.plan.trainable if unit.gradients.is_known else any(p.sharded.requires_grad for p in unit.params):
            return True
    return False


def _more(count: int) -> str:
    return f"{abs(count)} times {'more' if count > 0 else 'less'} often than before" if count else "as often as before"


def _asked_alone(told: str, asking: Sequence[int], here: int) -> str:
    """The error text of rank `here`, which sends a message while ranks `asking` compare facts."""
    done: list[str] = []
    with suppress(ValueError):  # cut short
        done = [one.name for one in loads(told) if one.place == CALL]
    return (
        f"calls since the last comparison: expected the same on every rank, found {shown_ranks(asking)} comparing "
        f"facts ({', '.join(done) or 'settings that changed'}) and rank {here} continuing; {ADVICE['calls']}"
    )


def note_clip(parameters: Sequence[Tensor], max_norm: object, norm_type: object) -> None:
    """`clip_grad_norm_` was called in this thread."""
    _note(
        parameters,
        "clip_grad_norm_",
        (
            Fact("clip", "max_norm of clip_grad_norm_", text_of(max_norm)),
            Fact("clip", "norm_type of clip_grad_norm_", text_of(norm_type)),
        ),
    )


def note_unscale(optimizer: Optimizer, settings: Mapping[str, object]) -> None:
    """A `GradScaler` with these settings unscaled the gradients of `optimizer`."""
    facts = [Fact("scaler", f"{name} of GradScaler", text_of(value)) for name, value in settings.items()]
    _note([p for group in optimizer.param_groups for p in group["params"]], "GradScaler", facts)


def _note(parameters: Sequence[Tensor], name: str, facts: Sequence[Fact]) -> None:
    for each in tuple(_by_thread.get(threading.get_ident(), ())):
        each.done_to(parameters, name, facts)


def ignored_names(modules: Sequence[nn.Module], ignored: Iterable[Tensor]) -> tuple[str, ...]:
    """The names of the `ignored` parameters below `modules`."""
    left = {id(parameter) for parameter in ignored}
    if not left:
        return ()
    return tuple(name for module in modules for name, p in module.named_parameters() if id(p) in left)
