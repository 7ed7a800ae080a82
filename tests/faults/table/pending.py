"""Cases whose outcome is not the demanded one yet."""

from __future__ import annotations

OPEN: tuple[str, ...] = ()
