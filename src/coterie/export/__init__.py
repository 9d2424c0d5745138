"""Export of personal models for other programs, each checked in the program that it is for."""

from coterie.export.frame import FORMATS, Exported, Source, export

__all__ = ["FORMATS", "Exported", "Source", "export"]
