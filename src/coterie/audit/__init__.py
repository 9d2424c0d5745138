"""Measurement of how much of a client's text the shared part of a run reveals, from the run's
folder, on a machine with all data.
"""

from coterie.audit.auditing import Settings, audit

__all__ = ["Settings", "audit"]
