"""Training of a sharded model, written down step by step so that `reference.py` can take each step again.

Nothing of it goes through the library that is verified but the training itself: full tensors are DTensor's own, and
ranks write files instead of sending messages. For fullshard and for torch's FSDP2 alike.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard.migrate.axes import Axes
from fullshard.migrate.declared import parallelize_by
from fullshard.migrate.experts import (
    ExpertDivision,
    apply_experts,
    divide_experts,
    divide_gradients,
    find_experts,
    unit_arguments,
)
from fullshard.migrate.meshes import folded, with_copies
from fullshard.migrate.relations import Relations
from fullshard.migrate.sequences import ContextParallel, sequences_of
from fullshard.migrate.tensor_parallel import Replaced, divide
from fullshard.migrate.tree import Tree
from fullshard.observe.partial_reads import PartialReads
from fullshard.program import OwnDtype, Program, blocks_apart, to_device

from .pipelined import Stages
from .replicas import Copies, Held
from .setting import SCALE, SEED, Setting, batch_index, clean, named, seed_generators, seed_of, ties_of
from .strategy import Strategy, norms_of
from .weights import Uses, Weights


class Before(NamedTuple):
    """The state of one rank before the first step. `ties`: names of parameters that are one. `cuts`: the dim along
    which `fully_shard` cut each parameter. `threads`: that torch computes with. `control`: see kernels.py. `stages`: of
    a pipeline, that of each parameter here."""

    buffers: dict[str, Tensor]
    ties: list[tuple[str, ...]]
    parameters: dict[str, Tensor]
    cuts: dict[str, int]
    threads: int = 0
    control: dict[str, int] = {}
    stages: dict[str, int] = {}


class Watched(NamedTuple):
    """The values of one rank in one step. `gradients`: of each micro-batch, as autograd made them; `scaled`: after the
    reduction, before a scaler divided them, full on rank 0; `moved`: parameters whose shards changed before the
    optimizer stepped; `torn`: those that were several tensors in one backward."""

    gradients: list[dict[str, Tensor]]
    scaled: dict[str, Tensor | None]
    moved: list[str]
    torn: list[str]


class Step(NamedTuple):
    """The record of one rank in one step. Of each micro-batch: the loss and digests of the generators' states
    afterwards. `buffers`: after the step. `uses`: of full parameters. `gradients`, `parameters`, `state`: full tensors
    on rank 0, None of absent gradients; empty elsewhere. `..._apart`: this rank's shards that are not what the first
    rank with a copy of them holds. `reads`: numbers that the program took of parts of a sum.
    `total`: of a pipeline, the loss that its step returned; `losses` are those of the last stage then, and `balances`
    the balance losses of each micro-batch in the stages of this rank, which are to be added."""

    losses: list[Tensor]
    generators: list[dict[str, str]]
    buffers: dict[str, Tensor]
    uses: Uses
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Any]]
    gradients_apart: Sequence[Held] = ()
    stepped_apart: Sequence[Held] = ()
    watched: Watched | None = None
    reads: tuple[str, ...] = ()
    total: Tensor | None = None
    balances: Sequence[Tensor] = ()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers on the host."""
    return {clean(name): host(buffer) for name, buffer in model.named_buffers()}


