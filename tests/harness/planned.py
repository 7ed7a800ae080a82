"""Models for the planner, and what a sharded step of them holds, counted: every storage, over a fake process group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.counting import ByteCounter, MemoryCounter
from fullshard import MixedPrecisionPolicy, checkpoint_activations, fully_shard
from fullshard.engine import unit_of
from fullshard.migrate import activations
from fullshard.observe import record
from fullshard.plan import Strategy, find_hardware, units_of
from fullshard.plan.description import Model
from fullshard.plan.facts import describe
from fullshard.plan.recomputation import is_on_host, without_host
from fullshard.plan.simulation import Simulation
from fullshard.plan.spans import Step, steps_of
from fullshard.program import OwnDtype, Program, modules_of
from fullshard.train.model import Llama, LlamaShape
from tests.harness.fake import fake_world
from tests.harness.models import Transformer, seeded

# A CPU whose messages go over the fake group: exchanged, and never from rank to rank.
FAKE = replace(find_hardware("cpu"), backend="fake")


@dataclass(frozen=True)
class Planned:
    """A model, the units that are sharded before the root, and the shape of a sample. `vocabulary`: inputs are numbers
    of tokens below it, and so are the targets; 0: inputs are random, and the loss is the mean square."""

    make: Callable[[], nn.Module]
    units: tuple[str, ...]
    input_shape: tuple[int, ...]
    vocabulary: int = 0
    # Buffers are in the dtype of computation: batch norm on a CPU takes no others.
    buffers_follow: bool = False
    # Classes of modules that compute in the dtype of their parameters.
    keep: tuple[str, ...] = ()

    def computed_in(self, dtype: str) -> Planned:
        if not (dtype and self.buffers_follow):
            return self
        return replace(self, make=partial(_with_buffers, self.make, getattr(torch, dtype)))

    def batch(self, index: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        shape = (size, *self.input_shape)
        if self.vocabulary:
            numbers = torch.randint(self.vocabulary, shape, generator=generator)
            return numbers, numbers.roll(-1, dims=-1)
        return torch.randn(shape, generator=generator), torch.zeros(())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0]).float()
        if self.vocabulary:
            return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())
        return out.square().mean()

    def program(self, size: int) -> Program:
        def shard(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
            for name in self.units:
                fully_shard(model.get_submodule(name))
            fully_shard(model)

        return Program(self.make, self.loss, lambda index: self.batch(index, size), shard=shard)


# ---- models ----------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, width: int, *inner: nn.Module, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))  # type: ignore[no-any-return]


def _mlp(width: int = 96, hidden: int = 384, activation: type[nn.Module] = nn.GELU) -> nn.Module:
    return _Residual(width, nn.Linear(width, hidden), activation(), nn.Linear(hidden, width, bias=False))


def _chain(make: Callable[[], nn.Module], depth: int = 3, width: int = 96) -> nn.Module:
    return nn.Sequential(nn.Linear(40, width), *(make() for _ in range(depth)), nn.Linear(width, 24))


class _Experts(nn.Module):
    """Top one of four experts, each on its tokens as a dense mask: shapes do not depend on values."""

    def __init__(self, width: int = 96, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = torch.relu(torch.einsum("nd,edh->enh", x, self.up))
        return x + torch.einsum("enh,ehd,ne->nd", hidden, self.down, weights)


class _ConvBlock(nn.Module):
    def __init__(self, channels: int, norm: nn.Module, groups: int = 1) -> None:
        super().__init__()
        self.norm = norm
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.silu(self.conv(self.norm(x))))


def _convolutions(norm: Callable[[], nn.Module], groups: int = 1) -> nn.Module:
    blocks = (_ConvBlock(24, norm(), groups) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(24 * 64, 10))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 4, stride=2, padding=1)
        self.deep = nn.Conv2d(16, 32, 4, stride=2, padding=1)
        self.rise = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down(x))
        deep = torch.relu(self.rise(torch.relu(self.deep(first))))
        return self.up(torch.cat([first, deep], 1))  # type: ignore[no-any-return]


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 48)
        self.layers = nn.ModuleList(_Attention(48, 4) for _ in range(2))
        self.head = nn.Linear(48, 60)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Attention with written-out scores, as models without fused kernels have it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).reshape(n, length, width))


def _frozen_base() -> nn.Module:
    """Adapters: in each block a large frozen weight, and two small ones that are trained."""
    model = nn.Sequential(*(_Residual(96, nn.Linear(96, 96), nn.Linear(96, 4), nn.Linear(4, 96)) for _ in range(3)))
    for block in model:
        block.inner[0].requires_grad_(False)  # type: ignore[index]
    return model


def _mixed_dtypes() -> nn.Module:
    """Norms in float32 and matrices in bfloat16, in one unit."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(128))
            self.weight = nn.Parameter(torch.randn(128, 128, dtype=torch.bfloat16) * 0.05)

        def forward(self, x: Tensor) -> Tensor:
            return x + ((x * self.gain).bfloat16() @ self.weight).float()

    return nn.Sequential(*(Block() for _ in range(3)))


