"""NVIDIA's perf_analyzer against the server: brought from the wheel that has the binary, run, and read.

The binary is in tritonclient's wheel of 2.51.0 (that of the package perf-analyzer is for newer systems only).
It needs CUDA's runtime library, which comes as a wheel, and libb64, a package of Debian and Ubuntu that is
unpacked beside it: nothing is installed.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_WHEELS = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79")
_SYSTEM_PACKAGE = "libb64-0d"
_COMPLETE = ".complete"
_LIMIT_S = 240


@dataclass(frozen=True)
class PerfAnalyzer:
    """The binary and where its libraries are."""

    binary: Path
    libraries: tuple[Path, ...]


@dataclass(frozen=True)
class Measured:
    """What it says of one concurrency."""

    streams: int
    requests_per_second: float
    responses_per_second: float
    request_p50_ms: float
    request_p95_ms: float

    def row(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self)


def bring_perf_analyzer(cache: Path) -> PerfAnalyzer:
    """The tool, from the cache or from the package index.

    Raises:
        RuntimeError: it cannot be brought or does not run here; the message says why.
    """
    if not (cache / _COMPLETE).is_file():
        _download(cache)
        (cache / _COMPLETE).touch()
    binary = next(each for each in cache.rglob("perf_analyzer") if each.is_file())
    binary.chmod(0o755)
    tool = PerfAnalyzer(
        binary,
        (cache / "nvidia" / "cuda_runtime" / "lib", cache / "usr" / "lib" / "x86_64-linux-gnu"),
    )
    tried = subprocess.run(
        [binary, "--version"], env=_environment(tool), capture_output=True, text=True, check=False
    )
    if tried.returncode not in (0, 1) or "error while loading" in tried.stderr:
        raise RuntimeError(f"perf_analyzer does not run here: {tried.stderr.strip()}")
    return tool


def _download(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    fetched = subprocess.run(
        [*command, "-d", str(cache), *_WHEELS], capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        raise RuntimeError(f"pip cannot bring {', '.join(_WHEELS)}: {fetched.stderr.strip()}")
    for wheel in cache.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(cache)
        wheel.unlink()
    # Where this fails the system may have the library: the first run tells.
    subprocess.run(
        ["apt-get", "download", "--quiet", _SYSTEM_PACKAGE], cwd=cache, capture_output=True, check=False
    )
    for package in cache.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(cache)], check=True)
        package.unlink()


def measure(tool: PerfAnalyzer, url: str, streams: int, prompt: str, max_tokens: int) -> Measured:
    """Run it at one concurrency over gRPC streams.

    Raises:
        RuntimeError: it failed; the message is what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "data.json", Path(folder) / "report.csv"
        request = {"text_input": [prompt], "max_tokens": [max_tokens], "stream": [True], "ignore_eos": [True]}
        data.write_text(json.dumps({"data": [request]}))
        # Inputs whose shape the model leaves open must be given one, even those that are not sent.
        command = [
            str(tool.binary), "-m", "ddtree", "-u", url, "-i", "grpc", "--streaming", "--async",
            "--input-data", str(data), "--shape", "text_input:1", "--shape", "max_tokens:1",
            f"--concurrency-range={streams}", f"--request-count={max(streams, 4)}", "-f", str(report),
        ]  # fmt: skip
        ran = subprocess.run(
            command, env=_environment(tool), capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        if ran.returncode or not report.is_file():
            raise RuntimeError(f"perf_analyzer failed: {(ran.stderr or ran.stdout).strip()[-600:]}")
        return _read(report, streams)


def _read(report: Path, streams: int) -> Measured:
    with report.open(newline="") as file:
        (row,) = list(csv.DictReader(file))
    return Measured(
        streams=streams,
        requests_per_second=float(row["Inferences/Second"]),
        responses_per_second=float(row.get("Response Throughput") or 0.0),
        request_p50_ms=float(row["p50 latency"]) / 1e3,
        request_p95_ms=float(row["p95 latency"]) / 1e3,
    )


def _environment(tool: PerfAnalyzer) -> dict[str, str]:
    before = os.environ.get("LD_LIBRARY_PATH", "")
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([*map(str, tool.libraries), before])}
