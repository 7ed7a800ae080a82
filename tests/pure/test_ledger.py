"""Ledgers: equal ones have equal digests, and of others the first difference is named."""

from __future__ import annotations

import itertools

import pytest

from fullshard.agree.differences import ADVICE, differences, first_unlike
from fullshard.agree.ledger import Fact, Ledger, Statement, called, digest_of

LR = Fact("optimizer", "lr of the optimizer", "0.1")
CLIP = called("clip_grad_norm_", [Fact("clip", "max_norm of clip_grad_norm_", "1.0")])
STEP = called("optimizer.step", [LR])
FACTOR = Fact("controls", "settings of root", "divide factor=2.0")


def ledger(*calls: Statement, standing: tuple[Fact, ...] = ()) -> Ledger:
    made = Ledger()
    for fact in standing:
        made.stand(fact)
    for call in calls:
        made.do(call)
    return made


def first(*ledgers: Ledger) -> str:
    return next(differences({rank: each.seal().statements for rank, each in enumerate(ledgers)})).text


def test_each_of_these_has_a_digest_of_its_own() -> None:
    other = called("optimizer.step", [LR._replace(value="0.2")])
    every = [(), (STEP,), (other,), (STEP, STEP), (CLIP, STEP), (STEP, CLIP), (CLIP,)]
    digests = [ledger(*calls, standing=held).seal().digest for calls in every for held in ((), (FACTOR,))]
    assert len(set(digests)) == len(digests)
    assert all(digest % 2 == 0 and 0 <= digest < 1 << 64 for digest in digests)


def test_calls_of_other_names_with_equal_facts_are_others() -> None:
    assert ledger(called("a", STEP.facts)).seal().digest != ledger(called("b", STEP.facts)).seal().digest


def test_steps_of_several_optimizers_may_come_in_any_order() -> None:
    """Each has its own parameters. What comes between them is compared at its place."""
    other = called("optimizer.step", [LR._replace(value="0.2")])
    assert ledger(STEP, other).seal() == ledger(other, STEP).seal()
    assert ledger(STEP, CLIP, other).seal() != ledger(other, CLIP, STEP).seal()


def test_equal_ledgers_have_equal_digests_step_after_step() -> None:
    """Whatever the order in which facts came to stand."""
    one, two = ledger(standing=(FACTOR, LR)), ledger(standing=(LR, FACTOR))
    for calls in ([STEP], [STEP], [], [CLIP, STEP], [STEP]):
        for each in (one, two):
            for call in calls:
                each.do(call)
        sealed = one.seal()
        assert sealed == two.seal() and sealed.shared == 0
        assert not one.calls


def test_what_was_done_before_a_comparison_is_not_in_the_next_one() -> None:
    used, fresh = ledger(CLIP, STEP), ledger()
    used.seal()
    assert used.seal() == fresh.seal()
    used.do(STEP)
    used.share("0,1", [LR])
    used.forget()
    assert used.seal() == fresh.seal()


def test_a_setting_that_changed_is_in_the_next_comparison() -> None:
    used = ledger(STEP, standing=(FACTOR,))
    before = used.seal()
    used.do(STEP)
    assert used.seal() is before, "of a steady step nothing is put together"
    used.do(STEP)
    used.stand(FACTOR._replace(value="divide factor=1.0"))
    after = used.seal()
    assert after.digest != before.digest
    used.do(called("optimizer.step", [LR._replace(value="0.2")]))
    assert used.seal().digest not in (before.digest, after.digest)


def test_a_fact_that_some_ranks_do_not_have() -> None:
    for ledgers in ((ledger(STEP), ledger(STEP, standing=(FACTOR,))), (ledger(STEP, standing=(FACTOR,)), ledger(STEP))):
        assert first(*ledgers).startswith("settings of root: expected the same on every rank, found")


def test_many_calls_are_kept_short_and_differ_where_any_did() -> None:
    long = [ledger(*[STEP] * 500), ledger(*[STEP] * 500), ledger(CLIP, *[STEP] * 499), ledger(*[STEP] * 499)]
    sealed = [each.seal() for each in long]
    assert sealed[0] == sealed[1] and len({each.digest for each in sealed}) == 3
    assert all(len(each.text) < 20_000 for each in sealed)


def test_a_value_that_differs() -> None:
    other = called("optimizer.step", [LR._replace(value="0.2")])
    said = first(ledger(STEP), ledger(other), ledger(STEP))
    assert said == (
        "lr of the optimizer: expected the same on every rank, found 0.1 on ranks 0 and 2 and 0.2 on rank 1; "
        "build the optimizer and its schedule from the same numbers on all ranks"
    )


def test_another_order_of_calls() -> None:
    said = first(ledger(CLIP, STEP), ledger(STEP, CLIP))
    assert "found clip_grad_norm_, optimizer.step on rank 0 and optimizer.step, clip_grad_norm_ on rank 1" in said
    assert "found optimizer.step on rank 0 and nothing on rank 1" in first(ledger(STEP), ledger())
    said = first(ledger(STEP, CLIP), ledger(STEP, STEP))
    assert "found optimizer.step, clip_grad_norm_ on rank 0 and optimizer.step, optimizer.step on rank 1" in said


def test_what_was_done_is_named_before_what_came_of_it() -> None:
    value = Fact("controls", "settings of a", "other")
    assert first(ledger(STEP), ledger(CLIP, standing=(value,))).startswith("calls")
    assert first(ledger(STEP), ledger(STEP, standing=(value,))).startswith("settings of a: ")


def test_replicas_are_compared_among_each_other() -> None:
    made = []
    for among, value in (("0,2", "a"), ("1,3", "b"), ("0,2", "a"), ("1,3", "c")):
        each = ledger(STEP)
        each.share(among, [Fact("replicas", "shard of w", value)])
        made.append(each)
    sealed = [each.seal() for each in made]
    assert len({each.digest for each in sealed}) == 1 and sealed[0].shared == sealed[2].shared
    assert len({each.shared for each in sealed}) == 3
    (found,) = differences({rank: each.statements for rank, each in enumerate(sealed)})
    assert found.values == (((1,), "b"), ((3,), "c"))
    assert made[0].seal().shared == 0
    made[0].do(STEP)
    made[1].share("1,3", [])
    made[1].do(STEP)
    assert made[0].seal().shared == 0 and made[1].seal().shared != 0
    made[1].do(STEP)
    assert made[1].seal().shared == 0, "of the same calls without replicas"
    made[1].do(STEP)
    made[1].share("1,3", [])
    assert made[1].seal().shared != 0, "of the same calls with replicas"


def test_equal_ledgers_have_no_difference() -> None:
    assert not list(differences({0: ledger(CLIP).seal().statements, 1: ledger(CLIP).seal().statements}))


def test_each_kind_has_advice() -> None:
    assert all(isinstance(advice, str) and advice for advice in ADVICE.values())
    for kind in ADVICE:
        (found,) = differences(
            {r: ledger(standing=(Fact(kind, "x", str(r)),)).seal().statements for r in (0, 1)},
        )
        assert found.text.endswith(ADVICE[kind]) and found.by_rank == {0: "0", 1: "1"}


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(["", "x", "y", "xy"], 2)))
def test_digests_of_texts(a: str, b: str) -> None:
    assert digest_of(a) == digest_of(a) != digest_of(b)


def test_lists_of_names() -> None:
    assert first_unlike({0: ["a", "b", "c"], 1: ["a", "c"], 2: ["c"]}) == "a (not on rank 2), b (not on ranks 1 and 2)"
    assert first_unlike({0: list("abcdefg"), 1: []}).endswith("and 3 more")
