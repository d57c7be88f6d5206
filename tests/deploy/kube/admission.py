"""What the API server refuses although the schema allows it: names, selectors, references, changes.

Each function returns messages, none when all is well. Not complete; it has what a chart gets wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Manifest = Mapping[str, Any]

_LABEL_NAME = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^$|^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_DNS_LABEL = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")
_PORT_NAME = re.compile(r"^(?=.{1,15}$)[a-z0-9]+(-[a-z0-9]+)*$")
_QUANTITY = re.compile(r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
_VARIABLE = re.compile(r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
_LABEL_NAMED = ("Service", "Job", "Pod", "StatefulSet")  # names that end up in DNS or in labels: 63 at most
_UNCHANGEABLE = {
    "Deployment": ("spec.selector",),
    "Job": ("spec.template", "spec.selector", "spec.completionMode"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName"),
    "Service": ("spec.clusterIP",),
    "Pod": ("spec.containers", "spec.volumes"),
}


def refusals(manifest: Manifest) -> list[str]:
    """What is wrong with an object by itself."""
    return [*_metadata(manifest), *_selector(manifest), *_pods(manifest), *_service(manifest)]


def changes_refused(old: Manifest, new: Manifest) -> list[str]:
    """Fields that may not change once the object is there."""
    return [
        f"{path}: field is immutable"
        for path in _UNCHANGEABLE.get(str(new["kind"]), ())
        if _at(new, path) not in (None, _at(old, path))
    ]


def _at(manifest: Any, path: str) -> Any:
    for key in path.split("."):
        manifest = manifest.get(key) if isinstance(manifest, Mapping) else None
    return manifest


def _metadata(manifest: Manifest) -> Iterator[str]:
    metadata = manifest["metadata"]
    name = metadata["name"]
    longest = 63 if manifest["kind"] in _LABEL_NAMED else 253
    if not _SUBDOMAIN.match(name) or len(name) > longest:
        yield f"metadata.name: {name!r} is no lower-case name of at most {longest} characters"
    if manifest["kind"] == "Service" and not _DNS_LABEL.match(name):
        yield f"metadata.name: {name!r} is no DNS label"
    yield from _labels("metadata.labels", metadata.get("labels") or {})
    for key, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield f"metadata.annotations.{key}: {value!r} is no string"


def _labels(path: str, labels: Mapping[str, Any]) -> Iterator[str]:
    for key, value in labels.items():
        if not _LABEL_NAME.match(key) or not isinstance(value, str) or not _LABEL_VALUE.match(value):
            yield f"{path}: {key}={value!r} is no label"


def _selector(manifest: Manifest) -> Iterator[str]:
    if manifest["kind"] not in ("Deployment", "StatefulSet", "DaemonSet"):
        return
    wanted = _at(manifest, "spec.selector.matchLabels") or {}
    labels = _at(manifest, "spec.template.metadata.labels") or {}
    if not wanted or any(labels.get(key) != value for key, value in wanted.items()):
        yield "spec.selector: does not match the labels of the template"


def pod_specs(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Every pod in an object, with its path."""
    if manifest["kind"] == "Pod":
        yield "spec", manifest["spec"]
    for path in ("spec.template", "spec.leaderWorkerTemplate.leaderTemplate",
                 "spec.leaderWorkerTemplate.workerTemplate", "spec.jobTemplate.spec.template"):  # fmt: skip
        template = _at(manifest, path)
        if template is not None:
            yield f"{path}.spec", template["spec"]


def _pods(manifest: Manifest) -> Iterator[str]:
    for path, spec in pod_specs(manifest):
        template = _at(manifest, path.removesuffix(".spec")) or {}
        yield from _labels(f"{path}.labels", _at(template, "metadata.labels") or {})
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        yield from _repeated(f"{path}.containers", (container["name"] for container in containers))
        yield from _repeated(f"{path}.volumes", (volume["name"] for volume in spec.get("volumes") or ()))
        volumes = {volume["name"] for volume in spec.get("volumes") or ()}
        for container in containers:
            for message in _container(container, volumes):
                yield f"{path}.containers[{container['name']}]{message}"


def _container(container: Manifest, volumes: set[str]) -> Iterator[str]:
    if not _DNS_LABEL.match(container["name"]):
        yield f": {container['name']!r} is no name of a container"
    for port in container.get("ports") or ():
        if not _PORT_NAME.match(port.get("name", "p")):
            yield f".ports: {port['name']!r} is no name of a port"
    mounts = container.get("volumeMounts") or ()
    yield from _repeated(".volumeMounts", (mount["mountPath"] for mount in mounts))
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f".volumeMounts: {mount['name']!r} is no volume of the pod"
    yield from _repeated(".ports", (port.get("name", "") for port in container.get("ports") or ()))
    yield from _repeated(".env", (variable["name"] for variable in container.get("env") or ()))
    for variable in container.get("env") or ():
        if not _VARIABLE.match(variable["name"]):
            yield f".env: {variable['name']!r} is no name of a variable"
        if "value" in variable and "valueFrom" in variable:
            yield f".env: {variable['name']} has a value and a source"
    yield from _resources(container.get("resources") or {})
    if not container.get("image"):
        yield ".image: required value"


def _resources(resources: Manifest) -> Iterator[str]:
    for kind in ("requests", "limits"):
        for name, amount in (resources.get(kind) or {}).items():
            if not _QUANTITY.match(str(amount)):
                yield f".resources.{kind}: {name}={amount!r} is no quantity"
            elif "/" in name and not str(amount).isdigit():
                yield f".resources.{kind}: {name}={amount!r} must be a whole number"


def _service(manifest: Manifest) -> Iterator[str]:
    if manifest["kind"] != "Service":
        return
    ports = manifest["spec"].get("ports") or ()
    if not ports:
        yield "spec.ports: required value"
    yield from _repeated("spec.ports", (port.get("name", "") for port in ports))
    yield from _repeated("spec.ports", (str(port["port"]) for port in ports))


def _repeated(path: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path}: {name!r} is there {count} times"
