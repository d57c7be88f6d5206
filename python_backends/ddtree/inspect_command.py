"""The command `ddtree-inspect`: what two checkpoint folders are, whether they fit and, if asked, how they do.

Exit codes: 0 usable (warnings included), 1 broken or sick, 2 wrong usage. This module writes to the standard
output and reads arguments; what is said comes from `inspection` and `doctor`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ddtree.config import ServingConfig
from ddtree.doctor import Diagnosis, examine
from ddtree.errors import DDTreeError
from ddtree.inspection import Facts, Report, inspect_pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    options = _parser().parse_args(arguments)
    report = inspect_pair(options.target, options.draft, dtype=options.dtype)
    diagnosis, failure = None, ""
    if options.decode and report.is_usable:
        config = ServingConfig(
            options.target, options.draft, dtype=options.dtype, device=options.device, threads=options.threads
        )
        try:
            diagnosis = examine(config, max_tokens=options.max_tokens)
        except DDTreeError as error:
            failure = str(error)
    if options.as_json:
        _write(json.dumps(_as_object(report, diagnosis, failure), ensure_ascii=False))
    else:
        _write(render(report))
        if diagnosis is not None:
            _write(diagnosis.render())
        elif failure:
            _write(failure)
        elif options.decode:
            _write("Nothing was decoded: correct what is broken first.")
    is_well = report.is_usable and not failure and (diagnosis is None or not diagnosis.is_sick)
    return 0 if is_well else 1


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


def render(report: Report) -> str:
    """The report for people: facts side by side, then every check."""
    rows = [("", "target", "draft")]
    names = list(dict.fromkeys([*report.target, *report.draft]))
    rows += [(name, report.target.get(name, "–"), report.draft.get(name, "–")) for name in names]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {left:<{widths[1]}}  {right}".rstrip() for name, left, right in rows]
    lines += ["", *_facts("memory", report.memory), ""]
    lines += [f"{line.verdict.value:<8}{line.what}: {line.detail}" for line in report.lines]
    broken = sum(line.verdict.value == "broken" for line in report.lines)
    lines += [
        "",
        "This pair can be served." if report.is_usable else f"{broken} broken: it is refused at load.",
    ]
    return "\n".join(lines)


def _facts(title: str, facts: Facts) -> list[str]:
    return [f"{title}: {name} {value}" for name, value in facts.items()]


def _as_object(report: Report, diagnosis: Diagnosis | None, failure: str) -> dict[str, object]:
    return {
        "usable": report.is_usable,
        "target": report.target,
        "draft": report.draft,
        "memory": report.memory,
        "checks": [
            {"verdict": line.verdict.value, "what": line.what, "detail": line.detail} for line in report.lines
        ],
        "diagnosis": None if diagnosis is None else {**asdict(diagnosis), "is_sick": diagnosis.is_sick},
        "failure": failure or None,
    }


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddtree-inspect", description="Whether a draft fits a target, and what serving them needs."
    )
    parser.add_argument("target", type=Path, help="folder of the target's transformers checkpoint")
    parser.add_argument("draft", type=Path, help="folder of the draft's checkpoint")
    parser.add_argument(
        "--decode", action="store_true", help="also load the pair, decode a few prompts and judge acceptance"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="JSON, for programs")
    parser.add_argument("--dtype", default="auto", help="auto (the target's own), bfloat16, float16, float32")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens decoded per prompt")
    return parser


if __name__ == "__main__":
    run()
