"""`fullshard doctor`: what steps of the plain and of the sharded model show. Each kind of fault is planted in several
ways, found alone, and named; sound programs have no findings."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import Program, cli
from fullshard.doctor import diagnosis, fingerprints, machine, model
from fullshard.doctor.facts import Facts
from tests.fake.test_doctor import HEALTHY, blocks, program
from tests.harness.families import FAMILIES, family_program
from tests.harness.sound_programs import SOUND, Applied

MIB = 1 << 20
REENTRANT = CheckpointImpl.REENTRANT


def look(asked: Program, world: int = 4) -> dict[str, str]:
    found, measured = model.look(asked, world, 1, {}, steps=True)
    facts = Facts(world, 1, HEALTHY, found, None, measured)
    return {f.check: f"{f.what} | {f.fix}" for f in diagnosis.diagnose(facts).findings}


# ---- planted ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks and a head, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.head = nn.Linear(32, 4)

    def features(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def _units(net: Any, fully_shard: Any) -> None:
    for block in (*net.blocks, net.head):
        fully_shard(block)
    fully_shard(net)


def _hooked(model: Any, fully_shard: Any) -> None:
    _units(model, fully_shard)
    model.head.weight.register_post_accumulate_grad_hook(lambda weight: float(weight.grad.norm()))


def net(loss: Callable[[Any, Any], Tensor] | None = None, **options: Any) -> Program:
    return program(Net, **{"shard": _units, **({"loss": loss} if loss else {}), **options})


def applied(forward: Callable[[Any, Tensor], Tensor], **buffers: Tensor) -> Callable[[], nn.Module]:
    """A model of three blocks, `forward`, and persistent buffers."""
    return lambda: Applied(forward, blocks=blocks(), **{name: value.clone() for name, value in buffers.items()})


class Step(torch.optim.SGD):
    """SGD that looks at each gradient first."""

    def __init__(self, parameters: Any, read: Callable[[Any], object]) -> None:
        super().__init__(parameters, lr=0.1)
        self.read = read

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.read(parameter.grad)
        return super().step(closure)


def reading(read: Callable[[Any], object]) -> Program:
    return net(optimizer=lambda parameters: Step(parameters, read))


class WithPlainState(torch.optim.Optimizer):
    """Keeps its state as plain tensors of the whole shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", torch.zeros(parameter.shape))
            parameter.sub_(kept + parameter.grad)


class Sparse(nn.Module):
    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.embed = kind(50, 32, sparse=True)
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x))  # type: ignore[no-any-return]


def sparse(kind: type[Any]) -> Program:
    ids = torch.arange(8).view(2, 4)
    return program(lambda: Sparse(kind), batch=lambda i: ids, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def _reads_a_neighbour(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.blocks(x), self.blocks[0].weight)


def _definite(self: Any, x: Tensor) -> Tensor:
    return self.blocks(x) @ torch.linalg.cholesky(self.matrix)  # type: ignore[no-any-return]


class Definite(nn.Module):
    """Its parameter has to be positive definite, which rows of one rank in every place are not."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(32))
        self.blocks = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) @ torch.linalg.cholesky(self.matrix)  # type: ignore[no-any-return]


def _only_ranks(self: Any, x: Tensor) -> Tensor:
    if dist.get_world_size() > 1 and isinstance(self.blocks[0], fullshard.FSDPModule):
        raise KeyError("no table for several ranks")
    return self.blocks(x)  # type: ignore[no-any-return]


def _by_batch(index: int) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(index))


def drifting(forward: Callable[[Any, Tensor], Tensor], **buffers: Tensor) -> Program:
    return program(applied(forward, **buffers), batch=_by_batch)


def _running(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.mean.lerp_(x.mean(0), 0.1)
    return self.blocks(x - self.mean)  # type: ignore[no-any-return]


def _noisy(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.mean.copy_(torch.randn(32))
    return self.blocks(x - self.mean)  # type: ignore[no-any-return]


def _counting(self: Any, x: Tensor) -> Tensor:
    """How many tokens each expert saw."""
    self.mean += torch.bincount(x.argmax(1), minlength=32)
    return self.blocks(x)  # type: ignore[no-any-return]


def _replaced(self: Any, x: Tensor) -> Tensor:
    self.mean = x.detach().mean(0)
    return self.blocks(x)  # type: ignore[no-any-return]


def _wide(count: int = 6, width: int = 1700) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


class Around(nn.Module):
    """Recomputes all of its blocks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _wide()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks, x, use_reentrant=False)  # type: ignore[no-any-return]


