"""Where this checkout keeps what the local server needs: model repository, demo drafter, cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree_local.errors import LocalTritonError

_MARK = "model_repository"


@dataclass(frozen=True)
class Project:
    """A checkout of this project."""

    root: Path

    @property
    def model_repository(self) -> Path:
        """The four models that Triton serves."""
        return self.root / _MARK

    @property
    def unary_repository(self) -> Path:
        """The twin for tools that only know one response."""
        return self.root / f"{_MARK}_unary"

    @property
    def demo_draft(self) -> Path:
        """Checkpoint folder of the demo's drafter."""
        return self.root / "drafters" / "smollm2-135m-dflash"

    @property
    def demo_target_cache(self) -> Path:
        """Where the demo target is converted to."""
        return self.root / ".cache" / "demo-target"


def find_project(start: Path | None = None) -> Project:
    """The checkout that holds the current folder, else the one this package runs from.

    Raises:
        LocalTritonError: neither is inside a checkout.
    """
    current = (start or Path.cwd()).resolve()
    for folder in [current, *current.parents, *Path(__file__).resolve().parents]:
        if (folder / _MARK).is_dir():
            return Project(folder)
    raise LocalTritonError(f"project: no {_MARK}/ in {current} or above it; run this inside the checkout")
