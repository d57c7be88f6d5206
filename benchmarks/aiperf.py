"""aiperf against the gateway on a real server with the demo pair: a stranger's measurement of the whole way.

aiperf brings a gigabyte of its own, so it gets an environment in `.cache/` and is not part of the tests. What
is written is aiperf's: times, and the acceptance that it reads from `metrics.speculative_decoding`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import gateway
from benchmarks.machine import describe_machine
from benchmarks.report import write_result
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.project import find_project
from ddtree_local.serving import ServedPair, local_server

_HERE = Path(__file__).resolve().parent
_VERSION = "aiperf==0.13.0"
_TIMES = ("time_to_first_token", "inter_token_latency", "request_latency", "output_token_throughput_per_user")
_FLAGS = ("--streaming", "--use-server-token-count")
_KEPT = ("avg", "p50", "p95", "unit")


def ensure_aiperf(folder: Path, python: str) -> Path:
    """The command, installed into an environment of its own where it is not yet."""
    command = folder / "bin" / "aiperf"
    if not command.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", _VERSION], check=True)
    return command


def profile(command: Path, url: str, tokenizer: Path, out: Path, *, requests: int, concurrency: int) -> Any:
    """Run aiperf and give what it exports."""
    arguments = {
        "--model": "ddtree",
        "--url": url,
        "--endpoint-type": "chat",
        "--tokenizer": str(tokenizer),
        "--request-count": str(requests),
        "--concurrency": str(concurrency),
        "--isl": "48",
        "--osl": "48",
        "--extra-inputs": "temperature:0",
        "--output-artifact-dir": str(out),
        "--ui": "none",
    }
    # Offline mode would also refuse a tokenizer that lies on this machine.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    flat = [word for pair in arguments.items() for word in pair]
    subprocess.run([str(command), "profile", *flat, *_FLAGS], env=environment, check=True, timeout=500)
    (found,) = out.rglob("profile_export_aiperf.json")
    return json.loads(found.read_text())


def chosen(export: dict[str, Any]) -> dict[str, Any]:
    """The numbers worth keeping: times, errors, and everything about speculation."""
    names = [*_TIMES, *(name for name in export if "spec" in name or "accept" in name)]
    rows = {name: export[name] for name in names if isinstance(export.get(name), dict)}
    kept = {name: {key: row[key] for key in _KEPT if key in row} for name, row in rows.items()}
    return {"requests": export["request_count"]["avg"], "errors": export.get("error_summary", []), **kept}


@click.command()
@click.option("--requests", default=24, show_default=True)
@click.option("--concurrency", default=2, show_default=True)
@click.option("--python", default="python3.12", show_default=True, help="Interpreter for aiperf.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results" / "aiperf.json")
def main(requests: int, concurrency: int, python: str, out: Path) -> None:
    """Let aiperf measure the gateway and the server behind it."""
    project = find_project()
    command = ensure_aiperf(project.root / ".cache" / "aiperf", python)
    pair = ServedPair(ensure_demo_target(project.demo_target_cache), project.demo_draft, "in_process")
    machine = describe_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        local_server(project, pair) as triton,
        gateway(triton.grpc_url) as (url, _),
    ):
        export = profile(command, url, pair.target, Path(folder), requests=requests, concurrency=concurrency)
    result = chosen(export)
    write_result({"what": _VERSION, "machine": machine, "concurrency": concurrency, **result}, out)
    table = Table("number", *_KEPT)
    for name, row in result.items():
        if isinstance(row, dict):
            table.add_row(name, *(str(row.get(key, "")) for key in _KEPT))
    Console().print(table, result["requests"], "requests; errors:", result["errors"] or "none")


if __name__ == "__main__":
    main()
