"""Trains a DFlash drafter: the target answers prompts, and a small drafter learns to foresee the answers."""
