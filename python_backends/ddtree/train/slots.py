"""Generates with many slots at once: one target step a token, and all that it decides stays on the device.

A slot's next token is *forced* while its script has one, else the target chooses it. So prompts need no
forward of their own, and a slot that finishes takes the next prompt while the others go on. On CUDA the step
is one captured graph. This module knows the chat frame's ids, not where prompts come from or answers go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ddtree.errors import InvalidArgument
from ddtree.train.decode_attention import SlotCache, check_window
from ddtree.train.prompts import ChatFrame, Prompt

_FREE = -1  # in a script: the target chooses
_SEED_STRIDE = 1_000_003  # steps before two seeds share noise; torch's CPU generator reads 32 bits of one
_TURN_TEMPERATURE = 1.0  # of made-up user turns


@dataclass(frozen=True)
class SlotLimits:
    """Sizes of a generator."""

    slots: int
    max_length: int  # tokens of a sequence, prompt included
    max_prompt: int  # a made-up turn is ended here
    max_answer: int

    def __post_init__(self) -> None:
        if not 0 < self.max_prompt < self.max_length:
            raise InvalidArgument.of(
                "max_prompt", f"must be between 1 and max_length {self.max_length} - 1", self.max_prompt,
                "leave room for answers",
            )  # fmt: skip


@dataclass(frozen=True)
class Generated:
    """One finished sequence."""

    ids: torch.Tensor  # [n] int32 on the CPU: prompt and answer, an end token included
    answer_start: int
    prompt: Prompt
    is_whole: bool  # ended by an end token, not by a limit


class SlotGenerator:
    """A frozen target that answers prompts in slots.

    `tokens[slot, :positions + 1]` are known, and the last of them is the next step's input.
    """

    def __init__(
        self, model: PreTrainedModel, frame: ChatFrame, limits: SlotLimits, *, seed: int = 0
    ) -> None:
        config = model.config.get_text_config()
        check_window(config, limits.max_length)
        self.limits, self._model, self._frame = limits, model, frame
        self._device = model.device
        embedding = model.get_input_embeddings().weight
        self._cache = SlotCache.empty(config, limits.slots, limits.max_length, embedding)
        slots, length = limits.slots, limits.max_length
        self._positions = self._cache.positions
        self._tokens = torch.zeros(slots, length, dtype=torch.int64, device=self._device)
        self._script = torch.full((slots, length), _FREE, device=self._device)
        self._answer_start = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._temperature = torch.zeros(slots, device=self._device)
        self._is_done = torch.ones(slots, dtype=torch.bool, device=self._device)
        self._is_whole = torch.zeros_like(self._is_done)
        first = seed * _SEED_STRIDE % (1 << 31)
        self._seed = torch.full((1,), first, dtype=torch.int64, device=self._device)
        self._all = torch.arange(slots, device=self._device)
        self._stops = torch.tensor(sorted(frame.stop_ids), device=self._device)
        self._after_turn = torch.tensor((frame.turn_end, *frame.tail), device=self._device)
        self._prompts: list[Prompt | None] = [None] * slots
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prefill_head()

    @torch.inference_mode()
    def run(self, prompts: Iterator[Prompt], *, steps_between: int = 16) -> Iterator[list[Generated]]:
        """Give finished sequences every `steps_between` steps until prompts and slots are empty."""
        self._refill(list(range(self.limits.slots)), prompts)
        while any(prompt is not None for prompt in self._prompts):
            for _ in range(steps_between):
                self._advance()
            done = self._is_done.tolist()
            finished = [
                slot for slot, prompt in enumerate(self._prompts) if prompt is not None and done[slot]
            ]
            results = self._collect(finished)
            self._refill([slot for slot in range(self.limits.slots) if done[slot]], prompts)
            yield results

    @torch.inference_mode()
    def unfinished(self) -> list[Generated]:
        """Give what slots hold of answers that have not ended, for a caller that stops early."""
        starts, lengths = self._answer_start.tolist(), (self._positions + 1).tolist()
        return self._collect(
            [
                slot
                for slot, prompt in enumerate(self._prompts)
                if prompt is not None and 0 < starts[slot] < lengths[slot] - 1
            ]
        )

    def _prefill_head(self) -> None:
        """Compute the chat frame's head in every slot once: all prompts start with it."""
        head = Prompt(self._frame.head, 0, 0.0, 0)
        self._refill(list(range(self.limits.slots)), iter([head] * self.limits.slots), from_start=True)
        with torch.inference_mode():
            for _ in self._frame.head[1:]:
                self._step()
        self._prompts = [None] * self.limits.slots
        self._is_done.fill_(True)

    def _refill(self, free: list[int], prompts: Iterator[Prompt], *, from_start: bool = False) -> None:
        """Put the next prompts into free slots; a slot without one stays done."""
        taken: list[int] = []
        scripts = []
        starts, temperatures = [], []
        length, head = self.limits.max_length, len(self._frame.head)
        for slot in free:
            prompt = next(prompts, None)
            while prompt is not None and len(prompt.ids) + 2 > length:
                prompt = next(prompts, None)  # too long to answer
            self._prompts[slot] = prompt
            if prompt is None:
                continue
            assert prompt.ids[:head] == self._frame.head, "prompts start with the chat frame's head"
            taken.append(slot)
            scripts.append(prompt.ids)
            starts.append(prompt.answer_start)
            temperatures.append(prompt.temperature)
        if not taken:
            return
        places = torch.tensor(taken, device=self._device)
        script = np.full((len(taken), length), _FREE, np.int64)
        for row, ids in enumerate(scripts):
            script[row, : len(ids)] = ids
        rows = torch.from_numpy(script).to(self._device)
        self._script[places] = rows
        self._tokens[places] = rows.clamp(min=0)
        self._answer_start[places] = torch.tensor(starts).to(self._device)
        self._temperature[places] = torch.tensor(temperatures).to(self._device)
        self._positions[places] = 0 if from_start else head - 1
        self._is_done[places] = False
        self._is_whole[places] = False

    def _collect(self, slots: list[int]) -> list[Generated]:
        if not slots:
            return []
        places = torch.tensor(slots, device=self._device)
        tokens = self._tokens[places].int().cpu()
        lengths, starts = (self._positions[places] + 1).tolist(), self._answer_start[places].tolist()
        whole = self._is_whole[places].tolist()
        results = []
        for row, slot in enumerate(slots):
            prompt = self._prompts[slot]
            if prompt is not None and starts[row] and lengths[row] > starts[row]:
                results.append(Generated(tokens[row, : lengths[row]], starts[row], prompt, whole[row]))
        return results

    def _advance(self) -> None:
        if self._device.type != "cuda":
            self._step()
            return
        if self._graph is None:
            self._step()  # compiles kernels: nothing may be compiled inside a capture
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self._graph.replay()

    def _step(self) -> None:
        """One target step of all slots; every tensor is changed in place, so that a graph can hold it."""
        positions = self._positions
        inputs = self._tokens.gather(1, positions[:, None])
        output = self._model(
            input_ids=inputs,
            position_ids=positions[:, None],
            use_cache=False,
            ddtree_slots=self._cache,
        )
        in_turn = self._answer_start == 0
        temperature = torch.where(in_turn, _TURN_TEMPERATURE, self._temperature)
        self._seed += 1
        sampled = self._choose(output.logits[:, -1], temperature)
        last = self.limits.max_length - 1
        place = (positions + 1).clamp(max=last)
        scripted = self._script.gather(1, place[:, None])[:, 0]
        is_free = scripted == _FREE
        is_stop = (sampled[:, None] == self._stops).any(1)
        # A made-up turn ends with the frame's own token, with an answer's end, or at its limit.
        ends_turn = (
            is_free & in_turn & (is_stop | (sampled == self._frame.turn_end) | self._turn_is_full(place))
        )
        token = torch.where(is_free, torch.where(ends_turn, self._frame.turn_end, sampled), scripted)
        active = ~self._is_done
        self._write_tail(ends_turn & active, place)
        self._tokens[self._all, place] = torch.where(
            active, token, self._tokens.gather(1, place[:, None])[:, 0]
        )
        in_answer = (self._answer_start > 0) & (place >= self._answer_start)
        answered = place - self._answer_start + 1
        is_end = active & in_answer & (is_stop & is_free)
        is_full = active & ((place >= last) | (in_answer & (answered >= self.limits.max_answer)))
        self._is_whole |= is_end
        positions.copy_(torch.where(active, place, positions))
        self._is_done |= is_end | is_full

    def _turn_is_full(self, place: torch.Tensor) -> torch.Tensor:
        return place + len(self._frame.tail) + 1 >= self.limits.max_prompt

    def _write_tail(self, ends: torch.Tensor, place: torch.Tensor) -> None:
        """Where a made-up turn ends at `place`, force the frame's tail and mark the answer's start."""
        last = self.limits.max_length - 1
        for offset in range(1, len(self._after_turn)):
            at = (place + offset).clamp(max=last)[:, None]
            forced = torch.where(ends[:, None], self._after_turn[offset], self._script.gather(1, at))
            self._script.scatter_(1, at, forced)
        start = place + len(self._after_turn)
        self._answer_start.copy_(torch.where(ends, start, self._answer_start))

    def _choose(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Draw a token per slot by Gumbel noise, scaled so that temperature 0 is greedy."""
        if logits.is_cuda:
            from ddtree.train.kernels import choose_tokens

            return choose_tokens(logits.contiguous(), temperatures, self._seed)
        generator = torch.Generator().manual_seed(int(self._seed))
        uniform = torch.rand(logits.shape, generator=generator).clamp(min=1e-10)
        noise = -torch.log(-torch.log(uniform))
        chosen: torch.Tensor = (logits.float() + temperatures[:, None] * noise).argmax(-1)
        return chosen
