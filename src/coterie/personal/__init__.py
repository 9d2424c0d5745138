"""A trained personal model in use."""

from coterie.personal.artifact import About, load, read_about, save

__all__ = ["About", "load", "read_about", "save"]
