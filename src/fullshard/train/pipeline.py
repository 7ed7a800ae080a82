"""The trainer's model as the stages of a pipeline: which of them this process has, and a step of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fullshard.migrate.pipeline import LossFn, Split, check_reshard, make_pipeline, split_model
from fullshard.migrate.pipeline import Pipeline as Pipeline
from fullshard.migrate.pipeline_stages import keep_stages
from fullshard.migrate.relations import Relations
from fullshard.migrate.sequences import parts_of_step, running
from fullshard.migrate.stage_ties import SharedParameters
from fullshard.migrate.tree import Tree
from fullshard.train.config import Config
from fullshard.train.process import World


class Stages:
    """The stages of this process, after `cut` divided the model. `numel`: elements of the whole model."""

    split: Split
    shared: SharedParameters
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
        tree = Tree(model)
        self.split = split_model(tree, plan, world.axes, world.whole.get_local_rank("pp"))
        self.shared = SharedParameters(tree, self.split.ties, self.split.own)
        check_reshard(self.split, {"the model": self.config.reshards})
        own = {number: self.split.parts[number] for number in self.split.own}
        self.modules = keep_stages(model, self.split.chain, own)
        self.shared.place(model, self.modules)
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
        relations = Relations(None, world.axes, world.whole, sequence=sequence, sequences=world.sequences)
        context = running(world.sequences, head=keys.enable_loss_parallel)
        first = next(iter(self.modules.values()))
        parts = None if world.sequences is None else parts_of_step(first, world.sequences)
        self.shared.begin(self.modules, world.whole.get_group("pp"))
        given = plan, self.split, self.modules, world.axes, world.whole, relations, loss_fn, context
        self.pipeline = make_pipeline(*given, mean=False, parts=parts, shared=self.shared)
