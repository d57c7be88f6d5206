"""The image, as far as it can be looked at without an engine that builds it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pytest

from tests.deploy.kube.dockerfile import (
    Instruction,
    build_context,
    copy_files,
    reaches_builder,
    read_dockerfile,
    shell_commands,
)
from tests.deploy.kube.helm import Rendering
from tests.deploy.kube.tools import ROOT, deploy_tools, ensure

IGNORE_FILE = ROOT / "deploy" / "docker" / "Dockerfile.dockerignore"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
OLDEST = (26, 7)
IMAGE_PYTHON = "3.12"  # of tritonserver 24.11 and later, on Ubuntu 24.04 with glibc 2.39
IMAGE_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)))


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    return read_dockerfile(DOCKERFILE)


@pytest.fixture(scope="module")
def context() -> list[PurePosixPath]:
    return build_context(ROOT, IGNORE_FILE)


@pytest.fixture(scope="module")
def image(
    instructions: list[Instruction], context: list[PurePosixPath], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What the COPY instructions put where."""
    folder = tmp_path_factory.mktemp("image")
    copy_files(instructions, context, ROOT, folder)
    return folder


def named(instructions: Sequence[Instruction], name: str) -> list[str]:
    return [each.text for each in instructions if each.name == name]


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[\w+\])?==(\S+?)(?:;.*)?$", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    result = subprocess.run([str(hadolint), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_checkov_has_nothing_to_say() -> None:
    result = subprocess.run(
        [str(deploy_tools().checkov), "--file", str(DOCKERFILE), "--framework", "dockerfile",
         "--skip-download", "--output", "json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    summary = json.loads(result.stdout)["summary"]
    assert summary["passed"] > 50
    assert summary["failed"] == 0


def test_the_base_is_new_enough_pinned_and_takes_a_digest(instructions: list[Instruction]) -> None:
    arguments = dict(text.split("=", 1) for text in named(instructions, "ARG"))
    year, month = map(int, arguments["TRITON_TAG"].removesuffix("-py3").split("."))
    assert (year, month) >= OLDEST
    assert arguments["TRITON_DIGEST"] == ""
    (base,) = named(instructions, "FROM")
    assert base == "nvcr.io/nvidia/tritonserver:${TRITON_TAG}${TRITON_DIGEST:+@${TRITON_DIGEST}}"


def test_it_runs_as_nobody_in_an_empty_folder(instructions: list[Instruction], image: Path) -> None:
    assert named(instructions, "USER") == ["10001:10001"]
    order = [each.name for each in instructions]
    assert not {"RUN", "COPY", "ADD"} & set(order[order.index("USER") :])
    (folder,) = named(instructions, "WORKDIR")
    assert not (image / folder.lstrip("/")).exists()
    security = Rendering().pod()["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (10001, 10001)


def test_only_what_is_needed_reaches_the_builder(context: list[PurePosixPath]) -> None:
    assert {path.parts[0] for path in context} == {
        "client", "deploy", "model_repository", "model_repository_unary", "python_backends", "requirements"
    }  # fmt: skip
    allowed = {".py", ".toml", ".txt", ".pbtxt", ".sh", ".typed"}
    allowed |= {".html", ".css", ".js"}  # the page of a trace
    allowed |= {".json"}  # the contracts with TensorRT-LLM
    assert {path.suffix or path.name for path in context} <= allowed
    assert sum((ROOT / path).stat().st_size for path in context) < 2_000_000


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        (".git/config", False),
        (".venv/bin/python", False),
        (".cache/demo-target/model.safetensors", False),
        ("drafters/a/model.safetensors", False),
        ("python_backends/ddtree/__pycache__/engine.pyc", False),
        ("python_backends/ddtree_serving.egg-info/PKG-INFO", False),
        ("tests/conftest.py", False),
        ("python_backends/ddtree/stages/bls.py", True),
        ("model_repository/ddtree/1/model.py", True),
    ],
)
def test_the_ignore_file_lets_through_what_is_copied(path: str, *, is_kept: bool) -> None:
    assert reaches_builder(PurePosixPath(path), IGNORE_FILE) is is_kept


def test_the_model_repositories_hold_the_models_and_nothing_else(image: Path) -> None:
    models = {path.parent.name for path in (ROOT / "model_repository").glob("*/config.pbtxt")}
    assert {path.name for path in (image / "models").iterdir()} == models
    assert {path.name for path in (image / "models-in-process").iterdir()} == {"ddtree"}
    assert {path.name for path in (image / "models-unary").iterdir()} == {"ddtree_unary"}
    for repository in ("models", "models-in-process", "models-unary"):
        for model in (image / repository).iterdir():
            files = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
            assert files == {"config.pbtxt", "1/model.py"}


def test_what_it_starts_and_asks_is_in_it(instructions: list[Instruction], image: Path) -> None:
    for name in ("ENTRYPOINT", "HEALTHCHECK"):
        (text,) = named(instructions, name)
        command = json.loads(text[text.index("[") :])
        assert (image / command[1].lstrip("/")).is_file()


def test_it_starts_the_server_as_the_chart_does(instructions: list[Instruction]) -> None:
    (text,) = named(instructions, "CMD")
    assert set(json.loads(text)) <= set(Rendering().server()["args"])


def test_the_stub_finds_the_environment_first(instructions: list[Instruction]) -> None:
    assert ["python3", "-m", "venv", "--without-pip", "/opt/ddtree"] in shell_commands(instructions)
    (text,) = named(instructions, "ENV")
    assert text.startswith("PATH=/opt/ddtree/bin:${PATH} ")
    assert "PYTHONPATH" not in text


def test_the_versions_are_those_that_were_tested() -> None:
    files = ("constraints", "observability", "gateway", "local")
    local: dict[str, str] = {}
    for name in files:
        local |= pins(ROOT / "requirements" / f"{name}.txt")
    client = pins(ROOT / "deploy" / "docker" / "client.txt")
    assert client
    assert {name: local[name] for name in client} == client
    constraints = pins(ROOT / "requirements" / "constraints.txt")
    download = pins(ROOT / "deploy" / "docker" / "download.txt")
    # matplotlib brings the newer one, and matplotlib is not in the image.
    both = download.keys() & constraints.keys() - {"python-dateutil"}
    assert both == {"urllib3"}
    assert {name: constraints[name] for name in both} == {name: download[name] for name in both}


def pip_commands(instructions: Sequence[Instruction], image: Path, python: Path) -> list[list[str]]:
    """The Dockerfile's own pip commands, with the paths of a folder on this machine."""
    places = {"/opt/ddtree/bin/python": str(python), "/usr/bin/python3": sys.executable}
    found = [command for command in shell_commands(instructions) if "pip" in command]
    assert len(found) == 3
    return [
        [places.get(word, word.replace("/opt/build", str(image / "opt" / "build"))) for word in command]
        for command in found
    ]


def test_every_pin_has_a_wheel_for_the_images_python(instructions: list[Instruction], image: Path) -> None:
    """The build's own lines, asked for the image's Python; torch's CUDA libraries are torch's own pins."""
    commands = pip_commands(instructions, image, Path(sys.executable))[:2]
    lists = sorted(path.read_text() for path in (image / "opt" / "build").rglob("*.txt"))

    def ask(folder: Path) -> None:
        for number, command in enumerate(commands):
            arguments = command[command.index("install") + 1 :]
            subprocess.run(
                [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
                 "--dry-run", "--report", str(folder / f"{number}.json"), "--target", str(folder),
                 "--no-deps", "--only-binary=:all:", "--python-version", IMAGE_PYTHON,
                 *(f"--platform={each}" for each in IMAGE_PLATFORMS),
                 *(each for each in arguments if each not in ("--no-cache-dir", "--no-deps"))],
                check=True, timeout=280,
            )  # fmt: skip

    # Asked again when a pin changes: the index would give the same answer.
    reports = ensure("image-wheels", repr((lists, IMAGE_PYTHON, IMAGE_PLATFORMS)).encode(), ask)
    found = {
        each["metadata"]["name"]
        for report in reports.glob("*.json")
        for each in json.loads(report.read_text())["install"]
    }
    assert {"torch", "numpy", "transformers", "tritonclient", "boto3"} <= found


def test_the_packages_install_from_what_is_copied(
    instructions: list[Instruction], image: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    command = pip_commands(instructions, image, environment / "bin" / "python")[2]
    subprocess.run([*command, "--quiet", "--disable-pip-version-check"], check=True, timeout=280)
    (packages,) = environment.glob("lib/python*/site-packages")
    sources = {path.name for path in (image / "opt/build/python_backends/ddtree").rglob("*.py")}
    assert {path.name for path in (packages / "ddtree").rglob("*.py")} == sources
    assert (environment / "bin" / "ddtree").is_file()
    assert (packages / "ddtree_client" / "py.typed").is_file()
