"""The papers' tables, figures and theorems: run, measured, and compared with what was published."""
