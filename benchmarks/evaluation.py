"""From single runs to numbers: quartiles, ratios of medians, the summary. Pure: no clock, no file."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contenders import AUTO, Contender, PlayerName, Turn
from benchmarks.measurement import Answer


@dataclass(frozen=True)
class Run:
    """One turn and what came of it."""

    turn: Turn
    answer: Answer


@dataclass(frozen=True)
class Spread:
    """A quantity over several runs."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Quartiles of what is there, by linear interpolation; None when nothing is."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        q1, median, q3 = statistics.quantiles(known, n=4, method="inclusive")
        return cls(q1, median, q3)


class Runs:
    """All runs of a benchmark, looked at by contender."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._by_contender: dict[Contender, list[Run]] = defaultdict(list)
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Take one more run."""
        self._by_contender[run.turn.contender].append(run)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Who has run, in the order of their first run."""
        return tuple(self._by_contender)

    def of(self, contender: Contender) -> Sequence[Run]:
        """The contender's runs, none if it did not take part."""
        return self._by_contender.get(contender, ())

    def spread(self, contender: Contender, quantity: Callable[[Answer], float | None]) -> Spread | None:
        """A quantity of the contender's runs."""
        return Spread.of(quantity(run.answer) for run in self.of(contender))

    def common_medians(
        self, one: Contender, other: Contender, quantity: Callable[[Answer], float | None]
    ) -> tuple[float, float] | None:
        """Both medians over the (repeat, prompt) pairs that both have run; None without any.

        A contender that took part in fewer repeats must not be compared with other moments of the machine.
        """
        sides = [
            {(run.turn.repeat, run.turn.prompt): quantity(run.answer) for run in self.of(each)}
            for each in (one, other)
        ]
        pairs = [(sides[0][key], sides[1][key]) for key in sides[0].keys() & sides[1].keys()]
        known = [(first, second) for first, second in pairs if first is not None and second is not None]
        if not known:
            return None
        return statistics.median(a for a, _ in known), statistics.median(b for _, b in known)

    def speed_ratio(self, one: Contender, other: Contender) -> float | None:
        """How many times as fast `one` decodes: a ratio of medians of tokens per second."""
        medians = self.common_medians(one, other, lambda answer: answer.tokens_per_s)
        return medians[0] / medians[1] if medians else None

    def agreement(self, contender: Contender) -> dict[str, int] | None:
        """On how many prompts every token equals transformers' in every run; None without that peer."""
        reference = {
            run.turn.prompt: run.answer.token_ids for run in self.of(Contender("transformers", "off"))
        }
        same: dict[int, bool] = {}
        for run in self.of(contender):
            prompt = run.turn.prompt
            if prompt in reference:
                same[prompt] = same.get(prompt, True) and run.answer.token_ids == reference[prompt]
        return {"prompts": sum(same.values()), "of": len(same)} if same else None

    def best_budget(self) -> int | None:
        """The budget at which the tree is fastest in process; None if none ran."""
        medians = {
            each.tree_budget: spread.median
            for each in self.contenders
            if each.player == "in-process" and each.draft_mode == "tree" and each.tree_budget != AUTO
            if (spread := self.spread(each, lambda answer: answer.tokens_per_s))
        }
        return max(medians, key=lambda budget: medians[budget]) if medians else None


def summarise(runs: Runs) -> dict[str, float | int | str | None]:
    """The flat summary: ratios of median decoding speeds; None where a side did not run.

    `tree` is the best budget in process. A ratio of a served model to the same way of decoding in process is
    taken at that budget, else at the automatic one, named in `…_at`.
    """
    best = runs.best_budget()
    tree = Contender("in-process", "tree", AUTO if best is None else best)
    plain = Contender("in-process", "off")
    summary: dict[str, float | int | str | None] = {"best_budget": best}
    for name, one, other in (
        ("tree_over_plain", tree, plain),
        ("tree_over_chain", tree, Contender("in-process", "chain")),
        ("tree_over_transformers", tree, Contender("transformers", "off")),
        ("tree_over_dflash", tree, Contender("dflash", "chain")),
        ("auto_over_plain", Contender("in-process", "tree"), plain),
        ("chain_over_plain", Contender("in-process", "chain"), plain),
        ("plain_over_transformers", plain, Contender("transformers", "off")),
    ):
        summary[name] = runs.speed_ratio(one, other)
    served_ratios: tuple[tuple[str, PlayerName], ...] = (
        ("grpc_over_in_process", "grpc"),
        ("grpc_in_process_topology_over_in_process", "grpc-in-process"),
    )
    for name, player in served_ratios:
        served = _served_tree(runs, player, best)
        local = Contender("in-process", "tree", served.tree_budget)
        summary[name] = runs.speed_ratio(served, local)
        # A first chunk that arrives late flatters the decoding speed, never the whole answer's.
        whole = runs.common_medians(served, local, lambda answer: answer.end_to_end_tokens_per_s)
        summary[f"{name}_end_to_end"] = whole[0] / whole[1] if whole else None
        summary[f"{name}_at"] = served.way if summary[name] is not None else None
    return summary


def _served_tree(runs: Runs, player: PlayerName, best: int | None) -> Contender:
    at_best = Contender(player, "tree", AUTO if best is None else best)
    return at_best if runs.of(at_best) else Contender(player, "tree")


def describe(runs: Runs, contender: Contender) -> dict[str, Any]:
    """Everything the result file says about one contender."""
    own = runs.of(contender)
    stages = sorted({stage for run in own for stage in run.answer.stage_ms})
    return {
        "player": contender.player,
        "draft_mode": contender.draft_mode if contender.is_ours else None,
        "tree_budget": _shown_budget(contender),
        "runs": len(own),
        "tokens": sum(len(run.answer.token_ids) for run in own),
        "tokens_per_s": _dict(runs.spread(contender, lambda answer: answer.tokens_per_s)),
        "end_to_end_tokens_per_s": _dict(
            runs.spread(contender, lambda answer: answer.end_to_end_tokens_per_s)
        ),
        "time_to_first_token_ms": _dict(runs.spread(contender, lambda answer: answer.first_s * 1e3)),
        "acceptance_length": _dict(runs.spread(contender, lambda answer: answer.acceptance_length)),
        "nodes_per_round": _dict(runs.spread(contender, lambda answer: answer.nodes)),
        "round_ms": _dict(runs.spread(contender, lambda answer: answer.round_ms)),
        "stage_ms": {
            stage: statistics.median(
                run.answer.stage_ms[stage] for run in own if stage in run.answer.stage_ms
            )
            for stage in stages
        },
        "hop_ms": _hop_ms(runs, contender),
        "same_as_transformers": runs.agreement(contender),
    }


def _shown_budget(contender: Contender) -> int | str | None:
    if contender.draft_mode != "tree":
        return None
    return "auto" if contender.tree_budget == AUTO else contender.tree_budget


def _hop_ms(runs: Runs, contender: Contender) -> float | None:
    """What a round costs more than in process: hops, streaming, and stages that disturb each other."""
    if contender.player not in ("grpc", "grpc-in-process"):
        return None
    local = Contender("in-process", contender.draft_mode, contender.tree_budget)
    medians = runs.common_medians(contender, local, lambda answer: answer.round_ms)
    return medians[0] - medians[1] if medians else None


def _dict(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)
