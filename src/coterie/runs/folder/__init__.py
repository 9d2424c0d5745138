"""The folder of a run: what lies in it, who may write to it, and what it is resumed from."""
