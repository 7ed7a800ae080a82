"""`fullshard.compat`: programs of FSDP1 and Composer as they are, on this runtime; training equals plain training."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import FSDPModule, Prepared
from fullshard.compat import fsdp1
from fullshard.compat.composer import prepare_fsdp_module
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import MixedPrecision, ModuleWrapPolicy, ShardingStrategy, StateDictType
from fullshard.migrate.verdict import MigrationError
from tests.harness.models import BY_NAME, Case, Trained, Transformer, _Block, adamw, assert_same_training, collect
from tests.harness.models import train_reference as plainly
from tests.harness.threads import WORLD, run_ranks

# What prepares a model returns it, which does not go from a process to another; tests/procs/test_prepare_real.py and
# test_converted.py run over gloo.
pytestmark = pytest.mark.threads_only(reason="a sharded model does not pickle")


STEPS = 3
CASE, TIED = BY_NAME["transformer"], BY_NAME["tied"]


def reference(case: Case = CASE, world: int = WORLD) -> Trained:
    return plainly(case.build(), case.loss, [[case.batch(s, r) for r in range(world)] for s in range(STEPS)])


def train(model: nn.Module, optimizer: Any, case: Case, rank: int) -> Trained:
    for step in range(STEPS):
        case.loss(model, case.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def wrapped(rank: int, case: Case, options: dict[str, Any]) -> tuple[Trained, list[str]]:
    model = FSDP(case.build(), **options)
    found = train(model, adamw(model.parameters(), watched=False), case, rank)
    return found, [name for name, module in model.module.named_modules() if isinstance(module, FSDPModule)]


BLOCKS = ["layers.0", "layers.1", "layers.2"]
BY_CLASS = functools.partial(fsdp1.transformer_auto_wrap_policy, transformer_layer_cls={_Block})


def is_block(module: nn.Module) -> bool:
    return type(module) is _Block


# ---- FSDP1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({}, [""]),
        ({"auto_wrap_policy": ModuleWrapPolicy({_Block})}, ["", *BLOCKS]),
        ({"auto_wrap_policy": BY_CLASS, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, ["", *BLOCKS]),
        ({"auto_wrap_policy": BY_CLASS, "sharding_strategy": ShardingStrategy.NO_SHARD}, ["", *BLOCKS]),
        (
            {"auto_wrap_policy": functools.partial(fsdp1.size_based_auto_wrap_policy, min_num_params=1000)},
            ["", *BLOCKS],
        ),
        (
            {"auto_wrap_policy": functools.partial(fsdp1.lambda_auto_wrap_policy, lambda_fn=is_block)},
            ["", *BLOCKS],
        ),
        (
            {"auto_wrap_policy": fsdp1.CustomPolicy(lambda m: is_block(m) and {"reshard_after_forward": False})},
            ["", *BLOCKS],
        ),
    ],
)  # fmt: skip
def test_policies_and_strategies(options: dict[str, Any], units: list[str]) -> None:
    for found, names in run_ranks(WORLD, wrapped, CASE, options):
        assert names == units
        assert_same_training(found, reference())


def test_every_module_a_unit_with_a_tie() -> None:
    for found, names in run_ranks(WORLD, wrapped, TIED, {"auto_wrap_policy": fsdp1.always_wrap_policy}):
        assert "layers.0.mlp.up" in names and "embedding" not in names and "head" not in names
        assert_same_training(found, reference(TIED))


def hybrid(rank: int, by_mesh: bool) -> tuple[Trained, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if by_mesh else None
    return wrapped(rank, CASE, {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD})


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["by class", "of the norms too", "none"])
def test_classes_that_mixed_precision_leaves_out(policy: str) -> None:
    """They compute in float32 on float32 inputs where there is a wrap policy, also if it chooses them itself. Without
    one FSDP1 leaves nothing out."""
    wrap = {
        "by class": BY_CLASS,
        "of the norms too": ModuleWrapPolicy({_Block, nn.LayerNorm}),
        "none": None,
    }[policy]

    def rank_main(rank: int) -> None:
        seen: set[tuple[torch.dtype, torch.dtype]] = set()
        model = CASE.build()
        precision = MixedPrecision(torch.bfloat16, torch.float32, _module_classes_to_ignore=(nn.LayerNorm,))
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        assert norms
        wrapped = FSDP(model, auto_wrap_policy=wrap, mixed_precision=precision)
        for norm in norms:
            norm.register_forward_hook(lambda module, args, _: seen.add((module.weight.dtype, args[0].dtype)))
        CASE.loss(wrapped, CASE.batch(0, rank)).backward()
        expected = torch.bfloat16 if policy == "none" else torch.float32
        assert seen == {(expected, expected)}

    run_ranks(WORLD, rank_main)


def test_hybrid_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for found, _ in run_ranks(4, hybrid, True):
        assert_same_training(found, reference(world=4))
    with pytest.raises(Exception, match="expected device_mesh= of \\(replicate, shard\\) with HYBRID_SHARD"):
        run_ranks(4, hybrid, False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for found, _ in run_ranks(4, hybrid, False):
        assert_same_training(found, reference(world=4))


def by_hand(rank: int) -> Trained:
    """Inner modules wrapped by the program, accumulation without synchronisation, clipping, and names."""
    model: Any = CASE.build()
    names = [name for name, _ in model.named_parameters()]
    for number, layer in enumerate(model.layers):
        model.layers[number] = FSDP(layer)
    model = FSDP(model)
    assert [name for name, _ in model.named_parameters()] == names and [*model.state_dict()] == names
    assert isinstance(model, FSDP) and isinstance(model.layers[0], FSDP) and len(FSDP.fsdp_modules(model)) == 4
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    optimizer = adamw(model.parameters(), watched=False)
    for step in range(STEPS):
        first, second = CASE.batch(step, rank), CASE.batch(step + 100, rank)
        with model.no_sync():
            (CASE.loss(model, first) / 2).backward()
        (CASE.loss(model, second) / 2).backward()
        norm = model.clip_grad_norm_(0.5)
        assert norm.item() > 0.5
        optimizer.step()
        optimizer.zero_grad()
    found = collect(model, optimizer)
    found.params = {fsdp1.plain_name(name): value for name, value in found.params.items()}
    return found


def test_no_sync_and_clip_grad_norm_and_modules_wrapped_by_hand() -> None:
    model = CASE.build()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for rank in range(WORLD):
            for batch in (CASE.batch(step, rank), CASE.batch(step + 100, rank)):
                (CASE.loss(model, batch) / 2 / WORLD).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(model, optimizer)
    for found in run_ranks(WORLD, by_hand):
        assert_same_training(found, expected)


def states(rank: int) -> list[Any]:
    model = FSDP(TIED.build(), auto_wrap_policy=BY_CLASS)
    optimizer = adamw(model.parameters(), watched=False)
    train(model, optimizer, TIED, rank)
    whole = model.state_dict()
    assert {type(value) for value in whole.values()} == {torch.Tensor}  # FSDP1's default
    kinds = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)
    for kind in kinds:
        other = FSDP(TIED.build(seed=1), auto_wrap_policy=ModuleWrapPolicy([_Block]))
        again = adamw(other.parameters(), watched=False)
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
            assert FSDP.get_state_dict_type(model).state_dict_type is kind
            state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            tensors = [value for value in state.values()] + [entries["exp_avg"] for entries in optim["state"].values()]
            assert {isinstance(value, DTensor) for value in tensors} == {kind is StateDictType.SHARDED_STATE_DICT}
            other.load_state_dict(state)
            again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, optim))
        assert other.head.weight is other.embedding.weight
        found, expected = collect(other, again), collect(model, optimizer)
        assert_same_training(found, expected, 0)
    rank0 = fsdp1.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, kinds[0], rank0, fsdp1.FullOptimStateDictConfig(rank0_only=True)):
        found = [len(model.state_dict()), len(FSDP.optim_state_dict(model, optimizer))]
    assert len(model.state_dict()) == len(whole)  # the context is over
    with pytest.raises(NotImplementedError, match="LOCAL_STATE_DICT"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with FSDP.summon_full_params(model):
        model.head.weight.data.fill_(3.0)
    assert torch.equal(model.state_dict()["embedding.weight"], torch.full_like(whole["embedding.weight"], 3.0))
    model.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Embedding) else None)
    assert torch.equal(model.state_dict()["head.weight"], torch.ones_like(whole["head.weight"]))
    return found


def test_state_dict_type_and_optim_state_dict_and_summon_full_params() -> None:
    first, *others = run_ranks(WORLD, states)
    assert first == [len(TIED.build().state_dict()), 2] and all(found == [0, 0] for found in others)


def quiet_and_loud(rank: int) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        FSDP(CASE.build())
        assert not given
        precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
        model = FSDP(
            CASE.build(),
            backward_prefetch=fsdp1.BackwardPrefetch.BACKWARD_POST,
            forward_prefetch=True,
            limit_all_gathers=True,
            use_orig_params=True,
            device_id=0,
            mixed_precision=precision,
            ignored_modules=[],
        )
    out = model(CASE.batch(0, rank)[0])
    return sorted(str(each.message).split(": ")[1] for each in given), out.dtype


def test_one_notice_for_each_argument_without_effect() -> None:
    names = [
        "backward_prefetch",
        "buffer_dtype",
        "device_id",
        "forward_prefetch",
        "limit_all_gathers",
        "use_orig_params",
    ]
    ((found, dtype),) = run_ranks(1, quiet_and_loud)
    assert found == [f"{name} has no effect" for name in names] and dtype == torch.bfloat16


def values(rank: int, on_meta: bool) -> bool:
    model = CASE.build(seed=rank + 3)
    if on_meta:
        model = Transformer().to_empty(device="meta") if rank else model
    frozen = CASE.build().head
    model.head = frozen
    wrapper = FSDP(model, auto_wrap_policy=BY_CLASS, sync_module_states=True, ignored_modules=[model.head])
    assert not isinstance(frozen.weight, DTensor)
    expected = CASE.build(seed=3).state_dict()
    return all(torch.equal(v, expected[n]) for n, v in wrapper.state_dict().items() if n != "head.weight")


def initialised(rank: int) -> bool:
    with torch.device("meta"):
        model = Transformer()

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    wrapper = FSDP(model, auto_wrap_policy=BY_CLASS, param_init_fn=fill)
    return all(bool((value == 0.25).all()) for value in wrapper.state_dict().values())


def test_sync_module_states_and_ignored_modules_and_param_init_fn() -> None:
    assert all(run_ranks(WORLD, values, False)) and all(run_ranks(WORLD, values, True))
    assert all(run_ranks(WORLD, initialised))


# ---- Composer --------------------------------------------------------------------------------------------------------


@dataclass
class FSDP2Config:
    """As Composer's, in part."""

    device_mesh: Any = None
    reshard_after_forward: bool | int = True
    activation_checkpointing: bool = False
    mixed_precision: str = "FULL"
    state_dict_type: str = "sharded"


