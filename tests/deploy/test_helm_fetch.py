"""The download script against a hub and an object store of our own: whole checkpoints or none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from deploy.helm.ddtree.files import fetch_checkpoints
from tests.deploy.kube.dockerfile import read_dockerfile
from tests.deploy.kube.helm import CHART, Rendering, environment
from tests.deploy.kube.tools import ROOT, deploy_tools

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SCRIPT = CHART / "files" / "fetch_checkpoints.py"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"a pickle, which runs code when it is read",
    "README.md": b"words",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}
MOUNTED = "/etc/ddtree-credentials/file"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Store(BaseHTTPRequestHandler):
    """A hub (`/api/models/…`, `/…/resolve/…`) and an S3 bucket (`/bucket/…`) in one."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    token: str
    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.asked.append(url.path)
        path = unquote(url.path)
        if path.startswith("/bucket"):
            self._s3(path.removeprefix("/bucket").lstrip("/"), parse_qs(url.query))
        elif self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name} for name in self.files]
            facts = {
                "id": "org/model",
                "modelId": "org/model",
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [],
            }
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in self.files.items()
            ]
            self._send(200, json.dumps(tree if "/tree/" in path else facts).encode())
        elif "/resolve/" in path and (name := path.rsplit("/", 1)[1]) in self.files:
            self._send(
                200, self.files[name], {"ETag": f'"{_oid(self.files[name])}"', "X-Repo-Commit": COMMIT}
            )
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _s3(self, key: str, query: dict[str, list[str]]) -> None:
        if "AWS4-HMAC-SHA256 Credential=id/" not in self.headers.get("Authorization", ""):
            return self._send(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
        if "list-type" in query:
            prefix = query["prefix"][0]
            entries = "".join(
                f"<Contents><Key>{prefix}{name}</Key><Size>{len(data)}</Size></Contents>"
                for name, data in self.files.items()
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            return self._send(200, text.encode(), {"Content-Type": "application/xml"})
        name = key.removeprefix("models/a/")
        return self._send(200, self.files[name], {"ETag": f'"{_oid(self.files[name])}"'})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def store(files: dict[str, bytes], token: str = "") -> Iterator[tuple[str, list[str]]]:
    """The address, and the list of what is asked."""
    handler = type("Handler", (Store,), {"files": files, "token": token, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


def image_environment() -> dict[str, str]:
    """What the image sets for every container, but for where its programs are."""
    (text,) = [each.text for each in read_dockerfile(DOCKERFILE) if each.name == "ENV"]
    return dict(word.split("=", 1) for word in text.split() if not word.startswith("PATH="))


def run(arguments: list[str], home: Path, name: str, **places: str) -> subprocess.CompletedProcess[str]:
    """As the container of an example's Job runs it, with this machine's places for some of its variables."""
    job = Rendering(name).only("Job")["spec"]["template"]["spec"]["containers"][0]
    env = {**image_environment(), **environment(job), "HOME": str(home), "PATH": os.environ["PATH"]}
    env.pop("HTTPS_PROXY", None)
    for variable, inside in (("HF_TOKEN_PATH", MOUNTED), ("AWS_SHARED_CREDENTIALS_FILE", MOUNTED)):
        assert env.get(variable, inside) == inside
    env |= {"PYTHONPATH": str(deploy_tools().s3_client), **places}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=env, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_gated_model_comes_from_the_hub_with_the_token_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    folder = tmp_path / "target"
    arguments = ["fetch", f"{folder}=hf://org/model@{COMMIT}"]
    with store(FILES, token="secret") as (address, asked):
        places = {"HF_ENDPOINT": address, "HF_TOKEN_PATH": str(token)}
        refused = run(arguments, tmp_path, "hugging-face-job", **places)
        assert refused.returncode == 1
        assert "check the name, the revision and the token secret" in refused.stderr
        assert not folder.exists()
        token.write_text("secret\n")
        result = run(arguments, tmp_path, "hugging-face-job", **places)
        assert result.returncode == 0, result.stderr
        assert names(folder) == WANTED | {".complete"}
        assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        asked.clear()
        again = run(arguments, tmp_path, "hugging-face-job", **places)
    assert (again.returncode, again.stderr, asked) == (0, f"{folder} is there\n", [])


@pytest.fixture
def credentials(tmp_path: Path) -> str:
    path = tmp_path / "credentials"
    path.write_text("[default]\naws_access_key_id = id\naws_secret_access_key = key\n")
    return str(path)


def test_a_model_comes_from_s3_with_the_credentials_file(tmp_path: Path, credentials: str) -> None:
    folder = tmp_path / "draft"
    with store(FILES) as (address, _):
        places = {"AWS_ENDPOINT_URL_S3": address, "AWS_SHARED_CREDENTIALS_FILE": credentials}
        result = run(["fetch", f"{folder}=s3://bucket/models/a"], tmp_path, "s3", **places)
        assert result.returncode == 0, result.stderr
    assert names(folder) == WANTED | {".complete"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_an_object_name_cannot_lead_out_of_the_folder(tmp_path: Path, credentials: str) -> None:
    with store({**FILES, "../../escaped.json": b"{}"}) as (address, _):
        places = {"AWS_ENDPOINT_URL_S3": address, "AWS_SHARED_CREDENTIALS_FILE": credentials}
        arguments = ["fetch", f"{tmp_path / 'a' / 'draft'}=s3://bucket/models/a"]
        result = run(arguments, tmp_path, "s3", **places)
    assert result.returncode == 1
    assert "'../../escaped.json' leads out of the folder" in result.stderr
    assert not list(tmp_path.rglob("escaped.json"))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_is_no_checkpoint_is_refused_and_never_marked(tmp_path: Path, missing: str) -> None:
    files = {name: data for name, data in FILES.items() if name != missing}
    with store(files) as (address, _):
        arguments = ["fetch", f"{tmp_path / 'target'}=hf://org/model@main"]
        result = run(arguments, tmp_path, "hugging-face-job", HF_ENDPOINT=address)
    assert result.returncode == 1
    assert "give a checkpoint in transformers' layout" in result.stderr
    assert not (tmp_path / "target").exists()


def test_waiting_ends_when_the_marker_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_checkpoints, "_POLL_S", 0.02)
    folder = tmp_path / "target"
    folder.mkdir()
    threading.Timer(0.1, (folder / ".complete").touch).start()
    assert list(fetch_checkpoints.wait([folder], 5.0)) == [f"{folder} is there"]
    with pytest.raises(fetch_checkpoints.FetchError, match="look at the log of the fetching job"):
        list(fetch_checkpoints.wait([tmp_path / "draft"], 0.1))


def test_another_kind_of_address_is_refused(tmp_path: Path) -> None:
    result = run(["fetch", f"{tmp_path / 'x'}=ftp://host/model"], tmp_path, "s3")
    assert result.returncode == 1
    assert "starts with neither hf:// nor s3://" in result.stderr
