"""Kubernetes' own schemas, strict: built-in kinds from kubernetes-validate, custom ones from crds/.

Answers what a schema can answer. What the API server refuses beyond that is in `admission.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.deploy.kube.crd_schemas import POD_TEMPLATE, load_crds

_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
_POD_TEMPLATE = f"{_DEFINITIONS}#/$defs/io.k8s.api.core.v1.PodTemplateSpec"


class UnknownKindError(Exception):
    """There is no such kind in this version of Kubernetes, nor among the custom ones."""


class Schemas:
    """The schemas of one version of Kubernetes, such as "1.33"."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
        if not self._folder.is_dir():
            raise ValueError(f"version: kubernetes-validate has no schemas for {version}")
        self._definitions = json.loads((self._folder / "_definitions.json").read_text())
        self._registry: Registry[Any] = Resource.from_contents(self._definitions) @ Registry()
        self._custom = {
            (f"{crd['group']}/{version}", crd["kind"]): _with_pod_template(schema)
            for crd in load_crds()
            for version, schema in crd["versions"].items()
        }
        self._validators: dict[tuple[str, str], Draft202012Validator] = {}

    def errors(self, manifest: Mapping[str, Any]) -> list[str]:
        """What is wrong with an object, "path: message" each; empty when nothing is.

        Raises:
            UnknownKindError: there is no schema for it.
        """
        validator = self._validator(str(manifest.get("apiVersion")), str(manifest.get("kind")))
        return [
            f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
            for error in validator.iter_errors(manifest)
        ]

    def schema(self, api_version: str, kind: str) -> dict[str, Any]:
        """The schema of a kind. Raises UnknownKindError."""
        schema = self._validator(api_version, kind).schema
        assert isinstance(schema, dict)
        return schema

    def resolve(self, node: dict[str, Any]) -> dict[str, Any]:
        """The node itself, or the definition it refers to."""
        while "$ref" in node:
            node = self._definitions["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return node

    def _validator(self, api_version: str, kind: str) -> Draft202012Validator:
        key = (api_version, kind)
        if key not in self._validators:
            schema = self._custom.get(key) or self._built_in(api_version, kind)
            self._validators[key] = Draft202012Validator(schema, registry=self._registry)
        return self._validators[key]

    def _built_in(self, api_version: str, kind: str) -> dict[str, Any]:
        # rbac.authorization.k8s.io/v1 is in a file named after rbac-v1
        short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
        path = self._folder / f"{kind.lower()}-{short}.json"
        group = api_version.rpartition("/")[0]
        schema = json.loads(path.read_text()) if path.is_file() else {}
        known = schema.get("x-kubernetes-group-version-kind", [])
        if not any(entry["group"] == group and entry["kind"] == kind for entry in known):
            raise UnknownKindError(f"{api_version} {kind} is unknown in Kubernetes {self.version}")
        assert isinstance(schema, dict)
        return schema


@cache
def schemas(version: str) -> Schemas:
    """The schemas of a version, read once."""
    return Schemas(version)


def _with_pod_template(schema: dict[str, Any]) -> dict[str, Any]:
    """A custom kind's schema whose pod templates are Kubernetes' own."""
    text = json.dumps(schema).replace(json.dumps({"$ref": POD_TEMPLATE}), json.dumps({"$ref": _POD_TEMPLATE}))
    found = json.loads(text)
    assert isinstance(found, dict)
    return found
