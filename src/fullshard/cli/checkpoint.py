"""`fullshard checkpoint`: look into checkpoints of any format, verify them, and turn one format into another.

Exit codes: 0 well; 1 damaged, or the operating system refused; 2 cannot be run as asked: nothing is there, names do not
fit, the target exists; 3 recognised and refused: the text says the way out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from fullshard.checkpoint.formats import (
    REFUSALS,
    STYLES,
    UNWRAPPED,
    Chosen,
    Format,
    Found,
    HfSource,
    Renaming,
    Source,
    convert,
    detect,
    head_dim_of,
    llama,
    nbytes_of,
    open_found,
    read_config,
)
from fullshard.cli.progress import progress_for
from fullshard.train.facts import in_units

EXIT_FAILED, EXIT_USAGE, EXIT_REFUSED = 1, 2, 3

_EXAMPLES = """\
examples:
  fullshard checkpoint inspect runs/x/checkpoints            what is there, in which format
  fullshard checkpoint verify runs/x/checkpoints/step-100    read every byte, compare every checksum
  fullshard checkpoint convert outputs/checkpoint/step-1000 ours      from torchtitan, Composer, DCP
  fullshard checkpoint convert Llama-3.2-1B ours --names-from hf --names-to fullshard
  fullshard checkpoint export ours there --to hf --only 'model.*' --strip model. --names-from fullshard --names-to hf
  fullshard checkpoint export ours there --to dcp            a folder that torch.distributed.checkpoint loads

exit codes: 0 well; 1 damaged or failed; 2 cannot be run as asked (nothing there, names do not fit, the target exists);
3 recognised and refused (the text says the way out); 130 interrupted by Ctrl-C
"""


def add_commands(commands: Any) -> None:
    """Add `checkpoint` and what is below it to the parser of the command line."""
    top = commands.add_parser(
        "checkpoint",
        help="inspect, verify, convert and export checkpoints",
        description="Checkpoints of fullshard, DCP (torchtitan, Composer), Hugging Face and torch.save.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = top.add_subparsers(dest="action", required=True, metavar="{inspect,verify,convert,export}")

    inspect = actions.add_parser("inspect", help="say what a checkpoint is and what is in it")
    _path(inspect)
    inspect.add_argument("--keys", action="store_true", help="every tensor, not the first 40 alone")

    verify = actions.add_parser("verify", help="read every byte and compare every checksum that there is")
    _path(verify)

    into = actions.add_parser("convert", help="write a checkpoint of any format as one of fullshard")
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
        "--max-file-size", type=_size, default=5_000_000_000, metavar="SIZE", help="of hf files (default: 5GB)"
    )
    for action in (inspect, verify, into, export):
        action.add_argument("--json", action="store_true", help="one JSON object on stdout, and no progress bar")
        action.add_argument(
            "--allow-torch-save",
            action="store_true",
            help="also read files of torch.save, which are pickles, through weights_only; trust where they come from",
        )


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a folder of them: the newest")


def _from_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="FROM", help="a checkpoint, or a folder of them: the newest")
    parser.add_argument("target", type=Path, metavar="TO", help="what to write")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="keys to take: 'model.*'")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="keys to leave out")
    parser.add_argument("--strip", default="", metavar="PREFIX", help="take this off the front of every key")
    parser.add_argument(
        "--unwrap", action="store_true", help="take module., _orig_mod., _checkpoint_wrapped_module. out of keys"
    )
    parser.add_argument("--names-from", choices=STYLES, help="whose names of a Llama's parameters the checkpoint has")
    parser.add_argument("--names-to", choices=STYLES, help="whose names they get; includes --unwrap")
    parser.add_argument(
        "--head-dim",
        type=int,
        metavar="N",
        help="elements of an attention head, to or from titan (default: what config.json beside the checkpoint says)",
    )
    parser.add_argument(
        "--optimizer-names",
        type=Path,
        metavar="FILE",
        help="for torch.save: names of the optimizer's parameters, one a line, in the order of their numbers",
    )


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


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked and return the exit code. An error is one text on stderr, and with --json an object on "
    "stdout."""
    actions: dict[str, Callable[[argparse.Namespace], None]] = {
        "inspect": _inspect,
        "verify": _verify,
        "convert": _convert,
        "export": _convert,
    }
    try:
        actions[arguments.action](arguments)
        return 0
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError, ValueError) as error:
        code = exit_code(error)
        if arguments.json:
            print(json.dumps({"ok": False, "error": type(error).__name__, "message": str(error), "exit_code": code}))
        print(f"fullshard: {printable(str(error))}", file=sys.stderr, flush=True)
        return code


def exit_code(error: Exception) -> int:
    """Which exit code an error has."""
    if isinstance(error, REFUSALS):
        return EXIT_REFUSED
    if isinstance(error, CheckpointDamaged):
        return EXIT_FAILED
    if isinstance(error, CheckpointNotFound | CheckpointMismatch | FileExistsError | FileNotFoundError):
        return EXIT_USAGE
    if isinstance(error, ValueError) and not isinstance(error, CheckpointError):
        return EXIT_USAGE
    return EXIT_FAILED