def _llama(*, tied: bool) -> nn.Module:
    model = Llama(LlamaShape(120, 3, 64, 4, 2, 160, 64, tie_embeddings=tied))
    if not model.embedding.weight.is_meta:
        model.init_weights()
    return model


_LAYERS = ("layers.0", "layers.1", "layers.2")
_INNER = ("1", "2", "3")
MODELS = {
    "llama": Planned(partial(_llama, tied=False), _LAYERS, (64,), 120),
    "llama, tied": Planned(partial(_llama, tied=True), _LAYERS, (64,), 120),
    "transformer": Planned(lambda: Transformer(90, 48, 4, 3), _LAYERS, (48,), 90),
    "transformer, tied": Planned(lambda: Transformer(90, 48, 4, 3, tied=True), _LAYERS, (48,), 90),
    "transformer, nested units": Planned(
        lambda: Transformer(90, 48, 4, 3), ("layers.0.mlp", "layers.0", "layers.2"), (48,), 90
    ),
    "transformer, one unit": Planned(lambda: Transformer(90, 48, 4, 3), (), (48,), 90),
    "written-out attention": Planned(_Encoder, ("layers.0", "layers.1"), (24,), 60),
    "mlp": Planned(lambda: _chain(_mlp), _INNER, (40,)),
    "mlp, narrow": Planned(lambda: _chain(lambda: _mlp(33, 130), width=33), _INNER, (40,)),
    "mlp, relu": Planned(lambda: _chain(lambda: _mlp(activation=nn.ReLU)), _INNER, (40,)),
    "mlp, tanh": Planned(lambda: _chain(lambda: _mlp(activation=nn.Tanh)), _INNER, (40,)),
    "experts": Planned(lambda: _chain(_Experts), _INNER, (40,)),
    "frozen base": Planned(_frozen_base, ("0", "1", "2"), (96,)),
    "frozen first": Planned(lambda: _first_frozen(_chain(_mlp)), _INNER, (40,)),
    "mixed dtypes": Planned(_mixed_dtypes, ("0", "1", "2"), (128,)),
    "convolutions, group norm": Planned(lambda: _convolutions(lambda: nn.GroupNorm(4, 24)), _INNER, (3, 8, 8)),
    "convolutions, batch norm": Planned(
        lambda: _convolutions(lambda: nn.BatchNorm2d(24)), _INNER, (3, 8, 8), buffers_follow=True
    ),
    "convolutions, batch norm in float32": Planned(
        lambda: _convolutions(lambda: nn.BatchNorm2d(24)), _INNER, (3, 8, 8), keep=("BatchNorm",)
    ),
    "mlp, norms in float32": Planned(lambda: _chain(_mlp), _INNER, (40,), keep=("LayerNorm",)),
    "depthwise convolutions": Planned(lambda: _convolutions(nn.Identity, 24), _INNER, (3, 8, 8)),
    "u-net": Planned(_UNet, ("down", "deep", "rise", "up"), (3, 16, 16)),
    "single weights": Planned(
        lambda: nn.Sequential(*(nn.Linear(80, 80, bias=False) for _ in range(4))), ("0", "1", "2"), (80,)
    ),
    "bottleneck": Planned(
        lambda: nn.Sequential(nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 200), nn.Tanh(), nn.Linear(200, 64)),
        ("0", "2"),
        (64,),
    ),
    "embedding alone": Planned(lambda: nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 500)), ("0",), (16,), 500),
}


