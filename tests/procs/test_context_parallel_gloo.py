"""`context_parallel` between processes: models of transformers train as in one process; ranks that fail or differ."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from benchmarks.counting import MemoryCounter
from fullshard import PeerFailed, RanksDisagree, context_parallel, fully_shard
from fullshard.layout import AttentionShape
from tests.harness import tolerance
from tests.harness.hang import patience
from tests.harness.models import adamw, assert_same_training, collect, seeded
from tests.harness.packages import offline
from tests.harness.pool import pool

VOCABULARY, LENGTH, STEPS = 61, 16, 2


def model_of(name: str, **options: Any) -> Any:
    offline()
    import transformers

    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    return seeded(lambda: getattr(transformers, f"{name}ForCausalLM")(config))


def batch_of(step: int, kind: str) -> dict[str, Tensor]:
    """As a collator makes it: labels are not shifted."""
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(5 + step), torch.arange(LENGTH - 5 - step)]).expand(2, -1)
        labels[:, 5 + step] = -100  # the first token of a document is nobody's next one
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 11:] = 0
        labels[1, 11:] = -100
    if kind == "uneven":
        batch = {key: value[:, :13] for key, value in batch.items()}
    return batch


def _alone(model: Any, kind: str) -> tuple[Any, list[float]]:
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = model(**batch_of(step, kind), use_cache=False).loss  # with a cache, packing is not seen
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return collect(model, optimizer, losses), losses


def _trains(rank: int, name: str, kind: str, variant: str, gradient_checkpointing: bool) -> tuple[Any, Any]:
    expected, _ = _alone(model_of(name), kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = model_of(name)
    if gradient_checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters(), watched=False)
    cp = context_parallel(mesh, variant=variant)
    losses = []
    for step in range(STEPS):
        with cp:
            batch = cp.split(batch_of(step, kind), pad_with=0)
            loss = model(**batch, use_cache=False, num_items_in_batch=cp.tokens_per_rank(batch["labels"])).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole) / dist.get_world_size())
    return collect(model, optimizer, losses), expected


HF = [
    (2, "Llama", "packed", "ring", False),
    (2, "Qwen3", "plain", "ulysses", True),
    (2, "Llama", "padded", "ulysses", False),
    (2, "Qwen2", "uneven", "ring", False),
    (4, "Llama", "plain", "ring", True),
    (4, "Qwen3", "packed", "ulysses", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name", "kind", "variant", "recomputes"), HF)
def test_models_of_transformers(world: int, name: str, kind: str, variant: str, recomputes: bool) -> None:
    for actual, expected in pool(world).run(_trains, name, kind, variant, recomputes, timeout=110.0):
        assert_same_training(actual, expected)
        assert actual.losses == pytest.approx(expected.losses, rel=tolerance.figure(steps=STEPS))


def _refused(rank: int) -> list[str]:
    cp = context_parallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    found = []
    # What transformers makes of positions without the mask of `split`, where chunks are no neighbours: on rank 0. And
    # models whose attention is another one.
    for name, options, without in (
        ("Llama", {}, ("attention_mask",)),
        ("Llama", {"attn_implementation": "eager"}, ()),
        ("Mistral", {"sliding_window": 12}, ()),
    ):
        model = model_of(name, **options)
        try:
            with cp:
                part = {key: value for key, value in cp.split(batch_of(0, "plain")).items() if key not in without}
                dist.barrier()
                model(**part, use_cache=False)
        except (ValueError, NotImplementedError, PeerFailed) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_models_that_would_be_wrong_are_refused() -> None:
    for rank, (masked, eager, window) in enumerate(pool(2).run(_refused, timeout=110.0)):
        assert "an attn_mask with the 16 keys of the whole sequence, found (2, 1, 8, 8)" in masked
        assert masked.startswith(("ValueError", "PeerFailed")[rank])
        assert eager.startswith("NotImplementedError") and 'attn_implementation="sdpa"' in eager
        assert "a window of 12 in a sequence of 16 tokens" in window


# ---- ranks that fail or differ ---------------------------------------------------------------------------------------


def _attention(cp: Any, length: int = 8) -> Tensor:
    query = torch.ones(1, 2, length, 4, requires_grad=True)
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def _fails(rank: int, where: str, variant: str) -> tuple[str, float, float]:
    cp = context_parallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), variant=variant)
    with cp:
        _attention(cp).sum().backward()
    said, began = "", time.monotonic()
    try:
        with cp:
            if where == "before" and rank == 1:
                raise ValueError("no batch")
            out = _attention(cp)
            if rank == 1:
                raise ValueError("no loss")
            out.sum().backward()
            _attention(cp)
    except (PeerFailed, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    with cp:  # and then they continue
        _attention(cp).sum().backward()
        whole = cp.unsplit(torch.full((1, 4), float(rank)))
    return said, seconds, float(whole.sum())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("where", "variant"), [("before", "ring"), ("between", "ulysses"), ("between", "ring")])
def test_a_rank_that_raises_inside_is_named(where: str, variant: str) -> None:
    (other, seconds, total), (own, _, _) = pool(2).run(_fails, where, variant)
    text = "no batch" if where == "before" else "no loss"
    assert own == f"ValueError: {text}"
    assert other.startswith("PeerFailed") and "rank 1" in other and text in other and "context_parallel" in other
    assert seconds < patience(60) and total == 4.0


def _differs(rank: int, what: str) -> str:
    cp = context_parallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    try:
        with cp:
            if what == "batch":
                cp.split(torch.full((1, 16), rank))
            _attention(cp, 8 + 4 * rank * (what == "length"))
    except RanksDisagree as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["length", "batch"])
def test_ranks_with_other_sequences_are_named(what: str) -> None:
    for found in pool(2).run(_differs, what):
        assert "expected the same sequences on all ranks that share them, found rank 0: " in found
        assert "; rank 1: " in found
        if what == "length":
            assert "(1, 2, 8, 4) float32" in found and "(1, 2, 12, 4) float32" in found


def _parts_ways(rank: int, what: str) -> str:
    """Both ranks attended once before."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cp = context_parallel(mesh, variant="ring")
    if what in ("variant", "load_balance"):
        options: dict[str, Any] = {"variant": "ulysses"} if what == "variant" else {"load_balance": False}
        cp = context_parallel(mesh, **{"variant": "ring", **(options if rank else {})})
    try:
        with cp:
            _attention(cp)
            if rank and what == "count":
                _attention(cp)
            elif what == "kind":
                _attention(cp, 12 if rank else 8)
    except RanksDisagree as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("variant", "ring, (1, 2, 8, 4)", "ulysses, (1, 2, 8, 4)"),
        ("load_balance", "ring, (1, 2, 8, 4)", "ring without load_balance"),
        ("count", "the end of the context, after 1 calls of attention", "call 2 of attention, ring"),
        pytest.param(
            "kind",
            "call 2 of attention, ring, (1, 2, 8",
            "call 2 of attention, ring, (1, 2, 12",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_attend_to_different_things_are_named(what: str, first: str, second: str) -> None:
    """None of them waits for ever, also where one has left the context and the other attends once more."""
    for found in pool(2).run(_parts_ways, what):
        assert first in found.partition("rank 1")[0] and second in found.partition("rank 1")[2]


# ---- memory ----------------------------------------------------------------------------------------------------------

MEMORY = AttentionShape(batch=1, length=1024, heads=8, kv_heads=4, head_dim=16, itemsize=4)


def _held(rank: int, world: int, variant: str) -> int:
    """Bytes of storages that one attention makes, at most at once, forward and backward."""
    from fullshard.extras import sequence_attention

    sequence_attention._SLICE_NUMEL = 1
    cp = context_parallel(init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), variant=variant)
    shapes = [(1, heads, MEMORY.length // world, MEMORY.head_dim) for heads in (8, 4, 4, 8)]
    *parts, weight = (torch.ones(shape, requires_grad=at < 3) for at, shape in enumerate(shapes))

    def run() -> None:
        with cp:
            out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)  # type: ignore[arg-type]
            torch.autograd.grad(out, parts, weight)

    def peak() -> int:
        with MemoryCounter() as counter:
            counter.mark("attention")
            run()
        return counter.peak("attention")

    run()
    # The least: a thread of gloo lets go of a message's tensors some time after the message, late on a busy machine.
    return min(peak() for _ in range(5))


@pytest.mark.parametrize("variant", ["ulysses", "ring"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_of_a_rank_is_what_is_counted(world: int, variant: str) -> None:
    """By terms, in heads of this rank's tokens in float32. Beside them there are at most six numbers for each query and
    head, such as the logarithms of sums."""
    heads, kv_heads = MEMORY.heads, MEMORY.kv_heads
    terms = {
        # The result, and queries' gradients; keys and values that are saved, that are here, and that arrive; their
        # gradients, which leave and arrive; and the gradients of a quarter of the heads, of half of the keys.
        "ring": 2 * heads + (2 + 2 * min(world - 1, 2)) * kv_heads + (2 + 2) * kv_heads + (heads + kv_heads) / 4,
        # Here: the result of all heads. Of whole sequences: queries, keys, values and the result, which are saved, the
        # gradient of the result, and those of the other three, which leave beside.
        "ulysses": heads + (2 * heads + 2 * kv_heads) + heads + (heads + 2 * kv_heads),
    }[variant]
    unit = MEMORY.length // world * MEMORY.head_dim * MEMORY.itemsize
    for found in pool(world).run(_held, world, variant):
        assert 0 <= found / unit - terms <= 6 * heads / MEMORY.head_dim, (found / unit, terms)


def _norm(rank: int) -> tuple[float, float]:
    """Of gradients over data and context ranks together."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = model_of("Llama")
    whole = model_of("Llama")
    whole(**batch_of(0, "plain")).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    fully_shard(model, mesh=mesh)
    cp = context_parallel(mesh)
    with cp:
        batch = cp.split(batch_of(0, "plain"))
        model(**batch, use_cache=False, num_items_in_batch=cp.tokens_per_rank(batch["labels"])).loss.backward()
    return float(fullshard.clip_grad_norm_(model.parameters(), 1.0)), float(expected)


def test_the_norm_of_gradients() -> None:
    for found, expected in pool(2).run(_norm, timeout=110.0):
        assert found == pytest.approx(expected, rel=tolerance.figure())
