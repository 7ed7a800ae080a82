"""Sound programs: neither `fullshard verify` nor `fullshard doctor` may raise a false alarm on any of them.

    SOUND["moco"]          its program, and the strategies that it is tried with
    program("moco")        as an entry: tests.harness.sound_programs:program:moco

Most models are classes of torch, transformers and peft with their own defaults, in tiny configurations. The others are
the parts of recipes that move something beside parameters: buffers, queues, generators, graphs of several forwards.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fullshard import clip_grad_norm_
from fullshard.program import Program
from tests.harness.packages import offline

WIDTH, LENGTH, WORDS, ROWS = 12, 7, 31, 3
# As `fullshard verify` without arguments, and what it has no word for in its defaults.
ALL = ("zero3", "zero2", "zero3+bf16", "zero3+micro=2", "zero3+recompute", "zero3+offload", "zero2+bf16+recompute")
# Of models with BatchNorm, whose kernels want the dtype of their statistics.
NORMS = ("zero3", "zero2", "zero3+bf16+norms", "zero3+micro=2", "zero3+recompute", "zero2+bf16+norms+recompute")
# Of models that plain torch does not train in bfloat16 on a CPU.
FLOAT = ("zero3", "zero2", "zero3+micro=2", "zero3+recompute", "zero3+offload")


class Sound(NamedTuple):
    """`strategies`: that verify trains it with. `without`: what cannot be exercised."""

    program: Callable[[], Program]
    strategies: tuple[str, ...] = ALL
    package: str = ""
    without: frozenset[str] = frozenset()


SOUND: dict[str, Sound] = {}


def program(name: str) -> Program:
    return SOUND[name].program()


def sound(
    name: str, strategies: tuple[str, ...] = ALL, *without: str
) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    def note(made: Callable[[], Program]) -> Callable[[], Program]:
        SOUND[name] = Sound(made, strategies, without=frozenset(without))
        return made

    return note


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def vectors(*shape: int) -> Callable[[int], Tensor]:
    return lambda index: torch.randn(*shape, generator=_generator(index))


def tokens(index: int) -> Tensor:
    return torch.randint(1, WORDS, (ROWS, LENGTH), generator=_generator(index))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()  # type: ignore[no-any-return]


# ---- modules of torch.nn ---------------------------------------------------------------------------------------------


class Around(nn.Module):
    """Two modules of one class, and a head that sees what they give."""

    def __init__(self, build: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x * self.scale.sum()


def _called(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


def _first(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)[0]  # type: ignore[no-any-return]


def _of_torch(
    name: str,
    build: Callable[[], nn.Module],
    *shape: int,
    call: Callable[[nn.Module, Tensor], Tensor] = _called,
    strategies: tuple[str, ...] = ALL,
) -> None:
    SOUND[name] = Sound(lambda: Program(lambda: Around(build, call), mean_square, vectors(*shape)), strategies)


_of_torch("Linear", lambda: nn.Linear(WIDTH, WIDTH), ROWS, WIDTH)
_of_torch("Conv1d", lambda: nn.Conv1d(6, 6, 3, padding=1), ROWS, 6, 9)
_of_torch("Conv2d", lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2), ROWS, 4, 6, 6)
_of_torch("Conv3d", lambda: nn.Conv3d(2, 2, 3, padding=1), 2, 2, 4, 4, 4)
_of_torch("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), ROWS, 4, 5, 5)
_of_torch("LayerNorm", lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), ROWS, WIDTH)
_of_torch("RMSNorm", lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), ROWS, WIDTH)
_of_torch("GroupNorm", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), ROWS, 4, 5, 5)
_of_torch("BatchNorm1d", lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), 5, 8, strategies=NORMS)
_of_torch(
    "BatchNorm2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), 5, 4, 8, 8, strategies=NORMS
)
_of_torch("BatchNorm3d", lambda: nn.BatchNorm3d(3), 3, 3, 2, 3, 4, strategies=NORMS)
_of_torch(
    "BatchNorm1d, cumulative",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    5,
    8,
    strategies=NORMS,
)
_of_torch(
    "InstanceNorm2d with statistics",
    lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    ROWS,
    4,
    5,
    5,
    strategies=NORMS,
)
_of_torch("LSTM", lambda: nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.2), ROWS, 5, 8, call=_first)
_of_torch("GRU", lambda: nn.GRU(8, 8, batch_first=True), ROWS, 5, 8, call=_first)
_of_torch("RNN", lambda: nn.RNN(8, 8, nonlinearity="relu", batch_first=True), ROWS, 5, 8, call=_first)
_of_torch("LSTMCell", lambda: nn.LSTMCell(8, 8), ROWS, 8, call=_first)
_of_torch(
    "MultiheadAttention",
    lambda: nn.MultiheadAttention(WIDTH, 3, dropout=0.1, batch_first=True),
    ROWS,
    5,
    WIDTH,
    call=lambda module, x: module(x, x + 1, x - 1)[0],
)
_of_torch("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(WIDTH, 3, 20, batch_first=True), ROWS, 5, WIDTH)
_of_torch(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(WIDTH, 3, 20, batch_first=True, norm_first=True),
    ROWS,
    5,
    WIDTH,
    call=lambda module, x: module(x, x),
)
_of_torch(
    "Transformer",
    lambda: nn.Transformer(WIDTH, 2, 1, 1, 20, batch_first=True),
    ROWS,
    5,
    WIDTH,
    call=lambda module, x: module(x, x),
)
_of_torch("Bilinear", lambda: nn.Bilinear(6, 6, 6), ROWS, 6, call=lambda module, x: module(x, x))
_of_torch("PReLU", lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(8)), ROWS, 8)
_of_torch("AlphaDropout", lambda: nn.Sequential(nn.Linear(8, 8), nn.SELU(), nn.AlphaDropout(0.2)), ROWS, 8)
# Plain torch computes RReLU again with noise that nobody wrote.
_of_torch(
    "RReLU",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU()),
    ROWS,
    8,
    strategies=tuple(s for s in ALL if not s.endswith("recompute")),
)
_of_torch("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(8, 8)), ROWS, 8)
_of_torch("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), ROWS, 8, strategies=FLOAT)
_of_torch("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(8, 8)), ROWS, 8, strategies=FLOAT)


# ---- recipes ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width + 1)
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A model of tokens: embedding, blocks, head."""

    def __init__(self, build: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(build() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Any:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())


@sound("dropout")
def _dropout() -> Program:
    return Program(lambda: Words(lambda: Block(dropout=0.3)), next_word, tokens)


@sound("tied weights")
def _tied() -> Program:
    def build() -> nn.Module:
        model = Words()
        model.head.weight = model.embedding.weight
        return model

    return Program(build, next_word, tokens)


@sound("frozen embeddings")
def _frozen() -> Program:
    def build() -> nn.Module:
        model = Words()
        model.embedding.requires_grad_(False)
        return model

    return Program(build, next_word, tokens)


@sound("padding and renormed embeddings", FLOAT)
def _padding() -> Program:
    def build() -> nn.Module:
        model = Words()
        model.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0, scale_grad_by_freq=True)
        return model

    return Program(build, next_word, tokens)


