"""Axes beside data parallelism of other libraries' configurations, and Accelerate's own class with its defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.migrate import ConfigError
from fullshard.migrate.parallelism import Parallelism
from fullshard.migrate.parallelism_config import SIZES, is_parallelism_config, of_accelerate
from fullshard.migrate.settings.conversion import convert
from tests.harness import installed


def titan(**keys: Any) -> tuple[dict[str, Any], dict[str, str]]:
    found = convert({"parallelism": keys, "model": {"name": "llama3"}}, "t.toml", ".toml", name="torchtitan")
    new = {key.partition(".")[2]: value for key, value in found.settings.items() if key.startswith("parallelism.")}
    return new, {each.key.rpartition(".")[2]: each.verdict for each in found.findings}


@pytest.mark.parametrize(
    ("keys", "settings", "verdicts"),
    [
        ({"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": "equivalent"}),
        ({"tensor_parallel_degree": 1}, {}, {"tensor_parallel_degree": "exact"}),
        (
            {"tensor_parallel_degree": 2, "disable_loss_parallel": False},
            {"tensor_parallel_degree": 2, "enable_loss_parallel": True},
            {"disable_loss_parallel": "equivalent"},
        ),
        (
            {"tensor_parallel_degree": 2, "disable_loss_parallel": True, "enable_sequence_parallel": False},
            {"tensor_parallel_degree": 2, "enable_sequence_parallel": False},
            {"disable_loss_parallel": "exact", "enable_sequence_parallel": "exact"},
        ),
        ({"disable_loss_parallel": False}, {}, {"disable_loss_parallel": "dropped"}),
        (
            {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True},
            {"tensor_parallel_degree": 2},
            {"enable_async_tensor_parallel": "unsupported"},
        ),
        (
            {"context_parallel_degree": 2},
            {"context_parallel_degree": 2},
            {"context_parallel_degree": "equivalent"},
        ),
        (
            {"pipeline_parallel_degree": 2},
            {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1},
            {"pipeline_parallel_degree": "equivalent", "pipeline_parallel_microbatch_size": "exact"},
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "_PipelineScheduleRuntime"},
            {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1},
            {"pipeline_parallel_schedule": "unsupported"},
        ),
        (
            {"pipeline_parallel_schedule": "GPipe", "pipeline_parallel_microbatch_size": 4},
            {},
            {"pipeline_parallel_schedule": "dropped", "pipeline_parallel_microbatch_size": "dropped"},
        ),
        (
            {"pipeline_parallel_degree": 2, "module_fqns_per_model_part": [["tok_embeddings"], ["norm", "output"]]},
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_microbatch_size": 1,
                "module_fqns_per_model_part": [["tok_embeddings"], ["norm", "output"]],
            },
            {"module_fqns_per_model_part": "exact"},
        ),
        (
            {"expert_parallel_degree": 4, "expert_tensor_parallel_degree": 2, "tensor_parallel_degree": 2},
            {"expert_parallel_degree": 4, "expert_tensor_parallel_degree": 2, "tensor_parallel_degree": 2},
            {"expert_parallel_degree": "equivalent", "expert_tensor_parallel_degree": "equivalent"},
        ),
    ],
    ids=lambda value: "-".join(value),
)
def test_torchtitan_s_names(keys: dict[str, Any], settings: dict[str, Any], verdicts: dict[str, str]) -> None:
    new, found = titan(**keys)
    assert new == settings
    assert verdicts.items() <= found.items()


def test_accelerate_s_keys() -> None:
    keys = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2, "cp_size": 1, "sp_size": 1}
    table = {f"parallelism_config_{name}": value for name, value in keys.items()}
    found = convert({"distributed_type": "FSDP", "parallelism_config": table}, "a.yaml", ".yaml")
    plan = found.config.parallel
    assert plan == Parallelism(2, data_parallel_replicate_degree=2, data_parallel_shard_degree=4)


def made(**sizes: Any) -> Any:
    installed.needs("accelerate")
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(**sizes)


@pytest.mark.filterwarnings("ignore")  # of accelerate, on import and about its handlers
def test_accelerate_s_own_class() -> None:
    assert of_accelerate(made(dp_shard_size=2, tp_size=2)) == Parallelism(2, data_parallel_shard_degree=2)
    whole = of_accelerate(made(dp_replicate_size=2, dp_shard_size=2, cp_size=2))
    assert whole.on(8).mesh == (("dp_replicate", 2), ("dp_shard", 2), ("cp", 2))
    # Its defaults are ones, which no launch of several ranks fits; its own FSDP2 refuses them too.
    default = of_accelerate(made())
    assert is_parallelism_config(made()) and default.on(1).world == 1
    with pytest.raises(ConfigError, match="are 1 of 4 ranks; nearest legal plan: data_parallel_shard_degree = 4"):
        default.on(4)


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_s_sequences_are_those_of_cp() -> None:
    heads = of_accelerate(made(sp_size=2, dp_shard_size=2))
    assert heads == Parallelism(
        context_parallel_degree=2, context_parallel_variant="ulysses", data_parallel_shard_degree=2
    )
    assert heads.on(4).shards == 4
    with pytest.raises(ConfigError, match=r"parallelism.sp_size = 2: expected cp_size = 1 beside it, found 4"):
        of_accelerate(SimpleNamespace(**dict.fromkeys(SIZES, 1) | {"cp_size": 4, "sp_size": 2}))


def test_torchtitan_s_own_class_fills_a_declaration() -> None:
    """Its class, whatever version is installed: the degrees and what goes with them, as they are in it."""
    configs = pytest.importorskip("torchtitan.config.configs")
    from dataclasses import asdict

    given = configs.ParallelismConfig(
        data_parallel_shard_degree=2,
        tensor_parallel_degree=2,
        context_parallel_degree=2,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        expert_parallel_degree=4,
    )
    written = {name: value for name, value in asdict(given).items() if value is not None}
    found = convert({"parallelism": written}, "t.toml", ".toml", name="torchtitan")
    plan = found.config.parallel
    assert plan == Parallelism(
        tensor_parallel_degree=2,
        context_parallel_degree=2,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_microbatch_size=1,
        expert_parallel_degree=4,
        data_parallel_shard_degree=2,
    )
    assert plan.on(16).mesh == (("pp", 2), ("dp_shard", 2), ("cp", 2), ("tp", 2))
    assert not [each for each in found.findings if each.verdict in ("lossy", "unsupported")]


@pytest.mark.filterwarnings("ignore")
def test_what_accelerate_has_and_a_declaration_has_not() -> None:
    installed.needs("accelerate")
    from accelerate.utils import TorchTensorParallelConfig

    handler = TorchTensorParallelConfig(enable_async_tp=True)
    with pytest.raises(ConfigError, match="enable_async_tensor_parallel = true: not built"):
        of_accelerate(made(tp_size=2, tp_handler=handler))


@pytest.mark.filterwarnings("ignore")
def test_the_sizes_are_those_of_the_class() -> None:
    """A new axis of Accelerate's shows here."""
    sizes = {name for name in vars(made()) if name.endswith("_size")}
    assert sizes == {*SIZES, "sp_size"}


def test_other_objects_are_none() -> None:
    assert not is_parallelism_config({"tp_size": 2}) and not is_parallelism_config(SimpleNamespace(tp_size=2))
