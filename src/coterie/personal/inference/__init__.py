"""How a personal model, or several of them, predict fast: one model is a batch of one."""
