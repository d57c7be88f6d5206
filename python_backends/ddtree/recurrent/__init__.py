"""Recurrent layers under a draft tree: Gated DeltaNet's tree form, the pool of states, and its kernels."""
