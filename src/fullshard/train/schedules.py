"""The learning rate of each step, as a function of the step alone: nothing of it is in a checkpoint. No torch."""

from __future__ import annotations

import math

from fullshard.train.optimizer_keys import OptimizerKeys


def learning_rate(keys: OptimizerKeys, steps: int, step: int) -> float:
    """The rate of step `step`, from 1, of `steps`.

    With w = `warmup_steps`, r = `min_lr_ratio` and p = (step - w) / (steps - w), it is `lr` times

    | | |
    |---|---|
    | step <= w, all schedules | step / w |
    | `cosine` | r + (1 - r) * (1 + cos(pi * p)) / 2 |
    | `linear` | r + (1 - r) * (1 - p) |
    | `constant` | 1 |
    | `wsd` | 1, then over the last d = `decay_steps` steps r + (1 - r) * (steps - step) / d |
    | `inverse_sqrt` | max(r, sqrt(w / step)), with w at least 1 |

    Sources: Loshchilov and Hutter 2017 (cosine), Hu et al. 2024 (wsd; its linear decay: Haegele et al. 2024),
    Vaswani et al. 2017 (inverse square root). With r = 0 these are the multipliers of transformers'
    `get_scheduler` for as many scheduler steps; those of `cosine_with_min_lr`, and of `warmup_stable_decay` with its
    linear decay after the warm-up, with any r. There the first step has the rate of 0 steps, which is 0 with a warm-up;
    here that of 1.

    >>> keys = OptimizerKeys(lr=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    >>> [learning_rate(keys, 10, step) for step in range(1, 11)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup, least = keys.warmup_steps, keys.min_lr_ratio
    if step <= warmup:
        return keys.lr * step / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    if keys.schedule == "inverse_sqrt":
        return keys.lr * max(least, math.sqrt(max(warmup, 1) / step))
    # What is left of the way from lr to its least.
    left = 1.0
    if keys.schedule == "cosine":
        left = (1 + math.cos(math.pi * progress)) / 2
    elif keys.schedule == "linear":
        left = 1 - progress
    elif keys.schedule == "wsd":
        left = min((steps - step) / decay_steps(keys, steps), 1.0)
    return keys.lr * (least + (1 - least) * left)


def decay_steps(keys: OptimizerKeys, steps: int) -> int:
    """The last steps of `wsd`, over which the rate falls: `decay_steps`, or for 0 a tenth of all, at least one."""
    return keys.decay_steps or max(steps // 10, 1)
