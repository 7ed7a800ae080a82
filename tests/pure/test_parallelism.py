"""One plan for all axes, as numbers and words: the mesh, who has what, and every plan that is not legal."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fullshard.migrate import ConfigError, read_config, to_dict, to_toml
from fullshard.migrate.axes import NAMES, Axes
from fullshard.migrate.parallelism import ModelShape, Parallelism
from fullshard.migrate.styles import KINDS, LAYOUTS, Style, expanded, messages_of, of_hugging_face

TITAN = """
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
context_parallel_degree = 1
disable_loss_parallel = false
enable_async_tensor_parallel = false
"""


# ---- axes ------------------------------------------------------------------------------------------------------------


@given(some.tuples(*(some.integers(1, 3) for _ in NAMES)))
def test_every_rank_has_one_place_and_each_axis_divides_the_ranks(sizes: tuple[int, ...]) -> None:
    axes = Axes(**dict(zip(NAMES, sizes, strict=True)))
    ranks = range(axes.world)
    assert len({tuple(axes.at(rank).values()) for rank in ranks}) == axes.world == math.prod(sizes)
    for name, size in zip(NAMES, sizes, strict=True):
        groups = {axes.group(rank, name) for rank in ranks}
        assert sorted(rank for group in groups for rank in group) == list(ranks)
        for group in groups:
            assert len(group) == size and [axes.at(rank)[name] for rank in group] == list(range(size))
    # Neighbours share a tensor-parallel group.
    assert all(
        axes.group(rank, "tp") == tuple(range(rank - rank % axes.tp, rank - rank % axes.tp + axes.tp)) for rank in ranks
    )
    # Who gets the same share of a batch differs by tp, cp and pp alone, and the shares are all there.
    shares: dict[int, set[int]] = {}
    for rank in ranks:
        shares.setdefault(axes.share(rank)[0], set()).add(rank)
    assert sorted(shares) == list(range(axes.shares))
    assert all(together == {*axes.group(min(together), "pp", "cp", "tp")} for together in shares.values())
    assert {axes.window(rank) for rank in ranks} == {(part, axes.cp) for part in range(axes.cp)}
    # A parameter is cut over dp_shard and cp, and averaged over these and the copies.
    assert axes.shards * axes.dp_replicate == axes.averaged == len(axes.group(0, "dp_replicate", "dp_shard", "cp"))
    names = [name for name, _ in axes.mesh]
    assert math.prod(size for _, size in axes.mesh) == axes.world and names == [n for n in NAMES if n in names]
    assert axes.cut and {*axes.cut} <= {"dp_shard", "cp"} and {*axes.cut} <= {*names}


def test_what_a_plan_prints() -> None:
    axes = Parallelism(data_parallel_replicate_degree=2, context_parallel_degree=2, tensor_parallel_degree=2).on(16)
    text = "\n".join(axes.lines())
    assert text.splitlines()[0] == "mesh: dp_replicate 2 x dp_shard 2 x cp 2 x tp 2 = 16 ranks"
    for said in ("dp_replicate 2: ranks 0, 8", "dp_shard 2: ranks 0, 4", "cp 2: ranks 0, 2", "tp 2: ranks 0, 1"):
        assert said in text
    assert "dp_shard_cp 4: both as one axis" in text and "data: 4 shares, each for 4 ranks" in text
    assert "each rank computes one of 2 parts" in text
    assert "data: each rank has a share of its own, of 4" in "\n".join(Parallelism().on(4).lines())
    experts = "\n".join(Parallelism(expert_parallel_degree=2).on(8).lines())
    assert "experts: divided over 2 ranks; gradients are divided by 8" in experts
    plan = Parallelism(tensor_parallel_degree=2, styles={"*.up": "column"})
    assert str(plan) == "data_parallel_shard_degree = -1, tensor_parallel_degree = 2\n*.up: column"


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_torchtitan_s_section_is_read_as_it_is() -> None:
    config = read_config(tomllib.loads(TITAN))
    assert config.parallel == Parallelism(2, "auto", enable_loss_parallel=True, data_parallel_replicate_degree=2)
    assert config.sharding.data_parallel_replicate_degree == 2 and config.degrees(8) == (2, 2)
    assert read_config(to_dict(config)) == config and read_config(tomllib.loads(to_toml(config))) == config


def test_a_value_and_a_section_are_the_same() -> None:
    plan = Parallelism(tensor_parallel_degree=2, data_parallel_replicate_degree=2, styles={"*.up": "column"})
    config = read_config({"parallelism": plan, "precision": "PURE"})
    assert config.parallel == plan == read_config({"precision": "PURE"}).with_parallel(plan).parallel
    assert read_config(config) is config
    with pytest.raises(ConfigError, match="found both; leave one"):
        config.with_parallel(plan)
    with pytest.raises(ConfigError, match="data_parallel_shard_degree = 4: the parallelism beside it has 8"):
        read_config({"dp_shard": 4}).with_parallel(Parallelism(data_parallel_shard_degree=8))


def test_degrees_count_both_axes_that_cut() -> None:
    assert read_config({"tp_size": 2}).degrees(8) == (1, 4)
    assert read_config({"cp_size": 2, "dp_replicate": 2, "reshard_after_forward": 4}).degrees(8) == (2, 4)
    with pytest.raises(ConfigError, match="expected a factor of the 4 ranks that share a copy"):
        read_config({"tp_size": 2, "reshard_after_forward": 8}).degrees(8)


# ---- what is not legal -----------------------------------------------------------------------------------------------

SHAPE = ModelShape(heads=12, kv_heads=6, feed_forward=96, vocabulary=96, sequence=24, experts=6, layers=4)


@pytest.mark.parametrize(
    ("plan", "world", "said"),
    [
        ({"tensor_parallel_degree": 3}, 8, "data_parallel_shard_degree 2 x tensor_parallel_degree 3 are 6 of 8 ranks"),
        ({"data_parallel_shard_degree": 3, "tensor_parallel_degree": 2}, 8, "are 6 of 8 ranks"),
        ({"data_parallel_shard_degree": 8, "tensor_parallel_degree": 2}, 8, "are 16 of 8 ranks"),
        ({"tensor_parallel_degree": 16}, 8, "are 16 of 8 ranks"),
        ({"tensor_parallel_degree": 4}, 8, "tensor_parallel_degree = 4: must divide the key and value heads, 6"),
        ({"tensor_parallel_degree": 8}, 8, "tensor_parallel_degree = 8: must divide the query heads, 12"),
        ({"context_parallel_degree": 5}, 5, "context_parallel_degree = 5: must divide the tokens of a sequence, 24"),
        ({"expert_parallel_degree": 4}, 8, "expert_parallel_degree = 4: must divide the experts, 6"),
        (
            {"expert_parallel_degree": 3},
            8,
            "expert_parallel_degree = 3: must divide the 8 ranks of dp_shard, cp and tp",
        ),
        (
            {"expert_parallel_degree": 8, "tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2},
            8,
            "must divide the 4 ranks of dp_shard and cp",
        ),
        (
            {"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 3},
            8,
            "expert_tensor_parallel_degree = 3: expected 1, or the tensor_parallel_degree of 2",
        ),
        ({"pipeline_parallel_degree": 8}, 8, "pipeline_parallel_degree = 8: expected a layer for each stage, found 4"),
    ],
)
def test_a_plan_that_is_not_legal_is_one_line_with_the_nearest(plan: dict[str, int], world: int, said: str) -> None:
    """And the plan that the line proposes is legal."""
    with pytest.raises(ConfigError) as raised:
        Parallelism(**plan).on(world, SHAPE)
    text = str(raised.value)
    assert said in text and "\n" not in text
    proposed = dict(pair.split(" = ") for pair in text.partition("nearest legal plan: ")[2].split(", "))
    near = Parallelism(**{name: int(degree) for name, degree in proposed.items()})  # type: ignore[arg-type]
    assert near.on(world, SHAPE).world == world


def test_a_vocabulary_or_a_sequence_that_does_not_divide() -> None:
    two = Parallelism(tensor_parallel_degree=2, enable_sequence_parallel=True)
    with pytest.raises(ConfigError, match="must divide the vocabulary, 259"):
        two.on(4, ModelShape(vocabulary=259))
    with pytest.raises(ConfigError, match="must divide the tokens of a part of a sequence, 7; nearest legal plan"):
        two.on(4, ModelShape(sequence=7))
    with pytest.raises(ConfigError, match="no degrees make it legal"):
        Parallelism(context_parallel_degree=2, data_parallel_shard_degree=2, pipeline_parallel_degree=2).on(0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tensor_parallel_degree": 0}, "parallelism.tensor_parallel_degree = 0: expected at least 1"),
        ({"data_parallel_shard_degree": 0}, "expected -1 (all that are left) or at least 1"),
        ({"data_parallel_replicate_degree": -1}, "expected one of the two degrees, found -1 for both"),
        ({"enable_sequence_parallel": True}, "has no effect with tensor_parallel_degree = 1"),
        ({"enable_loss_parallel": True}, "has no effect with tensor_parallel_degree = 1"),
        ({"enable_async_tensor_parallel": True}, "not built: torch fuses these messages"),
        ({"styles": {"up": "column"}}, "have no effect with tensor_parallel_degree = 1"),
        ({"tensor_parallel_degree": 2, "styles": {"up": "columns"}}, 'parallelism.styles["up"] = "columns": expected'),
        ({"tensor_parallel_degree": 2, "styles": {"up": "cut->column->here"}}, "expected one of column, row"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(keys: Any, said: str) -> None:
    """As a value, and as a section of a file."""
    with pytest.raises(ConfigError) as raised:
        Parallelism(**keys)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    if not {"data_parallel_shard_degree", "data_parallel_replicate_degree"} & {*keys}:
        with pytest.raises(ConfigError) as raised:
            read_config({"parallelism": keys})
        assert said in str(raised.value)


def test_a_degree_under_two_names() -> None:
    with pytest.raises(ConfigError, match="expected tensor_parallel_degree once, found it under two names"):
        read_config({"parallelism": {"tensor_parallel_degree": 2, "tp_size": 2}})
    with pytest.raises(ConfigError, match="expected once, found twice"):
        read_config({"parallelism": {"data_parallel_shard_degree": 2}, "sharding": {"data_parallel_shard_degree": 2}})
    with pytest.raises(ConfigError, match="there is no such key; nearest valid: parallelism.tensor_parallel_degree"):
        read_config({"parallelism": {"tensor_parallel_degre": 2}})
    with pytest.raises(ConfigError, match="expected a table of names of modules"):
        read_config({"parallelism": {"tensor_parallel_degree": 2, "styles": "column"}})


# ---- styles ----------------------------------------------------------------------------------------------------------


def test_a_style_is_what_its_text_says() -> None:
    for kind, (before, after) in KINDS.items():
        assert Style.read(kind) == Style(kind, before, after) and str(Style(kind, before, after)) == kind
        for into in LAYOUTS:
            for out in LAYOUTS:
                style = Style(kind, into, out)
                assert Style.read(str(style)) == style


def test_hugging_face_s_words() -> None:
    assert of_hugging_face({"a.q": "colwise", "a.o": "rowwise", "head": "colwise_gather_output"}) == {
        "a.q": "column",
        "a.o": "row",
        "head": "column->whole",
    }
    # What feeds a layer that stays whole, or is fed by it, stays whole too.
    mixed = {"mlp.experts.gate_up": "packed_colwise", "mlp.experts.down": "rowwise", "mlp.experts": "moe_tp_experts"}
    assert {*of_hugging_face(mixed | {"mlp.gate": "colwise"}).values()} == {"keep"}


def test_patterns_mean_parts_of_names() -> None:
    names = ["embed", "layers.0", "layers.0.up", "layers.1.up", "layers.1.up.inner"]
    found, unmatched = expanded({"layers.*.up": "column", "layers.1.up": "row", "head": "column"}, names)
    assert {name: str(style) for name, style in found.items()} == {"layers.0.up": "column", "layers.1.up": "row"}
    assert unmatched == ["head"]


def test_messages_of_a_block() -> None:
    """One norm, two columns that share an input, and a row: with and without parts of sequences."""
    widths = {"norm": (8, 8), "mlp": (8, 8), "mlp.gate": (8, 20), "mlp.up": (8, 20), "mlp.down": (20, 8)}
    whole = {"mlp": "input", "mlp.gate": "column", "mlp.up": "column", "mlp.down": "row"}
    parts = {**whole, "norm": "sequence", "mlp": "sequence->input", "mlp.down": "row->sequence"}

    def counted(styles: dict[str, str]) -> dict[str, tuple[int, int]]:
        read = {name: Style.read(style) for name, style in styles.items()}
        return {m.operation: (m.count, m.nbytes) for m in messages_of(read, widths, tokens=10, itemsize=4)}

    assert counted(whole) == {"all_reduce": (2, 2 * 10 * 8 * 4)}
    assert counted(parts) == {"all_gather": (2, 640), "reduce_scatter": (2, 640)}
    del whole["mlp"]  # then each of the two columns sums the gradient of the input
    assert counted(whole) == {"all_reduce": (3, 3 * 10 * 8 * 4)}
