"""The model `ddtree`: see ddtree.triton_io.orchestrator."""

from ddtree.triton_io.orchestrator import TritonPythonModel

__all__ = ["TritonPythonModel"]
