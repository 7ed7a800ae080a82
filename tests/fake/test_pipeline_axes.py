"""A pipeline beside other axes on meshes of any size: stages, units, placements and messages of a rank, no values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fullshard import Parallelism, prepare_fully_shard
from fullshard.engine.unit import module_units
from fullshard.migrate import ConfigError
from fullshard.migrate.axes import Axes
from fullshard.migrate.pipeline import split_model
from fullshard.migrate.tree import Tree
from fullshard.train.config import load_config
from fullshard.train.model import sharded_model
from fullshard.train.pipeline import Stages
from fullshard.train.process import world_of
from tests.harness import installed
from tests.harness.axes import TOKENS, batch, hugging_face, llama
from tests.harness.fake import fake_world
from tests.harness.pipelines import loss_fn

TWO = {"pipeline_parallel_degree": 2}
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_pipeline.toml"


def test_four_axes_on_sixteen_ranks() -> None:
    """dp_replicate x dp_shard x tp x pp, each of two: the mesh, the units of the first rank, and what it sends."""
    plan = Parallelism(2, data_parallel_replicate_degree=2, **TWO)
    with fake_world(16):
        model = llama(layers=4).to_empty(device="meta")
        prepared = prepare_fully_shard(model, parallelism=plan, init=ones, loss_fn=loss_fn, show=False)
        assert prepared.axes.mesh == (("pp", 2), ("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))
        assert prepared.whole.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
        assert prepared.mesh.mesh.tolist() == [[0, 2], [4, 6]] and prepared.share == (0, 4)
        pipeline = prepared.pipeline
        assert pipeline is not None and [*pipeline.stages] == [0] and pipeline.stages[0] is prepared.model
        assert torch.distributed.get_process_group_ranks(pipeline.group) == [0, 8]
        assert [row.name for row in prepared.units] == ["root", "embedding", "layers.0", "layers.1"]
        weight = prepared.model.get_parameter("layers.1.attention.wo.weight")
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert weight.to_local().shape == (8, 8)
        assert not [name for name, _ in prepared.model.named_parameters() if name.startswith("layers.2")]
        assert len(module_units(prepared.model)) == 4
        # The stage on its own: it gives its part of the sequence to the next one.
        out = prepared.model(batch(0, 0)[:, :-1])
        assert out.shape == (2, TOKENS // 2, 16)
        with CommDebugMode() as sent:
            out.sum().backward()
        counts = {str(call).partition(".")[2]: count for call, count in sent.get_comm_counts().items()}
        # Over tp as without a pipeline: the gradients of two parts of each block and of the embedding, and four norms.
        over_tp = {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 4, "all_reduce": 4}
        # Of each unit over the shards and over the copies, and one message in which ranks compare what they do.
        assert counts == over_tp | {"alltoall_base_": 3, "allreduce_": 3 + 1}


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)
    if hasattr(module, "init_rope"):
        module.init_rope()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_the_example_on_each_of_its_ranks(rank: int, schedule: str) -> None:
    """Each has the stages of its place, and stages have the names of the whole model."""
    config = load_config(EXAMPLE, [f"parallelism.pipeline_parallel_schedule={schedule}"])
    config.check_world(4)
    assert config.axes(4).mesh == (("pp", 2), ("dp_shard", 2)) and config.micro_batch(4) == 2
    with fake_world(4, rank=rank):
        world = world_of(config, rank, 4, torch.device("cpu"), None)
        assert (world.share, world.shares) == (rank % 2, 2)
        stages = Stages(config, world)
        model = sharded_model(config, 260, world.mesh, world.device, world.whole, cut=stages.cut)
        v = schedule != "1F1B"
        assert [*stages.modules] == ([rank // 2, 3 - rank // 2] if v else [rank // 2])
        expected = [n for n, _ in model.named_parameters()]
        found = [n for stage in stages.modules.values() for n, _ in stage.named_parameters()]
        assert sorted(found) == sorted(expected) and ("embedding.weight" in found) == (rank < 2)
        assert stages.numel == 2 * 260 * 64 + 4 * (64 * 64 * 3 + 3 * 64 * config.ffn_dim + 128) + 64


def test_the_trainer_s_model_with_divided_layers() -> None:
    """A pipeline of two beside tensor parallelism, on the last of eight ranks; that of bytes does not divide."""
    config = load_config(EXAMPLE, ["parallelism.tensor_parallel_degree=2"])
    config.check_world(8)
    with fake_world(8, rank=7):
        world = world_of(config, 7, 8, torch.device("cpu"), None)
        stages = Stages(config, world)
        with pytest.raises(ConfigError, match="must divide the vocabulary, 259"):
            sharded_model(config, 259, world.mesh, world.device, world.whole, cut=stages.cut)
        model = sharded_model(config, 260, world.mesh, world.device, world.whole, cut=stages.cut)
        output = model.get_parameter("output.weight")
        assert isinstance(output, DTensor) and output.device_mesh.mesh_dim_names == ("dp_shard", "tp")
        assert [*stages.modules] == [1] and world.share == 1


# ---- splits ----------------------------------------------------------------------------------------------------------


def split(model: nn.Module, degree: int = 2, **keys: Any) -> list[tuple[str, ...]]:
    plan = Parallelism(pipeline_parallel_degree=degree, **keys)
    return list(split_model(Tree(model), plan, Axes(pp=degree), 0).parts)


def test_balanced_splits() -> None:
    """By products: a table costs none, a head as many as its size, so it has fewer layers beside it."""
    first, second = split(llama(layers=4))
    assert first == ("embedding", "layers.0", "layers.1") and second == ("layers.2", "layers.3", "norm", "output")
    # A head of two layers' size.
    sizes = [len([n for n in part if n.startswith("layers")]) for part in split(llama(layers=8, vocab=256))]
    assert sizes == [5, 3]
    assert split(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == [("0", "1"), ("2",)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3", "Mixtral", "GPT2"])
def test_the_chain_of_hugging_face_s_models(kind: str) -> None:
    """By `base_model_pp_plan`, or around the blocks."""
    installed.needs("transformers")
    sizes: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1} if kind == "Mixtral" else {}
    import transformers

    if kind == "GPT2":
        small = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=4, vocab_size=32, tie_word_embeddings=False)
        model: nn.Module = transformers.GPT2LMHeadModel(small)
    elif kind == "Gemma3":
        config = transformers.Gemma3TextConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.Gemma3ForCausalLM(config)
    else:
        model = hugging_face(kind, num_hidden_layers=4, **sizes)
    parts = split(model)
    names = [name for part in parts for name in part]
    ends = ("transformer.wte", "lm_head") if kind == "GPT2" else ("model.embed_tokens", "lm_head")
    assert (names[0], names[-1]) == ends and len([n for n in names if n.split(".")[-1].isdigit()]) == 4


class Scaled(nn.Module):
    """With a parameter of its own beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def tied_linear(count: int = 3) -> nn.Module:
    """The third layer has the weight of the first one."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "degree", "keys", "said"),
    [
        (
            partial(llama, tied=True, layers=4),
            2,
            {"pipeline_parallel_schedule": "ZBVZeroBubble"},
            "found embedding.weight in the stages 0 and 3 on one rank, .*nearest valid: .1F1B., or untie",
        ),
        (
            partial(tied_linear, 4),
            2,
            {"pipeline_parallel_schedule": "LoopedBFS"},
            "ZBV|found 0.weight = 2.weight in the stages 0 and 2 on one rank",
        ),
        (Scaled, 2, {}, "expected each parameter of Scaled in a module of a stage, found scale in none"),
        (partial(llama, layers=3), 4, {}, "a layer for each of the 4 stages, found 3 .*pipeline_parallel_degree = 3"),
        (llama, 2, {"module_fqns_per_model_part": [["embedding"], ["layer.0"]]}, "found 'layer.0'; the nearest is"),
        (llama, 2, {"module_fqns_per_model_part": [["embedding"], ["layers.0"]]}, "found layers.1.* in none"),
        (
            llama,
            2,
            {"module_fqns_per_model_part": [["embedding", "layers"], ["layers.0", "norm", "output"]]},
            "expected modules beside each other, found layers.0 inside of layers",
        ),
    ],
)
def test_models_that_cannot_be_split(make: Any, degree: int, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        split(make(), degree, **keys)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (llama, {"micro_batches": 2}, "micro_batches.size = 2: a pipeline has .*pipeline_parallel_microbatch_size = 2"),
        (
            partial(hugging_face, "Llama"),
            {"wrap": {"by": "plan", "plan": ["model"]}},
            "wrap: expected modules .* found model, .* around model.embed_tokens to model.norm",
        ),
        (
            partial(hugging_face, "Llama", tie_word_embeddings=True),
            {"wrap": {"ties": "one_unit"}},
            "wrap: expected the parameter model.embed_tokens.weight = lm_head.weight in the stages 0 and 1 in the unit",
        ),
        (
            partial(hugging_face, "Mixtral", num_local_experts=2, num_experts_per_tok=1, output_router_logits=True),
            {},
            "output_router_logits = True of MixtralForCausalLM: expected no balance loss of its own in a pipeline",
        ),
    ],
)
def test_settings_that_a_pipeline_does_not_have(make: Any, config: dict[str, Any], said: str) -> None:
    with fake_world(4), pytest.raises(ConfigError, match=said):
        prepare_fully_shard(make(), None, config, parallelism=TWO, loss_fn=loss_fn, show=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["model.tie_embeddings=true", "parallelism.pipeline_parallel_schedule=ZBVZeroBubble"],
            "model.tie_embeddings = true: the first process of ZBVZeroBubble has .* nearest valid: false",
        ),
        (["training.micro_batch=auto"], 'training.micro_batch = "auto": is not there for a pipeline; nearest valid: 4'),
        (["training.accumulate=reduce"], "training.accumulate"),
        (["training.replay_every=2"], "training.replay_every"),
        (["training.check_every=2"], "training.check_every"),
        (["parallelism.pipeline_parallel_microbatch_size=2"], "has no effect in the trainer: set training.micro_batch"),
        (["training.micro_batch=8"], "training.micro_batch = 8: makes 1 of the 8 .* needs at least .*valid: 4"),
        (["training.micro_batch=3"], "training.micro_batch = 3: must divide the 8 sequences"),
        (["training.global_batch=2", "training.micro_batch=1"], "global_batch = 2: must|training.global_batch = 2"),
        (["parallelism.pipeline_parallel_degree=3"], "3 .*of 4 ranks|are 3 of 4"),
        (["model.layers=1"], "expected a layer for each stage, found 1"),
    ],
)
def test_settings_of_the_trainer(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(EXAMPLE, settings).check_world(4)
