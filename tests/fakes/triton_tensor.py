"""A tensor as Triton's Python backend has it, where its own module is not."""

from __future__ import annotations

from typing import Any

import numpy as np


class Tensor:
    """As Triton's."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array
