"""A pipeline beside what its stages share: sequences that ranks of a stage cut, parameters of several stages, and
balance losses of experts in each of them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import checkpoint, prepare_fully_shard
from tests.harness import installed
from tests.harness.axes import STEPS, VOCABULARY, hugging_face, llama
from tests.harness.installed import clear_redistribution_cache, clear_sharding_cache
from tests.harness.models import Trained, adamw, assert_same_training, collect, full_copy, seeded
from tests.harness.pipelines import TIMEOUT, batch, check, loss_fn, part_of, plainly, train
from tests.harness.pool import pool
from tests.procs.test_prepare_pipeline import LOOPS, TWO, V

slow = partial(pytest.param, marks=pytest.mark.slow)
four = partial(llama, layers=4)
tied = partial(llama, layers=4, tied=True)
CP = {**TWO, "context_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}
PARTS = [["embedding"], ["layers.0", "layers.1", "layers.2", "layers.3", "norm", "output"]]


def gpt2(**options: Any) -> nn.Module:
    """With a sum of two embeddings before its blocks, and a tied head."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=4, n_head=4, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, attn_implementation="sdpa", **options,
    )  # fmt: skip
    return seeded(lambda: transformers.GPT2LMHeadModel(config))


def of_hugging_face(kind: str, **options: Any) -> partial[nn.Module]:
    return partial(hugging_face, kind, tie_word_embeddings=True, num_hidden_layers=4, **options)


