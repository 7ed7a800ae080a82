"""`prepare_fully_shard(parallelism=)`: one declaration of all axes equals one process; wrong relations are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import Prepared, prepare_fully_shard
from fullshard.migrate import ConfigError
from fullshard.migrate.parallelism import Parallelism
from tests.harness import installed
from tests.harness.axes import STEPS, assert_not_legal, batch, check, hugging_face, llama, loss, train
from tests.harness.models import adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

Make = Callable[[], nn.Module]
TWO = {"tensor_parallel_degree": 2}
WITHOUT_ENDS = {"wrap": {"group_ends": False}}


# ---- pairs and triples of axes ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sequence", "tied"),
    [
        pytest.param(True, False, id="sp"),
        pytest.param(False, True, id="tp-tied"),
        pytest.param(False, False, id="tp", marks=pytest.mark.slow),
        pytest.param(True, True, id="sp-tied", marks=pytest.mark.slow),
    ],
)
def test_tp_and_sharding(sequence: bool, tied: bool) -> None:
    """TP x FSDP and TP x SP x FSDP, with recomputation; a tied embedding stays whole."""
    plan = Parallelism(2, sequence)
    config = {"activation_checkpointing": "units"} | (WITHOUT_ENDS if tied else {})
    printed = "\n".join(check(4, partial(llama, tied=tied), plan, config))
    assert "mesh: dp_shard 2 x tp 2 = 4 ranks" in printed and "column: layers.*.attention.wq" in printed
    assert ("sequence: layers.*.attention_norm" in printed) == sequence
    assert ("embedding" in printed.partition("layers:")[2]) == (not tied)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (8, {"data_parallel_replicate_degree": 2, **TWO}),
        (8, {"data_parallel_replicate_degree": 2, **TWO, "enable_sequence_parallel": False}),
        (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1, **TWO}),
        (2, TWO),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value.values())),
)
def test_other_axes(world: int, plan: dict[str, Any]) -> None:
    """HSDP x TP, and TP without data parallelism; `cp` is in test_prepare_context.py."""
    check(world, llama, plan)


@pytest.mark.threads_only(reason="eight processes for a look at a mesh")
def test_hsdp_and_tp_keep_their_names() -> None:
    """The mesh of eight ranks, and what `fully_shard` gets of it, without a step."""

    def rank_main(rank: int) -> tuple[list[str], list[Any], tuple[int, int]]:
        plan = Parallelism(2, data_parallel_replicate_degree=2)
        prepared = prepare_fully_shard(llama(), parallelism=plan, show=False)
        weight = prepared.model.get_parameter("layers.0.attention.wq.weight")
        assert isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        return list(prepared.whole.mesh_dim_names or ()), prepared.mesh.mesh.tolist(), prepared.share

    for rank, (names, mesh, share) in enumerate(run_ranks(8, rank_main)):
        assert names == ["dp_replicate", "dp_shard", "tp"]
        assert mesh == [[rank % 2, 2 + rank % 2], [4 + rank % 2, 6 + rank % 2]] and share == (rank // 2, 4)


# ---- what is said in any order ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", [pytest.param("cpu", marks=pytest.mark.slow), "mixed", "meta"])
def test_values_come_from_anywhere(source: str) -> None:
    """Of rank 0, of rank 0 with the others on the meta device, and of initialisers."""

    def make(rank: int) -> nn.Module:
        model = llama(tied=False)
        if rank and source == "cpu":
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
        if source == "meta" or (source == "mixed" and rank):
            model = model.to_empty(device="meta")
        return model

    def init(module: nn.Module) -> None:
        if not any(module.children()) and next(module.parameters(recurse=False), None) is not None:
            nn.init.constant_(next(module.parameters(recurse=False)), 0.01)
        if hasattr(module, "init_rope"):
            module.init_rope()

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        model = make(rank)
        optimizer = adamw(model.parameters(), watched=False)
        config = {"initialisation": {"source": source}}
        options: dict[str, Any] = {"init": init} if source == "meta" else {}
        prepared = prepare_fully_shard(model, optimizer, config, parallelism=TWO, show=False, **options)
        found = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        if source != "meta":
            train(model, optimizer, prepared, [0])
            assert len(optimizer.state) == len(found)
        return found

    expected = {name: p.detach() for name, p in llama(tied=False).named_parameters()}
    for found in run_ranks(4, rank_main):
        for name, value in expected.items():
            assert torch.equal(found[name], torch.full_like(value, 0.01) if source == "meta" else value), name


@pytest.mark.slow
def test_an_optimizer_with_state_and_a_frozen_norm() -> None:
    """Momenta from a step before are cut with the parameters; what is frozen stays so."""

    def make() -> nn.Module:
        model = llama()
        model.layers[0].attention_norm.requires_grad_(False)
        return model

    def first(model: nn.Module, optimizer: Any) -> None:
        for share in range(2):
            (loss(model, batch(9, share)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank_main(rank: int) -> Any:
        model = make()
        optimizer = adamw((p for p in model.parameters() if p.requires_grad), watched=False)
        first(model, optimizer)
        prepared = prepare_fully_shard(model, optimizer, parallelism=TWO, show=False)
        train(model, optimizer, prepared)
        assert not model.get_parameter("layers.0.attention_norm.weight").requires_grad
        return collect(model, optimizer)

    model = make()
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    first(model, optimizer)
    for step in range(STEPS):
        for share in range(2):
            (loss(model, batch(step, share)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(model, optimizer)
    for found in run_ranks(4, rank_main):
        assert_same_training(found, expected)


class Plain(nn.Module):
    """Two blocks of a user, with no styles of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)
        )
        self.head = nn.Linear(12, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


STYLES = {"layers.*.1": "column", "layers.*.3": "row"}


def test_styles_of_the_user() -> None:
    """Of a model that has none itself; parameters that are ignored stay, also where their layer is divided."""
    make = partial(seeded, Plain)
    printed = check(4, make, Parallelism(2, styles={**STYLES, "head": "column->whole", "embedding": "row"}))
    for line in ("  column->whole: head", "  column: layers.*.1", "  row: embedding, layers.*.3"):
        assert line in printed

    def rank_main(rank: int) -> None:
        model = make()
        config = {"wrap": {"ignored": ["layers.0.3.bias"]}}
        prepare_fully_shard(model, None, config, parallelism=Parallelism(2, styles=STYLES), show=False)
        bias = model.get_parameter("layers.0.3.bias")
        assert isinstance(bias, DTensor) and bias.device_mesh.mesh_dim_names == ("tp",)

    run_ranks(4, rank_main)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # transformers' own, on import
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "sizes", "kept"),
    [
        ("Llama", {}, "column->whole: lm_head"),
        ("Llama", {"tie_word_embeddings": True}, "column->whole: lm_head"),
        ("Qwen3", {}, "heads: model.layers.*.self_attn.q_norm"),
        ("Phi3", {"head_dim": None}, "whole->row: model.layers.*.self_attn.o_proj"),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, "row: model"),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "row: model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_hugging_face_s_own_plan(kind: str, sizes: dict[str, Any], kept: str) -> None:
    """Its words become styles; layers that torch cannot divide, such as fused experts, stay whole."""
    installed.needs("transformers")
    sizes = {key: value for key, value in sizes.items() if value is not None}
    config = WITHOUT_ENDS if "tie_word_embeddings" in sizes else None
    printed = "\n".join(check(4, partial(hugging_face, kind, **sizes), TWO, config))
    assert kept in printed and "experts" not in printed.partition("layers:")[2]


