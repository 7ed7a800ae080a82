"""torchtitan: its own `parallelize_llama`, with `fully_shard` where it calls it, after `fullshard.install()`.

Its Llama on 2 gloo ranks, in processes of their own, because importing torchtitan changes torch (FakeTensorMode). The
default way of torchtitan 0.3 to say how tensors are laid out, `spmd_backend="spmd_types"`, needs a newer torch than
2.13, whose own `fully_shard` refuses its annotated parameters; `partial_dtensor` is the other one.
"""

from __future__ import annotations

import copy
import types
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness import tolerance, worlds
from tests.harness.behaviours import behaviour
from tests.harness.forked import run_forks
from tests.harness.implementations import for_each_implementation
from tests.harness.models import Trained, assert_same_training, collect, full_copy, seeded

pytestmark = [pytest.mark.hang_after(280), pytest.mark.slow]
STEPS, ROWS, LENGTH = 3, 2, 16


class _Kernels(types.ModuleType):
    """In the place of torchtitan's one file of Triton kernels, which expert parallelism calls and no dense model."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _torchtitan(ours: bool) -> Any:
    """The package, with fullshard's functions in the place of torch's if `ours`."""
    import sys

    # What its imports warn of.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
    name = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[name] = _Kernels(name)
    if ours:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "install: expected no module", UserWarning)  # this file's harness
            fullshard.install()
    import torchtitan.distributed.parallel_dims
    import torchtitan.models.llama3.sharding

    torchtitan.distributed.parallel_dims.device_type = "cpu"  # it expects an accelerator
    return torchtitan


def _config(titan: Any, *, tied: bool) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = titan.models.llama3.model_registry("debugmodel").model
    layers = config.layers[:2]
    for layer in layers:  # the others are for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    titan.models.llama3.sharding.set_llama3_sharding_config(config, enable_sp=True)
    return replace(config, layers=layers, enable_weight_tying=tied)


def _built(config: Any, device: str) -> Any:
    with torch.device(device):
        model = config.build()
    if device != "meta":
        with torch.no_grad():
            model.init_states(buffer_device=torch.device(device))
    return model


def _parallelized(titan: Any, model: Any, world: int, degrees: dict[str, int], **options: Any) -> Any:
    """What torchtitan's trainer does to a model before it has memory."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    parallelism = ParallelismConfig(spmd_backend=options.pop("spmd_backend", "partial_dtensor"), **degrees)
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    titan.models.llama3.parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=LENGTH, mixed_precision_param=options.pop("dtype", "float32")),
        parallelism=parallelism,
        compile_config=options.pop("compile", CompileConfig()),
        ac_config=options.pop("recompute", None),
        dump_folder="",
    )
    assert not options
    return dims


def _tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 2048, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))


def _step(model: nn.Module, optimizer: Any, step: int, ranks: range, world: int) -> None:
    """As its trainer: the loss is divided by the tokens of all ranks, and gradients are summed."""
    for rank in ranks:
        tokens = _tokens(step, rank)
        logits = model(tokens)
        if isinstance(logits, DTensor):  # by the vocabulary, with tensor parallelism
            logits = logits.full_tensor()
        logits = logits.flatten(0, 1).float()
        (F.cross_entropy(logits, tokens.flatten(), reduction="sum") / (world * tokens.numel())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _cleaned(trained: Trained) -> Trained:
    def clean(name: str) -> str:
        return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

    return Trained(*({clean(name): value for name, value in d.items()} for d in (trained.params, trained.state)))


def _trained(titan: Any, rank: int, world: int, ours: bool, variant: dict[str, Any]) -> None:
    """Train a variant; and a plain model from the same values, which must come to the same."""
    variant = dict(variant)
    meta, tied = variant.pop("meta", False), variant.pop("tied", False)
    degrees = variant.pop("degrees", {})
    config = _config(titan, tied=tied)
    torch.manual_seed(0)
    model = _built(config, "meta" if meta else "cpu")
    dims = _parallelized(titan, model, world, degrees, **variant)
    if meta:
        model.to_empty(device="cpu")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators")
            model.init_states(buffer_device=torch.device("cpu"))
    assert isinstance(model, fullshard.FSDPModule) is ours and isinstance(model, FSDPModule)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Embedding, norm and head, two blocks, the model; or all of the first three as one.
    assert len(units) == 6
    if not ours:
        for unit in units:
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply and sum in one
    plain = _built(config, "cpu")
    plain.load_state_dict(_cleaned(Trained({k: full_copy(v) for k, v in model.state_dict().items()})).params)
    replicas = dims.tp
    group = rank // replicas
    shares = world // replicas
    oracles = [plain, copy.deepcopy(plain), copy.deepcopy(plain)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, *oracles)]
    settle = [
        tolerance.disturb(optimizers[i], sign, shares * ROWS * LENGTH, oracles[i - 1])
        for i, sign in ((2, 1.0), (3, -1.0))
    ]
    # Its recipe draws shards, and a CPU mesh draws equal ones: said in the first forward.
    warnings.filterwarnings("ignore", ".* expected each rank to draw rows of its own")
    for step in range(STEPS):
        _step(model, optimizers[0], step, range(group, group + 1), shares)
        for oracle, optimizer in zip(oracles, optimizers[1:], strict=True):
            _step(oracle, optimizer, step, range(shares), shares)
    for each in settle:
        each()
    expected, *disturbed = map(collect, oracles, optimizers[1:])
    for kind in ("params", "state"):
        values = getattr(expected, kind)
        expected.allowed |= tolerance.ends(values, [getattr(end, kind) for end in disturbed], STEPS)
    assert_same_training(_cleaned(collect(model, optimizers[0])), expected)


