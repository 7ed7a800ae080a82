"""The programs of the guides this library follows (torchtitan's FSDP2 page, PyTorch's practical guide), block by block.

Each test makes the same calls in the same order as one code block of the guide, with `cuda` read as the machine's
device and smaller sizes, and then asserts what the guide says about it. `examples/train.py` is the whole program. The
page's TOML block is read in tests/pure/test_train_config.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from fullshard.observe import record
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.pool import pool

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
VOCABULARY, DIM = 48, 16


class TransformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.ReLU(), nn.Linear(dim * 4, dim))
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocab_size: int = VOCABULARY, dim: int = DIM, num_layers: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([TransformerBlock(dim) for _ in range(num_layers)])
        self.output = nn.Linear(dim, vocab_size)

    def reset_parameters(self) -> None:
        """The guide calls this without defining it."""
        # Random numbers of a DTensor on a CPU: every rank draws those of its own rows, and torch warns.
        warnings.filterwarnings("ignore", message="DTensor random operators")
        torch.manual_seed(dist.get_rank())
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    init_weights = reset_parameters  # as torchtitan calls it

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def setup_model(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(7 + dist.get_rank()))


def train(model: Any, steps: int = 4, before: Any = None, clip: float | None = None) -> list[float]:
    """The guide's loop. Its loss, `model(x).sum()`, has no minimum; the calls are the same with one that has."""
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        if before is not None:
            before()
        x = tokens()
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=clip)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() for name, p in model.state_dict().items()}


# ---- torchtitan's page -----------------------------------------------------------------------------------------------


def _meta_device(rank: int) -> None:
    with torch.device("meta"):
        model = Transformer()
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module)
    fully_shard(model)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        assert tensor.device == torch.device("meta")
    model.to_empty(device="cpu")
    model.init_weights()
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in model.parameters())
    losses = train(model)
    assert losses == sorted(losses, reverse=True)


def _api_reference(rank: int) -> None:
    """The old path, which `install` swaps too; every argument of the page's signature, and its defaults."""
    import fullshard

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "install: expected no module", UserWarning)  # this process's harness
        fullshard.install()
    try:
        from torch.distributed._composable.fsdp import MixedPrecisionPolicy as Policy
        from torch.distributed._composable.fsdp import OffloadPolicy as Offload
        from torch.distributed._composable.fsdp import fully_shard as shard
    finally:
        fullshard.uninstall()
    torch.manual_seed(0)
    losses = []
    for options in (
        {},
        {"mesh": None, "reshard_after_forward": True, "mp_policy": Policy(), "offload_policy": Offload()},
    ):
        torch.manual_seed(0)
        model: Any = Transformer()
        for layer in model.layers:
            shard(layer, **options)
        assert shard(model, **options) is model and isinstance(model, FSDPModule)
        losses.append(train(model))
    assert losses[0] == losses[1]


def _replicate_and_shard(rank: int) -> None:
    """The page's mesh is (4, 8) of GPUs."""
    from torch.distributed.device_mesh import init_device_mesh

    expected = train(setup_model())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model: Any = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(p.placements == (Replicate(), Shard(0)) for p in model.parameters())
    tolerance.assert_close(torch.tensor(train(model)), torch.tensor(expected))


def _mixed_precision_policy(rank: int) -> None:
    mp_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16, cast_forward_inputs=True
    )
    torch.manual_seed(0)
    model: Any = Transformer()
    fully_shard(model, mp_policy=mp_policy)
    assert model(tokens()).dtype == torch.bfloat16


def _state_dicts_without_communication(rank: int) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    model = setup_model()
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(tokens()).sum().backward()
    optim.step()
    with CommDebugMode() as counted:
        states = [model.state_dict(), *optim.state_dict()["state"].values()]
    assert counted.get_total_counts() == 0
    assert all(isinstance(t, DTensor) for state in states for t in state.values() if t.ndim)


# ---- PyTorch's practical guide ---------------------------------------------------------------------------------------


