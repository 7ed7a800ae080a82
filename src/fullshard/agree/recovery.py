"""The other ranks of a root when a step fails: failures are published, ranks meet, and what a device lost is loaded.

    a failure       is published to the ranks that would wait (`Peers.publish`)
    a meeting       after it, all ranks wait for each other before anything is sent (`Peers.meet`)
    a load          writes parameters and persistent buffers of one module after another; hooks count them (`Recovery`)
    restored        every parameter and persistent buffer below the root was written, in one load or in several; or
                    the user says that the model is sound (`mark_restored`)
    optimizers      took steps with what was lost: their state must be loaded too, or be empty

One `Recovery` for each root on a device with peers. A loss concerns a mesh: it is restored when all roots on that mesh
are. Models on a CPU lose nothing, and have none.
"""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import collect_garbage, non_persistent_buffers
from ..comm import ExpertLine, alike
from ..engine.names import clean_name, first_few
from ..engine.optimizer_steps import asks_on_devices, optimizer_steps
from ..engine.padding_rows import note_row_loaded
from ..engine.unit import Unit, module_units, unit_of
from ..param import Owner
from ..peers import LOST, PeerFailed, RanksDisagree, Scope, had_losses, lost_in, scope_of, shown_ranks
from ..policy.arguments import expect_tensors, expect_text
from .ledger import HALF, program_of

# ---- peers -----------------------------------------------------------------------------------------------------------


class Peers:
    """The scopes of `units`, whose root runs in `thread`. `open` connects them."""

    def __init__(self, units: Iterable[Unit], thread: int) -> None:
        self.scopes: list[Scope] = []
        units = list(units)
        meshes = [links.everyone for unit in units for links in unit.links]
        # Experts that are divided wait for ranks of other meshes, too.
        lines = [line for unit in units if isinstance(line := getattr(unit.module, "line", None), ExpertLine)]
        for ranks in (*meshes, *(line.everyone for line in lines)):
            scope = scope_of(ranks)
            if scope is not None and scope not in self.scopes:
                scope.step = partial(_steps_since, optimizer_steps(thread), thread)
                self.scopes.append(scope)

    def open(self, unit: Unit) -> None:
        """Open missing connections for the groups of `unit`. Collective over each group."""
        for links in unit.links:
            scope = scope_of(links.everyone)
            if scope is not None:
                links.open(scope)

    def publish(self, error: BaseException | None, where: str) -> None:
        """Report that this rank failed: the others raise when they wait for its messages. An error that only follows
        from another rank's failure is not reported again."""
        text = f"{where} ended with an exception" if error is None else f"{type(error).__name__}: {error}"
        for scope in self.scopes:
            scope.failures.must_meet = scope.failures.has_raised = True
        if any(scope.failures.cause is not None or scope.causes() for scope in self.scopes) and self._follows(error):
            return
        for scope in self.scopes:
            with scope.within(scope.told or where):
                scope.publish("raised", text, vague=error is None)

    def _follows(self, error: BaseException | None) -> bool:
        # If any scope has no report yet, ranks that wait there need one.
        known = all(scope.causes() for scope in self.scopes)
        return known and (error is None or isinstance(error, PeerFailed | RanksDisagree))

    @contextmanager
    def disagreeing(self, scope: Scope) -> Iterator[None]:
        """`RanksDisagree`, raised inside on the mesh of `scope`, is reported on the other meshes, whose ranks would
        wait forever."""
        try:
            yield
        except RanksDisagree as error:
            for other in self.scopes:
                if other is not scope and not other.failures.must_meet:
                    other.publish("disagree", str(error))
                # Report once: the other ranks of `scope` report the same.
                other.failures.has_raised = True
            raise

    def attempt_failed(self, error: BaseException, where: str) -> None:
        """`publish` for a guarded block, which all ranks enter equally often."""
        for scope in self.scopes:
            scope.failures.attempts += 1
        self.publish(error, where)

    def come_together(self, what: str) -> None:
        """Wait until all ranks are here. Raises `PeerFailed` if a rank failed, and `RanksDisagree` if a rank is
        elsewhere.

        Done twice: an exception (Ctrl-C) may interrupt a rank after its first message was sent. The others then notice
        that its second message is missing.
        """
        for scope in self.scopes * 2:
            with scope.within(what):
                # By a collective if there are connections on the host, else through the store.
                if not alike(scope, what):
                    scope.agree(what, "")

    def compare(self, what: str, said: str, weight: Callable[[str], int]) -> dict[int, str]:
        """The answers of all ranks to `what`, by rank. With several scopes, the answer of the highest `weight` is
        passed on. Collective. Raises `PeerFailed` if a rank failed."""
        found: dict[int, str] = {}
        # Twice, so that answers from one scope reach the ranks of the others.
        for scope in self.scopes * min(len(self.scopes), 2):
            answers = scope.agree(what, said) or dict.fromkeys(scope.ranks, said)
            found |= {rank: answer for rank, answer in answers.items() if weight(answer) >= weight(found.get(rank, ""))}
            said = max(found.values(), key=weight)
        return found

    def meet(self) -> bool:
        """After a failure, wait for all ranks before anything is sent. Returns whether ranks had diverged."""
        for scope in self.scopes:
            with self.disagreeing(scope):
                scope.refuse_failure()
        if had_losses and any(scope.losses.current is not None for scope in self.scopes):
            for scope in self.scopes:
                if scope.failures.must_meet and scope.losses.current is None:
                    scope.losses.note_under_way("a message of another mesh")
        renewed = any([scope.meet() for scope in self.scopes if scope.failures.must_meet])
        refuse_mixed_states(self.scopes)
        for scope in self.scopes:
            # Nothing more is to be said of the last meeting: a root asks for this method only where something is.
            scope.states = {}
        return renewed


