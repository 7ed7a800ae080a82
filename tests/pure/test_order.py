"""The agreed order: ranks as `Order`s, programs as lists of actions. No messages.

Programs are what training loops do: steps of several micro-batches, with and without synchronisation, evaluations of
any length, units that run twice or are skipped, two models in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.agree.differences import deviation, disagreement
from fullshard.agree.ledger import Action, Order, Question, read_question


def action(kind: str, index: int, *flags: str, root: str = "0-1", sizes: str = "") -> Action:
    return Action(kind, root, index, f"unit{index}", sizes or f"float32*{16 * (index + 1)}", flags)


# ---- programs -------------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """A training loop of one rank, written down as actions."""

    units: int
    root: str = "0-1"
    actions: list[Action] = field(default_factory=list)
    stepped: bool = False
    trained: bool = False

    def add(self, kind: str, index: int, *flags: str) -> None:
        if kind == "unshard" and index == 0:
            if "eval" not in flags and not self.trained:
                flags = ("train", *flags)
            self.trained = "eval" not in flags
        if self.stepped:
            flags, self.stepped = ("stepped", *flags), False
        self.actions.append(action(kind, index, *flags, root=self.root))

    def forward(self, order: Sequence[int]) -> None:
        for index in order:
            self.add("unshard", index)

    def micro_batch(self, order: Sequence[int], *, sync: bool = True) -> None:
        """Forward and backward: in backward each unit but the root is gathered before that after it is reduced."""
        self.forward([0, *order])
        back = list(reversed(order))
        for position, index in enumerate(back):
            self.add("unshard", index)
            if position and sync:
                self.add("reduce", back[position - 1])
        if sync:
            for index in (*back[-1:], 0):
                self.add("reduce", index)

    def step(self) -> None:
        self.stepped = True

    def evaluate(self, batches: int) -> None:
        for _ in range(batches):
            self.add("unshard", 0, "eval")
            self.forward(range(1, self.units))


# A step: how many micro-batches, whether all of them send; then how many batches of evaluation; units that it skips.
Step = tuple[int, bool, int, tuple[int, ...]]
STEPS = st.lists(
    st.tuples(
        st.integers(1, 3), st.booleans(), st.sampled_from([0, 0, 0, 1, 4]), st.lists(st.integers(1, 4), max_size=2)
    ).map(lambda s: (s[0], s[1], s[2], tuple(s[3]))),
    min_size=1,
    max_size=6,
)


def program(units: int, steps: Sequence[Step], loop: Loop | None = None) -> list[Action]:
    """The actions of `steps`; of a loop that continues, where there is one."""
    loop = loop or Loop(units)
    loop.actions = []
    for batches, always, evaluation, skipped in steps:
        for batch in range(batches):
            order = [index for index in range(1, units) if index not in skipped]
            loop.micro_batch(order, sync=always or batch == batches - 1)
        loop.step()
        loop.evaluate(evaluation)
    return loop.actions


PROGRAMS = st.builds(program, st.integers(2, 6), STEPS)


# ---- ranks ----------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Ranks that run programs. `issued[rank]`: what each sent.

    `compared`: how often all compared what they were about to do where nothing was known; `asked`: how often through
    the store, because it was not what was known.
    """

    orders: list[Order]
    issued: list[list[Action]] = field(default_factory=list)
    compared: int = 0
    asked: int = 0

    @staticmethod
    def of(world: int, *, limit: int = 20_000) -> World:
        return World([Order(limit=limit) for _ in range(world)], [[] for _ in range(world)])

    def run(self, programs: Sequence[Sequence[Action]]) -> dict[int, Question] | None:
        """Each rank continues as far as it may without a comparison, then all compare. The questions on which they
        disagree: those of the ranks that ask (others ended, or wait for what does not come); None: all ended."""
        at = [0] * len(programs)
        while True:
            asking: dict[int, Question] = {}
            for rank, (order, actions) in enumerate(zip(self.orders, programs, strict=True)):
                while at[rank] < len(actions) and order.follows(actions[at[rank]]):
                    self.issued[rank].append(actions[at[rank]])
                    at[rank] += 1
                if at[rank] < len(actions):
                    asking[rank] = order.question(actions[at[rank]])
            if not asking:
                return None
            # At one place the same is expected, so all compare in the same way.
            by_place: dict[int, set[tuple[Action | None, ...]]] = {}
            for rank, question in asking.items():
                expected = question.expected, self.orders[rank].expected()
                by_place.setdefault(question.place, set()).add(expected)
            assert all(len(expected) == 1 for expected in by_place.values())
            if len(asking) < len(programs) or len(set(asking.values())) > 1:
                return asking
            if self.orders[0].expected() is None:
                self.compared += 1
            else:
                self.asked += 1
            for rank, order in enumerate(self.orders):
                order.enter(programs[rank][at[rank]])
                self.issued[rank].append(programs[rank][at[rank]])
                at[rank] += 1

    def never_mixed(self) -> bool:
        """Whether no two ranks sent different things at one place."""
        longest = max(map(len, self.issued))
        return all(len({sent[i] for sent in self.issued if i < len(sent)}) == 1 for i in range(longest))


