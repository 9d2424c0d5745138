"""Reports of a run: progress while it runs; tables, charts and the HTML report afterwards."""

from coterie.reports.callback import Callback, Callbacks

__all__ = ["Callback", "Callbacks"]
