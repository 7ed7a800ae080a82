"""Legal programs as data: what users do with sharded models without doing anything wrong, drawn from a number.

`generate(seed)` makes a `Program`; `run(rank, program)` runs it on one rank. Nothing in it is a fault of any rank's:
where ranks differ they may (which parameters get a gradient, whose loss it is, how long it takes, what a pipeline stage
or an expert holds). What raises or warns is a false alarm (legal.py).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from tests.harness import experts
from tests.harness.legal_actions import AFTER, BEFORE, WINDOWS
from tests.harness.random_models import (
    POLICIES,
    BlockSpec,
    LeafSpec,
    ModelSpec,
    RandomModel,
    call,
    policy_of,
    unit_names,
)

# ---- programs as data ----------------------------------------------------------------------------------------

# What there is to train, and how often it is drawn.
SETTINGS = {
    "one model": 10,
    "adversaries": 2,  # two models, each trained in turn, one through the other
    "stages": 2,  # other models on other meshes, other numbers of steps
    "experts": 1,  # other values on other ranks, on a mesh of their own
    "materialized": 1,  # built on the meta device
    "rank 0 real": 1,  # ranks other than 0 have memory without values until rank 0's are loaded
    "loaded": 1,  # built with another seed on each rank, loaded before the first step
    "some of the ranks": 1,  # a mesh of some ranks; the others do something else
}
OPTIMIZERS = ("SGD", "AdamW", "AdamW on shards", "two optimizers", "momentum, late", "scheduled")
STRATEGIES = ("default", "default", "resharded", "kept", "secondary", "replicated", "replicated only", "offload")


@dataclass(frozen=True)
class Program:
    """`steps[i]`: names of what comes before, in and after the window of micro-batches of step i."""

    seed: int
    setting: str
    world: int
    spec: ModelSpec
    strategy: str
    optimizer: str
    steps: tuple[tuple[str, ...], ...]


def generate(seed: int) -> Program:
    """The program of a number."""
    rng = random.Random(seed)
    setting = rng.choices(list(SETTINGS), list(SETTINGS.values()))[0]
    world = {"stages": rng.choice([2, 4]), "experts": 4, "some of the ranks": 4}.get(
        setting, rng.choice([1, 2, 2, 3, 4])
    )
    strategy = rng.choice(STRATEGIES)
    if setting in ("stages", "experts", "some of the ranks") and strategy in ("secondary", "replicated"):
        strategy = "default"
    if strategy in ("secondary", "replicated") and world != 4:
        strategy = "resharded"
    spec = _spec(rng)
    if setting == "experts" or strategy in ("secondary", "offload"):
        spec = replace(spec, policy="none")
    if strategy == "secondary":
        spec = replace(spec, dims=(0,))
    drawn = [
        (
            rng.sample(list(BEFORE), rng.choice([0, 0, 1, 2])),
            rng.choice(list(WINDOWS)),
            rng.sample(list(AFTER), rng.choice([0, 0, 1])),
        )
        for _ in range(rng.choice([2, 3, 4]))
    ]
    # Each action comes in some program of any thirty.
    before, window, after = (list(actions)[seed % len(actions)] for actions in (BEFORE, WINDOWS, AFTER))
    drawn[-1] = ([before], drawn[-1][1], drawn[-1][2])
    drawn[0] = (drawn[0][0], window, [after])
    steps = tuple((*befores, own, *afters) for befores, own, afters in drawn)
    return Program(seed, setting, world, spec, strategy, rng.choice(OPTIMIZERS), steps)


def _spec(rng: random.Random) -> ModelSpec:
    def leaf(by_rank: bool) -> LeafSpec:
        kind = rng.choice(["dense", "dense_no_bias", "twins", "norm", "scale", "table", "conv"])
        use = rng.choice(["always"] * 5 + ["never", "by_step", "by_rank"])
        unit = rng.random() < 0.2
        if use == "by_rank" and not by_rank:
            use = "always"
        return LeafSpec(kind, rng.choice([1, 2, 3, 5, 7]), use, unit)  # type: ignore[arg-type]

    def block(by_rank: bool, depth: int) -> BlockSpec:
        recompute = rng.choice(["no", "no", "no", "inside", "outside", "outside_reentrant"])
        # A leaf that is skipped returns its input, and saves nothing. Where the input is not part of a graph, whether a
        # backward reaches the leaf would depend on the rank; and so would, whether what is around it is recomputed.
        # Both are the users' to avoid (docs/engine.md).
        by_rank = by_rank and recompute == "no"
        return BlockSpec(
            tuple(leaf(by_rank) for _ in range(rng.choice([1, 1, 2]))),
            inner=block(by_rank, depth - 1) if depth > 1 and rng.random() < 0.3 else None,
            unit=rng.random() < 0.8,
            recompute=recompute,  # type: ignore[arg-type]
        )

    tokens = rng.random() < 0.7
    return ModelSpec(
        blocks=tuple(block(tokens, 2) for _ in range(rng.choice([1, 2, 3]))),
        width=rng.choice([1, 2, 3, 5, 7]),
        tokens=tokens,
        frozen=tuple(rng.randrange(20) for _ in range(rng.choice([0, 0, 1, 3]))) if tokens else (),
        dims=rng.choice([(0,), (0,), (1,), (0, 1)]),
        policy=rng.choice(["none", "none", *POLICIES]),
        sync=(*(rng.random() < 0.5 for _ in range(rng.choice([0, 0, 1, 2]))), True),
        prefetch_depth=rng.choice([1, 1, 0, 2]),
        reductions_in_flight=rng.choice([2, 1, 3]),
        seed=rng.randrange(100),
    )


# ---- what is trained -----------------------------------------------------------------------------------------


class LegalModel(RandomModel):
    """A random model whose blocks may be skipped or run in another order, and whose buffers are counted on."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.register_buffer("gain", torch.full((spec.width,), 0.9))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor, turn: tuple[int, int], order: tuple[int, ...] | None = None) -> Tensor:
        if self.training:
            self.calls += 1
        if self.embedding is not None:
            x = self.embedding(x).mean(1)
        x = x * self.gain.to(x.dtype)
        for position in range(len(self.blocks)) if order is None else order:
            block: Any = self.blocks[position]
            x = call(block, x, turn)
        return self.head(x)

    def reset_parameters(self) -> None:
        """The buffers, which a checkpoint may not have."""
        nn.init.constant_(self.gain, 0.9)
        self.calls.zero_()


