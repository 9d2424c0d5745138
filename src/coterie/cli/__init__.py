"""The command line: one file for each family of commands."""

# Each module registers its commands, in the order of `coterie --help`.
# isort: off
from coterie.cli import train, lists, use, hub, deploy, doctor

# isort: on
from coterie.cli.base import app, main

__all__ = ["app", "deploy", "doctor", "hub", "lists", "main", "train", "use"]
