"""A Llama-like language model: RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied or untied embeddings.

The model is plain PyTorch. `sharded_model` below contains all use of `fully_shard`:

```
meta device: Llama, no memory -> checkpoint_activations -> fully_shard each block, then the root
             -> to_empty: each rank allocates its shards -> init_weights: each full value drawn, own rows kept
```

Letters in shapes: B sequences, T positions, D model width, H query heads, K key/value heads, E width of one head,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    MixtureOfExperts,
    OffloadPolicy,
    checkpoint_activations,
    fully_shard,
)
from fullshard.migrate.config import PrecisionKeys
from fullshard.migrate.experts import (
    ExpertDivision,
    apply_experts,
    divide_experts,
    divide_gradients,
    find_experts,
    unit_arguments,
)
from fullshard.migrate.parallelism import ModelShape
from fullshard.migrate.relations import Relations
from fullshard.migrate.sequences import ContextParallel
from fullshard.migrate.tensor_parallel import Replaced, apply_styles, divide, shape_for
from fullshard.migrate.tree import Tree
from fullshard.train.config import Config


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The parameters that determine the shapes of a `Llama`."""

    vocab: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    context: int  # longest sequence, in tokens
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    experts: int = 0  # of each feed-forward layer; 0: none
    experts_per_token: int = 2
    balance_loss: float = 0.0  # its factor
    head_width: int | None = None  # of one head, where it is not dim / heads

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean is taken in float32 for any input dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


class Attention(nn.Module):
    """Causal self-attention. H query heads share K key/value heads; positions are rotations of queries and keys."""

    rope_cos: Tensor  # (context, E/2), float32
    rope_sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        kv_dim = shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)
        # Buffers of the block, not an argument of its forward: mixed precision casts arguments, and angles in bfloat16
        # lose the distance between far positions. Not saved: `init_weights` recomputes them.
        half = (shape.context, shape.head_dim // 2)
        self.register_buffer("rope_cos", torch.empty(half), persistent=False)
        self.register_buffer("rope_sin", torch.empty(half), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # (B, T, D) -> (B, T, D)
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = self._rotate(self.wq(x).view(heads), positions)  # (B, T, H, E)
        k = self._rotate(self.wk(x).view(heads), positions)  # (B, T, K, E)
        v = self.wv(x).view(heads)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.shape.heads != self.shape.kv_heads,
        )  # (B, H, T, E)
        result: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _rotate(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # (B, T, heads, E), rotated in float32
        at = slice(x.shape[1]) if positions is None else positions
        cos, sin = self.rope_cos[at].unsqueeze(-2), self.rope_sin[at].unsqueeze(-2)  # (T, 1, E/2) or (B, T, 1, E/2)
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).type_as(x)

    def init_rope(self) -> None:
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(self.shape.context, dtype=torch.float64)[:, None] * frequency
        self.rope_cos.copy_(angle.cos())
        self.rope_sin.copy_(angle.sin())


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, F) -> (B, T, D)
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One transformer layer, normalised before each part: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.ffn: nn.Module = FeedForward(shape)
        if shape.experts:
            self.ffn = MixtureOfExperts(
                shape.dim,
                shape.ffn_dim,
                experts=shape.experts,
                experts_per_token=shape.experts_per_token,
                balance=shape.balance_loss,
            )

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # (B, T, D) -> (B, T, D)
        normed = self.attention_norm(x)
        x = x + (self.attention(normed) if positions is None else self.attention(normed, positions=positions))
        x = x + self.ffn(self.ffn_norm(x))
        return x


class TiedHead(nn.Module):
    """The logits by the table of the embedding. Without parameters: the embedding owns the weight, so no two modules
    share one."""

    def forward(self, x: Tensor, embedding: nn.Embedding) -> Tensor:  # (B, T, D) -> (B, T, V)
        return F.linear(x, embedding.weight)