def _on_ranks(world: int, fn: Any, *args: Any) -> None:
    worlds.note("gloo", world)
    run_forks(world, fn, args, 240)


def _variants(rank: int, ours: bool, world: int, names: tuple[str, ...]) -> None:
    titan = _torchtitan(ours)
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    compiled = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    variants: dict[str, dict[str, Any]] = {
        "as it is": {},
        "tied, on the meta device": {"tied": True, "meta": True},
        "selectively recomputed": {"recompute": SelectiveAC.Config()},
        "recomputed and compiled": {"recompute": FullAC.Config(), "compile": compiled},
        "replicated": {"degrees": {"data_parallel_replicate_degree": 2}},
        "tensor parallel": {"degrees": {"tensor_parallel_degree": 2}},
    }
    for name in names:
        try:
            _trained(titan, rank, world, ours, variants[name])
        except Exception as error:
            error.add_note(f"variant: {name}")
            raise


@behaviour("torchtitan: its `parallelize_llama`: tied weights, the meta device, recomputation", area="packages")
@for_each_implementation
def test_its_own_call_sites(impl: Any) -> None:
    names = ("as it is", "tied, on the meta device", "selectively recomputed")
    _on_ranks(2, _variants, impl.name == "fullshard", 2, names)


@behaviour("torchtitan: its `parallelize_llama` with compiled and recomputed blocks", area="packages")
@for_each_implementation
@pytest.mark.slow
def test_its_compiled_blocks(impl: Any) -> None:
    _on_ranks(2, _variants, impl.name == "fullshard", 2, ("recomputed and compiled",))


@behaviour("torchtitan: its `parallelize_llama` with replicas, and with tensor parallelism", area="packages")
@for_each_implementation
@pytest.mark.slow
def test_its_own_call_sites_on_a_mesh(impl: Any) -> None:
    _on_ranks(4, _variants, impl.name == "fullshard", 4, ("replicated", "tensor parallel"))


# ---- experts: a decoder of the names that its function looks for, on meshes as it makes them ----------------------


class _Experts(nn.Module):
    """Two of four experts, which a rank has."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 6, 5) * 0.3)
        self.down = nn.Parameter(torch.randn(2, 5, 6) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eni,eio->no", torch.tanh(torch.einsum("ni,eio->eno", x, self.up)), self.down)


class _Block(nn.Module):
    moe_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.moe: Any = nn.ModuleDict({"routed_experts": nn.ModuleDict({"inner_experts": _Experts()})})

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        output: Tensor = self.moe.routed_experts.inner_experts(x)
        return x + output


class _Decoder(nn.Module):
    enable_weight_tying = False

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict({str(i): _Block() for i in range(2)})
        self.norm, self.lm_head = nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def _decoder(pair: int) -> _Decoder:
    """Equal on all ranks but for the experts, which are those of one pair of ranks."""
    model = seeded(_Decoder)
    assert isinstance(model, _Decoder)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _Experts):
                module.up.mul_(1 + pair)
    return model


def _expert_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(tokens), tokens) / 4


def _experts(rank: int, ours: bool) -> None:
    """Ranks 0 and 2 share their experts, and so do 1 and 3; all four share the rest."""
    titan = _torchtitan(ours)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: Any = _decoder(rank % 2)
    titan.distributed.fsdp.apply_fsdp_to_decoder(
        model,
        init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=2,
        edp_mesh=mesh["efsdp"],
    )
    assert isinstance(model, fullshard.FSDPModule) is ours
    if not ours:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    plain = [_decoder(pair) for pair in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, *plain)]
    for oracle in optimizers[1:]:
        tolerance.watch(oracle)
    for step in range(STEPS):
        _expert_loss(model, step, rank).backward()
        for each in range(4):
            _expert_loss(plain[each % 2], step, each).backward()
        for name, parameter in plain[0].named_parameters():
            other = plain[1].get_parameter(name)
            if "inner_experts" not in name:
                parameter.grad = other.grad = parameter.grad + other.grad  # type: ignore[operator]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = collect(model, optimizers[0]), collect(plain[rank % 2], optimizers[1 + rank % 2])
    assert_same_training(found, expected)
    local = model.layers["0"].moe.routed_experts.inner_experts.up
    assert isinstance(local, DTensor) and local.device_mesh.size() == 2 and local.to_local().shape[0] == 1


@behaviour("torchtitan: its `apply_fsdp_to_decoder` with experts on a mesh of their own and prefetch lists",
           area="packages")  # fmt: skip
@for_each_implementation
@pytest.mark.slow
def test_its_experts(impl: Any) -> None:
    _on_ranks(4, _experts, impl.name == "fullshard")
