"""The planner on models of Hugging Face, by family: from the defaults of their configs, and tiny ones counted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import Program, fully_shard, prepare_fully_shard
from fullshard.plan import Strategy
from fullshard.plan.description import Kind
from fullshard.plan.facts import describe
from fullshard.program import ProgramError, shard_blocks
from fullshard.train import shapes
from tests.harness.corpus import FAMILIES, corpus_model, corpus_program
from tests.harness.fake import fake_world
from tests.harness.planned import count, predict

# Of what the library holds, and of activations.
LIBRARY, ACTIVATIONS = 0.02, 0.05


@pytest.mark.sample(1, full=60)
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_tiny_models_are_what_is_counted(name: str) -> None:
    _expect_counted(name)


def test_parameters_without_a_gradient_have_no_state() -> None:
    """Those of Longformer's attention over the whole sequence, where no token of the batch asks for it. Its forward
    asks which rows of a mask it has written to."""
    held, counted = _expect_counted("longformer")
    assert held == counted
    described = describe(corpus_model("longformer", tiny=True).program(2), "longformer")
    left = {p.name.split(".")[-2] for unit in described.units for p in unit.parameters if not p.is_stepped}
    assert left == {"query_global", "key_global", "value_global"}


def _expect_counted(name: str) -> tuple[float, int]:
    """Returns what is held at rest, planned and counted."""
    model, strategy = corpus_model(name, tiny=True), Strategy(ranks=2, backend="fake")
    counted, simulation = count(model, strategy, 4), predict(model, strategy, 4)
    kept = sum(nbytes for (_, what), nbytes in simulation.bytes.there.items() if what.startswith("kept from"))
    there = dict(zip(simulation.bytes.kinds, simulation.found.peak.nbytes, strict=True))
    peak = max(counted.step, counted.optimizer) + sum(counted[:3])
    activations = there["activations"] + there["loss"] + there["batch"]
    held = there["parameters"] + there["buffers"] + there["optimizer"] + kept
    assert abs(held - sum(counted[:3])) <= LIBRARY * held
    allowed = LIBRARY * (peak - activations) + ACTIVATIONS * activations
    assert abs(simulation.found.peak.total - peak) <= allowed, f"{peak:,}, {simulation.found.peak.total:,.0f}"
    return held, sum(counted[:3])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "wavlm", "bart"])
def test_commands_where_blocks_return_an_input(name: str) -> None:
    """Blocks of T5 and WavLM hand on the positions that the first one computed: backward reaches them a second time
    when these get their gradient, gathers and reduces. Those of a decoder have inputs of the encoder, whose gradients
    are complete long after the block is done."""
    model, strategy = corpus_model(name, tiny=True), Strategy(ranks=2, backend="fake")
    counted, simulation = count(model, strategy, 4, trace=True), predict(model, strategy, 4)
    assert simulation.found.commands == counted.commands
    again = counted.commands.count("reduce " + model.units[-1]) == 2
    assert again == (name != "bart")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_planned_and_sharded_by_their_default_units(name: str) -> None:
    program = corpus_program(name)
    described = describe(program, name, compute="bfloat16")
    with torch.device("meta"):
        model = program.model()
    numel = sum(p.numel() for p in model.parameters())
    assert described.numel == numel and described.tape.lines
    with fake_world(8):
        shard_blocks(model, fully_shard)
        units = [module for module in model.modules() if hasattr(module, "unshard")]
    assert len(units) == len(described.units), "one rule for plan and for sharding"


@pytest.mark.parametrize("name", ["mamba", "convnext", "bert", "swin", "funnel"])
def test_prepare_chooses_the_blocks_that_plans_choose(name: str) -> None:
    """Mamba and ConvNeXt name a class, and one inside of it. Funnel has lists of blocks in a list. Beside blocks,
    prepare makes units of the ends."""
    found = []
    for default in (True, False):
        with fake_world(2):
            model = corpus_model(name, tiny=True).make()
            if default:
                shard_blocks(model, fully_shard)
            else:
                keys = {"wrap": {"group_ends": False}}
                prepare_fully_shard(model, torch.optim.SGD(model.parameters()), keys, show=False)
            found.append({dotted for dotted, module in model.named_modules() if hasattr(module, "unshard")})
    assert found[0] == found[1] and len(found[0]) == len(corpus_model(name, tiny=True).units) + 1


class _Named(nn.Module):
    """Layers by name, as torchtitan has them, and a head that is no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.ModuleDict({str(i): nn.TransformerEncoderLayer(16, 2, 32) for i in range(3)})
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 40))


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (
            lambda: nn.Transformer(16, 2, 2, 3, 32, batch_first=True),
            [*("encoder.layers." + i for i in "01"), *("decoder.layers." + i for i in "012")],
        ),
        (_Named, ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_blocks_of_models_that_name_no_class(make: Any, blocks: list[str]) -> None:
    found = []
    for default in (True, False):
        with fake_world(2):
            model = make()
            if default:
                shard_blocks(model, fully_shard)
            else:
                keys = {"wrap": {"group_ends": False}}
                prepare_fully_shard(model, torch.optim.SGD(model.parameters()), keys, show=False)
            found.append([dotted for dotted, module in model.named_modules() if hasattr(module, "unshard") and dotted])
    assert found == [blocks, blocks]


def test_there_are_forty_families_of_five_kinds() -> None:
    assert len(FAMILIES) >= 40
    assert {family.kind for family in FAMILIES.values()} >= {"text", "pair", "image", "speech", "whisper"}


# ---- what a forward asks for -----------------------------------------------------------------------------------------


class _Asks(nn.Module):
    """Asks for values of its batch, and for rows by a mask; with `deep`, for values that parameters made."""

    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.deep, self.table, self.out = deep, nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.table(tokens)
        if (positions.diff(dim=-1) != 1).any() or 0 in tokens[:, [-1, 0]]:
            x = torch.cat([x] * 4, -1)  # would not fit
        rows = x[tokens > 20]
        if self.deep and rows.sum() > 0:
            rows = rows * 2
        return self.out(rows)  # type: ignore[no-any-return]


def _asking(deep: bool = False) -> Program:
    tokens = torch.tensor([[7, 30, 40, 9], [11, 12, 25, 13]])
    return Program(lambda: _Asks(deep), lambda model, batch: model(batch).square().mean(), lambda index: tokens)


def test_values_of_a_batch_are_known() -> None:
    """Three of eight tokens are above 20; of two more samples, which repeat the first ones, as many."""
    for samples, rows in ((2, 3), (4, 6), (3, 5)):
        model = describe(_asking(), "asks", samples=samples)
        product = next(line for line in model.tape.lines if line.kind is Kind.OP and line.name == "aten.addmm")
        assert product.a == 2 * rows * 8 * 8


def test_a_value_that_parameters_made_is_refused_with_its_module() -> None:
    with pytest.raises(ProgramError) as raised:
        describe(_asking(deep=True), "asks")
    expected = r"asks: the model \(_Asks, test_plan_corpus.py:\d+\) asks for values that are not known before a run "
    assert re.match(
        expected + r"\(_local_scalar_dense\): expected shapes that depend on shapes, .*; compute with",
        str(raised.value),
    )


def test_autocast_and_scalars_are_refused() -> None:
    """A plan counted no casts, and planned what `fully_shard` refuses."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).sum()  # type: ignore[no-any-return]

    program = Program(lambda: nn.Linear(4, 4), loss, lambda index: torch.zeros(2, 4))
    with pytest.raises(ProgramError, match="torch.autocast: expected casts by the precision of units"):
        describe(program, "casts")

    def scaled() -> nn.Module:
        model = nn.Linear(4, 4)
        model.scale = nn.Parameter(torch.ones(()))
        return model

    program = Program(scaled, lambda model, batch: (model(batch) * model.scale).sum(), lambda index: torch.zeros(2, 4))
    with pytest.raises(ProgramError, match="scaled: scale: expected a parameter with at least one dim, found a scalar"):
        describe(program, "scaled")


class _Routed(nn.Module):
    """Two of four experts for each row, in a loop over those that any row meets, if all numbers are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleDict({f"expert {i}": nn.Linear(8, 8) for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        assert not x.isnan().any() and not self.router.weight.isinf().any()
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        assert sum(mask.sum((1, 2)).tolist()) == 2 * len(x)
        for (number,) in (mask.sum((1, 2)) > 0).nonzero():
            place, rows = torch.where(mask[number])
            out = out.index_add(0, rows, self.experts[f"expert {number}"](x[rows]) * weights[rows, place, None])
        # Rows are replaced by a mask of the batch, which backward meets again.
        kept = torch.arange(len(x), device=x.device) < 6
        out[kept] = out[kept] * 2
        return out


def test_routers_pick_experts_in_turn() -> None:
    """Each of four experts gets half of the rows, and the plan says that this is assumed."""
    program = Program(_Routed, lambda model, x: model(x).square().mean(), lambda index: torch.ones(10, 8))
    tape = describe(program, "routed").tape
    products = [line.a for line in tape.lines if line.kind is Kind.OP and line.name == "aten.addmm"]
    assert products == [2 * 10 * 8 * 4, *[2 * 5 * 8 * 8] * 4]
    often, finite = sorted(tape.assumed, reverse=True)
    assert often == "where a step picks some of 4 by values that are not known, each is picked as often"
    assert finite == "numbers are finite where the step asks for it"


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_experts_in_float32_are_planned_and_count_for_those_that_a_token_meets() -> None:
    model = corpus_model("mixtral", tiny=True)
    described = describe(model.program(1), "mixtral")
    # Two of four experts of three matrices, in each of three layers; queries, keys, values, out; routers; the head.
    experts, attention = 3 * 64 * 128, 2 * 64 * 64 + 2 * 64 * 32
    assert described.multiplied == 3 * (2 * experts + attention + 4 * 64) + 96 * 64
    assert described.numel > described.multiplied + 3 * 2 * experts


@pytest.mark.parametrize("kind", ["falcon"])
def test_a_config_whose_attention_is_chosen_by_name(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    file.write_text(json.dumps({"model_type": kind, **sizes}))
    assert len(describe(shapes.hugging_face(file, 16), kind).units) == 3


def test_the_width_of_heads_is_that_of_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mistral-Small has 32 heads of 128 in a model of 5,120."""
    sizes: dict[str, Any] = {"vocab_size": 90, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "tie_word_embeddings": False}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mistral", **sizes}))
    of_transformers = describe(shapes.hugging_face(file, 16), "mistral")
    monkeypatch.setitem(sys.modules, "transformers", None)
    plain = describe(shapes.hugging_face(file, 16), "mistral")
    assert plain.numel == of_transformers.numel
