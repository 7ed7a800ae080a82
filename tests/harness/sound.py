"""Programs without a fault, as people write them: modules of torch.nn, patterns of training, families of transformers.
A command that looks for faults may find none in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import Program

from .families import FAMILIES
from .packages import offline


def random_batch(*shape: int) -> Callable[[int], Tensor]:
    return lambda index: torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def tokens(index: int) -> Tensor:
    return torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(index))


def squares(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model with one output, or with a tuple of them."""
    found = model(batch)
    return (found[0] if isinstance(found, tuple) else found).square().mean()


def _of(build: Callable[[], nn.Module], *shape: int, **options: Any) -> Callable[[], Program]:
    given: dict[str, Any] = {"loss": squares, "batch": random_batch(*shape)}
    return lambda: Program(build, **{**given, **options})


class Applied(nn.Module):
    """Modules, and how forward uses them."""

    def __init__(self, forward: Callable[[Any, Any], Any], **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            if isinstance(module, (nn.Module, nn.Parameter)):
                setattr(self, name, module)
            else:
                self.register_buffer(name, module)
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


def _applied(
    forward: Callable[[Any, Any], Any], modules: Callable[[], dict[str, Any]], *shape: int, **options: Any
) -> Callable[[], Program]:
    return _of(lambda: Applied(forward, **modules()), *shape, **options)


def _blocks(count: int = 3, make: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


# ---- patterns --------------------------------------------------------------------------------------------------------


def _images(norm: Callable[[int], nn.Module]) -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), norm(6), nn.ReLU()) for i in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(6 * 36, 4))


def _frozen_statistics() -> nn.Module:
    model = _images(nn.BatchNorm2d)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def _recurrent(self: Any, x: Tensor) -> Tensor:
    return self.head(self.body(x)[0])  # type: ignore[no-any-return]


def _routed(self: Any, x: Tensor) -> Tensor:
    """Experts of which some see no token."""
    weights, chosen = self.router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        rows, place = (chosen == number).nonzero(as_tuple=True)
        if rows.numel():
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def _queued(self: Any, x: Tensor) -> Tensor:
    """Negatives from a queue that all ranks fill."""
    key = self.encoder(x)
    with torch.no_grad():
        parts = [torch.empty_like(key) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, key.contiguous())
        negatives = self.queue.clone()
        self.queue.copy_(torch.cat([self.queue, *parts])[-len(self.queue) :])
    return key @ negatives.T


def _averaged(self: Any, x: Tensor) -> Tensor:
    """Codes whose average over ranks a buffer follows."""
    found = self.encoder(x)
    with torch.no_grad():
        mean = found.mean(0)
        dist.all_reduce(mean)
        self.codes.lerp_(mean / dist.get_world_size(), 0.1)
    return found - self.codes


