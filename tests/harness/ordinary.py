"""Modules and layers that programs are made of, which the planner was not written for: of torch.nn, and blocks as
libraries of vision and speech have them. Each with its units and batches, to be counted and planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.planned import Planned

Batches = Callable[[torch.Generator, int], Tensor]


@dataclass(frozen=True)
class Ordinary(Planned):
    """`batches` makes the batch of a size. The loss is over the next tokens of numbers, else a mean square."""

    batches: Batches | None = None

    def batch(self, index: int, size: int) -> Any:
        assert self.batches is not None
        return self.batches(torch.Generator().manual_seed(index), size)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch).float()
        if self.vocabulary:
            return F.cross_entropy(out.flatten(0, -2), batch.flatten())
        return out.square().mean()  # type: ignore[no-any-return]


def _tokens(vocabulary: int, length: int) -> Batches:
    return lambda generator, size: torch.randint(1, vocabulary, (size, length), generator=generator)


def _random(*shape: int) -> Batches:
    return lambda generator, size: torch.randn(size, *shape, generator=generator)


def _of_tokens(make: Callable[[], nn.Module], units: tuple[str, ...], vocabulary: int, length: int) -> Ordinary:
    return Ordinary(make, units, (), vocabulary, batches=_tokens(vocabulary, length))


def _of_numbers(make: Callable[[], nn.Module], units: tuple[str, ...], *shape: int) -> Ordinary:
    return Ordinary(make, units, (), batches=_random(*shape))


def _layers(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}.{i}" for i in range(count))


# ---- recurrences -----------------------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self, kind: str, packed: bool, **given: Any) -> None:
        super().__init__()
        self.packed = packed
        self.embedding = nn.Embedding(100, 48)
        self.layers = getattr(nn, kind)(48, 64, batch_first=True, **given)
        width = given.get("proj_size") or 64
        self.head = nn.Linear(width * (2 if given.get("bidirectional") else 1), 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Any = self.embedding(tokens)
        if not self.packed:
            return self.head(self.layers(x)[0])  # type: ignore[no-any-return]
        # All but the first sequence have half of the length.
        lengths = torch.full((len(tokens),), tokens.shape[1] // 2)
        lengths[0] = tokens.shape[1]
        out = self.layers(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0]
        return self.head(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0])  # type: ignore[no-any-return]


class _Cells(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.out = getattr(nn, kind)(24, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for each in x.unbind(1):
            state = self.cell(each, state)
        return self.out(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shorter = nn.Conv1d(20, 32, 5, stride=2, padding=2)
        self.layers = nn.GRU(32, 32, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(F.relu(self.shorter(x)).transpose(1, 2))[0])  # type: ignore[no-any-return]


def _recurrent(kind: str, *, packed: bool = False, **given: Any) -> Ordinary:
    return _of_tokens(partial(_Recurrent, kind, packed, **given), ("layers",), 100, 24)


# ---- attention -------------------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    def __init__(self, padded: bool, **given: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **given)
        self.padded = padded
        self.embedding = nn.Embedding(80, 64)
        self.inner = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 80)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.padded:
            return self.head(self.inner(x, src_key_padding_mask=tokens < 3))  # type: ignore[no-any-return]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.inner(x, mask=mask, is_causal=True))  # type: ignore[no-any-return]


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(80, 64), nn.Linear(64, 80)
        self.inner = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.inner(x, x, tgt_mask=mask))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, weights: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.weights = weights
        made = (nn.MultiheadAttention(64, 4, dropout=dropout, batch_first=True) for _ in range(3))
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out, weights = layer(x, x, x, need_weights=self.weights)
            x = x + out if weights is None else x + out + weights.mean()
        return x


class _Fused(nn.Module):
    """The function, as models call it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            given: dict[str, Any] = {}
            if self.kind == "mask":
                given["attn_mask"] = torch.ones(2 * x.shape[1:2], dtype=torch.bool, device=x.device).tril()
            elif self.kind == "bias":
                given["attn_mask"] = torch.zeros(2 * x.shape[1:2], dtype=x.dtype, device=x.device)
            elif self.kind == "dropout":
                given["dropout_p"] = 0.1
            elif self.kind == "causal":
                given["is_causal"] = True
            elif self.kind == "grouped":
                k, v, given["enable_gqa"] = k[:, :2], v[:, :2], True
            x = x + F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)
        return x


