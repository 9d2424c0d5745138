"""How a personal model, or several of them, predict fast."""
