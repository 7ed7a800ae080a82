"""Which size of micro-batches to try next, from what fitted so far. Numbers alone, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Sizes:
    """The search of one model. Sizes are samples of a rank; 0 stands for "not known", as `size` for "all of them"."""

    size: int = 0  # what the next window tries
    fits: int = 0  # the largest that fitted
    fails: int = 0  # the smallest that did not
    bisect: bool = True

    def first(self, samples: int) -> int:
        """The size of the next attempt at a window of `samples` samples."""
        return min(self.size or samples, samples)

    def went_well(self, size: int, samples: int) -> None:
        """A window of `samples` samples fitted in pieces of `size`: choose that of the next window."""
        self.fits = max(self.fits, size)
        if not self.bisect or not self.fails:
            return
        self.size = self.fits
        # A larger size is worth trying only where it saves a piece.
        pieces, fewest = -(-samples // self.fits), -(-samples // (self.fails - 1))
        if fewest < pieces:
            self.size = -(-samples // ((pieces + fewest) // 2))

    def failed(self, size: int) -> bool:
        """A piece of `size` did not fit: choose a smaller one for the same window. False where there is none."""
        if size == 1:
            return False
        self.fails = size
        if self.fits >= size:
            self.fits = 0  # so it was, and is no longer
        self.size = self.fits if self.fits and self.bisect else (size + 1) // 2
        return True
