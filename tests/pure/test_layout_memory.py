"""Expected bytes are sums of named terms; here against sums done by hand."""

import pytest

from fullshard.layout import (
    GatherPlan,
    Pack,
    ShardLayout,
    Term,
    UnitMemory,
    backward_terms,
    forward_terms,
    peak,
    shard_terms,
    total,
)


def unit(name: str, rows: int, *, world: int = 4, compute: int = 4, direct: bool = False, reshard: bool = True):
    """Two parameters of (rows, 16) and (16,): one message, or both gathered directly."""
    layouts = [ShardLayout((rows, 16), world=world), ShardLayout((16,), world=world)]
    pack = Pack.build(layouts, 8)
    plan = GatherPlan((0, 1), ()) if direct else GatherPlan((), (0, 1))
    return UnitMemory(name, pack, plan, 4, compute, 4, reshard)


def test_terms_of_one_unit_by_hand() -> None:
    """8 x 16 and 16 elements on 4 ranks, storage and reduction float32, compute bfloat16."""
    found = unit("block", 8, compute=2)
    local = 2 * 16 + 8  # two rows; four elements aligned to eight
    assert found.shard_nbytes == local * 4
    assert found.full_nbytes == (8 * 16 + 32) * 2  # the bias is aligned to 32 elements
    assert found.staging_nbytes == 4 * local * 2
    assert found.gradient_nbytes == (8 * 16 + 16) * 2
    assert found.send_nbytes == 4 * (local + 8) * 4  # two presence elements, aligned to eight
    assert found.reduced_nbytes == local * 4
    assert unit("block", 8, direct=True).staging_nbytes == 0


def test_world_of_one_has_no_full_copy_and_no_message() -> None:
    """The shard is the parameter; only another compute dtype needs a copy."""
    assert unit("block", 8, world=1, direct=True).full_nbytes == 0
    assert unit("block", 8, world=1, direct=True).send_nbytes == 0
    cast = unit("block", 8, world=1, compute=2, direct=True)
    assert cast.full_nbytes == cast.pack.full_numel * 2


def test_forward_is_shards_and_two_units() -> None:
    """Full parameters of the running unit and of the one being gathered, no more; the root stays."""
    root = unit("root", 4, reshard=False)
    blocks = [unit(f"layers.{i}", 8) for i in range(3)]
    units = [root, *blocks]
    terms = forward_terms(units, 1)
    assert [term.name for term in terms] == [
        "shards of root",
        "shards of layers.0",
        "shards of layers.1",
        "shards of layers.2",
        "full root (kept)",
        "full layers.0",
        "full layers.1 (next)",
        "staging of layers.1",
    ]
    by_hand = (
        sum(each.shard_nbytes for each in units)
        + root.full_nbytes
        + 2 * blocks[0].full_nbytes
        + blocks[1].staging_nbytes
    )
    assert total(terms) == by_hand
    last = forward_terms(units, 3)
    assert not any("next" in term.name for term in last)
    assert len(forward_terms(units, 1, prefetch_depth=0)) == len(terms) - 2


def test_backward_holds_gradients_messages_and_reduced_shards() -> None:
    """Two units full, one with gradients, one message in flight, reduced shards of all that are done."""
    units = [unit("root", 4, reshard=False), *(unit(f"layers.{i}", 8, direct=True) for i in range(4))]
    terms = backward_terms(units, 2)
    assert [term.name for term in terms[len(units) :]] == [
        "full root (kept)",
        "full layers.1",
        "full layers.0 (next)",
        "gradients of layers.1",
        "reduction of layers.2",
        "reduced shards of layers.2",
        "reduced shards of layers.3",
    ]
    dialled = backward_terms(units, 2, reductions_in_flight=2)
    assert total(dialled) - total(terms) == units[4].send_nbytes
    at_the_end = backward_terms(units, 0)
    assert sum(term.name.startswith("reduced") for term in at_the_end) == 4
    # A unit that was never freed is not gathered again.
    assert not any("next" in term.name for term in backward_terms(units, 1))


def test_peak_is_the_largest_moment() -> None:
    """Without any kept unit the biggest block decides, in backward."""
    units = [unit("layers.0", 8), unit("layers.1", 64), unit("layers.2", 8)]
    name, terms = peak(units)
    moments = [forward_terms(units, i) for i in range(3)] + [backward_terms(units, i) for i in range(3)]
    assert name == "backward layers.1"
    assert total(terms) == max(map(total, moments))


def test_without_resharding_backward_begins_with_all_full() -> None:
    """Every full parameter is still there, and none is gathered or staged again."""
    units = [unit(f"layers.{i}", 8, reshard=False) for i in range(3)]
    terms = backward_terms(units, 2)
    assert not any(term.name.startswith("staging") for term in terms)
    assert sum(term.nbytes for term in terms if term.name.startswith("full")) == 3 * units[0].full_nbytes


def test_terms_are_named_tuples() -> None:
    """A report can print them as they are."""
    assert shard_terms([unit("root", 4)]) == [Term(name="shards of root", nbytes=4 * (16 + 8))]


def test_wrong_arguments_are_named() -> None:
    """Each refusal says which argument."""
    units = [unit("root", 4)]
    with pytest.raises(ValueError, match="current"):
        forward_terms(units, 1)
    with pytest.raises(ValueError, match="prefetch_depth"):
        backward_terms(units, 0, prefetch_depth=-1)
    with pytest.raises(ValueError, match="reductions_in_flight"):
        backward_terms(units, 0, reductions_in_flight=-1)
    with pytest.raises(ValueError, match="units"):
        peak([])
    with pytest.raises(ValueError, match="wire_itemsize of 'root'"):
        UnitMemory("root", units[0].pack, units[0].plan, 4, 4, 0)
