"""The trainer's model as the stages of a pipeline: which of them this process has, and a step of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from fullshard.migrate.pipeline import LossFn, Split, check_reshard, make_pipeline, split_model
from fullshard.migrate.pipeline import Pipeline as Pipeline
from fullshard.migrate.pipeline_stages import keep_stages
from fullshard.migrate.relations import Relations
from fullshard.migrate.tree import Tree
from fullshard.train.config import Config
from fullshard.train.process import World


class Stages:
    """The stages of this process, after `cut` divided the model. `numel`: elements of the whole model."""

    split: Split
    modules: Mapping[int, nn.Module]
    numel: int
    pipeline: Pipeline

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world

    def cut(self, model: nn.Module) -> Mapping[int, nn.Module]:
        """Keep the stages of this process in `model`; returns them by number, for sharding."""
        world, plan = self.world, self.config.sharding.parallel
        assert world.axes is not None and world.whole is not None
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.split = split_model(Tree(model), plan, world.axes, world.whole.get_local_rank("pp"))
        check_reshard(self.split, {"the model": self.config.reshards})
        own = {number: self.split.parts[number] for number in self.split.own}
        self.modules = keep_stages(model, self.split.chain, own)
        return self.modules

    @property
    def together(self) -> nn.Module:
        """All stages of this process as one module."""
        stages = list(self.modules.values())
        return stages[0] if len(stages) == 1 else nn.ModuleList(stages)

    def begin(self, loss_fn: LossFn) -> None:
        """Make the steps of all stages, after they were sharded. `loss_fn` gives sums, which are added up."""
        world, keys = self.world, self.config.sharding.parallel
        assert world.axes is not None and world.whole is not None
        plan = replace(keys, pipeline_parallel_microbatch_size=self.config.micro_batch(world.size))
        sequence = world.axes.tp > 1 and keys.enable_sequence_parallel is not False
        relations = Relations(None, world.axes, world.whole, sequence=sequence)
        context = loss_parallel if keys.enable_loss_parallel else nullcontext
        self.pipeline = make_pipeline(
            plan, self.split, self.modules, world.axes, world.whole, relations, loss_fn, context, mean=False
        )
