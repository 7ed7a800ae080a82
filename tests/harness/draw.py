"""Draws some of the slow tests, others each day, so that `make test-full` ends within an hour.

day     the days since 0001-01-01, so that a red run can be repeated: `make test-full DRAW=739943`
case    drawn on one day in n, by its name: in n days in a row all are, and each day about as many
"""

from __future__ import annotations

import datetime
import zlib


def day(text: str = "today") -> int:
    """The number of the day: of "today", or `text` itself."""
    return datetime.date.today().toordinal() if text == "today" else int(text)


def is_drawn(name: str, one_in: int, on: int) -> bool:
    """Whether the case `name` is drawn on day `on`.

    >>> [sum(is_drawn("a case", 3, on) for on in range(first, first + 3)) for first in (0, 1, 7)]
    [1, 1, 1]
    """
    return (zlib.crc32(name.encode()) + on) % one_in == 0