class Llama(nn.Module):
    """Tokens (B, T), int64 -> logits (B, T, V). Positions: (T,) or (B, T), int64; None: 0, 1, 2 ...

    Construction leaves values undefined, so it costs nothing on the meta device; `init_weights` defines every
    parameter and buffer, also after `to_empty`.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        self.output = None if shape.tie_embeddings else nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tie_embeddings:
            self.head = TiedHead()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x) if positions is None else block(x, positions=positions)
        x = self.norm(x)
        logits: Tensor = self.head(x, self.embedding) if self.output is None else self.output(x)
        return logits

    def parallel_styles(self, *, sequence: bool) -> dict[str, str]:
        """How tensor parallelism divides the modules; `sequence`: between them each rank has its part of the tokens.

        A tied embedding stays whole: the model reads its weight again for the logits.
        """
        inside = {"wq": "column", "wk": "column", "wv": "column", "wo": "row->sequence" if sequence else "row"}
        block = {f"attention.{name}": style for name, style in inside.items()}
        parts = ["attention"] if self.shape.experts else ["attention", "ffn"]  # experts divide tokens themselves
        if not self.shape.experts:
            block |= {"ffn.gate": "column", "ffn.up": "column", "ffn.down": inside["wo"]}
        # What the layers of each part read is put together, and its gradient summed, once for all of them.
        block |= dict.fromkeys(parts, "sequence->input" if sequence else "input")
        if sequence:
            block |= {"attention_norm": "sequence", "ffn_norm": "sequence"}
        styles = {f"layers.*.{name}": style for name, style in block.items()}
        if self.output is None:
            return styles | ({"layers.0": "whole->input->sequence", "norm": "sequence->whole"} if sequence else {})
        if sequence:
            return styles | {"embedding": "row->sequence", "norm": "sequence", "output": "sequence->column->whole"}
        return styles | {"embedding": "row", "output": "column->whole"}

    def pipeline_modules(self) -> list[str]:
        """The modules in the order of the forward, as stages of a pipeline divide them."""
        end = "head" if self.output is None else "output"
        return ["embedding", *(f"layers.{number}" for number in range(len(self.layers))), "norm", end]

    def pipeline_reads(self) -> dict[str, list[str]]:
        """The parameters that a module reads of another one, which may be in another stage."""
        return {"head": ["embedding.weight"]} if self.output is None else {}

    def model_shape(self) -> ModelShape:
        """The numbers that degrees have to divide."""
        shape = self.shape
        return ModelShape(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            feed_forward=shape.ffn_dim,
            experts=shape.experts,
            vocabulary=shape.vocab,
            sequence=shape.context,
            layers=shape.layers,
        )

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Give every parameter and buffer its initial value, a function of (seed, its name) alone.

        Matrices are normal with deviation 1/sqrt(their input width), truncated at three deviations. Each parameter has
        its own generator, seeded by a hash of (seed, name). So a value does not depend on the order of modules or on
        the rest of the model, and every process draws the same full value. One full value exists at a time, without
        communication: each rank keeps its own rows of a sharded parameter.
        """
        scales = {
            "embedding": 1 / 4,  # logits of deviation 1/4: the first loss is close to ln V, no token is preferred
            "output": 1 / 4,
            # Each block adds two terms to the residual stream; this keeps the sum's size independent of depth.
            "wo": 1 / math.sqrt(2 * self.shape.layers),
            "down": 1 / math.sqrt(2 * self.shape.layers),
        }
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, dtype=torch.float32)
            if parameter.ndim >= 2:
                # Of experts the weights are parameters themselves.
                matrix = name.split(".")[-2 if parameter.ndim == 2 else -1]
                std = scales.get(matrix, 1.0) * parameter.shape[-1] ** -0.5
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                nn.init.trunc_normal_(value, std=std, a=-3 * std, b=3 * std, generator=generator)
            value = value.to(parameter.device)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
                value = value.redistribute(placements=parameter.placements)  # no messages: a part of what is here
            parameter.copy_(value)
        for module in self.modules():
            if isinstance(module, Attention):
                module.init_rope()


def flop_per_token(shape: LlamaShape, num_params: int) -> float:
    """Floating-point operations per trained token: 6·N + 6·L·T·D.

    N is the number of parameters that multiply activations (all but an untied token embedding, which is only a
    lookup): 2 operations each in forward, 4 in backward. Attention adds, per layer and token, 2·T·D for the scores and
    2·T·D for the weighted sum, three times that with backward, and half of it because it is causal. Recomputed
    activations are not counted: this is the work that the model requires, not the work that was done.
    """
    multiplied = num_params if shape.tie_embeddings else num_params - shape.vocab * shape.dim
    if shape.experts:  # a token multiplies with its own
        multiplied -= shape.layers * (shape.experts - shape.experts_per_token) * 3 * shape.dim * shape.ffn_dim
    return 6.0 * multiplied + 6.0 * shape.layers * shape.context * shape.dim


