"""How much the tests of checkpoints try, so that no change of theirs makes it less unseen. Each of them asserts its own
numbers; here they are added up."""

from __future__ import annotations

from tests.procs.test_checkpoint_kills import POINTS, POINTS_IN_FULL
from tests.procs.test_train_resume import MANY, STEPS, STOPS
from tests.threads.test_checkpoint import ALL_WORLDS
from tests.threads.test_checkpoint_faults import DAMAGES, SEEDS, SEEDS_IN_FULL


def test_points_at_which_a_rank_is_killed() -> None:
    assert sum(POINTS.values()) >= 30, "in make test"
    assert 4 * sum(POINTS_IN_FULL.values()) >= 200, "beyond them, in make test-full"


def test_damaged_checkpoints() -> None:
    assert len(SEEDS) >= 200 and len(SEEDS_IN_FULL) >= 1000 and not set(SEEDS) & set(SEEDS_IN_FULL)
    assert len(set(DAMAGES)) == 11, "each kind of damage"


def test_worlds_that_load_what_others_saved() -> None:
    assert set(ALL_WORLDS) == {(a, b) for a in range(1, 7) for b in range(1, 7)}


def test_steps_at_which_a_training_is_stopped() -> None:
    assert len(STOPS) >= 4 and len({*STOPS, *MANY}) >= 40
    assert {stop for _, stop, _ in MANY} == set(range(1, STEPS + 1)), "every step"
