"""Brings the public `dflash` package into a folder that only its worker sees.

Without its dependencies: it pins other releases of what this project has pinned, and would bring torch again.
It runs on the project's own torch and transformers, as the other players do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.errors import BenchmarkError

REQUIREMENT = "dflash==0.1.0"


def ensure_dflash(cache: Path) -> Path:
    """The folder to put in front of the worker's import path; made on the first call.

    Raises:
        BenchmarkError: pip could not bring it.
    """
    made = cache / "bench-dflash" / REQUIREMENT.replace("==", "-")
    if made.is_dir():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=made.parent))
    try:
        target = work / "packages"
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
             "--target", str(target), REQUIREMENT],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = said[-1] if said else f"pip ended with {done.returncode}"
            raise BenchmarkError(f"{REQUIREMENT} could not be installed ({reason}); check the network")
        target.rename(made)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made
