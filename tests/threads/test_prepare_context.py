"""Context parallelism trains as one process: by `context_parallel_degree`, and by hand beside `fully_shard`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import RanksDisagree, context_parallel, fully_shard, prepare_fully_shard
from fullshard.train.model import Llama, LlamaShape
from tests.harness import installed, tolerance
from tests.harness.axes import assert_not_legal, hugging_face, llama
from tests.harness.models import adamw, assert_same_training, collect, seeded
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


# ---- without a plan ------------------------------------------------------------------------------------------

SHAPE = LlamaShape(vocab=29, layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, context=16)
STEPS, MOST = 3, 0.5


def packed_llama() -> Llama:
    model = Llama(SHAPE)
    model.init_weights(0)
    return model


def documents_of(step: int, replica: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, shifted labels of which the chunks have uneven numbers, and documents: (2, 16) each."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(SHAPE.vocab, (2, SHAPE.context + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 9 + replica :] = -100
    labels[1, :3] = -100
    documents = (torch.arange(SHAPE.context) >= 5 + step + replica).long().expand(2, -1)
    return tokens[:, :-1], labels, documents


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def alone(replicas: int, packed: bool) -> tuple[Any, list[float]]:
    """One process, on the batches of all replicas: the mean over all tokens. With documents each one by itself."""
    model = seeded(packed_llama)
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        batches = [documents_of(step, replica) for replica in range(replicas)]
        count = sum(int((labels != -100).sum()) for _, labels, _ in batches)
        total = torch.zeros(())
        for tokens, labels, documents in batches:
            border = int((documents[0] == 0).sum()) if packed else SHAPE.context
            for part in (slice(0, border), slice(border, SHAPE.context)):
                if tokens[:, part].numel():
                    at = torch.arange(SHAPE.context)[part]
                    total = total + summed(model(tokens[:, part], at), labels[:, part])
        loss = total / count
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MOST)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return collect(model, optimizer, losses), norms


def _trains(rank: int, dp: int, cp_degree: int, variant: str, packed: bool, recompute: str) -> tuple[Any, list[float]]:
    mesh = init_device_mesh("cpu", (dp, cp_degree), mesh_dim_names=("dp_shard", "cp"))
    data = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    model: Any = seeded(packed_llama)
    for block in model.layers:
        if recompute:
            forward = block.forward
            block.forward = lambda x, positions, forward=forward: checkpoint(
                forward, x, positions, use_reentrant=recompute == "reentrant"
            )
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    optimizer = adamw(model.parameters(), watched=False)
    cp = context_parallel(mesh["cp"], variant=variant)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels, documents = documents_of(step, mesh.get_local_rank("dp_shard"))
        with cp:
            tokens, labels = cp.split((tokens, labels), documents=documents if packed else None)
            loss = summed(model(tokens, cp.positions(SHAPE.context)), labels) / cp.tokens_per_rank(labels, data)
            loss.backward()
        norms.append(float(fullshard.clip_grad_norm_(model.parameters(), MOST)))
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(float(whole) / (dp * cp_degree))
    return collect(model, optimizer, losses), norms


CASES = [
    (1, 2, "ulysses", False, ""),
    (1, 2, "ring", True, ""),
    (1, 4, "ring", False, "other"),
    (1, 4, "ulysses", True, ""),
    (2, 2, "ring", True, "reentrant"),
    (2, 2, "ulysses", False, "other"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dp", "degree", "variant", "packed", "recompute"), CASES)
def test_a_llama_trains_as_one_process(dp: int, degree: int, variant: str, packed: bool, recompute: str) -> None:
    expected, wanted = alone(dp, packed)
    for actual, norms in run_ranks(dp * degree, _trains, dp, degree, variant, packed, recompute):
        assert_same_training(actual, expected)
        assert actual.losses == pytest.approx(expected.losses, rel=tolerance.figure(steps=STEPS))
        assert norms == pytest.approx(wanted, rel=tolerance.figure(steps=STEPS))


def _positions(rank: int) -> None:
    """Buffers that each block reads are cut in place, as torch's own context does it; without positions."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    whole, model = seeded(packed_llama), seeded(packed_llama)
    tokens, labels, _ = documents_of(0, 0)
    expected = whole(tokens)
    tables = [table for block in model.layers for table in (block.attention.rope_cos, block.attention.rope_sin)]
    with context_parallel(
        mesh,
        buffers=[tokens, *tables],
        buffer_seq_dims=[1, *[0] * len(tables)],
        no_restore_buffers=[tokens],
    ) as cp:
        found = cp.unsplit(model(tokens))
    assert (found - expected).abs().max() < tolerance.allowed(expected, whole)
    assert all(len(table) == SHAPE.context for table in tables)


def test_positions_by_buffers() -> None:
    run_ranks(2, _positions)
