"""`fullshard plan` with tensor, sequence and context parallelism: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard import Program
from fullshard.cli import main
from fullshard.migrate.declared import noted_by
from fullshard.migrate.parallelism import Parallelism
from fullshard.plan import Planner, Strategy, units_of
from fullshard.plan.description import Model
from fullshard.plan.facts import describe
from fullshard.plan.simulation import simulate
from fullshard.plan.spans import steps_of
from fullshard.plan.tape import note
from fullshard.train.model import LlamaShape
from fullshard.train.shapes import language_model
from tests.pure.test_plan import PLAIN

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_3d.toml")


def small() -> Program:
    return language_model(LlamaShape(120, 2, 32, 4, 2, 64, 16, tie_embeddings=False), 16)


def with_own_division() -> Program:
    """A program that says itself how it is divided: one layer over the ranks, along its outputs."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def parallelize(model: object, mesh: object) -> None:
        from torch.distributed.tensor import Replicate

        parallelize_module(model.output, mesh, ColwiseParallel(output_layouts=Replicate()))  # type: ignore[attr-defined, arg-type]

    return replace(small(), parallelize=parallelize)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments, "--hardware", "cpu"])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_declaration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = planned(capsys, EXAMPLE, "--ranks", "8")
    assert code == 0
    for line in (
        "mesh: dp_replicate 2 x dp_shard 2 x tp 2 = 8 ranks",
        "data: 4 shares, each for 2 ranks",
        "  column: layers.*.attention.wq, layers.*.attention.wk",
        "  tensor_parallel_degree: 1, 2",
        "messages, axis tp: 8 x reduce_scatter_tensor",
        "axis tp: 2 ranks, 1 apart, inside of a node; ",
    ):
        assert line in out
    assert "tokens per second" in out


