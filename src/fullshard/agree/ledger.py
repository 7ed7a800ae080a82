"""States what the ranks of a mesh must do alike: a list of statements with one digest, and which message comes next.
Standard library only. ADR 0009 says what is stated, who compares it when, and why.

A statement names a place and its facts: a unit of the model, a call of the program, what holds at a comparison. Values
of a single rank (its rows, its device index) are left out. If digests differ, ranks exchange the statements, and
`differences` (differences.py) lists the differences, causes first.

Messages of one group match by their position in its order only, so each is compared before it is sent:

    action     one message, as a value with a text form:  unshard 0-3.5 layers.2 float32*1024 stepped
    start      an action after an optimizer step, or the first of an evaluation: the program starts over
    expected   what followed the actions since the start the last time: the same on every rank, and sent without a
               comparison. A rank that deviates must ask through the store, because the others may wait for its message
    question   what it asks. Where nothing is expected, or that is in doubt, all compare by a small message instead
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, Protocol

# Places of statements: of the structure, which are compared by their names, and of what a rank does.
OPTIONS, UNIT, PARAMETER, TENSOR = "settings", "unit", "parameter", "tensor"
CALL, NOW, REPLICAS = "call", "now", "replicas"
# The call of an optimizer's step.
STEP = "optimizer.step"
# If there are more calls since the last comparison, the older ones are folded into a digest.
_MOST_CALLS = 64
# Facts of the structure with an advice of their own.
_KINDS = {"requires_grad": "frozen", "unit": "sharding", "placement": "sharding"}


class Fact(NamedTuple):
    """One value that must be equal on all ranks. `kind` is a key of `ADVICE`."""

    kind: str
    name: str
    value: str


class Statement(NamedTuple):
    """Facts of one place that a rank states, in a fixed order. `among`: the ranks that must state the same, as text;
    "": all ranks of the ledger."""

    place: str
    name: str
    facts: tuple[Fact, ...]
    among: str = ""


def stated(place: str, name: str, values: Mapping[str, str]) -> Statement:
    """A statement of the structure, of values by name."""
    return Statement(place, name, tuple(Fact(_KINDS.get(fact, place), fact, value) for fact, value in values.items()))


def called(name: str, facts: Sequence[Fact]) -> Statement:
    """The statement of one call."""
    return Statement(CALL, name, tuple(facts))


# ---- a ledger --------------------------------------------------------------------------------------------------------


class Sealed(NamedTuple):
    """The statements that are compared, a digest of those of all ranks, and of those of replicas only, 0 if there are
    none."""

    statements: tuple[Statement, ...]
    digest: int
    shared: int

    @property
    def text(self) -> str:
        """The statements, which ranks exchange only if digests differ."""
        return dumps(self.statements)


class Ledger:
    """Lists what one rank did to the shards of a root on one mesh since its ranks last compared, and what holds now."""

    def __init__(self) -> None:
        # The facts that hold now, by name.
        self.now: dict[str, Fact] = {}
        self.calls: list[Statement] = []
        # The gradients that hooks of the user changed since the last call.
        self.hooked: list[str] = []
        self._replicas: Statement | None = None
        # A statement of what holds now, and its digest; None after a change. A cache of the digests of calls, which
        # recur.
        self._holds: tuple[Statement, int] | None = None
        self._known: dict[Statement, int] = {}
        # The last content without replicas, and its calls.
        self._last: tuple[tuple[Statement, ...], Sealed] | None = None

    def stand(self, fact: Fact) -> None:
        """`fact` holds from now on, instead of the one of its name."""
        if self.now.get(fact.name) != fact:
            self.now[fact.name] = fact
            self._holds = None

    def do(self, call: Statement) -> None:
        """Append `call`, after the gradients that hooks changed before it."""
        if self.hooked:
            self._note_hooks()
        if len(self.calls) >= _MOST_CALLS:
            folded, self.calls = self.calls[: _MOST_CALLS // 2], self.calls[_MOST_CALLS // 2 :]
            before = Fact("calls", "digest of the calls before the last ones", f"{digest_of(dumps(folded)):016x}")
            self.calls.insert(0, called("calls before", [before]))
        self.calls.append(call)

    def _note_hooks(self) -> None:
        hooked, self.hooked = self.hooked, []
        names = f"{', '.join(hooked[:4])} ({len(hooked)}, {digest_of(chr(10).join(hooked)):016x})"
        self.do(called("hooks", [Fact("hooks", "gradients that hooks changed", names)]))

    def share(self, among: str, facts: Sequence[Fact]) -> None:
        """Add, for the next comparison only, facts that must be equal among the ranks `among`."""
        self._replicas = Statement(REPLICAS, "", tuple(facts), among)

    def seal(self) -> Sealed:
        """Return the content and clear the calls. Returns the same object as the last time if nothing changed."""
        if self.hooked:
            self._note_hooks()
        calls = tuple(self.calls) if len(self.calls) < 2 else _in_one_order(self.calls)
        self.calls = []
        replicas, self._replicas = self._replicas, None
        last, self._last = self._last, None
        if last is not None and self._holds is not None and replicas is None and calls == last[0]:
            self._last = last
            return last[1]
        if self._holds is None:
            now = Statement(NOW, "", tuple(sorted(self.now.values())))
            self._holds = now, self._digest(now)
        now, digest = self._holds
        digest = digest_of(",".join(map(str, [digest, *map(self._digest, calls)])))
        if replicas is not None:
            return Sealed((*calls, now, replicas), digest, digest_of(dumps([replicas])))
        sealed = Sealed((*calls, now), digest, 0)
        self._last = calls, sealed
        return sealed

    def _digest(self, call: Statement) -> int:
        known = self._known.get(call)
        if known is None:
            if len(self._known) >= _MOST_CALLS:
                self._known.clear()
            known = self._known[call] = digest_of("\0".join([call.name, *chain.from_iterable(call.facts)]))
        return known

    def forget(self) -> None:
        """Drop all calls: after a failure ranks restart, and some had got further than others."""
        self.calls, self.hooked, self._replicas = [], [], None


def _in_one_order(calls: list[Statement]) -> tuple[Statement, ...]:
    """`calls`, with consecutive steps of several optimizers sorted: their order has no effect, because each optimizer
    has its own parameters."""
    runs = (list(run) for _, run in groupby(calls, key=lambda call: call.name == STEP))
    return tuple(call for run in runs for call in (sorted(run) if run[0].name == STEP else run))


def digest_of(text: str) -> int:
    """64 bits of `text`, of which the lowest is 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & ~1


