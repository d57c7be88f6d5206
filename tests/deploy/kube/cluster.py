"""The state behind the API server: objects, what is refused, and workloads that become ready at once.

It runs nothing: a Deployment is ready because it was accepted. So it proves what a chart's manifests and its
upgrades are worth, and nothing about pods. Knows no HTTP.
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tests.deploy.kube.admission import changes_refused, refusals
from tests.deploy.kube.crd_schemas import load_crds
from tests.deploy.kube.patches import apply, merge, strategic_merge
from tests.deploy.kube.schemas import Schemas

Manifest = dict[str, Any]


@dataclass(frozen=True)
class ResourceType:
    """A kind as the API names it."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`group/version`, or `v1` for the core group."""
        return f"{self.group}/{self.version}".lstrip("/")


class ApiError(Exception):
    """A refusal, as an HTTP status and Kubernetes' word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


_BUILT_IN = (
    ("", "v1", "Pod Service Secret ConfigMap ServiceAccount PersistentVolumeClaim Event"),
    ("apps", "v1", "Deployment ReplicaSet StatefulSet"),
    ("batch", "v1", "Job"),
    ("policy", "v1", "PodDisruptionBudget"),
    ("networking.k8s.io", "v1", "NetworkPolicy Ingress"),
    ("autoscaling", "v2", "HorizontalPodAutoscaler"),
)


def resource_types(*, with_custom: bool) -> tuple[ResourceType, ...]:
    """What the API server knows."""
    found = [ResourceType("", "v1", "namespaces", "Namespace", is_namespaced=False)]
    for group, version, kinds in _BUILT_IN:
        found += [ResourceType(group, version, _plural(kind), kind) for kind in kinds.split()]
    if with_custom:
        found += [
            ResourceType(crd["group"], version, crd["plural"], crd["kind"])
            for crd in load_crds()
            for version in crd["versions"]
        ]
    return tuple(found)


def _plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


class Cluster:
    """Objects of one pretended cluster; safe to call from several threads."""

    def __init__(self, schemas: Schemas, *, with_custom: bool, namespaces: Iterable[str]) -> None:
        self.types = resource_types(with_custom=with_custom)
        self.version = schemas.version
        self._schemas = schemas
        self._lock = threading.RLock()
        self._objects: dict[tuple[str, str, str], Manifest] = {}
        self._applied: dict[tuple[str, str, str], Manifest] = {}  # what Helm 4 sent last
        self._clock = 100
        for name in namespaces:
            self.create(self.types[0], "", {"metadata": {"name": name}})

    def get(self, kind: ResourceType, namespace: str, name: str) -> Manifest:
        """Raises ApiError 404."""
        found = self._objects.get((kind.plural, namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f'{kind.plural} "{name}" not found')
        return found

    def objects(self, kind: ResourceType, namespace: str = "") -> list[Manifest]:
        """All objects of a kind, by name; of one namespace unless that is empty."""
        with self._lock:
            return [
                found
                for (plural, space, _), found in sorted(self._objects.items())
                if plural == kind.plural and namespace in ("", space)
            ]

    def of_kind(self, kind: str) -> list[Manifest]:
        """For tests: all objects of a kind."""
        return self.objects(next(each for each in self.types if each.kind == kind))

    def create(
        self, kind: ResourceType, namespace: str, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        """Raises ApiError: 409 when it is there, 404 without the namespace, 422 for a bad manifest."""
        with self._lock:
            name = manifest["metadata"].get("name")
            if (kind.plural, namespace, name) in self._objects:
                raise ApiError(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
            if kind.is_namespaced and ("namespaces", "", namespace) not in self._objects:
                raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
            return self._store(kind, namespace, manifest, None, dry_run=dry_run)

    def replace(self, kind: ResourceType, namespace: str, manifest: Manifest, *, dry_run: bool) -> Manifest:
        """Raises ApiError: 404, 409 for an old resourceVersion, 422."""
        with self._lock:
            current = self.get(kind, namespace, manifest["metadata"]["name"])
            seen = manifest["metadata"].get("resourceVersion")
            if seen not in (None, "", current["metadata"]["resourceVersion"]):
                raise ApiError(409, "Conflict", "the object has been modified")
            return self._store(kind, namespace, manifest, current, dry_run=dry_run)

    def patch(
        self, kind: ResourceType, namespace: str, name: str, patch: Manifest, form: str, *, dry_run: bool
    ) -> Manifest:
        """Change an object. `form` is the media type: merge-patch, strategic-merge-patch or apply-patch.

        Raises ApiError: 404, 415, 422.
        """
        with self._lock:
            if "apply-patch" in form:
                current = self._objects.get((kind.plural, namespace, name))
                if current is None:
                    self._applied[kind.plural, namespace, name] = copy.deepcopy(patch)
                    return self.create(kind, namespace, patch, dry_run=dry_run)
                changed = apply(current, self._applied.get((kind.plural, namespace, name)), patch)
                if not dry_run:
                    self._applied[kind.plural, namespace, name] = copy.deepcopy(patch)
                return self._store(kind, namespace, changed, current, dry_run=dry_run)
            current = self.get(kind, namespace, name)
            if "strategic-merge-patch" in form:
                schema = self._schemas.schema(kind.api_version, kind.kind)
                changed = strategic_merge(copy.deepcopy(current), patch, schema, self._schemas.resolve)
            elif "merge-patch" in form:
                changed = merge(copy.deepcopy(current), patch)
            else:
                raise ApiError(415, "UnsupportedMediaType", f"no patches of type {form}")
            return self._store(kind, namespace, changed, current, dry_run=dry_run)

    def delete(self, kind: ResourceType, namespace: str, name: str) -> None:
        """Raises ApiError 404."""
        with self._lock:
            self.get(kind, namespace, name)
            del self._objects[kind.plural, namespace, name]
            if kind.kind == "Deployment":
                self._objects.pop(("replicasets", namespace, f"{name}-1"), None)

    def _store(
        self,
        kind: ResourceType,
        namespace: str,
        manifest: Manifest,
        current: Manifest | None,
        *,
        dry_run: bool,
    ) -> Manifest:
        stored = copy.deepcopy(manifest)
        stored.setdefault("apiVersion", kind.api_version)
        stored.setdefault("kind", kind.kind)
        self._check(stored, namespace, current)
        metadata = stored["metadata"]
        before = (current or {}).get("metadata", {})
        metadata["uid"] = before.get("uid") or str(uuid.uuid4())
        metadata["creationTimestamp"] = before.get("creationTimestamp") or _now()
        is_changed = current is None or current.get("spec") != stored.get("spec")
        metadata["generation"] = before.get("generation", 0) + is_changed
        if namespace:
            metadata["namespace"] = namespace
        if kind.kind in ("Deployment", "LeaderWorkerSet"):
            stored["spec"].setdefault("replicas", 1)
        if kind.kind == "Service":
            address = (current or {}).get("spec", {}).get("clusterIP") or f"10.96.0.{self._clock % 250 + 1}"
            stored["spec"].setdefault("clusterIP", address)
        status = _status_when_ready(stored)
        if status:
            stored["status"] = status
        if not dry_run:
            self._clock += 1
            metadata["resourceVersion"] = str(self._clock)
            self._objects[kind.plural, namespace, metadata["name"]] = stored
            if kind.kind == "Deployment":
                self._add_replica_set(namespace, stored)
        return stored

    def _check(self, manifest: Manifest, namespace: str, current: Manifest | None) -> None:
        name = manifest["metadata"].get("name", "")
        wrong = []
        if manifest["metadata"].get("namespace", namespace) != namespace:
            raise ApiError(400, "BadRequest", "the namespace of the object does not match the request's")
        # A release of Helm is written by Helm, not by the chart.
        if not str(manifest.get("type", "")).startswith("helm.sh/"):
            wrong = self._schemas.errors(_without_server_fields(manifest)) or refusals(manifest)
        if current is not None:
            wrong += changes_refused(current, manifest)
        if wrong:
            raise ApiError(422, "Invalid", f'{manifest["kind"]} "{name}" is invalid: {"; ".join(wrong)}')

    def _add_replica_set(self, namespace: str, deployment: Manifest) -> None:
        """Helm 3 looks at the newest ReplicaSet of a Deployment when it waits."""
        metadata, spec = deployment["metadata"], deployment["spec"]
        name = f"{metadata['name']}-1"
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"],
                 "uid": metadata["uid"], "controller": True}  # fmt: skip
        replicas = spec.get("replicas", 1)
        self._objects["replicasets", namespace, name] = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "resourceVersion": str(self._clock),
                "labels": spec["template"]["metadata"]["labels"],
                "ownerReferences": [owner],
            },
            "spec": {"replicas": replicas, "selector": spec["selector"], "template": spec["template"]},
            "status": {"replicas": replicas, "readyReplicas": replicas},
        }


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _without_server_fields(manifest: Manifest) -> Manifest:
    owned = ("uid", "creationTimestamp", "resourceVersion", "generation", "managedFields", "selfLink")
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in owned}
    return {**{key: value for key, value in manifest.items() if key != "status"}, "metadata": metadata}


def _status_when_ready(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    generation = manifest["metadata"]["generation"]
    replicas = (manifest.get("spec") or {}).get("replicas", 1)
    counts = {"observedGeneration": generation, "replicas": replicas, "readyReplicas": replicas,
              "updatedReplicas": replicas, "availableReplicas": replicas}  # fmt: skip
    available = [{"type": "Available", "status": "True"}]
    progressing = [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]
    by_kind: dict[str, dict[str, Any]] = {
        "Deployment": {**counts, "conditions": [*available, *progressing]},
        "LeaderWorkerSet": {**counts, "conditions": available},
        "Job": {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]},
        "Pod": {"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "True"}]},
        "PersistentVolumeClaim": {"phase": "Bound"},
        "Namespace": {"phase": "Active"},
    }
    return by_kind.get(manifest["kind"])