def _plain(spec: ModelSpec, seed: int) -> LegalModel:
    """Values from a generator of its own: the process's is used by ranks that recompute at the same time."""
    model = LegalModel(spec)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_meta:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    params = list(model.blocks.parameters())
    for position in spec.frozen:
        params[position % len(params)].requires_grad_(False)
    return model


def _shard(program: Program, model: Any, ranks: int, **options: Any) -> Any:
    """`ranks`: how many share the model."""
    spec = program.spec
    if program.strategy == "replicated":
        options["mesh"] = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif program.strategy == "replicated only" and "mesh" not in options:
        options["mesh"] = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    elif program.strategy == "offload":
        options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=False)
    options["reshard_after_forward"] = {"resharded": True, "kept": False, "secondary": 2}.get(program.strategy)
    if any(spec.dims):
        dims = {p: spec.dims[i % len(spec.dims)] % p.ndim for i, p in enumerate(model.parameters())}
        options["shard_placement_fn"] = lambda p: Shard(dims[p])
    for name, _ in unit_names(spec):
        fullshard.fully_shard(model.get_submodule(name), mp_policy=policy_of(spec, name), **options)
    return model


def _optimizers(kind: str, model: nn.Module) -> tuple[list[torch.optim.Optimizer], Any]:
    params = [p for p in model.parameters() if p.requires_grad or kind != "SGD"]
    if kind == "two optimizers":
        first, second = params[: len(params) // 2], params[len(params) // 2 :]
        made: list[torch.optim.Optimizer] = [torch.optim.SGD(second, lr=0.01)]
        return ([torch.optim.AdamW(first, lr=0.01), *made] if first else made), None
    if kind.startswith("AdamW"):
        adamw = torch.optim.AdamW(params, lr=0.01)
        return [fullshard.step_on_shards(adamw) if "shards" in kind else adamw], None
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9 if kind.startswith("momentum") else 0.0)
    if kind == "scheduled":
        return [optimizer], torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return [optimizer], None


class Run:
    """One rank's run of a program with one model. `chance` draws what all ranks draw alike."""

    def __init__(self, program: Program, model: Any, rank: int) -> None:
        self.program, self.model, self.rank = program, model, rank
        self.spec = program.spec
        self.chance = random.Random(program.seed + 1)
        self.step = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scheduler: Any = None
        if "late" not in program.optimizer:
            self.make_optimizers()

    def make_optimizers(self) -> None:
        # What is not freed, after a forward that a backward may follow or after the backward, is full on the modules.
        for module in self.model.modules():
            if isinstance(module, fullshard.FSDPModule):
                module.reshard()
        self.optimizers, self.scheduler = _optimizers(self.program.optimizer, self.model)

    def inputs(self, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.program.seed * 31 + self.step) * 31 + micro * 7 + self.rank)
        if self.spec.tokens:
            return torch.randint(11, (2, 3), generator=generator)
        return torch.randn(2, self.spec.width, generator=generator)

    def out(self, micro: int = 0, order: tuple[int, ...] | None = None) -> Tensor:
        out: Tensor = self.model(self.inputs(micro), (self.step, self.rank), order)
        return out.float()

    def window(self, loss: Callable[[int], Tensor]) -> None:
        """Micro-batches as the program's model has them."""
        for micro, reduces in enumerate(self.spec.sync):
            self.model.set_requires_gradient_sync(reduces)
            loss(micro).backward()

    def take_step(self) -> None:
        if not self.optimizers:
            self.make_optimizers()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def zero_grad(self) -> None:
        if self.chance.random() < 0.5:
            self.model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self) -> None:
        """All steps of the program."""
        for step, names in enumerate(self.program.steps):
            self.step = step
            for name in names:
                if name in BEFORE:
                    BEFORE[name](self)
            window = next(name for name in names if name in WINDOWS)
            WINDOWS[window](self)
            after = [name for name in names if name in AFTER]
            for name in after:
                AFTER[name](self)
            self.take_step()
            self.zero_grad()
        values = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        assert all(value.isfinite().all() for value in values), "the program itself diverged"


