"""The command `fullshard`: its arguments, and the dispatch to the part of the package that runs it.

`train` and `generate` are in the trainer (`fullshard.train.cli`), `checkpoint` is in `fullshard.cli.checkpoint`.
Arguments, help and version need no torch; a command imports it when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard import __version__
from fullshard.cli import completion, doctor, env, migrate, plan, see, verify
from fullshard.train import cli as train

STYLES = ("fullshard", "hf", "titan")  # name styles of a Llama's parameters, as in `fullshard.checkpoint`

_EPILOG = """\
`fullshard COMMAND --help` says more, with examples.

exit codes: 0 success, 1 failed, 2 cannot run as requested, 3 recognised but rejected, 130 interrupted by Ctrl-C,
143 by SIGTERM
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="fullshard",
        description="Train sharded models, prove that this equals plain training, and manage checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fullshard {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_commands(commands)
    verify.add_command(commands)
    doctor.add_command(commands)
    migrate.add_command(commands)
    see.add_command(commands)
    plan.add_command(commands)
    env.add_command(commands)
    completion.add_command(commands)
    _add_checkpoint(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    try:
        try:
            return _run(parser().parse_args(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("fullshard: interrupted by SIGINT", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone, for instance `| head`
        # What is still in the buffer is written when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "verify":
        return verify.run(arguments)
    if arguments.command == "doctor":
        return doctor.run(arguments)
    if arguments.command == "migrate":
        return migrate.run(arguments)
    if arguments.command == "see":
        return see.run(arguments)
    if arguments.command == "plan":
        return plan.run(arguments)
    if arguments.command == "env":
        return env.run(arguments)
    if arguments.command == "completion":
        return completion.run(arguments, parser())
    if arguments.command != "checkpoint":
        return train.run(arguments)
    from fullshard.cli import checkpoint

    return checkpoint.run(arguments)


# ---- the arguments of `fullshard checkpoint` -------------------------------------------------------------------

_CHECKPOINT_EXAMPLES = """\
examples:
  fullshard checkpoint inspect runs/x/checkpoints            the contents and the format
  fullshard checkpoint verify runs/x/checkpoints/step-100    read every byte, compare every checksum
  fullshard checkpoint list runs/x/checkpoints               step, size, layout, age, metrics, whole or not
  fullshard checkpoint prune runs/x/checkpoints --keep-last 2 --keep-every 1000
  fullshard checkpoint show runs/x/step-100 model.norm.weight     one tensor: its values in numbers, and its parts
  fullshard checkpoint upgrade runs/x/step-100               of an older version, in today's format
  fullshard checkpoint convert outputs/checkpoint/step-1000 ours      from torchtitan, Composer, DCP
  fullshard checkpoint convert Llama-3.2-1B ours --names-from hf --names-to fullshard
  fullshard checkpoint export runs/x/step-100 there --to hf  a folder that from_pretrained loads
  fullshard checkpoint export ours there --to hf --only 'model.*' --strip model. --names-from fullshard --names-to hf
  fullshard checkpoint export runs/lora/step-100 adapters --to hf            of a model under PEFT: for PeftModel
  fullshard checkpoint export runs/lora/step-100 merged --to hf --merge-adapters     the same, for from_pretrained
  fullshard checkpoint export ours there --to dcp            a folder that torch.distributed.checkpoint loads

exit codes: 0 success; 1 damaged or failed; 2 cannot run as requested (nothing there, names do not fit, the target
exists); 3 recognised but rejected (the text names the remedy); 130 interrupted by Ctrl-C
"""


def _add_checkpoint(commands: Any) -> None:
    """Add `checkpoint` and its subcommands to the parser of the command line."""
    top = commands.add_parser(
        "checkpoint",
        help="inspect, verify, list, prune, show, upgrade, convert and export checkpoints",
        description="Checkpoints of fullshard, DCP (torchtitan, Composer), Hugging Face and torch.save.",
        epilog=_CHECKPOINT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "inspect,verify,list,prune,show,upgrade,convert,export"
    actions = top.add_subparsers(dest="action", required=True, metavar=f"{{{names}}}")

    inspect = actions.add_parser("inspect", help="show the format and the contents of a checkpoint")
    _path(inspect)
    inspect.add_argument("--keys", action="store_true", help="every tensor, not only the first 40")

    verify = actions.add_parser("verify", help="read every byte and compare every checksum that exists")
    _path(verify)

    show = actions.add_parser("show", help="show one tensor or value of a fullshard checkpoint, and where it is")
    _path(show)
    show.add_argument("name", metavar="NAME", help="its key, as `inspect --keys` lists it")

    upgrade = actions.add_parser("upgrade", help="rewrite a fullshard checkpoint of an older version")
    _path(upgrade)
    upgrade.add_argument("target", nargs="?", type=_place, metavar="OUT", help="a new place (default: replace it)")

    into = actions.add_parser("convert", help="write a checkpoint of any format as a fullshard checkpoint")
    _from_to(into)

    export = actions.add_parser("export", help="write a checkpoint of any format for other programs")
    _from_to(export)
    export.add_argument(
        "--to",
        required=True,
        choices=("hf", "dcp", "torch"),
        help="hf: safetensors with index; dcp: torch.distributed.checkpoint; torch: one file of torch.save",
    )
    export.add_argument(
        "--max-file-size", type=_size, default=50_000_000_000, metavar="SIZE", help="of hf files (default: 50GB)"
    )
    export.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="for hf: take config, generation config and tokenizer from FOLDER instead of the checkpoint",
    )
    export.add_argument(
        "--merge-adapters",
        action="store_true",
        help="for hf, of a model under PEFT: the base with its active adapters merged (default: the adapters alone)",
    )
    export.add_argument(
        "--adapter-config",
        type=Path,
        metavar="PATH",
        help="for hf: PEFT's adapter_config.json, or the folder of its save_pretrained, instead of the checkpoint's",
    )
    listing = actions.add_parser("list", help="show the checkpoints of a folder, and which of them are whole")
    pruning = actions.add_parser("prune", help="remove old checkpoints of a folder")
    for action in (listing, pruning):
        action.add_argument("path", metavar="FOLDER", help="a folder of checkpoints whose names end in numbers")
    pruning.add_argument("--keep-last", type=int, required=True, metavar="N", help="keep the N newest whole ones")
    pruning.add_argument("--keep-every", type=int, metavar="N", help="keep those whose step N divides")
    pruning.add_argument("--keep-best", type=int, metavar="N", help="keep the N best by --metric")
    pruning.add_argument("--metric", metavar="NAME", help="a metric that the saves recorded, such as val_loss")
    pruning.add_argument("--mode", choices=("min", "max"), default="min", help="which metric is best (default: min)")
    pruning.add_argument("--dry-run", action="store_true", help="only show what would be removed")

    for action in (show, upgrade):
        action.set_defaults(allow_torch_save=False)
    for action in (inspect, verify, listing, pruning, show, upgrade, into, export):
        action.add_argument("--json", action="store_true", help="one JSON object on stdout, and no progress bar")
    for action in (inspect, verify, into, export):
        action.add_argument(
            "--allow-torch-save",
            action="store_true",
            help="also read files of torch.save, which are pickles, through weights_only; only from trusted sources",
        )


def _path(parser: argparse.ArgumentParser, metavar: str = "PATH") -> None:
    text = "a checkpoint, or a folder of them: the newest; of fullshard also a URL"
    parser.add_argument("path", type=_place, metavar=metavar, help=text)


def _from_to(parser: argparse.ArgumentParser) -> None:
    _path(parser, "FROM")
    parser.add_argument("target", type=_place, metavar="TO", help="the file or folder to write")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="keys to take: 'model.*'")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="keys to leave out")
    parser.add_argument("--strip", default="", metavar="PREFIX", help="remove this prefix from every key")
    parser.add_argument(
        "--unwrap", action="store_true", help="remove module., _orig_mod., _checkpoint_wrapped_module. from keys"
    )
    parser.add_argument("--names-from", choices=STYLES, help="the style of the checkpoint's names (of a Llama)")
    parser.add_argument("--names-to", choices=STYLES, help="the style of the names to write; includes --unwrap")
    parser.add_argument(
        "--head-dim",
        type=int,
        metavar="N",
        help="elements of an attention head, to or from titan (default: from config.json beside the checkpoint)",
    )
    parser.add_argument(
        "--optimizer-names",
        type=Path,
        metavar="FILE",
        help="for torch.save: names of the optimizer's parameters, one per line, in the order of their numbers",
    )


def _place(text: str) -> Path | str:
    """A path, or a URL, of which a path would leave out a slash."""
    return text if "://" in text else Path(text)


def _size(text: str) -> int:
    """
    >>> _size("5GB"), _size("2MiB"), _size("100")
    (5000000000, 2097152, 100)
    """
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    number = text.rstrip("BbKkMmGgIi")
    try:
        value = int(float(number) * units[text[len(number) :].upper()])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text}: expected a size such as 500MB, 5GB or 2GiB") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected more than nothing")
    return value
