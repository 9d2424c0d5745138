"""What people see of a run: progress while it goes on, tables, charts and the HTML report
afterwards.
"""

from coterie.reports.callback import Callback, Callbacks

__all__ = ["Callback", "Callbacks"]
