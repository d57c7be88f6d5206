"""Triton loads this file; the stage itself is `ddtree.triton_io.stage_model.DrafterModel`."""

from ddtree.triton_io.stage_model import DrafterModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
