"""The installed TensorRT-LLM behind one recorded contract: every import of it happens here.

`open_library` takes the newest contract that the installed objects fit. What fits none is refused with the
fewest differences there are, one sentence each. This module knows signatures, not what they are called for.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.errors import CheckpointError
from ddtree.trtllm.contract import Comparison, Contract, Importer, compare, load_contracts, resolve

_LOG = logging.getLogger(__name__)
PACKAGE = "tensorrt_llm"
_MOST_TOLD = 4


class EngineUnfit(CheckpointError):
    """The installed TensorRT-LLM, or this GPU, cannot do what is asked of it; the message says why."""


@dataclass(frozen=True)
class Library:
    """Installed objects by the keys of a contract."""

    contract: Contract
    version: str
    importer: Importer = importlib.import_module

    def __getitem__(self, key: str) -> Any:
        """The installed object of a recorded symbol."""
        return resolve(self.contract.symbols[key], self.importer)

    def is_method(self, key: str) -> bool:
        """Whether a symbol is called on an object of its class."""
        return self.contract.symbols[key].kind == "method"


def installed_version(importer: Importer = importlib.import_module) -> str:
    """The version of the installed package.

    Raises:
        EngineUnfit: it is not installed or cannot be imported.
    """
    try:
        return str(getattr(importer(PACKAGE), "__version__", "unknown"))
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise EngineUnfit(f"engine trtllm: {PACKAGE} cannot be imported ({error})") from error
        raise EngineUnfit(
            f"engine trtllm: the package {PACKAGE} is not installed here; run in NVIDIA's TensorRT-LLM image "
            "or set engine to torch"
        ) from None
    except (ImportError, OSError, RuntimeError) as error:  # a driver or library that is missing
        raise EngineUnfit(f"engine trtllm: {PACKAGE} cannot be imported ({error})") from error


def compare_all(group: str, importer: Importer = importlib.import_module) -> tuple[Comparison, ...]:
    """Hold every contract against what is installed, the best fitting one first."""
    comparisons = [compare(contract, group, importer) for contract in load_contracts()]
    return tuple(sorted(comparisons, key=lambda comparison: comparison.broken_symbols))


def open_library(group: str, importer: Importer = importlib.import_module) -> Library:
    """Choose the contract that fits.

    Args:
        group: which symbols are needed, `contract.TREE` or `contract.NATIVE`.
        importer: stands in for `importlib.import_module` in tests.

    Raises:
        EngineUnfit: nothing is installed, or no contract fits it.
    """
    version = installed_version(importer)
    best = compare_all(group, importer)[0]
    if best.breaking:
        raise EngineUnfit(
            f"engine trtllm: {PACKAGE} {version} fits no recorded contract; the nearest is "
            f"{best.contract.name}, and {_told([str(difference) for difference in best.breaking])}"
        )
    for difference in best.differences:
        _LOG.info("%s %s: %s", PACKAGE, version, difference)
    _LOG.info("%s %s fits the contract %s", PACKAGE, version, best.contract.name)
    return Library(best.contract, version, importer)


def _told(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_TOLD
    return "; ".join(differences[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
