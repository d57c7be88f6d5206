"""Triton loads this file; the stage itself is `ddtree.triton_io.stage_model.TreeBuilderModel`."""

from ddtree.triton_io.stage_model import TreeBuilderModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