def _setup_and_inspect(rank: int) -> None:
    model = setup_model()
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    assert repr(model).startswith("FSDPTransformer(")
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
        assert param.to_local().shape[0] * 2 == param.shape[0]


def _training_loop(rank: int) -> None:
    losses = train(setup_model(), steps=6)
    assert losses == sorted(losses, reverse=True)


def _explicit_prefetching(rank: int) -> None:
    expected = train(setup_model())
    model = setup_model()
    num_to_forward_prefetch = 2
    for i, layer in enumerate(model.layers):
        if i >= len(model.layers) - num_to_forward_prefetch:
            break
        layer.set_modules_to_forward_prefetch([model.layers[i + j] for j in range(1, num_to_forward_prefetch + 1)])
    num_to_backward_prefetch = 2
    for i, layer in enumerate(model.layers):
        if i < num_to_backward_prefetch:
            continue
        layer.set_modules_to_backward_prefetch([model.layers[i - j] for j in range(1, num_to_backward_prefetch + 1)])
    with record(model) as trace:
        # Trigger the first all-gather early, as the guide does.
        losses = train(model, before=model.unshard)
    assert losses == expected
    lines = [str(line).strip() for line in trace.lines]
    first = lines.index("> pre_forward layers.0 grad") if "> pre_forward layers.0 grad" in lines else None
    begin = next(i for i, line in enumerate(lines) if line.startswith("> pre_forward layers.0"))
    assert first is None or first == begin
    end = next(i for i, line in enumerate(lines) if i > begin and line.startswith("> post_forward layers.0"))
    assert [line for line in lines[begin:end] if line.startswith("unshard")][-2:] == [
        "unshard layers.1",
        "unshard layers.2",
    ]


def _mixed_precision(rank: int) -> None:
    fsdp_kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    model = setup_model(**fsdp_kwargs)
    for param in model.parameters():
        assert param.dtype == torch.float32
    model.unshard()
    for param in model.parameters(recurse=False):
        assert param.dtype == torch.bfloat16
    model.reshard()
    # That loop has no parameters to look at, as the root's are in its children; a layer has.
    layer = model.layers[0]
    layer.unshard()
    assert {param.dtype for param in layer.parameters()} == {torch.bfloat16}
    layer.reshard()
    losses = train(model)
    assert losses == sorted(losses, reverse=True)


def _gradient_clipping(rank: int) -> None:
    model = setup_model()
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    before = whole(model)
    model(tokens()).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optim.step()
    moved = torch.stack([(after - before[name]).norm() for name, after in whole(model).items()]).norm()
    tolerance.assert_close(moved, torch.tensor(1.0))


