"""What `make serve` tells the server, and what it refuses before one is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddtree_local import serve
from ddtree_local.command import ServerOptions, server_command, server_environment
from ddtree_local.errors import LocalTritonError
from ddtree_local.ports import Ports
from ddtree_local.project import find_project
from ddtree_local.serving import ServedPair
from ddtree_local.triton_wheel import TritonRuntime, prepare_runtime

RUNTIME = TritonRuntime(Path("/w/tritonserver"), Path("/c/backends"), (Path("/w/libs"), Path("/c/lib")))


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def options(load_models: tuple[str, ...] | None) -> ServerOptions:
    return ServerOptions(Path("/models"), load_models, "127.0.0.1", "ddtree_1_a_", 7.0, ("--log-verbose=1",))


def test_the_choice_travels_by_environment(tmp_path: Path) -> None:
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft")
    assert ServedPair(target, draft).environment == {
        "DDTREE_TARGET": str(target),
        "DDTREE_DRAFT": str(draft),
        "DDTREE_TOPOLOGY": "bls",
    }
    pair = ServedPair(target, draft, "in_process", "float32")
    assert pair.environment["DDTREE_TOPOLOGY"] == "in_process"
    assert pair.environment["DDTREE_DTYPE"] == "float32"
    assert ServedPair(target, draft, prefix_cache=False).environment["DDTREE_PREFIX_CACHE"] == "false"


def test_relative_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The server runs in a folder of its own, where a relative path would lead nowhere.
    checkpoint(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    pair = ServedPair(Path("target"), Path("target"))
    assert pair.environment["DDTREE_TARGET"] == str(tmp_path / "target")


def test_in_one_process_only_the_orchestrator_is_loaded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    assert ServedPair(folder, folder).load_models is None
    assert ServedPair(folder, folder, "in_process").load_models == ("ddtree",)


@pytest.mark.parametrize("missing_file", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, missing_file: str) -> None:
    good, bad = checkpoint(tmp_path / "good"), checkpoint(tmp_path / "bad")
    (bad / missing_file).unlink()
    with pytest.raises(LocalTritonError, match=r"drafter .*bad has no (config.json|\*\.safetensors)"):
        ServedPair(good, bad)
    with pytest.raises(LocalTritonError, match=r"target .*nowhere is not a folder"):
        ServedPair(tmp_path / "nowhere", good)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/folder", "--draft", "/no/such"], "target (MODEL, --model): /no/such/folder"),
        (["--model", "/no/such/folder"], "drafter (DRAFT, --draft): not given"),
    ],
)
def test_serve_refuses_a_bad_choice_in_one_line(arguments: list[str], said: str, project_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_local.serve", *arguments],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_the_command_binds_the_host_given_and_tells_its_regions_apart() -> None:
    command = server_command(RUNTIME, options(None), Ports(1, 2, 3))
    assert command[0] == "/w/tritonserver"
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"} <= {
        *command
    }
    assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3", "--exit-timeout-secs=7"} <= {*command}
    assert "--backend-config=python,shm-region-prefix-name=ddtree_1_a_" in command
    assert command[-1] == "--log-verbose=1"
    assert not [argument for argument in command if argument.startswith("--model-control-mode")]


def test_models_are_loaded_one_by_one_when_named() -> None:
    command = server_command(RUNTIME, options(("a", "b")), Ports(1, 2, 3))
    loading = [argument for argument in command if "load-model" in argument or "control-mode" in argument]
    assert loading == ["--model-control-mode=explicit", "--load-model=a", "--load-model=b"]


def test_the_environment_leads_the_stub_to_this_interpreter() -> None:
    base = {"PATH": "/usr/bin", "PYTHONPATH": "/elsewhere", "PYTHONHOME": "/old", "LD_LIBRARY_PATH": "/mine"}
    env = server_environment(RUNTIME, base, {"DDTREE_TARGET": "/t"}, Path("/venv"), "ddtree_1_a_")
    assert env["PATH"] == "/venv/bin:/usr/bin"
    assert env["LD_LIBRARY_PATH"] == "/w/libs:/c/lib:/mine"
    assert env["DDTREE_TARGET"] == "/t"
    assert env["DDTREE_LOCAL_SERVER"] == "ddtree_1_a_"
    assert not {"PYTHONPATH", "PYTHONHOME"} & env.keys()


def test_the_runtime_is_laid_out_once_and_mended(tmp_path: Path) -> None:
    runtime = prepare_runtime(tmp_path)
    backend = runtime.backends / "python"
    assert {path.name for path in backend.iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert os.access(backend / "triton_python_backend_stub", os.X_OK)
    made = backend.stat().st_mtime_ns
    assert prepare_runtime(tmp_path) == runtime
    assert backend.stat().st_mtime_ns == made
    # An upgraded interpreter moves its library: the link then leads nowhere.
    link = next(runtime.library_path[1].iterdir())
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert prepare_runtime(tmp_path) == runtime
    assert next(runtime.library_path[1].iterdir()).exists()
    assert [path.name for path in tmp_path.iterdir()] == [runtime.backends.parent.name]


def test_the_project_is_found_from_any_folder_of_it(project_root: Path, tmp_path: Path) -> None:
    assert find_project(project_root / "deploy" / "local").root == project_root
    # Elsewhere the checkout that the package runs from is meant.
    assert find_project(tmp_path).root == project_root


def test_a_taken_gateway_port_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = CliRunner().invoke(serve.main, ["--gateway-port", str(port)])
    assert done.exit_code == 1
    taken = f"Error: gateway port: 127.0.0.1:{port} is taken; stop what listens there"
    assert done.output == f"{taken} or give another gateway port\n"


def test_gateway_and_server_cannot_share_a_port() -> None:
    done = CliRunner().invoke(serve.main, ["--gateway-port", "8001"])
    assert done.exit_code == 1
    assert "gateway port: 8001 is Triton's too" in done.output
