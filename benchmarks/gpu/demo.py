"""The demo pair on real text: tree, chain and plain decoding, alone and in batches, and the `dflash` package.

Alone, everybody decodes the same prompts in turn, as in `make bench`, and decoding speed counts after the
first token. In batches a number of sequences is kept running, and all tokens count over the whole time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.contenders import Contender, PlayerName, Turn, rotated
from benchmarks.errors import BenchmarkError
from benchmarks.evaluation import Run, Runs, describe
from benchmarks.gpu.dflash_player import DFlashPlayer
from benchmarks.gpu.engine_player import EnginePlayer, Served
from benchmarks.gpu.setting import Facts, Setting, Skipped, free, one_line
from benchmarks.measurement import Answer, Job
from benchmarks.prompts import read_prompts
from ddtree.errors import DDTreeError
from ddtree.text import TextCodec

_ROOT = Path(__file__).resolve().parents[2]
_CATEGORY = "math"  # word problems such as gsm8k's
BATCHES = (1, 4, 8, 16, 32)
TREE, CHAIN, PLAIN = (Contender("in-process", mode) for mode in ("tree", "chain", "off"))
_FIXED = tuple(Contender("in-process", "tree", budget) for budget in (16, 64))
_PEER = Contender("dflash", "chain")
_REPEATS = 3
_SHARE_ALONE = 0.4  # of the section's time
_REQUESTS_PER_PLACE = 2


def demo_folders(setting: Setting) -> tuple[Path, Path]:
    """Target and drafter.

    Raises:
        Skipped: the target is not here and cannot be brought.
    """
    draft = setting.demo_draft or _ROOT / "drafters" / "smollm2-135m-dflash"
    if setting.demo_target is not None:
        return setting.demo_target, draft
    if setting.is_tiny:
        raise Skipped("a tiny run has no demo pair; give --demo-target and --demo-draft")
    try:
        from ddtree_local.demo_target import ensure_demo_target

        return ensure_demo_target(_ROOT / ".cache" / "demo-target"), draft
    except Exception as error:  # noqa: BLE001 - no package, no network, no disk: the reason is told
        raise Skipped(f"the demo target is not here ({one_line(error)}); give --demo-target") from None


def measure_demo(setting: Setting) -> Facts:
    """Everything about the demo pair.

    Raises:
        Skipped: there is none.
    """
    target, draft = demo_folders(setting)
    batches = (1, 2) if setting.is_tiny else BATCHES
    setting.note("demo pair: loading")
    try:
        engine = EnginePlayer(
            target=target,
            draft=draft,
            device=setting.device,
            dtype=setting.dtype,
            most_sequences=max(batches),
        )
    except (DDTreeError, ImportError) as error:
        raise Skipped(f"the demo pair does not load here ({one_line(error)})") from None
    jobs = _jobs(setting, target)
    facts: Facts = {"prompts": len(jobs), "max_tokens": jobs[0].max_tokens, "absent": {}}
    try:
        peer = _start_peer(setting, target, draft, facts["absent"])
        runs = _decode_alone(setting, jobs, engine, peer)
        facts["alone"] = {each.name: describe(runs, each) for each in runs.contenders}
        facts["tree_over_plain"] = runs.speed_ratio(TREE, PLAIN)
        facts["tree_over_chain"] = runs.speed_ratio(TREE, CHAIN)
        facts["tree_over_dflash"] = runs.speed_ratio(TREE, _PEER)
        facts["same_as_plain"] = _agreement(runs)
        peer = None
        free(setting.device)
        facts["batches"] = []
        for row in _decode_batches(setting, jobs, engine, batches):
            facts["batches"].append(row)
    except Exception as error:  # noqa: BLE001 - what was measured before it stays
        facts["error"] = one_line(error)
    finally:
        engine.close()
        free(setting.device)
    ratios = [row["tree_over_plain"] for row in facts.get("batches", ()) if "tree_over_plain" in row]
    facts["worst_batch_tree_over_plain"] = min(ratios) if len(ratios) == len(batches) else None
    return facts


def _jobs(setting: Setting, target: Path) -> list[Job]:
    codec = TextCodec.from_folder(target)
    prompts = read_prompts(setting.prompts)
    chosen = [prompt for prompt in prompts if prompt.category == _CATEGORY] or list(prompts)
    return [
        Job(
            input_ids=tuple(codec.render_messages([{"role": "user", "content": prompt.text}])),
            stop_ids=tuple(sorted(codec.stop_ids)),
            max_tokens=8 if setting.is_tiny else 128,
        )
        for prompt in (chosen[:1] if setting.is_tiny else chosen)
    ]


def _start_peer(setting: Setting, target: Path, draft: Path, absent: dict[str, str]) -> DFlashPlayer | None:
    """The package; None, and the reason, where it cannot be had."""
    setting.note("dflash package: loading")
    try:
        folder = setting.dflash
        if folder is None:
            if setting.is_tiny:
                raise BenchmarkError("a tiny run brings no package; give --dflash")
            from benchmarks.dflash_environment import ensure_dflash

            folder = ensure_dflash(_ROOT / ".cache")
        return DFlashPlayer(folder, target=target, draft=draft, device=setting.device, dtype=setting.dtype)
    except Exception as error:  # noqa: BLE001 - whatever keeps a peer away, we measure ourselves
        absent["dflash"] = one_line(error)
        return None


def _decode_alone(
    setting: Setting, jobs: Sequence[Job], engine: EnginePlayer, peer: DFlashPlayer | None
) -> Runs:
    players: Mapping[PlayerName, EnginePlayer | DFlashPlayer | None] = {"in-process": engine, "dflash": peer}
    contenders = [TREE, CHAIN, PLAIN, *_FIXED]
    if peer is not None:
        contenders.append(_PEER)

    def decode(contender: Contender, job: Job) -> Answer:
        player = players[contender.player]
        assert player is not None, "only those who are here take part"
        return player.decode(replace(job, draft_mode=contender.draft_mode, tree_budget=contender.tree_budget))

    runs = Runs()
    for contender in contenders:
        setting.note(f"demo pair, warming up: {contender.title}")
        decode(contender, jobs[0])
    deadline = time.perf_counter() + setting.seconds * _SHARE_ALONE
    for repeat in range(1 if setting.is_tiny else _REPEATS):
        for prompt, job in enumerate(jobs):
            setting.note(f"demo pair alone, repeat {repeat + 1}, prompt {prompt + 1}")
            for contender in rotated(contenders, repeat * len(jobs) + prompt):
                runs.add(Run(Turn(repeat, prompt, contender), decode(contender, job)))
        if time.perf_counter() > deadline:
            break
    return runs


def _agreement(runs: Runs) -> dict[str, int]:
    """On how many prompts the tree's tokens equal plain decoding's; in bfloat16 near-ties differ."""
    plain = {run.turn.prompt: run.answer.token_ids for run in runs.of(PLAIN)}
    same = {run.turn.prompt: run.answer.token_ids == plain.get(run.turn.prompt) for run in runs.of(TREE)}
    return {"prompts": sum(same.values()), "of": len(same)}


def _decode_batches(
    setting: Setting, jobs: Sequence[Job], engine: EnginePlayer, batches: Sequence[int]
) -> Iterator[Facts]:
    """A row per batch; those the time does not reach are named with the reason."""
    deadline = time.perf_counter() + setting.seconds * (1 - _SHARE_ALONE)
    for batch in batches:
        if time.perf_counter() > deadline and not setting.is_tiny:
            yield {"batch": batch, "skipped": "the section's time was over; raise --seconds"}
            continue
        many = [jobs[at % len(jobs)] for at in range(max(len(jobs), _REQUESTS_PER_PLACE * batch))]
        turns: dict[str, list[Served]] = {}
        for repeat in range(1 if setting.is_tiny else _REPEATS + 1):
            for way in rotated((TREE, CHAIN, PLAIN), repeat):
                setting.note(f"demo pair, batch {batch}: {way.way}")
                asked = [replace(job, draft_mode=way.draft_mode) for job in many]
                served = engine.serve(asked, batch)
                # The first round of turns also meets what is compiled or captured when first needed.
                if repeat or setting.is_tiny:
                    turns.setdefault(way.draft_mode, []).append(served)
            if repeat and time.perf_counter() > deadline:
                break
        yield _row(batch, turns)


def _row(batch: int, turns: Mapping[str, Sequence[Served]]) -> Facts:
    speed = {mode: median(each.tokens_per_s for each in served) for mode, served in turns.items()}
    last = {mode: served[-1] for mode, served in turns.items()}
    return {
        "batch": batch,
        "turns": min(len(served) for served in turns.values()),
        "tokens_per_s": speed,
        "nodes_per_round": {mode: served.nodes for mode, served in last.items()},
        "tokens_per_round": {mode: served.tokens / max(1, served.rounds) for mode, served in last.items()},
        "stage_ms": {mode: served.stage_ms for mode, served in last.items()},
        "tree_over_plain": speed["tree"] / speed["off"],
        "chain_over_plain": speed["chain"] / speed["off"],
    }
