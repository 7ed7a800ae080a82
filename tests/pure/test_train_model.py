"""The model: initial values, positions, causality, grouped queries; and what is computed about it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import fullshard
from fullshard.train.config import SampleKeys
from fullshard.train.data import ByteTokenizer
from fullshard.train.metrics import peak_flop_per_second
from fullshard.train.model import Llama, LlamaShape, RMSNorm, flop_per_token
from fullshard.train.sample import generate

SHAPE = LlamaShape(vocab=259, layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=64, context=16)


def untied(shape: LlamaShape = SHAPE) -> LlamaShape:
    return LlamaShape(*(getattr(shape, name) for name in LlamaShape.__slots__[:7]), tie_embeddings=False)


def made(shape: LlamaShape = SHAPE, seed: int = 0) -> Llama:
    model = Llama(shape)
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("shape", [SHAPE, untied()])
def test_init_defines_everything_after_to_empty(shape: LlamaShape) -> None:
    """From the meta device over garbage: every parameter and buffer gets the value of the plain model."""
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    model.init_weights(0)
    plain = made(shape)
    for (name, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(found, expected), name
    for (name, found), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(found, expected), name
    assert ("output.weight" in dict(model.named_parameters())) == (not shape.tie_embeddings)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    """Another seed gives other values; more layers leave those of the first ones as they were, but for the scaled."""
    model, other = made(), made(seed=1)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)
    assert not torch.equal(model.layers[0].attention.wq.weight, model.layers[1].attention.wq.weight)
    deeper = made(LlamaShape(vocab=259, layers=3, dim=32, heads=4, kv_heads=2, ffn_dim=64, context=16))
    assert torch.equal(model.layers[1].attention.wq.weight, deeper.layers[1].attention.wq.weight)


def test_the_first_loss_is_that_of_no_opinion() -> None:
    """About ln 259 = 5.56: the run's curve begins where it should."""
    model = made()
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.6, abs=0.1)


def test_attention_is_causal() -> None:
    """A later token changes no earlier logit."""
    model = made()
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 8] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotation_makes_scores_depend_on_distance_only() -> None:
    """Query i and key j, both rotated, give a product that only i - j decides: the definition of rotary positions."""
    attention = made().layers[0].attention
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 16, 1, 8) for _ in range(2))
    scores = torch.einsum("bihe,bjhe->ij", attention._rotate(q), attention._rotate(k))
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, :1], scores[0, 5:6])


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    """Two key/value heads for four query heads are four, of which two and two are equal."""
    grouped = made().layers[0].attention
    wide = (
        made(LlamaShape(vocab=259, layers=2, dim=32, heads=4, kv_heads=4, ffn_dim=64, context=16)).layers[0].attention
    )
    with torch.no_grad():
        wide.wq.weight.copy_(grouped.wq.weight)
        wide.wo.weight.copy_(grouped.wo.weight)
        for name in ("wk", "wv"):
            heads = getattr(grouped, name).weight.view(2, 8, 32)
            getattr(wide, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grouped(x), wide(x))


def test_rms_norm_is_its_formula_and_float32_inside() -> None:
    norm = RMSNorm(4, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([3.0, -3.0, 3.0, 3.0])
    torch.testing.assert_close(norm(x), torch.tensor([1.0, -2.0, 3.0, 4.0]), rtol=1e-5, atol=0)
    large = torch.full((4,), 1e4, dtype=torch.bfloat16)  # its square, 1e8, has 8 bits in bfloat16
    assert norm.to(torch.bfloat16)(large).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_recomputed_blocks_give_the_same_gradients_and_names() -> None:
    """Bitwise; and the blocks run twice, so it is not nothing that happened."""
    plain, recomputing = made(), made()
    fullshard.checkpoint_activations(recomputing, "classes", classes=["Block"])
    runs = []
    recomputing.layers[0].ffn.register_forward_pre_hook(lambda *_: runs.append(1))
    tokens = torch.arange(30).view(2, 15)
    for model in (plain, recomputing):
        model(tokens).square().mean().backward()
    assert len(runs) == 2
    for (name, a), (other, b) in zip(plain.named_parameters(), recomputing.named_parameters(), strict=True):
        assert name == other and a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("shape, counted", [(SHAPE, "all"), (untied(), "without embedding")])
def test_flop_formula(shape: LlamaShape, counted: str) -> None:
    """6 per parameter that multiplies, and the causal half of attention: against a count of the model's matrices."""
    model = made(shape)
    num_params = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embedding.weight")
    matrices += shape.vocab * shape.dim if shape.tie_embeddings else 0
    norms = num_params - matrices - (0 if shape.tie_embeddings else shape.vocab * shape.dim)
    attention = 3 * 2 * (2 * shape.context * shape.dim) // 2 * shape.layers
    assert flop_per_token(shape, num_params) == 6 * (matrices + norms) + attention
    assert norms < 0.01 * num_params


def test_no_peak_rate_is_claimed_for_a_cpu() -> None:
    assert peak_flop_per_second(torch.device("cpu"), torch.float32) is None


def test_generation_repeats_and_never_draws_specials() -> None:
    """Same seed, same text; another seed another; BOS, EOS and PAD never, even where the model wants nothing else."""
    tokenizer, model = ByteTokenizer(), made()

    def text(seed: int, temperature: float = 1.0, model: Llama = model) -> str:
        keys = SampleKeys(prompt="ab", tokens=30, temperature=temperature, top_k=0)
        return generate(model, tokenizer, keys, context=16, seed=seed)

    assert text(0) == text(0) != text(1)
    assert text(0, temperature=0) == text(1, temperature=0)
    eager = copy.deepcopy(model)

    def only_eos(tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 259)
        logits[..., tokenizer.eos] = 1e9
        return logits

    eager.forward = only_eos  # type: ignore[method-assign]
    assert text(0, temperature=0, model=eager) == "ab" + "\0" * 30
