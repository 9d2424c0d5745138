"""The papers' tables and figures, run and compared with what was published."""