def dumps(statements: Sequence[Statement]) -> str:
    """`statements` as JSON."""
    return json.dumps(statements, separators=(",", ":"))


def loads(text: str) -> list[Statement]:
    """The reverse of `dumps`.

    >>> loads(dumps([stated(UNIT, "head", {"mesh": "m"})]))
    [Statement(place='unit', name='head', facts=(Fact(kind='unit', name='mesh', value='m'),), among='')]
    """
    return [
        Statement(place, name, tuple(Fact(*fact) for fact in facts), among)
        for place, name, facts, among in json.loads(text)
    ]


def read(texts: Mapping[int, str]) -> dict[int, list[Statement]]:
    """The statements of each rank, from its text. Ranks with equal texts have one list."""
    lists = {text: loads(text) for text in set(texts.values())}
    return {rank: lists[text] for rank, text in texts.items()}


# ---- messages --------------------------------------------------------------------------------------------------------

# The flags of an action, beside its kind, unit and sizes:
#
#     stepped          the first after an optimizer step; once for each step
#     eval             the first of a forward without gradients
#     train            the first of one with gradients, where the one before had none
#     accumulated      gradients of several backwards
#     partials, keep   with sums that were not all-reduced; not all-reduced
#     added, cleared   adds to an existing .grad; and no longer does. Only changes are flagged, so that neither one
#                      zero_grad per step nor none at all sets a flag
_STARTS = ("stepped", "eval", "train")
# After so many forwards without an optimizer step, each forward starts a new program: it may update parameters itself.
_FORWARDS = 64
# More optimizer steps than this between two messages count as this many.
_MOST_STEPS = 16
# Separates the count of steps from the name of an interrupted optimizer in the word of a rank.
HALF = "+"


class Action(NamedTuple):
    """One message of a unit. `root`: a name of its root that is the same on all ranks; `unit`: its index there;
    `sizes`: the sizes sent, by group, as one word."""

    kind: str
    root: str
    unit: int
    name: str
    sizes: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.kind, f"{self.root}.{self.unit}", self.name, self.sizes, *self.flags))


class Question(NamedTuple):
    """A rank's next action at a place; `expected`: the action that would have needed no question, if any."""

    place: int
    action: Action
    expected: Action | None

    @property
    def text(self) -> str:
        """The question as JSON."""
        return json.dumps(self, separators=(",", ":"))


def read_question(text: str) -> Question:
    """The reverse of `Question.text`.

    >>> question = Question(7, Action("unshard", "0-3", 5, "layers.2", "float32*8", ("stepped",)), None)
    >>> read_question(question.text) == question
    True
    """
    place, *actions = json.loads(text)
    action, expected = (one and Action._make([*one[:-1], tuple(one[-1])]) for one in actions)
    return Question(place, action, expected)


