"""Where the library meets Triton: the only package that imports its Python backend's module."""
