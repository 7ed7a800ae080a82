"""`prepare_fully_shard` with `pipeline_parallel_degree`: every schedule equals one process, from one declaration."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import prepare_fully_shard
from fullshard.migrate.schedules import SCHEDULES
from tests.harness import installed
from tests.harness.axes import VOCABULARY, hugging_face, llama
from tests.harness.errors import RanksFailed
from tests.harness.installed import fails_before
from tests.harness.models import adamw, seeded
from tests.harness.pipelines import TIMEOUT, batch, check, loss_fn, planned, train
from tests.harness.pool import pool
from tests.procs.test_pipelining import Reductions

TWO = {"pipeline_parallel_degree": 2}
SENDS_TO_ITSELF = fails_before(
    (2, 12), "before the first step a rank sends from one stage of its own to the next, which gloo cannot", half="both"
)
four = partial(llama, layers=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "reshard"),
    [
        # Refused before anything is sent, in every torch.
        pytest.param(name, reshard, marks=SENDS_TO_ITSELF if found.v and reshard in ("default", False) else ())
        for name, found in SCHEDULES.items()
        for reshard in ("default", True, False, 2)
    ],
)
def test_every_schedule_trains_as_one_process_or_is_refused(schedule: str, reshard: Any) -> None:
    """Four stages on two ranks where a schedule has several, two shards of each. The default keeps weights."""
    plan = {**TWO, "pipeline_parallel_schedule": schedule, "pipeline_parallel_num_microbatches": 4}
    config = {"reshard_after_forward": reshard}
    if SCHEDULES[schedule].splits and reshard in (True, 2):
        with pytest.raises(RanksFailed, match=rf"reshard_after_forward = {str(reshard).lower()} of \S+: {schedule} c"):
            pool(4).run(planned, four, plan, config, range(1), timeout=TIMEOUT)
        return
    printed = "\n".join(check(4, four, plan, config))
    assert f"pipeline: {schedule}; this rank has" in printed


# ---- beside other axes -----------------------------------------------------------------------------------------------

V = {**TWO, "pipeline_parallel_schedule": "ZBVZeroBubble"}
LOOPS = {**TWO, "pipeline_parallel_schedule": "Interleaved1F1B"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (4, {**TWO, "tensor_parallel_degree": 2}),
        (4, {**LOOPS, "tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
        (4, {**TWO, "tensor_parallel_degree": 2, "enable_loss_parallel": True}),
        (4, {**TWO, "data_parallel_replicate_degree": 2}),
        (4, {"pipeline_parallel_degree": 4}),
        (2, LOOPS),
        (8, {**TWO, "tensor_parallel_degree": 2}),
        (8, {**TWO, "data_parallel_replicate_degree": 2}),
        (8, {**LOOPS, "tensor_parallel_degree": 2, "enable_loss_parallel": True}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value.values())),
)
def test_a_pipeline_and_other_axes(world: int, plan: dict[str, Any]) -> None:
    """PP x TP, with sequence and loss parallelism, PP x HSDP, PP alone, and PP x TP x FSDP, with recomputation."""
    check(world, four, plan, {"activation_checkpointing": "units"})


# ---- models ----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A user's model: a chain of a table, blocks with a residual inside, and a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(Residual() for _ in range(layers))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Outside(Plain):
    """The residual is between the blocks, where a stage does not see it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Again(Plain):
    """The blocks read the first embedding, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.table(tokens)
        for layer in self.layers[:3]:
            x = layer(x)
        return self.head(self.layers[3](x) * first.mean())  # type: ignore[no-any-return]


class Twice(Plain):
    """The blocks run in two rounds."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class InPlace(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x.mul_(2.0))
        return self.head(x)  # type: ignore[no-any-return]


PARTS = [["table", "layers.0"], ["layers.1", "layers.2", "layers.3", "head"]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "plan", "lines"),
    [
        (Plain, {**TWO, "module_fqns_per_model_part": PARTS}, ("0: table, layers.0 (", "1: layers.1 to head (")),
        pytest.param(Plain, V, ("3: layers.3, head (",), marks=[pytest.mark.slow, SENDS_TO_ITSELF]),
        pytest.param(partial(hugging_face, "Llama"), TWO, ("0: model.embed_tokens, model.layers.0 (",)),
        pytest.param(partial(hugging_face, "Qwen3"), TWO, ("1: model.layers.1 to lm_head (",), marks=pytest.mark.slow),
        pytest.param(partial(hugging_face, "Phi3", num_hidden_layers=4), LOOPS, (), marks=pytest.mark.slow),
    ],
)
def test_models_that_are_chains(make: Any, plan: dict[str, Any], lines: tuple[str, ...]) -> None:
    """By a list of modules, balanced, and by Hugging Face's own plan; parameters keep their names."""
    if make is not Plain:
        installed.needs("transformers")
    printed = "\n".join(check(2, partial(seeded, make), plan))
    for line in lines:
        assert f"stage {line}" in printed


WRONG_ORDER = [["table", "head", "layers.0"], ["layers.1", "layers.2", "layers.3"]]


