"""Expected bytes are sums of named terms; here against sums done by hand."""

import dataclasses

import pytest

from fullshard.layout import (
    FlatLayout,
    GatherPlan,
    ReduceLayout,
    ShardLayout,
    Term,
    UnitMemory,
    backward_terms,
    forward_terms,
    peak,
    resharding_terms,
    secondary_layout,
    shard_terms,
    total,
)
from fullshard.layout.flat import align_up
from fullshard.layout.memory import buffer_terms, sending_terms


def unit(
    name: str,
    rows: int,
    *,
    world: int = 4,
    compute: int = 4,
    direct: bool = False,
    reshard: bool = True,
    outer: bool = False,
    exchanges: bool = True,
    degree: int | None = None,
) -> UnitMemory:
    """Two parameters of (rows, 16) and (16,): one message, or both gathered directly."""
    layouts = [ShardLayout((rows, 16), world=world), ShardLayout((16,), world=world)]
    pack = FlatLayout.build(layouts, 8)
    plan = GatherPlan((0, 1), ()) if direct else GatherPlan((), (0, 1))
    kept = None if degree is None else secondary_layout(pack, plan, degree)
    return UnitMemory(name, pack, plan, 4, compute, 4, reshard, outer, exchanges, kept=kept)


def test_terms_of_one_unit_by_hand() -> None:
    """8 x 16 and 16 elements on 4 ranks, storage and reduction float32, compute bfloat16."""
    found = unit("block", 8, compute=2)
    local = 2 * 16 + 8  # two rows; four elements aligned to eight
    assert found.shard_nbytes == local * 4
    assert found.full_nbytes == (8 * 16 + 32) * 2  # the bias is aligned to 32 elements
    assert found.staging_nbytes == 4 * local * 2
    assert found.gradient_nbytes == (8 * 16 + 16) * 2
    assert found.send_nbytes == 4 * (local + 16) * 4  # two grad-present flags and eight of facts, aligned to eight
    assert found.receive_nbytes == found.send_nbytes
    assert unit("block", 8, exchanges=False).receive_nbytes == (local + 8) * 4  # one chunk
    assert found.reduced_nbytes == (local + 16) * 4  # views of the reduced chunk, presence and facts after them
    assert found.gather_nbytes == found.full_nbytes + found.staging_nbytes  # shards are cast to their place there
    assert found.arriving_nbytes == 0
    assert unit("block", 8, direct=True).staging_nbytes == 0
    assert unit("block", 8, direct=True).arriving_nbytes == unit("block", 8).full_nbytes


def test_world_of_one_has_no_full_copy_and_no_message() -> None:
    """The shard is the parameter; only another compute dtype needs a copy."""
    assert unit("block", 8, world=1, direct=True).full_nbytes == 0
    assert unit("block", 8, world=1, direct=True).send_nbytes == 0
    cast = unit("block", 8, world=1, compute=2, direct=True)
    assert cast.full_nbytes == cast.pack.full_numel * 2


def test_forward_is_shards_and_two_units() -> None:
    """Full parameters of the running unit and the message of the next, no more; the root stays."""
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
        "staging of layers.1",
    ]
    by_hand = (
        sum(each.shard_nbytes for each in units) + root.full_nbytes + blocks[0].full_nbytes + blocks[1].staging_nbytes
    )
    assert total(terms) == by_hand
    assert not any("staging" in term.name for term in forward_terms(units, 3))
    assert len(forward_terms(units, 1, prefetch_depth=0)) == len(terms) - 1
    assert len(forward_terms(units, 1, prefetch_depth=2)) == len(terms) + 1


def test_a_direct_gather_arrives_in_the_full_parameters() -> None:
    """And one in another dtype is sent from there, too: the cast needs no buffer."""
    units = [unit(f"layers.{i}", 8, direct=True, compute=2) for i in range(2)]
    names = [term.name for term in forward_terms(units, 0)]
    assert names[2:] == ["full layers.0", "full layers.1 (next)"]


