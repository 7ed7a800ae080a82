"""The row of padding that torch's own initialiser zeroes: right after the documented recipes, or an error with a cure.

And every module of torch.nn after these recipes, held against what plain initialisation makes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard import fully_shard
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

ROWS, COLUMNS = 8, 4


class Reads(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.last = table, nn.Linear(COLUMNS, COLUMNS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.last(self.table(tokens))
        return out


def on_meta(padding: int | None, kind: Any = nn.Embedding, **options: Any) -> Any:
    with torch.device("meta"):
        model = Reads(kind(ROWS, COLUMNS, padding_idx=padding))
    fully_shard(model.table, **options)
    return fully_shard(model, **options)


def reset(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def forward(model: Any) -> Tensor:
    out: Tensor = model(torch.arange(ROWS).view(2, ROWS // 2))
    return out


def row_of(model: Any, padding: int) -> Tensor:
    whole: Tensor = model.table.weight.full_tensor()[padding]
    return whole


NAMES_IT = r"table\.weight.*row {} .*fullshard\.materialize.*mark_initialized"
# DTensor draws on a CPU mesh, some ranks of which have no rows; torch's Transformer explains its own defaults.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*DTensor:UserWarning",
    "ignore:.*random.*:UserWarning",
    "ignore:Initializing zero-element tensors:UserWarning",
    "ignore:enable_nested_tensor is True:UserWarning",
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("padding", [0, 5, -1])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_documented_recipe_is_an_error_with_the_cure(world: int, padding: int, kind: Any) -> None:
    """The row is on the first rank, on one in between, on the last one."""

    def rank_fn(rank: int) -> None:
        model = on_meta(padding, kind)
        reset(model)
        with pytest.raises(RuntimeError, match=NAMES_IT.format(padding % ROWS)):
            forward(model)

    run_ranks(world, rank_fn)


@pytest.mark.parametrize("padding", [0, 5, -1])
def test_materialize_makes_the_row_right(padding: int) -> None:
    def rank_fn(rank: int) -> None:
        model = on_meta(padding)
        fullshard.materialize(model, seed=0)
        forward(model)
        assert not row_of(model, padding).any()
        assert row_of(model, (padding + 1) % ROWS).all()

    run_ranks(2, rank_fn)


def as_transformers_does(model: nn.Module) -> None:
    """`model.apply(model._init_weights)`, in the words of its models."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    model.to_empty(device="cpu")
    model.apply(init)


class Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2.0