def _with_buffers(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    model = make()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return model


def _first_frozen(model: nn.Module) -> nn.Module:
    for module in list(model)[:2]:  # type: ignore[call-overload]
        module.requires_grad_(False)
    return model


# ---- what is counted -------------------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """Bytes of rank 0: at rest of shards and buffers, of state, of kept message buffers; and the most in a step.
    `messages`: bytes of collectives of a step by kind; `commands`: of a step; `host`: bytes of activations that were on
    the host at once."""

    shards: int
    state: int
    buffers: int
    step: int
    optimizer: int
    messages: dict[str, int]
    commands: list[str]
    host: int = 0


class Real(MemoryCounter):
    """Of a DTensor its local tensor: its own storage has a size and no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tensor.untyped_storage() for tensor in _locals([*args, *(kwargs or {}).values()])]
        self._know(given)
        result = func(*args, **(kwargs or {}))
        self._look([*given, *(tensor.untyped_storage() for tensor in _locals([result]))])
        return result


def _locals(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those that have memory: none on the meta device, which is asked for shapes."""
    for value in values:
        if isinstance(value, DTensor):
            yield value.to_local()
        elif isinstance(value, Tensor):
            if not value.is_meta:
                yield value
        elif isinstance(value, list | tuple):
            yield from _locals(value)


def count(model: Planned, strategy: Strategy, size: int, *, trace: bool = False) -> Counted:
    """Three steps; what the third holds, and what the fourth sends and commands."""
    model = model.computed_in(strategy.compute)
    with fake_world(strategy.ranks), _elsewhere() as host:
        made: Any = _sharded(model, strategy)
        optimizer = OPTIMIZERS[strategy.optimizer]([p for p in made.parameters() if p.requires_grad])

        def take(step: int, before_optimizer: Callable[[], None] = lambda: None) -> None:
            for window in range(strategy.accumulate):
                made.set_requires_gradient_sync(strategy.send_each or window == strategy.accumulate - 1)
                batch = model.batch(step, size)
                model.loss(made, batch).backward()
            before_optimizer()
            optimizer.step()
            optimizer.zero_grad()

        take(0)
        take(1)
        gc.collect()
        units = [unit for module in made.modules() if (unit := unit_of(module))]
        shards = sum(group.flat.nbytes for unit in units for group in unit.groups)
        shards += sum(buffer.nbytes for buffer in made.buffers())
        values = [value for state in optimizer.state.values() for value in state.values()]
        state = sum(local.nbytes for local in _locals(values))
        assert units[0].root is not None
        kept = units[0].root.shared.pool.nbytes
        with Real() as counter:
            counter.mark("step")
            take(2, lambda: counter.mark("optimizer"))
        messages: dict[str, int] = {}
        commands: list[str] = []
        if trace:
            with ByteCounter() as sent, record(made) as seen:
                take(3)
            messages, commands = dict(sent.messages), [" ".join(command) for command in seen.commands]
        peaks = counter.peak("step"), counter.peak("optimizer")
        return Counted(shards, state, kept, *peaks, messages, commands, host.peak)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-foreach": partial(torch.optim.AdamW, foreach=True),
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class _Elsewhere:
    """A host for a device that is this CPU: what is on it is not counted as the device's."""

    def __init__(self) -> None:
        self.there = self.peak = 0

    def to_host(self, tensor: Tensor) -> Any:
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return tensor
        self.there += tensor.nbytes
        self.peak = max(self.peak, self.there)
        packed = _Packed(tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype)
        weakref.finalize(packed, self._gone, tensor.nbytes)
        return packed

    def to_device(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype).zero_()

    def _gone(self, nbytes: int) -> None:
        self.there -= nbytes


@dataclass(frozen=True, eq=False)
class _Packed:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def _elsewhere() -> Iterator[_Elsewhere]:
    """Activations that `checkpoint_activations` moves to the host leave this CPU, as they leave a device."""
    host = _Elsewhere()
    with (
        mock.patch.object(activations, "_to_host", host.to_host),
        mock.patch.object(activations, "_to_device", host.to_device),
        mock.patch.object(activations, "_on_device", lambda *_: True),
    ):
        yield host


_PRODUCTS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm bmm addmm baddbmm convolution _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
    ).split()
}


