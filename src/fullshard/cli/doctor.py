"""`fullshard doctor`: what is wrong before a launch, on the CPU, with a fix for each."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fullshard.cli.axes import add_axes, parallelism_of, refuse_beside_config
from fullshard.cli.verify import BUILTIN

_EXAMPLES = """\
examples:
  fullshard doctor train.toml --nproc 8                     the model and the folder of a config of the trainer
  fullshard doctor verify_me:program --nproc 64             your model: a function that returns a fullshard.Program
  fullshard doctor verify_me:program --nproc 64 --replicas 8 --checkpoints /shared/run --json
  fullshard doctor verify_me:program --nproc 64 --tensor-parallel 8    whether layers can be divided so

exit codes: 0 nothing, or advice; 1 warnings; 2 errors, or could not look
"""


def add_command(commands: Any) -> None:
    """Add `doctor` to the parser of the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="look at machine, model and wrapping before a launch",
        description="Look at machine, model, wrapping and the folder of checkpoints, and name what is wrong.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "program",
        nargs="?",
        default=BUILTIN,
        metavar="MODULE:FUNCTION | CONFIG.toml",
        help="yours, or a config of the trainer (default: the trainer's model)",
    )
    doctor.add_argument(
        "--nproc", type=int, default=2, metavar="N", help="ranks of the launch, any number (default: 2)"
    )
    doctor.add_argument(
        "--replicas", type=int, metavar="N", help="copies of the state, HSDP (default: 1, or the config's)"
    )
    add_axes(doctor, context=True)
    doctor.add_argument(
        "--checkpoints", metavar="FOLDER", help="where they go, a folder or a URL (default: the config's)"
    )
    doctor.add_argument("--no-probe", action="store_true", help="take no step and start no processes")
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from fullshard.doctor import examine
    from fullshard.program import ProgramError, find_program
    from fullshard.train.config import Config, ConfigError, load_config
    from fullshard.train.model import precision_policy

    try:
        for name in ("nproc", "replicas"):
            if (value := getattr(arguments, name)) is not None and value < 1:
                raise ProgramError(f"--{name} {value}: expected at least 1")
        entry, replicas, folder = arguments.program, arguments.replicas, arguments.checkpoints
        keywords: dict[str, Any] = {}
        plan = None
        if entry.endswith(".toml") or entry == BUILTIN:
            config: Config = load_config(Path(entry) if entry.endswith(".toml") else None)
            if replicas is not None:
                config = config.with_replicas(replicas)
            refuse_beside_config(arguments, arguments.program)
            if config.sharding.parallelism.beyond_data:
                plan = config.sharding.parallel  # its rules are findings
            else:
                config.check_world(arguments.nproc)
                replicas = config.sharding.degrees(arguments.nproc)[0]
            folder = folder or config.checkpoint.folder or config.run.dir or "runs"
            keywords = {
                "options": {"mp_policy": precision_policy(config.sharding.precision)},
                "copies": config.checkpoint.keep_last + config.checkpoint.keep_best + 1 + config.checkpoint.queue,
                "needs_port": False,  # `fullshard train` meets at a file
            }
            entry = f"{BUILTIN}:{entry}" if entry.endswith(".toml") else entry
        else:
            plan = parallelism_of(arguments)
        found = examine(
            find_program(entry),
            world=arguments.nproc,
            replicas=replicas or 1,
            checkpoints=folder,
            probes=not arguments.no_probe,
            parallelism=plan if plan is not None and plan.beyond_data else None,
            **keywords,
        )
    except (ProgramError, ConfigError, ValueError) as error:
        print(f"fullshard doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_json(arguments.program)) if arguments.json else found)
    return found.exit_code
