"""What ranks tell each other besides tensors: one control for a process, one domain for the ranks of a mesh.

    agree      all ranks of a domain compare a value; nobody goes on before all have asked
    publish    this rank failed: how far it had come, and why
    faults     what the others published
    meet       all ranks of a domain come together after a failure, wherever each of them was

Carried by the store through which the process group was made, under a prefix of ours: no collective, so nobody counts
one and it cannot get out of step with those of the model; and no wait without an end, because whoever waits looks up
now and then whether a peer failed. A question costs each rank three requests, some hundred microseconds on a machine;
the store's server answers three for each rank, some tens of milliseconds at 1,000. So nothing is asked in a step that
is like the ones before (lifecycle/order.py).

Everything is counted from the last meeting on (an *epoch*): a failure before it is not one behind it.

In the fake process group, and in a world of one, everybody agrees and nothing is sent.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from .._torch_compat import default_store
from .errors import PeerFailed, RanksDisagree, shown_ranks

# A text longer than this is cut before it is told: it is for an error message.
_TEXT_CHARACTERS = 2000
_BACKENDS = ("fake",)


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True)
class Fault:
    """What a rank says when it fails. `kind`: "raised", "ended" (its process did), "lost" (no sign of life: said by
    another), "disagree".

    `issued` is how many messages it had sent over each line (lines.py) of the domain: who waits for one of these will
    get it, and who waits for a later one will not.
    """

    rank: int
    kind: str
    text: str
    step: int = -1
    doing: str = ""
    issued: Mapping[str, int] = field(default_factory=dict)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: bytes) -> Fault:
        return Fault(**json.loads(text))

    @property
    def message(self) -> str:
        step = f" at step {self.step}" if self.step >= 0 else ""
        doing = f" in {self.doing}" if self.doing else ""
        how = {"raised": "raised", "ended": "ended", "lost": "gives no sign of life"}.get(self.kind, self.kind)
        return f"rank {self.rank} {how}{step}{doing}: {self.text}"

    def error(self, waiting: str = "") -> RuntimeError:
        """What the others raise; `waiting`: what this rank is waiting for."""
        if self.kind == "disagree":
            return RanksDisagree(self.text)
        what = waiting or "its next message"
        return PeerFailed(
            f"expected every rank to take part in {what}, found that {self.message}",
            rank=self.rank,
            step=self.step,
            unit=self.doing,
            text=self.text,
        )


class Control:
    """The end of one process (in tests: of one thread)."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self.domains: dict[tuple[int, ...], Domain] = {}
        self.lock = threading.Lock()

    def domain(self, ranks: Sequence[int]) -> Domain:
        """The domain of these ranks of the default group. Every one of them makes this call at its first time."""
        key = tuple(sorted(ranks))
        if key not in self.domains:
            self.domains[key] = Domain(self, key)
        return self.domains[key]


_controls: dict[int, tuple[weakref.ref[dist.ProcessGroup], Control | None]] = {}


