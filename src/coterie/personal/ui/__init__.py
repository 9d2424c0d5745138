"""Personal models on a page or in a terminal."""
