"""Micro-batches that fit: `batches` (attempts, and what ranks decide together), `sizes` (which one comes next), `start`
(that to which a failed attempt goes back), `memory` (what is out of memory, and what takes it).
"""

from .batches import MicroBatches as MicroBatches
