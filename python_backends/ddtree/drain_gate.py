"""A door that an operator closes before a server ends: new requests are refused, those inside finish.

It is closed by a file, `ddtree drain` makes it. Whoever may write into the server's own file system may close
it, and nobody else: no request can, so no client needs to be trusted or to carry a key. Knows no requests.
"""

from __future__ import annotations

from pathlib import Path

from ddtree.errors import Unavailable


class DrainGate:
    """Open as long as the file is not there; without a path always open."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def check(self) -> None:
        """Let a new request pass.

        Raises:
            Unavailable: the gate is closed.
        """
        # Asked for every request: a look at a file that is not there takes two microseconds.
        if self._path is not None and self._path.exists():
            raise Unavailable(
                "this server is draining before it ends and takes no new requests; retry in 1 s at another "
                "replica, or here once it is back"
            )
