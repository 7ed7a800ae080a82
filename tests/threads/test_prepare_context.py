"""`prepare_fully_shard` with `context_parallel_degree`: whole batches, one declaration, the training of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import RanksDisagree, prepare_fully_shard
from tests.harness import installed
from tests.harness.axes import assert_not_legal, hugging_face, llama
from tests.harness.models import seeded
from tests.harness.sequences import batch_of, check, loss_of_parts, shifted
from tests.harness.threads import run_ranks

CP, RING = {"context_parallel_degree": 2}, {"context_parallel_variant": "ring"}
TP = {"tensor_parallel_degree": 2}
COPIES = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world", "plan", "config"),
    [
        pytest.param(2, CP, None, id="cp"),
        pytest.param(4, {**CP, **RING}, {"activation_checkpointing": "units"}, id="ring-fsdp-recomputed"),
        pytest.param(4, {**CP, **TP, **RING}, None, id="cp-tp-sp"),
        pytest.param(4, {**CP, **COPIES}, None, id="cp-hsdp"),
        pytest.param(4, {"context_parallel_degree": 4}, None, id="cp4", marks=pytest.mark.slow),
        pytest.param(4, CP, None, id="cp-fsdp", marks=pytest.mark.slow),
        pytest.param(4, {**CP, **TP, "enable_sequence_parallel": False}, None, id="cp-tp", marks=pytest.mark.slow),
        pytest.param(8, {**CP, **TP}, None, id="cp-fsdp-tp-sp", marks=pytest.mark.slow),
        pytest.param(
            8, {**CP, **COPIES, "data_parallel_shard_degree": 2}, None, id="cp-hsdp-8", marks=pytest.mark.slow
        ),
        pytest.param(8, {**CP, **COPIES, **TP}, None, id="cp-hsdp-tp-sp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.hang_after(300)
def test_plans_with_cp_train_as_one_process(world: int, plan: dict[str, Any], config: Any) -> None:
    """Parameters, optimizer state, norms, and the loss, which each rank has whole."""
    printed = "\n".join(check(world, llama, plan, config))
    assert f"cp {plan['context_parallel_degree']}: ranks 0, " in printed


@pytest.mark.filterwarnings("ignore")  # transformers' own, on import
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("plan", [CP, {**CP, **RING}, {**CP, **TP}], ids=["auto", "ring", "tp"])
def test_decoders_of_hugging_face(kind: str, plan: dict[str, Any]) -> None:
    """With labels as they come: shifted and counted by the library, the loss by the model."""
    installed.needs("transformers")
    world = 4 if "tensor_parallel_degree" in plan else 2
    check(world, partial(hugging_face, kind), plan)


def _bert(name: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    made = seeded(lambda: getattr(transformers, name)(config))
    for named, parameter in made.named_parameters():
        # A softmax does not see it: its gradient is rounding, which Adam makes steps of.
        parameter.requires_grad_(not named.endswith("key.bias"))
    return made


@pytest.mark.filterwarnings("ignore")  # transformers' own, on import
def test_labels_of_masked_tokens_are_not_shifted() -> None:
    """As the model's own loss has it; with the axis, and without it."""
    installed.needs("transformers")
    for plan in (CP, {"data_parallel_shard_degree": 2}):
        check(2, partial(_bert, "BertForMaskedLM"), plan)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_of_sequences_that_each_rank_computes_of_its_part_is_refused() -> None:
    """A class is pooled from the first token, and only one rank has it. Without gradients nobody compares."""
    installed.needs("transformers")
    ids = batch_of(0, 0)["input_ids"]

    def rank_main(rank: int) -> list[str]:
        said = []
        for labels in (torch.tensor([0, 1]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])):
            model = _bert("BertForSequenceClassification")
            prepared = prepare_fully_shard(model, parallelism=CP, show=False)
            with pytest.raises(ValueError) as caught, prepared.context() as cp:
                parts = cp.split({"input_ids": ids, "labels": labels})
                assert torch.equal(parts["labels"], labels)
                model(**parts)
            said.append(str(caught.value))
        with torch.no_grad(), prepared.context() as cp:
            model(**cp.split({"input_ids": ids, "labels": labels}))
        with prepared.context() as cp:
            cp.split(ids)
            same = F.mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2))
            of_tokens = F.mse_loss(torch.full((2, 4, 3), float(rank), requires_grad=True), torch.zeros(2, 4, 3))
            assert float(of_tokens.detach()) == rank
        assert float(same.detach()) == 1.0
        return said

    for said in run_ranks(2, rank_main):
        assert len(said) == 2 and all(
            "expected a loss of tokens, or one that is the same on all" in one for one in said
        )


def test_without_cp_the_same_program_trains_whole_sequences() -> None:
    check(2, llama, {"data_parallel_shard_degree": 2})
    with torch.no_grad():
        assert torch.equal(shifted(torch.tensor([[1, 2]])), torch.tensor([[2, -100]]))


# ---- relations -------------------------------------------------------------------------------------------------------


