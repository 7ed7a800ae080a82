"""The reference pages that are made from the code when the site is built: names, commands, keys and messages.

Nothing here imports torch: the parsers and the keys do without it, docstrings are read by mkdocstrings, and messages
from the source.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fullshard"


def pages() -> dict[str, Callable[[], str]]:
    """What makes each page, by its path below docs/."""
    return {f"reference/{name}.md": functools.partial(api, name) for name in API} | {
        "reference/cli.md": cli,
        "reference/configuration-trainer.md": trainer_keys,
        "reference/configuration-sharding.md": sharding_keys,
    }


# ---- names -----------------------------------------------------------------------------------------------------

# Every public name once, under what it is for. tests/pure/test_reference.py compares with the modules.
API: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "fullshard": (
        "fullshard",
        "What `from fullshard import ...` gives.",
        {
            "Shard a model": (
                "fully_shard", "FSDPModule", "UnshardHandle", "GradientReductionHandle", "replicate",
                "register_fsdp_forward_method", "share_comm_ctx", "ShardPlacementResult", "DataParallelMeshDims",
            ),
            "Shard a whole model by a configuration": (
                "prepare_fully_shard", "Prepared", "ShardingConfig", "Parallelism", "checkpoint_activations",
            ),
            "Precision and offload": ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "GradScaler"),
            "Initial values": (
                "materialize", "load_pretrained", "mark_initialized", "mark_restored", "sync_module_states",
            ),
            "Optimizers and gradients": (
                "clip_grad_norm_", "grad_stats", "step_on_shards", "step_on_owners", "rebind_optimizer",
                "step_in_backward",
            ),
            "Full parameters": ("full_params", "unit_open"),
            "Averages": ("average",),
            "Sleep": ("sleep", "wake"),
            "Sequences cut over ranks": ("context_parallel",),
            "Experts": ("MixtureOfExperts", "balance_loss"),
            "Hand over to an engine or another layout": ("weights", "transfer"),
            "Micro-batches and uneven data": ("MicroBatches", "joined"),
            "Failures and checks": (
                "guard", "PeerFailed", "RanksDisagree", "check_gradients", "check_invariants", "replay", "find_drift",
            ),
            "Look inside": ("report",),
            "Programs": ("Program", "original_classes", "install", "uninstall"),
        },
    ),
    "checkpoint": (
        "fullshard.checkpoint",
        "Checkpoints of a sharded training. The guide: [checkpoints](../checkpoints.md).",
        {
            "Save and load": (
                "save", "async_save", "SaveFuture", "Waited", "wait", "close", "load", "get_state_dict",
                "set_state_dict",
            ),
            "Several checkpoints": (
                "latest", "recover", "list_checkpoints", "CheckpointInfo", "retain", "set_aside", "is_complete",
            ),
            "Look into one": ("inspect", "verify", "open_checkpoint", "Manifest", "TensorSpec", "CheckpointWriter"),
            "Random state": ("RandomState", "derived_seed"),
            "Errors": (
                "CheckpointError", "CheckpointBusy", "CheckpointDamaged", "CheckpointIOError", "CheckpointMismatch",
                "CheckpointNotFound",
            ),
        },
    ),
    "extras": (
        "fullshard.extras",
        "What the tools of the training loop return and raise. The tools themselves are names of `fullshard`.",
        {
            "Gradients": ("GradientStats", "GradientFigures", "StepInBackward"),
            "Uneven data": ("Turn",),
            "Checks": (
                "GradientCheck", "NonFiniteError", "InvariantChecks", "InvariantBroken", "Replay", "ReplayError",
                "Drift",
            ),
            "Programs": ("Installation",),
        },
    ),
    "observe": (
        "fullshard.observe",
        "What a model does, as text and figures; without effect on results.",
        {
            "Commands of a step": ("record", "Trace"),
            "Records of a run": ("Recorder", "first_and_every"),
            "Reports": ("report", "Report", "UnitReport", "Unsharded", "Bytes", "inspect_units", "UnitInfo"),
        },
    ),
    "migrate": (
        "fullshard.migrate",
        "Configurations of `prepare_fully_shard`, as data. The guide: [prepare](../prepare.md).",
        {
            "Read and write": ("read_config", "read_table", "to_dict", "to_toml", "ConfigError"),
            "What is set": ("ShardingConfig", "Override"),
            "Names that other libraries have": ("LEVELS", "Level", "find_level"),
        },
    ),
    "compat": (
        "fullshard.compat",
        "Call shapes of other libraries on this runtime, for programs that cannot change yet. Enums, configurations "
        "and policies of FSDP1 are torch's own objects, which `fullshard.compat.fsdp1` hands out under the same names.",
        {
            "fullshard.compat.fsdp1": ("FullyShardedDataParallel",),
            "fullshard.compat.composer": ("prepare_fsdp_module",),
        },
    ),
}  # fmt: skip


def api(name: str) -> str:
    module, about, groups = API[name]
    lines = [f"# {module}", "", about, ""]
    for title, names in groups.items():
        inside = title if title.startswith("fullshard.") else module
        lines += [f"## {title}", ""]
        for each in names:
            lines += [f"[](){{#{module}.{each}}}", "", f"::: {defined(inside, each)}", ""]
    return "\n".join(lines)


def defined(module: str, name: str) -> str:
    """Where a public name is defined: a function may be in a file of its own name, and both have the same path."""
    base = PACKAGE.parent / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    public = base / "_public.py"
    for node in ast.parse((public if public.exists() else path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == name for each in node.names):
            parts = module.split(".") if base.is_dir() else module.split(".")[:-1]
            parts = parts[: len(parts) - node.level + 1] if node.level else []
            return defined(".".join([*parts, *filter(None, [node.module])]), name)
    return f"{module}.{name}"


# ---- commands --------------------------------------------------------------------------------------------------


def cli() -> str:
    from fullshard.cli import parser

    top = parser()
    lines = ["# The command line", "", _markdown(top.description), "", *_epilog(top), ""]
    for words, each in commands(top):
        lines += _command(words, each)
    return "\n".join(lines) + "\n"


def commands(
    parser: argparse.ArgumentParser, above: str = "fullshard"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command with its parser, those below another one after it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield f"{above} {name}", each
                yield from commands(each, f"{above} {name}")


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Its arguments but for `--help`, those that the help hides left out."""
    return [
        action
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
        and action.help is not argparse.SUPPRESS
    ]