class Within(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def recomputed(build: Callable[[], nn.Module], shard: Callable[[Any, Any], None] | None = None) -> Program:
    given = {} if shard is None else {"shard": shard}
    return program(build, batch=lambda i: torch.ones(2, 1700, requires_grad=True), **given)


def _wrap(net: Any, fully_shard: Any, how: CheckpointImpl = CheckpointImpl.NO_REENTRANT) -> None:
    """A wrapper around what is inside the model, after its blocks were sharded."""
    for block in net.inner:
        fully_shard(block)
    fully_shard(net)
    net.inner = checkpoint_wrapper(net.inner, checkpoint_impl=how)


def _apply(net: Any, fully_shard: Any) -> None:
    for block in net.inner:
        fully_shard(block)
    fully_shard(net)
    apply_activation_checkpointing(net, check_fn=lambda module: module is net.inner)


def _half_policy(net: Any, fully_shard: Any) -> None:
    for block in net:
        fully_shard(block, mp_policy=fullshard.MixedPrecisionPolicy(torch.float16, torch.float32))
    fully_shard(net)


def _autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return model(x).float().square().mean()  # type: ignore[no-any-return]


def _one_half() -> nn.Module:
    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.half()).float()

    return nn.Sequential(nn.Linear(32, 32), Cast(32, 32).half(), nn.Linear(32, 32))


def buffered(*sizes: int, persistent: bool = True, width: int = 32) -> Program:
    def build() -> nn.Module:
        made = blocks(2, width, device="meta")
        for number, size in enumerate(sizes):
            buffer = torch.empty(size * MIB, dtype=torch.bool, device="meta")
            made.register_buffer(f"mask{number}", buffer, persistent)
        return made

    return program(build)


def _unsteady_cases() -> dict[str, Callable[[], Program]]:
    def stream() -> Program:
        data = itertools.count()
        return program(batch=lambda i: torch.full((4, 32), float(next(data))))

    def shared() -> Program:
        generator = torch.Generator().manual_seed(0)
        return program(batch=lambda i: {"x": torch.randn(4, 32, generator=generator)}, loss=_of_x)

    def written() -> Program:
        kept = torch.ones(4, 32)
        return program(batch=lambda i: kept, loss=lambda net, x: net(x.mul_(2)).square().mean())

    return {
        "the global generator": lambda: program(batch=lambda i: torch.randn(4, 32)),
        "a stream": stream,
        "one generator for all": shared,
        "a shuffled loader": lambda: program(batch=lambda i: next(iter(_shuffled()))[0]),
        "an augmentation beside the data": lambda: program(
            batch=lambda i: {"x": torch.ones(4, 32), "crop": _numpy().random.randint(0, 10**6, 3)}, loss=_of_x
        ),
        "Python's random": lambda: program(batch=lambda i: {"x": torch.ones(4, 32), "k": random.random()}, loss=_of_x),
        "a step that writes to it": written,
    }


def _shuffled() -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(64.0 * 32).view(64, 32))
    return torch.utils.data.DataLoader(data, 4, shuffle=True)


def _numpy() -> Any:
    return pytest.importorskip("numpy")


def _of_x(net: Any, batch: Any) -> Tensor:
    return net(batch["x"]).square().mean()  # type: ignore[no-any-return]


def _own_generator() -> nn.Module:
    made, generator = blocks(), torch.Generator()
    generator.seed()
    with torch.no_grad():
        made[0].weight.normal_(generator=generator)
    return made


def _from_the_system() -> nn.Module:
    made = blocks()
    with torch.no_grad():
        made[1].bias.fill_(int.from_bytes(os.urandom(2), "big"))
    return made


def _random_features() -> nn.Module:
    made = blocks()
    generator = torch.Generator()
    generator.seed()
    made.register_buffer("features", torch.randn(4, generator=generator))
    return made


