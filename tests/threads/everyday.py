"""Programs that people write every day: layers with parameters in unusual places, and the losses of common recipes.

As `uses.py`, whose `check_use` runs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint_sequential

from tests.threads.programs import WIDTH, Block, Model, OnVectors, of_blocks
from tests.threads.uses import Use, mean_square, vectors

# ---- where parameters are ------------------------------------------------------------------------------------


class Recurrent(Block):
    """An LSTM keeps a list of its parameters beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rnn(x)[0]


class Normed(Block):
    """Weights that are computed from parameters when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)
        self.down = parametrizations.weight_norm(self.down)


class Lists(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.named = nn.ParameterDict({"bias": torch.randn(5, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * (1.0 + 0.1 * scale)
        return super().forward(x) + self.named["bias"].mean(0)


class Twice(Block):
    """One module under two names, called with different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.up

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) + torch.sigmoid(self.again(self.norm(x))))


class Encoder(nn.TransformerEncoderLayer):
    """Evaluation takes a path of its own, which reads the weights and calls no module."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH + 1, dropout=0.0, batch_first=True)


class TiedInside(Model):
    """The embedding's weight is read again where no module owns the product."""

    def out(self, x: Tensor) -> Any:
        return F.linear(x, self.embedding.weight) + self.head(x)


# ---- forwards ------------------------------------------------------------------------------------------------


class Deep(Model):
    """The head reads every block."""

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x, outputs = self.embedding(tokens), []
        for layer in self.layers:
            x = layer(x)
            outputs.append(self.head(x))
        return torch.stack(outputs).sum(0)


class Segments(Model):
    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        return self.head(checkpoint_sequential(list(self.layers), 2, self.embedding(tokens), use_reentrant=False))


class Branches(Model):
    """A branch without gradients, and one that is stopped in the middle; a block runs in both."""

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x = self.embedding(tokens)
        with torch.no_grad():
            gate = self.layers[0](x)
        y = self.layers[1](x + gate)
        z = self.layers[0](y.detach())
        return self.head(self.layers[2](y) * torch.sigmoid(z) + z)


class LossInside(Model):
    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        logits = super().forward(tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits.detach()}


# ---- losses --------------------------------------------------------------------------------------------------


def _loss_inside(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    (scale * model(tokens)["loss"]).backward()


def _contrastive(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """Two views, of which every pair counts."""
    a, b = (F.normalize(model(view).flatten(1), dim=-1) for view in (tokens, tokens.flip(1)))
    (scale * F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))).backward()


def _own_target(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    target = model(tokens.flip(1)).detach()
    (scale * F.mse_loss(model(tokens), target)).backward()


def _own_labels(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    model.eval()
    with torch.no_grad():
        labels = model(tokens).argmax(-1)
    model.train()
    (scale * F.cross_entropy(model(tokens.flip(0)).flatten(0, 1), labels.flatten())).backward()


def _unused_input(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x, other = vectors(tokens), torch.ones(1, requires_grad=True)
    out = model(x)
    towards, none = torch.autograd.grad(out.pow(2).sum(), [x, other], allow_unused=True, retain_graph=True)
    assert none is None
    (scale * (out * towards.mean()).pow(2).mean()).backward()


def _several_roots(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    out = model(tokens)
    torch.autograd.backward([out, out.sin().sum()], [torch.full_like(out, 0.1 * scale), torch.tensor(scale)])


def _abandoned(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """Forwards whose outputs are thrown away, with gradients and without, before the one that counts."""
    model(tokens)
    for _ in range(2):
        with torch.no_grad():
            model(tokens)
    model(tokens.flip(0))
    mean_square(model, tokens, step, scale)


def _row_by_row(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """Gradients of single outputs, one after the other through one graph, then a backward."""
    x = vectors(tokens)
    out = model(x)
    rows = [torch.autograd.grad(out[..., i].sum(), x, retain_graph=True)[0] for i in range(3)]
    weight = torch.stack([row.pow(2).sum() for row in rows]).sum()
    (scale * out.pow(2).mean() * weight).backward()


def _frozen_as_a_whole(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """A backward through a model in which nothing is trained, to its input."""
    model.requires_grad_(False)
    x = vectors(tokens)
    model(x).pow(2).mean().backward()
    assert x.grad is not None
    model.requires_grad_(True)
    (scale * model(x.detach() + x.grad).pow(2).mean()).backward()


EVERYDAY: dict[str, Use] = {
    "lstm": Use(mean_square, of_blocks(Recurrent)),
    "weight_norm": Use(mean_square, of_blocks(Normed)),
    "parameter_lists": Use(mean_square, of_blocks(Lists)),
    "one_module_two_names": Use(mean_square, of_blocks(Twice)),
    "encoder_layer": Use(_own_labels, of_blocks(Encoder)),
    "weight_read_twice": Use(mean_square, TiedInside),
    "deep_supervision": Use(mean_square, Deep),
    "checkpoint_sequential": Use(mean_square, Segments),
    "stopped_branches": Use(mean_square, Branches),
    "loss_inside": Use(_loss_inside, LossInside),
    "contrastive": Use(_contrastive),
    "own_target": Use(_own_target),
    "unused_input": Use(_unused_input, OnVectors),
    "several_roots": Use(_several_roots),
    "abandoned_forwards": Use(_abandoned),
    "row_by_row": Use(_row_by_row, OnVectors),
    "frozen_as_a_whole": Use(_frozen_as_a_whole, OnVectors),
}
