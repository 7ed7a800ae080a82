"""What users choose about the guard, read once for each process group.

FULLSHARD_GUARD    full       (default) ranks compare structure, initial values, the order of messages and what
                              they do to shards; failures and waits in vain have names
                   structure  structure and order are compared, values and facts are not
                   off        nothing is compared but this setting itself, once; failures and waits still have names
FULLSHARD_SILENCE  seconds without a sign of life after which a rank counts as lost; 0: never. Default: 60, or a
                   third of the time limit of the process group where that is less
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

MODES = ("full", "structure", "off")
_MOST_SILENCE = 60.0
# Two signs of life are so far apart at most.
_BEAT_SECONDS = 5.0
_REMOVED = {
    "FULLSHARD_AGREE": "full (all), structure or off (none)",
    "FULLSHARD_ORDER": "full (check) or off (trust)",
}


@dataclass(frozen=True)
class Settings:
    """The resolved choices. `limit_seconds`: the time limit of the process group."""

    mode: str = "full"
    silence_seconds: float = _MOST_SILENCE
    limit_seconds: float = 1800.0

    @classmethod
    def read(cls, limit_seconds: float, environ: Mapping[str, str] | None = None) -> Settings:
        """From the environment. `ValueError` names the variable, its value and what it may be."""
        source = os.environ if environ is None else environ
        for name, instead in _REMOVED.items():
            if name in source:
                raise ValueError(f"{name}: this variable was removed; set FULLSHARD_GUARD in its place: {instead}")
        mode = source.get("FULLSHARD_GUARD") or MODES[0]
        if mode not in MODES:
            raise ValueError(f"FULLSHARD_GUARD: expected one of {', '.join(MODES)}, found {mode!r}")
        text = (source.get("FULLSHARD_SILENCE") or "").strip()
        silence = min(_MOST_SILENCE, limit_seconds / 3)
        if text:
            try:
                silence = float(text)
            except ValueError:
                silence = -1.0
            if not 0 <= silence < float("inf"):
                raise ValueError(f"FULLSHARD_SILENCE: expected a number of seconds >= 0, found {text!r}")
        return cls(mode, silence, limit_seconds)

    @property
    def beat_seconds(self) -> float:
        """How far two signs of life are apart."""
        return min(_BEAT_SECONDS, self.silence_seconds / 4) if self.silence_seconds else _BEAT_SECONDS
