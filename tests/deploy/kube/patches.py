"""How a PATCH changes an object: merge patches (RFC 7386), and Kubernetes' strategic merge patches.

A strategic patch merges lists of objects by a key that the schema names. What Helm 3 sends for built-in kinds
is of this form; custom kinds get plain merge patches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

Node = dict[str, Any]
Resolve = Callable[[Node], Node]


def merge(current: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, everything else replaces."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(current) if isinstance(current, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def apply(current: Any, before: Any, wanted: Mapping[str, Any]) -> Any:
    """Server-side apply by one manager: what it set before and wants no more goes, what others set stays.

    Lists are replaced whole, as nobody else adds to them here.
    """
    return merge(current, _with_removals(before, wanted))


def _with_removals(before: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = dict(wanted)
    for key, value in (before if isinstance(before, Mapping) else {}).items():
        if key not in wanted:
            patch[key] = None
        elif isinstance(value, Mapping) and isinstance(wanted[key], Mapping):
            patch[key] = _with_removals(value, wanted[key])
    return patch


def strategic_merge(current: Any, patch: Mapping[str, Any], schema: Node, resolve: Resolve) -> Any:
    """Merge by the schema's keys.

    Args:
        current: what is there.
        patch: what is sent, with the directives `$patch`, `$setElementOrder/…`, `$deleteFromPrimitiveList/…`
            and `$retainKeys`.
        schema: the JSON schema of this node.
        resolve: follows `$ref`.
    """
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    schema = resolve(schema)
    result = dict(current) if isinstance(current, Mapping) else {}
    for key in set(result) - set(patch.get("$retainKeys", result)):
        del result[key]
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            result[name] = [item for item in result.get(name, ()) if item not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        else:
            node = _child(schema, key, resolve)
            order = patch.get(f"$setElementOrder/{key}")
            result[key] = _merge_value(result.get(key), value, node, resolve, order)
    return result


def _child(schema: Node, key: str, resolve: Resolve) -> Node:
    declared = schema.get("properties", {}).get(key)
    extra = schema.get("additionalProperties")
    node = declared or (extra if isinstance(extra, dict) else {})
    # Beside a `$ref` stand the list's own keys: keep both.
    return {**resolve(node), **{name: value for name, value in node.items() if name != "$ref"}}


def _merge_value(current: Any, value: Any, node: Node, resolve: Resolve, order: Any) -> Any:
    if isinstance(value, Mapping):
        return strategic_merge(current, value, node, resolve)
    is_merged = "merge" in str(node.get("x-kubernetes-patch-strategy", ""))
    if not isinstance(value, list) or not is_merged or not isinstance(current, list):
        return copy.deepcopy(value)
    key = node.get("x-kubernetes-patch-merge-key")
    if key is None:
        return [*current, *(item for item in value if item not in current)]
    return _merge_list(current, value, key, resolve(node["items"]), resolve, order)


def _merge_list(
    current: list[Node], patch: list[Node], key: str, item_schema: Node, resolve: Resolve, order: Any
) -> list[Node]:
    items = {item[key]: item for item in current}
    for change in patch:
        name = change[key]
        if change.get("$patch") == "delete":
            items.pop(name, None)
        else:
            items[name] = strategic_merge(items.get(name), change, item_schema, resolve)
    if order:
        places = {entry[key]: place for place, entry in enumerate(order)}
        return sorted(items.values(), key=lambda item: places.get(item[key], len(places)))
    return list(items.values())