def generators(device: torch.device) -> dict[str, str]:
    """Digests of the states of the generators that a forward may use, by the library that owns them."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    found = {"torch": b"".join(bytes(state.tolist()) for state in states), "Python": repr(random.getstate()).encode()}
    if "numpy" in sys.modules:
        _, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = words.tobytes() + repr(rest).encode()
    return {library: hashlib.blake2s(state).hexdigest() for library, state in found.items()}


class Training:
    """A sharded model of a program and its optimizer, which take steps."""

    def __init__(
        self,
        program: Program,
        setting: Setting,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """`mesh`: that of another training with this setting. `output_dtype`: of the outputs of the whole model."""
        self.program, self.setting, self.device = program, setting, device
        strategy = setting.strategy
        seed_generators(SEED)
        model: Any = program.model().to(device)
        model.train()
        blocks = blocks_apart(model) if strategy.recompute else []
        self.mesh = mesh = mesh or _mesh(setting, device)
        self.loss_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        # The context that cuts batches along `cp`, if there is the axis.
        self.sequences: ContextParallel | None = None
        cut = folded(mesh, ("data", "cp"), "shard") if strategy.context > 1 else mesh["shard"]
        inner = cut
        if strategy.replicas > 1:
            copies = mesh["replicate"]
            inner = with_copies(copies, cut) if strategy.context > 1 else mesh["replicate", "shard"]
        experts, axes = ExpertDivision(), _axes(setting)
        # What divides experts looks at the plain model.
        parts = (
            strategy.tensor > 1 and program.parallelize is None and divide(Tree(model), strategy.parallelism).sequence
        )
        if strategy.tensor > 1:
            made = (program.parallelize or parallelize_by(strategy.parallelism))(model, mesh["tp"])
            self.loss_context = made if callable(made) else nullcontext
        if strategy.divides and setting.library == "fullshard":
            if strategy.context > 1:
                self.sequences = sequences_of(axes, mesh, cut, "auto")
                self.loss_context = _both(self.sequences, self.loss_context)
            experts = _divided_experts(model, strategy, axes, mesh, divided=parts)
            if strategy.pipeline == 1:
                Relations(model, axes, mesh, sequences=self.sequences)
        self.stages = self._cut(model, axes)
        if self.stages is not None:
            program = replace(program, shard=self.stages.shard)
            experts = replace(experts, names=tuple(name for name in experts.names if self.stages.split.is_own(name)))
        self.trained: Any = (
            Sharded(program, model, setting, inner, output_dtype, experts)
            if setting.is_fsdp2
            else former(program, model, setting, inner)
        )
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.model = self.trained.model
        if self.stages is not None:
            self.pipeline = self.stages.begin(self.loss_context, self.sequences, sequence=strategy.sequence)
        self.optimizer = program.optimizer(self.model.parameters())
        self.scaler = _scaler(setting, device)
        self.trained.weights.held = self.trained.parameters()
        # Of FSDP2; the shards of others are not tensors of one parameter.
        if setting.watched:
            self.trained.weights.gradients = []
        if not setting.prefetch:
            self.model.set_memory_budget(prefetch=0)
        self.copies = Copies(mesh, cut, self.model, _cuts(self.model)) if setting.is_fsdp2 else None

    def _cut(self, model: nn.Module, axes: Axes) -> Stages | None:
        """Keep in `model` the stages of this rank; None without a pipeline."""
        if self.setting.strategy.pipeline == 1:
            return None
        return Stages(self.program, model, self.setting.strategy, axes, self.mesh)

    @property
    def leads(self) -> bool:
        """Whether this rank writes full tensors."""
        return self.setting.leads(dist.get_rank())

    def before(self, control: dict[str, int]) -> Before:
        """Collective. `control`: see kernels.py."""
        held = self.trained.weights.held if self.leads else {}
        plain, threads = self.trained.plain, torch.get_num_threads()
        places = {} if self.stages is None else self.stages.places(self.model)
        return Before(buffers_of(plain), ties_of(plain), held, _cuts(self.model), threads, control, places)

    def batch(self, step: int, micro: int) -> tuple[int, Any]:
        """Returns the number of a batch, and the batch on the device."""
        index = batch_index(self.setting, step, micro, self.setting.data_rank(dist.get_rank()))
        return index, to_device(self.program.batch(index), self.device)

    def step(self, step: int, between: Callable[[], object] = lambda: None) -> Step:
        """Take a step with the batches of the number `step`. `between` is called before the optimizer steps, with the
        gradients in place."""
        trained, weights, micros = self.trained, self.trained.weights, self.setting.strategy.micro
        losses: list[Tensor] = []
        states: list[dict[str, str]] = []
        reads = PartialReads((clean(name), p) for name, p in self.model.named_parameters())
        # The other steps make the same calls.
        reading = reads if step == 0 else nullcontext()
        held = _locals(self.model) if self.setting.watched else {}
        if self.setting.watched:
            weights.gradients = []
        total: Tensor | None = None
        balances: list[Tensor] = []
        if self.stages is not None:
            weights.phase = "forward"
            with reading:
                batches = [self.batch(step, micro)[1] for micro in range(micros)]
                losses, balances, total = self.stages.step(self.pipeline, batches)
            losses, balances, total = [full(loss) for loss in losses], [full(loss) for loss in balances], full(total)
        for micro in range(micros if self.stages is None else 0):
            index, batch = self.batch(step, micro)
            with trained.window(last=micro == micros - 1):
                seed_generators(seed_of(index))
                if weights.gradients is not None:
                    weights.gradients.append({})
                weights.phase = "forward"
                with self.loss_context():
                    batch = batch if self.sequences is None else self.sequences.split(batch)
                    with reading:
                        loss = self.program.loss(self.model, batch)
                    weights.phase = "backward"
                    self.scaler.scale(loss / micros).backward()
            losses.append(full(loss))
            states.append(generators(self.device))
        uses, buffers = weights.take(), buffers_of(trained.plain)
        scaled = trained.gradients() if self.setting.watched else {}
        self.scaler.unscale_(self.optimizer)
        gradients = trained.gradients()
        gradients_apart = self.copies.gradients() if self.copies else ()
        between()
        now = _locals(self.model) if self.setting.watched else {}
        moved = [name for name, value in now.items() if not torch.equal(value, held[name])]
        with reading:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        weights.held = trained.parameters()
        state = trained.state(self.optimizer)
        made = (gradients, weights.held, state) if self.leads else ({}, {}, {})
        stepped_apart = self.copies.stepped(self.optimizer) if self.copies else ()
        self.optimizer.zero_grad()
        found = Step(losses, states, buffers, uses, *made)
        found = found._replace(reads=tuple(map(str, reads.found)), total=total, balances=balances)
        watched = Watched(weights.gradients or [], scaled, moved, weights.torn()) if self.setting.watched else None
        return found._replace(gradients_apart=gradients_apart, stepped_apart=stepped_apart, watched=watched)


class Sharded:
    """A model that `fully_shard` of either library sharded, and what it is read by."""

    def __init__(
        self,
        program: Program,
        model: Any,
        setting: Setting,
        mesh: DeviceMesh,
        output_dtype: torch.dtype | None = None,
        experts: ExpertDivision | None = None,
    ) -> None:
        own = norms_of(model) if setting.strategy.norms else []
        kept = {p for module in own for p in module.parameters()}
        self.weights = Weights(setting.strategy.dtype, {name for name, p in named(model) if p in kept})
        self.weights.watch(model, shard(program, model, setting, mesh, output_dtype, experts))
        self.model = self.plain = model
        self._full = full if setting.leads(dist.get_rank()) else _taking_part

    @contextmanager
    def window(self, *, last: bool) -> Iterator[None]:
        """Runs a micro-batch inside; gradients are reduced in the last."""
        self.model.set_requires_gradient_sync(last)
        yield

    def parameters(self) -> dict[str, Tensor]:
        """Returns the parameters, on every rank."""
        return {name: full(p) for name, p in named(self.model)}

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else self._full(p.grad) for name, p in named(self.model)}

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        return {
            name: {key: self._full(v) for key, v in optimizer.state[p].items()}
            for name, p in named(self.model)
            if p in optimizer.state
        }


def _locals(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's shards."""
    return {name: host(p.to_local() if isinstance(p, DTensor) else p) for name, p in named(model)}


