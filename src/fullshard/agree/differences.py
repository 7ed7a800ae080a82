"""Where the statements of ranks differ, and the text of the error that all of them raise. Standard library only.

`differences` compares the lists of several ranks; `disagreement` and `deviation` the messages that they are about to
send (ledger.py). A text says what was expected, what was found on which ranks, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..peers.wait import shown_ranks, variants
from .ledger import (
    CALL,
    NOW,
    OPTIONS,
    PARAMETER,
    REPLICAS,
    TENSOR,
    UNIT,
    Action,
    Fact,
    Question,
    Statement,
    dumps,
    loads,
)

# How many of the differing values an error shows.
_SHOWN = 4
# The advice in an error, by the kind of a fact.
ADVICE = {
    OPTIONS: "set it to the same value on all ranks",
    UNIT: "call fully_shard with the same arguments on all ranks",
    PARAMETER: "build the same model on all ranks",
    TENSOR: "build the same model on all ranks",
    "frozen": "freeze the same parameters on all ranks",
    "sharding": "call fully_shard on the same modules, with the same arguments, on all ranks",
    "controls": "call the setters of FSDPModule with the same arguments on all ranks",
    "outside": "no unit has it, so nothing averages its gradients: add it before fully_shard (adapters: get_peft_model "
    "first); or begin from equal values, average its gradients yourself, and name in ignored_params what is there by "
    "then; or freeze it; fullshard.find_drift(model) lists all that differ",
    "buffers": "call fullshard.sync_module_states(model, buffers_only=True)",
    "ignored": "nothing where that is meant, as of experts of a rank's own; else seed and load it alike",
    "replicas": "seed and load the ranks that replicate alike; fullshard.find_drift(model) lists all that differ",
    "optimizer": "build the optimizer and its schedule from the same numbers on all ranks",
    "parameters": "build the optimizer from the same parameters in the same order on all ranks",
    "state": "load the optimizer's state on all ranks, or on none",
    "gradients": "change gradients on all ranks or on none, in the program or in a hook",
    "written": "change or load parameters on all ranks or on none",
    "clip": "call clip_grad_norm_ with the same arguments on all ranks",
    "scaler": "build the scaler with the same arguments on all ranks, and load its state on all of them",
    "hooks": "register hooks that change gradients on all ranks or on none",
    "load": "load the same checkpoint on all ranks",
    "order": "run the same modules in the same order on all ranks",
    "calls": "take the same calls in the same order on all ranks",
}
# The names of differences that are no fact.
_ORDER, _CALLS = "order", "calls since the last comparison"


class Difference(NamedTuple):
    """A difference between ranks. `fact`: one with an empty name if only some ranks have the statement. `values`:
    (ranks, their value), the most frequent first; None: no value."""

    statement: Statement
    fact: Fact
    values: tuple[tuple[tuple[int, ...], str | None], ...]

    @property
    def what(self) -> str:
        """The place and the fact, for programs."""
        return f"{self.statement.name} {self.fact.name}".strip()

    @property
    def by_rank(self) -> dict[int, str]:
        """The value of each rank."""
        return {rank: value or "" for ranks, value in self.values for rank in ranks}

    @property
    def text(self) -> str:
        """The error text: expected, found on which ranks, what to do."""
        place, name, fact = self.statement.place, self.statement.name, self.fact.name
        found = [f"{_shortened(value or '')} on {shown_ranks(ranks)}" for ranks, value in self.values[:_SHOWN]]
        found += [f"{len(self.values) - _SHOWN} more"] * (len(self.values) > _SHOWN)
        if place in (CALL, NOW, REPLICAS):
            return f"{fact}: expected the same on every rank, found {' and '.join(found)}; {ADVICE[self.fact.kind]}"
        if fact == _ORDER:
            found[0] = f"it {found[0]}"
            return (
                f"{name}: expected the same order of {place}s on every rank, found {' and '.join(found)}; build the "
                f"same model on all of them"
            )
        if not fact:
            have = [rank for ranks, value in self.values if value is not None for rank in ranks]
            miss = [rank for ranks, value in self.values if value is None for rank in ranks]
            what = "a unit (fully_shard) of this name" if place == UNIT else f"this {place}"
            return (
                f"{name}: expected {what} on every rank, found it on {shown_ranks(have)} and not on "
                f"{shown_ranks(miss)}; build and shard the same model on all of them"
            )
        subject = f"{name}: " if name else ""
        advice = ADVICE[self.fact.kind]
        return f"{subject}expected the same {fact} on every rank, found {' and '.join(found)}; {advice}"


def differences(by_rank: Mapping[int, Sequence[Statement]]) -> Iterator[Difference]:
    """The differences between the statements of ranks, in their order, up to the first that only some ranks have; then
    those of replicas."""
    # Ranks that state the same may share a list (`read`).
    texts = {id(statements): dumps([one for one in statements if not one.among]) for statements in by_rank.values()}
    ranks_by_text = variants({rank: texts[id(statements)] for rank, statements in by_rank.items()})
    if len(ranks_by_text) > 1:
        yield from _between(list(ranks_by_text.values()), [loads(text) for text in ranks_by_text])
    groups: dict[str, dict[int, Statement]] = {}
    for rank, statements in by_rank.items():
        for one in statements:
            if one.among:
                groups.setdefault(one.among, {})[rank] = one
    for by_replica in groups.values():
        yield from _facts(next(iter(by_replica.values())), by_replica)


def _between(ranks: Sequence[Sequence[int]], lists: Sequence[Sequence[Statement]]) -> Iterator[Difference]:
    """The differences between `lists`, each of which `ranks` state; those of the majority first."""
    for place in range(max(map(len, lists))):
        here = [statements[place] if place < len(statements) else None for statements in lists]
        if any(_key(one) != _key(here[0]) for one in here):
            break
        by_rank = {rank: one for found, one in zip(ranks, here, strict=True) if one is not None for rank in found}
        yield from _facts(next(iter(by_rank.values())), by_rank)
    else:
        return
    if any(one is not None and one.place == CALL for one in here):
        made = [
            ", ".join(map(_shown, (one for one in statements if one.place == CALL and one.facts)))
            for statements in lists
        ]
        fact = Fact("calls", _CALLS, "")
        yield Difference(Statement(CALL, "", (fact,)), fact, _grouped(ranks, [calls or "nothing" for calls in made]))
        return
    odd = next(at for at, one in enumerate(here) if _key(one) != _key(here[0]))
    usual, other = here[0], here[odd]
    # The other one there is either unknown to the majority or at another place.
    unknown = usual is None or (other is not None and _find(lists[odd], usual) and not _find(lists[0], other))
    one = other if unknown else usual
    assert one is not None
    same = [_find(statements, one) for statements in lists]
    if any(like is None for like in same):
        yield Difference(one, Fact(one.place, "", ""), _grouped(ranks, [like and like.place for like in same]))
        return
    by_rank = {rank: like for found, like in zip(ranks, same, strict=True) if like is not None for rank in found}
    yield from _facts(one, by_rank)
    yield Difference(one, Fact(one.place, _ORDER, ""), _grouped(ranks, [_before(each, one) for each in lists]))


def _key(statement: Statement | None) -> tuple[str, str] | None:
    return None if statement is None else statement[:2]


def _find(statements: Sequence[Statement], like: Statement) -> Statement | None:
    return next((one for one in statements if _key(one) == _key(like)), None)


def _before(statements: Sequence[Statement], like: Statement) -> str:
    """Returns the place of `like` among those of its kind, as text."""
    alike = [one.name for one in statements if one.place == like.place]
    at = alike.index(like.name)
    return f"after {alike[at - 1]}" if at else "first"


def _facts(statement: Statement, by_rank: Mapping[int, Statement]) -> Iterator[Difference]:
    """The facts that differ of one `statement`, which all ranks of `by_rank` make."""
    known = {fact.name: fact for one in by_rank.values() for fact in one.facts}
    values = {rank: {fact.name: fact.value for fact in one.facts} for rank, one in by_rank.items()}
    for name, fact in known.items():
        found = variants({rank: mine.get(name, "none") for rank, mine in values.items()})
        if len(found) > 1:
            yield Difference(statement, fact, tuple((tuple(ranks), value) for value, ranks in found.items()))


def _grouped(
    ranks: Sequence[Sequence[int]], values: Sequence[str | None]
) -> tuple[tuple[tuple[int, ...], str | None], ...]:
    by_rank = {rank: value for found, value in zip(ranks, values, strict=True) for rank in found}
    return tuple((tuple(found), value) for value, found in variants(by_rank).items())


def _shown(call: Statement) -> str:
    """`call` as text, with its object if no other text names that."""
    first = call.facts[0]
    if first.kind == "hooks":
        return f"{call.name} of {first.value}"
    return f"{call.name} ({first.name}, ...)" if first.kind in ("outside", "ignored") else call.name


def _shortened(value: str) -> str:
    return value if len(value) <= 200 else f"{value[:197]}..."


def first_unlike(listed: Mapping[int, Sequence[str]]) -> str:
    """The error text for lists of names that differ: names that only some ranks have.

    >>> first_unlike({0: ["a", "b"], 1: ["a"]})
    'b (not on rank 1)'
    >>> first_unlike({0: ["a", "b"], 1: ["b", "a"]})
    'another order'
    """
    every = dict.fromkeys(name for names in listed.values() for name in names)
    sets = {rank: set(names) for rank, names in listed.items()}
    lacking = [(name, [rank for rank in listed if name not in sets[rank]]) for name in every]
    shown = [f"{name} (not on {shown_ranks(ranks)})" for name, ranks in lacking if ranks]
    if not shown:
        return "another order"
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


# ---- messages --------------------------------------------------------------------------------------------------------

# The kind of a gather by the program itself, outside of the units' own messages.
_EXPLICIT = "open"


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
    found = " and ".join(f"{_ranks(ranks)} about to {phrase(action)}" for action, ranks in others.items())
    return (
        f"{odd.name}: expected all ranks to {phrase(usual)}{before} ({_ranks(doing[usual])}), found {found}; "
        f"{_advice(usual, list(others))}"
    )


def deviation(question: Question, asking: Sequence[int], here: int, where: str = "") -> str:
    """The error on rank `here`, which waits in `where`: ranks `asking` asked at a place that it has passed."""
    expected = question.expected
    as_before = f"in {where}" if where else "to continue as before"
    if expected is not None:
        as_before = f"to {phrase(expected)}, as in the steps before"
    advice = _advice(expected, [question.action]) if expected is not None else _advice(question.action, [])
    return (
        f"{question.action.name}: expected {_ranks(asking)} {as_before} (as rank {here}), found "
        f"{_ranks(asking)} about to {phrase(question.action)}; {advice}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    head = ", ".join(map(str, ranks[:-1]))
    return f"ranks {head} and {ranks[-1]}" if head else f"rank {ranks[0]}"


_KINDS = {
    "unshard": "gather the parameters of",
    "unshard_secondary": "gather what is kept of",
    "reduce": "reduce the gradients of",
    "count": "count the batches that are left for",
    _EXPLICIT: "enter full_params of",
}
_FLAGS = {
    "eval": " in a forward without gradients",
    "accumulated": ", accumulated over several backwards",
    "keep": " without an all-reduce",
    "added": ", on top of a gradient of an earlier backward",
    "cleared": ", where no gradient is any more",
}


def phrase(action: Action) -> str:
    """Returns `action` in words, after "to"."""
    steps = action.flags.count("stepped")
    when = f" after {'an optimizer step' if steps == 1 else f'{steps} optimizer steps'}" if steps else ""
    when += "".join(text for flag, text in _FLAGS.items() if flag in action.flags)
    return f"{_KINDS.get(action.kind, action.kind)} {action.name} ({action.sizes}){when}"


def _on_top(action: Action) -> tuple[bool, bool]:
    """Returns its flags about an earlier .grad."""
    return "added" in action.flags, "cleared" in action.flags


def _advice(usual: Action, others: Sequence[Action]) -> str:
    """The advice, by the first difference."""
    both = [usual, *others]

    def differ(of: Callable[[Action], object]) -> bool:
        return len(set(map(of, both))) > 1

    if differ(lambda action: action.kind == "count"):
        return "some ranks are at the next turn of fullshard.joined: leave it on all ranks in the same turn"
    explicit = [action.kind == _EXPLICIT for action in both]
    if all(explicit) and others:
        return "gather the same parameters in the same order on all ranks"
    if any(explicit):
        return (
            "some ranks gather parameters explicitly where others do not (full_params): every rank takes part in that, "
            "so enter it on all ranks, and use its result on those that need it"
        )
    if differ(lambda action: "eval" in action.flags):
        return (
            "some ranks evaluate where others do not: give all ranks as many evaluation batches, or let those that "
            "have fewer take part with fullshard.joined(model, batches)"
        )
    if differ(lambda action: action.flags.count("stepped")) and not differ(lambda action: action.unit):
        return (
            "some ranks took an optimizer step where others did not: call optimizer.step() on all ranks alike, after "
            "as many backwards (a rank without a batch takes part with a loss times 0), and decide by figures of all "
            "ranks (fullshard.grad_stats, fullshard.check_gradients) which step is left out: isnan or a norm of a "
            "gradient may be of one rank's rows"
        )
    reduces, several_units = any(action.kind == "reduce" for action in both), differ(lambda one: (one.root, one.unit))
    several_kinds = differ(lambda action: action.kind)
    if reduces and not several_kinds and not several_units and differ(_on_top):
        return (
            "gradients of earlier backwards are there on some ranks alone: call zero_grad() on all ranks alike, and "
            "take gradients away or put them there on all of them"
        )
    if reduces and several_kinds:
        return (
            "some ranks are in a backward where others are not, or a loss does not reach this module on some: run as "
            "many forwards and backwards on all ranks, with the same set_requires_gradient_sync, and let every loss "
            "reach the same modules (times 0 where nothing is to be learned)"
        )
    if several_units:
        return (
            "make all ranks run the same modules in the same order (a rank that has no use for one runs it too, and "
            "multiplies what it gives by 0), or mark what only some ranks run by fully_shard(module, optional=True), "
            "and run it at its place in the order of modules"
        )
    if not others:
        return "make all ranks take the same calls in the same order"
    return "give the parameters of this module the same dtype, requires_grad and settings on all ranks"