def _calls() -> Callable[[], nn.Module]:
    count = itertools.count()

    def build() -> nn.Module:
        made = blocks()
        with torch.no_grad():
            made[0].weight.mul_(1 + next(count))
        return made

    return build


def _by_rank(of: Callable[[], int]) -> Program:
    """As for dropout, but before the weights."""

    def build() -> nn.Module:
        torch.manual_seed(1234 + of())
        return blocks()

    return program(build)


def _of_rank_0() -> nn.Module:
    """Rank 0 reads the weights, which others get from it; all seed alike."""
    made = blocks()
    if dist.get_rank() == 0:
        with torch.no_grad():
            made[0].weight.fill_(0.1)
    return made


def _penalty_on_gradients(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return loss + sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True))


def _queue(self: Any, x: Tensor) -> Tensor:
    """Keys of earlier batches, and where the next go."""
    with torch.no_grad():
        place = int(self.place)
        self.queue[place : place + 4] = x
        self.place[0] = (place + 4) % 16
    return self.blocks(x + self.queue.mean(0))  # type: ignore[no-any-return]


def _as_it_is(self: Any, x: Tensor) -> Tensor:
    return self.blocks(x)  # type: ignore[no-any-return]


def _centred(model: Any, x: Tensor) -> Tensor:
    """The loss keeps a mean itself."""
    model.mean.lerp_(x.mean(0), 0.1)
    return model(x - model.mean).square().mean()  # type: ignore[no-any-return]