@sound("embedding bags")
def _bags() -> Program:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.EmbeddingBag(WORDS, WIDTH, mode=mode) for mode in ("sum", "mean", "max"))
            self.head = nn.Linear(3 * WIDTH, 1)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(torch.cat([layer(words) for layer in self.layers], -1))  # type: ignore[no-any-return]

    return Program(Bags, mean_square, tokens)


class Experts(nn.Module):
    """Each token goes to one of five experts; some get none. `used`: how many each got, as balancing wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.register_buffer("used", torch.zeros(5, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        result = x.clone()
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if bool(chosen.any()):
                result[chosen] = (expert(x[chosen]) * weights[chosen][:, number, None]).to(result.dtype)
            self.used[number] += int(chosen.sum())
        return x + result


@sound("experts of which some are unused")
def _experts() -> Program:
    return Program(lambda: Words(Experts), next_word, lambda index: tokens(index)[:1])


@sound("parameters that nobody uses")
def _unused() -> Program:
    def build() -> nn.Module:
        model = Words()
        model.layers[0].extra = nn.Linear(4, 4)
        return model

    return Program(build, next_word, tokens)


class Queue(nn.Module):
    """Keys of a slowly moving copy of the encoder wait in a queue for later batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.slow = copy.deepcopy(self.layers).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 8), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def _encoded(self, layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return F.normalize(x.float(), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        query = self._encoded(self.layers, x)
        with torch.no_grad():
            key = self._encoded(self.slow, x + 0.1)
        others = self.queue.clone().detach().float()
        with torch.no_grad():
            at = (int(self.place) + torch.arange(len(key))) % len(self.queue)
            self.queue[at] = key.to(self.queue.dtype)
            self.place.copy_((self.place + len(key)) % len(self.queue))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ others.T], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@sound("moco")
def _moco() -> Program:
    return Program(Queue, lambda model, x: model(x), vectors(4, 8))


class Codebook(nn.Module):
    """A codebook in buffers, moved towards what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        flat = y.detach().float().flatten(0, -2)
        nearest = torch.cdist(flat, self.codes.float()).argmin(1)
        if self.training:
            with torch.no_grad():
                for code in range(len(self.codes)):
                    near = flat[nearest == code]
                    if len(near):
                        self.codes[code].lerp_(near.mean(0).to(self.codes.dtype), 0.1)
        found = self.codes[nearest].view(y.shape).to(y.dtype)
        return x + y + (found - y).detach() * 0.5


@sound("codebook in buffers")
def _codebook() -> Program:
    return Program(lambda: Words(Codebook), next_word, tokens)


@sound("running averages of the model's own")
def _averages() -> Program:
    class Averaged(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += 1
                self.mean = self.mean + (x.detach().float().mean((0, 1)) - self.mean) / self.seen  # another tensor
            return super().forward(x) - self.mean.to(x.dtype) * 0.1

    return Program(lambda: Words(Averaged), next_word, tokens)


class Adapted(nn.Module):
    """A frozen linear layer beside two small ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(F.dropout(self.down(x), 0.1, self.training))  # type: ignore[no-any-return]


@sound("lora, written out")
def _lora() -> Program:
    def build() -> nn.Module:
        model = Words()
        model.requires_grad_(False)
        for layer in model.layers:
            layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
        return model

    def trained(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)

    return Program(build, next_word, tokens, optimizer=trained)


@sound("two forwards before one backward")
def _two_forwards() -> Program:
    def both(model: nn.Module, words: Tensor) -> Tensor:
        return next_word(model, words) + F.mse_loss(model(words).float(), model(words.flip(1)).float())

    return Program(lambda: Words(lambda: Block(dropout=0.1)), both, tokens)


@sound("a forward whose result is not used")
def _wasted() -> Program:
    def once(model: nn.Module, words: Tensor) -> Tensor:
        model(words)
        return next_word(model, words)

    return Program(Words, once, tokens)


@sound("a target without gradients")
def _target() -> Program:
    def distilled(model: nn.Module, words: Tensor) -> Tensor:
        with torch.no_grad():
            aim = model(words.flip(0)).float().softmax(-1)
        return next_word(model, words) - (model(words).float().log_softmax(-1) * aim).sum(-1).mean()

    return Program(Words, distilled, tokens)


@sound("stochastic depth")
def _depth() -> Program:
    class Sometimes(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.rand(()) < 0.5:
                return x
            return super().forward(x)

    return Program(lambda: Words(Sometimes), next_word, tokens)


@sound("one layer, three times")
def _shared() -> Program:
    class Recurrent(Words):
        def forward(self, words: Tensor) -> Tensor:
            x = self.embedding(words)
            for layer in (*self.layers, *self.layers, self.layers[0]):
                x = layer(x)
            return self.head(x)  # type: ignore[no-any-return]

    return Program(Recurrent, next_word, tokens)


# A block that is computed again gives its parts to the list beside its outputs, which no library gathers for.
@sound("a list that layers append to", tuple(s for s in ALL if not s.endswith("recompute")))
def _collected() -> Program:
    class Balanced(Block):
        def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
            y = super().forward(x)
            if losses is not None:
                losses.append(y.float().square().mean())
            return y

    class Collecting(Words):
        def forward(self, words: Tensor) -> Any:
            x, losses = self.embedding(words), []
            for layer in self.layers:
                x = layer(x, losses)
            return self.head(x), sum(losses)

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        logits, balance = model(words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten()) + 0.1 * balance

    return Program(lambda: Collecting(Balanced), loss, tokens)


@sound("gradient penalty", FLOAT, "evaluation")
def _penalty() -> Program:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)  # type: ignore[no-any-return]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1).square().mean()

    return Program(Critic, loss, vectors(4, 8))


@sound("sgd with momentum, two groups")
def _groups() -> Program:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        all_of = list(parameters)
        matrices = {"params": [p for p in all_of if p.ndim > 1], "weight_decay": 0.1}
        rest = {"params": [p for p in all_of if p.ndim < 2]}
        return torch.optim.SGD([matrices, rest], lr=0.05, momentum=0.9, nesterov=True)

    return Program(Words, next_word, tokens, optimizer=grouped)


def _with_optimizer(name: str, **options: Any) -> None:
    def made() -> Program:
        return Program(Words, next_word, tokens, optimizer=lambda p: getattr(torch.optim, name)(p, **options))

    SOUND[f"optimizer {name}"] = Sound(made)


for _name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "SGD"):
    _with_optimizer(_name, lr=1e-2)


