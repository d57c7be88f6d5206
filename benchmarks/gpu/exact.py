"""Whether the device's way is right on this machine: tokens, logits and caches against other ways to them.

In float32: the engine's greedy tokens are those of `transformers`' `generate`; captured steps say what the
general way says, and a node what its path says as a prompt; after many rounds both caches hold what reading
everything at once leaves there. On the texts of float32, drafts of bfloat16 are accepted as often as its own.
Parts that fail or cannot run here say so beside the others. Nothing is timed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.contenders import Contender
from benchmarks.engine_jobs import decode
from benchmarks.gpu.engine_player import EnginePlayer
from benchmarks.gpu.exact_pair import exact_pair
from benchmarks.gpu.exact_replay import Answered, compare, replay_text
from benchmarks.gpu.exact_stages import Loaded, compare_rounds, compare_steps
from benchmarks.gpu.setting import Facts, Setting, Skipped, free, one_line
from benchmarks.measurement import DraftMode, Job
from benchmarks.prompts import read_prompts
from ddtree.draft import Drafter
from ddtree.errors import DDTreeError
from ddtree.stages.in_process import InProcessStages
from ddtree.text import TextCodec
from ddtree.train.replay import Acceptance
from ddtree.types import AUTO_BUDGET

_MODES: tuple[DraftMode, ...] = ("tree", "chain")
_BUDGETS = (AUTO_BUDGET, 16, 64)
WAYS = tuple(Contender("in-process", mode, budget) for mode in _MODES for budget in _BUDGETS)
_BATCH = 8
_SESSIONS = 3  # in room for four: a place of every step is empty
_MOST_TOLD = 8  # differences that are kept
_MORE_PROMPTS = Path(__file__).with_name("exact_prompts.jsonl")


@dataclass(frozen=True)
class Amount:
    """How much is compared."""

    prompts: int = 6
    prompt_tokens: int = 1024  # most of one
    max_tokens: int = 96
    drafted_prompts: int = 32  # whose tokens per round are compared
    drafted_tokens: int = 192
    trees: tuple[tuple[int, ...], ...] = ((64, 0, 17), (5, 31, 12), (0, 0, 0), (127, 3, 40), (64, 64, 64))
    nodes: int = 20  # that are read as prompts
    rounds: int = 240
    most_nodes: int = 64


_TINY = Amount(3, 40, 8, 3, 8, trees=((12, 0, 5), (3, 16, 7)), nodes=6)


class _Player(EnginePlayer):
    """The engine over a pair, and its stages."""

    @property
    def loaded(self) -> Loaded:
        """What the engine runs; to be used while it has nothing to do."""
        stages = self._engine._stages  # noqa: SLF001 - serving asks nobody for them
        assert isinstance(stages, InProcessStages)
        assert isinstance(stages.drafter, Drafter)
        steps, rounds = stages.verifier._steps, stages._rounds  # noqa: SLF001
        return Loaded(stages.verifier, stages.drafter, steps, rounds)

    def answers(self, jobs: Sequence[Job], batch: int) -> list[tuple[int, ...]]:
        """Decode all jobs, `batch` at a time, and give everybody's tokens."""
        waiting = iter(enumerate(jobs))
        found: dict[int, tuple[int, ...]] = {}

        async def one_after_another() -> None:
            for index, job in waiting:
                found[index] = tuple((await decode(self._engine, job)).token_ids)

        async def all_of_them() -> None:
            await asyncio.gather(*(one_after_another() for _ in range(batch)))

        self._loop.run_until_complete(all_of_them())
        self._settle()
        return [found[index] for index in range(len(jobs))]


class _Reference:
    """`transformers`' own target in float32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to(device).eval()

    @torch.inference_mode()
    def generate(self, job: Job) -> tuple[int, ...]:
        """Its greedy answer, the stop id included."""
        ids = torch.tensor([job.input_ids], device=self._device)
        stops = list(job.stop_ids)
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.max_tokens,
            do_sample=False,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
        )
        return tuple(made[0, len(job.input_ids) :].tolist())

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits `[V]` after ids, read as a prompt."""
        found: torch.Tensor = self._model(torch.tensor([list(ids)], device=self._device)).logits[0, -1]
        return found

    def gap(self, ids: Sequence[int]) -> float:
        """Millionths between the two largest logits after ids."""
        first, second = self.logits(ids).topk(2).values.tolist()
        return 1e6 * float(first - second)


def measure_exact(setting: Setting) -> Facts:
    """All comparisons.

    Raises:
        Skipped: there is no pair, or it does not load.
    """
    amount = _TINY if setting.is_tiny else Amount()
    with exact_pair(setting) as (target, draft):
        jobs = _jobs(setting, target, amount)
        acceptance = _SameText(jobs[: amount.drafted_prompts], amount.drafted_tokens, setting.note)
        facts: Facts = {
            "prompts": min(len(jobs), amount.prompts),
            "max_tokens": amount.max_tokens,
            "float32_products": torch.get_float32_matmul_precision(),  # highest: no TF32
        }
        with _playing(setting, target, draft, torch.float32) as player:
            facts |= _compare(player, _Reference(target, setting.device), jobs, amount, setting.note)
            setting.keep(facts)
            facts |= _part("float32", lambda: acceptance.write(player))
            setting.keep(facts)

        def in_half() -> Facts:
            with _playing(setting, target, draft, torch.bfloat16) as player:
                return acceptance.compare(player)

        facts |= _part("bfloat16", in_half)
    return facts