def test_batches_that_differ_along_cp_are_named() -> None:
    """Before the split all ranks of cp have one batch; the error names who has another one, in the forward."""

    def rank_main(rank: int) -> None:
        model = llama()
        prepared = prepare_fully_shard(model, parallelism={**CP, **RING}, show=False)
        with pytest.raises(RanksDisagree) as raised, prepared.context() as cp:
            loss_of_parts(model, cp, batch_of(0, rank))
        pair = (0, 1) if rank < 2 else (2, 3)
        for text in ("same sequences on all ranks that share them", *(f"rank {one}: " for one in pair)):
            assert text in str(raised.value)
        assert str(raised.value).startswith("context_parallel over cp: ")
        with prepared.context() as cp:
            loss_of_parts(model, cp, batch_of(0, rank // 2)).backward()

    run_ranks(4, rank_main)


def test_what_is_outside_of_the_context_or_not_split() -> None:
    """Without gradients whole sequences are right; with them, each of these would be wrong or wasted."""

    def rank_main(rank: int) -> None:
        model = llama()
        prepared = prepare_fully_shard(model, parallelism=CP, show=False)
        tokens = batch_of(0, 0)["input_ids"]
        with torch.no_grad():
            assert torch.allclose(model(tokens), llama()(tokens), atol=1e-5)
        with pytest.raises(RuntimeError, match="cp: expected forwards with gradients inside of the context.*outside"):
            model(tokens)
        with prepared.context() as cp:
            torch.distributed.barrier()
            with pytest.raises(RuntimeError, match=r"found one before split\(\) inside"):
                model(tokens)
            loss_of_parts(model, cp, batch_of(0, 0)).backward()

    run_ranks(2, rank_main)


def test_a_mean_over_other_things_than_tokens_stays_what_it_is() -> None:
    """Only the mean over labels of this rank's tokens is wrong by itself."""

    def rank_main(rank: int) -> None:
        model = llama()
        prepared = prepare_fully_shard(model, parallelism=CP, show=False)
        logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        target, weight = torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        expected = F.cross_entropy(logits, target)
        rows = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([[1, 2, 3, -1, -1, -1, 4, 0], [-1, -1, -1, 4, 4, 2, 1, 0]])
        options: Any = {"weight": weight, "ignore_index": -1, "label_smoothing": 0.1}
        of_all = F.cross_entropy(rows.flatten(0, 1), labels.flatten(), **options)
        with prepared.context() as cp:
            part, mine = cp.split((rows, labels))
            assert torch.equal(F.cross_entropy(logits, target), expected)
            found = F.cross_entropy(part.flatten(0, 1), mine.flatten(), **options)
            assert torch.allclose(found, of_all, rtol=1e-5)
            soft = F.cross_entropy(part.flatten(0, 1), part.flatten(0, 1).softmax(-1))
            summed = F.cross_entropy(part.flatten(0, 1), mine.flatten(), ignore_index=-1, reduction="sum")
        assert torch.equal(soft, F.cross_entropy(part.flatten(0, 1), part.flatten(0, 1).softmax(-1)))
        assert torch.equal(
            summed, F.cross_entropy(part.flatten(0, 1), mine.flatten(), ignore_index=-1, reduction="sum")
        )

    run_ranks(2, rank_main)


def test_a_unit_without_the_ranks_along_cp_is_named() -> None:
    """On the mesh of one part of the sequences it would train another model on the ranks along cp."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        data = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")

        def wrap(name: str, module: nn.Module) -> Any:
            return {"mesh": mesh["dp_shard"]} if name == "layers.1" else name == "layers.0"

        model = llama()
        prepared = prepare_fully_shard(model, mesh=data, parallelism=CP, wrap_fn=wrap, show=False)
        with (
            pytest.raises(
                RuntimeError, match=r"^cp: expected the parameters of layers\.1 on the 4 ranks .* of 2 ranks"
            ),
            prepared.context() as cp,
        ):
            loss_of_parts(model, cp, batch_of(0, prepared.share[0]))

    run_ranks(4, rank_main)


def test_cp_left_out_is_named_by_the_tokens_too() -> None:
    """By hand: the mean over a mesh without cp, of which fully_shard has the gradients."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        cp = fullshard.context_parallel(mesh["cp"])
        labels = torch.zeros(1, 4, dtype=torch.int64)
        with pytest.raises(ValueError, match="expected the ranks along cp in it.*found dp_shard"):
            cp.tokens_per_rank(labels, mesh["dp_shard"])
        data = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        assert float(cp.tokens_per_rank(labels, data)) == 4

    run_ranks(4, rank_main)


@pytest.mark.parametrize(
    ("sizes", "plan", "said"),
    [
        ({}, {"context_parallel_degree": 3}, "are 3 of 4 ranks; nearest legal plan"),
        ({}, RING, 'context_parallel_variant = "ring": has no effect with context_parallel_degree = 1'),
        ({}, {**CP, "context_parallel_variant": "rings"}, 'expected one of "auto", "ulysses", "ring"'),
        (
            {"heads": 6, "kv_heads": 2, "dim": 24},
            {"context_parallel_degree": 4, "context_parallel_variant": "ulysses"},
            "context_parallel_degree = 4: must divide the query heads of a rank, 6; nearest legal plan: "
            "data_parallel_shard_degree = 2, context_parallel_degree = 2",
        ),
    ],
    ids=["ranks", "alone", "word", "heads"],
)
@pytest.mark.threads_only(reason="errors before anything is sent")
def test_what_is_not_legal_is_one_line(sizes: dict[str, int], plan: dict[str, Any], said: str) -> None:
    assert_not_legal(partial(llama, **sizes), plan, said)


def test_lengths_that_do_not_divide_name_lengths_and_degrees() -> None:
    def rank_main(rank: int) -> None:
        prepared = prepare_fully_shard(llama(), parallelism=CP, show=False)
        with pytest.raises(ValueError, match="divides by 4 .* found 6; the nearest: 4 and 8, or degree 1 or 3"):
            prepared.context().split(torch.zeros(1, 6, dtype=torch.int64))

    run_ranks(2, rank_main)