@sound("segmentation with skips", NORMS)
def _unet() -> Program:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in ((1, 4), (4, 6), (10, 4))
            )
            self.head = nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            second = F.interpolate(self.layers[1](F.max_pool2d(first, 2)), scale_factor=2)
            return self.head(self.layers[2](torch.cat([first, second], 1)))  # type: ignore[no-any-return]

    return Program(Unet, mean_square, vectors(3, 1, 8, 8))


@sound("variational", FLOAT)
def _vae() -> Program:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(6, 8)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.layers[0](x).chunk(2, -1)
            return self.layers[1](mean + torch.randn_like(mean) * log.exp()), mean, log

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found, mean, log = model(x)
        return F.mse_loss(found, x) + (mean.square() + log.exp() - log - 1).mean()

    return Program(Variational, loss, vectors(4, 8))


# ---- transformers and peft -------------------------------------------------------------------------------------------

_TEXT: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_ENCODER = {**_TEXT, "max_position_embeddings": 16}
_SEQ2SEQ: dict[str, Any] = dict(
    vocab_size=WORDS,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=32,
    pad_token_id=0,
    decoder_start_token_id=1,
    use_cache=False,
)
_PATCHES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
)
_MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16)


def _labelled_tokens(index: int) -> dict[str, Tensor]:
    words = tokens(index)
    return {"input_ids": words, "labels": words}