def _steps_since(before: int, thread: int) -> int:
    return optimizer_steps(thread) - before


def peers_below(*models: nn.Module) -> Peers:
    """The peers of all units of `models`, with or without a root yet. Raises `ValueError` for a model without units."""
    units = []
    for model in models:
        below = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
        if not below:
            raise ValueError(
                f"expected a model that fully_shard was applied to, found a {type(model).__name__} without a sharded "
                f"module"
            )
        units += below
    roots = dict.fromkeys(unit.root for unit in units if unit.root is not None)
    found = Peers((), threading.get_ident())
    scopes = [cast(Scope, scope) for root in roots for scope in root.companion.scopes]
    if not scopes:  # no root formed yet
        scopes = [scope for unit in units for links in unit.links if (scope := scope_of(links.everyone))]
    found.scopes = list(dict.fromkeys(scopes))
    return found


# ---- steps taken -----------------------------------------------------------------------------------------------------
# Counts the optimizer steps of the shards of one mesh; all ranks must have the same count.
#
# If one rank raises in `optimizer.step()` while others complete theirs, and all catch the error and continue, that rank
# stays one step late. So ranks exchange their counts when they meet after a failure, and whether a step was
# interrupted halfway, which cannot be undone. If they differ, every forward of the model raises on all ranks until a
# consistent state is loaded, or the user declares the state consistent.
#
# The same after a loss on a device, which the scope reports beside this word (peers/wait.py). Then a load must have
# written everything (`Recovery`, below).


def refuse_mixed_states(scopes: Iterable[Scope]) -> None:
    """Raise `RanksDisagree` on all ranks of a scope whose steps differed at the last meeting, or whose model is lost on
    a device. The ranks meet again before the next forward."""
    for scope in scopes:
        if len(scope.states) > 1 or any(HALF in state or LOST in state for state in scope.states):
            scope.failures.must_meet = True
            raise lost_error(scope) if LOST in "".join(scope.states) else _error(scope.states)


