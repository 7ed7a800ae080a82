"""`fullshard checkpoint`: inspect checkpoints of any format, verify them, and convert between formats; list those of a
folder, and remove old ones; show a tensor of our own, and rewrite those of older versions.

Exit codes: 0 success; 1 damaged, or the operating system refused; 2 cannot run as requested: nothing is there, names do
not fit, the target exists; 3 recognised but rejected: the text says what to do.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint import CheckpointInfo, formats, inspect, list_checkpoints, open_checkpoint, retain
from fullshard.checkpoint.adapters import FILE as ADAPTERS
from fullshard.checkpoint.adapters import given
from fullshard.checkpoint.companions import CONFIG, files_in
from fullshard.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from fullshard.checkpoint.files import shown_progress
from fullshard.checkpoint.manifest import SCHEMA, encode, kind_of
from fullshard.checkpoint.upgrade import upgrade
from fullshard.train.metrics import in_units

EXIT_FAILED, EXIT_USAGE, EXIT_REFUSED = 1, 2, 3


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code. An error is a text on stderr, and with --json also one on stdout."""
    try:
        _ACTIONS[arguments.action](arguments)
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
    """The exit code of an error."""
    if isinstance(error, formats.REFUSALS):
        return EXIT_REFUSED
    if isinstance(error, CheckpointDamaged):
        return EXIT_FAILED
    usage = isinstance(error, CheckpointNotFound | CheckpointMismatch | FileExistsError | FileNotFoundError)
    usage = usage or (isinstance(error, ValueError) and not isinstance(error, CheckpointError))
    return EXIT_USAGE if usage else EXIT_FAILED


