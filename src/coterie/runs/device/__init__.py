"""One client on a machine of its own: its data and state, its owner's limits and account."""
