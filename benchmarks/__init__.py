"""What `make bench` runs: our ways of decoding and two public peers, side by side in one run."""