def test_json_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    entry = f"{__name__}:small"
    whole = json.loads(planned(capsys, entry, "--ranks", "4", "--json")[1])
    code, out, _ = planned(capsys, entry, "--ranks", "8", "--tensor-parallel", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["axis_seconds"]["tp"] > 0 and whole["axis_seconds"] == {}
    assert found["parameters"] == whole["parameters"] == whole["parameters_of_rank"]
    # Norms stay whole; all else is cut in two, over as many shards.
    norms = 5 * 32
    assert 2 * (found["parameters_of_rank"] - norms) == whole["parameters"] - norms
    assert 0.5 * whole["terms"]["parameters"] < found["terms"]["parameters"] < 0.6 * whole["terms"]["parameters"]
    assert found["terms"]["activations"] < 0.75 * whole["terms"]["activations"]
    assert whole["axes"] == whole["tensor_messages"] == []
    assert {each["operation"] for each in found["tensor_messages"]} > {"all_gather_into_tensor"}
    documented = Path(__file__).parents[2].joinpath("docs/plan.md").read_text()
    assert all(f"`{key}`" in documented for key in found)


@pytest.mark.slow
def test_context_parallelism_divides_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-2-7b", "--sequence", "64", "--ranks", "8", "--param-dtype", "bf16", "--json")
    whole = json.loads(planned(capsys, *arguments)[1])
    found = json.loads(planned(capsys, *arguments, "--context-parallel", "2")[1])
    assert found["terms"]["parameters"] == whole["terms"]["parameters"]  # folded: over all eight
    assert found["phases"]["loss"]["loss"] * 2 == pytest.approx(whole["phases"]["loss"]["loss"], rel=0.01)
    sent = {each["operation"]: each for each in found["axis_messages"]}
    # Two messages forward and two backward of 32 layers; heads of half of the tokens, in bfloat16, half of which stay.
    assert sent["all_to_all"]["messages"] == 4 * 32
    assert sent["all_to_all"]["bytes"] == 2 * 32 * 32 * (4 * 4096) * 2 // 2


def test_a_program_s_own_division(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, f"{__name__}:with_own_division", "--ranks", "4", "--tensor-parallel", "2", "--json")[1]
    found = json.loads(out)
    assert found["parameters"] - found["parameters_of_rank"] == 120 * 32 // 2
    operations = {each["operation"]: each["messages"] for each in found["tensor_messages"]}
    assert found["axes"][-1] == "layers: as `parallelize` of the program divides them"
    assert operations == {"all_gather_into_tensor": 1, "all_reduce": 1, "all_reduce of inputs' digests": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tensor-parallel", "3", "--ranks", "9"), "must divide the query heads, 4; nearest legal plan"),
        (("--tensor-parallel", "4", "--ranks", "8"), "must divide the key and value heads, 2; nearest legal plan"),
        (("--tensor-parallel", "2", "--ranks", "7"), "of 7 ranks; nearest legal plan"),
        (
            (
                "--context-parallel",
                "2",
            ),
            "have a length of their own",
        ),
        (("--loss-parallel",), "has no effect with tensor_parallel_degree = 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    code, _, error = planned(capsys, f"{__name__}:small", *arguments)
    assert code == 2 and said in error and error.count("\n") == 1


def described(tensor: int) -> Model:
    """Two layers of width 32, 16 tokens and a vocabulary of 120, over `tensor` ranks."""
    shape = LlamaShape(120, 2, 32, 4, 4, 64, 16, tie_embeddings=False)
    divide = noted_by(Parallelism(tensor_parallel_degree=tensor), tensor, note)
    program = replace(language_model(shape, 16), parallelize=divide)
    return describe(program, "small", samples=1, compute="bfloat16", tensor=tensor)


def test_a_divided_model_takes_its_messages_by_the_bandwidth() -> None:
    """Of each layer two gathers and two reduce-scatters forward, and the same backward; two of each at the ends, one
    of them of logits; all wait. Sums of five norms, and what ranks compare."""
    model = described(2)
    wires = replace(PLAIN, flops2=1e30, bandwidth=1e30, intra_node=100.0, latency=3.0)
    strategy = Strategy(2, tensor=2, compute="bfloat16", reduce="float32", optimizer="none")
    found = simulate(units_of(model, strategy), steps_of(model), strategy, wires)
    layers, ends, logits = 2 * 2 * 4, 4, 16 * 120 * 2
    gathers = ((layers + ends) * 16 * 32 * 2 + logits) / 2 / 100 + (layers + ends + 1) * 3
    sums = 5 * 2 * (32 * 4 / 2 / 100 + 3) + 2 * (16 / 2 / 100 + 3)
    assert found.seconds == pytest.approx(gathers + sums, rel=1e-12)
    assert found.along == {"tp": pytest.approx(found.seconds)} and found.exposed_seconds == pytest.approx(found.seconds)


def test_twice_the_ranks_of_a_layer_halve_its_products() -> None:
    two, four = (steps_of(described(tensor)).work for tensor in (2, 4))
    assert (two.matmul, two.attention) == (2 * four.matmul, 2 * four.attention)


def test_speed_and_mfu_count_a_token_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The two ranks of a layer have the same tokens: a rank's share is half of them."""
    entry = f"{__name__}:small"
    found = json.loads(planned(capsys, entry, "--ranks", "4", "--tensor-parallel", "2", "--json")[1])
    assert found["tokens_per_second"] == pytest.approx(16 / 2 / found["step_seconds"])
    alone = json.loads(planned(capsys, entry, "--ranks", "4", "--json")[1])
    work = [each["mfu"] / each["tokens_per_second"] for each in (found, alone)]
    assert work[0] == pytest.approx(work[1])


def test_the_config_s_own_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[parallelism]" in planned(capsys, EXAMPLE, "--ranks", "8", "--tensor-parallel", "2")[2]


@pytest.mark.slow
def test_the_search_tries_the_degrees_that_divide_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, four query heads, two key and value heads, no experts; batches with a length of their own."""
    tried, divided = [], Planner._divided

    def noted(self: Planner, asked: Strategy) -> Iterator[tuple[Planner, Strategy]]:
        for planner, strategy in divided(self, asked):
            tried.append((strategy.tensor, strategy.context, strategy.experts, strategy.pipeline))
            yield planner, strategy

    monkeypatch.setattr(Planner, "_divided", noted)
    code, out, error = planned(capsys, f"{__name__}:small", "--ranks", "4", "--search")
    assert (code, error) == (0, "") and tried == [(2, 1, 1, 1), (1, 1, 1, 2)]
    assert "what fits, the fastest first" in out
