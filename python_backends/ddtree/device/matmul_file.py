"""The file that keeps which way of multiplying won, for one device and one set of versions.

    {"key": {"device": "NVIDIA H200", "torch": "2.11.0", …},
     "choices": {"6144x4096 bfloat16": {"16": {"config": {"kind": "dot", …}, "micros": 13.1, …}}}}

A file that cannot be read, or was written for something else, counts as none. This module does not know how
anything is measured.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree.device.matmul_candidates import Config

_LOG = logging.getLogger(__name__)

# Choices made among other kernels or other candidates say nothing about today's.
_SOURCES = ("matmul_candidates.py", "kernels/matmul.py")


@dataclass(frozen=True)
class Choice:
    """What won for one weight and bucket."""

    config: Config | None  # None: the library
    micros: float  # of the winner
    library_micros: float


Choices = dict[int, Choice]  # by the most rows of a bucket


class ChoiceFile:
    """Reads and writes the choices of all kinds of weight, by their names."""

    def __init__(self, path: Path, key: Mapping[str, str]) -> None:
        self._path, self._key = path, dict(key)

    @classmethod
    def of(cls, folder: Path, device: torch.device) -> ChoiceFile:
        """The file for a device, which has a name of its own in the folder."""
        import triton  # choices are made only where it is

        is_cuda = device.type == "cuda"
        here = Path(__file__).parent
        sources = b"".join((here / name).read_bytes() for name in _SOURCES)
        key = {
            "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
            "torch": torch.__version__,
            "triton": str(triton.__version__),
            "kernels": f"{zlib.crc32(sources):08x}",
        }
        return cls(folder / f"matmul-{zlib.crc32(repr(key).encode()):08x}.json", key)

    def read(self) -> dict[str, Choices]:
        """What is stored; nothing when the file is missing, broken or somebody else's."""
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document["key"] != self._key:
                _LOG.info("%s was written for %s: not used", self._path, document["key"])
                return {}
            return {
                str(name): {int(most): _choice(stored) for most, stored in buckets.items()}
                for name, buckets in document["choices"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _LOG.warning("%s cannot be read and will be written again: %r", self._path, error)
            return {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this machine from measuring meanwhile: two at once measure each other."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(self._path.parent, os.O_RDONLY)
        except OSError:  # `write` says so
            yield
            return
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def write(self, choices: Mapping[str, Choices]) -> None:
        """Add choices to the file; it appears whole or not at all, and a folder that refuses is no error."""
        merged = self.read()
        for name, buckets in choices.items():
            merged[name] = {**merged.get(name, {}), **buckets}
        document = {
            "key": self._key,
            "choices": {
                name: {str(most): asdict(choice) for most, choice in sorted(buckets.items())}
                for name, buckets in sorted(merged.items())
            },
        }
        # Two processes of one server may be at it: each writes a file of its own first.
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            _LOG.warning("%s cannot be written, so the next start measures again: %s", self._path, error)


def _choice(stored: dict[str, Any]) -> Choice:
    config = stored["config"]
    return Choice(
        None if config is None else Config(**config),
        float(stored["micros"]),
        float(stored["library_micros"]),
    )