class Order:
    """The messages that the ranks of a scope agreed on, and which of them comes next. The same on all ranks.

        if not order.follows(action):
            ...  # compare it with the others; if all of them do the same:
            order.enter(action)

    What is kept is a tree: what followed which actions since the last start, and what did the last time. A place where
    the program last went another way than before is in doubt until it repeats itself there.
    `limit`: how many actions are kept. Beyond it all are dropped, on all ranks at the same place.
    """

    def __init__(self, *, limit: int = 20_000) -> None:
        # The number of actions so far.
        self.place = 0
        self._limit = limit
        # Nodes of the tree are numbers. By node: the last action after it, the node that this led to, and whether that
        # is beyond doubt. By node and action: the node after both; a start leads to the same node from everywhere.
        self._here = self._nodes = 0
        self._last: dict[int, tuple[Action, int, bool]] = {}
        self._after: dict[tuple[int, Action], int] = {}

    def expected(self, *, doubts: bool = True) -> Action | None:
        """The action that needs no question; None: every action needs one, on all ranks. `doubts`: nothing is expected
        where that is in doubt."""
        last = self._last.get(self._here)
        return last[0] if last is not None and (last[2] or not doubts) else None

    def follows(self, action: Action, *, doubts: bool = True) -> bool:
        """Whether `action` is expected here; if so, advance."""
        last = self._last.get(self._here)
        if last is None or (doubts and not last[2]):
            return False
        # Actions are cached, so the expected one is nearly always the same object.
        if last[0] is not action or not last[2]:
            if last[0] != action:
                return False
            self._last[self._here] = (action, last[1], True)
        self._here = last[1]
        self.place += 1
        return True

    def question(self, action: Action) -> Question:
        """The question to ask before the unexpected `action`."""
        return Question(self.place, action, self.expected(doubts=False))

    def enter(self, action: Action) -> None:
        """Enter an unexpected `action`, on which all ranks agreed."""
        last = self._last.get(self._here)
        starts = any(flag in _STARTS for flag in action.flags)
        key = (_ANYWHERE, _start_of(action)) if starts else (self._here, action)
        after = self._after.get(key)
        if after is None:
            if len(self._after) >= self._limit:
                self._after.clear()
                self._last.clear()
            self._nodes += 1
            after = self._after[key] = self._nodes
        self._last[self._here] = (action, after, last is None or last[0] == action)
        self._here = after
        self.place += 1


_ANYWHERE = -1


def _start_of(action: Action) -> Action:
    """The same start for the first step, for one after a step and for one after an evaluation."""
    return action._replace(flags=tuple(flag for flag in action.flags if flag not in ("stepped", "train")))


# ---- the program of a scope ------------------------------------------------------------------------------------------


class Program:
    """Records what this rank did with the ranks of one scope, if all of them must do the same: the order of messages in
    the current epoch, the flags of the next action, and the steps since a load. Does not hold its scope."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = Order()
        # The optimizer steps since the last action.
        self.stepped = 0
        self.last_step = -1
        # Whether an outermost forward that sent nothing yet has gradients; None: there is no such forward.
        self.begun: bool | None = None
        # The forwards with gradients since the program was restarted.
        self.forwards = 0
        # The roots whose last forward with messages had gradients.
        self.trained: set[str] = set()
        # Whether the last reduction was added to existing gradients.
        self.added = False
        # The steps since the last load; the optimizer whose step was interrupted halfway; the loaded state, if known.
        self.count = 0
        self.half = self.source = ""

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

    def word(self) -> str:
        """The text for `Scope.state`: the steps since a load, and the interrupted optimizer."""
        return f"{self.count}{HALF}{self.half}" if self.half else str(self.count)

    def forget_steps(self, source: str) -> None:
        """Count steps from here: a consistent state is there, loaded from `source` if that is known."""
        self.count, self.half, self.source = 0, "", source or self.source


class ProgramScope(Protocol):
    """A scope (`peers.Scope`), as far as its program needs it."""

    epoch: int
    state: Any


_programs: weakref.WeakKeyDictionary[ProgramScope, Program] = weakref.WeakKeyDictionary()


def program_of(scope: ProgramScope) -> Program:
    """The program of `scope`, in its current epoch."""
    found = _programs.get(scope)
    if found is None:
        found = _programs[scope] = Program(scope.epoch)
        scope.state = found.word
    if found.epoch != scope.epoch:
        found.restart(scope.epoch)
    return found
