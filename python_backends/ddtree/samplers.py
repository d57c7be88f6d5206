"""Opens the sampling state of a verifier session from the settings that came with it. Knows no model."""

from __future__ import annotations

import torch

from ddtree.errors import InvalidArgument
from ddtree.grammar import GrammarCompiler
from ddtree.sampling import SamplerState
from ddtree.sampling_spec import SamplingSpec


class Samplers:
    """Makes sampler states for one target."""

    def __init__(self, vocab_size: int, device: torch.device, grammars: GrammarCompiler | None) -> None:
        """Take what every state needs; without a compiler no sequence can be guided."""
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars

    def open(self, settings: str) -> SamplerState | None:
        """The state of a sequence with these settings (`SamplingSpec.to_json`), or None for a plain one.

        Raises:
            InvalidArgument: its grammar cannot be used here.
        """
        spec = SamplingSpec.from_json(settings)
        if spec.is_plain:
            return None
        matcher = None
        if spec.grammar is not None:
            if self._grammars is None:
                raise InvalidArgument(
                    f"guided_{spec.grammar.kind} is not served by this verifier; leave it out"
                )
            matcher = self._grammars.matcher(spec.grammar)
        return SamplerState(spec, vocab_size=self._vocab_size, device=self._device, matcher=matcher)
