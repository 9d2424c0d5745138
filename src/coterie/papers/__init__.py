"""The papers' tables and figures: run, measured, and compared with what was published. Their
theorems are in `theorems/`, at the top of a checkout.
"""