def _error(states: Mapping[str, list[int]]) -> RanksDisagree:
    told = []
    for state, ranks in states.items():
        count, _, half = state.partition(HALF)
        middle = f", and the middle of one of {half}," if half else ""
        told.append(f"{count or '0'}{middle} on {shown_ranks(ranks)}")
    return RanksDisagree(
        f"expected all ranks to have taken the same optimizer steps since the last load, found {' and '.join(told)}: a "
        f"rank raised where others took their step, so the shards are from different steps; load a checkpoint "
        f"on all ranks (fullshard.checkpoint.load, or load_state_dict of the model), or restore the state yourself "
        f"and call fullshard.mark_restored(model)",
        what="optimizer steps",
        by_rank={rank: state for state, ranks in states.items() for rank in ranks},
    )


def units_restored(units: Iterable[Unit], source: str = "") -> None:
    """The shards of `units` were loaded, or are consistent again for another reason."""
    _forget((links.everyone for unit in units for links in unit.links), source)


def tensors_restored(tensors: Iterable[Tensor], source: str = "") -> int:
    """`tensors` were loaded. Returns how many are sharded parameters or values of their state dict."""
    tensors = list(tensors)
    note_written(tensors)
    owners = [owner for owner in map(Owner.of, tensors) if owner is not None]
    for owner in owners:
        note_row_loaded(owner)
    _forget((owner.ranks for owner in owners), source)
    return len(owners)


def _forget(meshes: Iterable[tuple[int, ...]], source: str) -> None:
    for ranks in dict.fromkeys(meshes):
        scope = scope_of(ranks)
        if scope is not None:
            program_of(scope).forget_steps(source)


# ---- the model -------------------------------------------------------------------------------------------------------
# What has to be loaded after a model on a device was lost (peers/wait.py), and whether it was.

_by_scope: weakref.WeakKeyDictionary[Scope, weakref.WeakSet[Recovery]] = weakref.WeakKeyDictionary()
# Held where that is added to, or looked through: a thread may shard a model while another one loads its own.
_LOCK = threading.RLock()


class Recovery:
    """The parameters and persistent buffers below `model`, the module of a root with `units` on the meshes of `scopes`,
    and which of them were not loaded since the last loss."""

    def __init__(self, model: nn.Module, units: Iterable[Unit], scopes: Sequence[Scope]) -> None:
        self._model = weakref.ref(model)
        self._scopes = list(scopes)
        # Sharded parameters by their places on modules: a tied one has several, and is loaded once.
        self._owners = {
            (id(slot.module), slot.name): param.owner for unit in units for param in unit.params for slot in param.slots
        }
        # Dotted names of what is not loaded yet, and the epochs of the losses since which it is not.
        self._left: dict[object, str] = {}
        self._epochs = [-1] * len(self._scopes)
        with _LOCK:
            for scope in self._scopes:
                _by_scope.setdefault(scope, weakref.WeakSet()).add(self)
        for module in model.modules():
            if any(True for _ in _places(module)):
                counted = _Counted(weakref.ref(self))
                module.register_load_state_dict_pre_hook(counted.before)
                module.register_load_state_dict_post_hook(counted.after)
        asks_on_devices(_step_on_device)

    def look(self) -> bool:
        """Whether something is lost. Ranks that failed may load before they meet: what is under way then is lost."""
        for scope in self._scopes:
            if scope.failures.must_meet:
                scope.losses.note_under_way()
        epochs = [-1 if scope.losses.current is None else scope.losses.current.epoch for scope in self._scopes]
        if any(map(operator.gt, epochs, self._epochs)):
            # A model that was dropped shares the mesh until its cycles are collected, and nobody can load it.
            collect_garbage()
            self._left = self._everything()
        self._epochs = epochs
        return max(epochs) >= 0

    def missing(self) -> list[str]:
        """The dotted names of what was not loaded since the loss."""
        return list(self._left.values()) if self.look() and self._model() is not None else []

    def note(self, module: nn.Module, names: Iterable[str]) -> None:
        """`names` of `module` were written."""
        for name in names:
            self._left.pop(self._key(module, name), None)
        self._settle()

    def note_tensors(self, owners: Iterable[Owner], memory: Collection[int]) -> None:
        """Sharded parameters of `owners` were written, and plain tensors whose memory begins at one of `memory`."""
        model = self._model()
        if model is None or not self.look():
            return
        for owner in owners:
            self._left.pop(owner, None)
        for module in model.modules():
            for name, tensor in _places(module):
                if not isinstance(tensor, DTensor) and tensor.data_ptr() in memory:
                    self._left.pop(self._key(module, name), None)
        self._settle()

    def _everything(self) -> dict[object, str]:
        model, found = self._model(), dict[object, str]()
        for prefix, module in () if model is None else model.named_modules():
            prefix = f"{clean_name(prefix)}." if prefix else ""
            for name, _ in _places(module):
                found.setdefault(self._key(module, name), prefix + name)
        return found

    def _key(self, module: nn.Module, name: str) -> object:
        place = id(module), name
        return self._owners.get(place) or place

    def _settle(self) -> None:
        if not self._left:
            for scope in self._scopes:
                if scope.losses.current is not None and not missing_on(scope):
                    scope.losses.restore()