def printable(text: str) -> str:
    """`text` without what a terminal would obey: names come out of files.

    >>> printable("a\\x1b[31mb\\u202ec")
    'a?[31mb?c'
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


# ---- inspect, verify -------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> None:
    found = detect(arguments.path)
    with open_found(found, allow_torch_save=arguments.allow_torch_save) as source:
        facts = _facts(found, source)
        if arguments.json:
            tensors = [
                {"key": key, "dtype": info.dtype, "shape": list(info.shape)} for key, info in source.tensors.items()
            ]
            print(json.dumps({"ok": True, **facts, "tensors": tensors, "values": list(source.values)}))
            return
        lines = [f"{found.says}", _summary(facts)]
        lines += [f"  {name}: {count}" for name, count in facts["dtypes"].items()]
        shown = list(source.tensors.items())[: None if arguments.keys else 40]
        width = max((len(key) for key, _ in shown), default=0)
        lines += [f"{key:{width}}  {info.dtype:9} {list(info.shape)}" for key, info in shown]
        if len(shown) < len(source.tensors):
            lines.append(f"... and {len(source.tensors) - len(shown)} more tensors (--keys shows all)")
        if source.values:
            names = list(source.values)[: None if arguments.keys else 10]
            more = "" if len(names) == len(source.values) else f", ... ({len(source.values)} in all)"
            lines.append(f"no tensors: {', '.join(names)}{more}")
        print(printable("\n".join(lines)))


def _facts(found: Found, source: Source) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for info in source.tensors.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + 1
    return {
        "format": found.kind,
        "path": str(found.path),
        "says": found.says,
        "num_tensors": len(source.tensors),
        "num_values": len(source.values),
        "nbytes": sum(nbytes_of(info) for info in source.tensors.values()),
        "dtypes": dict(sorted(dtypes.items())),
        "files": source.num_files if isinstance(source, HfSource) else None,
    }


def _summary(facts: dict[str, Any]) -> str:
    values = f", {facts['num_values']} other values" if facts["num_values"] else ""
    return f"{facts['num_tensors']} tensors, {in_units(facts['nbytes'])}{values}"


def _verify(arguments: argparse.Namespace) -> None:
    found = detect(arguments.path)
    with open_found(found, allow_torch_save=arguments.allow_torch_save) as source:
        unknown = source.verify()
        facts = _facts(found, source)
    if arguments.json:
        print(json.dumps({"ok": True, **facts, "not_verified": unknown}))
        return
    print(printable(f"{found.says}\nwhole: {_summary(facts)}"))
    for text in unknown:
        print(printable(f"not verified: {text}"))


# ---- convert, export -------------------------------------------------------------------------------------------


def _convert(arguments: argparse.Namespace) -> None:
    found = detect(arguments.path)
    target_format: Format = arguments.to if arguments.action == "export" else "fullshard"
    names = None if arguments.optimizer_names is None else arguments.optimizer_names.read_text().split()
    with open_found(found, allow_torch_save=arguments.allow_torch_save, optimizer_names=names) as opened:
        source = Chosen(
            opened,
            only=arguments.only,
            skip=arguments.skip,
            strip=arguments.strip,
            renaming=_renaming(arguments, found),
        )
        if not arguments.json:
            print(printable(f"found {found.says}"), file=sys.stderr, flush=True)
        total = sum(nbytes_of(info) for info in source.tensors.values())
        size = getattr(arguments, "max_file_size", 1)
        with progress_for(total, quiet=arguments.json) as progress:
            files = convert(source, arguments.target, target_format, max_file_nbytes=size, progress=progress)
        facts = _facts(found, source)
    if arguments.json:
        print(
            json.dumps(
                {
                    "ok": True,
                    "from": facts,
                    "to": {"format": target_format, "path": str(arguments.target)},
                    "left_out": source.left_out,
                    "files": [str(file) for file in files],
                }
            )
        )
        return
    left_out = f", {source.left_out} entries left out" if source.left_out else ""
    print(printable(f"{arguments.target}: {_summary(facts)}{left_out}, as {target_format}, {len(files)} file(s)"))


def _renaming(arguments: argparse.Namespace, found: Found) -> Renaming | None:
    old, new = arguments.names_from, arguments.names_to
    if (old is None) != (new is None):
        raise ValueError("--names-from and --names-to go together: whose names there are, and whose there will be")
    if old is None:
        if arguments.head_dim is not None:
            raise ValueError("--head-dim belongs to --names-from and --names-to")
        return UNWRAPPED if arguments.unwrap else None
    folder = found.path if found.path.is_dir() else found.path.parent
    head_dim = arguments.head_dim if arguments.head_dim is not None else head_dim_of(read_config(folder))
    return llama(old, new, head_dim=head_dim)
