"""`fullshard verify` proves a declared parallelism beside one process, and finds what is planted in it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from fullshard.cli import main
from fullshard.cli.verify import _declared
from fullshard.program import ProgramError
from fullshard.verify.merged import Entry, shared_in
from fullshard.verify.run import verify
from fullshard.verify.setting import EXERCISES, Setting
from fullshard.verify.strategy import parse_strategy
from tests.harness.errors import RanksFailed
from tests.harness.seeded_faults import SeededFault
from tests.harness.verified import compare, record
from tests.harness.verified_axes import staged

ENTRY, SEQUENCES = "tests.harness.verified_axes:", "tests.harness.verified_sequences:"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_3d.toml"


slow = partial(pytest.param, marks=pytest.mark.slow)


def entry(program: str) -> str:
    of_sequences = program in ("sequences", "of_experts", "without_positions", "own_mean")
    return (SEQUENCES if of_sequences else ENTRY) + program


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("program", "strategy", "world"),
    [
        ("declared", "zero3+tp=2+sp", 2),
        slow("declared", "zero3+tp=2", 4),
        slow("declared", "zero3+hsdp=2+tp=2+sp", 4),
        slow("declared", "zero2+micro=2+recompute+tp=2+sp", 4),
        slow("declared", "zero3+tp=2+sp+lp", 4),
        slow("heads", "zero3+tp=2", 4),
        slow("tied", "zero3+micro=2+pp=2+1F1B", 2),
        slow("tied", "zero3+micro=2+cp=2+pp=2+1F1B", 4),
        slow("tied_modules", "zero2+micro=4+pp=2+Interleaved1F1B", 2),
        slow("tied_modules", "zero3+hsdp=2+bf16+micro=2+pp=2+1F1B", 4),
        slow("balanced", "zero3+micro=2+ep=2+pp=2+1F1B", 4),
        slow("balanced", "zero2+micro=4+ep=2+pp=2+ZBVZeroBubble", 4),
        ("sequences", "zero3+cp=2", 2),
        slow("sequences", "zero2+micro=2+cp=2", 4),
        slow("sequences", "zero3+recompute+tp=2+cp=2", 4),
        ("of_experts", "zero3+ep=2", 2),
        slow("of_experts", "zero3+hsdp=2+ep=2", 4),
        slow("of_experts", "zero3+cp=2+ep=4", 4),
        slow("sequences", "zero3+hsdp=2+cp=2", 4),
        slow("sequences", "zero2+hsdp=2+micro=2+cp=2", 8),
        slow("sequences", "zero3+tp=2+cp=2+sp+lp", 4),
        slow("of_experts", "zero3+tp=2+ep=2+sp", 4),
        slow("of_experts", "zero3+tp=2+ep=4", 4),
        slow("of_experts", "zero3+tp=2+sp", 2),
        slow("of_experts", "zero3+tp=2+ep=2+etp+sp", 4),
        slow("of_experts", "zero3+hsdp=2+recompute+tp=2+ep=2", 8),
    ],
)
def test_sequences_and_experts_are_equal_to_one_process(
    program: str, strategy: str, world: int, tmp_path: Path
) -> None:
    """And divided layers, and what stages of a pipeline share: losses, gradients, parameters, optimizer state, and the
    norm by which clipping divides."""
    setting = record(tmp_path, strategy, world, entry=entry(program), exercises=("clipping",))
    assert str(setting.strategy) == strategy or "recompute" in strategy
    result = compare(tmp_path, setting)
    assert result.verdict == "equal", result.difference
    assert "clipping" in EXERCISES and result.compared > 100


@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("program", "strategy", "phase", "name"),
    [
        ("wrong_style", "zero3+tp=2", "backward", "norm.weight"),
        ("without_positions", "zero3+cp=2", "forward", "loss"),
        slow("forgotten_sum", "zero3+tp=2", "forward", "loss"),
        slow("own_mean", "zero3+cp=2", "forward", "loss"),
    ],
)
def test_a_planted_fault_is_found(program: str, strategy: str, phase: str, name: str, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, strategy, 2, entry=entry(program), steps=1))
    found = result.difference
    assert found is not None and found.phase == phase and name in found.name, found


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("program", "strategy", "said"),
    [
        (
            "cp_left_out",
            "zero3+cp=2",
            "cp: expected the parameters of .* on the 4 ranks over which gradients are averaged",
        ),
        ("other_data", "zero3+cp=2", "over cp: expected the same sequences on all ranks that share them"),
        ("forgotten_divisor", "zero3+ep=2", "ep: expected the gradients of .* to be divided by 4, the ranks of the"),
    ],
)
def test_a_relation_that_is_broken_names_its_axis(program: str, strategy: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=said):
        record(tmp_path, strategy, 4, entry=SEQUENCES + program, steps=1)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("program", ["other_data", "other_data_by_hand"])
def test_ranks_of_tp_with_different_data_are_named(program: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="tp: expected the ranks 0, 1 to give the model the same inputs"):
        record(tmp_path, "zero3+tp=2", 2, entry=ENTRY + program, steps=1)


@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("zero3+micro=2+pp=2+1F1B", 4),
        slow("zero2+micro=3+pp=2+GPipe", 2),
        slow("zero3+micro=4+pp=2+Interleaved1F1B", 2),
        slow("zero3+micro=8+pp=2+LoopedBFS+stages=2", 2),
        slow("zero2+micro=4+pp=2+InterleavedZeroBubble", 2),
        slow("zero2+micro=4+pp=2+ZBVZeroBubble", 2),
        slow("zero2+micro=4+pp=2+DualPipeV", 4),
        slow("zero3+hsdp=2+bf16+recompute+micro=2+pp=2+1F1B", 4),
        slow("zero3+offload+micro=2+pp=2+1F1B", 4),
        slow("zero3+micro=2+tp=2+sp+pp=2+1F1B", 4),
        slow("zero3+micro=2+tp=2+sp+lp+pp=2+1F1B", 8),
        slow("zero3+micro=2+cp=2+pp=2+1F1B", 4),
        slow("zero3+recompute+micro=2+tp=2+cp=2+sp+pp=2+1F1B", 8),
    ],
)
def test_a_pipeline_is_equal_to_one_process(strategy: str, world: int, tmp_path: Path) -> None:
    """Losses of micro-batches and of the step, gradients, parameters, optimizer state of all stages, and the norm."""
    setting = record(tmp_path, strategy, world, entry=ENTRY + "staged", exercises=("clipping",))
    assert str(setting.strategy) == strategy
    result = compare(tmp_path, setting)
    assert result.verdict == "equal", result.difference
    names = {name for name, _ in staged().model().named_parameters()}
    assert result.errors.keys() == names and result.compared > 100


@pytest.mark.sample(1)
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("program", "phase", "name", "cause"),
    [
        ("scaled_gradient", "backward", "layers.1.ffn.down.weight", "2 times too large (stage 0 of the pipeline)"),
        ("lost_gradient", "backward", "layers.1.ffn.down.weight", "micro-batch 1 is missing (stage 0"),
        ("sent_twice", "backward", "layers.1.ffn.down.weight", "2 times too large (stage 0"),
        ("other_values", "initial values", "norm.weight", "(stage 1 of the pipeline)"),
        ("left_out", "forward", "loss of micro-batch 1", ""),
    ],
)
def test_a_planted_fault_of_a_pipeline_is_found(
    program: str, phase: str, name: str, cause: str, tmp_path: Path
) -> None:
    setting = record(tmp_path, "zero2+pp=2", 2, entry=ENTRY + program, steps=1, exercises=("clipping",))
    found = compare(tmp_path, setting).difference
    assert found is not None and (found.phase, found.name) == (phase, name) and cause in found.cause, found


def test_copies_in_other_stages_are_to_be_the_same_bits() -> None:
    """Of the first ranks of two stages the second has another value."""
    setting = Setting("", "fullshard", parse_strategy("zero2+pp=2"), 4, 1, "cpu")
    one, other = torch.ones(2), torch.tensor([1.0, 2.0])
    records = [[Entry("backward", "w", value)] for value in (one, other, other, one)]
    (found,) = shared_in(records, setting)
    assert found[0][:2] == ("backward", "w") and found[0][2] is other and found[1] == 2
    assert [*shared_in([[*records[0]]] * 4, setting)] == []


SUMMED = "migrate.stage_ties:SharedParameters.summed"


@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("program", "fault", "phase", "name"),
    [
        # Each stage trains on its own part of the gradient.
        (
            "tied",
            SeededFault(SUMMED, "for part in parts[1:]:", "for part in ():"),
            "backward",
            "embedding.weight",
        ),
        # The last stage has another sum than the first one.
        slow(
            "tied_modules",
            SeededFault(SUMMED, "total = parts[0]", "total = parts[0] * (1 + 2**-20 * tie.stages.index(_))"),
            "backward",
            "embedding.weight",
        ),
        # The norm has the square of a shared gradient twice.
        slow(
            "tied",
            SeededFault("api.clip:clip_grad_norm_", "if not is_copy(p)])", "])"),
            "clipping",
            "norm",
        ),
        # Balance losses of the first stage do not reach its gradients; the step's loss lacks them.
        slow(
            "balanced",
            SeededFault("extras.experts:_Joined.backward", "ctx.scale", "0.0"),
            "backward",
            "layers.3.ffn.router.weight",
        ),
        slow(
            "balanced",
            SeededFault("extras.pipeline:Pipeline._shared", "total += balance / number", "pass"),
            "forward",
            "loss of the step",
        ),
        # The norm is that of one stage alone.
        slow(
            "staged",
            SeededFault("api.clip:_stage_axes", "[axis for axis in stages.axes if axis.size() > 1]", "[]"),
            "clipping",
            "norm",
        ),
    ],
)
def test_a_planted_fault_of_what_stages_share_is_found(
    program: str, fault: SeededFault, phase: str, name: str, tmp_path: Path
) -> None:
    setting = record(tmp_path, "zero2+pp=2", 2, fault, entry=ENTRY + program, steps=1, exercises=("clipping",))
    found = compare(tmp_path, setting).difference
    assert found is not None and (found.phase, found.name) == (phase, name), found


@pytest.mark.hang_after(300)
def test_a_wrong_loss_of_the_step_is_found(tmp_path: Path) -> None:
    """Each micro-batch has the right one; what all ranks get of them is their sum."""
    fault = SeededFault("extras.pipeline:Pipeline._shared", ".float().sum()", ".float().sum() * number")
    found = compare(tmp_path, record(tmp_path, "zero2+pp=2", 2, fault, entry=ENTRY + "staged", steps=1)).difference
    assert found is not None and (found.phase, found.name, found.rank) == ("forward", "loss of the step", 0), found


def test_words() -> None:
    for text in ("zero3+tp=2+sp", "zero3+hsdp=2+tp=2+sp+lp", "zero3+cp=2", "zero3+cp=2+ep=4"):
        assert str(parse_strategy(text)) == text
    with pytest.raises(ValueError, match="expected tp=N beside sp and lp"):
        parse_strategy("zero3+sp")
    with pytest.raises(ValueError, match="expected pp=N beside a schedule"):
        parse_strategy("zero3+GPipe")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("zero3+pp=2+ZBVZeroBubble", "expected zero2, because ZBVZeroBubble needs full weights"),
        ("zero2+pp=4+micro=2", "needs at least as many as there are stages, 4; nearest: micro=4"),
        ("zero2+pp=2+GPipe+stages=2", "GPipe has 1 on each rank"),
        ("fp16+pp=2", "expected pp without a scaled loss; nearest: bf16"),
        ("zero2+pp=3", "expected a world that 3 divides"),
    ],
)
def test_pipelines_that_are_refused(strategy: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_strategy(strategy).shards(4)


def test_the_degrees_of_a_config() -> None:
    assert _declared(str(EXAMPLE)) == ["zero3+hsdp=2+tp=2+sp"] and _declared("verify_me:program") == []
    assert _declared(str(EXAMPLE.with_name("train_moe.toml"))) == ["zero3+ep=2"]


def test_a_config_with_a_pipeline() -> None:
    pipeline = str(EXAMPLE.with_name("train_pipeline.toml"))
    assert _declared(pipeline, 4) == ["zero2+micro=4+pp=2+1F1B"] == [str(parse_strategy("zero2+pp=2+micro=4"))]
    with pytest.raises(ProgramError, match="pipeline_parallel_degree.*3"):
        _declared(pipeline, 3)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_embeddings = false": "tie_embeddings = true", "shard_degree = -1": "shard_degree = 2"}, ""),
        ({"[parallelism]": "[parallelism]\ncontext_parallel_degree = 2"}, "+cp=2"),
        (
            {
                "tie_embeddings = false": "experts = 4\nexperts_per_token = 2\nbalance_loss = 0.1",
                "[parallelism]": "[parallelism]\nexpert_parallel_degree = 2",
            },
            "+ep=2",
        ),
    ],
    ids=["tied", "cp", "ep"],
)
def test_a_config_of_a_pipeline_and_more_is_proved(changes: dict[str, str], words: str, tmp_path: Path) -> None:
    """The example, of which the embedding is tied, sequences are cut, or layers have experts."""
    text = EXAMPLE.with_name("train_pipeline.toml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "train.toml"
    config.write_text(text)
    assert words in _declared(str(config), 4)[0]
    assert main(["verify", str(config), "--nproc", "4", "--steps", "1"]) == 0


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_example_of_a_pipeline_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    """As a user types it."""
    assert main(["verify", str(EXAMPLE.with_name("train_pipeline.toml")), "--nproc", "4", "--steps", "2"]) == 0
    assert "equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "strategy", "said"),
    [
        ("declared", "zero3+tp=4", "must divide the key and value heads, 2; nearest legal plan"),
        ("other_data_by_hand", "zero3+tp=2+sp", "found a division of its own; leave the words"),
        ("declared", "zero3+ep=2", "expert_parallel_degree = 2: expected experts in Llama, found none"),
        ("without_loss_fn", "zero3+pp=2", "expected Program.loss_fn=...., a function of .output, target."),
        ("another_loss_fn", "zero3+pp=2", r"expected loss_fn.model.inputs., target. to be loss.model, batch., 3"),
        ("with_dropout", "zero3+pp=2", "expected a forward without random numbers"),
        ("one_tensor", "zero3+pp=2", "expected batches .inputs, ..., target., .* found a Tensor"),
        (
            "staged",
            "zero3+pp=2+Interleaved1F1B+stages=4",
            "2 of 4 stages on each rank: expected a layer for each stage, found 4",
        ),
    ],
)
def test_what_cannot_be_divided_is_said_before_processes_start(program: str, strategy: str, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        verify(ENTRY + program, [parse_strategy(strategy)], world=4)


def test_the_command_says_it_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", ENTRY + "declared", "--strategies", "zero3+tp=4", "--nproc", "4"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
