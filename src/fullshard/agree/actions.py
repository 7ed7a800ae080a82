"""The agreed order of messages: ranks compare each unexpected message before they send it.

Messages of one group match by their position in its order only. Ranks that run units of equal shapes in different
orders silently exchange wrong values; with a message of another kind they wait for ever; and where a rank receives more
than it expects, gloo ends its process.

    action     one message, as a value with a text form:  unshard 0-3.5 layers.2 float32*1024 stepped
    start      an action after an optimizer step, or the first of an evaluation: the program starts over
    expected   what followed the actions since the start the last time. It follows from earlier actions, so every rank
               has the same
    question   sent to the others through the store by a rank that is about to deviate

An expected action is sent without a comparison: a program that repeats itself costs nothing. A rank that deviates must
ask through the store, because the others may wait for its message. If nothing is expected, nothing is expected on any
rank, so all compare their next action by a small message; so they do where what is expected is in doubt, because a
question would cost the store more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The flags of an action, beside its kind, unit and sizes.
FLAGS = (
    "stepped",  # the first after an optimizer step; once for each step
    "eval",  # the first of a forward without gradients
    "train",  # the first of one with gradients, where the one before had none
    "accumulated",  # gradients of several backwards
    "partials",  # with sums that were not all-reduced
    "keep",  # not all-reduced
    # Adds to an existing .grad; and no longer does. Only changes are flagged, so that neither one zero_grad per step
    # nor none at all sets a flag.
    "added",
    "cleared",
)
_STARTS = ("stepped", "eval", "train")
# Gathers by the program itself, outside of the units' own messages.
_BY_HAND = "open"


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

    @property
    def doing(self) -> str:
        """The activity of a rank that compares this action, in words."""
        return f"a comparison, about to {_phrase(self)}"

    @property
    def starts(self) -> bool:
        """Whether the program starts over with it."""
        return any(flag in _STARTS for flag in self.flags)


def parse_action(text: str) -> Action:
    """The reverse of `str(action)`.

    >>> parse_action("unshard 0-3.5 layers.2 float32*1024 stepped")
    Action(kind='unshard', root='0-3', unit=5, name='layers.2', sizes='float32*1024', flags=('stepped',))

    Raises `ValueError` for another form or an unknown flag.
    """
    words = text.split()
    root, _, unit = words[1].rpartition(".") if len(words) > 3 else ("", "", "")
    if not root or not unit.isdecimal() or not set(words[4:]) <= set(FLAGS):
        raise ValueError(f"action: expected 'KIND ROOT.UNIT NAME SIZES FLAG...' with flags of {FLAGS}, found {text!r}")
    return Action(words[0], root, int(unit), words[2], words[3], tuple(words[4:]))


class Question(NamedTuple):
    """A rank's next action at a place; `expected`: the action that would have needed no question, if any."""

    place: int
    action: Action
    expected: Action | None

    def __str__(self) -> str:
        return f"{self.place}: {self.action}; expected: {self.expected or 'nothing'}"


def parse_question(text: str) -> Question:
    """The reverse of `str(question)`; `ValueError` for another form."""
    found = re.fullmatch(r"(\d+): ([^;]+); expected: ([^;]+)", text)
    if found is None:
        raise ValueError(f"question: expected 'PLACE: ACTION; expected: ACTION', found {text!r}")
    place, action, expected = found.groups()
    return Question(int(place), parse_action(action), None if expected == "nothing" else parse_action(expected))


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
        key = (_ANYWHERE, _start_of(action)) if action.starts else (self._here, action)
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


# ---- when ranks disagree --------------------------------------------------------------------------------------


def disagreement(questions: Mapping[int, Question]) -> str:
    """The error text, from each rank's question: expected, found on which ranks, and what to do.

    A rank that asks at a later place did the expected action at the earlier one.
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
    # The majority's action; in a tie, the expected one.
    usual = max(doing, key=lambda action: (len(doing[action]), action == expected))
    others = {action: ranks for action, ranks in doing.items() if action != usual}
    odd = next(iter(others), usual)
    before = ", as in the steps before" if usual == expected else ""
    found = " and ".join(f"{_ranks(ranks)} about to {_phrase(action)}" for action, ranks in others.items())
    return (
        f"{odd.name}: expected all ranks to {_phrase(usual)}{before} ({_ranks(doing[usual])}), found {found}; "
        f"{_advice(usual, list(others))}"
    )


def deviation(question: Question, asking: Sequence[int], here: int) -> str:
    """The error on rank `here`, which waits for a message: ranks `asking` asked at a place that it has passed."""
    expected = question.expected
    as_before = "to continue as before"
    if expected is not None:
        as_before = f"to {_phrase(expected)}, as in the steps before"
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
        "unshard": "gather the parameters of",
        "unshard_secondary": "gather what is kept of",
        "reduce": "reduce the gradients of",
        "count": "count the batches that are left for",
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
    """Its flags about an earlier .grad."""
    return "added" in action.flags, "cleared" in action.flags


def _advice(usual: Action, others: Sequence[Action]) -> str:
    """The advice, by the first difference."""
    both = [usual, *others]
    if len({action.kind == "count" for action in both}) > 1:
        return "some ranks are at the next turn of fullshard.joined: leave it on all ranks in the same turn"
    explicit = [action.kind == _BY_HAND for action in both]
    if all(explicit) and others:
        return "gather the same parameters in the same order on all ranks"
    if any(explicit):
        return (
            "some ranks gather parameters explicitly where others do not (full_params): every rank takes part in that, "
            "so enter it on all ranks, and use its result on those that need it"
        )
    if len({"eval" in action.flags for action in both}) > 1:
        return (
            "some ranks evaluate where others do not: give all ranks as many evaluation batches, or let those that "
            "have fewer take part with fullshard.joined(model, batches)"
        )
    if len({action.flags.count("stepped") for action in both}) > 1 and len({action.unit for action in both}) == 1:
        return (
            "some ranks took an optimizer step where others did not: call optimizer.step() on all ranks alike, after "
            "as many backwards (a rank without a batch takes part with a loss times 0), and decide by figures of all "
            "ranks (fullshard.grad_stats, fullshard.check_gradients) which step is left out: isnan or a norm of a "
            "gradient may be of one rank's rows"
        )
    kinds, units = {action.kind for action in both}, {(action.root, action.unit) for action in both}
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
