"""The Triton server inside the PyPI wheel `nvidia-pytriton`, made ready to run.

The wheel keeps one Python backend stub per Python version in a folder of its own; Triton wants the right one
beside the backend's library. So a small runtime folder is laid out once and kept. Nothing is started here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddtree_local.errors import PrerequisiteError
from ddtree_local.prerequisites import python_name, shared_libpython

_DISTRIBUTION = "nvidia-pytriton"
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class TritonRuntime:
    """A server that can be started."""

    server: Path  # the tritonserver binary, where the wheel has it
    backends: Path  # for --backend-directory: one folder `python` with library, stub and pb_utils
    library_path: tuple[
        Path, ...
    ]  # for LD_LIBRARY_PATH: the wheel's libraries, and one folder with libpython


def _wheel_folder() -> Path:
    # find_spec does not run the package, whose import pulls in a client, zmq and typer.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise PrerequisiteError(
            f"{_DISTRIBUTION}: not installed in {sys.prefix}; run `make setup`, "
            "or pip install -r requirements/local.txt"
        )
    return Path(spec.origin).parent


def default_cache() -> Path:
    """Where runtime folders are kept: in the virtual environment, else in the user's cache."""
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "share" / "ddtree-local"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree-local"


def _lay_out(folder: Path, backend: Path, stub: Path, libpython: Path) -> None:
    python_backend = folder / "backends" / "python"
    python_backend.mkdir(parents=True)
    for source in [backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub]:
        shutil.copy2(source, python_backend / source.name)
    # Only this one library: its own folder may hold others that would shadow the wheel's.
    libraries = folder / "lib"
    libraries.mkdir()
    (libraries / f"lib{python_name()}.so.1.0").symlink_to(libpython)


def prepare_runtime(cache: Path | None = None) -> TritonRuntime:
    """Find the wheel of the running interpreter and lay out its runtime folder, once per version.

    Args:
        cache: a writable folder; default `default_cache()`.

    Raises:
        PrerequisiteError: no wheel installed, no stub in it for this Python, or no libpython.
    """
    wheel = _wheel_folder()
    bundle = wheel / "tritonserver"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = bundle / "python_backend_stubs" / version / _STUB
    libpython = shared_libpython()
    if not stub.is_file():
        raise PrerequisiteError(
            f"{_DISTRIBUTION}: has no Python backend stub for Python {version} (at {stub}); "
            "use CPython 3.10, 3.11 or 3.12"
        )
    if libpython is None:
        raise PrerequisiteError(
            f"shared libpython: lib{python_name()}.so.1.0 is missing; "
            "`python3 deploy/local/ddtree_local/prerequisites.py` says how to get it"
        )
    kept = (cache or default_cache()) / (
        f"triton-{importlib.metadata.version(_DISTRIBUTION)}-{python_name()}"
    )
    if not kept.is_dir() or not (kept / "lib" / f"lib{python_name()}.so.1.0").exists():
        _replace(kept, bundle / "backends" / "python", stub, libpython)
    return TritonRuntime(
        server=bundle / "bin" / "tritonserver",
        backends=kept / "backends",
        library_path=(wheel.parent / "nvidia_pytriton.libs", kept / "lib"),
    )


def _replace(kept: Path, backend: Path, stub: Path, libpython: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    if kept.is_dir():
        shutil.rmtree(kept)
    fresh = Path(tempfile.mkdtemp(prefix=f".{kept.name}-", dir=kept.parent))
    try:
        fresh.chmod(0o755)
        _lay_out(fresh, backend, stub, libpython)
        fresh.rename(kept)
    except OSError:
        # Somebody else laid out the same folder a moment earlier: theirs is as good.
        if not (kept / "backends").is_dir():
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
