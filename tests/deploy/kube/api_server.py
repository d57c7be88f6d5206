"""A Kubernetes API server for Helm and kubectl to talk to: loopback only, in memory, without credentials.

Paths and bodies in, calls of `cluster.Cluster` out. It knows no rule about objects.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.deploy.kube.cluster import ApiError, Cluster, Manifest, ResourceType
from tests.deploy.kube.protobuf import MAGIC, UnsupportedMessageError, decode

_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")
_LONGEST_WATCH_S = 0.5
_OPENAPI = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


@dataclass(frozen=True)
class Target:
    """What a path names."""

    kind: ResourceType
    namespace: str
    name: str  # empty: the collection
    subresource: str


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes: with Nagle's algorithm each answer takes 40 ms.
    disable_nagle_algorithm = True
    cluster: Cluster  # set on the subclass that a server makes

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Quiet: tests look at what is stored."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if url.path == "/openapi/v2":
                # An empty protobuf message: no kind is described, so that clients leave checking to the
                # server, which is where it happens here.
                return self._send(200, _OPENAPI, b"")
            if url.path == "/version" or len(url.path.strip("/").split("/")) < 4:
                found = _discovery(self.cluster, url.path)
                if found is not None:
                    return self._json(200, found)
            self._call(_target(self.cluster, url.path), query, body)
        except ApiError as error:
            self._json(error.status, _status(error))
        return None

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - the base class looks for these names

    def _call(self, target: Target, query: Mapping[str, str], body: bytes) -> None:
        if target.subresource == "log":
            return self._send(200, "text/plain", b"the API server of the tests runs nothing\n")
        if self.command == "GET":
            return self._read(target, query)
        if self.command == "DELETE":
            self.cluster.delete(target.kind, target.namespace, target.name)
            return self._json(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        written = self._write(target, query, self._parse(body))
        return self._json(201 if self.command == "POST" else 200, written)

    def _read(self, target: Target, query: Mapping[str, str]) -> None:
        if query.get("watch") in ("1", "true"):
            return self._watch(target, query)
        if target.name:
            return self._json(200, self.cluster.get(target.kind, target.namespace, target.name))
        items = _selected(self.cluster.objects(target.kind, target.namespace), query)
        return self._json(200, _list_of(target.kind, items))

    def _write(self, target: Target, query: Mapping[str, str], manifest: Manifest) -> Manifest:
        kind, space, dry_run = target.kind, target.namespace, "dryRun" in query
        if self.command == "POST":
            return self.cluster.create(kind, space, manifest, dry_run=dry_run)
        if self.command == "PUT":
            return self.cluster.replace(kind, space, manifest, dry_run=dry_run)
        form = self.headers.get("Content-Type", "")
        return self.cluster.patch(kind, space, target.name, manifest, form, dry_run=dry_run)

    def _parse(self, body: bytes) -> Manifest:
        try:
            manifest = decode(body) if body.startswith(MAGIC) else yaml.safe_load(body)
        except UnsupportedMessageError as error:
            raise ApiError(415, "UnsupportedMediaType", str(error)) from error
        if not isinstance(manifest, dict):
            raise ApiError(415, "UnsupportedMediaType", "the body is no object")
        return manifest

    def _watch(self, target: Target, query: Mapping[str, str]) -> None:
        """What is there now, then nothing more: nothing changes by itself here."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        events: list[Manifest] = [
            {"type": "ADDED", "object": each}
            for each in _selected(self.cluster.objects(target.kind, target.namespace), query)
        ]
        if query.get("sendInitialEvents") == "true":
            metadata = {"resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}}
            bookmark = {"kind": target.kind.kind, "apiVersion": target.kind.api_version, "metadata": metadata}
            events.append({"type": "BOOKMARK", "object": bookmark})
        for event in events:
            self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()
        time.sleep(min(float(query.get("timeoutSeconds", _LONGEST_WATCH_S)), _LONGEST_WATCH_S))

    def _json(self, status: int, content: Manifest) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _discovery(cluster: Cluster, path: str) -> Manifest | None:
    """What there is to be asked for; None when the path names objects instead."""
    minor = cluster.version.split(".")[1]
    versions = sorted({(kind.group, kind.version) for kind in cluster.types})
    parts = path.strip("/").split("/")
    if path == "/version":
        return {"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.0", "platform": "linux/amd64"}
    if path == "/openapi/v3":
        return {"paths": {}}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(group, version) for group, version in versions if group]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group, version = ("", parts[1]) if parts[0] == "api" else (parts[1], parts[2] if len(parts) > 2 else "")
    known = [kind for kind in cluster.types if (kind.group, kind.version) == (group, version)]
    if not known or len(parts) != (2 if parts[0] == "api" else 3):
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": known[0].api_version,
        "resources": [_resource(kind) for kind in known],
    }


def _group(group: str, version: str) -> Manifest:
    named = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [named], "preferredVersion": named}


def _resource(kind: ResourceType) -> Manifest:
    return {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "kind": kind.kind,
        "namespaced": kind.is_namespaced,
        "verbs": list(_VERBS),
    }


def _target(cluster: Cluster, path: str) -> Target:
    parts = path.strip("/").split("/")
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (*parts[1:3], parts[3:])
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    for kind in cluster.types:
        if rest and (kind.group, kind.version, kind.plural) == (group, version, rest[0]):
            name, subresource = [*rest[1:3], "", ""][:2]
            return Target(kind, namespace, name, subresource)
    raise ApiError(404, "NotFound", "the server could not find the requested resource")


def _selected(manifests: list[Manifest], query: Mapping[str, str]) -> list[Manifest]:
    wanted = _terms(query.get("labelSelector", ""))
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return [
        manifest
        for manifest in manifests
        if name in ("", manifest["metadata"]["name"])
        and all(
            ((manifest["metadata"].get("labels") or {}).get(key) == value) is is_equal
            for key, is_equal, value in wanted
        )
    ]


def _terms(selector: str) -> list[tuple[str, bool, str]]:
    found = (re.fullmatch(r"([^!=\s]+)\s*(!=|==?)\s*(\S*)", term.strip()) for term in selector.split(","))
    return [(match[1], match[2] != "!=", match[3]) for match in found if match]


def _list_of(kind: ResourceType, items: list[Manifest]) -> Manifest:
    return {
        "kind": f"{kind.kind}List",
        "apiVersion": kind.api_version,
        "metadata": {"resourceVersion": "1"},
        "items": items,
    }


def _status(error: ApiError) -> Manifest:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": error.reason,
        "message": error.message,
        "code": error.status,
    }


@contextmanager
def serve(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Serve a cluster on a free port of the loopback; gives the kubeconfig, written into `folder`."""
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    try:
        yield config
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