def _with_attribute(value: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = blocks(2, 32, device="meta")
        made[1].mask = value()
        return made

    return build


def _mask(size: int = 300) -> Tensor:
    return torch.empty(size * MIB, dtype=torch.bool, device="meta")


# name of the check -> name of the case -> the program, and what is said of it.
PLANTED: dict[str, dict[str, tuple[Callable[[], Program], str]]] = {
    "sharded-step": {
        "another method than forward": (
            lambda: program(Net, loss=lambda m, x: m.features(x).square().mean()),
            "register_fsdp_forward_method(module, 'features')",
        ),
        "a sparse embedding": (lambda: sparse(nn.Embedding), "embed.weight: expected a dense gradient"),
        "a sparse bag": (lambda: sparse(nn.EmbeddingBag), "embed.weight: expected a dense gradient"),
        "a weight read after the forward": (
            lambda: net(lambda m, x: m(x).square().mean() + F.linear(torch.ones(1, 32), m.head.weight).mean()),
            "read were probably head.weight | a weight is read where its unit is not full",
        ),
        "a weight read before the forward": (
            lambda: net(lambda m, x: (m(x @ m.blocks[0].weight)).square().mean()), "unit_open",
        ),
        "a penalty on weights": (
            lambda: net(lambda m, x: m(x).square().mean() + 0.1 * sum(p.square().sum() for p in m.parameters())),
            "got mixed",
        ),
        "a weight of a neighbour": (lambda: program(applied(_reads_a_neighbour)), "blocks.0.weight"),
        "a method of a block": (
            lambda: net(lambda m, x: m.head(m.blocks[0].forward(x)).square().mean()), "forward: ",
        ),
        "a head's weight after its parts": (
            lambda: net(lambda m, x: F.linear(m.blocks(x), m.head.weight).square().mean()), "head.weight",
        ),
        "gradients of parameters in a loss": (
            lambda: net(_penalty_on_gradients), "torch.autograd.grad for parameters",
        ),
        "computed parameters": (
            lambda: net(
                lambda m, x: torch.func.functional_call(m, {n: 2 * p for n, p in m.named_parameters()}, x).mean()
            ),
            "expected a parameter on its module, found a computed tensor",
        ),
        "plain state in an optimizer": (
            lambda: net(optimizer=WithPlainState), "optimizer step: RuntimeError: aten.add.Tensor got mixed",
        ),
        "Adafactor": (
            lambda: net(optimizer=torch.optim.Adafactor), "an optimizer that knows no shards: fullshard.step_on_shards",
        ),
    },
    "sharded-step-unsure": {
        "a matrix that has to be definite": (lambda: program(Definite), "in a world of one the step is taken"),
        "only with several ranks": (lambda: program(applied(_only_ranks)), "no table for several ranks"),
        "a check of values": (
            lambda: net(lambda m, x: _checked(m(x))), "AssertionError: not all rows differ",
        ),
    },
    "partial-read": {
        "a norm": (lambda: reading(lambda grad: float(grad.norm())), "gradient of blocks.0.weight, linalg_vector_norm"),
        "a mean": (lambda: reading(lambda grad: grad.mean().item()), "gradient of blocks.0.weight, mean"),
        "the largest": (lambda: reading(lambda grad: grad.abs().max().item()), "gradient of blocks.0.weight, "),
        "a search for NaN": (lambda: reading(lambda grad: int(grad.isnan().sum())), "in <lambda>"),
        "norms added in Python": (
            lambda: reading(lambda grad: sum([grad.pow(2).sum().item()])), "gradient of blocks.0.weight, pow, sum",
        ),
        "a product with the weight": (
            lambda: reading(lambda grad: (grad * grad).sum().item()), "gradient of blocks.0.weight, mul, sum",
        ),
        "a hook of a parameter": (
            lambda: net(shard=_hooked), "gradient of head.weight, linalg_vector_norm (at test_doctor_steps.py:",
        ),
        "a norm of a weight, for a log": (
            lambda: net(lambda m, x: m(x).square().mean() * (1 + 0 * float(m.head.weight.detach().norm()))),
            "head.weight, ",
        ),
        "a smallest": (lambda: reading(lambda grad: grad.min().item()), "gradient of blocks.0.weight, min"),
    },
    "batch-changes": {name: (build, "batch(0)") for name, build in _unsteady_cases().items()},
    "unseeded-model": {
        "a generator of its own": (lambda: program(_own_generator), "equal seeds: 0.weight"),
        "numbers of the system": (lambda: program(_from_the_system), "equal seeds: 1.bias"),
        "a buffer of random features": (lambda: program(_random_features), "equal seeds: features"),
        "a seed by the rank": (lambda: _by_rank(dist.get_rank), "seeds by the rank: 0.weight"),
        "a seed by the launcher's RANK": (
            lambda: _by_rank(lambda: int(os.environ.get("RANK", 0))), "on another rank, since `model` seeds",
        ),
        "what was called before": (lambda: program(_calls()), "equal seeds: 0.weight"),
    },
    "drifting-buffers": {
        "BatchNorm": (
            lambda: program(lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), *blocks()), batch=_by_batch),
            "batches: 1.running_mean, 1.running_var | nn.SyncBatchNorm",
        ),
        "a running mean": (lambda: drifting(_running, mean=torch.zeros(32)), "batches: mean"),
        "counts of tokens": (lambda: drifting(_counting, mean=torch.zeros(32, dtype=torch.long)), "batches: mean"),
        "a queue": (
            lambda: drifting(_queue, queue=torch.zeros(16, 32), place=torch.zeros(1, dtype=torch.long)),
            "batches: queue |",
        ),
        "a mean that the loss keeps": (
            lambda: program(applied(_as_it_is, mean=torch.zeros(32)), loss=_centred, batch=_by_batch), "batches: mean",
        ),
        "InstanceNorm": (
            lambda: program(
                lambda: nn.Sequential(
                    nn.Unflatten(1, (4, 8)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), *blocks()
                ),
                batch=_by_batch,
            ),
            "batches: 1.running_mean, 1.running_var",
        ),
        "random numbers": (lambda: drifting(_noisy, mean=torch.zeros(32)), "batches: mean"),
        "a buffer that is replaced": (lambda: drifting(_replaced, mean=torch.zeros(32)), "batches: mean"),
    },
    "recomputed-together": {
        "in forward": (lambda: recomputed(Around), "6 units are full at once in backward, 66.2 MiB"),
        "a wrapper, afterwards": (
            lambda: recomputed(lambda: Within(_wide()), _wrap), "6 units",
        ),
        "a reentrant wrapper": (
            lambda: recomputed(lambda: Within(_wide()), functools.partial(_wrap, how=REENTRANT)), "6 units",
        ),
        "torch's function for a model": (lambda: recomputed(lambda: Within(_wide()), _apply), "6 units"),
    },
    "float16": {
        "all of it": (
            lambda: program(lambda: blocks().half(), loss=lambda m, x: m(x.half()).float().square().mean()),
            "0.weight, 0.bias, 1.weight, 1.bias and 2 more",
        ),
        "a module": (lambda: program(_one_half), "float16: 1.weight, 1.bias"),
        "on the meta device": (lambda: program(lambda: blocks(1, 32, device="meta", dtype=torch.float16)), "0.bias"),
    },
    "float16-scaler": {
        "a policy": (lambda: program(shard=_half_policy), "compute in float16: 0, 1, 2"),
        "autocast": (lambda: program(loss=_autocast), "keeps float16 values"),
        "a cast": (lambda: program(loss=lambda m, x: m(x).half().square().mean().float()), "float16"),
    },
    "large-buffers": {
        "one mask": (lambda: buffered(300), "300.0 MiB of buffers beside 2.1 KiB of shards: mask0 300.0 MiB"),
        "several": (lambda: buffered(40, 40), "mask0 40.0 MiB, mask1 40.0 MiB"),
        "in no state dict": (lambda: buffered(300, persistent=False), "mask0"),
        "a plain attribute": (lambda: program(_with_attribute(_mask)), "1.mask 300.0 MiB"),
        "a dict of tables": (
            lambda: program(_with_attribute(lambda: {"cos": _mask(40), "sin": _mask(40), "name": "rope"})),
            "1.mask['cos'] 40.0 MiB, 1.mask['sin'] 40.0 MiB",
        ),
        "beside a larger model": (lambda: buffered(300, width=20000), "beside 763.0 MiB"),
    },
}  # fmt: skip


