"""Start a real Triton server from its PyPI wheel, bring the demo target, and run the demo."""
