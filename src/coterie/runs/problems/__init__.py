"""From a recipe to a learning problem: the base and the data, loaded and checked."""
