"""Draws a training's log: loss and the chain's acceptance length on held-out answers over time."""

from __future__ import annotations

import json
from pathlib import Path


def draw(log: Path, picture: Path) -> None:
    """Write a PNG of two curves over the minutes of training."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    # The first entry after a pause is about a step or two: as a mean of losses it would only mislead.
    usual = sorted(entry["steps"] for entry in entries)[len(entries) // 2]
    entries = [entry for entry in entries if entry["steps"] >= usual / 10] or entries
    minutes = [entry["seconds"] / 60 for entry in entries]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(minutes, [entry["loss"] for entry in entries], label="training")
    left.plot(minutes, [entry["held_out_loss"] for entry in entries], label="held out")
    left.set(xlabel="minutes", ylabel="weighted loss")
    left.legend(frameon=False)
    right.plot(minutes, [entry["held_out_chain"] for entry in entries])
    right.set(xlabel="minutes", ylabel="acceptance length of the chain, held out")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    plt.close(figure)
