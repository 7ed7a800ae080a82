"""`fullshard migrate`: programs and configurations of other libraries, explained and rewritten."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .proof import STAND_IN, prove

_EXAMPLES = """\
examples:
  fullshard migrate train.py                       what FSDP1, DDP and torch's FSDP2 in it become; writes train.patch
  patch -p1 < train.patch                          after you have read it
  fullshard migrate --adapter train.py             FSDP1's class on fullshard: imports change, calls stay
  fullshard migrate repository                     all programs in it; writes repository.patches
  fullshard migrate train.py --json --output new.patch
  fullshard migrate accelerate.yaml                what each key becomes; writes accelerate.fullshard.toml
  fullshard migrate ds_config.json --accept-lossy zero_optimization.zero_quantized_weights
  fullshard migrate --prove accelerate.yaml --program verify_me:program

Configurations: Accelerate YAML; TrainingArguments of the Trainer, or its fsdp_config; axolotl, LLaMA-Factory and TRL
YAML; Composer and LLM Foundry YAML; torchtitan TOML; DeepSpeed ZeRO JSON, also where one of these names it.

exit codes: 0 everything means the same or is equivalent; 1 something is lost or has to be changed manually (unless
--accept-lossy names it); 2 the input cannot be read, and nothing was written
"""


FORMATS = (
    *("accelerate", "hf", "axolotl", "llamafactory", "llamafactory-v1", "trl"),
    *("composer", "foundry", "torchtitan", "deepspeed"),
)


def add_command(commands: Any) -> None:
    """Add `migrate` to the parser of the command line."""
    migrate = commands.add_parser(
        "migrate",
        help="convert programs of FSDP1, DDP and FSDP2, and configurations of other libraries",
        description="Say what each setting or call means here, and write the change for you to review.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    migrate.add_argument(
        "path",
        type=Path,
        metavar="CODE.py | FOLDER | CONFIG",
        help="a program, with the modules of its repository, all programs in a folder, or a configuration",
    )
    migrate.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="what to write (default: CODE.patch, FOLDER.patches, CONFIG.fullshard.toml, here)",
    )
    migrate.add_argument(
        "--adapter", action="store_true", help="of a program of FSDP1: keep its calls, and change its imports alone"
    )
    migrate.add_argument("--format", choices=FORMATS, help="of a configuration (default: the one it looks like)")
    migrate.add_argument(
        "--accept-lossy", action="append", default=[], metavar="KEY", help="exit with 0 although this is lost"
    )
    migrate.add_argument(
        "--prove",
        action="store_true",
        help="train as the configuration says, under FSDP1 or DDP and under fullshard, and compare; writes nothing",
    )
    migrate.add_argument("--program", default=STAND_IN, metavar="MODULE:FUNCTION", help="the model for --prove")
    migrate.add_argument("--nproc", type=int, default=2, metavar="N", help="processes for --prove (default: 2)")
    migrate.add_argument("--steps", type=int, default=3, metavar="N", help="steps for --prove (default: 3)")
    migrate.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from fullshard.migrate.verdict import MigrationError

    try:
        path: Path = arguments.path
        if path.is_absolute() and path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        if arguments.prove:
            return _prove(path, arguments)
        if path.suffix == ".py" or path.is_dir():
            from .programs import migrate_programs

            return migrate_programs(path, arguments)
        if arguments.adapter:
            raise MigrationError(f"--adapter {path}: expected a program or a folder, found neither")
        return _migrate_config(path, arguments)
    except MigrationError as error:
        print(f"fullshard migrate: {error}", file=sys.stderr)
        return 2


def _prove(path: Path, arguments: argparse.Namespace) -> int:
    from fullshard.migrate.verdict import MigrationError

    if path.suffix == ".py" or path.is_dir():
        raise MigrationError(f"--prove {path}: expected a configuration; --program names the model")
    for name in ("nproc", "steps"):
        if getattr(arguments, name) < 1:
            raise MigrationError(f"--{name} {getattr(arguments, name)}: expected at least 1")
    return prove(path, arguments)


def _migrate_config(path: Path, arguments: argparse.Namespace) -> int:
    from fullshard.migrate.reading import to_dict, to_toml
    from fullshard.migrate.settings.conversion import convert_file
    from fullshard.migrate.verdict import Judgement

    found = convert_file(path, arguments.format)
    judged = Judgement(found.findings, arguments.accept_lossy)
    judged.check_accepted()
    target = arguments.output or Path(f"{path.stem}.fullshard.toml")
    _write(target, to_toml(found.config, only_changes=True))
    if arguments.json:
        said = {"config": str(path), "format": found.format.name, "written": str(target)}
        print(json.dumps({**said, "settings": to_dict(found.config), **judged.as_json()}))
    else:
        print(f"{judged}\n{path}: {found.format.title}; {target}: for prepare_fully_shard(model, config=...)")
    return judged.exit_code


def _write(target: Path, text: str) -> None:
    from fullshard.migrate.verdict import MigrationError

    if target.exists():
        raise MigrationError(f"{target}: expected no file there, found one; remove it, or give --output another name")
    try:
        target.write_text(text)
    except OSError as error:
        raise MigrationError(f"{target}: cannot be written: {error.strerror}; give --output another name") from error
