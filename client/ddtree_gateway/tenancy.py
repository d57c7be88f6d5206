"""Which callers may share cached prompts: those with the same key, and nobody else.

A shared prompt is answered sooner, so who shares can find out what others asked. Knows no server.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

from ddtree_gateway.options import Order


def apart(order: Order, tenant: bytes | None) -> Order:
    """The order under a salt of its caller's own, which no other caller can name.

    Args:
        order: what is asked; its `cache_salt` keeps prompts of one caller apart from each other.
        tenant: the digest of the caller's key; None where the gateway asks for none: all callers are one.
    """
    if tenant is None:
        return order
    salt = str(order.options.get("cache_salt", ""))
    own = hmac.new(tenant, salt.encode("utf-8", errors="surrogatepass"), hashlib.sha256).hexdigest()
    return replace(order, options={**order.options, "cache_salt": own})
