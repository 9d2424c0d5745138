"""The version of this package."""

__version__ = "0.1.0"
# where it is published; None: nowhere yet, and others may own its name, so that nothing links there
HOME: str | None = None