# ---- settings ------------------------------------------------------------------------------------------------


def run(rank: int, program: Program) -> int:
    """Run `program` on this rank; how many steps it took."""
    _SETTINGS[program.setting](rank, program)
    return len(program.steps)


def _one_model(rank: int, program: Program) -> None:
    Run(program, _shard(program, _plain(program.spec, program.seed), program.world), rank).train()


def _adversaries(rank: int, program: Program) -> None:
    """A critic that reads what the generator makes, at the width of its blocks; each with its own optimizer."""
    runs = [
        Run(program, _shard(program, _plain(program.spec, program.seed + i), program.world), rank) for i in range(2)
    ]
    generator, critic = runs
    for step in range(len(program.steps)):
        for r in runs:
            r.step = step
        with torch.no_grad():
            made = generator.out(1)
        (critic.out(0) - made).pow(2).mean().backward()
        critic.take_step()
        critic.zero_grad()
        critic.model.requires_grad_(False)
        ((generator.out(1) - critic.out(2)) ** 2).mean().backward()
        generator.take_step()
        generator.zero_grad()
        critic.model.requires_grad_(True)
    generator.train()


def _stages(rank: int, program: Program) -> None:
    """Each half of the ranks has its own model, of its own shape, and takes its own number of steps."""
    ranks = program.world // 2
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("stage", "data"))
    stage = rank // ranks
    mine = generate(program.seed + 1_000_003) if stage else program
    spec = replace(mine.spec, policy=program.spec.policy, dims=program.spec.dims)
    steps = mine.steps if stage else program.steps
    mine = replace(program, spec=spec, steps=steps, world=ranks, strategy="default")
    Run(mine, _shard(mine, _plain(spec, program.seed + stage), ranks, mesh=mesh["data"]), rank % ranks).train()


def _experts(rank: int, program: Program) -> None:
    """Experts that two ranks share, with other values for the other two; the rest is everybody's."""
    world, both = experts.meshes()
    model = experts.sharded(
        fullshard,
        experts.model_of(rank // 2),
        world,
        lambda s: fullshard.ShardPlacementResult(s, both["expert"]),
        dim=0,
    )
    (optimizer,), _ = _optimizers("AdamW", model)
    for step in range(len(program.steps)):
        experts.loss(model, experts.batch(step, rank)).backward()
        fullshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _materialized(rank: int, program: Program) -> None:
    with torch.device("meta"):
        model = _plain(program.spec, program.seed)
    _shard(program, model, program.world)

    def init(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        for p in module.parameters(recurse=False):
            nn.init.uniform_(p, -0.3, 0.3)

    fullshard.materialize(model, device="cpu", init=init, seed=program.seed)
    Run(program, model, rank).train()


def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor):
                value.copy_(distribute_tensor(state[name], value.device_mesh, value.placements, src_data_rank=None))
            else:
                value.copy_(state[name])


def _rank_0_real(rank: int, program: Program) -> None:
    """As with a large checkpoint: rank 0 has the values, the others memory, then all have them."""
    real = _plain(program.spec, program.seed) if rank == 0 else None
    if real is None:
        with torch.device("meta"):
            model = _plain(program.spec, program.seed)
    else:
        model = copy.deepcopy(real)
    _shard(program, model, program.world)
    if real is None:
        model.to_empty(device="cpu")
        model.calls.zero_()
    sent = [real.state_dict() if real is not None else None]
    dist.broadcast_object_list(sent, src=0)
    assert sent[0] is not None
    _load(model, sent[0])
    Run(program, model, rank).train()


def _loaded(rank: int, program: Program) -> None:
    """Another seed on each rank, which does not matter any more when a checkpoint was loaded."""
    model = _shard(program, _plain(program.spec, program.seed + rank), program.world)
    _load(model, _plain(program.spec, program.seed).state_dict())
    Run(program, model, rank).train()


def _some_ranks(rank: int, program: Program) -> None:
    """Two of four ranks train; the others have a model of their own, which is not sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("what", "data"))["data"]
    mine = replace(program, world=2, strategy="default")
    if rank < 2:
        Run(mine, _shard(mine, _plain(program.spec, program.seed), 2, mesh=mesh), rank).train()
    else:
        plain = nn.Linear(3, 3)
        plain(torch.ones(1, 3)).sum().backward()
    dist.barrier()


_SETTINGS: dict[str, Callable[[int, Program], None]] = {
    "one model": _one_model,
    "adversaries": _adversaries,
    "stages": _stages,
    "experts": _experts,
    "materialized": _materialized,
    "rank 0 real": _rank_0_real,
    "loaded": _loaded,
    "some of the ranks": _some_ranks,
}
