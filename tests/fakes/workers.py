"""What tests of a target divided among processes share: requests, and which workers are left."""

from __future__ import annotations

import os
import random
from pathlib import Path

from ddtree.params import GenerationParams
from tests.fakes.tiny_models import EOS_ID


def requests(max_tokens: int = 24) -> list[GenerationParams]:
    """Prompts of several lengths, two of which share whole pages, with budgets from 0 to 40."""
    source = random.Random(3)
    shared = tuple(source.randrange(256) for _ in range(40))
    prompts = [shared, (*shared, 5), (9, 8), tuple(source.randrange(256) for _ in range(33))]
    return [
        GenerationParams(prompt, max_tokens=max_tokens, tree_budget=budget, stop_ids=frozenset({EOS_ID}))
        for prompt, budget in zip(prompts, (16, 5, 40, 0), strict=True)
    ]


def workers_left() -> list[str]:
    """Command lines of this process's worker processes.

    By each process's parent: children are listed by thread, and one that ends meanwhile hands its own on.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_bytes().decode()
        except OSError:
            continue  # it has ended
        if parent == os.getpid() and "ddtree.parallel.worker" in command:
            found.append(command)
    return found
