"""The command `ddtree-train ablate`: what of a drafter's training matters, one change at a time.

It can be stopped and repeated: arms that have results are not trained again. This module reads arguments,
says how far things are and writes the report; training, processes and results are its neighbours' work.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddtree.errors import DDTreeError, InvalidArgument
from ddtree.models.loading import choose_device, read_target_config
from ddtree.train.ablation_arms import Arm, Choices, choose_arms, make_arms, spread_taps
from ddtree.train.ablation_bench import ArmBench, Study
from ddtree.train.ablation_report import draw, report
from ddtree.train.ablation_results import (
    ArmResult,
    Results,
    check_settings,
    claim_answers,
    held,
    note_error,
    stored_setting,
)
from ddtree.train.ablation_workers import Bench, MakeBench, outcomes
from ddtree.train.loss import position_weights

_BAR = 20  # signs
_LEAST = {
    **dict.fromkeys(("steps", "gpus", "jobs_per_gpu", "sequences", "anchors", "layers", "limit"), 1),
    **dict.fromkeys(("max_answer", "held_out"), 1),
    "block_size": 2,
    "mask_token_id": 0,
    "seed": 0,
}  # of whole numbers


class ArmsFailed(DDTreeError):
    """Some arms have no result; the others are kept."""

    code = "UNAVAILABLE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, those of the target excepted."""
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of this ablation; it goes on there"
    )
    parser.add_argument(
        "--prompts", type=_prompt_set, action="append", required=True, metavar="SET=PATH",
        help="prompts to measure on, kept out of training; repeatable",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="of every arm")
    parser.add_argument(
        "--minutes-each", type=float, help="as many steps for every arm as the baseline takes in this time"
    )
    parser.add_argument("--arms", type=lambda text: text.split(","), default=[], help="NAME,NAME (all)")
    parser.add_argument("--gpus", type=int, default=1, help="to use side by side (1)")
    parser.add_argument("--jobs-per-gpu", type=int, default=1, help="arms at once on a GPU, or the CPU (1)")
    parser.add_argument("--layers", type=int, default=4, help="of the baseline (4)")
    parser.add_argument("--taps", type=int, nargs="+", default=[], help="of the baseline (five, spread)")
    parser.add_argument("--block-size", type=int, default=16, help="of the baseline (16)")
    parser.add_argument("--decay", type=float, default=7.0, help="of the baseline's loss (7)")
    parser.add_argument("--muon-rate", type=float, default=0.02, help="of the baseline; 0: AdamW (0.02)")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's peak learning rate (1e-3)")
    parser.add_argument("--mask-token-id", type=int, default=16, help="a token that text never holds (16)")
    parser.add_argument("--sequences", type=int, default=16, help="per step (16)")
    parser.add_argument("--anchors", type=int, default=16, help="blocks per sequence (16)")
    parser.add_argument("--held-out", type=int, default=512, help="sequences never trained on (512)")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each set (40)")
    parser.add_argument("--max-answer", type=int, default=256, help="new tokens of an answer (256)")
    parser.add_argument("--compile", action="store_true", help="compile drafter and target; pays on a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=ablate)


def ablate(chosen: Namespace) -> Iterator[str]:
    """Train and measure every arm that has no result yet, and write the report.

    Raises:
        InvalidArgument: arguments contradict each other, or the folder's results or answers.
        Unavailable: another process works in the folder.
        ArmsFailed: some arms have no result.
    """
    study = _study(chosen)
    position_weights(
        study.base.block_size - 1, study.base.decay, torch.device("cpu")
    )  # refuses a wrong decay
    with held(study.output), _noted(study.output):
        bench = ArmBench.open(study, 0)
        known = make_arms(study.base, bench.sizes())
        arms = choose_arms(known, chosen.arms)
        settings = _settings(chosen, study, bench)
        check_settings(study.output, settings)
        claim_answers(study.output, settings)
        for name in study.prompts:
            answers = bench.answers(name)
            yield f"{name}: {len(answers)} greedy answers"
        study = replace(study, steps=chosen.steps or _steps(chosen, bench))
        results = Results(study.output, {**settings, "steps": study.steps})
        ready = sum(arm.name in results.arms for arm in arms)
        yield f"{len(arms)} arms of {study.steps} steps, {ready} of them already have results"
        bench = replace(bench, study=study)
        make_bench: MakeBench = partial(ArmBench.open, study)
        if study.jobs == 1:
            make_bench = partial(_the, bench)
        del bench
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            for line in run_arms(arms, results, make_bench, study.jobs):
                _write_report(known, results, study.output)
                yield line
        finally:
            _write_report(known, results, study.output)
            _draw(known, results, study.output)
    yield f"{study.output / 'ablation.md'}, ablation.png and ablation.json"


def run_arms(arms: Sequence[Arm], results: Results, make_bench: MakeBench, jobs: int) -> Iterator[str]:
    """Run the arms that have no result, keep each result as it comes, and give a line of progress for each.

    Raises:
        ArmsFailed: after all others have run, if some have no result.
    """
    waiting = [arm for arm in arms if arm.name not in results.arms]
    started, failures = time.monotonic(), []
    for count, outcome in enumerate(outcomes(waiting, make_bench, jobs), 1):
        done = len(arms) - len(waiting) + count
        seconds = time.monotonic() - started
        bar = "#" * round(_BAR * done / len(arms))
        left = seconds / count * (len(waiting) - count)
        head = f"[{bar:.<{_BAR}}] {done}/{len(arms)} {outcome.arm.name}"
        if outcome.result is None:
            note_error(results.folder, f"{outcome.arm.name}: {outcome.error}", outcome.trace)
            failures.append(f"{outcome.arm.name} ({outcome.error})")
            yield f"{head}: no result: {outcome.error}"
            continue
        results.record(outcome.result)
        yield f"{head}: {_numbers(outcome.result)}; about {left:.0f} s left"
    if failures:
        raise ArmsFailed(f"arms without a result: {'; '.join(failures)}; run the command again for them")


@contextmanager
def _noted(folder: Path) -> Iterator[None]:
    """Keep what ends a run; an interrupt too, since it says what was going on."""
    try:
        yield
    except (ArmsFailed, GeneratorExit):  # arms were noted one by one; a closed generator is no error
        raise
    except BaseException as error:
        note_error(folder, f"the run ended: {type(error).__name__}: {error}", traceback.format_exc())
        raise


def _write_report(known: Sequence[Arm], results: Results, folder: Path) -> None:
    """Show all that the folder has results of, also what another run was asked for."""
    text = report(known, results.arms, results.settings)
    (folder / "ablation.md").write_text(text, encoding="utf-8")


def _draw(known: Sequence[Arm], results: Results, folder: Path) -> None:
    try:
        draw(known, results.arms, folder / "ablation.png")
    except Exception as error:  # noqa: BLE001 - numbers without a picture are better than neither
        note_error(folder, f"no picture: {type(error).__name__}: {error}", traceback.format_exc())


def _the(bench: Bench, _: int) -> Bench:
    return bench


def _numbers(result: ArmResult) -> str:
    sets = ", ".join(
        f"{name} {'/'.join(f'{x:.2f}' for x in row.values())}" for name, row in result.sets.items()
    )
    losses = f"loss {result.training_loss:.2f}, held out {result.held_out_loss:.2f}"
    return f"{losses}, chain {result.held_out_chain:.2f}; {sets}; {result.wall_seconds:.0f} s"


def _study(chosen: Namespace) -> Study:
    if (chosen.steps is None) == (chosen.minutes_each is None):
        raise InvalidArgument.of(
            "--steps", "or --minutes-each must be given, not both", chosen.steps, "give one of them"
        )
    _check_numbers(chosen)
    for _, path in chosen.prompts:
        if not path.is_file():
            raise InvalidArgument.of("--prompts", "must name files", str(path), "give one of JSON lines")
    on_gpu = choose_device(chosen.device).type == "cuda"
    if on_gpu and chosen.gpus > torch.cuda.device_count():
        raise InvalidArgument.of(
            "--gpus", f"must be at most the {torch.cuda.device_count()} there are", chosen.gpus, "use fewer"
        )
    gpus = chosen.gpus if on_gpu else 1
    return Study(
        target=chosen.target, corpus=chosen.corpus, output=chosen.output, prompts=dict(chosen.prompts),
        base=_base(chosen), mask_token_id=chosen.mask_token_id, device=chosen.device, dtype=chosen.dtype,
        gpus=gpus, jobs=gpus * chosen.jobs_per_gpu, sequences=chosen.sequences, anchors=chosen.anchors,
        rate=chosen.rate, held_out=chosen.held_out, limit=chosen.limit, max_answer=chosen.max_answer,
        compiled=chosen.compile,
    )  # fmt: skip


def _check_numbers(chosen: Namespace) -> None:
    for field, least in _LEAST.items():
        value = getattr(chosen, field)
        if value is not None and value < least:
            name = f"--{field.replace('_', '-')}"
            raise InvalidArgument.of(name, f"must be {least} or more", value, "take more")
    for field in ("minutes_each", "rate"):
        value = getattr(chosen, field)
        if value is not None and not 0 < value < math.inf:  # a NaN is neither
            name = f"--{field.replace('_', '-')}"
            raise InvalidArgument.of(name, "must be above 0 and finite", value, "take another number")


def _base(chosen: Namespace) -> Choices:
    text = read_target_config(chosen.target).get_text_config()
    taps = tuple(chosen.taps) or spread_taps(int(text.num_hidden_layers), 5)
    return Choices(
        taps, chosen.layers, None, chosen.block_size, 1.0, "all", chosen.decay, chosen.muon_rate, chosen.seed
    )


def _steps(chosen: Namespace, bench: ArmBench) -> int:
    """How many steps `--minutes-each` stands for: as before in this folder, else by timing the baseline."""
    if stored_setting(chosen.output, "minutes_each") == chosen.minutes_each:
        return int(stored_setting(chosen.output, "steps"))
    with tempfile.TemporaryDirectory(prefix="timing-", dir=chosen.output) as folder:
        return bench.steps_in(60 * chosen.minutes_each, Path(folder))


def _settings(chosen: Namespace, study: Study, bench: ArmBench) -> dict[str, Any]:
    """What must be the same in all runs of a folder, without places on this machine."""
    prompts = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in study.prompts.items()
    }
    base = asdict(study.base)
    base["taps"] = list(study.base.taps)
    names = (
        "steps",
        "sequences",
        "anchors",
        "rate",
        "held_out",
        "limit",
        "max_answer",
        "mask_token_id",
        "dtype",
    )
    return {
        "target": study.target.resolve().name,
        "corpus_answer_tokens": bench.training.answer_tokens + bench.held_out.answer_tokens,
        "corpus_sequences": len(bench.training) + len(bench.held_out),
        "prompts": prompts,
        "base": base,
        "minutes_each": chosen.minutes_each,
        **{name: getattr(study, name) for name in names},
    }


def _prompt_set(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name.isidentifier() or not path:
        raise argparse.ArgumentTypeError(f"{text!r} must be SET=PATH, such as gsm8k=prompts/gsm8k.jsonl")
    return name, Path(path)