# ---- the sharded model -----------------------------------------------------------------------------------------


def llama_shape(config: Config, vocab: int) -> LlamaShape:
    """The shape of the model that `config` describes, for a tokenizer of `vocab` tokens."""
    keys = {name: value for name, value in asdict(config.model).items() if name not in ("folder", "dtype")}
    keys["ffn_dim"] = config.ffn_dim
    if not config.model.experts:
        keys["balance_loss"] = 0.0  # of nothing
    return LlamaShape(vocab=vocab, context=config.training.sequence_length, **keys)


def sharded_model(
    config: Config,
    vocab: int,
    mesh: DeviceMesh,
    device: torch.device,
    whole: DeviceMesh | None = None,
    sequences: ContextParallel | None = None,
    cut: Callable[[nn.Module], Mapping[int, nn.Module]] | None = None,
) -> Llama:
    """The model with its initial values, sharded over `mesh`. The values depend on training.seed, not on the mesh.
    `whole`: the mesh with all axes; its layers are divided over `tp` first. `sequences`: cuts what it gets over `cp`.
    `cut`: divides it into stages of a pipeline, and returns those of this process; the model then has their modules
    alone."""
    with torch.device("meta"):
        model = Llama(llama_shape(config, vocab))
    sequence, experts = (False, ExpertDivision()) if whole is None else _divide(model, config, whole)
    keys, policy = config.sharding.sharding, precision_policy(config.sharding.precision)
    activations = config.sharding.activation_checkpointing
    if activations.at != "none":
        checkpoint_activations(
            model,
            "classes",
            classes=[Block.__name__],
            every=activations.every,
            recompute=activations.recompute,
            save=activations.save,
            offload=activations.offload,
        )
    offload = CPUOffloadPolicy(pin_memory=keys.pin_memory) if keys.cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, offload_policy=offload)
    kept = config.reshards
    roots = [model] if cut is None else list(cut(model).values())
    found = dict(model.named_modules())
    modules = [found[name] for name in experts.names if name in found]  # the others are in stages of other processes
    for module in modules:
        shard(
            module,
            **unit_arguments(module, experts, policy),
            reshard_after_forward=None if isinstance(kept, str) else kept,
        )
    if whole is not None:
        divide_gradients(modules, config.axes(whole.size()))
    for block in model.layers:
        if isinstance(block, Block):  # and not of another process
            shard(block, mp_policy=policy, reshard_after_forward=None if isinstance(kept, str) else kept)
    # Only the root has an output dtype: the results of blocks are read by the next block, in the compute dtype.
    output = replace(policy, output_dtype=_dtype(config.sharding.precision.dtypes[2]))
    for root in roots:
        shard(root, mp_policy=output, reshard_after_forward=kept if isinstance(kept, bool) else None)
    model.to_empty(device="cpu" if keys.cpu_offload else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.init_weights(config.training.seed)
    if whole is not None and cut is None:
        Relations(model, config.axes(whole.size()), whole, sequence=sequence, sequences=sequences)
    return model


def _divide(model: Llama, config: Config, whole: DeviceMesh) -> tuple[bool, ExpertDivision]:
    """Divide the layers over `tp`, and experts over `ep`; returns whether each rank has its part of the tokens between
    layers, and what is experts."""
    tree, plan = Tree(model), config.sharding.parallel
    division, names = divide(tree, plan), find_experts(tree, plan)
    axes = plan.on(whole.size(), shape_for(tree, division, model.model_shape()))
    if division.styles:
        apply_styles(tree, division, division.styles, whole["tp"], Replaced())
    experts = divide_experts(names, axes, whole)
    if names:
        apply_experts(tree, experts, names, whole, Replaced(), divided=division.sequence)
    return division.sequence, experts


def precision_policy(keys: PrecisionKeys) -> MixedPrecisionPolicy:
    """The policy of the blocks."""
    param, reduce, _ = keys.dtypes
    return MixedPrecisionPolicy(param_dtype=_dtype(param), reduce_dtype=_dtype(reduce))


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def as_fsdp(model: nn.Module) -> FSDPModule:
    """The same object, typed as the class that `fully_shard` gave it."""
    assert isinstance(model, FSDPModule)
    return model


def compute_dtype(keys: PrecisionKeys) -> torch.dtype:
    return _dtype(keys.dtypes[0]) or torch.float32
