"""`Strategy`: one way to shard and to train, as a value that is printed and parsed back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Strategy:
    """`reshard`: `reshard_after_forward`. `replicas`: how many ranks hold each shard (HSDP). `bf16`: parameters are
    computed with in bfloat16, and reduced in float32. `micro`: micro-batches of a step, of which the last synchronises.

    >>> parse_strategy("zero2+bf16+micro=2")
    Strategy(reshard=False, replicas=1, bf16=True, offload=False, micro=2, recompute=False)
    >>> str(parse_strategy("hsdp=2+recompute+zero3"))
    'zero3+hsdp=2+recompute'
    """

    reshard: bool = True
    replicas: int = 1
    bf16: bool = False
    offload: bool = False
    micro: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        words = ["zero3" if self.reshard else "zero2"]
        words += [f"hsdp={self.replicas}"] * (self.replicas > 1) + ["bf16"] * self.bf16 + ["offload"] * self.offload
        words += [f"micro={self.micro}"] * (self.micro > 1) + ["recompute"] * self.recompute
        return "+".join(words)


# What is verified unless the user says otherwise.
DEFAULT = ("zero3", "zero2", "zero3+bf16", "zero3+micro=2", "zero3+recompute", "zero3+offload")
WORDS = "zero3, zero2, hsdp=N, bf16, offload, micro=N, recompute"


def parse_strategy(text: str) -> Strategy:
    """Raises `ValueError` with the words that there are."""
    found = Strategy()
    for word in text.split("+"):
        name, _, number = word.strip().partition("=")
        if name in ("hsdp", "micro") and number.isdigit() and int(number) > 1:
            given: dict[str, Any] = {"replicas" if name == "hsdp" else "micro": int(number)}
            found = replace(found, **given)
        elif name in ("zero2", "zero3") and not number:
            found = replace(found, reshard=name == "zero3")
        elif name in ("bf16", "offload", "recompute") and not number:
            found = replace(found, **{name: True})
        else:
            raise ValueError(f"{text}: expected words of {WORDS} with + between them, found {word!r}")
    return found