# ---- no false alarms, and no cost -----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(PROGRAMS, st.integers(1, 4), st.sampled_from([4, 30, 20_000]))
def test_equal_programs_never_disagree(actions: list[Action], world: int, limit: int) -> None:
    ranks = World.of(world, limit=limit)
    assert ranks.run([actions] * world) is None
    assert ranks.issued == [actions] * world


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 6), STEPS)
def test_what_repeats_is_not_compared_again(units: int, steps: list[Step]) -> None:
    """And asked about only where steps differ, in which case the store is asked for the way that is taken."""
    ranks, loop, before = World.of(2), Loop(units), (0, 0)
    for _ in range(5):
        before = ranks.compared, ranks.asked
        assert ranks.run([program(units, steps, loop)] * 2) is None
    kinds = {(batches, sync, skipped) for batches, sync, _, skipped in steps}
    evaluations = sum(step[2] > 0 for step in steps)
    # A question for each step that begins unlike the last time, and one for each other kind of step that was tried;
    # and on the way into an evaluation, from its first batch to the next, and out of it.
    forks = len(steps) * len(kinds) if len(kinds) > 1 or evaluations else 0
    assert ranks.asked - before[1] <= forks + 3 * evaluations
    # Where a program went another way, it is compared until it went the same way twice.
    assert ranks.compared - before[0] <= 2 * (forks + 3 * evaluations)
    if len(set(steps)) == 1 and not evaluations:
        assert (ranks.compared, ranks.asked) == before


class Naive:
    """What an `Order` should expect: all that ever followed the actions since the last start, by these actions."""

    def __init__(self) -> None:
        self.history: dict[tuple[Action, ...], list[Action]] = {}
        self.path: tuple[Action, ...] = ()

    def expected(self, *, doubts: bool) -> Action | None:
        followed = self.history.get(self.path, [])
        return followed[-1] if followed and (not doubts or followed[-1] == followed[-2:][0]) else None

    def take(self, made: Action) -> None:
        self.history.setdefault(self.path, []).append(made)
        start = made._replace(flags=tuple(flag for flag in made.flags if flag not in ("stepped", "train")))
        self.path = (start,) if {*made.flags} & {"stepped", "eval", "train"} else (*self.path, made)


@settings(max_examples=300, deadline=None)
@given(PROGRAMS, st.integers(1, 3), st.booleans())
def test_what_is_expected_is_what_followed_the_last_time(actions: list[Action], repeats: int, doubts: bool) -> None:
    order, naive = Order(), Naive()
    for place, made in enumerate(actions * repeats):
        for each in (True, False):
            assert order.expected(doubts=each) == naive.expected(doubts=each)
        expected = naive.expected(doubts=doubts)
        assert order.place == place and order.question(made).expected == naive.expected(doubts=False)
        assert order.follows(made, doubts=doubts) is (expected == made)
        if expected != made:
            order.enter(made)
        naive.take(made)


def test_a_steady_state_asks_nothing() -> None:
    ranks, loop = World.of(2), Loop(40)
    for step in range(20):
        loop.actions, before = [], (ranks.compared, ranks.asked)
        loop.micro_batch(range(1, 40), sync=False)
        loop.micro_batch(range(1, 40))
        loop.step()
        assert ranks.run([loop.actions] * 2) is None
        count = len(loop.actions)
        # The first step is compared, the second one begins for the first time after another.
        assert ranks.compared - before[0] == (count if step == 0 else 1 if step == 1 else 0)
        assert ranks.asked == before[1]


