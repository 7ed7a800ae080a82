"""The ranks of one mesh: they compare values, learn of each other's failures, and meet after one.

    agree      all ranks compare a value; no rank continues before all have asked
    publish    report that this rank failed, why, and how far it had come
    meet       synchronise all ranks after a failure, wherever each of them was; a new *epoch* begins

All counters restart at a meeting, and earlier failures no longer count. An exception at any line ends the epoch
(`must_meet`) and is reported to all ranks, so no rank can stay one question ahead.

A question costs each rank three requests, and one for each look at the answer. If all agree, nothing else is read.
Otherwise one rank per answer writes it down, and the last one to ask combines them.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, TypeVar

from .store import ranks_of, runs
from .wait import (
    LOST,
    PERHAPS,
    TEXT_CHARACTERS,
    AnyWatch,
    Failures,
    Fault,
    Loss,
    PeerFailed,
    RanksDisagree,
    Wait,
    lost_in,
    settled,
    shown_ranks,
    silent_store,
    store_answers,
    variants,
    wait_until,
)

T = TypeVar("T")

# ---- question --------------------------------------------------------------------------------------------------------
# Comparisons of texts that are long when sent in full.


def ask(scope: Scope, what: str, text: str, *, or_distinct: bool = False) -> dict[int, str] | None:
    """None if all ranks of `scope` have the same `text`, else a digest of each rank's text. Collective.

    `or_distinct`: an empty dict if no two ranks have the same text, which takes no more requests of a rank than the
    answer that all are the same.
    """
    return scope.agree(what, hashlib.blake2s(text.encode(), digest_size=16).hexdigest(), or_distinct=or_distinct)


def same_on_all(scope: Scope, what: str, text: str) -> bool:
    """Whether all ranks of `scope` have the same `text`. Collective. Does not fetch the other ranks' texts, so a
    difference costs nothing extra."""
    return scope.agree(what, hashlib.blake2s(text.encode(), digest_size=16).hexdigest(), in_full=False) is None


def tell(scope: Scope, what: str, text: str) -> dict[int, str]:
    """The texts of all ranks of `scope`. Collective: call it after `ask` reported a difference."""
    answer = scope.agree(what, text)
    return dict.fromkeys(scope.ranks, text) if answer is None else answer


# ---- scope -----------------------------------------------------------------------------------------------------------

_AFTER = "the next step after a failure"
# The first few failing ranks tell all others. Later ones use only their own record, which the leader reads.
_TELLERS = 3


class Group(Protocol):
    """The interface of a data group to its scope (comm/data_group.py)."""

    name: str
    issued: int

    @property
    def is_cut(self) -> bool: ...
    @property
    def is_connected(self) -> bool: ...
    def cut(self) -> None: ...
    def expire(self) -> None: ...
    def close(self) -> None: ...


class Groups(dict[str, Group]):
    """The data groups of a scope, by name. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._named: Counter[str] = Counter()
        # Held while they are cut or given up, and while the scope's faults change.
        self.lock = threading.RLock()

    def new_name(self, name: str) -> str:
        """`name`, made unique among them."""
        self._named[name] += 1
        return f"{name} #{self._named[name]}" if self._named[name] > 1 else name

    def all(self) -> list[Group]:
        """A list of the present ones: another thread may add one."""
        return list(self.values())

    def check(self) -> None:
        """Raise if a backend ended connections itself."""
        for group in self.all():
            getattr(group, "check", bool)()

    @property
    def issued(self) -> dict[str, int]:
        """How many messages this rank sent over each."""
        return {group.name: group.issued for group in self.all()}

    @property
    def under_way(self) -> str:
        """The name of a message that is under way on a device, or ""."""
        # Not of connections that were cut: their messages were noted before.
        names = [getattr(group, "under_way", "") for group in self.all() if not group.is_cut]
        return next(filter(None, names), "")