def _cuts(model: nn.Module) -> dict[str, int]:
    """Returns the dim along which each parameter is cut, by name; of DTensors alone, so of FSDP2."""
    found: dict[str, int] = {}
    for name, parameter in named(model):
        axes = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
        if isinstance(parameter, DTensor) and "shard" in axes:
            placement: Any = parameter.placements[axes.index("shard")]
            if placement.is_shard():
                found[name] = placement.dim
    return found


def former(program: Program, model: nn.Module, setting: Setting, mesh: DeviceMesh) -> Any:
    """The same model under FSDP1 or DDP."""
    from .former import Fsdp1, Replicated

    return (Fsdp1 if setting.library == "fsdp1" else Replicated)(program, model, setting, mesh)


def shard(
    program: Program,
    model: nn.Module,
    setting: Setting,
    mesh: DeviceMesh,
    output_dtype: torch.dtype | None = None,
    experts: ExpertDivision | None = None,
) -> list[nn.Module]:
    """Apply the program's `shard` with `fully_shard` of the library, under the strategy's options; the modules that it
    was called with, in order. `output_dtype`: of `model` itself. `experts`: units of their own, before those of the
    program."""
    library: Any
    if setting.library == "torch":
        import torch.distributed.fsdp as library
    else:
        import fullshard as library
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": setting.strategy.reshard}
    if setting.strategy.dtype is not None:
        keeps = {"param_dtype_override_fn": OwnDtype(norms_of(model))} if setting.strategy.norms else {}
        policy = library.MixedPrecisionPolicy(setting.strategy.dtype, setting.strategy.reduce_dtype, **keeps)
        options["mp_policy"] = policy
    if setting.strategy.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=setting.device != "cpu")
    units: list[nn.Module] = []

    def fully_shard(module: Any, **given: Any) -> Any:
        units.extend([module] if isinstance(module, nn.Module) else module)
        if output_dtype is not None and module is model:
            policy = options.get("mp_policy", library.MixedPrecisionPolicy())
            given = {**given, "mp_policy": replace(policy, output_dtype=output_dtype)}
        return library.fully_shard(module, **{**options, **given})

    experts = experts or ExpertDivision()
    for name in experts.names:
        module = model.get_submodule(name)
        given = unit_arguments(module, experts, options.get("mp_policy", library.MixedPrecisionPolicy()))
        library.fully_shard(module, **{**options, **given})
        divide_gradients([module], _axes(setting))
        units.append(module)
    program.shard(model, fully_shard)
    return units