def test_an_evaluation_now_and_then_asks_twice_and_batches_of_it_nothing() -> None:
    ranks, loop = World.of(2), Loop(5)

    def steps(count: int, batches: int) -> tuple[int, int]:
        loop.actions, before = [], (ranks.compared, ranks.asked)
        for _ in range(count):
            loop.micro_batch(range(1, 5))
            loop.step()
        loop.evaluate(batches)
        assert ranks.run([loop.actions] * 2) is None
        return ranks.compared - before[0], ranks.asked - before[1]

    steps(3, 3)
    steps(3, 3)
    # It asks on the way into the evaluation and out of it. From the first batch to the next one, and from the first
    # step to the next, ranks compare until it is the same twice.
    assert [steps(10, batches) for batches in (3, 7, 30)] == [(4, 2)] * 3


def test_a_program_that_changes_for_good_asks_in_one_step() -> None:
    ranks = World.of(2)
    before, after = ([0, *range(1, 6)], [0, 1, 2, 4, 5])

    def step(order: Sequence[int]) -> tuple[int, int]:
        loop, counts = Loop(6, stepped=True, trained=True), (ranks.compared, ranks.asked)
        loop.micro_batch(order[1:])
        assert ranks.run([loop.actions] * 2) is None
        return ranks.compared - counts[0], ranks.asked - counts[1]

    for _ in range(3):
        step(before)
    assert step(before) == (0, 0)
    # Asked where it changes, and compared from there on; then it is what is expected.
    compared, asked = step(after)
    assert asked == 1 and 0 < compared <= 12
    assert [step(after), step(after), step(after)] == [(2, 0), (0, 0), (0, 0)]
    # What was before is known still, and is expected from then on.
    assert [step(before), step(before), step(before)] == [(0, 1), (1, 0), (0, 0)]


def test_a_step_that_ends_early_is_one_more_way_and_asks_once() -> None:
    """A batch that is skipped after its forward: the next step begins where a message was expected."""
    ranks = World.of(2)

    def step(messages: int | None) -> int:
        loop, asked = Loop(6, stepped=True, trained=True), ranks.asked
        loop.micro_batch(range(1, 6))
        assert ranks.run([loop.actions[:messages]] * 2) is None
        return ranks.asked - asked

    assert [step(None) for _ in range(4)] == [0, 0, 0, 0]
    assert [step(4) for _ in range(4)] == [0, 1, 0, 0]


def test_ways_that_alternate_are_compared_where_they_part() -> None:
    kinds = [tuple(index for index in range(1, 10) if index != left_out) for left_out in range(1, 9)]
    ranks, loop, counts = World.of(2), Loop(10), []
    for _ in range(4):
        before = ranks.compared, ranks.asked
        for kind in kinds:
            loop.actions = []
            loop.micro_batch(kind)
            loop.step()
            assert ranks.run([loop.actions] * 2) is None
        counts.append((ranks.compared - before[0], ranks.asked - before[1]))
    assert max(compared for compared, _ in counts[1:]) <= 3 * len(kinds) and max(asked for _, asked in counts[1:]) <= 8


def test_skipping_layers_at_random_asks_seldom_and_compares_the_rest() -> None:
    """Layer drop, with the same choice on every rank: what was never seen is compared from where it differs."""
    import random

    draw = random.Random(1)
    ranks, asked, compared = World.of(2), [], []
    for _ in range(60):
        dropped = draw.sample(range(2, 32), 3)
        loop, before = Loop(33, stepped=True, trained=True), (ranks.compared, ranks.asked)
        loop.micro_batch([index for index in range(1, 33) if index not in dropped])
        assert ranks.run([loop.actions] * 2) is None
        compared.append(ranks.compared - before[0])
        asked.append(ranks.asked - before[1])
    # Of some 90 actions.
    assert sum(asked[30:]) / 30 <= 2 and max(compared) <= 92


def test_the_history_is_bounded() -> None:
    """Also of a program without any start: a gather by hand that is repeated for ever."""
    for kind, flags in (("unshard", ["eval"]), ("open", [])):
        order = Order(limit=100)
        for place in range(5000):
            order.enter(action(kind, place % 700, *flags * (place % 3 == 0)))
            assert len(order._after) <= 100 and len(order._last) <= 101


