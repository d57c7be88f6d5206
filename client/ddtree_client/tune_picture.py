"""The picture of a tuning: how fast all callers are served against what each of them waits for a token."""

from __future__ import annotations

from pathlib import Path

from ddtree_client.tune import Measured, Tuning

# Shapes as well as colours: the picture must work in grey.
_MARKERS = "osD^vPX*<>hp"


def draw(tuning: Tuning, path: Path) -> None:
    """Write a PNG.

    Raises:
        ImportError: matplotlib is not installed (``ddtree-client[tune]``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [each for each in tuning.measured if each.points]
    labels = dict.fromkeys(each.setting.variant.label for each in shown)
    for place, label in enumerate(labels):
        own = sorted(
            (each for each in shown if each.setting.variant.label == label),
            key=lambda one: one.setting.concurrency,
        )
        axes.plot(
            [each.middle.token_ms for each in own],
            [each.middle.tokens_per_second for each in own],
            marker=_MARKERS[place % len(_MARKERS)], linewidth=0.8, alpha=0.85, label=label,
        )  # fmt: skip
        for each in own:
            axes.annotate(
                str(each.setting.concurrency), (each.middle.token_ms, each.middle.tokens_per_second),
                textcoords="offset points", xytext=(5, 4), fontsize=7,
            )  # fmt: skip
    edge = sorted((each for each in shown if each.setting in tuning.pareto), key=_token_ms)
    axes.step(
        [_token_ms(each) for each in edge], [each.middle.tokens_per_second for each in edge],
        where="post", color="0.3", linestyle="--", linewidth=1.2, label="nothing is better at both",
    )  # fmt: skip
    chosen = {one.measured.setting: one.measured for one in tuning.recommendations}
    axes.scatter(
        [_token_ms(each) for each in chosen.values()],
        [each.middle.tokens_per_second for each in chosen.values()],
        s=190, facecolors="none", edgecolors="black", linewidths=1.6, label="recommended",
    )  # fmt: skip
    axes.set_xlabel("ms between tokens of one answer (left is better)")
    axes.set_ylabel("tokens/s of all answers together (up is better)")
    axes.set_title(f"medians over passes ({tuning.passes}); small numbers: requests under way at a time")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _token_ms(one: Measured) -> float:
    return one.middle.token_ms
