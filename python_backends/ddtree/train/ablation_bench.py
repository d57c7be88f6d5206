"""Trains and measures one arm after the other beside one target: what all arms share is made once.

The target's greedy answers to the prompt sets lie in the ablation's folder, so that every process and every
later run replays the same ones. This module knows neither which arms there are nor what their results say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ddtree.errors import InvalidArgument
from ddtree.models.loading import choose_device, read_target_config, resolve_dtype
from ddtree.text import TextCodec
from ddtree.train.ablation_arms import Arm, Choices, TargetSizes
from ddtree.train.ablation_results import ArmResult
from ddtree.train.batches import BatchShape
from ddtree.train.checkpoints import DraftShape, new_draft
from ddtree.train.commands import make_trainer, training_data
from ddtree.train.corpus import Corpus, Sequences, answered, pack, part_of
from ddtree.train.evaluate import answer_prompts, evaluate
from ddtree.train.loss import position_weights
from ddtree.train.prompts import ChatFrame, read_texts, render
from ddtree.train.replay import Answer
from ddtree.train.targets import load_frozen
from ddtree.train.train import Trainer, TrainSettings, few_batches

_BUDGET = 64
_WARM_STEPS = 16  # before steps are timed: everything is compiled, for several lengths


@dataclass(frozen=True)
class Study:
    """What all arms share."""

    target: Path
    corpus: Path
    output: Path
    prompts: Mapping[str, Path]  # sets to measure on, also kept out of training
    base: Choices
    mask_token_id: int
    device: str
    dtype: str
    gpus: int
    jobs: int
    sequences: int
    anchors: int
    rate: float
    held_out: int
    limit: int  # prompts of a set
    max_answer: int
    compiled: bool
    steps: int = 0  # 0: not known yet


@dataclass(frozen=True)
class ArmBench:
    """A target with the sequences to train on."""

    study: Study
    model: PreTrainedModel
    training: Sequences
    held_out: Sequences

    @classmethod
    def open(cls, study: Study, number: int) -> ArmBench:
        """Load what arms need, for process `number` of the study's.

        Raises:
            InvalidArgument: the corpus is empty.
            CheckpointError: the target cannot be used.
        """
        device = choose_device(study.device)
        if device.type == "cuda":
            device = torch.device("cuda", number % study.gpus)
            torch.cuda.set_device(device)
        elif study.jobs > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // study.jobs))
        training, held_out, _ = training_data(
            study.corpus, study.target, study.prompts.values(), study.held_out, study.base.seed
        )
        dtype = resolve_dtype(study.dtype, read_target_config(study.target))
        return cls(study, load_frozen(study.target, dtype=dtype, device=device), training, held_out)

    def run(self, arm: Arm) -> ArmResult:
        """Train an arm, or go on with it, and measure it.

        Raises:
            InvalidArgument: the corpus has no answers of the arm's kind.
            CheckpointError: the arm's drafter does not fit the target.
        """
        started = time.monotonic()
        sequences = self.sequences_of(arm.choices)
        trainer = self.trainer_of(arm.choices, arm.folder_in(self.study.output))
        trainer.resume()
        trainer.run(sequences, self.held_out)
        weights = position_weights(
            arm.choices.block_size - 1, self.study.base.decay, trainer.embedding.device
        )
        measured = replace(trainer.settings, seed=self.study.base.seed)  # the same places for all arms
        trained, held_out = (
            trainer.scores_of(few_batches(some, measured), weights) for some in (sequences, self.held_out)
        )
        table = evaluate(trainer, {(name, 0.0): self.answers(name) for name in self.study.prompts}, [_BUDGET])
        sets = {
            name: {way: row["T=0"][way] for way in ("chain", f"tree{_BUDGET}")} for name, row in table.items()
        }
        return ArmResult(
            arm,
            answer_tokens=sequences.answer_tokens,
            parameters=sum(weight.numel() for weight in trainer.draft.parameters()),
            steps=trainer.step,
            blocks=trainer.step * self.study.sequences * self.study.anchors,
            seconds=round(trainer.seconds, 1),
            wall_seconds=round(time.monotonic() - started, 1),
            device=_device_name(trainer.embedding.device),
            training_loss=trained.loss,
            held_out_loss=held_out.loss,
            held_out_chain=held_out.chain,
            sets=sets,
        )

    def sequences_of(self, choices: Choices) -> Sequences:
        """Give what an arm trains on; its share is one of all answers, whatever kind it takes."""
        tokens = round(choices.share * self.training.answer_tokens)
        return part_of(answered(self.training, choices.answers), tokens, self.study.base.seed)

    def trainer_of(self, choices: Choices, folder: Path, *, steps: int | None = None) -> Trainer:
        """Give an arm's trainer, at its start."""
        study = self.study
        torch.manual_seed(choices.seed)
        shape = DraftShape(
            choices.layers, choices.block_size, study.mask_token_id, choices.taps, choices.intermediate_size
        )
        draft, values = new_draft(self.model.config, shape)
        settings = TrainSettings(
            BatchShape(study.sequences, study.anchors, choices.block_size),
            steps or study.steps,
            None,
            rate=study.rate,
            matrix_rate=choices.muon_rate or None,
            weight_decay_positions=choices.decay,
            seed=choices.seed,
            compiled=study.compiled,
        )
        return make_trainer(self.model, draft, values, settings, folder)

    def steps_in(self, seconds: float, folder: Path, *, timed: float = 3.0) -> int:
        """Time the baseline's steps for `timed` seconds in an empty folder; give how many take `seconds`."""
        trainer = self.trainer_of(self.study.base, folder, steps=1 << 30)
        while trainer.step < _WARM_STEPS:
            trainer.run(self.training, self.held_out, deadline=time.monotonic() + 1)
        step, before = trainer.step, trainer.seconds
        trainer.run(self.training, self.held_out, deadline=time.monotonic() + timed)
        each = (trainer.seconds - before) / (trainer.step - step)
        return max(1, round(seconds / each))

    def sizes(self) -> TargetSizes:
        """Give the target's sizes that arms depend on."""
        text: Any = self.model.config.get_text_config()
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        width = int(getattr(text, "head_dim", None) or hidden // heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        attention = 2 * hidden * width * (heads + kv_heads)
        return TargetSizes(int(text.num_hidden_layers), hidden, int(text.intermediate_size), attention)

    def answers(self, name: str) -> list[Answer]:
        """Give the target's greedy answers to a prompt set; made once, then read."""
        kept = Corpus(self.study.output / "answers" / name)
        if not kept.shards:
            kept.append(self._answer(name))
        sequences = kept.read()
        ids = torch.from_numpy(sequences.ids.astype("int32")).split(sequences.lengths.tolist())
        starts = sequences.answer_starts.tolist()
        return [Answer(one, start) for one, start in zip(ids, starts, strict=True)]

    def _answer(self, name: str) -> Sequences:
        codec = TextCodec.from_folder(self.study.target)
        texts = read_texts(self.study.prompts[name])[: self.study.limit]
        if not texts:
            raise InvalidArgument.of(
                "--prompts", "must hold prompts", str(self.study.prompts[name]), "give another file"
            )
        found = answer_prompts(
            self.model,
            ChatFrame.of(codec),
            render(codec, texts),
            temperature=0.0,
            max_answer=self.study.max_answer,
        )
        count = len(found)
        return pack(
            [one.ids.numpy() for one in found],
            [one.answer_start for one in found],
            [0.0] * count,
            [1] * count,
            [True] * count,
            len(self.model.get_input_embeddings().weight),
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
