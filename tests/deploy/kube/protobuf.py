"""What Helm sends as protobuf instead of JSON: its releases, which are Secrets, and delete options.

Kubernetes' envelope is `MAGIC` and a message `Unknown{1: TypeMeta, 2: raw}`. Field numbers are those of
k8s.io/api/core/v1/generated.proto. Everything else is refused.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from typing import Any

MAGIC = b"k8s\0"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTH = {_FIXED64: 8, _FIXED32: 4}


class UnsupportedMessageError(Exception):
    """A kind that this module does not read."""


def decode(body: bytes) -> dict[str, Any]:
    """The object in an envelope. Raises UnsupportedMessageError."""
    envelope = _fields(body.removeprefix(MAGIC))
    type_meta = _fields(envelope[1][0])
    kind = type_meta[2][0].decode()
    found: dict[str, Any] = {"apiVersion": type_meta[1][0].decode(), "kind": kind}
    if kind == "DeleteOptions":
        return found
    if kind != "Secret":
        raise UnsupportedMessageError(f"protobuf of kind {kind}; only Secret and DeleteOptions are read")
    secret = _fields(envelope[2][0])
    found["metadata"] = _metadata(secret[1][0])
    data = (_map_entry(entry) for entry in secret[2])
    found["data"] = {key: base64.b64encode(value).decode() for key, value in data}
    if secret[3]:
        found["type"] = secret[3][0].decode()
    return found


def _metadata(message: bytes) -> dict[str, Any]:
    fields = _fields(message)
    metadata: dict[str, Any] = {}
    for number, name in ((1, "name"), (3, "namespace"), (6, "resourceVersion")):
        if fields[number] and fields[number][0]:
            metadata[name] = fields[number][0].decode()
    for number, name in ((11, "labels"), (12, "annotations")):
        if fields[number]:
            entries = (_map_entry(entry) for entry in fields[number])
            metadata[name] = {key: value.decode() for key, value in entries}
    return metadata


def _map_entry(message: bytes) -> tuple[str, bytes]:
    fields = _fields(message)
    return fields[1][0].decode(), fields[2][0] if fields[2] else b""


def _fields(message: bytes) -> defaultdict[int, list[bytes]]:
    """Length-delimited fields by number; numbers are passed over, as nothing here needs one."""
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, at = _varint(message, at)
        elif wire == _BYTES:
            length, at = _varint(message, at)
            found[number].append(message[at : at + length])
            at += length
        else:
            at += _WIDTH[wire]
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
