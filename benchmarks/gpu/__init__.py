"""`make bench-gpu`: what a round costs on one GPU, next to what its memory allows."""