def control() -> Control | None:
    """This process's control; None where nobody is to be told anything (no process group, or a fake one)."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    known = _controls.get(id(world))
    if known is not None and known[0]() is world:
        return known[1]
    silent = dist.get_backend(world) in _BACKENDS or dist.get_world_size(world) == 1
    made = None if silent else Control(default_store(), dist.get_rank(world))
    key = id(world)
    _controls[key] = (weakref.ref(world, lambda _: _controls.pop(key, None)), made)
    return made


class Domain:
    """The ranks of one mesh. Methods that wait do so in this rank's main thread; see the module for what they cost."""

    def __init__(self, control: Control, ranks: tuple[int, ...]) -> None:
        self.control, self.ranks = control, ranks
        self.store, self.rank = control.store, control.rank
        name = hashlib.blake2s(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
        # A process group may be made again over the same store: everybody counts how often.
        again = self.store.add(f"fullshard/{name}/{self.rank}", 1)
        self.prefix = f"fullshard/{name}.{again}"
        self.epoch = 0
        self._asked = 0
        # What is being done, for the text of an error; and the optimizer steps taken.
        self.doing = ""
        self.step: Callable[[], int] = lambda: -1
        # How many messages this rank sent, by line.
        self.issued: dict[str, int] = {}
        # This rank published a fault, or its lines are broken: everybody meets before anything is sent.
        self.must_meet = False

    @property
    def _base(self) -> str:
        return f"{self.prefix}/{self.epoch}"

    # ---- agreement -----------------------------------------------------------------------------------------

    def agree(self, what: str, value: str) -> dict[int, str] | None:
        """Compare `value` on all ranks, which all make this call, in the same order with the same `what`.

        None where all are equal; else what each rank has, the same on all of them ("what: value" where they ask for
        different things). Raises `PeerFailed` when a rank that has not come failed, ended or is gone.
        """
        asked, self._asked = self._asked, self._asked + 1
        key = f"{self._base}/ask/{asked}"
        digest = hashlib.blake2s(f"{what}\0{value}".encode(), digest_size=16).hexdigest()
        self.store.set(
            f"{self._base}/asking/{self.rank}",
            json.dumps({"asked": asked, "what": what, "value": value[:_TEXT_CHARACTERS], "issued": self.issued}),
        )
        same = self.store.add(f"{key}/{digest}", 1)
        if self.store.add(f"{key}/all", 1) == len(self.ranks):
            same = self.store.add(f"{key}/{digest}", 0)
            self.store.set(f"{key}/verdict", "same" if same == len(self.ranks) else "differ")
        self._wait_for(f"{key}/verdict", what)
        answer = self.store.get(f"{key}/verdict")
        if self.rank == self.ranks[0] and asked:
            # Everybody has read the answer before this one.
            for end in (digest, "all", "verdict"):
                self.store.delete_key(f"{self._base}/ask/{asked - 1}/{end}")
        if answer == b"same":
            return None
        self.store.set(f"{key}/value/{self.rank}", json.dumps([what, value]))
        found = {}
        for rank in self.ranks:
            self._wait_for(f"{key}/value/{rank}", what)
            found[rank] = json.loads(self.store.get(f"{key}/value/{rank}"))
        if len({asked_for for asked_for, _ in found.values()}) > 1:
            return {rank: f"{asked_for}: {text}" for rank, (asked_for, text) in found.items()}
        return {rank: text for rank, (_, text) in found.items()}

    def _wait_for(self, key: str, what: str) -> None:
        for waited in looks():
            if self.store.check([key]):
                return
            if waited > 0.2:
                self._refuse_faults(what)

    def _refuse_faults(self, what: str) -> None:
        for fault in self.faults():
            if fault.rank != self.rank:
                self.must_meet = True
                raise fault.error(what)

    # ---- failures ------------------------------------------------------------------------------------------

    def publish(self, kind: str, text: str, *, rank: int | None = None) -> None:
        """Tell the others that this rank failed (or that `rank` did). Does not wait, and does not raise."""
        self.must_meet = True
        fault = Fault(
            self.rank if rank is None else rank,
            kind,
            text[:_TEXT_CHARACTERS],
            self.step(),
            self.doing,
            dict(self.issued) if rank is None else {},
        )
        try:
            number = self.store.add(f"{self._base}/faults", 1)
            self.store.set(f"{self._base}/fault/{number}", fault.dumps())
        except RuntimeError:
            pass  # the store ended with the process that served it: nobody is left to be told

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


def domain_of(ranks: Sequence[int]) -> Domain | None:
    """The domain of these ranks; None where they have nobody to ask."""
    here = control()
    return None if here is None or len(ranks) < 2 else here.domain(ranks)


def looks(limit: float = 0.05) -> Any:
    """Yield the seconds waited so far: at once and often in the beginning, `limit` apart in the end."""
    begun, pause = time.monotonic(), 0.0
    while True:
        waited = time.monotonic() - begun
        yield waited
        if waited < 0.0003:
            time.sleep(0)
            continue
        pause = min(limit, pause * 1.5 + 0.0001)
        time.sleep(pause)


__all__ = ["Control", "Domain", "Fault", "control", "domain_of", "looks", "shown_ranks"]
