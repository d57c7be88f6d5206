"""The command `ddtree-trtllm-check`: does engine trtllm work here? For a machine with NVIDIA's image.

    1  contract  the installed objects against what was recorded, difference by difference
    2  trees     tree logits, context features and relocated rows against plain steps over every path
    3  greedy    tokens decoded with trees against the engine's own greedy decoding
    4  paths     what a tree step says after each node against the engine asked with its path as a prompt

Exit codes: 0 all hold, 1 one does not or TensorRT-LLM is not installed, 2 wrong usage. Writes to the standard
output.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.errors import DDTreeError
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.text import TextCodec
from ddtree.trtllm.check import check_trees, node_answers
from ddtree.trtllm.contract import NATIVE, TREE, Importer
from ddtree.trtllm.library import PACKAGE, compare_all, installed_version, open_library
from ddtree.trtllm.pool import EnginePool
from ddtree.trtllm.rehearse import OwnEngine, Rehearsed, decode_plainly, decode_with_trees
from ddtree.trtllm.stage import load_tree_verifier
from ddtree.trtllm.target import EngineTarget

_PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")

_MOST_TIES = 0.1  # share of nodes whose two best tokens may be too near to tell apart in 16 bits


class _Failed(Exception):
    """A part does not hold; the message says how."""


def main(arguments: Sequence[str] | None = None, importer: Importer = importlib.import_module) -> int:
    """Run the command; gives the exit code."""
    options = _parser().parse_args(arguments)
    try:
        for line in _run(options, importer):
            _write(line)
    except (DDTreeError, _Failed) as error:
        _write(f"FAILED  {error.args[0]}")
        return 1
    _write("All hold. Nobody but you has run this on a real engine yet: please tell us the version.")
    return 0


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


def _run(options: argparse.Namespace, importer: Importer) -> Iterator[str]:
    yield f"{PACKAGE} {installed_version(importer)}"
    yield from _contracts(importer)
    if options.contract_only:
        return
    config = ServingConfig(
        options.target, options.draft, engine="trtllm", dtype=options.dtype, device=options.device,
        page_size=options.page_size, kv_cache_mib=options.kv_cache_mib, max_nodes=64,
    )  # fmt: skip
    draft = open_checkpoint(config.draft)
    verifier = load_tree_verifier(
        config, draft, lambda target: assembly.build_verifier(config, draft, target), importer
    )
    target, pool = verifier.target, verifier.pool
    assert isinstance(target, EngineTarget), "the tree path makes an engine's target"
    assert isinstance(pool, EnginePool), "and an engine's pool"
    for seed in range(3):
        check = check_trees(target, pool, seed=seed)
        if not check.is_right:
            raise _Failed(f"trees     {check}")
        yield f"trees     {check}"
    codec = TextCodec.from_folder(config.target)
    prompts = [codec.encode(prompt) for prompt in _PROMPTS]
    # Plain steps first: the engine's own object takes the memory that is left.
    guesses = [decode_plainly(verifier, prompt, options.max_tokens) for prompt in prompts]
    with_trees = [decode_with_trees(verifier, p, g) for p, g in zip(prompts, guesses, strict=True)]
    answers = node_answers(target, pool, prompts[0])
    target.engine.shutdown()
    del verifier, target, pool
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine = OwnEngine(open_library(NATIVE, importer), config.target)
    own = [engine.greedy(prompt, options.max_tokens) for prompt in prompts]
    for text, expected, found in zip(_PROMPTS, own, with_trees, strict=True):
        yield _compared(text, Rehearsed(found.prompt, expected, found.got, found.accepted))
    wrong = sum(engine.greedy(path, 1) != (token,) for path, token in answers)
    if wrong > _MOST_TIES * len(answers):
        raise _Failed(f"paths     {wrong} of {len(answers)} nodes differ")
    yield f"paths     {len(answers) - wrong} of {len(answers)} nodes equal"


def _contracts(importer: Importer) -> Iterator[str]:
    for group in (TREE, NATIVE):
        best = compare_all(group, importer)[0]
        for difference in best.differences:
            yield f"contract  {'BREAKS' if difference.breaks else 'differs'}  {difference}"
        if best.unknown:
            yield f"contract  unknown  {', '.join(best.unknown)}: what we pass was checked, nothing else"
        if best.breaking:
            raise _Failed(f"contract  no recorded one fits for {group}; the nearest is {best.contract.name}")
        yield f"contract  {best.contract.name} fits for {group}"


def _compared(text: str, rehearsed: Rehearsed) -> str:
    at = rehearsed.first_difference
    if at is not None:
        raise _Failed(
            f"greedy    {text!r}: token {at} is {rehearsed.got[at]}, the engine's own is "
            f"{rehearsed.expected[at]}; if both are nearly as probable, this is rounding: try --dtype float32"
        )
    return f"greedy    {text!r}: {len(rehearsed.got)} tokens equal, {rehearsed.accepted} of them from trees"


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddtree-trtllm-check",
        description="Whether engine trtllm verifies trees rightly on this machine.",
    )
    parser.add_argument("target", type=Path, help="folder of the target's transformers checkpoint")
    parser.add_argument("draft", type=Path, help="folder of the draft's checkpoint")
    parser.add_argument("--contract-only", action="store_true", help="compare signatures and load nothing")
    parser.add_argument("--dtype", default="auto", help="auto (the target's own), bfloat16, float16, float32")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1 …")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a block: 32, 64 or 128")
    parser.add_argument("--kv-cache-mib", type=int, default=512, help="of the trial")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens decoded per prompt")
    return parser


if __name__ == "__main__":
    run()
