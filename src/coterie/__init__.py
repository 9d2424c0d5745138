"""coterie: personal models, trained together without sharing data."""

__version__ = "0.1.0"