def test_each_root_is_another_one() -> None:
    """Units of two roots have the same numbers, and are not taken for each other."""
    order = Order()
    for _ in range(2):
        order.enter(action("unshard", 0, "stepped"))
    assert not order.follows(action("unshard", 0, "stepped", root="0-2"))
    assert order.follows(action("unshard", 0, "stepped"))


# ---- every divergence is found --------------------------------------------------------------------------------------


def _swapped(actions: list[Action], at: int) -> list[Action]:
    return [*actions[:at], *reversed(actions[at : at + 2]), *actions[at + 2 :]]


def _skipped(actions: list[Action], at: int) -> list[Action]:
    return actions[:at] + actions[at + 1 :]


def _extra_batch(actions: list[Action], at: int) -> list[Action]:
    loop = Loop(3)
    loop.micro_batch([1, 2])
    return actions[:at] + loop.actions + actions[at:]


def _stepped(actions: list[Action], at: int) -> list[Action]:
    return [*actions[:at], actions[at]._replace(flags=("stepped", *actions[at].flags)), *actions[at + 1 :]]


def _other_sizes(actions: list[Action], at: int) -> list[Action]:
    return [*actions[:at], actions[at]._replace(sizes="bfloat16*7"), *actions[at + 1 :]]


def _evaluation(actions: list[Action], at: int) -> list[Action]:
    loop = Loop(3)
    loop.evaluate(1)
    return actions[:at] + loop.actions + actions[at:]


DIVERGENCES = (_swapped, _skipped, _extra_batch, _stepped, _other_sizes, _evaluation)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(2, 6),
    STEPS,
    st.integers(0, 3),
    st.sampled_from(DIVERGENCES),
    st.data(),
    st.integers(2, 4),
    st.sampled_from([4, 30, 20_000]),
)
def test_any_divergence_is_found_before_a_message_of_it(
    units: int, steps: list[Step], repeats: int, diverge: object, data: st.DataObject, world: int, limit: int
) -> None:
    ranks, cycle = World.of(world, limit=limit), program(units, steps)
    for _ in range(repeats):
        assert ranks.run([cycle] * world) is None
    at = data.draw(st.integers(0, len(cycle) - 1))
    who = data.draw(st.integers(0, world - 1))
    assert callable(diverge)
    # Something follows on all ranks: without any message after it nothing can be noticed, and nothing is wrong.
    tail = [action("unshard", 0, "eval"), action("unshard", 1), action("unshard", 0, "eval", "stepped")]
    programs = [[*(diverge(cycle, at) if rank == who else cycle), *tail] for rank in range(world)]
    found = ranks.run(programs)
    if programs[who] == programs[(who + 1) % world]:  # two equal units swapped
        assert found is None
        return
    assert ranks.never_mixed()
    same = (
        len(cycle) * repeats
        + next(i for i, (one, other) in enumerate(zip(programs[0], programs[1], strict=False)) if one != other)
        if who < 2
        else None
    )
    if found is None:
        # It ended earlier than the others, who wait for it: one program is the beginning of the other.
        shorter, longer = sorted((programs[who], programs[(who + 1) % world]), key=len)
        assert longer[: len(shorter)] == shorter
        return
    # Whoever did something else than was expected asked before; the place of the first question is that of the change.
    place = min(question.place for question in found.values())
    deviating = [rank for rank, question in found.items() if question.place == place]
    assert all(len(ranks.issued[rank]) == place for rank in deviating)
    if same is not None:
        assert place == same
    text = disagreement(found) if len(found) == world else deviation(found[deviating[0]], deviating, 1 - deviating[0])
    assert "expected" in text and "found" in text and f"rank {deviating[0]}" in text.replace("ranks", "rank")


def test_a_rank_that_follows_does_not_ask_and_one_that_deviates_does() -> None:
    ranks = World.of(3)
    loop = Loop(4)
    for _ in range(3):
        loop.micro_batch([1, 2, 3])
        loop.step()
    assert ranks.run([loop.actions] * 3) is None
    usual = Loop(4, stepped=True)
    usual.micro_batch([1, 2, 3])
    other = Loop(4, stepped=True)
    other.micro_batch([2, 1, 3])
    sent = [len(issued) for issued in ranks.issued]
    found = ranks.run([other.actions, usual.actions, usual.actions])
    assert found is not None and list(found) == [0]
    assert [len(issued) for issued in ranks.issued] == [sent[0] + 1, sent[1] + 11, sent[2] + 11]