def _checked(out: Tensor) -> Tensor:
    """Rows of weights are those of one rank, repeated, in the look at several ranks."""
    assert len(out[0].unique()) == out.shape[1], "not all rows differ"
    return out.square().mean()


CASES = [(check, name) for check, cases in PLANTED.items() for name in cases]
# Models large enough for this check: one is enough for every day.
LARGE = {"in forward", "a reentrant wrapper", "torch's function for a model"}
MARKED = [
    pytest.param(check, name, id=f"{check}, {name}", marks=[pytest.mark.slow] if name in LARGE else [])
    for check, name in CASES
]
# What else is true of planted programs.
BESIDE = {"meta", "meta-buffers", "dtypes", "host-bound"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("check", "name"), MARKED)
def test_what_is_planted_is_found_alone(check: str, name: str) -> None:
    build, said = PLANTED[check][name]
    found = look(build())
    assert {check} <= found.keys() <= {check} | BESIDE, found
    assert said in found[check], found[check]


def test_a_search_for_nan_is_of_this_rank_s_rows_where_torch_does_not_add_them_up() -> None:
    """From 2.15 on torch gives `any` of all rows, so there is nothing to find."""
    found = look(reading(lambda grad: bool(grad.isnan().any())))
    newer = machine.version_of(torch.__version__) >= (2, 15)
    assert found.keys() == (set() if newer else {"partial-read"}), found


def read_after_forward() -> Program:
    return PLANTED["sharded-step"]["a weight read after the forward"][0]()


def test_an_error_of_the_sharded_step_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    entry = f"{__name__}:read_after_forward"
    assert cli.main(["doctor", entry, "--nproc", "64"]) == 2
    told = capsys.readouterr().out
    assert "error    sharded-step: forward: RuntimeError: " in told and "fix: a weight is read where" in told
    assert re.search(r"\(at test_doctor_steps.py:\d+ in <lambda>\)", told)
    assert "not measured: host time (the sharded step raised an error)" in told and "1 error" in told
    cli.main(["doctor", entry, "--nproc", "64", "--no-probe", "--json"])
    assert "sharded-step" not in capsys.readouterr().out


