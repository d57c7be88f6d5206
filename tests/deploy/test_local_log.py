"""The one decisive line is found in logs that Triton 2.51 wrote."""

from __future__ import annotations

import pytest

from ddtree_local.server_log import decisive_line

START = 'I1129 13:42:41.934968 7083 model_lifecycle.cc:472] "loading: echo:1"\n'
END = "error: creating server: Internal - failed to load all models\n"

MODEL_ERROR = (
    START
    + "E1129 13:42:43.497058 7083 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: "
    + 'ConfigError: target: \\"/no/such\\" does not exist;\\nset DDTREE_TARGET\\n\\nAt:\\n'
    + '  /models/echo/1/model.py(6): initialize\\n"\n'
    + "I1129 13:42:43.497074 7083 model_lifecycle.cc:777] \"failed to load 'echo'\"\n"
    + END
)
BAD_CONFIG = (
    "E1129 14:00:00.000001 12 model_repository_manager.cc:1460] "
    "\"Poll failed for model directory 'echo': failed to open text file for read "
    '/m/config.pbtxt: No such file"\n' + END
)
PORT = (
    START
    + 'E1129 14:00:00.000001 12 main.cc:281] "failed to start HTTP service: Unavailable - '
    + "Socket '127.0.0.1:8000' already in use \"\n"
)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            MODEL_ERROR,
            "model 'echo' did not load: ConfigError: target: \"/no/such\" does not exist; set DDTREE_TARGET",
        ),
        (
            BAD_CONFIG,
            "model 'echo' did not load: failed to open text file for read /m/config.pbtxt: No such file",
        ),
        (
            "tritonserver: error while loading shared libraries: libx.so: cannot open shared object file\n",
            "tritonserver: error while loading shared libraries: libx.so: cannot open shared object file",
        ),
        (START + "Signal (11) received.\n 0# 0x0000 in tritonserver\n", "Signal (11) received."),
        (
            START + "error: creating server: Internal - no repository\n",
            "creating server: Internal - no repository",
        ),
        ("first\n\n  last  \n\n", "last"),
        ("", "the server ended without a word"),
    ],
)
def test_decisive_line(log: str, line: str) -> None:
    assert decisive_line(log) == line


def test_a_taken_port_is_decisive() -> None:
    assert "Socket '127.0.0.1:8000' already in use" in decisive_line(PORT)
