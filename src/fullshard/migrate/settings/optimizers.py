"""The optimizer and scheduler that DeepSpeed builds from its file: lines for a program, and keys of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# DeepSpeed's defaults. Its Adam decays weights as AdamW does, unless adam_w_mode is false.
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_OWN = {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "muon": "Muon"}


class Built(NamedTuple):
    """`line`: Python that builds it, "" if every value is the outer configuration's. `trains`: keys of the trainer.
    `difference`: what the trainer does in another way, "" for nothing."""

    line: str
    trains: dict[str, Any]
    difference: str = ""


def built(key: str, table: Mapping[str, Any]) -> Built:
    """`key`: "optimizer" or "scheduler"; `table`: its type and params."""
    name, params = str(table.get("type", "")), dict(table.get("params") or {})
    given = {each: value for each, value in params.items() if value not in ("auto", None)}
    if not name or (params and not given):
        return Built("", {})
    outer = [each for each, value in params.items() if value == "auto"]
    found = _optimizer(name, given, outer) if key == "optimizer" else _scheduler(name, given)
    more = f", with {' and '.join(outer)} of the outer configuration" if outer else ""
    return found._replace(line=found.line + more)


def _optimizer(name: str, given: dict[str, Any], outer: list[str]) -> Built:
    own = _OWN.get(name.lower())
    if own == "AdamW" and given.get("adam_w_mode") is False:
        own = "Adam"
    if own != "AdamW":
        arguments = ", ".join(f"{each}={value!r}" for each, value in given.items() if each != "adam_w_mode")
        built_by = f"torch.optim.{own}" if own else f"your {name}"
        return Built(f"{built_by}(model.parameters(), {arguments})", {}, "its optimizer is AdamW")
    values = {each: _number(given.get(each, default)) for each, default in _ADAM.items() if each not in outer}
    trains = {f"optimizer.{each}": value for each, value in values.items() if each != "betas"}
    if "betas" in values:
        values["betas"] = tuple(values["betas"])
        trains |= {"optimizer.beta1": values["betas"][0], "optimizer.beta2": values["betas"][1]}
    arguments = ", ".join(f"{each}={value!r}" for each, value in values.items())
    return Built(f"torch.optim.AdamW(model.parameters(), {arguments})", trains)


def _scheduler(name: str, given: dict[str, Any]) -> Built:
    """Converts a scheduler as DeepSpeed counts: its first update has the lowest rate, and the second, too."""
    steps, total = (
        _number(given.get("warmup_num_steps", 1000)),
        _number(given.get("total_num_steps", "total_num_steps")),
    )
    log = given.get("warmup_type", "log") != "linear"
    warm = f"math.log(max(n, 1)) / math.log({max(steps, 2)})" if log else f"max(n - 1, 0) / {max(steps, 2)}"
    low = _number(given.get("warmup_min_lr", 0))
    high = _number(given.get("warmup_max_lr", 0)) or None
    trains: dict[str, Any] = {"optimizer.warmup_steps": steps}
    difference = "its warm-up is linear" if log else ""
    if name == "WarmupCosineLR":
        least, first = _number(given.get("cos_min_ratio", 1e-4)), _number(given.get("warmup_min_ratio", 0))
        cosine = f"(1 + math.cos(math.pi * min(1, (n - {steps}) / max({total} - {steps}, 1)))) / 2"
        factor = f"{first} + (1 - {first}) * {warm} if n <= {steps} else {least} + (1 - {least}) * {cosine}"
        trains |= {"optimizer.min_lr_ratio": least}
        trains |= {"training.steps": total} if isinstance(total, int) else {}
        return Built(_lambda(factor), trains, difference)
    if name not in ("WarmupLR", "WarmupDecayLR"):
        arguments = ", ".join(f"{each}={value!r}" for each, value in given.items())
        return Built(f"your {name}(optimizer, {arguments})", {}, "its schedule is a cosine")
    factor = f"min(1.0, {warm})"
    if name == "WarmupDecayLR":
        factor = f"min({factor}, max(0.0, ({total} - n + 1) / max({total} - {steps}, 1)))"
        trains |= {"training.steps": total} if isinstance(total, int) else {}
        difference = difference or "its schedule is a cosine"
    else:
        trains |= {"optimizer.min_lr_ratio": 1.0}
    if low:
        factor = f"({low} + ({high} - {low}) * {factor}) / {high}"
        difference = difference or "its warm-up begins at 0"
    line = _lambda(factor) + (f", over an optimizer with lr={high!r}" if high else "")
    return Built(line, trains | ({"optimizer.lr": high} if high else {}), difference)


def _lambda(factor: str) -> str:
    return f"torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: {factor})"


def _number(value: Any) -> Any:
    """A number that a person wrote as text, such as 1e-5 in YAML."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