# ---- texts ----------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Action,
        st.sampled_from(["unshard", "unshard_secondary", "reduce", "open"]),
        st.sampled_from(["0-1", "12-345", "0"]),
        st.integers(0, 999),
        st.sampled_from(["root", "layers.0", "a+b"]),
        st.sampled_from(["float32*8", "bfloat16*3+float32*1", "-"]),
        st.lists(st.sampled_from(["stepped", "eval", "train", "accumulated", "partials", "keep"]), unique=True).map(
            tuple
        ),
    ),
    st.integers(0, 10**9),
    st.booleans(),
)
def test_questions_are_written_and_read_back(action: Action, place: int, known: bool) -> None:
    question = Question(place, action, action if known else None)
    assert read_question(question.text) == question
    # All of an action is in the text that ranks compare where nothing is expected.
    for part in ("kind", "root", "name", "sizes"):
        assert str(getattr(action, part)) in str(action)
    assert set(action.flags) <= set(str(action).split())


def test_of_two_ranks_that_do_different_things_the_one_that_does_as_before_is_right() -> None:
    usual, other = action("unshard", 1), action("unshard", 2)
    said = disagreement({0: Question(3, other, usual), 1: Question(3, usual, usual)})
    assert "(rank 1), found rank 0 about to" in said and "as in the steps before" in said


def test_what_is_said_about_units_in_another_order() -> None:
    first, second = action("unshard", 1), action("unshard", 2)
    questions = {0: Question(7, second, first), 1: Question(9, action("reduce", 0), None), 2: Question(7, first, first)}
    assert disagreement(questions) == (
        "unit2: expected all ranks to gather the parameters of unit1 (float32*32), as in the steps before "
        "(ranks 1 and 2), found rank 0 about to gather the parameters of unit2 (float32*48); make all ranks run the "
        "same modules in the same order (a rank that has no use for one runs it too, and multiplies what it gives by 0)"
        ", or mark what only some ranks run by fully_shard(module, optional=True), and run it at its place in the "
        "order of modules"
    )
    assert deviation(questions[0], [0], 1).startswith(
        "unit2: expected rank 0 to gather the parameters of unit1 (float32*32), as in the steps before (as rank 1), "
        "found rank 0 about to gather the parameters of unit2 (float32*48); make all ranks run"
    )
    unknown = questions[0]._replace(expected=None)
    assert "as in the steps before" not in deviation(unknown, [0], 1)
    # Where nothing was expected, the other rank's place is what the asking ranks are to come to.
    assert deviation(unknown, [0], 1, "the end of a guarded block") == (
        "unit2: expected rank 0 in the end of a guarded block (as rank 1), found rank 0 about to gather the parameters "
        "of unit2 (float32*48); make all ranks take the same calls in the same order"
    )


@pytest.mark.parametrize(
    ("one", "other", "advice"),
    [
        (action("unshard", 0, "stepped"), action("unshard", 0), "call optimizer.step() on all ranks alike"),
        (action("unshard", 0, "eval"), action("unshard", 0, "stepped"), "fullshard.joined"),
        (action("unshard", 0), action("reduce", 2), "as many forwards and backwards"),
        (action("reduce", 1), action("reduce", 1, sizes="float16*3"), "the same dtype, requires_grad"),
        (action("reduce", 1), action("reduce", 1, "added"), "call zero_grad() on all ranks alike"),
        (action("reduce", 1, "added"), action("reduce", 1, "cleared"), "call zero_grad() on all ranks alike"),
        (action("unshard", 1), action("open", 0), "enter it on all ranks"),
        (action("open", 0, sizes="4*ab"), action("reduce", 2), "enter it on all ranks"),
        (action("open", 0), action("open", 0, sizes="3*cd"), "the same parameters in the same order"),
    ],
)
def test_advice_is_for_what_differs(one: Action, other: Action, advice: str) -> None:
    for expected in (one, other, None):
        text = disagreement({0: Question(3, one, expected), 1: Question(3, other, expected)})
        assert advice in text and "rank 0" in text and "rank 1" in text
    assert advice in deviation(Question(3, other, one), [1], 0)
