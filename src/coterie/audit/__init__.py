"""Measurement of how much of a client's text the shared part of a run reveals.

It works on the run's folder, where all data are on this machine.
"""

from coterie.audit.auditing import Settings, audit

__all__ = ["Settings", "audit"]
