"""Ways to carry requests and replies: in one process, in one process over bytes, over Flower."""
