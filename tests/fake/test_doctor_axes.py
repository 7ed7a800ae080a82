"""`fullshard doctor` and axes beside data parallelism: rules by name, and models whose own code breaks when divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import Parallelism, Program
from fullshard.cli import main
from fullshard.doctor import Diagnosis, examine
from tests.harness.axes import batch, llama, loss
from tests.harness.installed import clear_sharding_cache
from tests.harness.models import seeded


@pytest.fixture(autouse=True)
def _new_groups() -> None:
    """torch notes names of groups with layouts; those of an earlier test are gone."""
    clear_sharding_cache()


# The checks for which something is planted here.
PLANTED = ("axes", "axes-step", "axes-narrowed")
STYLES = {"layers.*.qkv": "column", "layers.*.out": "row"}


class Attention(nn.Module):
    """A user's attention. `how`: "right" reads the number of heads off its input; "heads" and "silent" write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads, self.width = how, 4, 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        qkv = self.qkv(x)
        if self.how == "right":
            qkv = qkv.view(n, length, -1, 3, self.width)
        elif self.how == "heads":
            qkv = qkv.view(n, length, self.heads, 3, self.width)
        else:
            qkv = qkv.view(n, length, self.heads, 3, -1)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        if self.how == "products":
            found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Attention(how)])
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def program(make: Callable[[], nn.Module], **given: Any) -> Program:
    return Program(make, loss, lambda index: batch(index, 0), **given)


def look(make: Callable[[], nn.Module], plan: Parallelism, world: int = 4, **given: Any) -> Diagnosis:
    return examine(program(make, **given), world=world, parallelism=plan, needs_port=False)


def of_axes(found: Diagnosis) -> list[tuple[str, str, str]]:
    return [(each.check, each.what, each.fix) for each in found.findings if each.severity == "error"]


@pytest.mark.parametrize(
    ("plan", "world"),
    [
        (Parallelism(2), 4),
        pytest.param(Parallelism(2, False, data_parallel_replicate_degree=2), 8, marks=pytest.mark.slow),
        pytest.param(Parallelism(2, enable_loss_parallel=True), 8, marks=pytest.mark.slow),
    ],
)
def test_a_legal_declaration_has_no_errors(plan: Parallelism, world: int) -> None:
    """The divided, sharded model takes its steps over a fake group too."""
    found = look(llama, plan, world)
    assert of_axes(found) == []
    report = found.facts.model.report
    assert report is not None and report.units and found.facts.model.steps.sharded_failure is None
    assert any("axes beside data parallelism" in text for text in found.facts.measured.skipped)