def refused(rank: int, make: Any, plan: dict[str, Any], said: str) -> float:
    """A step of a model that cannot be divided so; returns the seconds until the error that says why."""
    prepared = prepare_fully_shard(seeded(make), parallelism=plan, loss_fn=loss_fn, show=False)
    x, y = batch(0, 0)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=said):
        prepared.step(x, target=y)
    with pytest.raises(RuntimeError, match="expected a pipeline whose ranks are all there, found that"):
        prepared.step(x, target=y)
    return time.monotonic() - begun


@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (Outside, TWO, "expected layers.2 to read what the module before it returns, found that the model computes"),
        (Again, TWO, "expected only layers.2 to read what the stage before it returns, found that something else"),
        pytest.param(Twice, TWO, "to be its last module, found layers.0 after it", marks=pytest.mark.slow),
        pytest.param(
            InPlace, TWO, "a leaf Variable that requires grad is being used in an in-place", marks=pytest.mark.slow
        ),
        pytest.param(
            Plain,
            {**TWO, "module_fqns_per_model_part": WRONG_ORDER},
            "list modules in the order of the forward in module_fqns_per_model_part",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_is_no_chain_is_an_error_on_all_ranks(make: Any, plan: dict[str, Any], said: str) -> None:
    """Where stages would compute something else than the model does; in the first step, before a gradient is used."""
    pool(2).run(refused, make, plan, said, timeout=TIMEOUT)


# ---- messages and state ----------------------------------------------------------------------------------------------


def counted(rank: int, plan: dict[str, Any]) -> list[int]:
    """How many reductions each step sent."""
    prepared = prepare_fully_shard(four(), parallelism=plan, loss_fn=loss_fn, show=False)
    sent = []
    for step in range(3):
        with Reductions() as reductions:
            prepared.step(batch(step, prepared.share[0])[0], target=batch(step, prepared.share[0])[1])
        sent.append(reductions.number)
    assert prepared.mesh.size() == 2
    return sent


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.slow)])
def test_gradients_are_sent_once_in_a_step(schedule: str) -> None:
    """One reduction of each unit, however many micro-batches there are: of two blocks and an end on each rank."""
    plan = {**TWO, "pipeline_parallel_schedule": schedule, "pipeline_parallel_num_microbatches": 4}
    for sent in pool(4).run(counted, plan, timeout=TIMEOUT):
        assert sent[1:] == [3, 3]


# ---- evaluation, other shapes, schedules of the user -----------------------------------------------------------------


def evaluated(rank: int, plan: dict[str, Any]) -> list[float]:
    """Losses before and between steps, of sequences of two lengths; and a step by torch's schedule itself."""
    model = four()
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, parallelism=plan, loss_fn=loss_fn, show=False)
    found = []
    for step, tokens in enumerate((8, 8, 5, 8)):
        x, y = batch(step, prepared.share[0], tokens)
        found += [float(prepared.evaluate(x, target=y)), float(prepared.step(x, target=y))]
        optimizer.zero_grad()
    pipeline = prepared.pipeline
    assert pipeline is not None
    x, y = batch(4, prepared.share[0])
    losses: list[Tensor] = []
    last: dict[str, Any] = {"target": y, "losses": losses} if pipeline.is_last else {}
    pipeline.schedule.step(*((x,) if pipeline.is_first else ()), **last)
    assert all(p.grad is not None for p in model.parameters())
    return [*found, float(torch.stack(losses).detach().mean()) if losses else found[-1]]


@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        pytest.param("Interleaved1F1B", marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", marks=pytest.mark.slow),
        pytest.param("ZBVZeroBubble", marks=[pytest.mark.slow, SENDS_TO_ITSELF]),
        pytest.param("DualPipeV", marks=[pytest.mark.slow, SENDS_TO_ITSELF]),
    ],
)
def test_evaluation_and_sequences_of_other_lengths(schedule: str) -> None:
    """Without an update both give the plain model's loss."""
    plan = {**TWO, "pipeline_parallel_schedule": schedule, "pipeline_parallel_num_microbatches": 4}
    model = four()
    for number, found in enumerate(pool(2).run(evaluated, plan, timeout=TIMEOUT)):
        for step, tokens in enumerate((8, 8, 5, 8)):
            x, y = batch(step, 0, tokens)
            with torch.no_grad():
                expected = float(loss_fn(model(x), y))
            # Sums of float32 in another order.
            assert found[2 * step : 2 * step + 2] == pytest.approx([expected] * 2, rel=16 * 2**-23), number


@pytest.mark.parametrize("source", ["mixed", pytest.param("cpu", marks=pytest.mark.slow), "meta"])
def test_values_come_from_anywhere(source: str) -> None:
    """Of rank 0, of rank 0 with the others on the meta device, and of initialisers."""
    expected = {name: p.detach() for name, p in four().named_parameters()}
    for found in pool(2).run(valued, source, timeout=TIMEOUT):
        for name, value in found.items():
            assert torch.equal(value, torch.full_like(value, 0.01) if source == "meta" else expected[name]), name


