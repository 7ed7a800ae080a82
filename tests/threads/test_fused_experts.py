"""Experts of transformers' models under a plan equal one process; how they are laid out is found by a trial."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard import prepare_fully_shard
from fullshard.extras.fused_experts import FusedLayout, layout_of
from fullshard.migrate import ConfigError
from tests.harness import installed
from tests.harness.axes import check
from tests.harness.models import seeded
from tests.harness.moe_families import DIVIDED, family
from tests.harness.threads import run_ranks
from tests.threads.test_prepare_experts import CUT, EP, TP

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
slow = partial(pytest.param, marks=pytest.mark.slow)
# transformers has no plan of tensor parallelism for it, and its attention has a parameter for each head.
HEAD = {"styles": {"lm_head": "column->whole"}}
WRAP = {"wrap": {"classes": ["Linear"]}}
HSDP = {**EP, "data_parallel_replicate_degree": 2}


@pytest.mark.sample(1)
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("kind", "plan", "world"),
    [
        ("GptOss", {**CUT, **HEAD}, 4),
        ("Mixtral", CUT, 4),
        slow("GptOss", EP, 2),
        slow("GptOss", EP, 4),
        slow("GptOss", {**EP, **TP, **HEAD}, 4),
        slow("GptOss", HSDP, 4),
        slow("GptOss", {"expert_parallel_degree": 4, **TP, **HEAD}, 4),
        slow("GptOss", {**EP, "data_parallel_replicate_degree": 2, **TP, **HEAD}, 8),
        slow("Qwen3Moe", CUT, 4),
        slow("Mixtral", {**CUT, "data_parallel_replicate_degree": 2}, 8),
        slow("Mixtral", {**EP, "tensor_parallel_degree": 4, "expert_tensor_parallel_degree": 4}, 8),
        slow("AriaText", {**CUT, **HEAD}, 4),
        slow("NemotronH", {**CUT, **HEAD}, 4),
        *(slow(kind, EP, 2) for kind in DIVIDED if kind != "GptOss"),
        *(slow(kind, {"expert_parallel_degree": 4, **TP}, 4) for kind in ("Mixtral", "Qwen3Moe")),
        slow("Mixtral", HSDP, 4),
    ],
    ids=lambda value: (
        "-".join(f"{k[:9]}{v}" for k, v in value.items() if k != "styles") if isinstance(value, dict) else str(value)
    ),
)
def test_families(kind: str, plan: dict[str, Any], world: int) -> None:
    """Parameters, optimizer state and norms, with recomputation; names, shapes, router and gate stay theirs."""
    installed.needs("transformers")
    sizes = {"num_key_value_heads": 4} if plan.get("tensor_parallel_degree") == 4 else {}
    check(world, partial(family, kind, **sizes), plan, {"activation_checkpointing": "units"})


# ---- the trial -------------------------------------------------------------------------------------------------------


class Mine(nn.Module):
    """As a program may write them: no attribute says how. `order`: "plain", or "transposed"."""

    def __init__(self, order: str = "plain", experts: int = 4) -> None:
        super().__init__()
        self.num_experts, self.order = experts, order
        into, out = (experts, 12, 8), (experts, 8, 6)
        if order == "transposed":
            into, out = (experts, 8, 12), (experts, 6, 8)
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(into)), nn.Parameter(torch.randn(out))
        self.act_fn = nn.SiLU()

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in range(self.num_experts):
            token, place = torch.where(index == e)
            into, down = self.gate_up_proj[e], self.down_proj[e]
            if self.order == "transposed":
                into, down = into.T, down.T
            here = F.linear(self.gated(F.linear(rows[token], into)), down)
            out.index_add_(0, token, here * weights[token, place, None])
        return out

    def gated(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        found: Tensor = self.act_fn(gate) * up
        return found


class Clamped(Mine):
    """Another function of large numbers alone."""

    def gated(self, hidden: Tensor) -> Tensor:
        return super().gated(hidden.clamp(max=50.0))


class Scaled(Mine):
    """Weights go to the inputs."""

    def forward(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows * weights.sum(1, keepdim=True), index, weights)


class Swapped(Mine):
    """Up, then gate."""

    def gated(self, hidden: Tensor) -> Tensor:
        return super().gated(hidden.roll(hidden.shape[-1] // 2, -1))


class Gated(Swapped):
    """The same, said as transformers' classes say it, whose gate mixes features."""

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        return self.gated(hidden.flip(-1))

    def gated(self, hidden: Tensor) -> Tensor:
        return super().gated(hidden) * hidden.mean(-1, keepdim=True)


