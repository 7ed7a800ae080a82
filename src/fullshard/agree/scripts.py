"""The agreed order of messages: ranks compare each unexpected message before they send it.

Messages of one group match by their position in its order only. Ranks that run units of equal shapes in different
orders silently exchange wrong values; with different sizes or message counts they abort or hang.

    action     one message, as a value with a text form:  unshard 0.3 layers.2 float32*1024 stepped
    start      an action after an optimizer step, or the first of an evaluation: the program starts over
    script     the actions from one start to the next, as recorded the last time
    expected   the next action of the script. It follows from earlier actions, so every rank has the same
    question   sent to the others through the store by a rank that is about to deviate

An expected action is sent without a comparison: a program that repeats itself costs nothing. If a script is known, a
rank that deviates must ask through the store, because the others may wait for its message. If none is known, none is
known on any rank, so all compare their next action by a small message (`Order.expected` is None).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
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
# How many different scripts are kept per start.
_VARIANTS = 8


class Action(NamedTuple):
    """One message of a unit. `family`: its root's number, in the order in which roots formed; `unit`: its index there;
    `sizes`: the sizes sent, by group, as one word."""

    kind: str
    family: int
    unit: int
    name: str
    sizes: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.kind, f"{self.family}.{self.unit}", self.name, self.sizes, *self.flags))

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

    >>> parse_action("unshard 0.3 layers.2 float32*1024 stepped")
    Action(kind='unshard', family=0, unit=3, name='layers.2', sizes='float32*1024', flags=('stepped',))

    Raises `ValueError` for another form or an unknown flag.
    """
    words = text.split()
    place = words[1].split(".") if len(words) > 3 else []
    if len(place) != 2 or not all(part.isdecimal() for part in place) or not set(words[4:]) <= set(FLAGS):
        raise ValueError(f"action: expected 'KIND ROOT.UNIT NAME SIZES FLAG...' with flags of {FLAGS}, found {text!r}")
    return Action(words[0], int(place[0]), int(place[1]), words[2], words[3], tuple(words[4:]))


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


class _Script:
    """A sequence of actions, the first of which is a start; `then`: the start that followed it the last time."""

    __slots__ = ("actions", "then")

    def __init__(self, actions: list[Action]) -> None:
        self.actions = actions
        self.then: Action | None = None


class Order:
    """The position of one rank in the common order of a set of ranks.

        if not order.follows(action):
            ...  # compare it with the others; if all of them do the same:
            order.enter(action)

    `limit`: how many actions are kept. Beyond it all scripts are dropped, on all ranks at the same place.
    """

    def __init__(self, *, limit: int = 20_000) -> None:
        # The number of actions so far; the number of roots so far.
        self.place = self.families = 0
        self._limit = limit
        self._kept = 0
        # By start, the latest first.
        self._scripts: dict[Action, list[_Script]] = {}
        # The script that this rank follows and its position in it; or the new actions if it follows none.
        self._script: _Script | None = None
        self._at = 0
        self._new: list[Action] = []

    @property
    def expected(self) -> Action | None:
        """The action that needs no question; None: every action needs one, on all ranks."""
        script = self._script
        if script is None:
            return None
        return script.actions[self._at] if self._at < len(script.actions) else script.then

    def follows(self, action: Action) -> bool:
        """Whether `action` is expected here; if so, advance."""
        script = self._script
        if script is None:
            return False
        actions, at = script.actions, self._at
        if at < len(actions):
            # Actions are cached, so the expected one is nearly always the same object.
            if actions[at] is not action:
                if actions[at] != action:
                    return False
                actions[at] = action
            self._at = at + 1
            self.place += 1
            return True
        if script.then != action:
            return False
        self._begin(action)
        return True

    def question(self, action: Action) -> Question:
        """The question to ask before the unexpected `action`."""
        return Question(self.place, action, self.expected)

    def enter(self, action: Action) -> None:
        """Enter an unexpected `action`, on which all ranks agreed."""
        script, at = self._script, self._at
        if action.starts:
            if script is None:
                self._keep()
            elif at < len(script.actions):
                self._new = script.actions[:at]
                self._keep()
            self._begin(action)
            return
        self.place += 1
        if script is None:
            if len(self._new) >= self._limit:
                self._new = []  # the program never starts over
            self._new.append(action)
            return
        # Another script of this start may continue with this action.
        done = script.actions[:at]
        for other in self._scripts.get(_start_of(script.actions[0]), ()):
            if len(other.actions) > at and other.actions[at] == action and other.actions[:at] == done:
                self._script, self._at = other, at + 1
                return
        self._script, self._new = None, [*done, action]

    def introduce(self, name: str, plain: Iterable[tuple[str, int, str, str]]) -> Action:
        """The action that introduces a new root, to be agreed on like any other. `plain`: kind, index, name and sizes
        of all messages of its units."""
        family = self.families
        lines = [str(Action(kind, family, index, unit_name, sizes)) for kind, index, unit_name, sizes in plain]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return Action("form", family, 0, name, f"{len(lines)}*{digest}")

    def introduced(self) -> None:
        """All ranks introduced that root."""
        self.families += 1

    def _keep(self) -> None:
        """Keep the actions since the last start as a script."""
        if not self._new:
            return
        if self._kept + len(self._new) > self._limit:
            self._scripts.clear()
            self._kept = 0
        self._kept += len(self._new)
        known = self._scripts.setdefault(_start_of(self._new[0]), [])
        known.insert(0, _Script(self._new))
        for dropped in known[_VARIANTS:]:
            self._kept -= len(dropped.actions)
        del known[_VARIANTS:]
        self._script, self._new = known[0], []

    def _begin(self, start: Action) -> None:
        """The program starts over with `start`; the script before it becomes the latest."""
        if self._script is not None:
            self._script.then = start
            known = self._scripts.get(_start_of(self._script.actions[0]), [])
            if self._script in known and known[0] is not self._script:
                known.remove(self._script)
                known.insert(0, self._script)
        self.place += 1
        scripts = self._scripts.get(_start_of(start))
        self._script = scripts[0] if scripts else None
        self._at, self._new = 1, [] if scripts else [start]


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
        "form": "run the model",
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
