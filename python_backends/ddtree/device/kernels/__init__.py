"""Kernels in the Triton language; imported only where they run. Each wrapper allocates by shape alone."""
