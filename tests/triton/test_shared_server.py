"""Which end of a shared server is Triton's own crash, after which a test may run again."""

from __future__ import annotations

import pytest

from tests.triton.shared_server import is_frontend_crash

CRASHED = """\
Signal (11) received.
{"level": "info", "message": "a request ended"}
 0# 0x000055957C87052D in /opt/pytriton/tritonserver/bin/tritonserver
 1# 0x00007FEBD505A050 in /lib/x86_64-linux-gnu/libc.so.6
 2# 0x000055957C8DFB25 in FAULT
 3# 0x000055957C8CA88B in /opt/pytriton/tritonserver/bin/tritonserver
"""
FRONTEND = "/opt/pytriton/tritonserver/bin/tritonserver"
EARLIER = "Signal (11) received.\n 0# 0x01 in tritonserver\n 1# 0x02 in libc.so.6\n 2# 0x03 in tritonserver\n"


def test_the_crash_is_told_by_where_it_met_the_signal() -> None:
    assert is_frontend_crash(-11, "loaded\n" + CRASHED.replace("FAULT", FRONTEND))


@pytest.mark.parametrize(
    ("exit_code", "log"),
    [
        (0, CRASHED.replace("FAULT", FRONTEND)),
        (-9, ""),
        (-11, ""),
        (-11, "Signal (11) received.\n"),
        (-11, CRASHED.replace("FAULT", "/opt/backends/python/libtriton_python.so")),
        (-11, EARLIER + CRASHED.replace("FAULT", "/lib/x86_64-linux-gnu/libc.so.6")),
    ],
)
def test_every_other_end_is_a_failure(exit_code: int, log: str) -> None:
    assert not is_frontend_crash(exit_code, log)
