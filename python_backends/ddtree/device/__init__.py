"""What runs on a GPU without a look at the host: kernels, graphs, and the round made of them."""
