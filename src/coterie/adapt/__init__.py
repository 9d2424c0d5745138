"""Clients that a run has never seen: a personal model for one, and the shared part of a run."""
