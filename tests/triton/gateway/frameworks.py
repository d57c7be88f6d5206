"""The environment of the examples that bring a world of their own: LangChain, LlamaIndex, Jupyter.

They want another release of `openai` than ours. `python -m tests.triton.gateway.frameworks [pip's arguments]`
makes the environment ahead of time; `frameworks_python()` does it on first use.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.kube.tools import ensure

_REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements" / "examples" / "frameworks.txt"


def frameworks_python(pip_args: Sequence[str] = ()) -> Path:
    """The interpreter of that environment, made if it is not there yet."""

    def bring(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *pip_args, "-r", str(_REQUIREMENTS)], check=True)

    content = _REQUIREMENTS.read_bytes() + sys.version.encode()
    return ensure("examples", content, bring) / "bin" / "python"


if __name__ == "__main__":
    frameworks_python(sys.argv[1:])
