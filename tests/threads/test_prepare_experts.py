"""Experts that a plan divides over ranks equal one process; what is not legal, or wrong between ranks, is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import Parallelism, prepare_fully_shard
from fullshard.extras.experts import Experts, in_one_kernel, products
from fullshard.migrate import ConfigError
from tests.harness import installed, moe, sequences
from tests.harness.axes import MAX_NORM, STEPS, assert_norms, assert_not_legal, batch, check, hugging_face, llama
from tests.harness.axes import loss as loss_of_llama
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

Make = Callable[[], nn.Module]
EP = {"expert_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}
# Rows of experts, too.
CUT = {**EP, **TP, "expert_tensor_parallel_degree": 2}
of_experts = partial(llama, experts=4, experts_per_token=2)


# ---- pairs and triples of axes ---------------------------------------------------------------------------------------


# Each rank along tp has all tokens, and sends its part of them.
WHOLE = {**EP, **TP, "enable_sequence_parallel": False}
SLOW = [
    (4, {**EP, "data_parallel_replicate_degree": 2}),
    (4, {**EP, **TP, "expert_tensor_parallel_degree": 2}),
    (2, EP),
    (4, {"expert_parallel_degree": 4}),
    (4, {"expert_parallel_degree": 4, **TP}),
    (4, TP),
    (4, {**TP, "enable_sequence_parallel": False}),
    (4, {**EP, **TP, "expert_tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    (4, {**TP, "expert_tensor_parallel_degree": 2}),
    (8, {**EP, **TP, "data_parallel_replicate_degree": 2}),
    (8, {**EP, **TP, "expert_tensor_parallel_degree": 2}),
]


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("world", "plan"),
    [(4, EP), (4, {**EP, **TP}), (4, WHOLE), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(f"{k[:9]}{v}" for k, v in value.items()),
)
def test_experts_beside_other_axes(world: int, plan: dict[str, Any]) -> None:
    """EP x FSDP, HSDP x EP, EP x TP with experts whole and cut, with recomputation."""
    printed = "\n".join(check(world, of_experts, plan, {"activation_checkpointing": "units"}))
    axes = Parallelism(**plan).on(world)
    assert (f"experts: divided over {axes.ep} ranks" in printed) == (axes.ep > 1)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("degree", [2, 4])
def test_experts_beside_context_parallelism(degree: int) -> None:
    """Each rank sends the tokens of its part of the sequences; `ep` goes over ranks of `cp` too."""
    plan = {"expert_parallel_degree": degree, "context_parallel_degree": 2}
    printed = "\n".join(sequences.check(4, of_experts, plan))
    assert f"experts: divided over {degree} ranks" in printed


@pytest.mark.parametrize(
    ("experts", "placements"),
    [(4, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"), (2, "(Shard(dim=1), Shard(dim=0))")],
    ids=["whole experts", "rows of experts"],
)
@pytest.mark.threads_only(reason="a look at placements")
def test_what_each_rank_has(experts: int, placements: str) -> None:
    """Whole experts where their number allows it, else rows of each; everything else over all ranks."""

    def rank_main(rank: int) -> None:
        model = llama(experts=experts)
        prepare_fully_shard(model, parallelism=EP, show=False)
        gate = model.get_parameter("layers.0.ffn.experts.gate")
        assert isinstance(gate, DTensor) and gate.shape == (experts, 24, 16) and str(gate.placements) == placements
        assert gate.device_mesh.mesh_dim_names == ("efsdp", "ep") and gate.to_local().numel() == experts * 24 * 16 // 4
        router = model.get_parameter("layers.0.ffn.router.weight")
        assert isinstance(router, DTensor) and router.device_mesh.mesh_dim_names == ("dp_shard",)

    run_ranks(4, rank_main)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("starved", [False, True], ids=["all experts", "two experts"])
@pytest.mark.parametrize(
    "accumulate", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "accumulated"]
)
def test_uneven_tokens_and_experts_without_any(starved: bool, accumulate: bool) -> None:
    """Ranks have 5, 1, 0 and 9 tokens; experts without tokens have gradients of zeros, and ranks without tokens or
    with such experts alone send their messages. `accumulated`: two backwards for each step, reduced once."""
    make = partial(moe.tiny, starved=starved, balance=0.0 if starved else 0.1)
    shares = len(moe.LENGTHS)

    def rank_main(rank: int) -> tuple[Trained, list[float]]:
        model = make()
        optimizer = adamw(model.parameters(), watched=False)
        prepared = prepare_fully_shard(model, optimizer, parallelism=EP, show=False)
        norms = []
        for step in range(STEPS):
            for part in range(1 + accumulate):
                model.set_requires_gradient_sync(part == accumulate)  # type: ignore[operator]
                (moe.loss(model, step + 10 * part, prepared.share[0]) / (1 + accumulate)).backward()
            for layer in model.layers:
                for p in layer.moe.experts.parameters():  # type: ignore[union-attr]
                    assert isinstance(p.grad, DTensor)
                    whole = p.grad.full_tensor()
                    assert bool(whole[2:].any()) is not starved and bool(whole[:2].any())
            norms.append(float(fullshard.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
        return collect(model, optimizer), norms

    model = make()
    optimizer = adamw(model.parameters())
    norms = []
    for step in range(STEPS):
        parts = [(step + 10 * part, share) for part in range(1 + accumulate) for share in range(shares)]
        losses = [partial(moe.loss, step=at, share=share) for at, share in parts]
        norms.append(moe.step_plainly(model, optimizer, losses))
    expected = collect(model, optimizer)
    for trained, found in run_ranks(shares, rank_main):
        assert_same_training(trained, expected)
        assert_norms(found, norms)


def test_messages_are_those_that_the_page_counts() -> None:
    """docs/how-to/expert-parallelism.md, Messages."""

    def rank_main(rank: int) -> dict[str, tuple[int, int]]:
        model = moe.tiny()
        prepare_fully_shard(model, parallelism=EP, show=False)
        loss = moe.loss(model, 0, rank)
        line = model.layers[0].moe.experts.line  # type: ignore[union-attr]
        assert line is not None and line.sent["tokens"].messages == 2
        loss.backward()
        return {kind: tuple(sent) for kind, sent in line.sent.items()}  # type: ignore[misc]

    chosen: list[list[int]] = []
    model = moe.tiny()
    for share in range(2):
        model.layers[0].moe.experts.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda module, args: chosen.append(args[1].flatten().tolist())
        )
        moe.loss(model, 0, share)
    # Experts 0 and 1 are on rank 0. Each row that leaves comes back, and both ways again in backward.
    leaving = [sum((e >= 2) is not (rank == 1) for e in chosen[rank]) for rank in range(2)]
    for found in run_ranks(2, rank_main):
        assert found["counts"] == (1, 8 * (2 + 1)) and found["tokens"] == (4, 2 * sum(leaving) * moe.DIM * 4)
    assert sum(leaving) > 0


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["sp", "tp"])
def test_balance_losses_are_those_of_whole_sequences(sequence: bool) -> None:
    """Also where each rank along tp has a part of the tokens; and the gradients are those of one process."""
    make = partial(llama, experts=4, balance_loss=1)
    plan = {**EP, **TP, "enable_sequence_parallel": sequence}

    def rank_main(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        model = make()
        prepared = prepare_fully_shard(model, None, {"activation_checkpointing": "units"}, parallelism=plan, show=False)
        main = loss_of_llama(model, batch(0, prepared.share[0]))
        balance = fullshard.balance_loss(model)
        assert isinstance(balance, torch.Tensor) and fullshard.balance_loss(model) == 0.0
        (main + balance).backward()
        assert fullshard.balance_loss(model) == 0.0  # recomputation gives none
        return balance.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]

    model = make()
    total = 0.0
    for share in range(2):
        main, balance = loss_of_llama(model, batch(0, share)), fullshard.balance_loss(model)
        ((main + balance) / 2).backward()
        assert isinstance(balance, torch.Tensor)
        total += balance.item() / 2
    found = run_ranks(4, rank_main)
    assert abs(sum(one for one, _ in found) / 4 - total) < 1e-5 * total and total > 1.9
    for _, gradients in found:
        for name, p in model.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


def test_figures_of_gradients_and_checks_of_messages() -> None:
    """The norm by parameter is that of one process, and the check of gathers and reductions passes."""

    def rank_main(rank: int) -> dict[str, float]:
        model = of_experts()
        prepared = prepare_fully_shard(model, parallelism=EP, show=False)
        checks = fullshard.check_invariants(model)
        loss_of_llama(model, batch(0, prepared.share[0])).backward()
        assert (checks.checked, checks.skipped) == (1, {})
        return {name: found.norm for name, found in fullshard.grad_stats(model).parameters.items()}

    model = of_experts()
    for share in range(4):
        (loss_of_llama(model, batch(0, share)) / 4).backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for found in run_ranks(4, rank_main):
        assert found == pytest.approx(expected, rel=1e-4)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.threads_only(reason="errors before anything is sent")
def test_fused_experts_get_whole_sequences() -> None:
    """Their routers know no parts of tokens: experts would get each of them twice, and gradients of twice the size."""
    installed.needs("transformers")

    def rank_main(rank: int) -> None:
        plan = {**EP, **TP, "styles": {"model.layers.*.post_attention_layernorm": "sequence->whole"}}
        with pytest.raises(ConfigError, match=r"expected whole sequences between layers, .* experts model\.layers\.0"):
            prepare_fully_shard(hugging_face("Mixtral", **MIXTRAL), parallelism=plan, show=False)

    hugging_face("Mixtral", **MIXTRAL)  # imported before ranks, which are threads, do it at once
    run_ranks(4, rank_main)


@pytest.mark.threads_only(reason="one rank's dtypes")
def test_weights_of_the_router_stay_as_they_are() -> None:
    """Under mixed precision experts get them in the dtype in which the router gives them, as without a plan."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), Experts(8, 6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, index = self.router(x).float().softmax(-1).topk(2)
            return self.experts(x, index, weights)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), Routed())
        for p in model.parameters():
            nn.init.normal_(p)
        return model

    def rank_main(rank: int) -> None:
        model = seeded(build)
        found: list[torch.Tensor] = []
        model.get_submodule("1.experts").register_forward_pre_hook(lambda _, args: found.extend(args))
        config = {"precision": "DEFAULT", "wrap": {"classes": ["Routed"]}}
        prepare_fully_shard(model, None, config, parallelism=EP, show=False)
        out = model(torch.randn(3, 8))
        out.float().sum().backward()
        assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.int64, torch.float32]
        assert out.dtype == torch.bfloat16

    run_ranks(2, rank_main)


