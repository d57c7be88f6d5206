"""The model `ddtree_unary`: see ddtree.triton_io.unary."""

from ddtree.triton_io.unary import TritonPythonModel

__all__ = ["TritonPythonModel"]
