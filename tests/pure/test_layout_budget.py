"""What fits into so many bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import Candidate, choose_resident, leading_within

candidates = st.lists(st.builds(Candidate, st.just("unit"), st.integers(0, 20), st.booleans()), max_size=7)


@given(st.lists(st.integers(0, 9)), st.integers(0, 40))
def test_leading_is_the_longest_beginning_that_fits(costs: list[int], nbytes: int) -> None:
    count = leading_within(costs, nbytes)
    assert sum(costs[:count]) <= nbytes
    assert count == len(costs) or sum(costs[: count + 1]) > nbytes


@given(candidates, st.integers(0, 80))
def test_the_chosen_fit_and_no_other_one_would(units: list[Candidate], nbytes: int) -> None:
    chosen = choose_resident(units, nbytes)
    left = nbytes - sum(units[i].nbytes for i in chosen)
    assert left >= 0 and list(chosen) == sorted(set(chosen))
    for i, unit in enumerate(units):
        if i not in chosen:
            assert unit.nbytes == 0 or unit.nbytes > left


@given(candidates, st.integers(0, 80))
def test_a_trained_unit_never_takes_the_place_of_a_frozen_one(units: list[Candidate], nbytes: int) -> None:
    """Frozen ones are chosen as if there were no others."""
    frozen = [i for i, unit in enumerate(units) if unit.frozen]
    alone = [frozen[i] for i in choose_resident([units[i] for i in frozen], nbytes)]
    assert [i for i in choose_resident(units, nbytes) if units[i].frozen] == alone


def test_among_equals_the_last_are_kept() -> None:
    units = [Candidate(name, 4, False) for name in "abcd"]
    assert choose_resident(units, 9) == (2, 3)
    assert choose_resident(units, 3) == () == choose_resident(units, 0)


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, "1"])
def test_a_budget_is_a_number_of_bytes(nbytes: object) -> None:
    with pytest.raises(ValueError, match="nbytes: expected an int >= 0"):
        choose_resident([], nbytes)  # type: ignore[arg-type]