class Scope:
    """The ranks of one mesh. Methods wait in the calling thread, and raise `PeerFailed` or `RanksDisagree`."""

    def __init__(self, watch: AnyWatch, ranks: tuple[int, ...], apart: str = "") -> None:
        self.watch, self.ranks = watch, ranks
        self.name = _name(ranks, apart)
        # The number of meetings; that after which connections were made; the number of questions since the last one.
        self.epoch = self.renewed = self.asked = 0
        # The current activity, for error texts, or a function that returns it; and the optimizer steps taken.
        self.doing: str | Callable[[], str] = ""
        self.step: Callable[[], int] = lambda: -1
        self.groups = Groups()
        # The failures of this epoch; and the faults that this rank learned of in any epoch, and when.
        self.failures = Failures()
        self.faults: list[tuple[Fault, float]] = []
        self.losses = Losses(self)
        # One word that each rank reports in a meeting; and the ranks by word of the last meeting.
        self.state: Callable[[], str] = lambda: ""
        self.states: dict[str, list[int]] = {}
        # The error text, by question, if ranks wait for each other while some of them ask it: of the value, the ranks
        # that ask, another rank, and where that one waits.
        self.explained_by: dict[str, Callable[[str, Sequence[int], int, str], str]] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.watch.rank

    @property
    def told(self) -> str:
        """This rank's activity, in words."""
        return self.doing if isinstance(self.doing, str) else self.doing()

    @property
    def base(self) -> str:
        """The prefix of the keys of this epoch."""
        return f"{self.watch.records.prefix}/{self.name}/{self.epoch}"

    @property
    def far(self) -> dict[str, Any]:
        """How far this rank has come, for its record."""
        # Only connected groups: ranks that wait for connections wait for ranks without them.
        connected = {group.name: group.issued for group in self.groups.all() if group.is_connected}
        return {"epoch": self.epoch, "asked": self.asked, "issued": connected}

    # ---- agreement -----------------------------------------------------------------------------------------

    def agree(self, what: str, value: str, *, in_full: bool = True, or_distinct: bool = False) -> dict[int, str] | None:
        """Compare `value` on all ranks. Collective, in the same order with the same `what`.

        Returns None if all are equal; else every rank's value, on all ranks, or without `in_full` an empty dict; also
        with `or_distinct`, if no two ranks' are equal. Raises `RanksDisagree` on all ranks if some are at another
        `what`.
        """
        with self.reporting(what), self.store_answers(what):
            answers = self._agree(what, value, in_full=in_full, or_distinct=or_distinct)
        if answers is None:
            return None
        if len({asked for asked, _ in answers.values()}) > 1:
            # Some ranks may have sent messages that others did not.
            self.failures.must_meet = True
            raise self._apart(answers, what)
        return {rank: told for rank, (_, told) in answers.items()}

    def _apart(self, answers: Mapping[int, tuple[str, str]], what: str) -> RanksDisagree:
        """The error of ranks at different questions: in the words of one that explains why others are elsewhere, if
        there is one."""
        by_rank = {rank: f"{asked}: {told}" for rank, (asked, told) in answers.items()}
        questions = variants({rank: asked for rank, (asked, _) in answers.items()})
        for asked, explain in self.explained_by.items():
            if asked in questions:
                others = [rank for rank in answers if rank not in questions[asked]]
                told = answers[questions[asked][0]][1]
                asking = [rank for rank in questions[asked] if answers[rank][1] == told]
                return RanksDisagree(
                    explain(told, asking, others[0], answers[others[0]][0]), what=asked, by_rank=by_rank
                )
        found = ", ".join(f"{shown_ranks(ranks)} at {asked}" for asked, ranks in questions.items())
        return RanksDisagree(
            f"expected all ranks to come to the same places in the same order, found {found}; make the same calls with "
            f"the same arguments and settings (FULLSHARD_GUARD) on all ranks",
            what=what,
            by_rank=by_rank,
        )

    def _agree(self, what: str, value: str, *, in_full: bool, or_distinct: bool) -> dict[int, tuple[str, str]] | None:
        """The question and the value of each rank, in its order; None if all are equal."""
        store, number = self.watch.records.store, self.asked
        key = f"{self.base}/ask/{number}"
        digest = hashlib.blake2s(f"{what}\0{value}".encode(), digest_size=12).hexdigest()
        # By question: ranks that are at another one count elsewhere.
        kinds = f"{key}/kinds/{what}"
        if store.add(f"{key}/{digest}", 1) == 1:
            store.set(f"{key}/text/{digest}", json.dumps([what, value]))
            if or_distinct:
                store.add(kinds, 1)
        last = False
        try:
            last = store.add(f"{key}/all", 1) == len(self.ranks)
            # After the vote: a rank interrupted before it counts as absent.
            self.asked = number + 1
            if last:
                same = store.add(f"{key}/{digest}", 0) == len(self.ranks)
                self._give_up_keys(number)
                distinct = or_distinct and store.add(kinds, 0) == len(self.ranks)
                store.set(f"{key}/verdict", f"same {digest}" if same else "distinct" if distinct else "differ")
            else:
                self._wait_for(f"{key}/verdict", number, what, value)
        except BaseException as error:
            if not self._is_answered(key, error):
                raise
        verdict = store.get(f"{key}/verdict")
        if verdict == b"distinct":
            # The run continues: leave nothing of the size of the world in the store.
            for own in (f"{key}/{digest}", f"{key}/text/{digest}"):
                store.delete_key(own)
            return {}
        if verdict != b"differ":
            return None
        self.watch.records.append(f"{key}/who", f"{self.rank}:{digest} ")
        if last:
            found: dict[str, list[int]] = {}
            wait_until(lambda: self._all_told(key, found), self._asking(number, what, value), alone=True)
            answers = [[runs(ranks), *json.loads(store.get(f"{key}/text/{one}"))] for one, ranks in found.items()]
            store.set(f"{key}/answer", json.dumps(answers))
        elif in_full:
            self._wait_for(f"{key}/answer", number, what, value)
        if not in_full:
            return {}
        answers = json.loads(store.get(f"{key}/answer"))
        return dict(sorted((rank, (asked, text)) for ranks, asked, text in answers for rank in ranks_of(ranks)))

    def _is_answered(self, key: str, error: BaseException) -> bool:
        """Give up a question that `error` left, so that later ranks do not find it answered and continue alone. Returns
        whether it was already answered: then the others continue, and so may this rank."""
        store, world = self.watch.records.store, len(self.ranks)
        with suppress(RuntimeError, OSError):
            # The counter is the number of votes plus `world` for each rank that gave up.
            if store.add(f"{key}/all", world) % world or not isinstance(error, PeerFailed | RanksDisagree):
                return False
            for _ in range(100):
                if store.check([f"{key}/verdict"]):
                    self.failures.has_raised = False
                    return True
                self.watch.host.sleep(0.01)
        return False

    def _all_told(self, key: str, found: dict[str, list[int]]) -> bool:
        pairs = dict(pair.split(":") for pair in self.watch.records.read(f"{key}/who").split())
        if len(pairs) < len(self.ranks):
            return False
        for rank in self.ranks:
            found.setdefault(pairs[str(rank)], []).append(rank)
        return True

    def _give_up_keys(self, number: int) -> None:
        """Delete the keys of the previous question, whose answer every rank has read. The store would keep them."""
        store, key = self.watch.records.store, f"{self.base}/ask/{number - 1}"
        if number and store.check([f"{key}/verdict"]):
            digest = store.get(f"{key}/verdict").decode().removeprefix("same ")
            if digest not in ("differ", "distinct"):
                for old in (f"{key}/all", f"{key}/{digest}", f"{key}/text/{digest}", f"{key}/verdict"):
                    store.delete_key(old)

    def _asking(self, number: int, what: str, value: str) -> Wait:
        # The value is for `explained_by`. Records must be small, because one rank reads all of them.
        also = value[:TEXT_CHARACTERS] if what in self.explained_by else ""
        return Wait("ask", self, what, name=what, number=number, also=also)

    def _wait_for(self, key: str, number: int, what: str, value: str) -> None:
        wait_until(lambda: self.watch.records.store.check([key]), self._asking(number, what, value))

    # ---- failures ------------------------------------------------------------------------------------------

    def publish(self, kind: str, text: str, *, vague: bool = False) -> None:
        """Report that this rank failed to all ranks that wait for it. `vague`: the cause is not known yet; call it
        again with the cause."""
        failures = self.failures
        failures.must_meet = True
        known = failures.own
        if known is not None and known.attempts >= failures.attempts and (vague or not known.vague):
            return
        fault = replace(self.own_fault(kind, text[:TEXT_CHARACTERS]), attempts=failures.attempts, vague=vague)
        failures.own = fault
        # If the store ended with the process that served it, no rank can be notified.
        with suppress(RuntimeError, OSError):
            self.watch.post()
            if self.watch.records.store.add(f"{self.base}/told", 1) <= _TELLERS:
                self.watch.tell(self.ranks, self.telling(fault))

    def own_fault(self, kind: str, text: str) -> Fault:
        """A fault of this rank, with how far it has come."""
        far: dict[str, Any] = {"issued": self.groups.issued, "asked": self.asked, "block": self.failures.block}
        return Fault(self.rank, kind, text, self.name, self.epoch, self.step(), self.told, **far)

    @contextmanager
    def reporting(self, where: str) -> Iterator[None]:
        """An exception that leaves the block left a wait of this scope, and ends the epoch. Reports it to the other
        ranks, unless one of them failed first. `where`: for errors, if no activity of this rank is known."""
        try:
            yield
        except BaseException as error:
            failures = self.failures
            failures.must_meet = failures.has_raised = failures.is_torn = True
            if not self.causes():
                with self.within(self.told or where):
                    self.publish("raised", f"{type(error).__name__}: {error}")
            raise

    def causes(self) -> list[Fault]:
        """The faults of other ranks in this epoch, in order."""
        return [fault for fault, _ in list(self.faults) if fault.epoch == self.epoch and self.is_of_others(fault)]

    def telling(self, fault: Fault) -> list[Fault]:
        """`fault`, preceded by the last known ones: telling overwrites messages of other ranks."""
        known = [one for one, _ in list(self.faults)[-3:] if one.epoch == self.epoch and one != fault]
        return [*known, fault]

    def is_of_others(self, fault: Fault) -> bool:
        """Whether it may end waits of this rank."""
        return fault.rank != self.rank or fault.is_found

    def note_fault(self, fault: Fault, now: float) -> None:
        """Record a fault. Thread-safe."""
        with self.groups.lock:
            faults = list(self.faults)
            if fault.epoch >= self.epoch and all(known != fault for known, _ in faults):
                # A later report of the same failure replaces a vague one.
                same = (fault.rank, fault.epoch)
                vague = [one for one in faults if one[0].vague and (one[0].rank, one[0].epoch) == same]
                if vague:
                    self.faults = [(fault, one[1]) if one in vague else one for one in faults]
                else:
                    self.faults.append((fault, now))
                if fault.epoch == self.epoch and fault.is_found:
                    self.failures.must_meet = True

    def end(self, wait: Wait, fault: Fault) -> None:
        """End `wait` because of `fault`. Thread-safe."""
        wait.end(fault)
        if wait.kind == "message":
            self.fail(fault)

    def fail(self, fault: Fault, spoiled: str = "") -> None:
        """Cut all data groups because of `fault`. Messages under way on a device are lost; `spoiled`: one that failed
        already."""
        with self.groups.lock:
            self.failures.cause, self.failures.must_meet = fault, True
            self.losses.note_under_way(spoiled)
            for group in self.groups.all():
                group.cut()

    def store_answers(self, waiting: str) -> AbstractContextManager[None]:
        """Replace the store's connection errors, which mean that the store is gone."""
        return store_answers(waiting, self.without_store)

    def made_within(self, wait: Wait, make: Callable[[], T], lost: type[Exception]) -> T:
        """`make()`, which connects ranks, inside of `wait`; it raises `lost` if it cannot reach the store. A wait that
        ends early leaves the thread to its time limit, and nobody uses what it makes."""
        made: Future[T] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
            wait.wake()

        threading.Thread(target=run, name="fullshard connects", daemon=True).start()
        wait_until(made.done, wait)
        try:
            return made.result()
        except lost as error:
            raise self.without_store().error(wait.doing) from error

    def without_store(self) -> Fault:
        """The fault if the store is gone: the last rank that ended or was lost, or the store itself."""
        gone = [fault for fault, _ in list(self.faults) if fault.kind in ("ended", "lost") and self.is_of_others(fault)]
        return gone[-1] if gone else silent_store(self.name, self.epoch)

    def refuse_failure(self) -> None:
        """Raise the reason why the data groups were cut, or a disagreement, if not raised yet."""
        told = [fault for fault in self.causes() if fault.kind == "disagree"]
        failures = self.failures
        fault = failures.cause or (told[-1] if told else None)
        if fault is not None and not failures.has_raised:
            failures.has_raised = failures.must_meet = True
            raise fault.error(self.told)

    def resume(self) -> bool:
        """Before a question or message outside of a step: meet if there was a failure, as at a forward. Returns whether
        connections must be rebuilt."""
        if not self.failures.must_meet:
            return False
        self.refuse_failure()
        return self.meet()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks do `what` inside, outside of a step, by several messages. If one raises, all raise, and they meet
        before the next message."""
        with self.within(what), self.reporting(what):
            self.resume()
            yield

    @contextmanager
    def within(self, what: str | Callable[[], str]) -> Iterator[None]:
        """This rank does `what` inside, for error texts; a function that returns it is called if there is one."""
        doing, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = doing

    # ---- meetings ------------------------------------------------------------------------------------------

    def meet(self) -> bool:
        """After a failure: wait for all ranks and begin a new epoch. Returns whether connections must be rebuilt.

        Failed ranks come at their next forward; the others when their wait for those ends. If all had sent the same
        messages (they raised at the same place), connections stay. Raises `PeerFailed` if a rank ended, is lost, or
        failed in this attempt before it came. May be retried after any exception.
        """
        with self.store_answers(_AFTER):
            return self._meet()

    def _meet(self) -> bool:
        if self.failures.own is None and not self.causes():
            # An exception came before the failure was published.
            self.publish("raised", "it left its step")
        records, attempts = self.watch.records, self.failures.attempts
        key = f"{self.base}/meet"
        cut = self.failures.is_torn or any(group.is_cut for group in self.groups.all())
        mine = hashlib.blake2s(json.dumps(sorted(self.groups.issued.items())).encode(), digest_size=6).hexdigest()
        word = self.losses.marked(self.state())
        records.append(key, f"{self.rank}:{attempts}:{'cut' if cut else mine}:{word} ")
        wait = Wait("meet", self, _AFTER)
        done = f"{key}/done"
        if self.rank != self.ranks[0]:
            wait_until(lambda: records.store.check([done]), wait)
        elif not records.store.check([done]):  # else this rank was interrupted after all others continued
            found: dict[int, tuple[int, str, str]] = {}
            wait_until(lambda: self._all_here(key, found), wait, alone=True)
            ways = {how for _, how, _ in found.values()}
            renews = len(ways) > 1 or "cut" in ways
            words = {rank: settled(state, self.epoch, renews=renews) for rank, (_, _, state) in sorted(found.items())}
            by_word = sorted(variants(words).items(), key=lambda entry: entry[1])
            records.store.set(done, json.dumps([renews, {word: runs(ranks) for word, ranks in by_word}]))
        renews, told_states = json.loads(records.store.get(done))
        self.states = {state: ranks_of(found) for state, found in told_states.items()}
        self.losses.learn(self.states)
        with self.groups.lock:
            if renews:
                for group in self.groups.all():
                    group.expire()
            following = self.epoch + 1
            renewed = following if renews else self.renewed
            # In one update: an exception before it repeats the meeting, one after it does not.
            vars(self).update(epoch=following, renewed=renewed, asked=0, failures=Failures())
            self.faults = [(fault, since) for fault, since in self.faults if fault.epoch >= self.epoch]
        return bool(renews)

    def _all_here(self, key: str, found: dict[int, tuple[int, str, str]]) -> bool:
        """Whether all ranks are here with equal attempts: if a peer failed again, a rank learns of it and returns."""
        for rank, attempts, how, state in (told.split(":") for told in self.watch.records.read(key).split()):
            found[int(rank)] = int(attempts), how, state
        return len(found) == len(self.ranks) and len({attempts for attempts, _, _ in found.values()}) == 1


@cache
def _name(ranks: tuple[int, ...], apart: str) -> str:
    """A name for `ranks`, equal on all of them."""
    return hashlib.blake2s(f"{','.join(map(str, ranks))}{apart}".encode(), digest_size=6).hexdigest()


# ---- losses on a device ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Losses:
    """The losses of the ranks of a scope on devices. Thread-safe."""

    _scope: Scope
    # The loss that is not restored yet; the last epoch whose loss was restored; and when this rank learned of the last
    # loss, by `time.monotonic`.
    current: Loss | None = None
    restored: int = -1
    learned_at: float = 0.0

    def note_under_way(self, spoiled: str = "") -> None:
        """This epoch is over, and messages under way on a device will not complete: what came after them is lost.
        `spoiled`: one that failed already."""
        found = spoiled or self._scope.groups.under_way
        if found and self.restored < self._scope.epoch:
            self._lose(self._scope.epoch, (self._scope.rank,), f"{found} was under way")

    def _lose(self, epoch: int, ranks: tuple[int, ...], text: str) -> None:
        if self.current is None or self.current.epoch < epoch:
            known = (self._scope.failures.cause, *self._scope.causes(), self._scope.failures.own)
            why = next((fault.message for fault in known if fault is not None), "")
            self.current = Loss(epoch, ranks, f"{text} when {why}" if why else text)
            self.learned_at = time.monotonic()
            key = id(self._scope)
            had_losses[key] = weakref.ref(self._scope, lambda _: had_losses.pop(key, None))

    def restore(self) -> None:
        """Note that what was lost was written anew, or is sound for another reason."""
        # No message is sent before the next meeting, so nothing more is lost in this epoch.
        self.restored, self.current = self._scope.epoch, None

    def marked(self, word: str) -> str:
        """Returns what this rank reports in a meeting whose word is `word`."""
        if self.current is not None:
            return f"{word}{LOST}{self.current.epoch}"
        return f"{word}{PERHAPS}" if self.restored < self._scope.epoch and self._scope.groups.under_way else word

    def learn(self, states: Mapping[str, Sequence[int]]) -> None:
        """After a meeting with these words, by rank: what one rank lost is lost on all of them."""
        latest = max(map(lost_in, states), default=-1)
        if latest > self.restored:
            ranks = sorted(rank for state, found in states.items() if lost_in(state) == latest for rank in found)
            self._lose(latest, tuple(ranks), "messages were under way")
            if self.current is not None and self.current.epoch == latest == self._scope.epoch:
                self.current = replace(self.current, ranks=tuple(ranks))


# Scopes that had a loss, by id; also those that were restored, for optimizers with state from before. Usually empty, so
# that a step asks one dict.
had_losses: dict[int, weakref.ref[Scope]] = {}


def loss_over(ranks: Iterable[int]) -> Loss | None:
    """The loss of a mesh with all of `ranks` that is not restored yet. Thread-safe."""
    wanted = set(ranks)
    for reference in tuple(had_losses.values()):
        scope = reference()
        if scope is not None and scope.losses.current is not None and wanted <= set(scope.ranks):
            return scope.losses.current
    return None