def _axes(setting: Setting) -> Axes:
    strategy = setting.strategy
    sizes = {"dp_replicate": strategy.replicas, "dp_shard": setting.shards // strategy.context}
    sizes |= {"cp": strategy.context, "tp": strategy.tensor, "pp": strategy.pipeline, "ep": strategy.experts}
    return Axes(**sizes, etp=strategy.tensor if strategy.cut else 1)


def _divided_experts(
    model: nn.Module, strategy: Strategy, axes: Axes, mesh: DeviceMesh, *, divided: bool
) -> ExpertDivision:
    """Divide the experts of `model` over the ranks of `mesh`. `divided`: whether each rank along tp has its part of the
    tokens. Collective."""
    tree = Tree(model)
    experts = divide_experts(find_experts(tree, strategy.parallelism), axes, mesh)
    if experts.names:
        apply_experts(tree, experts, experts.names, mesh, Replaced(), divided=divided)
    return experts


def _both(
    first: AbstractContextManager[Any], second: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def both() -> Iterator[None]:
        with second(), first:
            yield

    return both


def torch_has_overrides() -> bool:
    """Whether torch's FSDP2 knows compute dtypes of single parameters: from 2.15 on."""
    import torch.distributed.fsdp as library

    return hasattr(library.MixedPrecisionPolicy, "param_dtype_override_fn")


def _mesh(setting: Setting, device: torch.device) -> DeviceMesh:
    """The axes "pp", "replicate", "shard" and "tp", of which those but "shard" have several ranks; with "cp" it has
    "data" instead of "shard"."""
    strategy = setting.strategy
    shard = {"data": setting.shards // strategy.context, "cp": strategy.context}
    axes = {
        "pp": strategy.pipeline,
        "replicate": strategy.replicas,
        **(shard if strategy.context > 1 else {"shard": setting.shards}),
    }
    axes["tp"] = strategy.tensor
    sizes = {name: size for name, size in axes.items() if size > 1 or name in ("shard", "data")}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _scaler(setting: Setting, device: torch.device) -> torch.amp.GradScaler:
    library: Any = torch.amp
    if setting.library == "fullshard":
        import fullshard as library
    elif setting.library == "fsdp1":
        import torch.distributed.fsdp.sharded_grad_scaler as sharded

        library = SimpleNamespace(GradScaler=sharded.ShardedGradScaler)
    scaler: torch.amp.GradScaler = library.GradScaler(
        device.type, init_scale=SCALE, growth_interval=1 << 30, enabled=setting.strategy.precision == "fp16"
    )
    return scaler


def host(tensor: Tensor) -> Tensor:
    """A copy on the host."""
    return tensor.detach().to("cpu", copy=True)


def full(value: Any) -> Any:
    """The whole of a DTensor, and of other tensors a copy, on the host. Collective."""
    if isinstance(value, DTensor):
        return host(value.full_tensor())
    return host(value) if isinstance(value, Tensor) else value


def _taking_part(value: Any) -> Any:
    if isinstance(value, DTensor):
        value.full_tensor()  # collective