def _dtensor_checkpoint(rank: int, path: str) -> None:
    model = setup_model()
    train(model)
    expected = whole(model)
    # Saving.
    sharded_sd = model.state_dict()
    cpu_state_dict = {}
    for param_name, sharded_param in sharded_sd.items():
        full_param = sharded_param.full_tensor()
        if torch.distributed.get_rank() == 0:
            cpu_state_dict[param_name] = full_param.cpu()
        else:
            del full_param
    if torch.distributed.get_rank() == 0:
        torch.save(cpu_state_dict, path)
    dist.barrier()
    # Loading, into a model that has no memory yet.
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    full_sd = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    meta_sharded_sd = model.state_dict()
    sharded_sd = {}
    for param_name, full_tensor in full_sd.items():
        sharded_meta_param = meta_sharded_sd.get(param_name)
        sharded_tensor = distribute_tensor(full_tensor, sharded_meta_param.device_mesh, sharded_meta_param.placements)
        sharded_sd[param_name] = nn.Parameter(sharded_tensor)
    model.load_state_dict(sharded_sd, assign=True)
    found = whole(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    train(model)


def _dcp_checkpoint(rank: int, path: str) -> None:
    model = setup_model()
    train(model)
    expected = whole(model)
    model_state_dict = get_model_state_dict(
        model=model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if torch.distributed.get_rank() == 0:
        torch.save(model_state_dict, path)
    dist.barrier()
    full_sd = torch.load(path, weights_only=True) if rank == 0 else {}
    model = setup_model()
    set_model_state_dict(
        model=model,
        model_state_dict=full_sd,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    found = whole(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    train(model)


def _migration(rank: int) -> None:
    """The guide's FSDP1 program and its FSDP2 equivalent train alike from the same values."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    old: Any = Transformer()
    old = FSDP(old, auto_wrap_policy=ModuleWrapPolicy({TransformerBlock}), device_id=torch.device("cpu"))
    with torch.device("meta"):
        model = Transformer()
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module)
    fully_shard(model)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        assert tensor.device == torch.device("meta")
    model.to_empty(device="cpu")
    model.reset_parameters()
    torch.manual_seed(0)
    start = Transformer().state_dict()
    set_model_state_dict(model, start, options=StateDictOptions(full_state_dict=True))
    tolerance.assert_close(torch.tensor(train(model)), torch.tensor(train(old)))


BLOCKS = [
    _api_reference,
    _meta_device,
    _mixed_precision_policy,
    _state_dicts_without_communication,
    _setup_and_inspect,
    _training_loop,
    _explicit_prefetching,
    _mixed_precision,
    _gradient_clipping,
    _migration,
]


programs = behaviour(
    "the guides' programs, block by block: torchtitan's page, PyTorch's practical guide",
    area="training",
    torch="different",
    reason="not run for torch: they import fullshard, and docs/seeds.md says where the guides are dated",
)


@pytest.mark.sample(1)
@programs
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__.strip("_"))
def test_block(block: Any) -> None:
    pool(2).run(block, timeout=60)


@pytest.mark.slow
@programs
def test_block_of_replicas() -> None:
    pool(4).run(_replicate_and_shard, timeout=60)


@pytest.mark.sample(1)
@programs
@pytest.mark.parametrize("block", [_dtensor_checkpoint, _dcp_checkpoint], ids=lambda block: block.__name__.strip("_"))
def test_checkpoint_block(block: Any, tmp_path: Path) -> None:
    pool(2).run(block, str(tmp_path / "checkpoint.pt"), timeout=60)


# ---- the whole program -----------------------------------------------------------------------------------------------


def _script(rank: int, runs: list[list[str]], port: int) -> list[str]:
    """The example as torchrun would run it on this rank, once for each list of arguments; what it printed."""
    import os

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    warnings.filterwarnings("ignore", message="DTensor random operators")
    texts = []
    for number, arguments in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port + number)
        sys.argv = [str(EXAMPLE), "--steps", "12", *arguments]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        texts.append(printed.getvalue())
    return texts


@pytest.mark.slow
@behaviour(
    "the practical guide's whole program with its flags: trains, saves, loads and continues",
    area="training",
    torch="different",
    reason="not run for torch: examples/train.py imports fullshard; the guide's own script parses no flags",
)
@pytest.mark.parametrize(
    "flags", [[], ["--dcp-api", "--mixed-precision", "--explicit-prefetching"]], ids=["plain", "all"]
)
def test_the_whole_program_trains_saves_and_goes_on(flags: list[str], tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*flags, "--checkpoint-dir", str(tmp_path)]
    (first, second), (quiet, silent) = pool(2).run(_script, [arguments, arguments], port, group=False, timeout=100)
    assert quiet == silent == ""
    losses = [[float(line.split()[-1]) for line in text.splitlines() if "loss" in line] for text in (first, second)]
    assert losses[0][0] > 6 and losses[0] == sorted(losses[0], reverse=True)
    assert "loaded" in second and losses[1][0] < 0.2 * losses[0][0]
    assert (tmp_path / "training.pt").exists() and "saved" in first
    # The other way reads the same file.
    other = [flag for flag in flags if flag != "--dcp-api"] if flags else ["--dcp-api"]
    (third,), _ = pool(2).run(
        _script, [[*other, "--checkpoint-dir", str(tmp_path)]], port + 2, group=False, timeout=100
    )
    assert "loaded" in third and float(third.split("loss")[1].split()[0]) < 0.2 * losses[0][0]
