"""The ranks of one mesh: they answer questions together, hear of each other's failures, and meet after one.

    agree      all ranks compare a value; nobody continues before all have asked
    publish    this rank failed: how far it had come, and why
    meet       all ranks come together after a failure, wherever each of them was; an *epoch* ends, the next one begins

Everything is counted from the last meeting on: a failure before it is none after it. An exception at any line leaves
the scope in an epoch that is over (`must_meet`), and all ranks hear of it: nobody can be one question ahead for ever.

A question costs each rank three requests and one for each look at the answer. Where all agree nothing else is read;
where not, one rank of each answer writes it down, and the last one to ask puts all together.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

from .errors import TEXT_CHARACTERS, Fault, PeerFailed, RanksDisagree
from .store import ranks_of, runs
from .structure import shown_ranks, variants
from .wait import AnyWatch, Wait, wait_until

# ---- question --------------------------------------------------------------------------------------------------------
# Questions to the ranks of a mesh about what is long when it is sent in full.


def ask(scope: Scope, what: str, text: str) -> dict[int, str] | None:
    """Whether all ranks of `scope` have the same `text`: None, or else a digest of what each rank has.

    All of them make this call. `RanksDisagree` on all where some are at another question.
    """
    answer = scope.agree(what, hashlib.blake2s(text.encode(), digest_size=16).hexdigest())
    if answer is None or not any(": " in told for told in answer.values()):
        return answer
    _refuse_by_its_own_words(scope, answer)
    questions = variants({rank: told.rpartition(": ")[0] for rank, told in answer.items()})
    found = ", ".join(f"{shown_ranks(ranks)} at {question}" for question, ranks in questions.items())
    raise RanksDisagree(
        f"expected all ranks to come to the same places in the same order, found {found}; make the same calls with the "
        f"same arguments and settings (FULLSHARD_GUARD) on all ranks",
        what=what,
        by_rank=answer,
    )


def _refuse_by_its_own_words(scope: Scope, answer: dict[int, str]) -> None:
    """Raise `RanksDisagree` where some ranks are at a question that explains itself."""
    for asked, explain in scope.explained_by.items():
        asking = [rank for rank, told in answer.items() if told.startswith(f"{asked}: ")]
        others = [rank for rank in answer if rank not in asking]
        if asking and others:
            text = explain(answer[asking[0]].removeprefix(f"{asked}: "), asking, others[0])
            raise RanksDisagree(text, what=asked, by_rank=answer)


def same_on_all(scope: Scope, what: str, text: str) -> bool:
    """Whether all ranks of `scope`, which make this call, have the same `text`. Where not, they are not told what the
    others have, so that it costs nobody more."""
    return scope.agree(what, hashlib.blake2s(text.encode(), digest_size=16).hexdigest(), in_full=False) is None


def tell(scope: Scope, what: str, text: str) -> dict[int, str]:
    """The texts of all ranks of `scope`, which came to this call by the same answer of `ask`."""
    answer = scope.agree(what, text)
    return dict.fromkeys(scope.ranks, text) if answer is None else answer


# ---- scope -----------------------------------------------------------------------------------------------------------

_AFTER = "the next step after a failure"
# So many ranks tell all others that they failed. Later ones say it in their own record: somebody reads that.
_TELLERS = 3


class Group(Protocol):
    """A data group, as its scope knows it (comm/data_group.py)."""

    name: str
    issued: int
    is_cut: bool

    @property
    def is_connected(self) -> bool: ...
    def cut(self) -> None: ...
    def expire(self) -> None: ...
    def close(self) -> None: ...


class Scope:
    """Methods that wait do so in the thread that calls them, and raise `PeerFailed` or `RanksDisagree` in vain."""

    def __init__(self, watch: AnyWatch, ranks: tuple[int, ...], apart: str = "") -> None:
        self.watch, self.ranks, self.rank = watch, ranks, watch.rank
        self.name = _name(ranks, apart)
        self.epoch = self.renewed = self.asked = self.attempts = 0
        # What is being done, for the text of an error, or what tells it; and the optimizer steps taken.
        self.doing: str | Callable[[], str] = ""
        self.step: Callable[[], int] = lambda: -1
        self.groups: dict[str, Group] = {}
        self._named: Counter[str] = Counter()
        # What this rank published in this epoch, and what it heard in any, since when.
        self.failed: Fault | None = None
        self.heard: list[tuple[Fault, float]] = []
        # Why the data groups were cut; and whether that was raised.
        self.failure: Fault | None = None
        self.has_raised = False
        # Before anything is sent all ranks come together.
        self.must_meet = False
        # An exception left a wait: connections may be begun and not there, and others further than this rank or less.
        self.is_torn = False
        # One word that each rank says of itself when they meet, and what all of them said the last time: by word, the
        # ranks.
        self.state: Callable[[], str] = lambda: ""
        self.states: dict[str, list[int]] = {}
        # By what is asked: the error of ranks that wait for each other while some of them ask that.
        self.explained_by: dict[str, Callable[[str, Sequence[int], int], str]] = {}
        # Held while data groups are cut or made anew.
        self._cutting = threading.RLock()

    @property
    def told(self) -> str:
        """What this rank does, in words."""
        return self.doing if isinstance(self.doing, str) else self.doing()

    @property
    def base(self) -> str:
        """Of the keys of this epoch."""
        return f"{self.watch.records.prefix}/{self.name}/{self.epoch}"

    @property
    def issued(self) -> dict[str, int]:
        """How many messages this rank sent, by data group."""
        return {name: group.issued for name, group in list(self.groups.items())}

    @property
    def far(self) -> dict[str, Any]:
        """How far this rank has come, for its record."""
        # Who waits for connections waits for ranks that have none.
        connected = {name: group.issued for name, group in list(self.groups.items()) if group.is_connected}
        return {"epoch": self.epoch, "asked": self.asked, "issued": connected}

    def group_name(self, name: str) -> str:
        """`name`, told from those of data groups before it."""
        self._named[name] += 1
        return f"{name} #{self._named[name]}" if self._named[name] > 1 else name

    # ---- agreement -----------------------------------------------------------------------------------------

    def agree(self, what: str, value: str, *, in_full: bool = True) -> dict[int, str] | None:
        """Compare `value` on all ranks, which all make this call, in the same order with the same `what`.

        None where all are equal; else what each rank has, the same on all of them ("what: value" where they ask
        different things), or without `in_full` nothing.
        """
        try:
            with self._store_answers(what):
                return self._agree(what, value, in_full=in_full)
        except BaseException as error:
            self.interrupted(error, what)
            raise

    def _agree(self, what: str, value: str, *, in_full: bool) -> dict[int, str] | None:
        store, number = self.watch.records.store, self.asked
        key = f"{self.base}/ask/{number}"
        digest = hashlib.blake2s(f"{what}\0{value}".encode(), digest_size=12).hexdigest()
        if store.add(f"{key}/{digest}", 1) == 1:
            store.set(f"{key}/text/{digest}", json.dumps([what, value]))
        last = False
        try:
            last = store.add(f"{key}/all", 1) == len(self.ranks)
            # After the vote: who is interrupted before it counts as one who did not come.
            self.asked = number + 1
            if last:
                same = store.add(f"{key}/{digest}", 0) == len(self.ranks)
                self._give_up_keys(number)
                store.set(f"{key}/verdict", f"same {digest}" if same else "differ")
            else:
                self._wait_for(f"{key}/verdict", number, what, value)
        except BaseException as error:
            if not self._is_answered(key, error):
                raise
        if store.get(f"{key}/verdict") != b"differ":
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
        several = len({asked for _, asked, _ in answers}) > 1
        told = {
            rank: f"{asked}: {text}" if several else text for ranks, asked, text in answers for rank in ranks_of(ranks)
        }
        return dict(sorted(told.items()))

    def _is_answered(self, key: str, error: BaseException) -> bool:
        """`error` left a question: who comes to it now must not find it answered, and go on with nobody. Whether it was
        answered before, so that the others continue, and this rank may."""
        store, world = self.watch.records.store, len(self.ranks)
        with suppress(RuntimeError, OSError):
            # The sum of the votes, and of `world` for each that gave up.
            if store.add(f"{key}/all", world) % world or not isinstance(error, PeerFailed | RanksDisagree):
                return False
            for _ in range(100):
                if store.check([f"{key}/verdict"]):
                    self.has_raised = False
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
        """Of the question before: everybody has read its answer, who is here. A store would keep them for ever."""
        store, key = self.watch.records.store, f"{self.base}/ask/{number - 1}"
        if number and store.check([f"{key}/verdict"]):
            digest = store.get(f"{key}/verdict").decode().removeprefix("same ")
            if digest != "differ":
                for old in (f"{key}/all", f"{key}/{digest}", f"{key}/text/{digest}", f"{key}/verdict"):
                    store.delete_key(old)

    def _asking(self, number: int, what: str, value: str) -> Wait:
        # The value is for `explained_by`. A record is small: one rank reads all of them.
        also = value[:TEXT_CHARACTERS] if what in self.explained_by else ""
        return Wait("ask", self, what, name=what, number=number, also=also)

    def _wait_for(self, key: str, number: int, what: str, value: str) -> None:
        wait_until(lambda: self.watch.records.store.check([key]), self._asking(number, what, value))

    # ---- failures ------------------------------------------------------------------------------------------

    def publish(self, kind: str, text: str, *, attempts: bool = True, vague: bool = False) -> None:
        """Say that this rank failed. Everybody who waits for what it has not sent hears of it. `vague`: why is not
        known yet, and this is called again."""
        self.must_meet = True
        known = self.failed
        if known is not None and known.attempts >= self.attempts and (vague or not known.vague):
            return
        fault = Fault(
            self.rank,
            kind,
            text[:TEXT_CHARACTERS],
            self.name,
            self.epoch,
            self.step(),
            self.told,
            self.issued,
            self.asked,
            self.attempts if attempts else 0,
            vague,
        )
        self.failed = fault
        # When the store ended with the process that served it, nobody is left to be told.
        with suppress(RuntimeError, OSError):
            self.watch.post()
            if self.watch.records.store.add(f"{self.base}/told", 1) <= _TELLERS:
                self.watch.tell(self.ranks, self.telling(fault))

    def interrupted(self, error: BaseException, where: str) -> None:
        """An exception left a wait of this scope: the epoch is over. Others are told, unless it was one of theirs that
        failed first."""
        self.must_meet = self.has_raised = self.is_torn = True
        if not self.causes():
            doing, self.doing = self.doing, self.told or where
            try:
                self.publish("raised", f"{type(error).__name__}: {error}")
            finally:
                self.doing = doing

    def causes(self) -> list[Fault]:
        """What was heard of others in this epoch, in order."""
        return [fault for fault, _ in list(self.heard) if fault.epoch == self.epoch and self.is_of_others(fault)]

    def telling(self, fault: Fault) -> list[Fault]:
        """`fault` as it is told, after what was heard before: who tells overwrites what others have told."""
        known = [heard for heard, _ in list(self.heard)[-3:] if heard.epoch == self.epoch and heard != fault]
        return [*known, fault]

    def is_of_others(self, fault: Fault) -> bool:
        """Whether it is a reason for this rank to end its waits."""
        return fault.rank != self.rank or fault.is_found

    def hear(self, fault: Fault, now: float) -> None:
        """From any thread."""
        heard = list(self.heard)
        if fault.epoch >= self.epoch and all(known != fault for known, _ in heard):
            # Of several things that a rank said of its failure, the last one knows most.
            vague = [one for one in heard if one[0].vague and (one[0].rank, one[0].epoch) == (fault.rank, fault.epoch)]
            if vague:
                self.heard = [(fault, one[1]) if one in vague else one for one in heard]
            else:
                self.heard.append((fault, now))
            if fault.epoch == self.epoch and fault.is_found:
                self.must_meet = True

    def end(self, wait: Wait, fault: Fault) -> None:
        """`wait` is in vain. From any thread."""
        wait.end(fault)
        if wait.kind == "message":
            self.fail(fault)

    def fail(self, fault: Fault) -> None:
        """Cut all data groups because of `fault`."""
        with self._cutting:
            self.failure, self.must_meet = fault, True
            for group in list(self.groups.values()):
                group.cut()

    @contextmanager
    def _store_answers(self, waiting: str) -> Iterator[None]:
        """What the store itself raises inside says that it is gone, in words about connections."""
        try:
            yield
        except (PeerFailed, RanksDisagree):
            raise
        except RuntimeError as error:
            raise self.without_store().error(waiting) from error

    def without_store(self) -> Fault:
        """Why there is nobody any more to ask: who was heard of last, or that the store is gone."""
        gone = [fault for fault, _ in list(self.heard) if fault.kind in ("ended", "lost") and self.is_of_others(fault)]
        text = (
            "gave no sign of life since the store through which ranks meet is gone, with the process that served it "
            "(rank 0, or a launcher)"
        )
        return gone[-1] if gone else Fault(self.ranks[0], "lost", text, self.name, self.epoch)

    def refuse_failure(self) -> None:
        """Raise why the data groups were cut, or what was found out about this rank, when that was not done yet."""
        told = [fault for fault in self.causes() if fault.kind == "disagree"]
        fault = self.failure or (told[-1] if told else None)
        if fault is not None and not self.has_raised:
            self.has_raised = self.must_meet = True
            raise fault.error(self.told)

    def resume(self) -> bool:
        """Outside of a step something is about to be asked or sent: after a failure all ranks come together first, as
        they do at a forward. Whether connections are new."""
        if not self.must_meet:
            return False
        self.refuse_failure()
        return self.meet()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside all ranks do `what`, outside of a step, by several messages: an exception of one rank is one of all,
        and after it they come together first."""
        doing, self.doing = self.doing, what
        try:
            self.resume()
            yield
        except BaseException as error:
            self.interrupted(error, what)
            raise
        finally:
            self.doing = doing

    # ---- together again ------------------------------------------------------------------------------------

    def meet(self) -> bool:
        """After a failure: wait for all ranks, and begin a new epoch with them. Whether new connections are needed.

        Ranks that failed come by themselves, at their next forward; the others when they wait in vain for those. Where
        all were equally far (they raised at the same place), connections stay as they are. Raises `PeerFailed` when a
        rank ended or is lost, or failed in this attempt before it came. May be tried again after any exception.
        """
        with self._store_answers(_AFTER):
            return self._meet()

    def _meet(self) -> bool:
        if self.failed is None and not self.causes():
            # An exception came before anybody was told.
            self.publish("raised", "it left its step")
        records = self.watch.records
        key = f"{self.base}/meet"
        cut = self.is_torn or any(group.is_cut for group in list(self.groups.values()))
        mine = hashlib.blake2s(json.dumps(sorted(self.issued.items())).encode(), digest_size=6).hexdigest()
        records.append(key, f"{self.rank}:{self.attempts}:{'cut' if cut else mine}:{self.state()} ")
        wait = Wait("meet", self, _AFTER)
        done = f"{key}/done"
        if self.rank != self.ranks[0]:
            wait_until(lambda: records.store.check([done]), wait)
        elif not records.store.check([done]):  # else this rank was interrupted after all others had gone on
            found: dict[int, tuple[int, str, str]] = {}
            wait_until(lambda: self._all_here(key, found), wait, alone=True)
            ways = {how for _, how, _ in found.values()}
            states = by_value({rank: state for rank, (_, _, state) in sorted(found.items())})
            told = [len(ways) > 1 or "cut" in ways, {state: runs(ranks) for state, ranks in states.items()}]
            records.store.set(done, json.dumps(told))
        renews, told_states = json.loads(records.store.get(done))
        self.states = {state: ranks_of(found) for state, found in told_states.items()}
        with self._cutting:
            if renews:
                for group in list(self.groups.values()):
                    group.expire()
            following = self.epoch + 1
            renewed = following if renews else self.renewed
            # All at once: an exception comes before it, and the meeting is attended again, or after it.
            vars(self).update(
                epoch=following,
                renewed=renewed,
                asked=0,
                attempts=0,
                failed=None,
                failure=None,
                has_raised=False,
                must_meet=False,
                is_torn=False,
            )
            self.heard = [(fault, since) for fault, since in self.heard if fault.epoch >= self.epoch]
        return bool(renews)

    def _all_here(self, key: str, found: dict[int, tuple[int, str, str]]) -> bool:
        """Also equally often: a rank whose peer failed once more hears of that, and comes again."""
        for rank, attempts, how, state in (told.split(":") for told in self.watch.records.read(key).split()):
            found[int(rank)] = int(attempts), how, state
        return len(found) == len(self.ranks) and len({attempts for attempts, _, _ in found.values()}) == 1


@cache
def _name(ranks: tuple[int, ...], apart: str) -> str:
    """The same on all of them."""
    return hashlib.blake2s(f"{','.join(map(str, ranks))}{apart}".encode(), digest_size=6).hexdigest()


def by_value(answers: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of each answer."""
    found: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        found.setdefault(answer, []).append(rank)
    return found
