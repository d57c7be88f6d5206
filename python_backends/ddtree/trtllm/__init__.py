"""Targets run by TensorRT-LLM. Nothing here has run on the real engine yet: see docs/TENSORRT_LLM.md."""
