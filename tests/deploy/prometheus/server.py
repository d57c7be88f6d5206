"""A real Prometheus that scrapes what a test starts, and the questions tests ask it.

Debian's package `prometheus` has both programs (`prometheus`, `promtool`). Where they are not installed, the
package is unpacked into the project's cache, which needs no root.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from ddtree_local.ports import choose_ports
from tests.deploy.kube.tools import ensure

_START_S = 60.0
_QUERY_S = 30.0


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`; the test fails where it cannot be had: nothing can stand in."""
    found = shutil.which(name)
    if found is not None:
        return found
    try:
        return str(ensure("prometheus", b"unpacked", _unpack_package) / "usr" / "bin" / name)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.fail(f"{name} is missing and cannot be brought ({error}); put Prometheus' programs on PATH")


def _unpack_package(folder: Path) -> None:
    download = ["apt-get", "download", "--quiet", "prometheus"]
    if subprocess.run(download, cwd=folder, capture_output=True, check=False).returncode != 0:
        # A new machine has no package lists yet; only root may fetch them.
        subprocess.run(["apt-get", "update", "--quiet"], capture_output=True, check=False)
        subprocess.run(download, cwd=folder, capture_output=True, check=True)
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    package.unlink()


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool; the caller looks at what it said."""
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@dataclass(frozen=True)
class Line:
    """One series of an answer."""

    labels: dict[str, str]
    times: list[float]  # seconds since the epoch
    values: list[float]

    @property
    def numbers(self) -> list[float]:
        """Values that are numbers: a quantile of nothing is none."""
        return [value for value in self.values if math.isfinite(value)]


class Prometheus:
    """A server with its data in a folder, as a context manager."""

    def __init__(self, folder: Path, target: str, *, rules: Path | None = None, interval_s: int = 1) -> None:
        """Scrape `target` (`host:port`) every `interval_s` seconds."""
        self._folder = folder
        self._interval_s = interval_s
        scrape = {"job_name": "ddtree", "static_configs": [{"targets": [target]}]}
        every = {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"}
        config = {"global": every, "rule_files": [str(rules)] if rules else [], "scrape_configs": [scrape]}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Prometheus:
        address = f"127.0.0.1:{choose_ports('127.0.0.1', None, None, None).http}"
        self._url = f"http://{address}"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise AssertionError(
                    f"Prometheus does not start: {(self._folder / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def range(self, query: str, start: float, end: float, step: float | None = None) -> list[Line]:
        """Answer over a stretch of time."""
        step = step or self._interval_s
        result = self._get("query_range", query=query, start=start, end=end, step=step)
        return [_line(one["metric"], one["values"]) for one in result["data"]["result"]]

    def now(self, query: str) -> list[Line]:
        """Answer at this moment."""
        result = self._get("query", query=query)
        return [_line(one["metric"], [one["value"]]) for one in result["data"]["result"]]

    def rules(self) -> dict[str, str]:
        """Health of every loaded rule, by name."""
        groups = self._get("rules")["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, what: str, **parameters: Any) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=_QUERY_S) as answer:  # noqa: S310
            body: dict[str, Any] = json.load(answer)
        assert body["status"] == "success", body
        return body


def _line(labels: dict[str, str], samples: list[tuple[float, str]]) -> Line:
    return Line(labels, [float(at) for at, _ in samples], [float(value) for _, value in samples])