# ---- one layer -------------------------------------------------------------------------------------------------------


def test_a_layer_is_the_sum_over_its_experts() -> None:
    """Forward and gradients beside a loop over tokens."""
    layer = seeded(lambda: fullshard.MixtureOfExperts(4, 6, experts=3, experts_per_token=2))
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = layer(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    experts, rows = layer.experts, []
    for token in x.view(-1, 4):
        chances = (layer.router.weight @ token).softmax(-1)
        kept, chosen = chances.topk(2)
        out = torch.zeros(4)
        for weight, e in zip(kept / kept.sum(), chosen.tolist(), strict=True):
            hidden = nn.functional.silu(experts.gate[e] @ token) * (experts.up[e] @ token)
            out = out + weight * (experts.down[e] @ hidden)
        rows.append(out)
    expected = torch.stack(rows).view_as(x)
    torch.testing.assert_close(y, expected)
    for mine, its in zip(grads, torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()]), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_the_kernel_for_devices_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(3, 16, 8, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.randn(9, 8, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    outs = [product(rows, weights, [4, 0, 5]) for product in (products, in_one_kernel)]
    grads = [torch.autograd.grad(out.float().square().sum(), [rows, weights]) for out in outs]
    torch.testing.assert_close(*outs)
    for mine, its in zip(*grads, strict=True):
        torch.testing.assert_close(mine, its)
    assert not grads[0][1][1].any() and not grads[1][1][1].any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token: expected at most the 2 experts, found 3"),
        ({"experts": 0}, "experts: expected a whole number of at least 1"),
        ({"experts": 2, "balance": -1.0}, "balance: expected a number of at least 0"),
    ],
)
def test_numbers_of_a_layer_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fullshard.MixtureOfExperts(4, 4, **options)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (partial(llama, experts=3), EP, "must divide the experts, 3; nearest legal plan: data_parallel_shard_degree"),
        (of_experts, {"expert_parallel_degree": 3}, "must divide the 4 ranks of dp_shard, cp and tp; nearest legal"),
        (llama, EP, "expected experts in Llama, found none; nearest valid: expert_parallel_degree = 1"),
        (of_experts, {**EP, "expert_tensor_parallel_degree": 3}, "expected 1, or the tensor_parallel_degree of 1"),
        (of_experts, {**EP, "styles": {"layers.*.attention": "expert"}}, "expected a module with the weights of all"),
        (of_experts, {**TP, "styles": {"layers.*.ffn.experts": "expert"}}, "has no effect with expert_parallel_degree"),
    ],
    ids=["experts", "ranks", "none", "etp", "style", "no degree"],
)
@pytest.mark.threads_only(reason="errors before anything is sent")
def test_what_is_not_legal_changes_nothing(make: Make, plan: Any, said: str) -> None:
    assert_not_legal(make, plan, said)