class _Counted:
    """The load hooks of one module."""

    def __init__(self, recovery: Callable[[], Recovery | None]) -> None:
        self._recovery = recovery
        # The names in the state dict of the running load, its list of errors, and how many there were.
        self._names: list[str] = []
        self._errors: list[str] = []
        self._count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module belongs to no root.
        return _Counted, (_no_recovery,)

    def before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A load of `module` begins."""
        recovery = self._recovery()
        if recovery is not None and recovery.look():
            self._names = [name for name, _ in _places(module) if prefix + name in state_dict]
            self._errors = rest[-1]
            self._count = len(self._errors)

    def after(self, module: nn.Module, *_: object) -> None:
        """The load is over."""
        names, self._names = self._names, []
        errors, self._errors = self._errors, []
        recovery = self._recovery()
        if names and recovery is not None and len(errors) == self._count:
            recovery.note(module, names)


def _no_recovery() -> None:
    return None


def _places(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters and persistent buffers, by name, without empty ones."""
    temporary = non_persistent_buffers(module)
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    for name, tensor in (*module.named_parameters(recurse=False, remove_duplicate=False), *own):
        if name not in temporary and tensor.numel():
            yield name, tensor


def missing_on(scope: Scope) -> list[str]:
    """The names of what was not loaded since the loss of `scope`, of all models on its mesh."""
    with _LOCK:
        recoveries = tuple(_by_scope.get(scope, ()))
    return [name for recovery in recoveries for name in recovery.missing()]


def _recoveries() -> dict[Recovery, None]:
    with _LOCK:
        return {recovery: None for found in tuple(_by_scope.values()) for recovery in tuple(found)}


def note_written(tensors: Sequence[Tensor]) -> None:
    """`tensors` of models, or of their state dicts, were written by a load."""
    for recovery in _recoveries() if _by_scope else ():
        owners = [owner for owner in map(Owner.of, tensors) if owner is not None]
        plain = {tensor.data_ptr() for tensor in tensors if not isinstance(tensor, DTensor) and tensor.numel()}
        recovery.note_tensors(owners, plain)


def declare_sound(model: nn.Module) -> None:
    """The user restored `model`, and the state of its optimizers, in a way of their own."""
    for recovery in _recoveries() if _by_scope else ():
        if recovery.look():
            for module in model.modules():
                recovery.note(module, [name for name, _ in _places(module)])
    with _LOCK:
        scopes = list(_by_scope)
    for scope in scopes:
        if scope.losses.current is None:
            scope.losses.learned_at = 0.0


