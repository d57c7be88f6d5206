"""CustomResourceDefinitions to strict JSON schemas, small enough to be kept with the tests.

`python -m tests.deploy.kube.crd_schemas CRD.yaml ORIGIN` writes crds/<kind>.json. Descriptions and status go;
unknown fields become errors, as the API server would drop them silently. A pod template, which is most of a
LeaderWorkerSet, becomes a reference to Kubernetes' own schema of a pod template.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

CRDS = Path(__file__).with_name("crds")
POD_TEMPLATE = "PodTemplateSpec"
"""What `$ref` names where a pod template stands."""

_KEPT = ("type", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems",
         "maxItems", "minProperties", "maxProperties", "required")  # fmt: skip
_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def strict_schema(node: dict[str, Any]) -> dict[str, Any]:
    """One node of a structural schema as JSON schema that knows no other fields than the named ones."""
    if _is_pod_template(node):
        return {"$ref": POD_TEMPLATE}
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    schema = {key: node[key] for key in _KEPT if key in node}
    # Other formats are Kubernetes' own, which JSON schema does not know.
    if schema.get("format") != "date-time":
        schema.pop("format", None)
    if "properties" in node:
        schema["properties"] = {name: strict_schema(child) for name, child in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = strict_schema(node["additionalProperties"])
    if "items" in node:
        schema["items"] = strict_schema(node["items"])
    if node.get("nullable") and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    for word in ("allOf", "anyOf", "oneOf", "not"):
        if word in node:
            schema[word] = node[word]
    return schema


def _is_pod_template(node: dict[str, Any]) -> bool:
    spec = node.get("properties", {}).get("spec", {})
    return "containers" in spec.get("properties", {})


def reduce_crd(crd: dict[str, Any], origin: str) -> dict[str, Any]:
    """The served versions of a definition, with where it comes from."""
    spec = crd["spec"]
    versions = {}
    for version in spec["versions"]:
        if not version["served"]:
            continue
        schema = strict_schema(version["schema"]["openAPIV3Schema"])
        schema["properties"].pop("status", None)
        schema["properties"]["metadata"] = _METADATA
        versions[version["name"]] = schema
    names = spec["names"]
    return {
        "origin": origin,
        "license": "Apache-2.0",
        "group": spec["group"],
        "kind": names["kind"],
        "plural": names["plural"],
        "versions": versions,
    }


def load_crds() -> list[dict[str, Any]]:
    """All reduced definitions."""
    return [json.loads(path.read_text()) for path in sorted(CRDS.glob("*.json"))]


def main(path: str, origin: str) -> None:
    """Write one reduced definition."""
    reduced = reduce_crd(yaml.safe_load(Path(path).read_text()), origin)
    target = CRDS / f"{reduced['kind'].lower()}.json"
    target.write_text(json.dumps(reduced, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