def _images(index: int) -> dict[str, Tensor]:
    generator = _generator(index)
    pixels = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (4,), generator=generator)}


def _sounds(index: int) -> dict[str, Tensor]:
    generator = _generator(index)
    return {
        "input_values": torch.randn(2, 400, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def _spectra(index: int) -> dict[str, Tensor]:
    features = torch.randn(2, 8, 16, generator=_generator(index))
    return {"input_features": features, "labels": tokens(index)[:2]}


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def _hf(
    name: str,
    config: str,
    sizes: dict[str, Any],
    batch: Callable[[int], Any] = _labelled_tokens,
    strategies: tuple[str, ...] = ALL,
    adapt: Callable[[Any], Any] = lambda model: model,
) -> None:
    def build() -> nn.Module:
        offline()
        import transformers

        return adapt(getattr(transformers, name)(getattr(transformers, config)(**sizes)))  # type: ignore[no-any-return]

    SOUND[name] = Sound(lambda: Program(build, _own_loss, batch), strategies, "transformers")


_hf("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=WORDS, n_embd=24, n_layer=2, n_head=4, n_positions=16))
_hf("LlamaForCausalLM", "LlamaConfig", _GROUPED)
_hf("MistralForCausalLM", "MistralConfig", _GROUPED)
_hf("Qwen2ForCausalLM", "Qwen2Config", _GROUPED)
_hf("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 6})
_hf("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 6})
# Those with `use_cache` write each block's keys to a cache, and again where it is computed again.
_hf("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 6, "use_cache": False})
_hf("PhiForCausalLM", "PhiConfig", {**_TEXT, "partial_rotary_factor": 1.0})
_hf("Phi3ForCausalLM", "Phi3Config", _GROUPED)
_hf("OPTForCausalLM", "OPTConfig", {**_ENCODER, "ffn_dim": 40, "word_embed_proj_dim": 24})
_hf("BloomForCausalLM", "BloomConfig", dict(vocab_size=WORDS, hidden_size=24, n_layer=2, n_head=4, use_cache=False))
_hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT)
_hf("FalconForCausalLM", "FalconConfig", {**_TEXT, "use_cache": False})
_hf("StableLmForCausalLM", "StableLmConfig", _GROUPED)
_hf("OlmoForCausalLM", "OlmoConfig", _GROUPED)
_hf("GraniteForCausalLM", "GraniteConfig", _GROUPED)
_hf("CohereForCausalLM", "CohereConfig", _GROUPED)
_hf("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 5})
_hf("OlmoeForCausalLM", "OlmoeConfig", {**_GROUPED, **_MOE})
_hf("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_MOE, "head_dim": 6})
_hf("MambaForCausalLM", "MambaConfig", dict(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4))
_hf("BertForMaskedLM", "BertConfig", _ENCODER)
_hf("RobertaForMaskedLM", "RobertaConfig", _ENCODER)
_hf("ElectraForMaskedLM", "ElectraConfig", {**_ENCODER, "embedding_size": 16})
_hf("AlbertForMaskedLM", "AlbertConfig", {**_ENCODER, "embedding_size": 16})
_hf(
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    dict(vocab_size=WORDS, dim=24, hidden_dim=40, n_layers=2, n_heads=4, max_position_embeddings=16),
)
_hf("DebertaV2ForMaskedLM", "DebertaV2Config", _ENCODER)
_hf("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ)
_hf("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ)
_hf("MarianMTModel", "MarianConfig", _SEQ2SEQ)
_hf(
    "T5ForConditionalGeneration",
    "T5Config",
    dict(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    | dict(use_cache=False),
)
_hf(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "eos_token_id": 2},
    _spectra,
)
# Where a model is sharded, transformers runs the layers that its layerdrop leaves out, and so draws other numbers.
_hf(
    "Wav2Vec2ForSequenceClassification",
    "Wav2Vec2Config",
    {**_ENCODER, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    | dict(
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    _sounds,
)
_hf("ViTForImageClassification", "ViTConfig", _PATCHES, _images)
_hf("DeiTForImageClassification", "DeiTConfig", _PATCHES, _images)
_hf("Dinov2ForImageClassification", "Dinov2Config", _PATCHES, _images)
_hf(
    "SwinForImageClassification",
    "SwinConfig",
    dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2),
    _images,
)
_hf(
    "ConvNextForImageClassification",
    "ConvNextConfig",
    dict(hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], patch_size=1),
    _images,
)
_hf(
    "ResNetForImageClassification",
    "ResNetConfig",
    dict(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"),
    _images,
    NORMS,
)
_hf(
    "RegNetForImageClassification",
    "RegNetConfig",
    dict(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], groups_width=4),
    _images,
    NORMS,
)
_hf("MobileNetV2ForImageClassification", "MobileNetV2Config", dict(depth_multiplier=0.1, image_size=16), _images, NORMS)


def _peft(name: str, **options: Any) -> None:
    def build() -> nn.Module:
        offline()
        import peft
        import transformers

        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between the two packages
            return peft.get_peft_model(base, getattr(peft, name)(task_type="CAUSAL_LM", **options))  # type: ignore[no-any-return]

    def trained(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)

    SOUND[f"peft {name}"] = Sound(
        lambda: Program(build, _own_loss, _labelled_tokens, optimizer=trained), package="peft"
    )


_peft("LoraConfig", r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
_peft("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])


# ---- what a step may be, and verify does not train -------------------------------------------------------------------


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


def _looked_at(name: str, build: Callable[[], nn.Module], *shape: int, **options: Any) -> None:
    """`options`: of `Program`."""
    given: dict[str, Any] = {"loss": mean_square, "batch": vectors(*(shape or (4, 8)))}
    SOUND[name] = Sound(lambda: Program(build, **{**given, **options}), strategies=())


def _applied(
    name: str, forward: Callable[[Any, Any], Any], modules: Callable[[], dict[str, Any]], *shape: int, **options: Any
) -> None:
    _looked_at(name, lambda: Applied(forward, **modules()), *shape, **options)


def _linears(count: int = 3, make: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


def _pictures(norm: Callable[[int], nn.Module]) -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), norm(6), nn.ReLU()) for i in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(6 * 36, 4))


def _frozen_statistics() -> nn.Module:
    model = _pictures(nn.BatchNorm2d)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def _filled(self: Any, x: Tensor) -> Tensor:
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

    return _linears(2, Adapted)


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


def _clipping(parameters: Any) -> torch.optim.Optimizer:
    class Clipped(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            held = [p for group in self.param_groups for p in group["params"]]
            norm = float(clip_grad_norm_(held, 1.0))
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
    loss = mean_square(model, batch)
    dist.barrier()
    seen = loss.detach().clone()
    dist.all_reduce(seen)
    assert dist.get_rank() >= 0 and float(seen) == float(seen)
    return loss


def _labelled(index: int) -> dict[str, Any]:
    x = vectors(4, 8)(index)
    return {"x": x, "label": (x.sum(1) > 0).long(), "name": f"batch {index}", "meta": (index, [None, 2.5])}


_looked_at("SyncBatchNorm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(_pictures(nn.BatchNorm2d)), 2, 3, 6, 6)
_looked_at("BatchNorm in evaluation mode", _frozen_statistics, 2, 3, 6, 6)
_looked_at(
    "BatchNorm without statistics",
    lambda: _pictures(lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
    *(2, 3, 6, 6),
)
_looked_at("bfloat16", lambda: _linears().bfloat16(), loss=lambda m, x: m(x.bfloat16()).float().square().mean())
_looked_at("checkpoint around units", _linears, shard=_checkpointed_units)
_looked_at("adapters on a bfloat16 base", _adapter, shard=_adapters_and_base)
_looked_at("compiled blocks", lambda: _linears(2, lambda: torch.compile(nn.Linear(8, 8), backend="aot_eager")))  # type: ignore[arg-type]
_looked_at("a loss that all ranks log", _linears, loss=_logged)
_looked_at("lbfgs", _linears, optimizer=torch.optim.LBFGS)
_looked_at("clipping", _linears, optimizer=_clipping)
_looked_at("norms of the whole", _linears, optimizer=_full_norms)
_looked_at("batch with texts", _linears, batch=_labelled, loss=lambda m, b: F.cross_entropy(m(b["x"]), b["label"]))
_applied("density", _gaussian, lambda: {"body": _linears()}, 9, 8)
_applied("sampling", _sampled, lambda: {"body": _linears()})
_applied("checkpoint in forward", _in_segments, lambda: {"blocks": nn.ModuleList(_linears())})
_applied("queue that all ranks fill", _filled, lambda: {"encoder": _linears(), "queue": torch.ones(6, 8)}, 3, 8)
_applied("codes that all ranks follow", _averaged, lambda: {"encoder": _linears(), "codes": torch.zeros(8)}, 3, 8)
_applied(
    "mask in a buffer", lambda m, x: m.blocks(x) * m.mask, lambda: {"blocks": _linears(), "mask": torch.ones(4, 8)}
)
_applied("custom function", lambda m, x: m.blocks(_Sketched.apply(x)), lambda: {"blocks": _linears()})
_applied("vmap", lambda m, x: torch.vmap(torch.sin)(m.body(x)), lambda: {"body": nn.Linear(8, 8)})
_applied(
    "a branch by torch.cond",
    lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.body(x),)),
    lambda: {"body": nn.Linear(8, 8)},
)
_applied(
    "a method that uses units alone",
    lambda m, x: m.blocks(x),
    lambda: {"blocks": _linears()},
    loss=lambda m, x: m.blocks(x).square().mean(),
)
_applied(
    "parameter list",
    lambda m, x: x @ m.list[0] + m.list[1],
    lambda: {"list": nn.ParameterList([torch.ones(8, 3), torch.zeros(3)])},
)
_applied(
    "complex", lambda m, x: (torch.fft.fft(x) * m.filter).abs(), lambda: {"filter": nn.Parameter(torch.ones(8) + 0j)}
)
_applied(
    "adaptive softmax",
    lambda m, x: m.softmax(x, torch.arange(4))[1],
    lambda: {"softmax": nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])},
)
