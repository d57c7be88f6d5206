"""The verifier stage with the stub library where TensorRT-LLM would be; everything else of the stage is real.

The tests' folder is named by DDTREE_TEST_FOLDER: the tests are no installed package. DDTREE_TEST_TRTLLM says
what is installed: `recorded`, or `other` with private calls of another form.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.triton_io import stage_model
from ddtree.trtllm.contract import load_contracts
from ddtree.trtllm.stage import load_engine_verifier


def _stub() -> Any:
    """The stub library; the tests' package is made known under its name without touching the search path."""
    folder = Path(os.environ["DDTREE_TEST_FOLDER"])
    spec = importlib.util.spec_from_file_location(
        "tests", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["tests"] = package
    spec.loader.exec_module(package)
    library = importlib.import_module("tests.fakes.trtllm_library").FakeLibrary(load_contracts()[0])
    if os.environ["DDTREE_TEST_TRTLLM"] == "other":
        library.replace("relocate", lambda requests: requests)
    return library


def _load_verifier(config: ServingConfig) -> Any:
    assert config.engine == "trtllm"
    draft = open_checkpoint(config.draft)
    return load_engine_verifier(
        config, draft, lambda target: assembly.build_verifier(config, draft, target), _stub()
    )


class TritonPythonModel(stage_model.TargetVerifierModel):
    """The model `target_verifier`."""

    def initialize(self, args: Any) -> None:
        """Load as the product does, with the stub."""
        assembly.load_verifier = _load_verifier
        super().initialize(args)