class Positions(nn.Embedding):
    """Its own initialiser, with the row zeroed by a function of torch.nn.init."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        with torch.no_grad():
            nn.init.zeros_(self.weight[self.padding_idx])


def frozen(*args: Any, **options: Any) -> nn.Module:
    return nn.Embedding(*args, **options).requires_grad_(False)


@pytest.mark.sample(5)
@pytest.mark.parametrize("init", [reset, as_transformers_does])
@pytest.mark.parametrize(
    "kind",
    [Scaled, Positions, frozen, functools.partial(nn.Embedding, dtype=torch.bfloat16),
     functools.partial(nn.Embedding, max_norm=1.0)],
    ids=["a subclass", "its own reset", "frozen", "bfloat16", "max_norm"],
)  # fmt: skip
def test_other_tables_and_initialisers_are_errors_too(kind: Any, init: Any) -> None:
    """In an evaluation, too."""

    def rank_fn(rank: int) -> None:
        model = on_meta(5, kind)
        init(model)
        with pytest.raises(RuntimeError, match=NAMES_IT.format(5)), torch.no_grad():
            forward(model)

    run_ranks(2, rank_fn)


def test_a_row_across_ranks_is_right() -> None:
    """Sharded by columns, the indexing makes a view."""

    def rank_fn(rank: int) -> None:
        model = on_meta(3, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
        reset(model)
        forward(model)
        assert not row_of(model, 3).any()
        assert row_of(model, 4).all()

    run_ranks(2, rank_fn)


def test_a_row_across_ranks_that_is_wrong_is_found() -> None:
    def rank_fn(rank: int) -> None:
        model = on_meta(3, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
        reset(model)
        if rank == 1:
            model.table.weight.detach().to_local()[3, 1] = 1.0
        with pytest.raises(RuntimeError, match=NAMES_IT.format(3)):
            forward(model)

    run_ranks(2, rank_fn)


def test_attention_that_has_its_reset_under_a_private_name_is_named() -> None:
    def rank_fn(rank: int) -> None:
        with torch.device("meta"):
            model = fully_shard(nn.MultiheadAttention(8, 2))
        reset(model)
        x = torch.zeros(3, 1, 8)
        with pytest.raises(RuntimeError, match=r"in_proj_weight, in_proj_bias; .*fullshard\.materialize"):
            model(x, x, x)

    run_ranks(2, rank_fn)


def test_a_transformer_over_several_units_is_refused_by_name() -> None:
    """Its reset reaches into all of them."""

    def rank_fn(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Transformer(8, 2, 1, 1, 16)
        fully_shard(model.encoder.layers[0])
        fully_shard(model)
        with pytest.raises(ValueError, match=r"the model \(FSDPTransformer\), whose _reset_parameters reaches into 1"):
            fullshard.materialize(model, seed=0)

    run_ranks(2, rank_fn)


def test_more_ranks_than_rows() -> None:
    def rank_fn(rank: int) -> None:
        with torch.device("meta"):
            model = Reads(nn.Embedding(2, COLUMNS, padding_idx=1))
        fully_shard(model)
        reset(model)
        with pytest.raises(RuntimeError, match=NAMES_IT.format(1)):
            model(torch.zeros(2, dtype=torch.long))

    run_ranks(4, rank_fn)


def zeroed(model: Any) -> None:
    """The cure for a reset that has to stay: rows of the local shard."""
    mask = torch.zeros(ROWS, 1).index_fill(0, torch.tensor([5]), 1)
    whole = model.table.weight.full_tensor().detach()
    state = {**{name: p for name, p in model.state_dict().items()}, "table.weight": whole * (1 - mask)}
    model.load_state_dict(state)


@pytest.mark.parametrize(
    "what",
    [
        lambda model: model.table.weight.detach().to_local().zero_(),
        zeroed,
        lambda model: fullshard.mark_initialized(model),
        lambda model: model.load_state_dict({name: torch.ones(p.shape) for name, p in model.state_dict().items()}),
        lambda model: model.load_state_dict(model.state_dict()),
    ],
    ids=["zero", "a load with a zero row", "marked", "a load with another row", "a load of shards"],
)
def test_what_is_right_or_meant_is_no_error(what: Callable[[Any], object]) -> None:
    """A checkpoint's row may be anything: BERT's is not zero."""

    def rank_fn(rank: int) -> None:
        model = on_meta(5)
        reset(model)
        what(model)
        forward(model)

    run_ranks(2, rank_fn)


def test_a_table_without_padding_or_with_values_is_not_looked_at() -> None:
    def rank_fn(rank: int) -> None:
        model = on_meta(None)
        reset(model)
        forward(model)
        with_values: Any = seeded(lambda: Reads(nn.Embedding(ROWS, COLUMNS, padding_idx=5)))
        with torch.no_grad():
            with_values.table.weight[5] = 1.0  # the user's own
        fully_shard(with_values)
        forward(with_values)

    run_ranks(2, rank_fn)


@pytest.mark.parametrize("fill", [lambda model: reset(model.last), fullshard.materialize])
def test_a_table_with_values_beside_a_unit_that_was_emptied_is_not_looked_at(fill: Callable[[Any], object]) -> None:
    def rank_fn(rank: int) -> None:
        model: Any = Reads(nn.Embedding(ROWS, COLUMNS, padding_idx=5))
        with torch.no_grad():
            model.table.weight.fill_(1.0)
        with torch.device("meta"):
            model.last = nn.Linear(COLUMNS, COLUMNS)
        for module in (model.table, model.last, model):
            fully_shard(module)
        fill(model)
        forward(model)
        assert row_of(model, 5).all()

    run_ranks(2, rank_fn)


def test_what_was_loaded_before_memory_was_emptied_again_is_no_load() -> None:
    def rank_fn(rank: int) -> None:
        model = on_meta(5)
        model.to_empty(device="cpu")
        model.load_state_dict({name: torch.ones(p.shape) for name, p in model.state_dict().items()})
        forward(model)
        reset(model)
        with pytest.raises(RuntimeError, match=NAMES_IT.format(5)):
            forward(model)

    run_ranks(2, rank_fn)


def test_a_tied_head_is_one_table() -> None:
    def rank_fn(rank: int) -> None:
        with torch.device("meta"):
            model = Reads(nn.Embedding(COLUMNS, COLUMNS, padding_idx=2))
            model.last = nn.Linear(COLUMNS, COLUMNS, bias=False)
            model.last.weight = model.table.weight
        fully_shard(model)
        model.to_empty(device="cpu")
        model.table.reset_parameters()
        with pytest.raises(RuntimeError, match=r"weight.*row 2 "):
            model(torch.zeros(2, dtype=torch.long))

    run_ranks(2, rank_fn)


# ---- all of torch.nn -------------------------------------------------------------------------------------------------

# How to build those that take arguments. The rest has no parameters, or is abstract.
SIZES: dict[str, tuple[Any, ...]] = {
    "Linear": (6, 5), "Bilinear": (3, 4, 5), "Embedding": (7, 4), "EmbeddingBag": (7, 4),
    "Conv1d": (2, 4, 3), "Conv2d": (2, 4, 3), "Conv3d": (2, 4, 3),
    "ConvTranspose1d": (2, 4, 3), "ConvTranspose2d": (2, 4, 3), "ConvTranspose3d": (2, 4, 3),
    "BatchNorm1d": (6,), "BatchNorm2d": (6,), "BatchNorm3d": (6,), "SyncBatchNorm": (6,),
    "GroupNorm": (2, 6), "LayerNorm": (6,), "RMSNorm": (6,), "PReLU": (6,),
    "RNN": (4, 5), "LSTM": (4, 5), "GRU": (4, 5), "RNNCell": (4, 5), "LSTMCell": (4, 5), "GRUCell": (4, 5),
    "MultiheadAttention": (8, 2), "TransformerEncoderLayer": (8, 2), "TransformerDecoderLayer": (8, 2),
    "Transformer": (8, 2, 1, 1, 16), "AdaptiveLogSoftmaxWithLoss": (8, 10, [4, 7]),
}  # fmt: skip
# They have statistics alone, or are bases of others.
OTHERS = {"InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "RNNBase", "RNNCellBase"}
MADE_OF_OTHERS = {"TransformerEncoderLayer", "TransformerDecoderLayer"}
# Bounds on what DTensor and one process draw: the same distribution, another stream.
# The standard deviation of n draws is off by more than 5 / sqrt(2 n) of itself once in two million cases, for a normal
# distribution; a uniform one varies less.
SIGMAS = 5.0


def test_all_modules_of_torch_are_listed() -> None:
    hooks = ("reset_parameters", "_reset_parameters")
    with_parameters = {
        name
        for name, kind in vars(nn).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and any(hasattr(kind, hook) for hook in hooks)
    }
    with_parameters = {name for name in with_parameters if not name.startswith("Lazy") and name not in OTHERS}
    assert with_parameters == {name for name in SIZES if hasattr(nn, name)} - MADE_OF_OTHERS


@pytest.mark.sample(8)
@pytest.mark.parametrize("way", ["reset", "materialize"])
@pytest.mark.parametrize("name", SIZES)
def test_each_module_of_torch_begins_as_in_one_process(name: str, way: str) -> None:
    """Constants are equal, and what is drawn has the distribution that one process draws."""
    plain = seeded(lambda: getattr(nn, name)(*SIZES[name]))
    if not any(callable(getattr(module, "reset_parameters", None)) for module in plain.modules()) and way == "reset":
        way = "materialize"
    many = [dict(seeded(lambda: getattr(nn, name)(*SIZES[name]), seed).named_parameters()) for seed in range(20)]

    def rank_fn(rank: int) -> None:
        with torch.device("meta"):
            model = getattr(nn, name)(*SIZES[name])
        fully_shard(model)
        if way == "reset":
            model.to_empty(device="cpu")
            for module in reversed(list(model.modules())):  # children first, as `apply` does
                for hook in ("reset_parameters", "_reset_parameters"):
                    if callable(getattr(module, hook, None)):
                        getattr(module, hook)()
        else:
            fullshard.materialize(model, seed=0)
        for key, parameter in model.named_parameters():
            value = parameter.full_tensor().detach()
            draws = torch.stack([one[key].detach() for one in many])
            if (draws == draws[0]).all():
                assert torch.equal(value, draws[0]), key
            else:
                spread = draws.std().item()
                off = abs(value.std().item() - spread) / spread if value.numel() > 1 else 0.0
                assert off < SIGMAS / math.sqrt(2 * value.numel()) + SIGMAS / math.sqrt(2 * draws.numel()), key
                assert value.unique().numel() > value.numel() // 2, key
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(plain.named_buffers())[key]), key

    run_ranks(2, rank_fn)