def mark_restored(model: nn.Module | Iterable[Tensor], *, source: str = "") -> None:
    """Declare the state of `model` consistent again after one rank raised in an optimizer step that others took, or
    after an abort on a device while messages were under way.

    Until all ranks call this or load a checkpoint, every forward raises. `fullshard.checkpoint.load` and the model's
    `load_state_dict` call it themselves. Call it on all ranks if you restored parameters and optimizer state in another
    way: from copies, or by a load that writes into tensors. After an abort on a device a model must be given as a
    whole: tensors count for themselves alone, and the state of optimizers does not count as restored with them.
    model: a model with sharded modules, or sharded parameters as in the model or its state dict.
    source: a description of what was loaded. The ranks compare it in their next step, to detect that they loaded
        different checkpoints. `fullshard.checkpoint.load` passes the save it loaded.

    Raises `ValueError` if nothing is sharded.
    """
    expect_text("source", source)
    model = model if isinstance(model, nn.Module) else expect_tensors("model", model)
    units = module_units(model) if isinstance(model, nn.Module) else []
    units_restored(units, source)
    if isinstance(model, nn.Module):
        declare_sound(model)
    if not units and (isinstance(model, nn.Module) or not tensors_restored(model, source)):
        raise ValueError(
            "model: expected one that fully_shard was applied to, or its parameters, found nothing sharded"
        )


def lost_error(scope: Scope) -> RanksDisagree:
    """The error of a forward, an `unshard` or an optimizer's step while a model on the mesh of `scope` is lost."""
    loss, missing = scope.losses.current, missing_on(scope)
    ranks = [rank for state, ranks in scope.states.items() if lost_in(state) >= 0 for rank in ranks]
    if loss is None:
        what = f"that {shown_ranks(sorted(ranks))} did not load it yet"
    else:
        what = f"that on {shown_ranks(loss.ranks)} {loss.text}"
    left = f"; not loaded here yet: {first_few(missing)}" if missing else ""
    return RanksDisagree(
        f"expected a model whose values are sound, found it lost on a device: {what}, and what was queued after that, "
        f"steps of optimizers too, ran on memory that never arrived. Load a checkpoint on all ranks: all parameters "
        f"and persistent buffers of the model (load_state_dict, or fullshard.checkpoint.load), and the state of its "
        f"optimizers; or restore them yourself and call fullshard.mark_restored(model){left}",
        what="a lost model",
        by_rank={rank: state for state, found in scope.states.items() for rank in found},
    )


# ---- optimizers ------------------------------------------------------------------------------------------------------

# Where an optimizer keeps its `_Times`.
_TIMES = "_fullshard_times"


class _Times:
    """When an optimizer took its last step, and when its state was last loaded, by `time.monotonic`.

    Not the identity of its state: a later dict may have the id of one that was freed, and a load may write in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepped = self.loaded = 0.0
        optimizer.register_load_state_dict_post_hook(self._note_load)

    def _note_load(self, _: Optimizer) -> None:
        self.loaded = time.monotonic()


def _step_on_device(optimizer: Optimizer) -> None:
    """`optimizer` is about to take a step. Raises if its parameters are lost, or its state is from before a loss."""
    times = optimizer.__dict__.get(_TIMES)
    if times is None:
        times = optimizer.__dict__[_TIMES] = _Times(optimizer)
    if had_losses:
        for scope in _scopes_of(optimizer):
            if scope.losses.current is not None:
                raise lost_error(scope)
            if (
                optimizer.state
                and 0 < times.stepped < scope.losses.learned_at
                and times.loaded < scope.losses.learned_at
            ):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: expected state that was loaded after the model was lost, found "
                    f"the state of its steps before, which may have read memory that never arrived; load it too "
                    f"(optimizer.load_state_dict), or build a new optimizer, on all ranks"
                )
    times.stepped = time.monotonic()


def _scopes_of(optimizer: Optimizer) -> list[Scope]:
    """The meshes of its sharded parameters."""
    owners = (Owner.of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    meshes = dict.fromkeys(owner.ranks for owner in owners if owner is not None)
    return [scope for ranks in meshes if (scope := scope_of(ranks)) is not None]