def _command(words: str, parser: argparse.ArgumentParser) -> list[str]:
    lines = [f"## {words}", "", _markdown(parser.description or ""), "", "```text", _usage(words, parser), "```", ""]
    rows = options(parser)
    if rows:
        lines += ["| argument | | default |", "|---|---|---|"]
        lines += [f"| {_flags(row)} | {_cell(_help(row, parser))} | {_default(row)} |" for row in rows]
    return [*lines, "", *_epilog(parser), ""]


def _usage(words: str, parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(prog=words, width=100)
    formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups, prefix="")
    return formatter.format_help().rstrip()


def _epilog(parser: argparse.ArgumentParser) -> list[str]:
    return ["```text", parser.epilog.strip("\n"), "```"] if parser.epilog else []


def _flags(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{flag}{f' {value}' if action.nargs != 0 else ''}`" for flag in action.option_strings).replace(
        "|", "\\|"
    )


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    words = vars(action) | {"prog": parser.prog}
    return (action.help or "") % words


def _default(action: argparse.Action) -> str:
    if action.default in (None, False, argparse.SUPPRESS) or action.default == []:
        return ""
    return f"`{action.default}`"


# ---- keys ------------------------------------------------------------------------------------------------------


def trainer_keys() -> str:
    from fullshard.train.config import Config

    about = (
        "Every key of `fullshard train`: in a TOML file, or as `--set SECTION.KEY=VALUE`. `fullshard train "
        "--print-config` prints them all. The guide: [the trainer](../trainer.md)."
    )
    return _keys("Configuration of the trainer", about, Config)


def sharding_keys() -> str:
    from fullshard.migrate.config import ShardingConfig

    about = (
        "Every key of the configuration that `fullshard.prepare_fully_shard` takes, as a dict or a file. Other "
        "spellings are read and never written. The guide: [prepare](../prepare.md)."
    )
    return _keys("Configuration of prepare_fully_shard", about, ShardingConfig)


def sections(config: type) -> tuple[list[Field[Any]], list[tuple[str, type]]]:
    """The keys of the configuration itself, and its sections by name."""
    hints = typing.get_type_hints(config)
    own = [key for key in fields(config) if not is_dataclass(hints[key.name]) and "doc" in key.metadata]
    return own, [(key.name, hints[key.name]) for key in fields(config) if is_dataclass(hints[key.name])]


