"""The list of what a model is: printed and read back, and where those of several ranks first differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.agree.differences import differences
from fullshard.agree.ledger import OPTIONS, PARAMETER, UNIT, Statement, dumps, loads, read, stated
from fullshard.peers import shown_ranks, variants


def unit(name: str, **facts: str) -> Statement:
    return stated(UNIT, name, {"mp_policy": "none", **facts})


def parameter(name: str, **facts: str) -> Statement:
    return stated(PARAMETER, name, {"shape": "(2,)", "requires_grad": "True", **facts})


A, B, C = unit("a"), unit("b"), unit("c")
P, Q, R = parameter("a.p"), parameter("a.q"), parameter("a.r")

DIFFERENCES: list[tuple[str, list[list[Statement]], str]] = [
    (
        "a fact; the majority first",
        [[A, P], [A, parameter("a.p", shape="(3,)")], [A, P]],
        "a.p: expected the same shape on every rank, found (2,) on ranks 0 and 2 and (3,) on rank 1; build the same",
    ),
    (
        "of two differences the first",
        [[A, P, Q], [unit("a", mp_policy="other"), P, parameter("a.q", shape="(3,)")]],
        "a: expected the same mp_policy on every rank, found none on rank 0 and other on rank 1; call fully_shard",
    ),
    (
        "of differences of several ranks the first",
        [[A, P, Q], [A, P, parameter("a.q", shape="(3,)")], [unit("a", mp_policy="other"), P, Q]],
        "a: expected the same mp_policy on every rank, found none on ranks 0 and 1 and other on rank 2; call",
    ),
    (
        "three variants",
        [[parameter("a.p", requires_grad=str(i))] for i in range(3)],
        "a.p: expected the same requires_grad on every rank, found 0 on rank 0 and 1 on rank 1 and 2 on rank 2; freeze",
    ),
    (
        "missing",
        [[A, B, C], [A, C], [A, B, C]],
        "b: expected a unit (fully_shard) of this name on every rank, found it on ranks 0 and 2 and not on rank 1",
    ),
    (
        "more than the majority has",
        [[A, C], [A, B, C], [A, C]],
        "b: expected a unit (fully_shard) of this name on every rank, found it on rank 1 and not on ranks 0 and 2",
    ),
    ("shorter", [[P, Q], [P]], "a.q: expected this parameter on every rank, found it on rank 0 and not on rank 1;"),
    ("longer", [[P], [P, Q], [P]], "a.q: expected this parameter on every rank, found it on rank 1 and not on ranks 0"),
    (
        "order",
        [[P, Q, R], [P, R, Q], [P, Q, R]],
        "a.q: expected the same order of parameters on every rank, found it after a.p on ranks 0 and 2 and after a.r",
    ),
    (
        "settings",
        [[stated(OPTIONS, "", {"prefetch_depth": str(i // 3)})] for i in range(4)],
        "expected the same prefetch_depth on every rank, found 0 on ranks 0 to 2 and 1 on rank 3; set it to",
    ),
    (
        "a fact that some have",
        [[unit("a", mesh="m")], [A]],
        "a: expected the same mesh on every rank, found m on rank 0 and none on rank 1; call fully_shard with the same",
    ),
]


@pytest.mark.parametrize(("lists", "text"), [case[1:] for case in DIFFERENCES], ids=[case[0] for case in DIFFERENCES])
def test_the_first_difference_is_told(lists: list[list[Statement]], text: str) -> None:
    difference = next(differences(dict(enumerate(lists))), None)
    assert difference is not None and difference.text.startswith(text), difference and difference.text


def test_equal_lists_do_not_differ() -> None:
    assert not list(differences({0: [A, P], 7: [A, P]}))
    assert not list(differences({3: []}))


# A fact has a name: without one a difference is of the statement as a whole.
_values = st.dictionaries(st.text(min_size=1, max_size=3), st.text(max_size=3), max_size=3)
_statements = st.lists(
    st.builds(
        stated, st.sampled_from([UNIT, PARAMETER]), st.text(max_size=3), _values.map(lambda v: dict(sorted(v.items())))
    ),
    max_size=5,
    unique_by=lambda statement: statement[:2],
)


@given(_statements)
def test_what_is_printed_is_read_back(statements: list[Statement]) -> None:
    assert loads(dumps(statements)) == statements


def test_ranks_with_equal_texts_share_what_is_read() -> None:
    found = read({rank: dumps([A] if rank else [B]) for rank in range(4)})
    assert found == {0: [B], 1: [A], 2: [A], 3: [A]} and found[1] is found[2] is found[3]


@given(st.lists(_statements, min_size=1, max_size=4))
def test_lists_differ_exactly_when_their_texts_do(lists: Any) -> None:
    """And each rank is named once. Naively, at the first place where not all are equal: what stands there on some
    rank is what differs."""
    difference = next(differences(dict(enumerate(lists))), None)
    assert (difference is not None) == (len({dumps(statements) for statements in lists}) > 1)
    if difference is not None:
        assert sorted(rank for ranks, _ in difference.values for rank in ranks) == list(range(len(lists)))
        assert len(difference.values) > 1
        assert difference.statement.name in difference.text
        at = next(i for i in range(5) if len({tuple(each[i : i + 1]) for each in lists}) > 1)
        assert difference.statement[:2] in {one[:2] for each in lists for one in each[at : at + 1]}
        if difference.fact.name not in ("", "order"):
            like = {
                rank: [one for one in each if one[:2] == difference.statement[:2]] for rank, each in enumerate(lists)
            }
            values = {r: {fact.name: fact.value for fact in one.facts} for r, (one,) in like.items()}
            assert difference.by_rank == {r: found.get(difference.fact.name, "none") for r, found in values.items()}


def test_variants_are_the_majority_first() -> None:
    assert variants({0: "x", 1: "y", 2: "y", 3: "z"}) == {"y": [1, 2], "x": [0], "z": [3]}
    assert list(variants({0: "x", 1: "y", 2: "y", 3: "z"})) == ["y", "x", "z"]
    assert list(variants({0: "x", 1: "y"})) == ["x", "y"]


def test_ranks_in_words() -> None:
    assert shown_ranks([2, 0, 1, 5, 6]) == "ranks 0 to 2 and 5 and 6"
