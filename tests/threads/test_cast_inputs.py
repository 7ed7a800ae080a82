"""`cast_forward_inputs` by names and by a function: what is cast, and what is handed over as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.policy.options import argument_names, by_names
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """Computes positions in float32, like a rotary embedding, and notes what it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, freqs: Tensor, *rest: Tensor, mask: Any = None, **more: Tensor) -> Tensor:
        self.seen = {"x": x.dtype, "freqs": freqs.dtype, "rest": [t.dtype for t in rest]}
        self.seen |= {name: tensor.dtype for name, tensor in more.items()}
        if mask is not None:
            self.seen["mask"] = mask["inner"].dtype
        turned = torch.cos(freqs.float() * 1000)
        return self.linear(x.to(self.linear.weight.dtype)) * turned.to(self.linear.weight.dtype)

    def other(self, position: Tensor) -> Tensor:
        self.seen = {"position": position.dtype}
        return self.linear(position.to(self.linear.weight.dtype))


def only_even(name: str, tensor: Tensor) -> bool:
    return name == "x" or (name == "rest" and tensor.numel() % 2 == 0)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (True, {"x": BF16, "freqs": BF16, "rest": [BF16, BF16], "mask": BF16, "late": BF16}),
    (False, {"x": FP32, "freqs": FP32, "rest": [FP32, FP32], "mask": FP32, "late": FP32}),
    (["!freqs"], {"x": BF16, "freqs": FP32, "rest": [BF16, BF16], "mask": BF16, "late": BF16}),
    (("!freqs", "!l*"), {"x": BF16, "freqs": FP32, "rest": [BF16, BF16], "mask": BF16, "late": FP32}),
    (["x", "mask"], {"x": BF16, "freqs": FP32, "rest": [FP32, FP32], "mask": BF16, "late": FP32}),
    (["rest"], {"x": FP32, "freqs": FP32, "rest": [BF16, BF16], "mask": FP32, "late": FP32}),
    (only_even, {"x": BF16, "freqs": FP32, "rest": [BF16, FP32], "mask": FP32, "late": FP32}),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("option", "expected"), CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_cast(option: Any, expected: dict[str, Any], world: int) -> None:
    def rank_main(rank: int) -> None:
        model: Any = seeded(Block)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=option))
        x, freqs = torch.randn(2, 4), torch.randn(2, 4)
        mask = {"inner": torch.ones(2)}
        out = model(x, freqs, torch.ones(2), torch.ones(3), mask=mask, late=torch.ones(1))
        assert model.seen == expected
        assert mask["inner"].dtype is FP32  # the caller's
        out.float().sum().backward()
        model(freqs=freqs, x=x)
        assert model.seen == {"x": expected["x"], "freqs": expected["freqs"], "rest": []}
        fullshard.register_fsdp_forward_method(model, "other")
        model.other(x)
        cast = {True: BF16, False: FP32}.get(option if isinstance(option, bool) else "", None)
        if cast is None:
            cast = BF16 if isinstance(option, (list, tuple)) and option[0].startswith("!") else FP32
        assert model.seen == {"position": cast}

    run_ranks(world, rank_main)


def test_positions_keep_their_bits() -> None:
    """The result is that of a program that casts by itself all but `freqs`."""

    def rank_main(rank: int) -> None:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
        freqs = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = seeded(Block).bfloat16()(x.bfloat16(), freqs)
        for option, same in ((["!freqs"], True), (True, False)):
            model: Any = seeded(Block)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=option))
            assert torch.equal(model(x, freqs), expected) is same

    run_ranks(2, rank_main)


def test_one_tensor_under_two_names_is_each_of_them() -> None:
    model: Any = seeded(Block)

    def rank_main(rank: int) -> None:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=["!freqs"]))
        x = torch.randn(2, 4)
        model(x, x)
        assert (model.seen["x"], model.seen["freqs"]) == (BF16, FP32)

    run_ranks(1, rank_main)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("x", TypeError),
        ([], ValueError),
        (["x", "!y"], ValueError),
        ([1], TypeError),
        (None, TypeError),
        (["!"], ValueError),
    ],
)
def test_what_means_nothing_is_refused(option: Any, error: type[Exception]) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(error, match=r"mp_policy.cast_forward_inputs: expected"):
            fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=option))

    run_ranks(1, rank_main)


def test_ranks_with_other_choices_are_named() -> None:
    def rank_main(rank: int) -> None:
        model: Any = seeded(Block)
        chosen: Any = ["!freqs"] if rank else only_even
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=chosen))
        if torch.distributed.get_backend() == "gloo":
            with pytest.raises(fullshard.RanksDisagree, match="cast_forward_inputs=!freqs"):
                model(torch.ones(1, 4), torch.ones(1, 4))

    run_ranks(2, rank_main)


def test_a_name_that_no_unit_has_is_refused_at_the_first_forward() -> None:
    """One policy for all units: a name counts if one of them has it, in its forward or in a method of its class."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(x, x))  # type: ignore[no-any-return]

        def encode(self, pixels: Tensor) -> Tensor:
            return self.head(pixels)  # type: ignore[no-any-return]

    def rank_main(rank: int) -> None:
        for names, text in ((["!x", "!pixels"], None), (["inputs"], "'inputs', which none has; they have .*input")):
            model: Any = seeded(Narrow)
            policy = MixedPrecisionPolicy(BF16, cast_forward_inputs=names)
            for unit in (model.head, model):  # not Block, which takes any name
                fully_shard(unit, mp_policy=policy)
            if text is None:
                model(torch.randn(2, 4))
                continue
            with pytest.raises(ValueError, match=r"mp_policy.cast_forward_inputs: expected names .*" + text):
                model(torch.randn(2, 4))

    run_ranks(2, rank_main)


def test_the_whole_model_at_once() -> None:
    """`prepare_fully_shard`: names in the configuration, a function as an argument."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, freqs)
            return x

    def rank_main(rank: int) -> None:
        ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"cast_inputs": ["!freqs"]}, {}),
            ({}, {"cast_fn": lambda name, tensor: name != "freqs"}),
        ]
        for keys, options in ways:
            model: Any = seeded(Model)
            config = {"precision": {"mode": "PURE", "dtype": "bfloat16", **keys}, "wrap": ["Block"]}
            fullshard.prepare_fully_shard(model, None, config, show=False, **options)
            model(torch.randn(2, 4), torch.randn(2, 4))
            assert all(block.linear.weight.dtype is FP32 for block in model.blocks)
            assert [(block.seen["x"], block.seen["freqs"]) for block in model.blocks] == [(BF16, FP32)] * 2

        for names, text in (["!frequencies"], "which none has"), (["x", "!y"], "all of them with ! or none"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # forwards of (input)
            config = {"precision": {"mode": "PURE", "cast_inputs": names}, "wrap": ["Linear"]}
            with pytest.raises(ValueError, match=text):
                fullshard.prepare_fully_shard(model, None, config, show=False)
            assert not any(isinstance(module, fullshard.FSDPModule) for module in model.modules())

    run_ranks(2, rank_main)


def test_names_of_arguments() -> None:
    def call(a: int, /, b: int, *c: int, d: int, **e: int) -> None: ...

    assert argument_names(call, 4) == ["a", "b", "c", "c"]
    assert argument_names(lambda a: a, 2) == ["a", "1"]
    assert by_names(("x",)) is by_names(("x",))
