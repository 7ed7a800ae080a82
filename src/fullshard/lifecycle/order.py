"""The order of messages on which ranks agreed: what each is about to send is compared before it is sent.

Messages of one group match by their place in its order and by nothing else. Two ranks that run units of equal shapes
in another order exchange wrong values without a word; with unequal sizes, or one message more, they abort or hang.

    action     one message, as a value with a text form:  gather 0.3 layers.2 float32*1024 stepped
    place      how many actions went before it
    expected   what the ranks did when they were last at this point; or, at a point where they never were, a guess
    question   what a rank asks the others, with its place, before an action that was not expected

An action that is expected is issued and nobody is asked: in the steady state nothing is sent. What is expected is a
function of the actions before, which are the same on every rank. So of the actions at one place at most one is issued
unasked; and a rank about to do anything else asks first, and finds that the others are elsewhere.

    history    a graph of nodes: one for each sequence of actions since the last start. An optimizer step, or a forward
               without gradients, leads back to a start, so programs that repeat themselves stay in it.
    guess      at a node without a sequel: what followed the last actions elsewhere (in another micro-batch). Or units
               follow each other as they did behind messages of the same kinds, as far apart: the second layer of a
               stack asks, the others do not.

Nothing here depends on how good expectations are, but the number of questions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# What an action may say beside its kind, unit and sizes.
FLAGS = (
    "stepped",  # the first after an optimizer step; once for each step
    "eval",  # the first of a forward without gradients
    "train",  # the first of one with gradients, where the one before had none
    "accumulated",  # gradients of several backwards
    "partials",  # with sums that were not all-reduced
    "keep",  # not all-reduced
    # To be added to a .grad that is there, and no longer so. Said where it changes, so that one zero_grad for each step
    # says nothing, nor does none at all.
    "added",
    "cleared",
)
_STARTS = ("stepped", "eval", "train")
# What programs gather themselves, outside of the units' own messages.
_BY_HAND = ("full", "open")
# So many actions of the past are looked at for a guess.
_TRAIL = 3


class Action(NamedTuple):
    """One message of a unit. `family`: the root it belongs to, counted in the order in which they came up; `unit`: its
    index there; `sizes`: what is sent, by group, one word."""

    kind: str
    family: int
    unit: int
    name: str
    sizes: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.kind, f"{self.family}.{self.unit}", self.name, self.sizes, *self.flags))

    @property
    def starts(self) -> bool:
        """Whether the program begins anew with it."""
        return any(flag in _STARTS for flag in self.flags)


def parse_action(text: str) -> Action:
    """The reverse of `str(action)`.

    >>> parse_action("gather 0.3 layers.2 float32*1024 stepped")
    Action(kind='gather', family=0, unit=3, name='layers.2', sizes='float32*1024', flags=('stepped',))

    Raises `ValueError` for another form or an unknown flag.
    """
    words = text.split()
    place = words[1].split(".") if len(words) > 3 else []
    if len(place) != 2 or not all(part.isdecimal() for part in place) or not set(words[4:]) <= set(FLAGS):
        raise ValueError(f"action: expected 'KIND ROOT.UNIT NAME SIZES FLAG...' with flags of {FLAGS}, found {text!r}")
    return Action(words[0], int(place[0]), int(place[1]), words[2], words[3], tuple(words[4:]))


class Question(NamedTuple):
    """What a rank is about to do at a place; `expected`: what it would not have asked about, if anything; `guessed`:
    the ranks did not do that when they were last at this point, because they never were."""

    place: int
    action: Action
    expected: Action | None
    guessed: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.action}; {'guessed' if self.guessed else 'expected'}: {self.expected or 'nothing'}"


def parse_question(text: str) -> Question:
    """The reverse of `str(question)`; `ValueError` for another form."""
    found = re.fullmatch(r"(\d+): ([^;]+); (expected|guessed): ([^;]+)", text)
    if found is None:
        raise ValueError(f"question: expected 'PLACE: ACTION; expected: ACTION', found {text!r}")
    place, action, how, expected = found.groups()
    return Question(
        int(place),
        parse_action(action),
        None if expected == "nothing" else parse_action(expected),
        how == "guessed",
    )


class _Node:
    """A point in the program. `expected` leads to `next`; `others` are sequels that were agreed on too."""

    __slots__ = ("challenger", "expected", "next", "others", "trail")

    def __init__(self, trail: tuple[Action, ...]) -> None:
        # The actions that lead here, the latest first; at a start that one alone, whatever led to it.
        self.trail = trail
        self.expected: Action | None = None
        self.next: _Node | None = None
        self.others: dict[Action, _Node] = {}
        # The sequel that was taken the last time in the place of the expected one.
        self.challenger: Action | None = None


class Order:
    """The place of one rank in the order of a set of ranks.

        if not order.follows(action):
            ...  # ask the others, with order.question(action); if all of them ask the same:
            order.enter(action)

    `limit`: how many nodes are kept (some 300 bytes each). When there are more all are forgotten, on all ranks at the
    same place.
    """

    def __init__(self, *, limit: int = 20_000) -> None:
        # How many actions went before.
        self.place = 0
        # How many roots came up.
        self.families = 0
        self._limit = limit
        self._node = _Node(())
        self._nodes = 1
        self._starts: dict[Action, _Node] = {}
        # By kind, family and unit: actions of a root as all ranks have them, with nothing special about them.
        self._plain: dict[tuple[str, int, int], Action] = {}
        # What followed these actions.
        self._seen: dict[tuple[Action, ...], Action] = {}
        # What followed some actions, as these look from any unit: its kind, and its unit counted from the last one.
        self._habits: dict[tuple[object, ...], tuple[str, int]] = {}

    @property
    def expected(self) -> Action | None:
        """What is issued without a question; None: nothing is."""
        return self._node.expected or self._guess()

    def follows(self, action: Action) -> bool:
        """Whether `action` is what is expected here; if so it is done."""
        node = self._node
        # Actions are made once, so what is expected is nearly always the same object.
        if node.expected is action and node.next is not None:
            self._node = node.next
            self.place += 1
            if node.challenger is not None:
                node.challenger = None
            return True
        if action != self.expected:
            return False
        if node.expected is None:
            self.enter(action)
            return True
        node.expected = action  # an equal one; the next time this very object comes
        return self.follows(action)

    def question(self, action: Action) -> Question:
        """What to ask before `action`, which is not expected."""
        known = self._node.expected
        return Question(self.place, action, known or self._guess(), known is None)

    def enter(self, action: Action) -> None:
        """All ranks do `action` here."""
        node = self._node
        self._learn(node.trail, action)
        self.place += 1
        if self._nodes >= self._limit:
            # Guesses go on: not everything is asked again.
            self._starts.clear()
            self._nodes = 1
            self._node = _Node((action, *node.trail)[:_TRAIL])
            return
        if node.expected is None:
            node.expected, node.next = action, self._sequel(node, action)
            self._node = node.next
            return
        sequel = node.others.get(action)
        if sequel is None:
            sequel = node.others[action] = self._sequel(node, action)
        if node.challenger == action and node.next is not None:
            # Twice in a row: the program is another one from now on.
            del node.others[action]
            node.others[node.expected] = node.next
            node.expected, node.next, node.challenger = action, sequel, None
        else:
            node.challenger = action
        self._node = sequel

    def introduce(self, name: str, plain: Iterable[tuple[str, int, str, str]]) -> tuple[Action, list[Action]]:
        """A root comes up; `plain`: kind, index, name and sizes of all that its units send.

        The action that introduces it, to be agreed on like any other, and its plain actions, in the order given.
        """
        family = self.families
        actions = [Action(kind, family, index, unit_name, sizes) for kind, index, unit_name, sizes in plain]
        digest = hashlib.sha256("\n".join(map(str, actions)).encode()).hexdigest()[:16]
        return Action("form", family, 0, name, f"{len(actions)}*{digest}"), actions

    def introduced(self, actions: Sequence[Action]) -> None:
        """All ranks introduced that root, with these plain actions."""
        self.families += 1
        if len(self._plain) + len(actions) > self._limit:
            self._plain.clear()
        self._plain.update({(action.kind, action.family, action.unit): action for action in actions})

    def _sequel(self, node: _Node, action: Action) -> _Node:
        if not action.starts:
            self._nodes += 1
            return _Node((action, *node.trail)[:_TRAIL])
        # One start for the first step, for one behind a step and for one behind an evaluation.
        start = action._replace(flags=tuple(flag for flag in action.flags if flag not in ("stepped", "train")))
        if start not in self._starts:
            self._nodes += 1
            self._starts[start] = _Node((start,))
        return self._starts[start]

    def _guess(self) -> Action | None:
        trail = self._node.trail
        for length in range(len(trail), 0, -1):
            seen = self._seen.get(trail[:length])
            if seen is not None:
                return seen
            habit = self._habits.get(_seen_from_anywhere(trail[:length]))
            if habit is not None:
                return self._plain.get((habit[0], trail[0].family, trail[0].unit + habit[1]))
        return None

    def _learn(self, trail: tuple[Action, ...], action: Action) -> None:
        if len(self._seen) + _TRAIL > self._limit or len(self._habits) + _TRAIL > self._limit:
            self._seen.clear()
            self._habits.clear()
        near = bool(trail) and trail[0].family == action.family and not action.flags
        for length in range(len(trail), 0, -1):
            self._seen[trail[:length]] = action
            if near:
                self._habits[_seen_from_anywhere(trail[:length])] = (action.kind, action.unit - trail[0].unit)


def _seen_from_anywhere(trail: Sequence[Action]) -> tuple[object, ...]:
    """Actions by kind, and by how far their units are from that of the first one."""
    return tuple((action.kind, action.flags, action.unit - trail[0].unit) for action in trail)


# ---- when ranks disagree --------------------------------------------------------------------------------------


def disagreement(questions: Mapping[int, Question]) -> str:
    """The error, from what each rank asked: what was expected, what was found on which ranks, and what to do.

    A rank that asks at a later place than another went on as expected there, without a question.
    """
    place = min(question.place for question in questions.values())
    first = {rank: question for rank, question in questions.items() if question.place == place}
    asked = next(iter(first.values()))
    expected = asked.expected
    went_on = [rank for rank, question in questions.items() if question.place > place]
    doing: dict[Action, list[int]] = {}
    if went_on and expected is not None:
        doing[expected] = went_on
    for rank, question in sorted(first.items()):
        doing.setdefault(question.action, []).append(rank)
    # What most ranks do; of two halves, what was expected.
    usual = max(doing, key=lambda action: (len(doing[action]), action == expected))
    others = {action: ranks for action, ranks in doing.items() if action != usual}
    odd = next(iter(others), usual)
    before = ", as in the steps before" if usual == expected and not asked.guessed else ""
    found = " and ".join(f"{_ranks(ranks)} about to {_phrase(action)}" for action, ranks in others.items())
    return (
        f"{odd.name}: expected all ranks to {_phrase(usual)}{before} ({_ranks(doing[usual])}), found {found}; "
        f"{_advice(usual, list(others))}"
    )


def deviation(question: Question, asking: Sequence[int], here: int) -> str:
    """The error on rank `here`, which waits for a message: ranks `asking` asked at a place that it went through."""
    expected = question.expected
    as_before = "to go on as before"
    if expected is not None:
        as_before = f"to {_phrase(expected)}{'' if question.guessed else ', as in the steps before'}"
    advice = _advice(expected, [question.action]) if expected is not None else _advice(question.action, [])
    return (
        f"{question.action.name}: expected {_ranks(asking)} {as_before} (as rank {here}), found "
        f"{_ranks(asking)} about to {_phrase(question.action)}; {advice}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    head = ", ".join(map(str, ranks[:-1]))
    return f"ranks {head} and {ranks[-1]}" if head else f"rank {ranks[0]}"


def _phrase(action: Action) -> str:
    what = {
        "gather": "gather the parameters of",
        "widen": "gather what is kept of",
        "reduce": "reduce the gradients of",
        "form": "run the model",
        "count": "count the batches that are left for",
        "full": "gather the full value of",
        "open": "enter full_params of",
    }.get(action.kind, action.kind)
    when = ""
    if "stepped" in action.flags:
        steps = action.flags.count("stepped")
        when = " after an optimizer step" if steps == 1 else f" after {steps} optimizer steps"
    if "eval" in action.flags:
        when += " in a forward without gradients"
    if "accumulated" in action.flags:
        when += ", accumulated over several backwards"
    if "keep" in action.flags:
        when += " without an all-reduce"
    if "added" in action.flags:
        when += ", on top of a gradient of an earlier backward"
    if "cleared" in action.flags:
        when += ", where no gradient is any more"
    return f"{what} {action.name} ({action.sizes}){when}"


def _on_top(action: Action) -> tuple[bool, bool]:
    """What it says of a .grad from before."""
    return "added" in action.flags, "cleared" in action.flags


def _advice(usual: Action, others: Sequence[Action]) -> str:
    """What to do about it, by what differs first."""
    both = [usual, *others]
    if len({action.kind == "count" for action in both}) > 1:
        return "some ranks are at the next turn of fullshard.joined: leave it on all ranks in the same turn"
    by_hand = [action.kind in _BY_HAND for action in both]
    if all(by_hand) and others:
        return "gather the same parameters in the same order on all ranks"
    if any(by_hand):
        return (
            "some ranks gather parameters by hand where others do not (full_params; full_tensor() or redistribute() of "
            "a parameter): every rank takes part in these, so call them on all ranks, and use what comes of them on "
            "those that need it"
        )
    if len({"eval" in action.flags for action in both}) > 1:
        return (
            "some ranks evaluate where others do not: give all ranks as many evaluation batches, or let those that "
            "have fewer take part with fullshard.joined(model, batches)"
        )
    if len({action.flags.count("stepped") for action in both}) > 1 and len({action.unit for action in both}) == 1:
        return (
            "some ranks took an optimizer step where others did not: call optimizer.step() on all ranks alike, after "
            "as many backwards (a rank without a batch takes part with a loss times 0)"
        )
    kinds, units = {action.kind for action in both}, {(action.family, action.unit) for action in both}
    if "form" in kinds:
        return "run the same models in the same order on all ranks, with the same parameters and settings"
    if kinds == {"reduce"} and len(units) == 1 and len({_on_top(action) for action in both}) > 1:
        return (
            "gradients of earlier backwards are there on some ranks alone: call zero_grad() on all ranks alike, and "
            "take gradients away or put them there on all of them"
        )
    if len(kinds) > 1 and "reduce" in kinds:
        return (
            "some ranks are in a backward where others are not, or a loss does not reach this module on some: run as "
            "many forwards and backwards on all ranks, with the same set_requires_gradient_sync, and let every loss "
            "reach the same modules (times 0 where nothing is to be learned)"
        )
    if len(units) > 1:
        return (
            "make all ranks run the same modules in the same order (a rank that has no use for one runs it too, and "
            "multiplies what it gives by 0)"
        )
    return "give the parameters of this module the same dtype, requires_grad and settings on all ranks"
