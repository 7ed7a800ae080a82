"""What every rank has whole: parameters that no unit has, and replicas; and what loads and initialisers write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults.actions import Action
from tests.faults.cases import IN_STEP, PLAIN, Case, Equal, Outcome, Raises, Setup, Warns, at
from tests.faults.deeds import outside as do

TO_DO = r"; [a-z]+"
# Of what is no part of the root, the optimizer knows no names.
WEIGHT_OUTSIDE, BIAS_OUTSIDE = r"parameter \d+ beside .*\(11, 6\)", r"parameter \d+ beside .*\(11,\)"
PLAIN_MODEL = Setup(steps=4, averaged=True)
IGNORED = Setup(steps=4, averaged=True, ignored=("head.weight", "head.bias"))
HEAD = Setup(steps=4, averaged=True, model=do.HeadOutside, units=do.HEAD_UNITS, root="trunk")
TABLE = Setup(steps=4, averaged=True, model=do.WithTable, ignored=("table",))
HSDP = Setup(steps=4, world=4, options=do.hsdp)
WHOLE = Setup(steps=4, options=do.whole)
REPLICATED = Setup(steps=4, how="replicate")


def _differs(name: str, does: str, action: Action, *words: str, **more: Any) -> Case:
    """All ranks are told which parameter, which rank, and what to do."""
    ranks = more.pop("ranks", (1,))
    who = r"rank 1" if ranks == (1,) else r"ranks? (0 and 1|2 and 3|[0-3])"
    wanted = Raises("RanksDisagree", (who, *words, TO_DO))
    when = more.pop("when", IN_STEP)
    struck = (*more.pop("before", ()), *(at(*when, action, rank=rank) for rank in ranks))
    return Case(f"outside/{name}", does, wanted, struck, more.pop("setup"), limit=20.0, **more)


def _all(name: str, does: str, *struck: tuple[int, str, Action], setup: Setup, **more: Any) -> Case:
    """All ranks do it, and so does the plain run."""
    expected = more.pop("expected", PLAIN)
    return Case(f"outside/{name}", does, expected, tuple(at(*one) for one in struck), setup, limit=20.0, **more)


ALONE = (
    _differs(
        "appended",
        "a layer that is appended after fully_shard has other values on rank 1",
        do.moved("layers.3.up.weight"),
        r"layers\.3\.up\.weight",
        when=(-1, "ready"),
        before=(at(-1, "wrapped", do.append_same),),
        setup=PLAIN_MODEL,
        fast=True,
    ),
    Case(
        "outside/appended_by_rank",
        "a layer that is appended after fully_shard is seeded by the rank",
        Raises("RanksDisagree", ("rank 1", r"layers\.3", TO_DO)),
        (at(-1, "wrapped", do.append_by_rank),),
        PLAIN_MODEL,
        limit=20.0,
    ),
    _differs(
        "appended_on_one",
        "rank 1 alone appends a layer after fully_shard",
        do.append_same,
        r"layers\.3",
        when=(-1, "wrapped"),
        setup=replace(PLAIN_MODEL, averaged=False),
    ),
    _all(
        "appended_by_all",
        "all ranks append the same layer after fully_shard, and average its gradients",
        (-1, "wrapped", do.append_same),
        setup=PLAIN_MODEL,
    ),
    Case(
        "outside/ignored",
        "an ignored parameter has other values on rank 1 from the beginning",
        Warns(("ignored_params", r"head[.]weight", "rank 1")),
        (at(-1, "built", do.moved("head.weight"), rank=1),),
        IGNORED,
        limit=20.0,
    ),
    _differs(
        "ignored_later",
        "rank 1 alone writes an ignored parameter between two steps",
        do.moved("head.weight"),
        r"head\.weight",
        setup=IGNORED,
    ),
    Case(
        "outside/ignored_frozen",
        "an ignored parameter that is read and not trained has other values on rank 1 from the beginning",
        Warns(("ignored_params", r"table", "rank 1")),
        (at(-1, "built", do.moved("table"), rank=1),),
        TABLE,
        limit=20.0,
    ),
    _differs(
        "ignored_loaded",
        "rank 1 alone loads other values into an ignored head between two steps",
        do.load_head(9),
        r"head\.(weight|bias)",
        setup=IGNORED,
    ),
    _all("ignored_by_all", "all ranks ignore the head, and average its gradients", setup=IGNORED, fast=True),
    _differs(
        "head",
        "a head outside of what is sharded has other values on rank 1",
        do.moved("head.weight"),
        WEIGHT_OUTSIDE,
        when=(-1, "built"),
        setup=HEAD,
    ),
    _differs(
        "head_named",
        "a head outside of what is sharded has other values on rank 1, and the optimizer knows its name",
        do.moved("head.weight"),
        r"head\.weight",
        when=(-1, "built"),
        setup=replace(HEAD, optimizer=do.named),
    ),
    _differs(
        "head_of_three",
        "a head outside of what is sharded has other values on rank 1 of three",
        do.moved("head.bias"),
        BIAS_OUTSIDE,
        when=(-1, "built"),
        setup=replace(HEAD, world=3),
    ),
    _differs(
        "head_loaded",
        "rank 1 alone loads other values into a head outside of what is sharded",
        do.load_head(9),
        WEIGHT_OUTSIDE,
        setup=HEAD,
    ),
    _differs(
        "head_frozen",
        "rank 1 alone freezes a head outside of what is sharded",
        do.flip("head.weight"),
        WEIGHT_OUTSIDE,
        when=(-1, "ready"),
        setup=replace(HEAD, averaged=False),
    ),
    _all("head_of_all", "all ranks have a head outside of what is sharded, and average its gradients", setup=HEAD),
    _all(
        "head_loaded_by_all",
        "all ranks load the same values into a head outside of what is sharded",
        (1, "step", do.load_head(9)),
        setup=HEAD,
    ),
    _all(
        "head_synchronised",
        "rank 1 has another seed, and sync_module_states brings head and trunk together",
        (-1, "built", do.synchronised),
        setup=HEAD,
        expected=Equal(),
    ),
)

REPLICAS = (
    _differs(
        "replica_seed",
        "one replica of a 2 x 2 mesh builds its model from another seed",
        do.seed_of_rank,
        r"embedding\.weight",
        when=(-1, "built"),
        ranks=(2, 3),
        setup=HSDP,
    ),
    _all(
        "replica_seeded_after",
        "each rank of a 2 x 2 mesh draws its shards after fully_shard, by a seed of its own",
        (-1, "wrapped", do.seeded_after),
        setup=HSDP,
        expected=Raises("RanksDisagree", (r"rank", r"embedding\.weight|layers", TO_DO)),
    ),
    _all(
        "whole_seeded_after",
        "each rank of a mesh that only replicates draws its values after fully_shard, by a seed of its own",
        (-1, "wrapped", do.seeded_after),
        setup=WHOLE,
        expected=Raises("RanksDisagree", ("rank 1", r"embedding\.weight|layers", TO_DO)),
    ),
    _all(
        "replicate_seeded_after",
        "each rank draws its values after replicate, by a seed of its own",
        (-1, "wrapped", do.seeded_after),
        setup=REPLICATED,
        expected=Raises("RanksDisagree", ("rank 1", r"embedding\.weight|layers", TO_DO)),
        fast=True,
    ),
    _differs(
        "replicate_one_element",
        "one parameter of rank 1 has other values after replicate",
        do.moved("layers.1.up.bias"),
        r"layers\.1\.up\.bias",
        when=(-1, "ready"),
        setup=REPLICATED,
    ),
    _differs(
        "replica_written",
        "one rank of a 2 x 2 mesh writes its shard between two steps",
        do.moved("layers.1.up.weight"),
        r"layers\.1",
        setup=HSDP,
    ),
    _differs(
        "replicate_written",
        "rank 1 alone writes a replicated parameter between two steps",
        do.moved("layers.1.up.weight"),
        r"layers\.1",
        setup=REPLICATED,
    ),
    Case(
        "outside/replica_load",
        "the replicas of a 2 x 2 mesh load different state dicts before the first step",
        Raises("RanksDisagree", (r"rank", r"embedding\.weight|layers", TO_DO)),
        tuple(at(-1, "ready", do.load(5 if rank < 2 else 6), rank=rank) for rank in range(4)),
        HSDP,
        limit=20.0,
    ),
    Case(
        "outside/replica_load_later",
        "the replicas of a 2 x 2 mesh load different state dicts between two steps",
        Raises("RanksDisagree", (r"rank", r"embedding\.weight|layers", TO_DO)),
        tuple(at(1, "step", do.load(5 if rank < 2 else 6), rank=rank) for rank in range(4)),
        HSDP,
        limit=20.0,
    ),
    Case(
        "outside/replicate_load",
        "each rank loads another state dict after replicate",
        Raises("RanksDisagree", ("rank 1", r"embedding\.weight|layers", TO_DO)),
        tuple(at(-1, "ready", do.load(5 + rank), rank=rank) for rank in range(2)),
        REPLICATED,
        limit=20.0,
    ),
    Case(
        "outside/replicate_load_later",
        "each rank loads another state dict between two steps, nothing is sharded",
        Raises("RanksDisagree", ("rank 1", r"embedding\.weight|layers", TO_DO)),
        tuple(at(1, "step", do.load(5 + rank), rank=rank) for rank in range(2)),
        REPLICATED,
        limit=20.0,
    ),
    _all(
        "replicate_load_by_all",
        "all ranks load the same state dict between two steps, nothing is sharded",
        (1, "step", do.load(5)),
        setup=REPLICATED,
    ),
    _all(
        "replica_load_by_all", "all ranks of a 2 x 2 mesh load the same state dict", (1, "step", do.load(5)), setup=HSDP
    ),
    _differs(
        "load_on_one",
        "rank 1 alone loads a state dict between two steps",
        do.load(5),
        "load_state_dict|loaded|written",
        setup=Setup(steps=4),
    ),
)


def _from_meta(name: str, does: str, action: Action, *words: str, setup: Setup | None = None) -> Case:
    expected: Outcome = Raises("RanksDisagree", ("rank", *words, "init", TO_DO)) if words else PLAIN
    struck = (at(-1, "built", do.on_meta), at(-1, "wrapped", action))
    return Case(f"outside/{name}", does, expected, struck, setup or Setup(steps=4), limit=20.0)


MATERIALIZED = (
    _from_meta(
        "init_by_rank", "materialize's initialiser reads the rank", do.materialize_by_rank, r"embedding\.weight|layers"
    ),
    _from_meta(
        "init_own_seed",
        "materialize's initialiser sets a seed of its rank",
        do.materialize_own_seed,
        r"embedding\.weight|layers",
    ),
    _from_meta(
        "init_one_module",
        "materialize's initialiser treats one module otherwise on rank 1",
        do.materialize_one_module,
        r"layers\.1\.up\.(weight|bias)",
    ),
    _from_meta(
        "init_counts",
        "materialize's initialiser counts its calls, one more on rank 1",
        do.materialize_counting,
        r"embedding\.weight|layers",
    ),
    _from_meta(
        "init_replicated",
        "materialize's initialiser reads the rank, nothing is sharded",
        do.materialize_by_rank,
        r"embedding\.weight|layers",
        setup=REPLICATED,
    ),
    _from_meta(
        "init_on_a_mesh",
        "materialize's initialiser reads the rank of a 2 x 2 mesh",
        do.materialize_by_rank,
        r"embedding\.weight|layers",
        setup=HSDP,
    ),
    _from_meta("init_of_all", "materialize's initialiser is the same on all ranks", do.materialize),
)

CASES: tuple[Case, ...] = (*ALONE, *REPLICAS, *MATERIALIZED)