class _Recomputed(_Fused):
    """Its layers compute their forward again, as a program says itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__("causal")
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(partial(self.attend, layer), x.requires_grad_(), use_reentrant=self.reentrant)
        return x

    def attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        q, k, v = layer(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class _Patches(nn.Module):
    """Images in patches. The first half of the layers is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(64, 10)
        for module in list(self.layers)[:2]:
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        # Images come as the weights are, as transformers asks for.
        images = x.to(self.patches.weight.dtype)
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])  # type: ignore[no-any-return]


# ---- convolutions ----------------------------------------------------------------------------------------------------


class _Convolutions(nn.Module):
    def __init__(self, dims: int, norm: Callable[[int], nn.Module], **given: Any) -> None:
        super().__init__()
        convolution, pool = getattr(nn, f"Conv{dims}d"), getattr(nn, f"MaxPool{dims}d")
        self.blocks = nn.ModuleList(
            nn.Sequential(
                convolution(16 if i else 3, 16, 3, padding=1, **(given if i else {})),
                norm(16),
                nn.ReLU(),
                pool(2) if i == 1 else nn.Identity(),
            )
            for i in range(4)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(2).mean(2))  # type: ignore[no-any-return]


class _Rising(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        down, up = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
        self.a, self.b = down(3, 16, 4, stride=2, padding=1), down(16, 32, 4, stride=2, padding=1)
        self.c, self.d = up(32, 16, 4, stride=2, padding=1), up(16, 3, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.a(x))
        return self.d(F.silu(self.c(F.silu(self.b(first)))) + first)  # type: ignore[no-any-return]


class _Inverted(nn.Module):
    """An inverted bottleneck with squeeze and excitation, as EfficientNet has it."""

    def __init__(self, width: int = 16, inner: int = 64) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU(inplace=True))
        self.deep = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(inplace=True),
        )
        self.squeeze, self.excite = nn.Conv2d(inner, width, 1), nn.Conv2d(width, inner, 1)
        self.out = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.deep(self.wide(x))
        share = self.excite(F.relu(self.squeeze(inner.mean((2, 3), keepdim=True)), inplace=True)).sigmoid()
        return x + self.out(inner * share)  # type: ignore[no-any-return]


