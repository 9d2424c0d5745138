"""What people see of a run: progress while it goes on, tables and figures afterwards."""

from coterie.reports.reporter import Reporter

__all__ = ["Reporter"]