class _SameText:
    """Acceptance on the texts that float32 writes."""

    def __init__(self, jobs: Sequence[Job], max_tokens: int, note: Callable[[str], None]) -> None:
        self._jobs, self._max_tokens, self._note = jobs, max_tokens, note
        self._text: Answered | None = None
        self._accepted: list[Acceptance] = []

    def write(self, player: _Player) -> Facts:
        """Have the texts written, and replay them; how many rounds the engine took for them is the check.

        It takes a few less: close to the most tokens its trees are less deep, and wider for that.
        """
        self._note("exact: answers in float32")
        text = Answered.by(player.decode, self._jobs, self._max_tokens)
        self._note("exact: replay in float32")
        self._accepted, self._text = replay_text(player.loaded, text.answers), text
        return {"float32_per_round": text.own.length}

    def compare(self, player: _Player) -> Facts:
        """Replay the texts in another type, and as a check what that type writes itself."""
        assert self._text is not None, "see what is said of float32"
        self._note("exact: replay in bfloat16")
        facts = compare(self._accepted, replay_text(player.loaded, self._text.answers))
        self._note("exact: answers in bfloat16")
        text = Answered.by(player.decode, self._jobs, self._max_tokens)
        again = Acceptance.pooled(replay_text(player.loaded, text.answers))
        return {
            **facts,
            "bfloat16_per_round": text.own.length,
            "bfloat16_own_replay_per_round": again.length,
        }


def _compare(
    player: _Player, reference: _Reference, jobs: Sequence[Job], amount: Amount, note: Callable[[str], None]
) -> Facts:
    """What is compared in float32."""
    loaded, texts = player.loaded, [job.input_ids for job in jobs[:_SESSIONS]]
    facts = _part("greedy", lambda: compare_greedy(player, reference, jobs[: amount.prompts], note))
    note("exact: steps")
    facts |= _part(
        "steps", lambda: compare_steps(loaded, texts, amount.trees, reference.logits, amount.nodes)
    )
    note("exact: rounds")
    return facts | _part("rounds", lambda: compare_rounds(loaded, texts, amount.rounds, amount.most_nodes))


def _part(name: str, work: Callable[[], Facts]) -> Facts:
    """One comparison; where it breaks, the others still stand."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a lent machine's minutes must not end with one comparison
        return {f"{name}_error": one_line(error)}


def compare_greedy(
    player: _Player, reference: _Reference, jobs: Sequence[Job], note: Callable[[str], None]
) -> Facts:
    """Tokens of every way, alone and in batches of all ways mixed, against `generate`."""
    note("exact: greedy, transformers")
    expected = [reference.generate(job) for job in jobs]
    asked = [
        (way, index, replace(job, draft_mode=way.draft_mode, tree_budget=way.tree_budget))
        for index, job in enumerate(jobs)
        for way in WAYS
    ]
    note("exact: greedy, alone")
    alone = [player.decode(job).token_ids for _, _, job in asked]
    note("exact: greedy, together")
    together = player.answers([job for _, _, job in asked], _BATCH)
    same, differences = 0, list[Facts]()
    for how, answers in (("alone", alone), ("together", together)):
        for (way, index, job), found in zip(asked, answers, strict=True):
            if found == expected[index]:
                same += 1
                continue
            pairs = enumerate(zip(found, expected[index], strict=False))
            shorter = min(len(found), len(expected[index]))
            at = next((at for at, (ours, theirs) in pairs if ours != theirs), shorter)
            gap = reference.gap([*job.input_ids, *expected[index][:at]])
            name = f"{way.draft_mode}, budget {way.tree_budget}, {how}"
            differences.append({"way": name, "prompt": index, "at": at, "gap_millionths": gap})
    return {
        "greedy_same": same,
        "greedy_of": len(alone) + len(together),
        "greedy_tokens": sum(map(len, alone)) + sum(map(len, together)),
        "greedy_differences": differences[:_MOST_TOLD],
        "greedy_first_gap_millionths": differences[0]["gap_millionths"] if differences else None,
        # Near-ties may fall either way; where the two best are apart, something is wrong.
        "greedy_largest_gap_millionths": max((each["gap_millionths"] for each in differences), default=None),
    }


def _jobs(setting: Setting, target: Path, amount: Amount) -> list[Job]:
    codec = TextCodec.from_folder(target)
    prompts = [*read_prompts(setting.prompts), *read_prompts(_MORE_PROMPTS)]
    return [
        Job(
            input_ids=tuple(codec.render_messages([{"role": "user", "content": prompt.text}]))[
                : amount.prompt_tokens
                - index  # cut ones are of different lengths too
            ],
            stop_ids=tuple(sorted(codec.stop_ids)),
            max_tokens=amount.max_tokens,
        )
        for index, prompt in enumerate(prompts[: max(amount.prompts, amount.drafted_prompts)])
    ]


@contextmanager
def _playing(setting: Setting, target: Path, draft: Path, dtype: torch.dtype) -> Iterator[_Player]:
    setting.note(f"exact: loading in {str(dtype).removeprefix('torch.')}")
    try:
        player = _Player(
            target=target, draft=draft, device=setting.device, dtype=dtype, most_sequences=_BATCH
        )
    except (DDTreeError, ImportError) as error:
        raise Skipped(f"the pair does not load here ({one_line(error)})") from None
    try:
        yield player
    finally:
        player.close()
        free(setting.device)