def _alternating() -> Any:
    """Keeps what products make, but for every second `mm`: as torchtitan's selection of single operations."""
    met = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation is torch.ops.aten.mm.default:
            met[context.is_recompute] += 1
            keeps = met[context.is_recompute] % 2 == 1
        else:
            keeps = operation in _PRODUCTS
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_SELECTIONS = {
    "selective": partial(create_selective_checkpoint_contexts, list(_PRODUCTS)),
    "alternate": _alternating,
    "keep:aten.mm,aten.bmm": partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    ),
}


def _sharded(model: Planned, strategy: Strategy) -> nn.Module:
    made = seeded(model.make)
    assert isinstance(strategy.recompute, str)
    if is_on_host(strategy.recompute) and model.units:
        way = without_host(strategy.recompute)
        save = way.removeprefix("keep:").split(",") if way.startswith("keep:") else ()
        checkpoint_activations(
            made, where=lambda name, _: name in model.units, recompute=way != "none", save=save, offload=True
        )
    elif strategy.recompute != "none" and model.units:
        selects = {} if strategy.recompute == "whole" else {"context_fn": _SELECTIONS[strategy.recompute]}
        for name in model.units:
            module = made.get_submodule(name)
            again = partial(checkpoint, module.forward, use_reentrant=False, **selects)
            module.forward = again  # type: ignore[method-assign]
    dtypes = [getattr(torch, name) if name else None for name in (strategy.compute, strategy.reduce)]
    keeps = OwnDtype(modules_of(made, model.keep)) if model.keep else None
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(*dtypes, param_dtype_override_fn=keeps)}
    if strategy.replicas > 1:
        axes = (strategy.replicas, strategy.shard)
        options["mesh"] = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard"))
    for name in model.units:
        fully_shard(made.get_submodule(name), reshard_after_forward=strategy.reshard, **options)
    return fully_shard(made, **options)


def predict(model: Planned, strategy: Strategy, size: int) -> Simulation:
    """The same by the planner, run: its bytes are those after the step."""
    described = _described(model, strategy, size)
    simulation = Simulation(units_of(described, strategy), strategy, FAKE, described.buffer_nbytes)
    simulation.run(steps_of(described, strategy.recompute))
    return simulation


def step_of(model: Planned, strategy: Strategy, size: int) -> Step:
    """The step that the planner simulates."""
    return steps_of(_described(model, strategy, size), strategy.recompute)


def _described(model: Planned, strategy: Strategy, size: int) -> Model:
    program = model.computed_in(strategy.compute).program(size)
    ways = {"compute": strategy.compute, "recompute": strategy.recompute}
    return describe(program, "model", **ways, keep_float32=model.keep, on_cpu=True)  # type: ignore[arg-type]