def printable(text: str) -> str:
    """`text` without control characters for the terminal: names come from files.

    >>> printable("a\\x1b[31mb\\u202ec")
    'a?[31mb?c'
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


# ---- inspect, verify -------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> None:
    found = formats.detect(arguments.path)
    with formats.open_found(found, allow_torch_save=arguments.allow_torch_save) as source:
        facts = _facts(found, source)
        if arguments.json:
            tensors = [{"key": k, "dtype": v.dtype, "shape": list(v.shape)} for k, v in source.tensors.items()]
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


def _facts(found: formats.Found, source: formats.Source, *, written: bool = False) -> dict[str, Any]:
    """`written`: without what a Hugging Face folder has once and the source twice."""
    infos = [info for key, info in source.tensors.items() if not written or key not in source.tied]
    dtypes = Counter(info.dtype for info in infos)
    return {
        "format": found.kind,
        "path": str(found.path),
        "says": found.says,
        "num_tensors": len(infos),
        "num_values": len(source.values),
        "nbytes": sum(map(formats.nbytes_of, infos)),
        "dtypes": dict(sorted(dtypes.items())),
        "files": source.num_files if isinstance(source, formats.HfSource) else None,
    }


def _summary(facts: dict[str, Any]) -> str:
    values = f", {facts['num_values']} other values" if facts["num_values"] else ""
    return f"{facts['num_tensors']} tensors, {in_units(facts['nbytes'])}{values}"


def _verify(arguments: argparse.Namespace) -> None:
    found = formats.detect(arguments.path)
    with formats.open_found(found, allow_torch_save=arguments.allow_torch_save) as source:
        facts = _facts(found, source)
        with _progress(facts["nbytes"], quiet=arguments.json) as progress:
            unknown = source.verify(progress)
    if arguments.json:
        print(json.dumps({"ok": True, **facts, "not_verified": unknown}))
        return
    print(printable(f"{found.says}\nwhole: {_summary(facts)}"))
    for text in unknown:
        print(printable(f"not verified: {text}"))


# ---- list, prune -----------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> None:
    """Print one line, or with --json one entry, for each checkpoint."""
    found = list_checkpoints(arguments.path)
    if not found:
        raise CheckpointNotFound(f"{arguments.path}: expected a folder with checkpoints (step-100, ...), found none")
    if arguments.json:
        print(json.dumps({"ok": True, "checkpoints": [_as_json(one) for one in found]}))
        return
    print(printable(table(found, time.time())))


def _prune(arguments: argparse.Namespace) -> None:
    """Remove what the options do not keep, and print what was removed."""
    names = ("keep_last", "keep_every", "keep_best", "metric", "mode", "dry_run")
    gone = retain(arguments.path, **{name: getattr(arguments, name) for name in names})
    stays = list_checkpoints(arguments.path)
    if arguments.json:
        kept = [str(one.path) for one in stays if one.path not in gone]
        said = {"ok": True, "dry_run": arguments.dry_run, "removed": [str(path) for path in gone], "kept": kept}
        print(json.dumps(said))
        return
    verb = "would remove" if arguments.dry_run else "removed"
    lines = [f"{verb} {path}" for path in gone] or ["nothing to remove"]
    print(printable("\n".join(lines)))


def table(found: Sequence[CheckpointInfo], now: float) -> str:
    """`found` as a table. `now`: seconds since 1970, from which ages are counted."""
    head = ("name", "step", "size", "layout", "age", "metrics", "state")
    rows = [head, *(_row(one, now) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _row(one: CheckpointInfo, now: float) -> tuple[str, ...]:
    size = in_units(one.nbytes) if one.nbytes else "-"
    when = "-" if one.saved_at is None else age(now - one.saved_at)
    return (
        PurePath(one.path).name,
        str(one.step),
        size,
        one.layout or "-",
        when,
        shown(one.metrics) or "-",
        one.problem or "whole",
    )


def shown(metrics: Mapping[str, float]) -> str:
    """
    >>> shown({"val_loss": 1.23456789, "tokens": 4096.0})
    'val_loss=1.23457 tokens=4096'
    """
    return " ".join(f"{name}={value:g}" for name, value in metrics.items())


def age(seconds: float) -> str:
    """
    >>> age(8), age(600), age(7300), age(200_000), age(-3)
    ('8 s', '10 min', '2 h', '2 d', '0 s')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _as_json(one: CheckpointInfo) -> dict[str, Any]:
    metrics = {name: value if math.isfinite(value) else None for name, value in one.metrics.items()}
    fields: dict[str, Any] = {**one._asdict(), "path": str(one.path), "metrics": metrics}
    return {**fields, "whole": one.whole}


# ---- show, upgrade ---------------------------------------------------------------------------------------------

# Parts that are listed without --json.
_SHOWN_PARTS = 16


def _ours(path: Path | str) -> Path | str:
    found = formats.detect(path)
    if found.kind != "fullshard":
        raise CheckpointNotFound(f"{path}: expected a checkpoint of fullshard, found {found.says}; inspect reads it")
    return found.path


def _show(arguments: argparse.Namespace) -> None:
    path, name = _ours(arguments.path), arguments.name
    with open_checkpoint(path) as found:
        manifest = found.manifest
        if name in manifest.values:
            value = manifest.values[name].value
            kind = kind_of(value)
            if arguments.json:
                print(json.dumps({"ok": True, "key": name, "kind": kind, "value": encode(value)}))
            else:
                print(printable(f"{name}: {kind}, {value!r}"))
            return
        if name not in manifest.tensors:
            near = difflib.get_close_matches(name, manifest.keys, 5, 0.3)
            raise CheckpointMismatch(f"{path}: expected a key of the checkpoint, found {name}; near it", near)
        entry = manifest.tensors[name]
        numbers = Numbers()
        for _, box in entry.parts():
            numbers.add(found.read(entry, box))  # part by part: no more memory than the largest needs
        parts = [{"box": str(box), "rank": rank, "file": file} for box, rank, file in found.where(name)]
    facts = {"key": name, "dtype": entry.dtype, "shape": list(entry.shape), "nbytes": entry.nbytes}
    if arguments.json:
        print(json.dumps({"ok": True, **facts, "numbers": numbers.facts(), "parts": parts}))
        return
    lines = [f"{name}  {entry.dtype} {list(entry.shape)}, {in_units(entry.nbytes)}, {len(parts)} part(s)"]
    lines.append("  " + ", ".join(f"{what} {value}" for what, value in numbers.facts().items()))
    lines += [f"  {part['box']}  {part['file']}" for part in parts[:_SHOWN_PARTS]]
    if len(parts) > _SHOWN_PARTS:
        lines.append(f"  ... and {len(parts) - _SHOWN_PARTS} more (--json shows all)")
    print(printable("\n".join(lines)))