class Summed(nn.Module):
    """With a sum of two tables before its blocks, a tied head, and shapes that it reads of its input, as GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 12), nn.Embedding(8, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> Tensor:
        shape = inputs_embeds.shape[:-1] if input_ids is None else input_ids.shape
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.places(torch.arange(shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.view(*shape, 12))  # type: ignore[no-any-return]


# ---- sequences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "make", "plan"),
    [
        (4, partial(llama, layers=2), CP),
        slow(4, four, {**CP, **LOOPS, "context_parallel_variant": "ring"}),
        slow(4, four, {**CP, "pipeline_parallel_schedule": "InterleavedZeroBubble"}),
        slow(8, four, CP),
        slow(8, four, {**CP, **TP}),
        slow(8, four, {**CP, **TP, "enable_loss_parallel": True}),
        slow(8, four, {**CP, "data_parallel_replicate_degree": 2}),
        slow(4, partial(hugging_face, "Llama", num_hidden_layers=4), CP),
        slow(4, gpt2, CP),
        slow(4, partial(llama, layers=4, experts=4), {**CP, "expert_parallel_degree": 2}),
        slow(8, partial(llama, layers=4, experts=4), {**CP, "expert_parallel_degree": 4}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_stages_cut_sequences(world: int, make: Any, plan: dict[str, Any]) -> None:
    """CP x PP, also with shards, copies and divided layers: positions are those of the whole sequences."""
    quick = make.keywords == {"layers": 2} if isinstance(make, partial) else False
    if not quick and make is not four:
        installed.needs("transformers")
    check(world, make, plan, steps=range(1 if quick else STEPS))


def uncut(rank: int, what: str) -> str:
    """A step of a pipeline with `cp` that cannot be; the error of this rank."""
    make = partial(hugging_face, "Llama", num_hidden_layers=4) if what == "mask" else four
    prepared = prepare_fully_shard(make(), parallelism=CP, loss_fn=loss_fn, show=False)
    x, y = batch(0, prepared.share[0], 6 if what == "length" else 8)
    if what == "batch" and rank % 2:
        x = x + 1
    kwargs = {"attention_mask": torch.ones_like(x).tril(-1) + torch.eye(*x.shape)} if what == "mask" else {}
    try:
        prepared.step(x, target=y, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("batch", "RuntimeError: pp and cp: expected the ranks 0, 1, 2, 3 to begin with the same batch in the same"),
        slow(
            "length",
            "ValueError: context_parallel: expected a length that divides by 4 .* found 6; the nearest: 4 and 8",
        ),
        slow("mask", "ValueError: cp: expected sequences of one document without padding in 2 micro-batches, found"),
    ],
)
def test_batches_that_cannot_be_cut_are_named(what: str, said: str) -> None:
    """On all ranks, before anything is computed."""
    for told in pool(4).run(uncut, what, timeout=TIMEOUT):
        assert re.match(said, told, re.DOTALL), told


# ---- parameters of several stages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "make", "plan", "told"),
    [
        (2, partial(seeded, Summed), TWO, "tokens.weight = head.weight in the stages 0 and 1"),
        slow(2, tied, TWO, "embedding.weight in the stages 0 and 1"),
        slow(2, gpt2, TWO, "transformer.wte.weight = lm_head.weight in the stages 0 and 1"),
        slow(2, of_hugging_face("Llama"), LOOPS, "model.embed_tokens.weight = lm_head.weight in the stages 0 and 3"),
        slow(2, of_hugging_face("Gemma"), TWO, "model.embed_tokens.weight = lm_head.weight in the stages 0 and 1"),
        slow(2, of_hugging_face("Gemma2", attn_implementation="eager"), TWO, "in the stages 0 and 1"),
        slow(2, of_hugging_face("Qwen3"), {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"}, ""),
        slow(2, tied, LOOPS, "in the stages 0 and 3"),
        slow(2, tied, {**LOOPS, "pipeline_parallel_schedule": "InterleavedZeroBubble"}, "in the stages 0 and 3"),
        slow(4, tied, {"pipeline_parallel_degree": 4}, "in the stages 0 and 3"),
        slow(4, tied, {**TWO, "data_parallel_replicate_degree": 2}, "in the stages 0 and 1"),
        slow(4, tied, {**TWO, **TP}, "in the stages 0 and 1"),
        slow(4, of_hugging_face("Llama"), {**TWO, **TP}, "in the stages 0 and 1"),
        slow(8, tied, CP, "in the stages 0 and 1"),
        slow(8, gpt2, CP, "in the stages 0 and 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_stages_share_a_tied_parameter(world: int, make: Any, plan: dict[str, Any], told: str) -> None:
    """Its gradient is the sum over both, in a norm it counts once, and both copies have one optimizer state."""
    if make is not tied and plan != TWO:
        installed.needs("transformers")
    assert told in "\n".join(line for line in check(world, make, plan) if line.startswith("shared: "))


def crossed(rank: int, make: Any, plans: list[Any], folder: str) -> list[Trained]:
    """Saved under each plan, loaded under the next; what each of them has."""
    # Of the groups of another test.
    clear_redistribution_cache()
    clear_sharding_cache()
    found = []
    for number, plan in enumerate(plans):
        model = make()
        optimizer = adamw(model.parameters(), watched=False)
        prepared = prepare_fully_shard(model, optimizer, parallelism=plan, loss_fn=loss_fn, show=False)
        if number == 0:
            train(model, optimizer, prepared, [0])
        else:
            params, states = checkpoint.get_state_dict(model, optimizer)
            checkpoint.load({"model": params, "optimizer": states}, checkpoint_id=f"{folder}/{number - 1}")
            checkpoint.set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=states)
        found.append(collect(model, optimizer))
        params, states = checkpoint.get_state_dict(model, optimizer)
        checkpoint.save({"model": params, "optimizer": states}, checkpoint_id=f"{folder}/{number}")
    return found


@pytest.mark.parametrize(
    ("world", "make", "plans"),
    [
        (2, tied, [TWO, None, LOOPS]),
        slow(4, tied, [TWO, None, LOOPS, CP, {**TWO, "data_parallel_replicate_degree": 2}]),
        slow(4, gpt2, [TWO, None, LOOPS, CP]),
        slow(4, of_hugging_face("Llama"), [{**TWO, **TP}, None, LOOPS, TWO]),
        slow(4, four, [TWO, None, LOOPS, {**TWO, **TP, "module_fqns_per_model_part": PARTS}, TWO]),
    ],
    ids=["quick", "llama", "gpt2", "transformers", "untied"],
)
def test_a_checkpoint_of_a_tied_model_crosses_splits(world: int, make: Any, plans: list[Any], tmp_path: Path) -> None:
    """Bitwise, between stages that share a parameter and a model that has it once; in the files it is once."""
    ranks = pool(world).run(crossed, make, plans, str(tmp_path), timeout=TIMEOUT)
    whole = ranks[0][1]
    names = {name for name, _ in make().named_parameters()}
    assert {*whole.params} == names and len(whole.state) == 3 * len(names)
    for found in ranks:
        for trained in found:
            assert_same_training(trained, part_of(whole, trained.params), 0)
    for number in range(len(plans)):
        assert {name for found in ranks for name in found[number].params} == names


def twice(rank: int, folder: str) -> list[Any]:
    """Two steps' gradients without an update between them; the norm; and where a stage's copy was changed alone."""
    model = tied()
    prepared = prepare_fully_shard(model, parallelism=TWO, loss_fn=loss_fn, show=False)
    for step in range(2):
        x, y = batch(step, 0)
        prepared.step(x, target=y)
    weight: Any = model.get_parameter("embedding.weight")
    norm, stats = float(fullshard.clip_grad_norm_(model.parameters(), 1e9)), fullshard.grad_stats(model)
    with torch.no_grad():
        weight.add_(rank)
    with pytest.raises(ValueError, match=r"expected prepared\.step for a pipeline with tied parameters, found"):
        assert prepared.pipeline.schedule  # type: ignore[union-attr]
    with pytest.raises(checkpoint.CheckpointMismatch, match=r"model\.embedding\.weight"):
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    return [weight.grad.full_tensor().clone(), norm, stats.model.norm]


def test_gradients_of_steps_are_added_and_copies_stay_equal(tmp_path: Path) -> None:
    model = tied()
    for step in range(2):
        x, y = batch(step, 0)
        loss_fn(model(x), y).backward()
    gradient, norm = model.embedding.weight.grad, float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert gradient is not None
    (first, *norms), (second, *others) = pool(2).run(twice, str(tmp_path), timeout=TIMEOUT)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, gradient, rtol=1e-5, atol=1e-6)
    assert [*norms, *others] == pytest.approx([norm] * 4, rel=1e-5)


def made(rank: int, make: Any, plan: Any) -> dict[str, Tensor]:
    """The values that initialisers make on the meta device."""

    def init(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(parameter)
            elif not type(module).__name__.startswith("Absent"):
                nn.init.constant_(parameter, len(name))
        if hasattr(module, "init_rope"):
            module.init_rope()

    model = make().to_empty(device="meta")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    prepare_fully_shard(model, parallelism=plan, init=init, loss_fn=loss_fn, show=False)
    return {name: full_copy(p) for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("make", "plan"), [(tied, TWO), slow(tied, LOOPS), slow(of_hugging_face("Llama"), TWO), slow(gpt2, LOOPS)]
)
def test_initial_values_are_those_of_one_stage(make: Any, plan: dict[str, Any]) -> None:
    """Which one process would have, too: of the module that is initialised last."""
    expected = pool(2).run(made, make, None, timeout=TIMEOUT)[0]
    for found in pool(2).run(made, make, plan, timeout=TIMEOUT):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


# ---- experts ---------------------------------------------------------------------------------------------------------

of_experts = partial(llama, layers=4, experts=4, experts_per_token=2)
EP = {"expert_parallel_degree": 2}


def balanced(make: Any = of_experts, balance: float = 0.1) -> nn.Module:
    """With a balance loss in each layer, and a router of which some experts get no tokens."""
    model = make()
    for module in model.modules():
        if isinstance(module, fullshard.MixtureOfExperts):
            module.balance = balance
            with torch.no_grad():
                module.router.weight[3] = -module.router.weight[0]
    return model


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (2, TWO),
        slow(4, {**TWO, **EP}),
        slow(4, {**LOOPS, **EP}),
        slow(4, {**V, **EP}),
        slow(2, {**LOOPS, "pipeline_parallel_schedule": "InterleavedZeroBubble"}),
        slow(8, {**TWO, **EP, **TP}),
        slow(8, {**TWO, **EP, "data_parallel_replicate_degree": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_balance_losses_of_all_stages_reach_the_gradient(world: int, plan: dict[str, Any]) -> None:
    """Also of the first stage, which has no loss; the loss of the step has them."""
    axes = fullshard.Parallelism(**plan).on(world)
    number = plan.get("pipeline_parallel_num_microbatches", 2 * axes.pp if "pipeline_parallel_schedule" in plan else 2)
    check(world, balanced, {**plan, "pipeline_parallel_num_microbatches": number}, micro=number)


def test_they_count() -> None:
    """Without them the first stage would train something else."""
    with_them, without = (plainly(partial(balanced, balance=b), 1, range(1), 2)[1][0].value for b in (0.1, 0.0))
    assert abs(with_them - without) > 0.01 * without


@pytest.mark.sample(1)
@pytest.mark.parametrize(("make", "plan", "shares"), [(balanced, EP, 2), (llama, {"context_parallel_degree": 2}, 1)])
def test_a_step_without_a_pipeline_does_the_same(make: Any, plan: dict[str, Any], shares: int) -> None:
    """Adds balance losses; cuts sequences."""
    expected, _, losses = plainly(make, shares, range(1))
    ranks = pool(2).run(alone, make, plan, timeout=TIMEOUT)
    for trained, loss in ranks:
        assert_same_training(trained, expected)
        assert min(abs(loss - its) for its in losses[0]) < 1e-5
    assert sum(loss for _, loss in ranks) / 2 == pytest.approx(sum(losses[0]) / shares, rel=1e-5)


def alone(rank: int, make: Any, plan: dict[str, Any]) -> tuple[Trained, float]:
    model = make()
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, parallelism=plan, loss_fn=loss_fn, show=False)
    _, losses = train(model, optimizer, prepared, [0])
    return collect(model, optimizer), losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_of_transformers_in_stages(kind: str) -> None:
    installed.needs("transformers")
    sizes = {"Mixtral": {"num_local_experts": 4}, "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8}}[kind]
    make = partial(hugging_face, kind, num_experts_per_tok=2, num_hidden_layers=4, **sizes)
    check(4, make, {**TWO, **EP})
    check(4, make, {**LOOPS, **EP})
