"""Shows an ablation: a Markdown table with every number, and a picture of τ relative to the compared arm.

This module knows results only. A mean over prompt sets is one of ratios, so that no set counts more for being
easy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.train.ablation_arms import BASELINE, SEED, Arm
from ddtree.train.ablation_results import ArmResult


def report(arms: Sequence[Arm], results: Mapping[str, ArmResult], settings: Mapping[str, Any]) -> str:
    """Give the Markdown report: what was compared and at which scale, the table, and what is missing."""
    steps, base, limit = settings["steps"], settings["base"], settings["limit"]
    blocks = steps * settings["sequences"] * settings["anchors"]
    drafted = blocks * (base["block_size"] - 1)
    tokens, sequences = settings["corpus_answer_tokens"], settings["corpus_sequences"]
    passes = steps * settings["sequences"] / max(1, sequences)
    devices = ", ".join(sorted({one.device for one in results.values()})) or "nothing yet"
    noise = _noise(results)
    lines = [
        f"# Ablation of drafters for {settings['target']}",
        "",
        f"Every arm trains from nothing for {steps} steps of {settings['sequences']} sequences",
        f"with {settings['anchors']} blocks each: {_millions(blocks)} blocks of {base['block_size']},",
        f"{_millions(drafted)} draft positions.",
        f"The corpus has {_millions(tokens)} answer tokens in {sequences} sequences, held-out ones included;",
        f"an arm that trains on all of them sees each about {passes:.2g} times.",
        "",
        f"Unless an arm changes it: {base['layers']} layers, taps {_words(base['taps'])},",
        f"decay {base['decay']:g}, {_optimizer(base['muon_rate'], settings['rate'])}, seed {base['seed']}.",
        "",
        f"τ of {', '.join(settings['prompts'])}: at most {limit} prompts each,",
        f"greedy answers of at most {settings['max_answer']} tokens, replayed.",
        f"Seconds are of training, compilation included, on {devices}.",
        *(["", noise] if noise else []),
        "",
        table(arms, results),
    ]
    missing = [arm.name for arm in arms if arm.name not in results]
    if missing:
        lines.append(f"Without a result in this folder: {', '.join(missing)}.\n")
    return "\n".join(lines)


def table(arms: Sequence[Arm], results: Mapping[str, ArmResult]) -> str:
    """Give the Markdown table of the arms that have results, in the order of `arms`."""
    found = [results[arm.name] for arm in arms if arm.name in results]
    if not found:
        return "No arm has finished.\n"
    sets = list(found[0].sets)
    ways = list(found[0].sets[sets[0]])
    titles = [
        *("arm", "change", "compared with", "answer tokens", "weights", "steps", "blocks", "seconds"),
        *("training loss", "held-out loss", "held-out chain"),
        *(f"{name} {way}" for name in sets for way in ways),
        *(f"{way}, mean change" for way in ways),
    ]
    lines = [_line(titles), _line(["---"] * 2 + ["---"] + ["---:"] * (len(titles) - 3))]
    for one in found:
        cells = [
            *(one.arm.name, one.arm.change, one.arm.reference if one.arm.reference != one.arm.name else ""),
            *(_millions(one.answer_tokens), _millions(one.parameters)),
            *(str(one.steps), _millions(one.blocks), f"{one.seconds:.0f}"),
            *(f"{loss:.2f}" for loss in (one.training_loss, one.held_out_loss)),
            f"{one.held_out_chain:.2f}",
            *(f"{one.sets[name][way]:.2f}" for name in sets for way in ways),
            *(_percent(change_of(one, results, way)) for way in ways),
        ]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def change_of(result: ArmResult, results: Mapping[str, ArmResult], way: str) -> float | None:
    """Give the mean over sets of τ relative to the arm's reference, less 1; None without that arm."""
    reference = results.get(result.arm.reference)
    if reference is None or result.arm.name == result.arm.reference:
        return None
    ratios = [values[way] / reference.sets[name][way] for name, values in result.sets.items()]
    return sum(ratios) / len(ratios) - 1


def draw(arms: Sequence[Arm], results: Mapping[str, ArmResult], picture: Path) -> None:
    """Write a PNG of bars: what each arm's change did to τ, by way of drafting."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = [results[arm.name] for arm in arms if arm.name in results]
    compared = [one for one in found if one.arm.reference in results and one.arm.name != one.arm.reference]
    ways = list(next(iter(found[0].sets.values()))) if found else []
    figure, axes = plt.subplots(figsize=(7.5, 1.2 + 0.36 * max(1, len(compared))), layout="constrained")
    for index, way in enumerate(ways):
        height = 0.8 / len(ways)
        places = [row - 0.4 + height * (index + 0.5) for row in range(len(compared))]
        changes = [100 * (change_of(one, results, way) or 0.0) for one in compared]
        axes.barh(places, changes, height=0.9 * height, label=way)
    labels = [
        f"{one.arm.change}\n(against {one.arm.reference})"
        if one.arm.reference != BASELINE
        else one.arm.change
        for one in compared
    ]
    axes.set_yticks(range(len(compared)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="change of the acceptance length, mean over prompt sets, %")
    if ways:
        axes.legend(frameon=False)
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def _noise(results: Mapping[str, ArmResult]) -> str:
    """Say how far another seed alone moved τ; empty without that arm."""
    if SEED not in results or BASELINE not in results:
        return ""
    ways = next(iter(results[SEED].sets.values()))
    moved = ", ".join(f"{way} by {_percent(change_of(results[SEED], results, way))}" for way in ways)
    return f"Another seed alone changed {moved}: a smaller change than that says nothing."


def _optimizer(muon_rate: float, rate: float) -> str:
    return f"Muon {muon_rate:g} and AdamW {rate:g}" if muon_rate else f"AdamW {rate:g}"


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 100_000 else str(count)


def _percent(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.1f} %"