# ---- what is refused -------------------------------------------------------------------------------------------------


def two_heads() -> nn.Module:
    model = seeded(Plain)
    model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (partial(llama, heads=2, kv_heads=1), TWO, "must divide the key and value heads, 1; nearest legal plan: data_"),
        (partial(llama, vocab=33), TWO, "must divide the vocabulary, 33"),
        (llama, {"tensor_parallel_degree": 3}, "are 3 of 4 ranks; nearest legal plan"),
        (Plain, TWO, "expected a layer to divide in Plain, found none; give styles"),
        (Plain, {**TWO, "styles": {"layer.*": "column"}}, "expected names of modules of Plain, found none that match"),
        (
            Plain,
            {**TWO, "styles": {"layers.*.0": "column"}},
            "expected an nn.Linear or nn.Embedding, found a LayerNorm",
        ),
        (Plain, {**TWO, "enable_sequence_parallel": True, "styles": STYLES}, "expected styles with parts of sequences"),
        (two_heads, {**TWO, "styles": {"embedding": "column->whole", "head": "column->whole"}}, "expected one way to"),
        (partial(llama, tied=True), {**TWO, "enable_loss_parallel": True}, "a tied one stays whole"),
        (llama, {"pipeline_parallel_degree": 4}, "expected a layer for each stage, found 2 layers; nearest legal plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.threads_only(reason="errors before anything is sent")
def test_what_is_not_legal_changes_nothing(make: Make, plan: Any, said: str) -> None:
    assert_not_legal(make, plan, said)


@pytest.mark.threads_only(reason="a sharded model does not pickle")
def test_a_vocabulary_of_any_size_where_it_is_not_divided() -> None:
    """33 tokens, and a tied embedding, which stays whole."""
    make = partial(llama, tied=True, vocab=33)
    for prepared in run_ranks(
        2, lambda rank: prepare_fully_shard(make(), None, WITHOUT_ENDS, parallelism=TWO, show=False)
    ):
        assert "embedding" not in prepared.division.styles


# ---- relations between axes: the number that is wrong without the plan, then the error with it -----------------------


def by_hand(rank: int, share: Callable[[int], int]) -> list[float]:
    """The same division without a plan, on data that each rank chooses."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = seeded(Plain)
    parallelize_module(model, mesh["tp"], {"layers.*.1": ColwiseParallel(), "layers.*.3": RowwiseParallel()})
    for layer in model.layers:  # type: ignore[union-attr]
        fullshard.fully_shard(layer, mesh=mesh["dp_shard"])
    fullshard.fully_shard(model, mesh=mesh["dp_shard"])
    loss(model, batch(0, share(rank))).backward()
    return [float(p.grad.full_tensor().norm()) for p in model.parameters()]  # type: ignore[union-attr]


def plain_norms(shares: int) -> list[float]:
    model = seeded(Plain)
    for share in range(shares):
        (loss(model, batch(0, share)) / shares).backward()
    return [float(p.grad.norm()) for p in model.parameters()]  # type: ignore[union-attr]


def worst(found: list[float], expected: list[float]) -> float:
    return max(abs(mine - its) / its for mine, its in zip(found, expected, strict=True))


def test_ranks_of_tp_that_get_different_data() -> None:
    """By hand the numbers are wrong and nothing says so; the plan raises on every rank before anything is computed."""
    right = run_ranks(4, by_hand, lambda rank: rank // 2)[0]
    assert worst(right, plain_norms(2)) < 1e-5
    wrong = run_ranks(4, by_hand, lambda rank: rank)[0]
    assert worst(wrong, plain_norms(4)) > 1e-2

    def rank_main(rank: int) -> None:
        model = seeded(Plain)
        prepare_fully_shard(model, parallelism=Parallelism(2, styles=STYLES), show=False)
        pair = "0, 1" if rank < 2 else "2, 3"
        with pytest.raises(RuntimeError, match=f"^tp: expected the ranks {pair} to give the model the same inputs"):
            loss(model, batch(0, rank))
        loss(model, batch(0, rank // 2)).backward()
        loss(model, batch(0, rank // 2 + 2)).backward()
        with torch.no_grad():  # not a training
            model(batch(0, rank // 2)[:, :-1])

    run_ranks(4, rank_main)


@pytest.mark.threads_only(reason="warnings of one process")
def test_equal_data_along_the_data_parallel_axes_is_a_warning() -> None:
    def rank_main(rank: int) -> None:
        model = seeded(Plain)
        prepare_fully_shard(model, parallelism=Parallelism(2, styles=STYLES), show=False)
        for step in range(3):
            loss(model, batch(step, 0 if step < equal else rank // 2)).backward()

    equal = 1  # a first batch may be the same
    run_ranks(4, rank_main)
    equal = 3
    with pytest.warns(UserWarning, match="dp_shard: expected the 2 shares of a batch to differ") as caught:
        run_ranks(4, rank_main)
    assert len([one for one in caught if "shares of a batch" in str(one.message)]) == 4  # once on each rank


def over(rank: int, names: tuple[str, ...], fold: bool = False) -> tuple[list[float], int]:
    """Sharded by hand over axes of a mesh (dp_shard, cp); each rank has data of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    own = mesh[names]._flatten("dp_shard_cp") if fold else mesh[names]
    model = fullshard.fully_shard(seeded(Plain), mesh=own)
    loss(model, batch(0, rank)).backward()
    norms = [float(p.grad.full_tensor().norm()) for p in model.parameters()]  # type: ignore[union-attr]
    return norms, sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")
def test_cp_left_out_of_the_mesh_and_cp_that_is_not_folded() -> None:
    """Left out, gradients are not averaged over it. Not folded, the numbers are right, in twice the memory."""
    right, folded = run_ranks(4, over, ("dp_shard", "cp"), True)[0]
    assert worst(right, plain_norms(4)) < 1e-5
    wrong, _ = run_ranks(4, over, ("dp_shard",))[0]
    assert worst(wrong, plain_norms(4)) > 1e-2
    assert folded < sum(p.numel() for p in seeded(Plain).parameters()) / 3

    def unfolded(rank: int) -> None:
        """By hand it would be HSDP, with the right numbers in twice the memory."""
        with pytest.raises(ValueError, match="expected dp_shard and cp folded into one axis, .* in 2 times the memory"):
            over(rank, ("dp_shard", "cp"))

    run_ranks(4, unfolded)

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        plan = {"context_parallel_degree": 2}
        prepare: Callable[..., Prepared] = partial(prepare_fully_shard, parallelism=plan, show=False)
        with pytest.raises(ConfigError, match="expected the axis cp in it, over which gradients are averaged"):
            prepare(seeded(Plain), mesh=mesh["dp_shard"])
        with pytest.raises(ConfigError, match="expected dp_shard and cp folded into one axis, .* 2 times the memory"):
            prepare(seeded(Plain), mesh=mesh["dp_shard", "cp"])
        with pytest.raises(ConfigError, match="expected it to be of a mesh with the axis cp of 2 ranks"):
            prepare(seeded(Plain), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)))
        made = prepare(seeded(Plain), mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
        assert made.mesh.mesh.tolist() == [0, 1, 2, 3] and made.share == (rank // 2, 2)

    run_ranks(4, rank_main)


@pytest.mark.threads_only(reason="warnings of one process")
def test_a_mesh_whose_first_axis_is_named_as_one_that_shards() -> None:
    """Without a plan it is a warning: torch trains it, as HSDP."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "other"))
        fullshard.fully_shard(nn.Linear(2, 2), mesh=mesh)

    with pytest.warns(UserWarning, match="mesh: expected a first axis with copies, found 'dp_shard'"):
        run_ranks(2, rank_main)


def test_sequences_that_do_not_divide() -> None:
    def rank_main(rank: int) -> None:
        model = llama()
        prepare_fully_shard(model, parallelism=TWO, show=False)
        with pytest.raises(ValueError, match="tp: expected sequences that its 2 ranks divide .* found 7 tokens; .* 6"):
            model(torch.zeros(2, 7, dtype=torch.int64))

    run_ranks(4, rank_main)
