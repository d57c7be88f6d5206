"""How a connection is configured, for both clients: address, size limits, reconnecting, encryption.

It opens nothing itself and does not know requests.
"""

from __future__ import annotations

from pathlib import Path

import grpc

from ddtree_client.errors import InvalidRequestError
from ddtree_client.types import Tls

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # One connection per client, and quick reconnecting: a server that has just been started is found within
    # two seconds.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def checked_address(url: str) -> str:
    """``url`` as HOST:PORT. Raises InvalidRequestError for anything with a scheme or without a port."""
    host, _, port = url.rpartition(":")
    if "://" in url or not host or not port.isdigit():
        raise InvalidRequestError(
            f"url must be HOST:PORT of Triton's gRPC port without a scheme, e.g. localhost:8001, got {url!r}"
        )
    return url


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Channel credentials from PEM files. Raises InvalidRequestError when one cannot be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.root_certificates),
        private_key=_read(tls.private_key),
        certificate_chain=_read(tls.certificate_chain),
    )


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read the certificate file {path}: {error.strerror}") from None
