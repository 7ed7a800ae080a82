"""`fullshard migrate --prove`: the old training and the new one, on the CPU, both compared with plain training."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# The model where the user names none.
STAND_IN = "fullshard.train.program:stand_in"


def prove(path: Path, arguments: argparse.Namespace) -> int:
    """Train under FSDP1 (DDP, if the configuration replicates) and under fullshard, with the settings of the
    configuration, and say whether both are equal to plain training. 0 equal, 1 different, 2 could not run."""
    from fullshard.keys import ConfigError
    from fullshard.migrate.reading import read_config
    from fullshard.migrate.settings.conversion import convert_file
    from fullshard.program import ProgramError
    from fullshard.verify import page
    from fullshard.verify.run import verify

    try:
        own = path.name.endswith(".fullshard.toml")
        config = read_config(path) if own else convert_file(path, arguments.format).config
        strategy, former, notes = _strategy(config, arguments.nproc)
        _check_classes(path, config, arguments.program)
        results = verify(
            arguments.program,
            [strategy],
            world=arguments.nproc,
            steps=arguments.steps,
            libraries=(former, "fullshard"),
            tell=lambda text: print(f"fullshard migrate: {text}", file=sys.stderr, flush=True),
        )
    except (ConfigError, ProgramError, ValueError) as error:
        print(f"fullshard migrate: {error}", file=sys.stderr)
        return 2
    failed = any(result.failure for result in results)
    different = any(result.difference is not None for result in results)
    verdict = "could not run" if failed else "different" if different else "equal"
    if arguments.json:
        said = page.as_json(arguments.program, results)
        print(json.dumps({"config": str(path), "verdict": verdict, "not_proved": notes, **said}))
    else:
        print(page.table(results))
        for note in notes:
            print(f"not proved: {note}")
        each = "losses, gradients, parameters and optimizer state of both come to what plain training gives"
        print(f"{path}: {verdict}{f': {each}' if verdict == 'equal' else ''}")
    return 2 if failed else int(different)


def _check_classes(path: Path, config: Any, entry: str) -> None:
    """Raises `ConfigError` for a class of the policy that the user's model has no module of."""
    from fullshard.keys import ConfigError
    from fullshard.migrate.tree import Tree, nearest
    from fullshard.program import find_program

    if not config.wrap.classes or entry == STAND_IN:
        return
    model = find_program(entry).model()
    tree = Tree(model)
    for wanted in config.wrap.classes:
        if not tree.of_class(wanted):
            raise ConfigError(
                f"{path}: wrap.classes: expected classes of modules in {type(model).__name__}, found no "
                f"{wanted}{nearest(wanted, tree.classes())}"
            )


def _strategy(config: Any, world: int) -> tuple[Any, str, list[str]]:
    """The strategy of `fullshard verify` that a configuration asks for, the library that people come from, and what of
    the configuration the strategy has no words for. Raises `ConfigError`, `ValueError`."""
    from fullshard.verify.strategy import Strategy

    copies, shards = config.degrees(world)
    param, reduce, output = config.precision.dtypes
    words = {None: "", "float32": "", "bfloat16": "bf16", "float16": "fp16"}
    if param not in words or reduce not in (None, "float32", param):
        raise ValueError(
            f"precision: expected compute in float32, bfloat16 or float16, and reduction in float32 or the same, to "
            f"compare with plain training; found {param} and {reduce}"
        )
    replicated = copies > 1 and shards == 1
    if replicated and words[param]:
        raise ValueError(f"precision: expected the dtype of the parameters, in which DDP trains, found {param}")
    keys = config.sharding
    strategy = Strategy(
        reshard=keys.reshard_after_forward not in (False, "never")
        if isinstance(keys.reshard_after_forward, (bool, str))
        else keys.reshard_after_forward,
        replicas=1 if replicated else copies,
        precision=words[param],
        pure=bool(words[param]) and reduce == param,
        offload=keys.cpu_offload,
        recompute=config.activation_checkpointing.at != "none" and config.activation_checkpointing.recompute,
    )
    notes = [f"precision.output = {output}"] if output is not None else []
    if config.wrap.by not in ("auto", "no_split_modules"):
        notes.append(f"wrap.by = {config.wrap.by}: the program's shard chooses units; values are the same")
    if keys.cpu_offload:
        notes.append("sharding.cpu_offload: there is one kind of memory on the CPU")
    if config.precision.master != "default":
        notes.append(f"precision.master = {config.precision.master}: the program builds its model in the dtype it has")
    if config.state_dict.kind == "full":
        notes.append("state_dict.kind = full: the form of checkpoints")
    if replicated:
        notes.append(
            "buffers: DDP sends those of rank 0 before each forward; here and in the proof each rank keeps its own"
        )
    return strategy, "ddp" if replicated else "fsdp1", notes
