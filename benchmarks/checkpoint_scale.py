"""What a save and a load cost at thousands of ranks, counted on the library's own pure functions and simulated ranks.

    python -m benchmarks.checkpoint_scale           4,096 and 10,000 ranks, four states; a minute on one core
    python -m benchmarks.checkpoint_scale --layers 4 --ranks 64

    llama-70b      723 parameters, AdamW with its two moments and a counter for each, sharded by rows over all ranks
    hsdp           the same, over replicas of 64 ranks
    moe-235b       94 layers of 128 experts in two tensors, over a mesh (16 of experts, the rest of rows) of their own
    moe-modules    the same with a module for each expert: 36,096 parameters of experts

Nothing is written and no rank runs: rank 0 declares what it holds, plans, and makes the manifest; the messages of all
ranks are folded along the tree as ranks fold them. `plan` are CPU seconds of rank 0 from its state to the first byte,
`commit` those from the last byte to the manifest, which is parsed once; `memory` is what Python allocates meanwhile at
most. `sent`: bytes that a rank sends of its own in both rounds of a save, the most of all ranks; `passed on`: that and
what a rank of the tree sends on for those below it. `tables`: bytes of tables that one rank of the same layout reads at
a load, besides the manifest and its parts.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.common import ModelShape, print_json
from fullshard.checkpoint.agreement import Said, summary, summed
from fullshard.checkpoint.manifest import BLOCK_NBYTES, FileEntry, Manifest, ValueEntry, parse, place_in_name, to_bytes
from fullshard.checkpoint.plan import Cut, KeyPath, key_of, whole
from fullshard.checkpoint.rules import Rule, rule_of
from fullshard.checkpoint.save_plan import Own, Plan, Share, balance_of_values, declare, plan_of, share_of
from fullshard.checkpoint.table import nbytes_of
from fullshard.comm.messages import below

# A record of a data file: rank, volume, three sizes, a digest (saving.py).
RECORD_NBYTES = 56
Parameters = dict[str, tuple[tuple[int, ...], Rule]]


def llama(world: int, layers: int = 80, replicas: int = 1) -> Parameters:
    """Of 70 billion parameters with 80 layers."""
    hidden, inner, kv, vocab = 8192, 28672, 1024, 128256
    rule = rule_of((replicas, world // replicas), range(world), [None, Cut(0)])
    made: Parameters = {"model.embed_tokens.weight": ((vocab, hidden), rule), "lm_head.weight": ((vocab, hidden), rule)}
    made["model.norm.weight"] = ((hidden,), rule)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes = {
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
        }
        made |= {f"{at}.self_attn.{name}.weight": (shape, rule) for name, shape in shapes.items()}
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        made |= {f"{at}.mlp.{name}.weight": (shape, rule) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        made |= {f"{at}.{name}.weight": ((hidden,), rule) for name in norms}
    return made


def mixture(world: int, layers: int = 94, *, modules: bool = False) -> Parameters:
    """Of 235 billion parameters with 94 layers of 128 experts."""
    hidden, inner, heads, kv, vocab, experts = 4096, 1536, 8192, 512, 151936, 128
    rule, groups = rule_of((world,), range(world), [Cut(0)]), 16
    own = rule_of((groups, world // groups), range(world), [Cut(0), Cut(1)])
    made: Parameters = {"model.embed_tokens.weight": ((vocab, hidden), rule), "lm_head.weight": ((vocab, hidden), rule)}
    made["model.norm.weight"] = ((hidden,), rule)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads)}
        made |= {f"{at}.self_attn.{name}.weight": (shape, rule) for name, shape in shapes.items()}
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            made[f"{at}.{name}.weight"] = ((128,), rule)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}.{name}.weight"] = ((hidden,), rule)
        made[f"{at}.mlp.gate.weight"] = ((experts, hidden), rule)
        if modules:
            for expert in range(experts):
                for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                    made[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = (shape, rule)
        else:
            made[f"{at}.mlp.experts.gate_up_proj"] = ((experts, hidden, 2 * inner), own)
            made[f"{at}.mlp.experts.down_proj"] = ((experts, inner, hidden), own)
    return made


STATES: dict[str, Callable[[int, int], Parameters]] = {
    "llama-70b": lambda world, layers: llama(world, layers or 80),
    "hsdp": lambda world, layers: llama(world, layers or 80, replicas=world // 64 if world % 64 == 0 else world // 50),
    "moe-235b": lambda world, layers: mixture(world, layers or 94),
    "moe-modules": lambda world, layers: mixture(world, layers or 94, modules=True),
}


def held_by(rank: int, parameters: Parameters) -> list[Own]:
    """What a rank has of parameters, and of their state in AdamW."""
    found = []
    for name, (shape, rule) in parameters.items():
        place = rule.place_of(rank)
        box = None if place is None else rule.box(shape, place[1])
        paths: list[KeyPath] = [("model", name), *(("optimizer", "state", name, m) for m in ("exp_avg", "exp_avg_sq"))]
        found += [Own(path, "float32", shape, box, rule, None) for path in paths]
        found.append(Own(("optimizer", "state", name, "step"), "float32", (), whole(()), None, None))
    return found


class Counted(NamedTuple):
    """What was counted for one state at one world."""

    state: str
    world: int
    tensors: int
    manifest_nbytes: int
    plan_seconds: float
    commit_seconds: float
    memory_nbytes: int
    sent_nbytes: int
    passed_on_nbytes: int
    depth: int
    fan_in: int
    files: int
    tables_nbytes: int
    load_seconds: float


def counted(state: str, world: int, layers: int = 0) -> Counted:
    """`layers`: of the model; 0 for its own number."""
    parameters = STATES[state](world, layers)
    own = held_by(0, parameters)
    groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "params": list(parameters)}]
    values: dict[KeyPath, Any] = {("optimizer", "param_groups"): groups, ("step",): 1000}
    # Once for the time, and once more for the memory, which Python counts at several times the time.
    planned, committed, declared, plan, share, summand, data, names = of_first_rank(own, values, world)
    tracemalloc.start()
    of_first_rank(own, values, world)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parse(data, "here").keys == sorted([*plan.entries, *map(key_of, values)])
    claim = [summary(rank, declared.digest, Said({}, (summand,))) for rank in range(world)]
    record = b"r" * RECORD_NBYTES
    done = [summary(rank, declared.digest, Said({}, (rank, summand), record)) for rank in range(world)]
    first, second = folded(claim, summed), folded(done, summed)
    passed = [a + b for a, b in zip(first.sent, second.sent, strict=True)]
    begun_load = time.process_time()
    parse(data, "here")
    return Counted(
        state,
        world,
        len(plan.entries),
        len(data),
        planned,
        committed,
        memory,
        max(len(a) + len(b) for a, b in zip(claim, done, strict=True)),
        max(passed),
        first.depth,
        first.fan_in,
        len(names),
        tables_of(plan, share),
        time.process_time() - begun_load,
    )


def of_first_rank(own: list[Own], values: dict[KeyPath, Any], world: int) -> tuple[Any, ...]:
    """The CPU seconds of a plan and of a commit, and what they made."""
    begun = time.process_time()
    declared = declare(own, [(path, "0" * 64) for path in values], (), (), world)
    plan = plan_of(declared)
    share = share_of(plan, own, 0)
    summand = balance_of_values(plan, 0, {key_of(path): "0" * 64 for path in values})
    names = plan.files
    planned = time.process_time()
    entries = [FileEntry(name, 0, 0, 0, "f" * 64) for name in sorted(names)]
    entries = with_sizes(entries, plan)
    stored = {key_of(path): ValueEntry(path, value) for path, value in values.items()}
    data = to_bytes(Manifest("0" * 32, world, "fullshard", plan.entries, stored, tuple(entries)))
    parse(data, "here")
    committed = time.process_time()
    return planned - begun, committed - planned, declared, plan, share, summand, data, names


def with_sizes(entries: Sequence[FileEntry], plan: Plan) -> list[FileEntry]:
    """Sizes as large as they may be, which add up to those of the tensors."""
    left, found = plan.nbytes, []
    for number, entry in enumerate(entries):
        data = left // (len(entries) - number)
        left -= data
        found.append(FileEntry(entry.name, data + 300_000 + 60_000, 300_000, 60_000, entry.digest))
        place_in_name(entry.name)
    return found


def tables_of(plan: Plan, share: Share) -> int:
    """The bytes of tables that rank 0 reads to load what it holds: those of its own files, and of the files that have
    what it holds and others wrote."""
    files: dict[tuple[int, int], list[int]] = {}
    for place in share.place.values():
        entry = plan.entries[place.key]
        for writer, box in entry.parts(place.box):
            files.setdefault((writer, entry.volume), []).append(box.numel * place.itemsize)
    return sum(nbytes_of(sizes, BLOCK_NBYTES) for sizes in files.values())


class Folded(NamedTuple):
    """`sent`: bytes of each rank's message; `depth`: messages that follow one another; `fan_in`: those that a rank gets
    at most."""

    sent: list[int]
    depth: int
    fan_in: int


def folded(texts: Sequence[bytes], combine: Callable[[Sequence[bytes]], bytes]) -> Folded:
    """The messages of all ranks along the tree."""
    world = len(texts)
    made, sent, depth = list(texts), [0] * world, [0] * world
    for rank in reversed(range(world)):
        senders = below(rank, world)
        if senders:
            made[rank] = combine([made[rank], *(made[one] for one in senders)])
            depth[rank] = 1 + max(depth[one] for one in senders)
        sent[rank] = len(made[rank]) if rank else 0
    return Folded(sent, depth[0], max(len(below(rank, world)) for rank in range(world)))


# ---- main ------------------------------------------------------------------------------------------------------------


def rows(found: Sequence[Counted]) -> str:
    head = (
        "| state | ranks | tensors | files | manifest | plan | commit | memory | sent | passed on | depth | tables "
        "| parse |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    lines = [
        f"| {one.state} | {one.world:,} | {one.tensors:,} | {one.files:,} | {one.manifest_nbytes / 1e6:.2f} MB "
        f"| {one.plan_seconds:.2f} s | {one.commit_seconds:.2f} s | {one.memory_nbytes / 2**20:.0f} MiB "
        f"| {one.sent_nbytes} B | {one.passed_on_nbytes / 1e3:.1f} kB | {one.depth} | {one.tables_nbytes / 1e3:.0f} kB "
        f"| {one.load_seconds:.2f} s |"
        for one in found
    ]
    return "\n".join([head, *lines])


def main(arguments: Sequence[str] | None = None) -> list[Any]:
    parser = argparse.ArgumentParser(description="Checkpoints at thousands of ranks, counted.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4096, 10_000])
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--layers", type=int, default=0, help="of each model (default: its own number)")
    options = parser.parse_args(arguments)
    found = [counted(state, world, options.layers) for state in options.states for world in options.ranks]
    print(rows(found))
    print_json("checkpoint_scale", ModelShape(), {"counted": [one._asdict() for one in found]})
    return found


if __name__ == "__main__":
    main()
