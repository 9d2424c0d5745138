"""The documentation site: pages from docs/, from the code, and from measured results."""
