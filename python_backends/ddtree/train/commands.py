"""What the commands do: they load folders, call the parts, and give lines to show.

This module is the only one that puts target, prompts, corpus and trainer together.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ddtree.errors import InvalidArgument
from ddtree.models.loading import choose_device, read_target_config, resolve_dtype
from ddtree.text import TextCodec
from ddtree.train import checkpoints
from ddtree.train import evaluate as evaluation
from ddtree.train import generate as generation
from ddtree.train.batches import BatchShape
from ddtree.train.checkpoints import DraftShape, TrainingState
from ddtree.train.corpus import Corpus, Sequences, answered, overlapping, part_of, split_held_out
from ddtree.train.draft_model import TrainedDraft
from ddtree.train.prompts import OPENINGS, ChatFrame, PromptMix, encode_openings, read_texts, render
from ddtree.train.slots import SlotGenerator, SlotLimits
from ddtree.train.targets import TapReader, load_frozen
from ddtree.train.train import Trainer, TrainSettings, jsonl_log


def generate(chosen: Namespace) -> Iterator[str]:
    """Have the target answer prompts into a corpus."""
    if chosen.answer_tokens is None and chosen.minutes is None:
        raise InvalidArgument.of("--answer-tokens", "or --minutes must be given", None, "give one of them")
    started = time.monotonic()
    codec, model = TextCodec.from_folder(chosen.target), _load(chosen)
    frame, corpus = ChatFrame.of(codec), Corpus(chosen.corpus)
    questions = [render(codec, read_texts(path)) for path in chosen.prompts]
    head = len(frame.head)
    usable = [[ids for ids in some if ids[:head] == frame.head] for some in questions]
    share = chosen.prompt_share if any(usable) else 0.0
    openings = encode_openings(codec, frame, OPENINGS)
    mix = PromptMix(frame, [some for some in usable if some], openings, chosen.temperatures, share)
    # Shards already there mean a generation that goes on: other prompts, other noise.
    seed = chosen.seed + len(corpus.shards)
    limits = SlotLimits(chosen.slots, chosen.max_length, chosen.max_prompt, chosen.max_answer)
    slots = SlotGenerator(model, frame, limits, seed=seed)
    deadline = None if chosen.minutes is None else started + 60 * chosen.minutes
    yield f"{sum(map(len, usable))} prompts from files, {len(openings)} openings, {chosen.slots} slots"
    log = jsonl_log(chosen.corpus / "log.jsonl")
    total = generation.generate(
        slots,
        mix.stream(seed),
        corpus,
        generation.GenerationGoal(chosen.answer_tokens, deadline),
        vocab_size=len(model.get_input_embeddings().weight),
        log=log,
    )
    seconds = time.monotonic() - started
    yield f"{total} answer tokens in {seconds:.0f} s; {chosen.corpus} has {len(corpus.shards)} shards"


def train(chosen: Namespace) -> Iterator[str]:
    """Train a drafter on a corpus, or go on training it."""
    if chosen.steps is None and chosen.minutes is None:
        raise InvalidArgument.of("--steps", "or --minutes must be given", None, "give one of them")
    deadline = None if chosen.pause_after is None else time.monotonic() + 60 * chosen.pause_after
    sequences, held_out, dropped = training_data(
        chosen.corpus, chosen.target, chosen.keep_out, chosen.held_out, chosen.seed
    )
    if not 0 < chosen.data_share <= 1:
        raise InvalidArgument.of(
            "--data-share", "must be above 0 and at most 1", chosen.data_share, "leave it out to take all"
        )
    sequences = answered(sequences, chosen.answers)
    sequences = part_of(sequences, round(chosen.data_share * sequences.answer_tokens), chosen.seed)
    model = _load(chosen)
    draft, values = _draft_to_train(chosen, model)
    yield (
        f"{len(sequences)} sequences, {sequences.answer_tokens} answer tokens; {len(held_out)} held out; "
        f"{dropped} left out because their prompt overlaps one kept out"
    )
    settings = TrainSettings(
        BatchShape(chosen.sequences, chosen.anchors, draft.config.block_size),
        chosen.steps,
        None if chosen.minutes is None else 60 * chosen.minutes,
        rate=chosen.rate,
        matrix_rate=chosen.muon_rate or None,
        weight_decay_positions=chosen.decay,
        log_seconds=chosen.log_seconds,
        seed=chosen.seed,
        compiled=chosen.compile,
    )
    trainer = make_trainer(model, draft, values, settings, chosen.output)
    if trainer.resume():
        yield f"going on from step {trainer.step}, {trainer.seconds:.0f} s"
    finished = trainer.run(sequences, held_out, deadline)
    yield f"{'done' if finished else 'paused'} at step {trainer.step} after {trainer.seconds:.0f} s"


def evaluate(chosen: Namespace) -> Iterator[str]:
    """Measure acceptance lengths of drafters against the target's answers."""
    codec, model = TextCodec.from_folder(chosen.target), _load(chosen)
    frame = ChatFrame.of(codec)
    answers = {}
    for path in chosen.prompts:
        prompts = render(codec, read_texts(path)[: chosen.limit])
        for temperature in chosen.temperatures:
            answers[path.stem, temperature] = evaluation.answer_prompts(
                model, frame, prompts, temperature=temperature, max_answer=chosen.max_answer
            )
    result = {}
    for folder in chosen.draft:
        draft, values = checkpoints.read_draft(folder, model.config)
        plain = TrainSettings(BatchShape(1, 1, draft.config.block_size), 1, None)
        trainer = make_trainer(model, draft, values, plain, folder)
        result[folder.name] = evaluation.evaluate(trainer, answers, chosen.budgets)
        yield json.dumps({folder.name: result[folder.name]})
    if chosen.result is not None:
        chosen.result.parent.mkdir(parents=True, exist_ok=True)
        chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def export(chosen: Namespace) -> Iterator[str]:
    """Write a training's drafter as a checkpoint folder."""
    draft, values = checkpoints.read_draft(chosen.training / "draft")
    state = TrainingState.load(chosen.training / "state.pt", torch.device("cpu"))
    draft.load_state_dict(state.draft)
    checkpoints.write_draft(chosen.output, draft, values, getattr(torch, chosen.dtype))
    count = sum(weight.numel() for weight in draft.parameters())
    yield f"{chosen.output}: {count} parameters, {chosen.dtype}"


