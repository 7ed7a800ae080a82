"""How ranks begin: models that differ between ranks, in structure or in values, and models that are not ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.faults.actions import Action
from tests.faults.cases import PLAIN, Case, Equal, Raises, Setup, Warns, at
from tests.faults.deeds import initialisation as do
from tests.faults.deeds.divergence import Buffered
from tests.faults.deeds.numbers import offload, options
from tests.faults.program import Run
from tests.faults.table.waits import LIMIT
from tests.threads.programs import PROGRAMS, of_blocks

WORLD_OF_3 = Setup(world=3)
_EQUAL_ROWS = (
    r"embedding\.weight",
    "equal random values on ranks 0 and [12]",
    "materialize",
    r"torch\.manual_seed\(seed \+ rank\)",
)
_NEVER_SEEDED = ("initial values", "ranks drew its own", "torch.manual_seed")


def _differs(name: str, does: str, action: Action, *words: str, **more: Any) -> Case:
    """Rank 1 alone does it; all ranks have to say what differs, and between which ranks."""
    wanted = Raises("RanksDisagree", (*words, "rank 1"), within=more.pop("within", 5.0))
    return Case(f"init/{name}", does, wanted, (at(-1, "built", action, rank=1),), **more)


def _apart(name: str, does: str, mesh: Callable[[Run], Any], on: tuple[int, ...]) -> Case:
    """Four ranks, of which those `on` wait for others that train on another mesh. Whether these will come later nobody
    can know: named at the time limit, with where they are."""
    words = ("did not come to", "the time limit of the process group", r"it is rank [23] in .*\(.*\.py:\d+ in ")
    wanted = Raises("PeerFailed", words, on=on, within=LIMIT + 6.0)
    setup = Setup(world=4, group_seconds=LIMIT)
    struck = (at(-1, "built", do.apart(mesh)),)
    return Case(f"init/{name}", does, wanted, struck, setup, program=do.train_for_long, limit=40.0)


def _refused(name: str, does: str, action: Action, error: str, *words: str, event: str = "built", **more: Any) -> Case:
    return Case(f"init/{name}", does, Raises(error, words), (at(-1, event, action),), **more)


CASES: tuple[Case, ...] = (
    Case(
        "init/seed",
        "rank 1 of two builds its model from another seed: no two ranks are alike",
        Warns(_NEVER_SEEDED),
        (at(-1, "built", do.other_seed, rank=1),),
        fast=True,
    ),
    _differs(
        "seed_of_three",
        "rank 1 of three builds its model from another seed",
        do.other_seed,
        "embedding.weight",
        "seed",
        "sync_module_states",
        setup=WORLD_OF_3,
        fast=True,
    ),
    _differs("one_element", "one element of head.bias differs by 1e-6", do.one_element, r"head\.bias"),
    _differs("rows_swapped", "the same values in another order of rows", do.rows_swapped, r"layers\.1\.up\.weight"),
    Case(
        "init/seeds_all_different",
        "each of three ranks has a seed of its own",
        Warns(_NEVER_SEEDED),
        (at(-1, "built", do.other_seed),),
        WORLD_OF_3,
    ),
    Case(
        "init/seeds_bf16",
        "rank 1 of three has another seed, the model is in bfloat16",
        Raises("RanksDisagree", ("embedding.weight", "rank 1")),
        (at(-1, "built", do.other_seed, rank=1), at(-1, "built", lambda run: run.model.bfloat16() and None)),
        WORLD_OF_3,
    ),
    _differs(
        "another_block",
        "rank 1 has a block with a wider linear",
        do.replace_layer(do.wider),
        r"layers\.1",
        "shape|13|14",
        fast=True,
    ),
    _differs("renamed", "a module of rank 1 has another name", do.replace_layer(do.Renamed), r"layers\.1\.(up|lift)"),
    _differs("extra_parameter", "rank 1 has a parameter more", do.extra_parameter, r"layers\.1", "extra"),
    _differs("fewer_layers", "rank 1 has a layer less", do.fewer_layers, r"layers\.2"),
    _differs("another_dtype", "a norm of rank 1 is bfloat16", do.to_bfloat16, r"layers\.1\.norm", "bfloat16"),
    _differs(
        "frozen", "a weight is frozen on rank 1 alone", do.freeze, r"layers\.1\.up\.weight", "requires_grad|frozen"
    ),
    _differs(
        "order_of_parameters", "rank 1 registered its linears in another order", do.reorder_parameters, r"layers\.1"
    ),
    _differs(
        "unit_left_out",
        "rank 1 does not shard layers.1",
        do.units("layers.0", "layers.2"),
        r"layers\.1",
        "fully_shard",
        fast=True,
    ),
    _differs(
        "unit_inside",
        "rank 1 shards a linear of layers.1 by itself",
        do.units("layers.0", "layers.1.up", "layers.1", "layers.2"),
        r"layers\.1\.up",
        "fully_shard",
    ),
    _differs("no_units", "rank 1 makes one unit of the whole model", do.units(), r"layers\.0", "fully_shard"),
    Case(
        "init/other_order_of_wrapping",
        "rank 1 shards its layers in another order",
        Equal(),
        (at(-1, "built", do.units("layers.2", "layers.0", "layers.1"), rank=1),),
    ),
    _differs("mixed_precision", "rank 1 computes in bfloat16", do.shard_as(mp_policy=do.bf16_policy), "bfloat16"),
    _differs(
        "reshard",
        "rank 1 keeps its parameters after forward",
        do.shard_as(reshard_after_forward=lambda run: False),
        "reshard",
    ),
    _differs(
        "columns",
        "rank 1 shards columns",
        do.shard_as(shard_placement_fn=do.shard_columns),
        r"Shard\(?(dim=)?1|placement",
    ),
    _differs(
        "turned_mesh",
        "rank 1's mesh has the ranks in another order",
        do.shard_as(mesh=do.turned_mesh),
        "mesh|rank",
        limit=15.0,
    ),
    Case(
        "init/synchronised",
        "rank 1 has another seed; sync_module_states before fully_shard",
        Equal(),
        (at(-1, "built", do.synchronised),),
        fast=True,
    ),
    Case(
        "init/loaded_everywhere",
        "every rank has another seed, and loads the same checkpoint after fully_shard",
        Equal(),
        (at(-1, "built", do.build_anew), at(-1, "wrapped", do.loaded_everywhere)),
    ),
    Case(
        "init/negative_zero",
        "ranks differ in the sign of zeros alone: other bits",
        Raises("RanksDisagree", (r"layers\.1\.up\.bias", "rank 1")),
        (at(-1, "built", do.negative_zero, rank=1),),
        Setup(model=do.zero_bias),
    ),
    Case(
        "init/buffer",
        "a buffer of rank 1 has other values",
        Raises("RanksDisagree", (r"layers\.1\.scale", "rank 1")),
        (at(-1, "built", do.other_buffer, rank=1),),
        Setup(model=of_blocks(Buffered)),
    ),
    _refused(
        "optimizer_before",
        "the optimizer is built before fully_shard",
        do.optimizer_before,
        "RuntimeError",
        "fully_shard",
        "after|behind|parameters",
        fast=True,
    ),
    _refused(
        "meta",
        "the model is on the meta device at the first forward",
        do.on_meta,
        "RuntimeError",
        "meta",
        r"embedding\.weight|embedding",
        "to_empty|materialize",
    ),
    _refused(
        "forgotten_values",
        "to_empty, and nobody writes values",
        do.to_empty,
        "RuntimeError",
        r"embedding\.weight",
        "to_empty|value",
        event="wrapped",
        fast=True,
    ),
    *(
        Case(
            f"init/drawn_{name}",
            does,
            Warns(_EQUAL_ROWS),
            (at(-1, "wrapped", do.drawn(seed, fill)),),
            setup,
            fast=name == "shards",
        )
        for name, does, seed, fill, setup in (
            ("shards", "all ranks fill their shards by `nn.init`, with one seed", 0, nn.init.normal_, Setup()),
            (
                "offloaded",
                "the same with shards in host memory",
                0,
                nn.init.uniform_,
                Setup(options=options(offload_policy=offload)),
            ),
            ("local", "each rank fills `p.to_local()`, with one seed", 0, lambda p: p.to_local().normal_(), Setup()),
            (
                "by_machine",
                "ranks of four have the seeds 0, 1, 0, 1, as by their number on two machines",
                lambda run: run.rank % 2,
                nn.init.normal_,
                Setup(world=4),
            ),
        )
    ),
    Case(
        "init/assign_behind_optimizer",
        "load_state_dict(assign=True) of equal values, after an optimizer",
        Equal(),
        (at(-1, "ready", do.optimizer_then_assign),),
        also=Raises("RuntimeError", ("parameter", "optimizer|AdamW")),
    ),
    _refused(
        "optimizer_over_full",
        "the optimizer is built over full parameters",
        do.optimizer_over_full,
        "RuntimeError",
        "AdamW|optimizer",
        "full|shard",
        event="wrapped",
        fast=True,
    ),
    _refused(
        "parameter_replaced",
        "a plain parameter replaces a sharded one",
        do.parameter_replaced,
        "RuntimeError",
        r"layers\.1\.up\.weight|up\.weight",
        "shard|replaced|assign",
        event="ready",
    ),
    _refused(
        "not_contiguous", "a parameter that is not contiguous", do.not_contiguous, "NotImplementedError", "contiguous"
    ),
    _refused(
        "tied_across_units",
        "a parameter is tied from one unit to another",
        do.tied_across_units,
        "ValueError",
        r"layers\.0|up\.weight",
        "unit|group|once",
        setup=Setup(),
    ),
    Case(
        "init/tied_behind",
        "two parameters of the root are tied after fully_shard",
        PLAIN,
        (at(-1, "wrapped", do.tied_behind),),
        also=Raises("RuntimeError", (r"head\.weight", "tie|before fully_shard|replaced|assign")),
    ),
    _refused("scalar", "a parameter without dimensions", do.scalar, "ValueError", "gain", "1D|1-D|dimension"),
    _refused(
        "root_first", "the root is sharded before its parts", do.root_first, "RuntimeError", "inner|before|parent"
    ),
    _refused(
        "twice", "fully_shard is called twice for one module", do.twice, "AssertionError", "already|twice|applied"
    ),
    _refused(
        "module_list", "fully_shard is called for a ModuleList", do.module_list, "ValueError", "ModuleList", "forward"
    ),
    _refused("three_axes", "a mesh with three axes", do.shard_as(mesh=do.three_axes), "ValueError", "mesh", "3"),
    _refused(
        "bad_reshard",
        "reshard_after_forward=3 on two ranks",
        do.shard_as(reshard_after_forward=lambda run: 3),
        "ValueError",
        "reshard_after_forward",
        "3",
    ),
    _refused("list_as_root", "a list of modules as the root", do.list_as_root, "RuntimeError", "list|root"),
    Case(
        "init/rank_outside_of_mesh",
        "rank 1 is not in the mesh that it is given",
        Raises("ValueError", ("mesh", "rank 1"), on=(1,)),
        (at(-1, "built", do.shard_as(mesh=do.mesh_of_another_rank)),),
        fast=True,
    ),
    _apart(
        "another_axis", "ranks 2 and 3 give another axis of the mesh than ranks 0 and 1", do.another_axis, on=(0, 1)
    ),
    _apart(
        "half_of_the_ranks",
        "ranks 2 and 3 give a mesh of themselves, ranks 0 and 1 one of all",
        do.half_of_all,
        on=(0, 1),
    ),
    _apart("one_on_another_axis", "rank 3 alone gives another axis of the mesh", do.alone_on_another_axis, on=(1, 3)),
    Case(
        "init/uneven_columns",
        "Shard(1) of columns that do not divide",
        PLAIN,
        setup=Setup(options=do.uneven_columns),
        also=Raises("NotImplementedError", ("even",)),
    ),
    Case(
        "init/two_dtypes",
        "parameters of two dtypes in one unit, trained beside plain training",
        PLAIN,
        setup=Setup(model=PROGRAMS["two_dtypes_in_a_unit"].model),
        also=Raises("AssertionError", ("dtype",)),
    ),
)