class _Next(nn.Module):
    """A block of ConvNeXt: a wide depthwise convolution, then linear layers over channels."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.down(F.gelu(self.up(inner))) * self.scale).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class _Images(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, stride=2, padding=1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def inner(width: int, hidden: int) -> nn.Module:
            return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width))

        self.patches = nn.Conv2d(3, 48, 4, stride=4)
        self.tokens = nn.ModuleList(inner(64, 32) for _ in range(3))
        self.channels = nn.ModuleList(nn.Sequential(nn.LayerNorm(48), inner(48, 96)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = (x + tokens(x)).transpose(1, 2)
            x = (x + channels(x)).transpose(1, 2)
        return x


# ---- others ----------------------------------------------------------------------------------------------------------


class _Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.up, self.out = nn.EmbeddingBag(300, 48, mode=mode), nn.Linear(48, 96), nn.Linear(96, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.up(self.bag(x))))  # type: ignore[no-any-return]


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Bilinear(24, 24, 32), nn.Linear(32, 24)
        self.act, self.norm = nn.PReLU(), nn.RMSNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.down(self.both(x, x))))  # type: ignore[no-any-return]


_INNER = _layers("inner.layers", 3)
_BLOCKS = _layers("blocks", 4)
# Batch norm of a CPU takes no activations in bfloat16 with parameters in float32.
FLOAT32_ONLY = frozenset({"conv1d, batch norm", "conv2d, batch norm", "conv3d, batch norm", "efficientnet"})
ORDINARY: dict[str, Ordinary] = {
    "lstm": _recurrent("LSTM"),
    "lstm, three layers": _recurrent("LSTM", num_layers=3),
    "lstm, both ways": _recurrent("LSTM", num_layers=2, bidirectional=True),
    "lstm, projected": _recurrent("LSTM", num_layers=2, proj_size=16),
    "lstm, dropout": _recurrent("LSTM", num_layers=2, dropout=0.1),
    "lstm, no biases": _recurrent("LSTM", bias=False),
    "lstm, packed": _recurrent("LSTM", packed=True, num_layers=2),
    "lstm, packed, both ways": _recurrent("LSTM", packed=True, num_layers=2, bidirectional=True),
    "gru": _recurrent("GRU"),
    "gru, both ways": _recurrent("GRU", num_layers=2, bidirectional=True),
    "gru, packed": _recurrent("GRU", packed=True, num_layers=2),
    "rnn, tanh": _recurrent("RNN"),
    "rnn, relu": _recurrent("RNN", num_layers=2, nonlinearity="relu"),
    "lstm cell": _of_numbers(partial(_Cells, "LSTMCell"), ("cell",), 20, 24),
    "gru cell": _of_numbers(partial(_Cells, "GRUCell"), ("cell",), 20, 24),
    "speech": _of_numbers(_Speech, ("shorter", "layers"), 20, 40),
    "encoder": _of_tokens(partial(_Encoder, False), _INNER, 80, 32),
    "encoder, norms first": _of_tokens(
        partial(_Encoder, False, norm_first=True, activation="gelu", dropout=0.0), _INNER, 80, 32
    ),
    "encoder, padded": _of_tokens(partial(_Encoder, True, dropout=0.0), _INNER, 80, 32),
    "nn.Transformer": _of_tokens(
        _Both, (*_layers("inner.encoder.layers", 2), *_layers("inner.decoder.layers", 2)), 80, 32
    ),
    "attention": _of_numbers(partial(_Attention, False), _layers("layers", 3), 32, 64),
    "attention, dropout": _of_numbers(partial(_Attention, False, 0.1), _layers("layers", 3), 32, 64),
    "attention, weights": _of_numbers(partial(_Attention, True), _layers("layers", 3), 32, 64),
    **{
        f"fused attention, {kind}": _of_numbers(partial(_Fused, kind), _layers("layers", 3), 32, 64)
        for kind in ("plain", "mask", "bias", "dropout", "causal", "grouped")
    },
    **{
        f"recomputed by itself, {name}": _of_numbers(partial(_Recomputed, reentrant), _layers("layers", 3), 32, 64)
        for name, reentrant in (("reentrant", True), ("not reentrant", False))
    },
    "half-frozen patches": _of_numbers(_Patches, ("patches", *_layers("layers", 4)), 3, 32, 32),
    "conv1d, batch norm": _of_numbers(partial(_Convolutions, 1, nn.BatchNorm1d), _BLOCKS, 3, 128),
    "conv2d, batch norm": _of_numbers(partial(_Convolutions, 2, nn.BatchNorm2d), _BLOCKS, 3, 16, 16),
    "conv3d, batch norm": _of_numbers(partial(_Convolutions, 3, nn.BatchNorm3d), _BLOCKS, 3, 8, 8, 8),
    "conv2d, group norm, in groups": _of_numbers(
        partial(_Convolutions, 2, partial(nn.GroupNorm, 4), groups=4), _BLOCKS, 3, 16, 16
    ),
    "conv2d, instance norm": _of_numbers(
        partial(_Convolutions, 2, partial(nn.InstanceNorm2d, affine=True)), _BLOCKS, 3, 16, 16
    ),
    **{
        f"transposed conv{dims}d": _of_numbers(partial(_Rising, dims), ("a", "b", "c", "d"), 3, *shape)
        for dims, shape in ((1, (64,)), (2, (16, 16)), (3, (8, 8, 8)))
    },
    "efficientnet": _of_numbers(partial(_Images, _Inverted, 16), _layers("blocks", 3), 3, 32, 32),
    "convnext": _of_numbers(partial(_Images, _Next, 24), _layers("blocks", 3), 3, 32, 32),
    "mixer": _of_numbers(_Mixer, (*_layers("tokens", 3), *_layers("channels", 3)), 3, 32, 32),
    **{
        f"embedding bag, {mode}": Ordinary(partial(_Bag, mode), ("bag", "up"), (), batches=_tokens(300, 12))
        for mode in ("sum", "mean", "max")
    },
    "bilinear, prelu, rms norm": _of_numbers(_Bilinear, ("both", "down"), 24),
}
