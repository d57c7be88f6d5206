"""DDTree for Triton: tree speculative decoding behind NVIDIA Triton Inference Server."""