def test_an_outer_unit_stays_full_while_those_inside_run() -> None:
    """Also when it is freed after its forward."""
    units = [unit("root", 4, outer=True), unit("layers.0", 8), unit("layers.1", 8)]
    for terms in (forward_terms(units, 2), backward_terms(units, 2), backward_terms(units, 1)):
        assert "full root (kept)" in [term.name for term in terms]
    assert not any("root" in term.name and "next" in term.name for term in backward_terms(units, 1))


def test_backward_holds_gradients_messages_and_reduced_shards() -> None:
    """Two units full, one with gradients, one message in flight, reduced shards of those that have arrived."""
    units = [unit("root", 4, reshard=False), *(unit(f"layers.{i}", 8, direct=True) for i in range(4))]
    terms = backward_terms(units, 2, reductions_in_flight=1)
    assert [term.name for term in terms[len(units) :]] == [
        "full root (kept)",
        "full layers.1",
        "full layers.0 (next)",
        "gradients of layers.1",
        "reduction of layers.2",
        "reduced shards of layers.3",
    ]
    dialled = backward_terms(units, 2, reductions_in_flight=2)
    message = units[4].send_nbytes + units[4].receive_nbytes
    assert total(dialled) - total(terms) == message - units[4].reduced_nbytes
    at_the_end = backward_terms(units, 0, reductions_in_flight=0)
    assert sum(term.name.startswith("reduced") for term in at_the_end) == 4
    # A unit that was never freed is not gathered again.
    assert not any("next" in term.name for term in backward_terms(units, 1))


def test_a_message_is_made_after_the_full_parameters_are_freed() -> None:
    """Gradients and their message exist together, weights and message do not."""
    units = [unit(f"layers.{i}", 8) for i in range(3)]
    before, after = backward_terms(units, 1), sending_terms(units, 1)
    message = units[1].send_nbytes + units[1].receive_nbytes
    assert total(after) - total(before) == message - units[1].full_nbytes
    assert "full layers.1" not in [term.name for term in after]


def test_kept_buffers_are_shared_by_units_of_equal_layout() -> None:
    """Three equal blocks and the root: one staging buffer for the blocks, as many messages as are in flight at once."""
    root, blocks = unit("root", 4, outer=True), [unit(f"layers.{i}", 8) for i in range(3)]
    terms = {term.name: term.nbytes for term in buffer_terms([root, *blocks], reductions_in_flight=1)}
    assert terms == {
        "1 staging as of root": root.staging_nbytes,
        "1 staging as of layers.0": blocks[0].staging_nbytes,
        "2 send as of layers.2": 2 * blocks[0].send_nbytes,
        "1 send as of root": root.send_nbytes,
        "2 receive as of layers.2": 2 * blocks[0].receive_nbytes,
        "1 receive as of root": root.receive_nbytes,
    }
    deeper = {term.name for term in buffer_terms([root, *blocks], prefetch_depth=2, reductions_in_flight=2)}
    assert {"2 staging as of layers.0", "3 send as of layers.2"} <= deeper
    assert buffer_terms([unit("layers.0", 8, world=1, direct=True)]) == []


def test_terms_of_kept_parts_by_hand() -> None:
    """8 x 16 and 16 elements on 8 ranks, compute bfloat16, kept by pairs: 4 x 16 and 8 elements."""
    found = unit("block", 8, world=8, compute=2, degree=2)
    kept = 4 * 16 + 8
    assert found.kept_nbytes == kept * 2
    assert found.secondary_staging_nbytes == 2 * kept * 2
    assert found.staging_nbytes == 8 * (16 + 8) * 2
    direct = unit("block", 8, world=8, direct=True, degree=2)
    assert (direct.secondary_staging_nbytes, direct.kept_nbytes) == (0, kept * 4)
    nothing = unit("block", 8, world=8)
    assert (nothing.kept_nbytes, nothing.secondary_staging_nbytes) == (0, 0)


