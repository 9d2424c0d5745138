"""A recipe, from its YAML to its result."""
