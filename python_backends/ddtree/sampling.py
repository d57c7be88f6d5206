"""How the target's token is chosen at a node, with that node's own prefix.

`choose` is the plain case: the largest logit. `PathSampler` is everything else a request can ask for: it
follows one path per sequence, so that penalties, bad words, the grammar and the noise's position are those of
the node it stands on, and draws the target's token there. The acceptance walk follows whatever is chosen
here. This module knows no trees and no cache.

Order at a node: grammar, bad words and stop ids before `min_tokens` (all forbid), logit bias, penalties, then
temperature, top-k, top-p, min-p (`logits_process`), then argmax over log-probability + noise (`noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree.grammar import Matcher, unpack_words
from ddtree.logits_process import Cuts, Penalties, penalise, temper_and_cut
from ddtree.noise import gumbel
from ddtree.sampling_spec import SamplingSpec


def choose(logits: torch.Tensor) -> torch.Tensor:
    """The target's token for each row of `[rows, V]`: the first of the largest logits, `[rows]` int64."""
    # On a CPU argmax over bfloat16 takes five times as long as converting first; a GPU would only write more.
    return (logits.float() if logits.device.type == "cpu" else logits).argmax(dim=-1)


class SamplerState:
    """What choosing needs to remember of one session's committed tokens."""

    def __init__(
        self, spec: SamplingSpec, *, vocab_size: int, device: torch.device, matcher: Matcher | None = None
    ) -> None:
        """Begin before the first token.

        Args:
            spec: the sequence's settings.
            vocab_size: V.
            device: where the logits will be.
            matcher: at the beginning of the output, when the spec has a grammar.
        """
        assert (matcher is None) == (spec.grammar is None), "a grammar needs a matcher, and only a grammar"
        self.spec = spec
        self.length = 0  # committed tokens
        self.matcher = matcher
        self.tail: list[int] = []  # the last committed tokens, as many as a bad word may need
        self._tail_length = max((len(word) - 1 for word in spec.bad_words), default=0)
        self.output_counts: torch.Tensor | None = None  # [V] int32, only with penalties
        self.is_in_prompt: torch.Tensor | None = None  # [V] bool
        if spec.has_penalty:
            self.output_counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self.is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)

    def push(self, tokens: Sequence[int]) -> None:
        """Take tokens that are committed now."""
        in_prompt = max(0, min(len(tokens), self.spec.prompt_length - self.length))
        self.length += len(tokens)
        output = tokens[in_prompt:]
        if self.output_counts is not None and self.is_in_prompt is not None:
            device = self.output_counts.device
            self.is_in_prompt[torch.tensor(tokens[:in_prompt], dtype=torch.int64, device=device)] = True
            ids = torch.tensor(output, dtype=torch.int64, device=device)
            self.output_counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        if self._tail_length:
            self.tail = [*self.tail, *tokens][-self._tail_length :]
        if self.matcher is not None:
            self.matcher.advance(output)


@dataclass(frozen=True)
class Draws:
    """The target's tokens at the nodes that some sequences stand on, and the distributions behind them."""

    tokens: torch.Tensor  # [A] int64
    model_logits: torch.Tensor  # [A, V] float32, as the model gave them
    drawn_logits: torch.Tensor  # [A, V] float32, of the distribution drawn from; at temperature 0 not cut