def _in_segments(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _checkpointed_units(model: Any, fully_shard: Any) -> None:
    """Wrappers around units that are sharded already: each recomputes one unit."""
    for place, block in enumerate(model):
        model[place] = checkpoint_wrapper(fully_shard(block) or block)
    fully_shard(model)


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().mean()


def _gaussian(self: Any, x: Tensor) -> Tensor:
    """A density, whose covariance has to be positive definite, and samples of it."""
    scale = self.body(x).T @ self.body(x) / len(x) + torch.eye(8)
    density = torch.distributions.MultivariateNormal(self.body(x).mean(0), scale)
    return density.log_prob(density.rsample((5,)))


def _sampled(self: Any, x: Tensor) -> Tensor:
    """Draws by probability: no NaN may be in it."""
    found = self.body(x).softmax(-1)
    drawn = torch.multinomial(found, 1)
    return found.gather(1, drawn).log()


def _adapter() -> nn.Module:
    """A frozen base in bfloat16, and adapters in float32."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x.bfloat16()).float() + self.up(self.down(x))

    return _blocks(2, Adapted)


def _adapters_and_base(model: Any, fully_shard: Any) -> None:
    for block in model:
        fully_shard(block.base)
        fully_shard(block)
    fully_shard(model)


class _Sketched(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(context: Any, *grads: Any) -> Tensor:
        (x,) = context.saved_tensors
        return x.cos() * grads[0]  # type: ignore[no-any-return]


def _tied() -> dict[str, Any]:
    embed, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embed.weight
    return {"embed": embed, "blocks": _blocks(), "head": head}


def _clipping(parameters: Any) -> torch.optim.Optimizer:
    class Clipped(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            held = [p for group in self.param_groups for p in group["params"]]
            norm = float(fullshard.clip_grad_norm_(held, 1.0))
            assert norm == norm or True
            return super().step(closure)

    return Clipped(parameters, lr=1e-3)


def _full_norms(parameters: Any) -> torch.optim.Optimizer:
    """Reads norms of gradients as numbers, of the whole: LARS's way, done right."""

    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        norm = parameter.grad.norm()
                        float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            return super().step(closure)

    return Scaled(parameters, lr=0.1)


def _logged(model: nn.Module, batch: Tensor) -> Tensor:
    loss = squares(model, batch)
    dist.barrier()
    seen = loss.detach().clone()
    dist.all_reduce(seen)
    assert dist.get_rank() >= 0 and float(seen) == float(seen)
    return loss


def _two_forwards(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - model(batch.flip(0))).square().mean()


def _labelled(index: int) -> dict[str, Any]:
    x = random_batch(4, 8)(index)
    return {"x": x, "label": (x.sum(1) > 0).long(), "name": f"batch {index}", "meta": (index, [None, 2.5])}


_ids: dict[str, Any] = {"batch": tokens}

SOUND: dict[str, Callable[[], Program]] = {
    "linear": _of(_blocks, 4, 8),
    "layer norm": _of(lambda: _blocks(2, lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())), 4, 8),
    "rms norm": _of(lambda: _blocks(2, lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))), 4, 8),
    "convolutions": _of(lambda: _images(lambda n: nn.GroupNorm(2, n)), 2, 3, 6, 6),
    "SyncBatchNorm": _of(
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(_images(nn.BatchNorm2d)), 2, 3, 6, 6
    ),
    "BatchNorm in evaluation mode": _of(_frozen_statistics, 2, 3, 6, 6),
    "BatchNorm without statistics": _of(
        lambda: _images(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), 2, 3, 6, 6
    ),
    "instance norm": _of(lambda: _images(nn.InstanceNorm2d), 2, 3, 6, 6),
    "spectral norm": _of(
        lambda: _blocks(2, lambda: parametrizations.spectral_norm(nn.Linear(8, 8))), 4, 8
    ),
    "weight norm": _of(lambda: _blocks(2, lambda: parametrizations.weight_norm(nn.Linear(8, 8))), 4, 8),
    "lstm": _applied(_recurrent, lambda: {"body": nn.LSTM(8, 6), "head": nn.Linear(6, 2)}, 5, 2, 8),
    "gru": _applied(_recurrent, lambda: {"body": nn.GRU(8, 6, 2), "head": nn.Linear(6, 2)}, 5, 2, 8),
    "encoder": _of(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), 5, 2, 8),
    "transformer": _applied(
        lambda m, x: m.body(x, x), lambda: {"body": nn.Transformer(8, 2, 1, 1, 16)}, 5, 2, 8
    ),
    "attention": _applied(lambda m, x: m.body(x, x, x)[0], lambda: {"body": nn.MultiheadAttention(8, 2)}, 5, 2, 8),
    "embedding, tied": _applied(lambda m, x: m.head(m.blocks(m.embed(x))), _tied, **_ids),
    "embedding bag": _applied(
        lambda m, x: m.blocks(m.bag(x)), lambda: {"bag": nn.EmbeddingBag(50, 8), "blocks": _blocks()}, **_ids
    ),
    "padding row": _applied(
        lambda m, x: m.blocks(m.embed(x)),
        lambda: {"embed": nn.Embedding(50, 8, padding_idx=0), "blocks": _blocks()},
        **_ids,
    ),
    "bilinear": _applied(lambda m, x: m.body(x, x), lambda: {"body": nn.Bilinear(8, 8, 3)}, 4, 8),
    "prelu": _of(lambda: _blocks(2, lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(8))), 4, 8),
    "dropout": _of(lambda: _blocks(2, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), 4, 8),
    "parameter list": _applied(
        lambda m, x: x @ m.list[0] + m.list[1],
        lambda: {"list": nn.ParameterList([torch.ones(8, 3), torch.zeros(3)])}, 4, 8,
    ),
    "complex": _applied(
        lambda m, x: (torch.fft.fft(x) * m.filter).abs(), lambda: {"filter": nn.Parameter(torch.ones(8) + 0j)}, 4, 8
    ),
    "adaptive softmax": _applied(
        lambda m, x: m.softmax(x, torch.arange(4))[1],
        lambda: {"softmax": nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])},
        4, 8,
    ),
    "experts": _applied(
        _routed, lambda: {"router": nn.Linear(8, 6), "experts": nn.ModuleList(_blocks(6))}, 3, 8
    ),
    "queue that all ranks fill": _applied(
        _queued, lambda: {"encoder": _blocks(), "queue": torch.ones(6, 8)}, 3, 8
    ),
    "codes that all ranks follow": _applied(
        _averaged, lambda: {"encoder": _blocks(), "codes": torch.zeros(8)}, 3, 8
    ),
    "mask in a buffer": _applied(
        lambda m, x: m.blocks(x) * m.mask, lambda: {"blocks": _blocks(), "mask": torch.ones(4, 8)}, 4, 8
    ),
    "checkpoint in forward": _applied(_in_segments, lambda: {"blocks": nn.ModuleList(_blocks())}, 4, 8),
    "checkpoint around units": _of(lambda: _blocks(), 4, 8, shard=_checkpointed_units),
    "gradient penalty": _of(lambda: _blocks(2, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())), 4, 8, loss=_penalty),
    "density": _applied(_gaussian, lambda: {"body": _blocks()}, 9, 8),
    "sampling": _applied(_sampled, lambda: {"body": _blocks()}, 4, 8),
    "adapters on a bfloat16 base": _of(_adapter, 4, 8, shard=_adapters_and_base),
    "custom function": _applied(
        lambda m, x: m.blocks(_Sketched.apply(x)), lambda: {"blocks": _blocks()}, 4, 8
    ),
    "two forwards": _of(_blocks, 4, 8, loss=_two_forwards),
    "a method that uses units alone": _applied(
        lambda m, x: m.blocks(x), lambda: {"blocks": _blocks()}, 4, 8, loss=lambda m, x: m.blocks(x).square().mean()
    ),
    "compiled blocks": _of(
        lambda: _blocks(2, lambda: torch.compile(nn.Linear(8, 8), backend="aot_eager")), 4, 8  # type: ignore[arg-type]
    ),
    "a branch by torch.cond": _applied(
        lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.body(x),)),
        lambda: {"body": nn.Linear(8, 8)},
        4, 8,
    ),
    "vmap": _applied(lambda m, x: torch.vmap(torch.sin)(m.body(x)), lambda: {"body": nn.Linear(8, 8)}, 4, 8),
    "a loss that all ranks log": _of(_blocks, 4, 8, loss=_logged),
    "lbfgs": _of(_blocks, 4, 8, optimizer=lambda p: torch.optim.LBFGS(p)),
    "asgd": _of(_blocks, 4, 8, optimizer=lambda p: torch.optim.ASGD(p)),
    "batch with texts": _of(
        _blocks, batch=_labelled, loss=lambda m, b: F.cross_entropy(m(b["x"]), b["label"])
    ),
    "clipping": _of(_blocks, 4, 8, optimizer=_clipping),
    "norms of the whole": _of(_blocks, 4, 8, optimizer=_full_norms),
    "sgd": _of(_blocks, 4, 8, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "rmsprop": _of(_blocks, 4, 8, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.1)),
    "adagrad": _of(_blocks, 4, 8, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "nadam": _of(_blocks, 4, 8, optimizer=lambda p: torch.optim.NAdam(p)),
    "frozen units": _of(
        lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)), 4, 8
    ),
    "bfloat16": _of(lambda: _blocks().bfloat16(), 4, 8, loss=lambda m, x: m(x.bfloat16()).float().square().mean()),
}  # fmt: skip


# ---- transformers ----------------------------------------------------------------------------------------------------


def family_program(kind: str) -> Program:
    """A tiny model of transformers, in training mode, and a loss on what its forward returns."""
    offline()
    import transformers

    def build() -> nn.Module:
        return FAMILIES[kind](transformers).train()  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(**batch)
        values = [value for value in found.to_tuple() if isinstance(value, Tensor) and value.requires_grad]
        return found.loss if getattr(found, "loss", None) is not None else torch.stack([v.mean() for v in values]).sum()

    return Program(build, loss, lambda index: family_batch(kind, index))


def family_batch(kind: str, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, 59, (2, 7), generator=generator)
    if kind in ("vit", "vit base", "deit", "dinov2", "clip vision"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if kind in ("segformer", "detr", "detr base", "detr masks"):
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}
    if kind == "videomae":
        return {
            "pixel_values": torch.randn(2, 2, 3, 16, 16, generator=generator),
            "bool_masked_pos": torch.tensor([[True, False, False, False]] * 2),
        }
    if kind == "timesfm2_5":
        return {"past_values": list(torch.randn(2, 64, generator=generator))}
    if kind in ("siglip text", "nomic_bert"):
        return {"input_ids": ids}
    return {"input_ids": ids, "labels": ids}
