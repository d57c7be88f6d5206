"""The command `ddtree-train`: generate, train, evaluate, export, plot, ablate.

Each step reads and writes folders, so that any of them can be stopped, repeated and combined. This module
reads arguments and says what happened; the work is done elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree.errors import DDTreeError
from ddtree.train import ablate, commands
from ddtree.train.corpus import ANSWERS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 when the caller's input was wrong."""
    chosen = _parser().parse_args(arguments)
    try:
        for line in chosen.run(chosen):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except DDTreeError as error:
        sys.stderr.write(f"ddtree-train: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddtree-train", description="Train a DFlash drafter for a target.")
    commands_of = parser.add_subparsers(required=True, metavar="command")
    _add_generate(commands_of.add_parser("generate", help="have the target answer prompts"))
    _add_train(commands_of.add_parser("train", help="train a drafter on a corpus"))
    _add_evaluate(commands_of.add_parser("evaluate", help="measure acceptance length"))
    _add_export(commands_of.add_parser("export", help="write a drafter's checkpoint folder"))
    ablate_parser = commands_of.add_parser("ablate", help="train with one change at a time and compare")
    _add_target(ablate_parser)
    ablate.add_arguments(ablate_parser)
    plot = commands_of.add_parser("plot", help="draw a training's log")
    plot.add_argument("log", type=Path, help="log.jsonl of a training")
    plot.add_argument("picture", type=Path, help="PNG to write")
    plot.set_defaults(run=commands.plot)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument("--corpus", type=Path, required=True, help="folder to add shards to")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="JSON lines; repeatable")
    parser.add_argument("--answer-tokens", type=int, help="stop after so many")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--slots", type=int, default=64, help="sequences at once (64; thousands on a GPU)")
    parser.add_argument("--max-length", type=int, default=448, help="tokens of prompt and answer (448)")
    parser.add_argument("--max-prompt", type=int, default=192, help="a made-up prompt ends here (192)")
    parser.add_argument("--max-answer", type=int, default=256, help="tokens of an answer (256)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="of answers (0 0.8)"
    )
    parser.add_argument(
        "--prompt-share", type=float, default=0.25, help="from files; the rest is made up (0.25)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=commands.generate)


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of this training; it goes on there"
    )
    parser.add_argument("--from", dest="start", type=Path, help="drafter folder to start from")
    parser.add_argument(
        "--keep-out", type=Path, action="append", default=[], help="evaluation prompts; repeatable"
    )
    parser.add_argument("--layers", type=int, default=4, help="of a new drafter (4)")
    parser.add_argument("--intermediate-size", type=int, help="width of a new drafter's MLPs (the target's)")
    parser.add_argument("--block-size", type=int, default=16, help="of a new drafter (16)")
    parser.add_argument("--mask-token-id", type=int, default=16, help="a token that text never holds (16)")
    parser.add_argument("--taps", type=int, nargs="+", default=[], help="target layers (spread evenly)")
    parser.add_argument("--minutes", type=float, help="train so long, in all")
    parser.add_argument("--steps", type=int, help="train so many steps")
    parser.add_argument(
        "--pause-after", type=float, help="stop after so many minutes of this run, to go on later"
    )
    parser.add_argument("--sequences", type=int, default=16, help="per step (16)")
    parser.add_argument("--anchors", type=int, default=16, help="blocks per sequence (16)")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's peak learning rate (1e-3)")
    parser.add_argument("--muon-rate", type=float, default=0.02, help="Muon's; 0: AdamW for all (0.02)")
    parser.add_argument(
        "--decay", type=float, default=7.0, help="of the loss over draft positions; 0: none (7)"
    )
    parser.add_argument(
        "--answers", choices=ANSWERS, default="all", help="to train on, by how their tokens were chosen (all)"
    )
    parser.add_argument(
        "--data-share", type=float, default=1.0, help="of those answers' tokens to train on (1)"
    )
    parser.add_argument("--held-out", type=int, default=512, help="sequences never trained on (512)")
    parser.add_argument("--compile", action="store_true", help="compile the drafter; pays on a GPU")
    parser.add_argument("--log-seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=commands.train)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument(
        "--draft", type=Path, action="append", required=True, help="drafter folder; repeatable"
    )
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="JSON lines; repeatable")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64], help="of trees (16 32 64)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of answers (0)")
    parser.add_argument("--max-answer", type=int, default=256, help="new tokens (256)")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file (40)")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    parser.set_defaults(run=commands.evaluate)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--training", type=Path, required=True, help="a training's folder")
    parser.add_argument("--output", type=Path, required=True, help="drafter folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.set_defaults(run=commands.export)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="target checkpoint folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), bfloat16 or float32")


if __name__ == "__main__":
    raise SystemExit(main())