class Numbers:
    """Returns what the values of a tensor are, added up over its parts."""

    def __init__(self) -> None:
        self._count = self._zeros = self._odd = 0
        self._sum = self._squares = 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, part: Tensor) -> None:
        values = (part.abs() if part.is_complex() else part).to(torch.float64).flatten()
        finite = values[values.isfinite()]
        self._count += len(values)
        self._odd += len(values) - len(finite)
        self._zeros += int((values == 0).sum())
        if len(finite):
            self._sum += float(finite.sum())
            self._squares += float(finite.square().sum())
            self._low, self._high = min(self._low, float(finite.min())), max(self._high, float(finite.max()))

    def facts(self) -> dict[str, Any]:
        """Minimum, maximum, mean and standard deviation of what is finite, and counts; of complex numbers, those of
        absolute values."""
        finite = self._count - self._odd
        found: dict[str, Any] = {"elements": self._count, "zeros": self._zeros, "not_finite": self._odd}
        if finite:
            mean = self._sum / finite
            spread = math.sqrt(max(self._squares / finite - mean * mean, 0.0))
            found |= {"min": _short(self._low), "max": _short(self._high), "mean": _short(mean), "std": _short(spread)}
        return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _upgrade(arguments: argparse.Namespace) -> None:
    path, target = _ours(arguments.path), arguments.target
    nbytes = inspect(path).nbytes
    with _progress(nbytes, quiet=arguments.json) as progress:
        changed = upgrade(path, target, progress=progress)
    place = path if target is None else target
    if arguments.json:
        print(json.dumps({"ok": True, "path": str(place), "changed": changed, "nbytes": nbytes}))
        return
    print(printable(f"{place}: {f'{in_units(nbytes)} in' if changed else 'already in'} schema {SCHEMA}"))


# ---- convert, export -------------------------------------------------------------------------------------------


def _convert(arguments: argparse.Namespace) -> None:
    found = formats.detect(arguments.path)
    target_format: formats.Format = arguments.to if arguments.action == "export" else "fullshard"
    names = None if arguments.optimizer_names is None else arguments.optimizer_names.read_text().split()
    with formats.open_found(found, allow_torch_save=arguments.allow_torch_save, optimizer_names=names) as opened:
        choice = _choice(arguments, opened, target_format)
        source = formats.Chosen(opened, **choice, renaming=_renaming(arguments, found))
        if not arguments.json:
            print(printable(f"found {found.says}"), file=sys.stderr, flush=True)
        size = getattr(arguments, "max_file_size", 1)
        merge = getattr(arguments, "merge_adapters", False)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("ignore")  # of packages, for those who change them
            warnings.simplefilter("always", UserWarning)
            ready = formats.prepared(
                source, target_format, _companions(arguments, source, target_format), merge_adapters=merge
            )
            facts = _facts(found, ready.source, written=target_format == "hf")
            with _progress(facts["nbytes"], quiet=arguments.json) as progress:
                files = formats.write(ready, arguments.target, target_format, max_file_nbytes=size, progress=progress)
    adapters = isinstance(ready.source, formats.AdapterSource)
    missing = _missing(ready.companions) if target_format == "hf" and not adapters else []
    for note in dict.fromkeys(str(one.message) for one in notes):
        print(printable(f"fullshard: {note}"), file=sys.stderr, flush=True)
    if arguments.json:
        to = {"format": target_format, "path": str(arguments.target)}
        said = {"ok": True, "from": facts, "to": to, "left_out": source.left_out, "files": [*map(str, files)]}
        said["missing"] = missing
        print(json.dumps(said))
        return
    left_out = f", {source.left_out} entries left out" if source.left_out else ""
    what = "adapters" if adapters else target_format
    print(printable(f"{arguments.target}: {_summary(facts)}{left_out}, as {what}, {len(files)} file(s)"))
    for text in missing:
        print(printable(f"missing: {text}"))