# ---- relations between axes: the number that is wrong without the plan, then the error with it -----------------------


def test_a_divisor_that_was_forgotten() -> None:
    """Gradients of experts are too large by the degree; the plan names the unit before anything is sent."""

    def rank_main(rank: int) -> float:
        model = of_experts()
        prepared = prepare_fully_shard(model, parallelism=EP, show=False)
        experts: Any = model.layers[0].ffn.experts
        experts.set_gradient_divide_factor(2.0)
        with pytest.raises(RuntimeError, match=r"^ep: expected the gradients of layers\.0\.ffn\.experts to be .* by 4"):
            loss_of_llama(model, batch(0, prepared.share[0]))
        experts.set_gradient_divide_factor(4.0)
        loss_of_llama(model, batch(0, prepared.share[0])).backward()
        return float(experts.gate.grad.full_tensor().norm())

    model = of_experts()
    for share in range(4):
        (loss_of_llama(model, batch(0, share)) / 4).backward()
    right = float(model.get_parameter("layers.0.ffn.experts.gate").grad.norm())  # type: ignore[union-attr]
    for found in run_ranks(4, rank_main):
        assert abs(found - right) < 1e-5 * right


def test_experts_on_a_mesh_of_their_own_beside_a_plan() -> None:
    """By `wrap_fn`, without the divisor: torch and fullshard train other numbers silently; under a plan it is an
    error."""

    def rank_main(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]

        def wrap(name: str, module: nn.Module) -> Any:
            if isinstance(module, Experts):
                return {"shard_placement_fn": lambda p: fullshard.ShardPlacementResult(Shard(0), own)}
            return False

        model = of_experts()
        prepare_fully_shard(model, parallelism={"context_parallel_degree": 2}, wrap_fn=wrap, show=False)
        with pytest.raises(
            RuntimeError, match=r"^ep: expected the gradients of layers\.0\.ffn\.experts .*found 2, on a"
        ):
            loss_of_llama(model, batch(0, rank))

    run_ranks(4, rank_main)
