"""The ranks of one mesh, and what one of them does so that no wait for the others is without an end. See control.py."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import elsewhere
from .faults import TEXT_CHARACTERS, Fault, about_to, looks

if TYPE_CHECKING:
    from .control import Control
    from .lines import Line, Sent

# A rank whose connection is closed and that gives no sign of life for so long was killed.
CLOSED_SECONDS = 2.5
# Words of a backend's errors about connections, and not about what it is asked to send.
_OF_CONNECTIONS = ("gloo/transport", "pair closure", "onnection", "ocket", "imed out", "NCCL")
# Who waits longer looks whether a peer failed, or asks for something else.
PATIENCE_SECONDS = 1.0
_AFTER = "the next step after a failure"


class Domain:
    """The ranks of one mesh. Methods that wait do so in this rank's main thread; see the module for what they cost."""

    def __init__(self, control: Control, ranks: tuple[int, ...]) -> None:
        self.control, self.ranks = control, ranks
        self.store, self.rank = control.store, control.rank
        name = hashlib.blake2s(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
        # A process group may be made again over the same store: everybody counts how often.
        again = self.store.add(f"fullshard/{name}/{self.rank}", 1)
        self.prefix = f"fullshard/{name}.{again}"
        # Meetings so far; and those that made new connections.
        self.epoch = self.renewed = 0
        self.asked = 0
        # Of the last question, what the store still holds; the first rank gives it up.
        self._read: list[str] = []
        # What is being done, for the text of an error, or what tells it; and the optimizer steps taken.
        self.doing: str | Callable[[], str] = ""
        self.step: Callable[[], int] = lambda: -1
        self.lines: dict[str, Line] = {}
        self._named: Counter[str] = Counter()
        # The message that the main thread waits for.
        self.waiting: Sent | None = None
        # A rank without a sign of life for so many seconds is lost; 0: never.
        self.silence_seconds = 20.0
        # By what is asked: the error of a rank that waits while others, who are named, ask that with this value.
        self.explained_by: dict[str, Callable[[str, Sequence[int], int], str]] = {}
        # Called now and then while this rank waits for others to ask or to meet; raises when they will not (roster.py).
        self.refuse_absence: Callable[[], None] = lambda: None
        # What others say of this rank, which did not wait: raised at its next forward.
        self.accusation: Fault | None = None
        # Why the lines were cut; and whether the main thread has raised that.
        self.failure: Fault | None = None
        self.has_raised = False
        # Held while lines are cut or made anew: what the monitor cuts must not be what the main thread just made.
        self._cutting = threading.RLock()
        # Guarded blocks that failed since the last meeting.
        self.attempts = 0
        # This rank published a fault, or its lines are cut: everybody meets before anything is sent.
        self.must_meet = ranks in control.accused

    @property
    def _told(self) -> str:
        return self.doing if isinstance(self.doing, str) else self.doing()

    @property
    def _base(self) -> str:
        return f"{self.prefix}/{self.epoch}"

    @property
    def issued(self) -> dict[str, int]:
        """How many messages this rank sent, by line."""
        return {name: line.issued for name, line in self.lines.items()}

    @property
    def far(self) -> dict[str, Any]:
        """How far this rank has come, for `elsewhere`."""
        return {"epoch": self.epoch, "issued": self.issued, "asked": self.asked}

    def line_name(self, name: str) -> str:
        """`name`, told from those of lines before it."""
        self._named[name] += 1
        return f"{name} #{self._named[name]}" if self._named[name] > 1 else name

    def add_line(self, line: Line) -> None:
        """Count its messages, and cut it when a peer failed."""
        self.lines[line.name] = line

    # ---- agreement -----------------------------------------------------------------------------------------

    def agree(self, what: str, value: str) -> dict[int, str] | None:
        """Compare `value` on all ranks, which all make this call, in the same order with the same `what`.

        None where all are equal; else what each rank has, the same on all of them ("what: value" where they ask for
        different things). Raises `PeerFailed` when a rank that has not come failed, ended or is gone, and
        `RanksDisagree` when one found that it and this rank do different things.
        """
        asked, self.asked = self.asked, self.asked + 1
        key = f"{self._base}/ask/{asked}"
        digest = hashlib.blake2s(f"{what}\0{value}".encode(), digest_size=16).hexdigest()
        asking = {"asked": asked, "what": what, "value": value[:TEXT_CHARACTERS], "issued": self.issued}
        self.store.set(f"{self._base}/asking/{self.rank}", json.dumps(asking))
        same = self.store.add(f"{key}/{digest}", 1)
        if self.store.add(f"{key}/all", 1) == len(self.ranks):
            same = self.store.add(f"{key}/{digest}", 0)
            self.store.set(f"{key}/verdict", "same" if same == len(self.ranks) else "differ")
        self._wait_for(f"{key}/verdict", asked, what)
        answer = self.store.get(f"{key}/verdict")
        if self.rank == self.ranks[0]:
            # Everybody has read the answer before this one. A store would keep some hundred bytes of every question.
            for old in self._read:
                self.store.delete_key(old)
            self._read = [f"{key}/all", f"{key}/verdict", f"{key}/{digest}"]
        if answer == b"same":
            return None
        self.store.set(f"{key}/value/{self.rank}", json.dumps([what, value]))
        found = {}
        for rank in self.ranks:
            self._wait_for(f"{key}/value/{rank}", asked, what)
            found[rank] = json.loads(self.store.get(f"{key}/value/{rank}"))
        if len({asked_for for asked_for, _ in found.values()}) > 1:
            return {rank: f"{asked_for}: {text}" for rank, (asked_for, text) in found.items()}
        return {rank: text for rank, (_, text) in found.items()}

    def come_together(self, what: str) -> None:
        """Return when all ranks of the domain made this call. Raises as `agree`."""
        small = [line for line in self.lines.values() if line.purpose == "small"]
        if not small or small[0].device.type != "cpu":
            # On a device the host would have to wait for everything that is under way there.
            self.agree(what, "")
            return
        # Along one axis behind the other; lines were opened in the order of the mesh's axes.
        for line in small:
            line.issue(line.group.allreduce, [torch.zeros(1)]).wait()

    def _wait_for(self, key: str, asked: int, what: str) -> None:
        silence = 0.0
        for waited in looks():
            if self.store.check([key]):
                return
            if waited > 0.2 and (fault := self._cause(lambda fault: fault.asked <= asked)) is not None:
                self._give_up(fault, asked, what)
            if waited < PATIENCE_SECONDS + silence:
                continue
            silence = waited
            self.refuse_absence()
            lost = self._absent(f"the comparison of {what}", lambda rank, far: far["asked"] <= asked)
            if lost is None and waited > self.control.timeout_seconds:
                rank = self._not_asked(asked)
                lost = Fault(rank, "lost", f"in {what} for {waited:.0f} s, the time limit of the process group")
                self._tell(lost)
            if lost is not None:
                self._give_up(lost, asked, what)

    def _give_up(self, fault: Fault, asked: int, what: str) -> NoReturn:
        # Who comes to the question now must not find it answered, and go on with nobody.
        self.store.add(f"{self._base}/ask/{asked}/all", len(self.ranks))
        self.fail(fault)
        self.has_raised = True
        raise fault.error(what)

    def _not_asked(self, asked: int) -> int:
        """The first rank that has not come to question `asked`."""
        for rank in self.ranks:
            key = f"{self._base}/asking/{rank}"
            if not self.store.check([key]) or json.loads(self.store.get(key))["asked"] < asked:
                return rank
        return self.ranks[0]

    # ---- failures ------------------------------------------------------------------------------------------

    def publish(self, kind: str, text: str, *, rank: int | None = None) -> None:
        """Tell the others that this rank failed (or that `rank` did). Does not wait, and does not raise."""
        self.must_meet = True
        own = rank is None or rank == self.rank
        fault = Fault(
            self.rank if rank is None else rank,
            kind,
            text[:TEXT_CHARACTERS],
            self.step() if own else -1,
            self._told if own else "",
            self.issued if own else {},
            self.asked if own else 0,
            self.attempts if own else 0,
        )
        self._tell(fault)

    def _tell(self, fault: Fault | None) -> Fault | None:
        if fault is not None:
            # When the store ended with the process that served it, nobody is left to be told.
            with suppress(RuntimeError):
                number = self.store.add(f"{self._base}/faults", 1)
                self.store.set(f"{self._base}/fault/{number}", fault.dumps())
        return fault

    def faults(self) -> list[Fault]:
        """What was published in this epoch, in order."""
        if not self.store.check([f"{self._base}/faults"]):
            return []
        found = []
        for number in range(1, self.store.add(f"{self._base}/faults", 0) + 1):
            key = f"{self._base}/fault/{number}"
            if self.store.check([key]):
                found.append(Fault.loads(self.store.get(key)))
        return found

    def _cause(self, concerns: Callable[[Fault], bool]) -> Fault | None:
        """The fault of a peer because of which this rank waits in vain, if one does: where that peer only followed
        another one, that of the other."""
        known = [fault for fault in self.faults() if fault.rank != self.rank or fault.kind == "lost"]
        concerned = [fault for fault in known if fault.kind in ("lost", "disagree") or concerns(fault)]
        if not concerned:
            return None
        first = concerned[0]
        if first.kind == "followed":
            first = next((fault for fault in known if fault.kind != "followed"), first)
        # Of several things that it said, the last one knows most.
        return [fault for fault in known if fault.rank == first.rank and fault.kind == first.kind][-1]

    def _absent(self, what: str, withholds: Callable[[int, dict[str, Any]], bool]) -> Fault | None:
        """A peer that will not come, by its silence or because it waits for this rank elsewhere; said to the others."""
        return self._tell(
            self.control.silent(self.ranks, self.silence_seconds) or elsewhere.find(self, what, withholds)
        )

    def _question(self, sent: Sent) -> Fault | None:
        """Peers that wait for an answer and have not sent what this rank waits for: they do something else."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank in self.ranks:
            key = f"{self._base}/asking/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            asking = json.loads(self.store.get(key))
            missing = asking["issued"].get(sent.line.name, sent.number) < sent.number
            if missing and not self.store.check([f"{self._base}/ask/{asking['asked']}/verdict"]):
                found.setdefault((asking["what"], asking["value"]), []).append(rank)
        for (what, value), ranks in found.items():
            text = self.explained_by.get(what, partial(about_to, what, self._told))(value, ranks, self.rank)
            return Fault(self.rank, "disagree", text, self.step(), self._told, self.issued, self.asked)
        return None

    def _crossing(self, sent: Sent) -> Fault | None:
        """A peer that waits for a message of this rank, which waits for one of that peer: neither will come."""
        base, issued = f"{self._base}/waiting", self.issued
        waits = {"line": sent.line.name, "number": sent.number, "issued": issued, "doing": self._told}
        self.store.set(f"{base}/{self.rank}", json.dumps(waits))
        for rank in sent.line.ranks:
            if rank == self.rank or not self.store.check([f"{base}/{rank}"]):
                continue
            other = json.loads(self.store.get(f"{base}/{rank}"))
            # Of an earlier wait of that peer? Then this rank has sent what it waited for.
            stands = issued.get(other["line"], other["number"]) < other["number"]
            if stands and other["issued"].get(sent.line.name, sent.number) < sent.number:
                text = (
                    f"expected all ranks to do the same, found rank {self.rank} waiting in "
                    f"{self._told or sent.line.name} and rank {rank} in {other['doing'] or other['line']}; make all "
                    f"ranks take the same calls in the same order"
                )
                return Fault(self.rank, "disagree", text, self.step(), self._told, issued, self.asked)
        return None

    def look(self) -> None:
        """Look after the main thread, from another one: when it waits for what will not come, end that wait."""
        with self._cutting:
            sent = self._oldest()
        if sent is None or self.failure is not None or time.monotonic() - sent.since < PATIENCE_SECONDS:
            return
        known = self._cause(lambda fault: fault.withholds(sent.line.name, sent.number))
        found = None if known is not None else self._question(sent) or self._crossing(sent)
        if known is found is None:
            found = self.control.silent(self.ranks, self.silence_seconds) or elsewhere.find_for(self, self._told, sent)
        fault = known or found
        with self._cutting:
            # What was read one after the other holds together only if the wait did not end meanwhile: peers that have
            # come, and ask the next thing, would be accused on all ranks.
            if fault is None or sent is not self._oldest():
                return
            if fault is found:
                self._tell(fault)
            self.fail(fault)

    def _oldest(self) -> Sent | None:
        if self.waiting is not None:
            return self.waiting
        for line in list(self.lines.values()):
            while line.under_way and line.under_way[0].is_completed:
                line.under_way.popleft()
            if line.under_way:
                return line.under_way[0]
        return None

    def fail(self, fault: Fault) -> None:
        """Cut all lines because of `fault`."""
        with self._cutting:
            self.failure, self.must_meet = fault, True
            for line in list(self.lines.values()):
                line.cut()

    def refuse_failure(self) -> None:
        """Raise why the lines were cut, when that has not happened yet: on a device nobody waits where they are."""
        fault = self.failure or self.accusation
        if fault is not None and not self.has_raised:
            self.has_raised = True
            raise fault.error(self._told)

    def explain(self, line: Line, number: int, error: RuntimeError) -> RuntimeError:
        """What to raise in the place of a backend's `error` for message `number` of `line`. Waits some seconds for
        peers to say why they closed it. The lines are cut afterwards.

        What a backend refuses to send (a dtype that it has no sum for) is `error` itself: no peer has to do with it.
        """
        self.waiting = None
        if self.failure is None and not any(word in str(error) for word in _OF_CONNECTIONS):
            return error
        self.has_raised = True
        text = str(error).split("\n")[0]
        for waited in looks():
            fault = self.failure
            with suppress(RuntimeError):
                fault = fault or self._cause(lambda fault: fault.withholds(line.name, number))
                fault = fault or self._tell(self.control.silent(self.ranks, CLOSED_SECONDS))
            if fault is not None:
                self.fail(fault)
                return fault.error(self._told or f"message {number} of {line.name}")
            if waited > CLOSED_SECONDS + 1:
                break
        own = Fault(self.rank, "raised", text, self.step(), self._told, self.issued, self.asked)
        self._tell(own)
        self.fail(own)
        return RuntimeError(
            f"{self._told or line.name}: expected an answer of the other ranks, found that a message between them "
            f"failed ({text}) and that none of them said why: a process that was killed, and served the store, or a "
            f"broken network; see the output of the other ranks"
        )

    # ---- together again ------------------------------------------------------------------------------------

    def meet(self) -> bool:
        """After a failure: wait for all ranks, and begin a new epoch with them. Whether they were unequally far.

        Ranks that failed come by themselves, at their next forward; the others when they wait in vain for those. Where
        all were equally far (they raised at the same place), connections stay as they are; else they are made anew.
        Raises `PeerFailed` when a rank ended or is lost, or failed in this attempt before it came.
        """
        key = f"{self.prefix}/meet/{self.epoch}"
        mine = {"cut": any(line.is_cut for line in self.lines.values()), "issued": self.issued, "asked": self.asked}
        self.store.set(f"{key}/{self.rank}", json.dumps(mine))
        silence = 0.0
        for waited in looks():
            if self.store.check([f"{key}/{rank}" for rank in self.ranks]):
                break
            if waited > 0.2:
                self._refuse_another_attempt()
            if waited < PATIENCE_SECONDS + silence:
                continue
            silence = waited
            self.refuse_absence()
            gone = next((fault for fault in self.faults() if fault.kind == "ended"), None)
            gone = gone or self._absent(_AFTER, lambda rank, _: not self.store.check([f"{key}/{rank}"]))
            if gone is not None:
                raise gone.error(_AFTER)
        self._refuse_another_attempt()
        here = [json.loads(self.store.get(f"{key}/{rank}")) for rank in self.ranks]
        issued: dict[str, set[int]] = {}
        for one in here:
            for name, number in one["issued"].items():
                issued.setdefault(name, set()).add(number)
        differ = any(len(numbers) > 1 for numbers in issued.values())
        renews = differ or any(one["cut"] for one in here)
        self.epoch, self.asked, self.attempts = self.epoch + 1, 0, 0
        self._read = []
        self.failure, self.accusation, self.has_raised, self.must_meet = None, None, False, False
        if renews:
            with self._cutting:
                self.renewed += 1
                for line in self.lines.values():
                    line.renew()
        return renews

    def _refuse_another_attempt(self) -> None:
        """A peer that failed once more often than this rank did so before it came to a forward: this attempt has failed
        there, and what this rank would meet is the next one."""
        for fault in self.faults():
            if fault.rank != self.rank and fault.attempts > self.attempts:
                raise fault.error(_AFTER)