@pytest.mark.parametrize("how", [pytest.param((1, 1), id="a world of one"), pytest.param((4, 2), id="replicas")])
def test_other_meshes_are_stepped_too(how: tuple[int, int]) -> None:
    world, replicas = how
    found, _ = model.look(read_after_forward(), world, replicas, {}, steps=True)
    assert found.steps.sharded_failure is not None and found.steps.fails_alone
    # Nobody else has other statistics.
    found, _ = model.look(PLANTED["drifting-buffers"]["BatchNorm"][0](), world, replicas, {}, steps=True)
    assert bool(found.steps.drifting_buffers) == (world > 1)


def test_a_model_that_is_slow_to_build_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_SECONDS_TO_BUILD", -1.0)
    found, measured = model.look(program(_own_generator), 4, 1, {}, steps=True)
    assert found.unseeded == ()
    assert measured.skipped == ("whether two calls of `model` give equal weights (the first took 0 s)",)


def test_batches_are_compared_by_what_is_in_them() -> None:
    @dataclasses.dataclass
    class Sample:
        x: Tensor
        more: dict[str, Any]

    def sample(value: float) -> Any:
        more = {"texts": ["a", b"b"], "array": np.arange(3), "nan": float("nan"), "none": None, "set": {1, 2}}
        return [Sample(torch.tensor([0.0, value]), more), (torch.tensor([0.0, value]).to_sparse(), lambda: 0)]

    np = pytest.importorskip("numpy")
    before = fingerprints.of_value(sample(1.0), "batch")
    assert fingerprints.differing(before, fingerprints.of_value(sample(1.0), "batch")) == []
    assert fingerprints.differing(before, fingerprints.of_value(sample(2.0), "batch")) == ["batch[0].x", "batch[1][0]"]
    assert fingerprints.differing(before, fingerprints.of_value(sample(1.0)[:1], "batch")) == [
        "len(batch)", "len(batch[1])", "batch[1][0]",
    ]  # fmt: skip
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8, torch.float8_e4m3fn):
        one, two = torch.zeros(3).to(dtype), torch.ones(3).to(dtype)
        assert fingerprints.of_tensor(one) != fingerprints.of_tensor(two) == fingerprints.of_tensor(two.clone())


def test_weights_that_rank_0_sends_are_seeded() -> None:
    found = look(program(_of_rank_0))
    assert not found, found


# ---- sound -----------------------------------------------------------------------------------------------------------


# Operations that a dispatch mode disturbs.
UNWATCHED = ("a branch by torch.cond",)
# What is true of programs as they are: a buffer that follows the batches of its rank, frozen parameters in a unit.
OF_PROGRAMS = {
    **dict.fromkeys((name for name in SOUND if re.match(r"BatchNorm\dd", name)), {"drifting-buffers"}),
    "InstanceNorm2d with statistics": {"drifting-buffers"},
    "segmentation with skips": {"drifting-buffers"},
    "experts of which some are unused": {"drifting-buffers"},
    "moco": {"drifting-buffers"},
    "codebook in buffers": {"drifting-buffers"},
    "running averages of the model's own": {"drifting-buffers", "changed-buffers"},
    "frozen embeddings": {"frozen"},
    "lora, written out": {"frozen"},
}


@pytest.mark.sample(13)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks tensors that are no leaves
@pytest.mark.parametrize("name", [name for name, sound in SOUND.items() if not sound.package])
def test_sound_programs_have_no_findings(name: str) -> None:
    found, measured = model.look(SOUND[name].program(), 4, 1, {}, steps=True)
    facts = Facts(4, 1, HEALTHY, found, None, measured)
    assert {finding.check for finding in diagnosis.diagnose(facts).findings} == OF_PROGRAMS.get(name, set())
    unwatched = "reads of partial values (torch cannot watch this step: "
    assert all(name in UNWATCHED and text.startswith(unwatched) for text in measured.skipped), measured.skipped
    assert measured.step and measured.host is not None


# What is true of families as they are.
OF_FAMILIES = {"segformer": {"drifting-buffers": "decode_head.batch_norm.running_mean"}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_have_no_findings(kind: str) -> None:
    pytest.importorskip("transformers")
    found = look(family_program(kind))
    expected = OF_FAMILIES.get(kind, {})
    assert found.keys() == expected.keys(), found
    assert all(words in found[check] for check, words in expected.items())
