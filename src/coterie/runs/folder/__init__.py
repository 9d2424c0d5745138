"""The folder of a run: its contents, its lock, and what a run is resumed from."""
