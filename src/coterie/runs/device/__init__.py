"""One client on its own machine: data and state, and the owner's limits and account."""
