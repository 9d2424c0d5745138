"""Reports of a run: progress while it runs; tables, charts and the HTML report afterwards."""