def test_parts_are_kept_from_forward_to_the_gather_for_backward() -> None:
    """Beside the unit's own full parameters while they are copied, and beside the message that gathers them."""
    root = unit("root", 4, world=8, compute=2, outer=True, degree=2)
    blocks = [unit(f"layers.{i}", 8, world=8, compute=2, degree=2) for i in range(3)]
    units = [root, *blocks]
    names = {
        of.__name__: [term.name for term in of(units, 2)][len(units) :]
        for of in (forward_terms, resharding_terms, backward_terms, sending_terms)
    }
    ahead = "staging of layers.2"
    assert names["forward_terms"] == ["full root (kept)", "kept part of layers.0", "full layers.1", ahead]
    assert names["resharding_terms"] == [*names["forward_terms"], "kept part of layers.1"]
    # In backward the part of the next unit is there until its message has arrived.
    start = ["full root (kept)", "kept part of layers.0"]
    assert names["backward_terms"][:4] == [*start, "full layers.1", "staging of layers.0"]
    assert names["sending_terms"][:3] == [*start, "staging of layers.0"]
    staging = next(term for term in backward_terms(units, 2) if term.name == "staging of layers.0")
    assert staging.nbytes == blocks[0].secondary_staging_nbytes
    last = resharding_terms(units, 0)[len(units) :]
    assert [term.name for term in last] == [
        *(f"kept part of layers.{i}" for i in range(3)),
        "full root",
        "kept part of root",
    ]
    assert last[-1].nbytes == root.kept_nbytes
    buffers = {term.name: term.nbytes for term in buffer_terms(units)}
    assert buffers["1 staging of kept parts as of layers.2"] == blocks[0].secondary_staging_nbytes
    assert buffers["1 staging of kept parts as of root"] == root.secondary_staging_nbytes


def test_the_moment_of_resharding_may_be_the_peak() -> None:
    """Where so much is gathered ahead in forward that backward needs less."""
    alone = unit("layers.0", 64, world=8, degree=4)
    name, terms = peak([alone])
    moments = {
        of.__name__: total(of([alone], 0)) for of in (forward_terms, resharding_terms, backward_terms, sending_terms)
    }
    assert total(terms) == max(moments.values())
    assert moments["resharding_terms"] == moments["forward_terms"] + alone.kept_nbytes
    units = [unit(f"layers.{i}", 64, world=8, degree=2) for i in range(7)]
    assert peak(units, prefetch_depth=6, reductions_in_flight=0)[0] == "resharding layers.0"


def test_peak_is_the_largest_moment() -> None:
    """Without any kept unit the biggest block decides, in backward."""
    units = [unit("layers.0", 8), unit("layers.1", 64), unit("layers.2", 8)]
    name, terms = peak(units)
    moments = [of(units, i) for of in (forward_terms, backward_terms, sending_terms) for i in range(3)]
    assert name == "sending layers.1"
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
        forward_terms(units, 0, prefetch_depth=-1)
    with pytest.raises(ValueError, match="reductions_in_flight"):
        backward_terms(units, 0, reductions_in_flight=-1)
    with pytest.raises(ValueError, match="units"):
        peak([])
    with pytest.raises(ValueError, match="current: expected a unit that keeps a part, found 'root'"):
        resharding_terms(units, 0)
    with pytest.raises(ValueError, match="kept of 'root': expected None with reshard=False"):
        unit("root", 4, world=4, reshard=False, degree=2)
    with pytest.raises(ValueError, match="wire_itemsize of 'root'"):
        UnitMemory("root", units[0].pack, units[0].plan, 4, 4, 0)


def test_gradients_that_are_sent_from_where_they_are() -> None:
    """They need no send buffer, live until they are sent, and this rank's own part does not arrive."""
    packed = unit("layers.0", 8)
    pairs = dataclasses.replace(packed, direct_gradients=(0,))
    segment = packed.pack.segments[0]
    chunk = ReduceLayout(packed.pack).chunk_numel
    aligned = align_up(segment.padded_numel, packed.pack.align_numel)
    assert packed.leaving_nbytes == 0
    assert pairs.leaving_nbytes == segment.layout.numel * packed.wire_itemsize
    assert packed.send_nbytes - pairs.send_nbytes == packed.pack.world * aligned * packed.wire_itemsize
    assert packed.receive_nbytes - pairs.receive_nbytes == chunk * packed.wire_itemsize
    behind = {term.name: term.nbytes for term in backward_terms([unit("root", 8), pairs], 0)}
    assert behind["reduction of layers.0"] == pairs.send_nbytes + pairs.leaving_nbytes + pairs.receive_nbytes