def _keys(title: str, about: str, config: type) -> str:
    own, below = sections(config)
    lines = [f"# {title}", "", about, ""]
    if own:
        lines += _section(config, own)
    for name, section in below:
        lines += [f"## {name}", "", *_section(section, list(fields(section)))]
    return "\n".join(lines) + "\n"


def _section(section: type, keys: list[Field[Any]]) -> list[str]:
    from fullshard.keys import show

    rows = []
    for key in keys:
        limits = key.metadata
        if "doc" not in limits:
            continue
        values = [_code(show(value)) for value in (*limits["choices"], *limits["words"])]
        values += [
            f"{word} {show(limits[name])}"
            for name, word in (("least", "at least"), ("above", "above"), ("most", "at most"))
            if limits[name] is not None
        ]
        doc = _cell(limits["doc"])
        if limits["spellings"]:
            doc += "; also " + ", ".join(f"`{other}`" for other in limits["spellings"])
        kind = (
            ""
            if limits["choices"]
            else _cell(str(key.type).removesuffix(" | str") if limits["words"] else str(key.type))
        )
        rows.append(f"| `{key.name}` | {_code(show(key.default))} | {', '.join([kind, *values]).strip(', ')} | {doc} |")
    return ["| key | default | values | |", "|---|---|---|---|", *rows, ""] if rows else []


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


# ---- messages --------------------------------------------------------------------------------------------------

GAP = "…"


class Message(typing.NamedTuple):
    """What an error says, with a gap for each value; the exception's class; the file below the package."""

    text: str
    error: str
    file: str


@functools.cache
def messages() -> list[Message]:
    """The messages of all errors that are raised where they are written, by file."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or not call.args:
                continue
            text = re.sub(rf"({GAP}\s*)+", f"{GAP} ", _text(call.args[0])).replace(f"{GAP} ,", f"{GAP},").strip()
            if re.search(r"\w{3}", text):
                error = ast.unparse(call.func).rpartition(".")[2]
                found.append(Message(text, error, path.relative_to(PACKAGE).as_posix()))
    return found


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case _:
            return GAP


# Rooms as a reader knows them; the others stand under their own name.
AREAS = {
    "api": "Calls: fully_shard and what belongs to it",
    "engine": "Training steps",
    "param": "Parameters and state dicts",
    "guard": "Ranks and failures",
    "extras": "Micro-batches, replay, checks",
    "checkpoint": "Checkpoints",
    "migrate": "prepare_fully_shard and fullshard migrate",
    "compat": "Call shapes of FSDP1 and Composer",
    "train": "The trainer",
    "policy": "Options and policies",
    "program.py": "Programs",
    "verify": "fullshard verify",
    "doctor": "fullshard doctor",
    "plan": "fullshard plan",
    "see": "fullshard see",
    "observe": "Reports and records",
    "cli": "The command line",
    "keys.py": "Keys of configurations",
}


def messages_section() -> str:
    """What the page of errors ends with on the site: every message, so that the search of the page finds any."""
    lines = [
        "## All messages", "",
        f"Every error that the package raises with a text of its own, from the source; {GAP} stands for a value.", "",
    ]  # fmt: skip
    by_area: dict[str, list[Message]] = {}
    for message in messages():
        room = message.file.partition("/")[0]
        if room in AREAS:
            by_area.setdefault(room, []).append(message)
    for room, title in AREAS.items():
        lines += [f"### {title}", ""]
        for message in dict.fromkeys((each.error, each.text) for each in by_area.get(room, [])):
            error, text = message
            lines.append(f"* {f'`{error}`: ' if error[0].isupper() else ''}{_markdown(_one_line(text))}")
        lines.append("")
    return "\n".join(lines) + "\n"


# ---- Markdown --------------------------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str | None) -> str:
    """Plain words as Markdown: what would be markup is not."""
    parts = re.split(r"(`[^`]+`)", text or "")
    return "".join(part if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    # Python-Markdown knows no backslash before "<".
    return re.sub(r"([\\*_\[\]{}#])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")


def _cell(text: str) -> str:
    return _markdown(_one_line(text)).replace("|", "\\|")