def plot(chosen: Namespace) -> Iterator[str]:
    """Draw a training's log."""
    from ddtree.train.plot import draw

    draw(chosen.log, chosen.picture)
    yield f"{chosen.picture}"


def make_trainer(
    model: PreTrainedModel,
    draft: TrainedDraft,
    values: dict[str, Any],
    settings: TrainSettings,
    folder: Path,
) -> Trainer:
    """Put a drafter beside its target."""
    taps = TapReader(model, draft.config.target_layer_ids, compiled=settings.compiled)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Trainer(draft, taps, embedding, head, values, settings, folder, jsonl_log(folder / "log.jsonl"))


def _load(chosen: Namespace) -> PreTrainedModel:
    dtype = resolve_dtype(chosen.dtype, read_target_config(chosen.target))
    return load_frozen(chosen.target, dtype=dtype, device=choose_device(chosen.device))


def _draft_to_train(chosen: Namespace, model: PreTrainedModel) -> tuple[TrainedDraft, dict[str, Any]]:
    if chosen.start is not None:
        return checkpoints.read_draft(chosen.start, model.config)
    torch.manual_seed(chosen.seed)
    shape = DraftShape(
        chosen.layers, chosen.block_size, chosen.mask_token_id, chosen.taps, chosen.intermediate_size
    )
    return checkpoints.new_draft(model.config, shape)


def training_data(
    corpus: Path, target: Path, keep_out: Iterable[Path], held_out_count: int, seed: int
) -> tuple[Sequences, Sequences, int]:
    """Give training and held-out sequences, and how many were left out because of prompts to `keep_out`."""
    sequences, dropped = Corpus(corpus).read(), 0
    if texts := [text for path in keep_out for text in read_texts(path)]:
        codec = TextCodec.from_folder(target)
        frame = ChatFrame.of(codec)
        found = overlapping(sequences, encode_openings(codec, frame, texts))
        dropped = len(found)
        sequences = sequences.take(np.setdiff1d(np.arange(len(sequences)), found))
    training, held_out = split_held_out(sequences, min(held_out_count, len(sequences) // 10 + 1), seed)
    return training, held_out, dropped
