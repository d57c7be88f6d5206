"""Attention over committed pages and a staged tree, behind transformers' attention interface."""
