"""From a recipe to its result: recipes, loaded problems, the loop, devices, and tuning."""
