"""The two ways to reach the stages: Triton models of their own or this process."""
