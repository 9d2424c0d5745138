"""The papers' tables, figures and theorems: run, measured, and put beside what was published."""
