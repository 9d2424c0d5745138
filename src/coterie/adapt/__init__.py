"""Adaptation to clients that a run has never seen: personal models, and a run's shared part."""