def valued(rank: int, source: str) -> dict[str, Tensor]:
    model = four()
    if rank and source == "cpu":
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    if source == "meta" or (source == "mixed" and rank):
        model = model.to_empty(device="meta")

    def init(module: nn.Module) -> None:
        if not any(module.children()) and next(module.parameters(recurse=False), None) is not None:
            nn.init.constant_(next(module.parameters(recurse=False)), 0.01)
        if hasattr(module, "init_rope"):
            module.init_rope()

    optimizer = adamw(model.parameters(), watched=False)
    options: dict[str, Any] = {"init": init} if source == "meta" else {}
    config = {"initialisation": {"source": source}}
    prepared = prepare_fully_shard(model, optimizer, config, parallelism=LOOPS, loss_fn=loss_fn, show=False, **options)
    found = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    if source != "meta":
        train(model, optimizer, prepared, [0])
        assert len(optimizer.state) == len(found)
    return found


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def differing(rank: int, what: str) -> tuple[str, float]:
    """A step in which one rank is different; the error of this rank, and after how many seconds."""
    plan = {**TWO, "pipeline_parallel_microbatch_size": 2}
    if what == "number":
        plan = {**TWO, "pipeline_parallel_num_microbatches": 4 if rank == 3 else 2}
    begun = time.monotonic()
    try:
        prepared = prepare_fully_shard(four(), parallelism=plan, loss_fn=loss_fn, show=False)
        x, y = batch(0, prepared.share[0])
        prepared.step(x, target=y)
        begun = time.monotonic()
        if what == "data" and rank == 3:
            x = x + 1
        if what == "samples" and rank == 2:
            x, y = x[:3], y[:3]
        if what == "stage" and rank == 2:
            prepared.pipeline.stages[1].layers[2].register_forward_pre_hook(raising)  # type: ignore[union-attr]
        if what == "loss" and rank == 3:
            prepared.pipeline.loss_fn = raising  # type: ignore[union-attr, assignment]
        if what == "first" and rank == 0:
            prepared.pipeline.stages[0].layers[1].register_forward_pre_hook(raising)  # type: ignore[union-attr]
        prepared.step(x, target=y)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "", 0.0


def raising(*_: Any) -> Any:
    raise ValueError("a bad value")


RAISED = "ValueError: a bad value"
DIFFERENT = [
    ("stage", RAISED, r"PeerFailed: .*rank 2 .*raised.*a bad value"),
    ("number", "", "ConfigError: parallelism: expected one plan on all 4 ranks, found different ones, here"),
]
ALSO = [
    ("first", RAISED, r"PeerFailed: .*rank 0 .*raised.*a bad value"),
    ("loss", RAISED, r"PeerFailed: .*rank 3 .*raised.*a bad value"),
    ("data", "", "RuntimeError: pp: expected the ranks 1, 3 to begin with the same batch"),
    (
        "samples",
        "ValueError: expected a batch that is micro-batches of 2",
        "RuntimeError: pp: expected a batch on each",
    ),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "own", "other"), [*DIFFERENT, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALSO)]
)
def test_ranks_that_differ_are_named_on_all_ranks(what: str, own: str, other: str) -> None:
    """A stage that raises, a loss that does, other data, another batch, another plan. Nothing hangs."""
    told = pool(4).run(differing, what, timeout=TIMEOUT)
    failing = {"stage": 2, "first": 0, "loss": 3, "samples": 2}.get(what)
    # Of the two pipelines (0, 2) and (1, 3) data and samples concern one; it tells the ranks of its stages.
    for rank, (error, _) in enumerate(told):
        expected = own if rank == failing else other
        if what in ("data", "samples") and rank % 2 != (1 if what == "data" else 0):
            expected = "PeerFailed: |RuntimeError: "
        assert re.match(expected, error, re.DOTALL), (rank, error)


@pytest.mark.slow
def test_experts_of_each_stage_are_divided() -> None:
    """EP x PP: Mixtral, with two of four experts of each layer on each rank of a stage."""
    installed.needs("transformers")
    make = partial(hugging_face, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    printed = "\n".join(check(4, make, {**TWO, "expert_parallel_degree": 2}))
    assert "experts: divided over 2 ranks" in printed and "stage 1: model.layers.1 to lm_head" in printed


def forgetting(rank: int) -> str:
    """The ranks of the second stage divide gradients of their experts by the ranks that hold them."""
    model = llama(experts=4, experts_per_token=2)
    plan = {**TWO, "expert_parallel_degree": 2}
    prepared = prepare_fully_shard(model, parallelism=plan, loss_fn=loss_fn, show=False)
    x, y = batch(0, prepared.share[0])
    prepared.step(x, target=y)
    if rank > 1:
        prepared.pipeline.stages[1].layers[1].ffn.experts.set_gradient_divide_factor(1.0)  # type: ignore[union-attr]
    try:
        prepared.step(x, target=y)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_divisor_that_a_stage_forgot_names_it() -> None:
    told = pool(4).run(forgetting, timeout=TIMEOUT)
    for rank, error in enumerate(told):
        own = r"RuntimeError: ep: expected the gradients of layers\.1\.ffn\.experts to be divided by 2, the ranks of"
        assert re.match(own if rank > 1 else "RuntimeError: pp: expected a batch on each", error, re.DOTALL), error
