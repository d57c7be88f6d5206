"""The two ways to reach the stages: other Triton models (BLS) or this process."""