class PathSampler:
    """Walks one path per sequence and draws at every node of it; the sessions' states stay as they are."""

    def __init__(self, states: Sequence[SamplerState], device: torch.device) -> None:
        """Stand where the states stand."""
        specs = [state.spec for state in states]
        self._specs = specs
        self._device = device
        self._lengths = [state.length for state in states]
        self._cuts = Cuts.of(specs, device)
        self._seeds = torch.tensor([_signed(spec.seed) for spec in specs], device=device)
        self._indices = torch.tensor([spec.sequence_index for spec in specs], device=device)
        self._is_greedy = [spec.temperature == 0 for spec in specs]
        self._tails = {row: list(state.tail) for row, state in enumerate(states) if state.spec.bad_words}
        self._matchers = {
            row: state.matcher.fork() for row, state in enumerate(states) if state.matcher is not None
        }
        self._penalised = [row for row, state in enumerate(states) if state.output_counts is not None]
        self._penalties = _collect([states[row] for row in self._penalised], device)
        self._is_constrained = [bool(spec.bad_words or spec.min_tokens or spec.logit_bias) for spec in specs]

    def advance(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Let each of `rows` step to the child that holds its token; `rows` ascend."""
        for row, token in zip(rows, tokens, strict=True):
            self._lengths[row] += 1
            if row in self._tails:
                self._tails[row].append(token)
            if row in self._matchers:
                self._matchers[row].advance([token])
        if self._penalties is not None:
            taken = dict(zip(rows, tokens, strict=True))
            places = [place for place, row in enumerate(self._penalised) if row in taken]
            ids = [taken[self._penalised[place]] for place in places]
            # Only output is advanced over: the prompt is committed before the first draw.
            self._penalties.output_counts[places, ids] += 1

    def draw(self, rows: Sequence[int], logits: torch.Tensor) -> Draws:
        """Draw the target's token at the node each of `rows` stands on.

        Args:
            rows: sequences, ascending.
            logits: `[len(rows), V]`, the model's at those nodes; any float type.
        """
        model_logits = logits.float()
        index = torch.tensor(rows, device=self._device)
        adjusted = self._penalise(rows, self._constrain(rows, model_logits))
        scaled = temper_and_cut(adjusted, self._cuts.rows(index))
        scores = scaled
        drawn = [place for place, row in enumerate(rows) if not self._is_greedy[row]]
        if drawn:
            drawn_rows = [rows[place] for place in drawn]
            positions = torch.tensor([self._lengths[row] for row in drawn_rows], device=self._device)
            at = torch.tensor(drawn_rows, device=self._device)
            noise = gumbel(self._seeds[at], self._indices[at], positions, logits.shape[1])
            if len(drawn) == len(rows):
                scores = scaled + noise
            else:
                scores = scaled.index_add(0, torch.tensor(drawn, device=self._device), noise)
        return Draws(scores.argmax(dim=-1), model_logits, scaled)

    def failures(self) -> list[int]:
        """Rows whose grammar cannot be followed any further; their draws mean nothing."""
        return [row for row, matcher in self._matchers.items() if matcher.failure is not None]

    def _constrain(self, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Forbid and bias, for the rows that ask for it."""
        guided = [place for place, row in enumerate(rows) if row in self._matchers]
        forbidden: list[tuple[int, int]] = []  # (place, token id)
        biased: list[tuple[int, int]] = []
        biases: list[float] = []
        for place, row in enumerate(rows):
            if self._is_constrained[row]:
                forbidden += [(place, token) for token in self._forbidden(row)]
                for token, bias in self._specs[row].logit_bias:
                    biased.append((place, token))
                    biases.append(bias)
        if not (guided or forbidden or biased):
            return logits
        logits = logits.clone()  # the model's own are still to be reported
        device = logits.device
        if guided:
            words = torch.stack([self._matchers[rows[place]].allowed_words() for place in guided])
            at = torch.tensor(guided, device=device)
            allowed = unpack_words(words.to(device), logits.shape[1])
            logits[at] = logits[at].masked_fill(~allowed, -torch.inf)
        if forbidden:
            places, tokens = torch.tensor(forbidden, device=device).unbind(dim=1)
            logits[places, tokens] = -torch.inf
        if biased:
            places, tokens = torch.tensor(biased, device=device).unbind(dim=1)
            logits[places, tokens] += torch.tensor(biases, device=device)
        return logits

    def _forbidden(self, row: int) -> list[int]:
        spec = self._specs[row]
        tail = tuple(self._tails.get(row, ()))
        forbidden = [
            word[-1] for word in spec.bad_words if len(word) == 1 or tail[-(len(word) - 1) :] == word[:-1]
        ]
        if self._lengths[row] - spec.prompt_length < spec.min_tokens:
            forbidden += spec.stop_ids
        return forbidden

    def _penalise(self, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if self._penalties is None:
            return logits
        wanted = set(rows)
        kept = [place for place, row in enumerate(self._penalised) if row in wanted]
        if not kept:
            return logits
        penalties = self._penalties if len(kept) == len(self._penalised) else _rows(self._penalties, kept)
        if len(kept) == len(rows):
            return penalise(logits, penalties)
        places = {row: place for place, row in enumerate(rows)}
        at = torch.tensor([places[self._penalised[place]] for place in kept], device=logits.device)
        return logits.index_copy(0, at, penalise(logits[at], penalties))


def _collect(states: Sequence[SamplerState], device: torch.device) -> Penalties | None:
    """Copy the states' counts, so that walking does not change them."""
    if not states:
        return None
    counts = [state.output_counts for state in states if state.output_counts is not None]
    prompts = [state.is_in_prompt for state in states if state.is_in_prompt is not None]
    numbers = torch.tensor(
        [(s.spec.repetition_penalty, s.spec.presence_penalty, s.spec.frequency_penalty) for s in states],
        dtype=torch.float32,
        device=device,
    )
    return Penalties(torch.stack(counts), torch.stack(prompts), *numbers.split(1, dim=1))


def _rows(penalties: Penalties, places: Sequence[int]) -> Penalties:
    index = torch.tensor(places, device=penalties.repetition.device)
    return Penalties(
        penalties.output_counts[index],
        penalties.is_in_prompt[index],
        penalties.repetition[index],
        penalties.presence[index],
        penalties.frequency[index],
    )


def _signed(seed: int) -> int:
    """The same 64 bits as int64."""
    return seed - (seed >> 63 << 64)
