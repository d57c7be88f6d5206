"""Slow, obvious references that the fast code is compared with."""
