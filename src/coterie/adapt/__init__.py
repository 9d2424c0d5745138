"""Adaptation to unseen clients: personal models, and a run's shared part."""