def composed(rank: int, config: Any, precision: Any, meshed: bool, auto: bool) -> tuple[Trained, Prepared]:
    model = CASE.build()
    optimizer = adamw(model.parameters(), watched=False)
    if meshed:
        config = {**config, "device_mesh": init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("r", "s"))}
    prepared = prepare_fsdp_module(model, optimizer, config, precision, auto_microbatching=auto)
    return train(model, optimizer, CASE, rank), prepared


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "precision", "meshed", "auto"),
    [
        ({"mixed_precision": "PURE", "activation_checkpointing": True, "cpu_offload": True}, "fp32", False, False),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, None, False, True),
        ({"sharding_strategy": "FULL_SHARD"}, None, True, False),
        (FSDP2Config(activation_checkpointing=True), None, False, False),
    ],
)
def test_prepare_fsdp_module(config: Any, precision: Any, meshed: bool, auto: bool) -> None:
    with warnings.catch_warnings():  # around all ranks: the filters are the process's
        warnings.simplefilter("ignore")
        ranks = run_ranks(WORLD, composed, config, precision, meshed, auto)
    for found, prepared in ranks:
        assert_same_training(found, reference())
        assert [row.name for row in prepared.units] == ["root", "embedding", *BLOCKS, "norm", "head"]
        assert (prepared.micro_batches is not None) == auto and prepared.mesh.ndim == 1 + meshed


def told(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        prepare_fsdp_module(CASE.build(), None, {"limit_all_gathers": True, "use_orig_params": True}, "amp_bf16")
    for config, error in (({"process_group": "node"}, ValueError), ({"shading": 1}, MigrationError), ([], TypeError)):
        with pytest.raises(error):
            prepare_fsdp_module(CASE.build(), None, config)
    return [str(each.message) for each in given]


def test_prepare_fsdp_module_says_what_has_no_effect_and_refuses_the_rest() -> None:
    (found,) = run_ranks(1, told)
    assert [line.split(": ")[1] for line in found] == ["fsdp.limit_all_gathers", "fsdp.use_orig_params"]
