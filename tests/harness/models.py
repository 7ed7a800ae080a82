"""Small deterministic models for parity tests, and the plain single-process training that is their oracle.

A `Case` says how to build a model, which of its modules become units, what a batch is and what the loss is, so that
one test runs for every shape of model and for every implementation of `fully_shard`. The oracle (`train_reference`)
knows nothing of sharding: each rank's mean loss, their mean, one backward, one optimizer step. Comparisons are on
parameters and optimizer state, never on gradients alone: AdamW divides by the gradient's own size and so hides a
wrong scale from the parameters, but not from its state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import tolerance

Batch = tuple[torch.Tensor, torch.Tensor]  # (inputs, targets)


# Random state belongs to the process: ranks that are threads build their models one after another.
_RANDOM_STATE = threading.RLock()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What `make` builds when it draws from a random state seeded with `seed`; that of the process is untouched.

    It builds until two in a row leave the same random state behind, so `make` must not change what it is given. Ranks
    that are threads share that state, and one that draws a batch meanwhile changes what is drawn here.
    """
    with _RANDOM_STATE, torch.random.fork_rng(devices=[]):
        before = None
        while True:
            torch.manual_seed(seed)
            model, after = make(), torch.get_rng_state()
            if before is not None and torch.equal(before, after):
                return model
            before = after


@dataclass(frozen=True)
class Case:
    """A model for parity tests. `units`: names of the modules to shard, inner ones first; the root comes after them."""

    name: str
    make: Callable[[], nn.Module]
    units: tuple[str, ...]
    input_shape: tuple[int, ...]  # of one sample
    output_shape: tuple[int, ...]  # of one sample
    vocabulary: int = 0  # > 0: inputs and targets are token numbers below it

    def build(self, seed: int = 0) -> nn.Module:
        """A new model whose initial values depend on `seed` alone; the caller's random state is untouched."""
        return seeded(self.make, seed)

    def batch(self, step: int, rank: int = 0, size: int = 3) -> Batch:
        """The batch of `rank` at `step`: (size, *input_shape), (size, *output_shape). Another one for every step and
        rank.
        """
        generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + rank)
        if self.vocabulary:
            tokens = torch.randint(self.vocabulary, (size, *self.input_shape), generator=generator)
            return tokens, torch.randint(self.vocabulary, (size, *self.output_shape), generator=generator)
        return (
            torch.randn(size, *self.input_shape, generator=generator),
            torch.randn(size, *self.output_shape, generator=generator),
        )

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss over the batch, a 0-dim tensor."""
        inputs, targets = batch
        outputs = model(inputs)
        if self.vocabulary:
            return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        return F.mse_loss(outputs.to(targets.dtype), targets)  # up to torch 2.11 it has no backward for two dtypes

    def shard(self, model: nn.Module, shard: Callable[..., object], **options: object) -> nn.Module:
        """Call `shard(module, **options)` on every unit and then on the root; returns `model`."""
        for name in self.units:
            shard(model.get_submodule(name), **options)
        shard(model, **options)
        return model


class _Residual(nn.Module):
    """x + MLP(norm(x)); the weights are plain linears of a width that need not divide by anything."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class _TinyDims(nn.Module):
    """Parameters with fewer rows than ranks, down to one element: most ranks own nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.narrow = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.ones(1))
        self.rows = nn.Parameter(torch.randn(2, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, 4) -> (n, 5)
        scale = self.gain * torch.tanh(self.narrow(torch.relu(self.first(x))))  # (n, 1)
        return scale * self.rows.sum(0)


class _MixedShapes(nn.Module):
    """One to four dimensions, a convolution, and a parameter that belongs to the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, kernel_size=(3, 2), padding=(1, 0))
        self.mix = nn.Conv1d(5, 3, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.table = nn.Parameter(torch.randn(7, 2, 3) * 0.3)
        self.head = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, 2, 4, 4) -> (n, 4)
        features = torch.relu(self.conv(x)).flatten(2)  # (n, 5, 12)
        features = self.norm(self.mix(features))[:, :, :3]  # (n, 3, 3)
        return self.head((features + self.table.sum((0, 1))).flatten(1))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = _Attention(width, heads)
        self.mlp = _Residual(width, 2 * width + 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.attention(self.attention_norm(x)))


class Transformer(nn.Module):
    """A causal language model of a few thousand parameters; `tied` shares the embedding with the head, both in the
    root unit.
    """

    def __init__(
        self, vocabulary: int = 29, width: int = 12, heads: int = 2, depth: int = 3, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (n, length) -> (n, length, vocabulary)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _make_frozen() -> nn.Module:
    model = nn.Sequential(_Residual(6, 9), _Residual(6, 9), nn.Linear(6, 6), _Residual(6, 9))
    model[1].requires_grad_(False)  # a whole unit
    model[0].up.requires_grad_(False)  # a part of one
    model[3].norm.bias.requires_grad_(False)
    return model


CASES: tuple[Case, ...] = (
    Case("uneven_mlp", lambda: nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)), ("0", "2"), (7,), (5,)),
    Case("residual", lambda: nn.Sequential(*(_Residual(10, 17) for _ in range(3))), ("0", "1", "2"), (10,), (10,)),
    Case("tiny_dims", _TinyDims, ("first", "narrow"), (4,), (5,)),
    Case("one_unit", lambda: _Residual(5, 3), (), (5,), (5,)),
    Case("mixed_shapes", _MixedShapes, ("conv", "mix"), (2, 4, 4), (4,)),
    Case("frozen", _make_frozen, ("0", "1", "3"), (6,), (6,)),
    Case("transformer", Transformer, ("layers.0", "layers.1", "layers.2"), (5,), (5,), vocabulary=29),
    Case("nested", Transformer, ("layers.0.mlp", "layers.0", "layers.2"), (5,), (5,), vocabulary=29),
    Case("tied", lambda: Transformer(tied=True), ("layers.0", "layers.1", "layers.2"), (5,), (5,), vocabulary=29),
)
BY_NAME = {case.name: case for case in CASES}


