"""Triton loads this file; the stage itself is `ddtree.triton_io.stage_model.TargetVerifierModel`."""

from ddtree.triton_io.stage_model import TargetVerifierModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
