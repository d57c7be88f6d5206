"""The public `dflash` package on the same GPU, as its own command drives it, for a comparison.

Its model file is loaded from a folder by path: it is no requirement of this project, and pins another release
of transformers than ours; on ours it runs. Only greedy decoding of one sequence is used.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.timing import synchronise
from benchmarks.measurement import Answer, Job

_FILE = Path("dflash") / "model.py"


class DFlashPlayer:
    """Target and draft, loaded by the package's own classes."""

    def __init__(
        self, folder: Path, *, target: Path, draft: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Load both.

        Raises:
            BenchmarkError: the folder has no such package, or it does not run on what is installed.
        """
        package = _load(folder / _FILE)
        options: Any = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
        self._device = device
        self._target: Any = AutoModelForCausalLM.from_pretrained(target, **options).eval().to(device)
        self._draft: Any = package.DFlashDraftModel.from_pretrained(draft, **options).eval().to(device)
        self._generate: Any = package.dflash_generate
        self._forwards = 0
        self._first_end = 0.0
        self._target.register_forward_hook(self._note_forward)

    def _note_forward(self, *_: object) -> None:
        self._forwards += 1
        if self._forwards == 1:  # the prompt's: only here is the device waited for
            synchronise(self._device)
            self._first_end = time.perf_counter()

    def decode(self, job: Job) -> Answer:
        """Decode one prompt greedily."""
        input_ids = torch.tensor([job.input_ids], device=self._device)
        self._forwards = 0
        synchronise(self._device)
        start = time.perf_counter()
        output = self._generate(
            self._draft,
            self._target,
            input_ids,
            max_new_tokens=job.max_tokens,
            stop_token_ids=list(job.stop_ids),
        )
        token_ids = tuple(output[0, input_ids.shape[1] :].tolist())
        total_s = time.perf_counter() - start
        return Answer(
            token_ids=token_ids,
            first_tokens=1,
            first_s=self._first_end - start,
            total_s=total_s,
            rounds=self._forwards - 1,
            nodes=float(self._draft.block_size - 1),
        )

    def close(self) -> None:
        """Drop the weights."""
        self._target = self._draft = None


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("dflash_model", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BenchmarkError(
            f"--dflash: no {_FILE} in {path.parent.parent}; unpack the wheel dflash 0.1.0 there"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, AttributeError) as error:
        raise BenchmarkError(f"dflash does not run on the installed transformers ({error})") from None
    return module