@dataclass
class Trained:
    """What training leaves: full tensors by parameter name; optimizer state as "name.key"."""

    params: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    # How far rounding may have taken each of `params` and `state`, where the optimizer was watched (tolerance.py).
    allowed: dict[str, float] = field(default_factory=dict)


def adamw(params: Iterable[nn.Parameter], *, watched: bool = True) -> torch.optim.Optimizer:
    """The optimizer of the parity tests: a large rate and weight decay, so that each step moves every parameter
    visibly. An oracle's is watched (tolerance.py).
    """
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    return tolerance.watch(optimizer) if watched else optimizer


def train_reference(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
    batches: Sequence[Sequence[Batch]],  # [step][rank]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Trained:
    """Train `model` in this process, without any sharding: the mean over ranks of each rank's mean loss, step by
    step.
    """
    optim = optimizer(model.parameters())
    losses = []
    for step_batches in batches:
        total = 0.0
        for batch in step_batches:
            part = loss(model, batch) / len(step_batches)
            part.backward()
            total += part.item()
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return collect(model, optim, losses)


def collect(model: nn.Module, optim: torch.optim.Optimizer, losses: Sequence[float] = ()) -> Trained:
    """Full copies of the parameters and of the optimizer's tensors. On sharded models a collective: all ranks must
    call it.
    """
    names = {param: name for name, param in model.named_parameters()}
    params = {name: full_copy(param) for param, name in names.items()}
    state = {
        f"{names[param]}.{key}": full_copy(value)
        for param, values in optim.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    allowed = {}
    bounds = tolerance.watched(optim)
    if bounds is not None:
        known = {id(p) for p in bounds.parameters}
        for param, name in names.items():
            allowed[name] = bounds.of_parameter(param) if id(param) in known else 0.0
            for key, value in optim.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    allowed[f"{name}.{key}"] = bounds.of_state(optim, param, key)
    return Trained(params, state, list(losses), allowed)


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor`, gathered first if it is a DTensor."""
    tensor = tensor.detach()
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).clone()


def assert_close_to_tensor_max(
    actual: torch.Tensor, expected: torch.Tensor, eps_multiple: float, what: str = "tensor"
) -> None:
    """Fail unless every |actual - expected| <= eps_multiple * eps(dtype) * max|expected|, and shape and dtype are
    equal.

    Relative to the tensor's maximum, because sums in another order err in proportion to what is summed and not to the
    result. `eps_multiple=0` asks for equal bits (but for the sign of zero).
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if expected.numel() == 0:
        return
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what}: integers differ"
        return
    assert torch.isfinite(expected).all(), f"{what}: the oracle itself is not finite"
    difference = (actual.double() - expected.double()).abs()
    scale = expected.double().abs().max().item()
    allowed = eps_multiple * torch.finfo(expected.dtype).eps * scale
    worst = int(difference.nan_to_num(nan=float("inf")).argmax())
    found = difference.flatten()[worst].item()
    if not found <= allowed:  # also when it is NaN
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape))
        unit = torch.finfo(expected.dtype).eps * scale
        raise AssertionError(
            f"{what}: at {index} found {actual.flatten()[worst].item()!r}, "
            f"expected {expected.flatten()[worst].item()!r}; difference {found:.3g} "
            f"is {found / unit if unit else float('inf'):.3g} eps of the maximum {scale:.3g}, allowed {eps_multiple:g}"
        )


def assert_same_training(actual: Trained, expected: Trained, eps_multiple: float | None = None) -> None:
    """Parameters and optimizer state agree, name by name, within what rounding allows of the oracle's training
    (tolerance.py); or within `eps_multiple` eps of each tensor's maximum, of which 0 asks for equal bits.
    """
    assert eps_multiple is not None or expected.allowed, "the oracle's optimizer was not watched (tolerance.py)"
    for kind in ("params", "state"):
        found, wanted = getattr(actual, kind), getattr(expected, kind)
        assert found.keys() == wanted.keys(), f"{kind}: {sorted(found.keys() ^ wanted.keys())} only on one side"
        for name, value in wanted.items():
            multiple = eps_multiple
            if multiple is None:
                unit = value.double().abs().max().item() if value.numel() else 0.0
                unit *= torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
                multiple = expected.allowed[name] / unit if unit else 0.0
            assert_close_to_tensor_max(found[name], value, multiple, f"{kind} {name}")