def _choice(arguments: argparse.Namespace, source: formats.Source, target_format: str) -> dict[str, Any]:
    """Returns what to take: what was asked for, or the one model that the checkpoint says it has."""
    chosen = {"only": arguments.only, "skip": arguments.skip, "strip": arguments.strip}
    models: list[str] = getattr(source, "models", [])
    if target_format == "hf" and not any(chosen.values()) and len(models) == 1 and models[0]:
        chosen |= {"only": [f"{models[0]}.*"], "strip": f"{models[0]}."}
    return chosen


def _companions(arguments: argparse.Namespace, source: formats.Source, target_format: str) -> dict[str, bytes]:
    for option in ("config", "adapter_config", "merge_adapters"):
        if target_format != "hf" and getattr(arguments, option, None):
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name}: expected --to hf, found --to {target_format}, which has no place for it")
    found = source.companions() if target_format in ("hf", "fullshard") else {}
    if folder := getattr(arguments, "config", None):
        files = files_in(folder)
        if CONFIG not in files:
            raise CheckpointNotFound(f"--config {folder}: expected a folder with {CONFIG}, found none there")
        found |= files
    if path := getattr(arguments, "adapter_config", None):
        found[ADAPTERS] = given(path).to_bytes()
    return found


def _missing(companions: dict[str, bytes]) -> list[str]:
    """Returns what `from_pretrained` will miss in the folder, and what to give."""
    texts = []
    if CONFIG not in companions:
        texts.append(
            f"{CONFIG}, without which from_pretrained does not load the folder. Export again with --config FOLDER, the "
            f"folder of the model that training began from; checkpoints store it when the state is that of "
            f"fullshard.checkpoint.get_state_dict(model) and the model is one of transformers"
        )
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "preprocessor", "processor")) for name in companions):
        texts.append(
            "a tokenizer, if the model reads text. Give --config FOLDER, or save it with the checkpoint: "
            '{"model": ..., "tokenizer": tokenizer}'
        )
    return texts


def _renaming(arguments: argparse.Namespace, found: formats.Found) -> formats.Renaming | None:
    old, new = arguments.names_from, arguments.names_to
    if (old is None) != (new is None):
        raise ValueError(
            "--names-from and --names-to go together: the style of the names to read, and of those to write"
        )
    if old is None:
        if arguments.head_dim is not None:
            raise ValueError("--head-dim needs --names-from and --names-to")
        return formats.UNWRAPPED if arguments.unwrap else None
    given = arguments.head_dim
    if given is None:
        if isinstance(found.path, str):
            raise ValueError(
                f"{found.path}: expected --head-dim, because no config.json is beside a checkpoint of a URL"
            )
        folder = found.path if found.path.is_dir() else found.path.parent
        given = formats.head_dim_of(formats.read_config(folder))
    return formats.llama(old, new, head_dim=given)


@contextmanager
def _progress(total_nbytes: int, *, quiet: bool) -> Iterator[Callable[[str, int], None] | None]:
    """A function to call with (key, bytes) for each finished tensor; None if nothing is shown. On stderr, so that
    stdout holds only the result."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with shown_progress(total_nbytes, "", lines=False) as advance:
        yield lambda key, nbytes: advance(nbytes)


_ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "inspect": _inspect,
    "verify": _verify,
    "list": _list,
    "prune": _prune,
    "show": _show,
    "upgrade": _upgrade,
    "convert": _convert,
    "export": _convert,
}
