"""The rule of thumb of seed 002 for FULL_SHARD, line by line, and what its own figures say.

memory per device = parameters / devices x bytes x multiplier + activations + buffers
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
# The seed's example: 70B on 8 x A100-80GB, batch 16, 2,048 positions, recomputation.
EXAMPLE_ACTIVATIONS, EXAMPLE_BATCH, EXAMPLE_LENGTH, EXAMPLE_NUMEL, EXAMPLE_BUFFERS = 20 * GB, 16, 2048, 70e9, 5 * GB


@dataclass(frozen=True)
class Rough:
    """Bytes. `multiplier`: parameters, gradients, optimizer state and overhead together, 4 to 6 of the parameters."""

    numel: float
    devices: int
    itemsize: int = 2
    multiplier: float = 5.0
    activations: float = EXAMPLE_ACTIVATIONS
    buffers: float = EXAMPLE_BUFFERS

    @property
    def states(self) -> float:
        """
        >>> Rough(70e9, 8).states / 1e9
        87.5
        """
        return self.numel / self.devices * self.itemsize * self.multiplier

    @property
    def total(self) -> float:
        """
        >>> Rough(70e9, 8).total / 1e9, Rough(70e9, 8, activations=10e9).total / 1e9
        (112.5, 102.5)
        """
        return self.states + self.activations + self.buffers


EXAMPLE = Rough(EXAMPLE_NUMEL, 8)


def rough_of(numel: int, devices: int, samples: int, length: int) -> Rough:
    """The rule for another model: activations and buffers in proportion to the seed's example."""
    share = numel / EXAMPLE_NUMEL
    per_sample = EXAMPLE_ACTIVATIONS / EXAMPLE_BATCH / EXAMPLE_LENGTH
    return Rough(numel, devices, activations=per_sample * samples * length * share, buffers=EXAMPLE_BUFFERS * share)


def lines(rough: Rough, samples: int, length: int, budget: float) -> list[str]:
    """The rule as the seed writes it."""
    fits = "fits" if rough.total <= budget else "does not fit"
    return [
        f"  parameters   {rough.numel / 1e9:.3g}B / {rough.devices} x {rough.itemsize} bytes x {rough.multiplier:g} = "
        f"{rough.states / GB:.1f} GB",
        f"  activations  batch {samples}, sequence {length}, recomputation = {rough.activations / GB:.3g} GB",
        f"  buffers      {rough.buffers / GB:.3g} GB",
        f"  total        {rough.total / GB:.1f} GB of {budget / GB:.0f} GB: {fits}",
    ]


def remedy(rough: Rough, samples: int, budget: float) -> list[str]:
    """Says what half of the batch does, by the same rule."""
    half = Rough(rough.numel, rough.devices, rough.itemsize, rough.multiplier, rough.activations / 2, rough.buffers)
    fits = "fits" if half.total <= budget else f"does not fit in {budget / GB:.0f} GB either"
    least = next((n for n in range(rough.devices, 1 << 16) if _states_of(rough, n) + rough.buffers < budget), 0)
    return [
        f"  batch {samples // 2}      {half.states / GB:.1f} + {half.activations / GB:.3g} + {half.buffers / GB:.3g} = "
        f"{half.total / GB:.1f} GB: {fits}",
        f"  by this rule parameters and state alone fit from {least} devices on",
    ]


def _states_of(rough: Rough, devices: int) -> float:
    return Rough(rough.numel, devices, rough.itemsize, rough.multiplier).states