class Batched(Mine):
    def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
        return rows


def test_the_layout_is_what_the_forward_computes() -> None:
    assert layout_of(Mine()) == FusedLayout("gate_up_proj", transposed=False, gates="halves")
    assert layout_of(Mine("transposed")) == FusedLayout("gate_up_proj", transposed=True, gates="halves")
    for other in (Clamped(), Scaled(), Swapped(), Gated()):
        assert layout_of(other) == "its forward computes something else than down(gate(up(x))) of each token"
    assert "cannot be tried on small numbers: TypeError" in str(layout_of(Batched()))
    assert layout_of(nn.Linear(2, 2)) == ""
    mine = Mine()
    mine.num_experts = 5
    assert "its shapes are gate_up_proj (4, 12, 8) and" in str(layout_of(mine))
    mine = Mine()
    mine.norm = nn.LayerNorm(8)
    assert layout_of(mine) == "it has norm.bias beside them"


def test_the_trial_leaves_the_module() -> None:
    mine = Mine()
    before = {name: value for name, value in vars(mine).items()}, dict(mine.named_parameters())
    random = torch.get_rng_state()
    layout_of(mine)
    assert vars(mine) == before[0] and all(p is before[1][name] for name, p in mine.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)


class Routed(nn.Module):
    def __init__(self, experts: nn.Module, outputs: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, outputs), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        found: Tensor = self.experts(x, index, weights)
        return found


@pytest.mark.threads_only(reason="errors before anything is sent")
def test_experts_that_compute_otherwise_are_named() -> None:
    """With weights in the shapes of Mixtral's, and another forward: computing them as Mixtral's would be silent."""

    def rank_main(rank: int) -> None:
        for kind, plan, said in (
            (Clamped, EP, r"found experts, a Clamped, but its forward computes something else"),
            (Clamped, {**EP, "styles": {"experts": "expert"}}, r"found a Clamped, but its forward computes"),
        ):
            with pytest.raises(ConfigError, match=said):
                prepare_fully_shard(Routed(kind()), None, WRAP, parallelism=plan, show=False)

    run_ranks(2, rank_main)


def test_a_token_may_choose_no_expert() -> None:
    """The number after the last expert stands for none, as for transformers' own forwards."""

    def rank_main(rank: int) -> list[Tensor]:
        model = seeded(lambda: Routed(Mine(), outputs=5))
        prepared = prepare_fully_shard(model, None, WRAP, parallelism=EP, show=False)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(prepared.share[0]))
        model(x).square().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]

    model = seeded(lambda: Routed(Mine(), outputs=5))
    chosen = 0
    for share in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(share))
        chosen += int((model.router(x).topk(2).indices == 4).sum())
        (model(x).square().sum() / 2).backward()
    assert chosen > 0
    for found in run_ranks(2, rank_main):
        for mine, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="expected numbers of experts of at most 4, which stands for none, found 5"):
        fullshard.extras.experts.routed(x, torch.tensor([[5]] * 6), torch.ones(6, 1), 4, lambda rows, counts: rows)


@pytest.mark.threads_only(reason="errors before anything is sent")
def test_widths_that_do_not_divide() -> None:
    installed.needs("transformers")
    plan = {"expert_parallel_degree": 1 + 1, "tensor_parallel_degree": 4, "expert_tensor_parallel_degree": 4}

    def rank_main(rank: int) -> None:
        model = family("Qwen3Moe", moe_intermediate_size=10, num_key_value_heads=4)
        with pytest.raises(ConfigError, match=r"expert_tensor_parallel_degree = 4: must divide the width of an expert"):
            prepare_fully_shard(model, parallelism=plan, show=False)

    family("Qwen3Moe")  # imported before ranks, which are threads, do it at once
    run_ranks(8, rank_main)