@pytest.mark.parametrize(
    ("make", "plan", "world", "rules", "nearest"),
    [
        (
            partial(llama, heads=6, kv_heads=3, dim=24),
            Parallelism(4),
            8,
            ["query heads, 6", "key and value heads, 3"],
            "data_parallel_shard_degree = 8",
        ),
        (
            partial(llama, vocab=33, ffn_dim=25),
            Parallelism(2),
            4,
            ["feed-forward layer, 25", "vocabulary, 33"],
            "data_parallel_shard_degree = 4",
        ),
        (llama, Parallelism(2), 7, ["are 6 of 7 ranks"], "data_parallel_shard_degree = 7"),
        (
            partial(llama, heads=16, kv_heads=16, dim=64, ffn_dim=64),
            Parallelism(16),
            16,
            ["tokens of a part of a sequence, 8"],
            "data_parallel_shard_degree = 2, tensor_parallel_degree = 8",
        ),
    ],
    ids=["heads", "widths", "world", "sequence"],
)
def test_rules_by_name(
    make: Callable[[], nn.Module], plan: Parallelism, world: int, rules: list[str], nearest: str
) -> None:
    """Each rule is a finding of its own, with the nearest legal plan as its fix."""
    found = of_axes(look(make, plan, world))
    assert len(found) == len(rules)
    for (check, what, fix), rule in zip(found, rules, strict=True):
        assert check == "axes" and rule in what and nearest in fix


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("make", "plan", "world", "said"),
    [
        (llama, Parallelism(context_parallel_degree=2), 4, ""),
        (llama, Parallelism(context_parallel_degree=3), 3, "must divide the tokens of a sequence, 8 (into 6)"),
        (
            partial(llama, heads=6, kv_heads=3, dim=24),
            Parallelism(context_parallel_degree=4, context_parallel_variant="ulysses"),
            4,
            "context_parallel_degree = 4: must divide the query heads of a rank, 6",
        ),
        (partial(llama, experts=4), Parallelism(expert_parallel_degree=2), 4, ""),
        (partial(llama, experts=6), Parallelism(expert_parallel_degree=4), 4, "must divide the experts, 6"),
        (llama, Parallelism(expert_parallel_degree=2), 4, "expected experts in Llama, found none"),
        (llama, Parallelism(pipeline_parallel_degree=2), 4, ""),
        (llama, Parallelism(pipeline_parallel_degree=4), 4, "expected a layer for each stage, found 2 layers"),
        (
            partial(llama, tied=True, layers=4),
            Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"),
            4,
            "found embedding.weight in the stages 0 and 3 on one rank, which would shard it twice",
        ),
        (
            partial(llama, tied=True),
            Parallelism(pipeline_parallel_degree=2, context_parallel_degree=2),
            4,
            "",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sequences_experts_and_stages(make: Callable[[], nn.Module], plan: Parallelism, world: int, said: str) -> None:
    """Legal ones without errors; for each other one the rule, by its key."""
    found = of_axes(examine(program(make), world=world, parallelism=plan, needs_port=False, probes=False))
    if not said:
        assert found == []
        return
    ((check, what, _),) = found
    assert check == "axes" and said in what


def tied() -> nn.Module:
    model = seeded(partial(Net, "right"))
    model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    return model


def test_a_tie_across_styles() -> None:
    plan = Parallelism(2, styles={"embedding": "column->whole", "head": "column->whole"})
    ((check, what, _),) = of_axes(look(tied, plan))
    assert check == "axes" and "expected one way to divide the parameter" in what and "embedding" in what


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "check", "said"),
    [
        ("right", "", ""),
        ("heads", "axes-step", "(at test_doctor_axes.py:"),
        ("silent", "axes-narrowed", "attention over heads of 2, in one process of 4 (at test_doctor_axes.py:"),
        ("products", "axes-narrowed", "a matrix product of 2, in one process of 4 (at test_doctor_axes.py:"),
    ],
)
def test_a_model_s_own_number_of_heads(how: str, check: str, said: str) -> None:
    """torch raises for one of them; the other two train another model without a word."""
    found = of_axes(look(partial(seeded, partial(Net, how)), Parallelism(2, styles=STYLES)))
    if not check:
        assert found == []
        return
    ((name, what, fix),) = found
    assert name == check and said in what and "view(batch, tokens, -1, head_dim)" in fix


def test_layers_divided_after_sharding() -> None:
    """A program that does it in its own code: the order that is right is in the finding."""

    def shard(model: Any, fully_shard: Callable[..., Any]) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
            parallelize_module(layer, mesh["tp"], {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])

    found = examine(
        program(partial(seeded, partial(Net, "right")), shard=shard), world=4, needs_port=False, probes=False
    )
    ((check, what, _),) = of_axes(found)
    assert check == "refused" and "qkv" in what and "parallelize_module" in what and "before" in what


def wide() -> Program:
    return program(partial(llama, heads=6, kv_heads=3, dim=24, vocab=33))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", f"{__name__}:wide", "--nproc", "8", "--tensor-parallel", "2", "--no-probe"])
    said = capsys.readouterr().out
    assert code == 2 and "error    axes: parallelism.tensor_parallel_degree = 2: must divide the key and value" in said
    assert "fix: nearest legal plan: data_parallel_shard_degree = 8" in said
    arguments = ["--nproc", "6", "--tensor-parallel", "3", "--no-sequence-parallel", "--no-probe"]
    main(["doctor", f"{__name__}:wide", *arguments])
    assert "axes: " not in capsys.readouterr().out
