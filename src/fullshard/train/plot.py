"""The picture of a run: training and validation loss over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import optional


def installed() -> bool:
    return optional.find("matplotlib") is not None


def draw_loss(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the records of `metrics.jsonl` into a PNG. Needs matplotlib (`installed`)."""
    optional.silence_matplotlib()
    # The objects, not pyplot: no global state, no window system.
    figure_module, agg = optional.find("matplotlib.figure"), optional.find("matplotlib.backends.backend_agg")
    assert figure_module is not None and agg is not None
    figure = figure_module.Figure(figsize=(8, 4.5), layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [r["step"] for r in records]
    axes.plot(steps, [r["loss"] for r in records], color="tab:blue", linewidth=1, label="training")
    validated = [r for r in records if "val_loss" in r]
    if validated:
        label = f"validation (last {validated[-1]['val_loss']:.3f})"
        values = [r["val_loss"] for r in validated]
        axes.plot([r["step"] for r in validated], values, "o-", color="tab:orange", markersize=4, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    part = path.with_name(path.name + ".part")
    figure.savefig(part, dpi=120, format="png")
    part.replace(path)
