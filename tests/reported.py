"""Runs and comparisons with their reports, as `coterie.run` and `coterie.compare` write them; for
tests that need all results, or a backend of their own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.core.result import Comparison, Result
from coterie.reports.html import write_comparison, write_report
from coterie.runs import run as runs
from coterie.runs.recipes.recipe import Recipe


def run(recipe: Recipe, folder: Path, **options: Any) -> list[Result]:
    """Run a recipe into a folder, and write the report."""
    results = runs.run(recipe, folder, **options)
    write_report(folder, results, recipe.description)
    return results


def compare(methods: Sequence[str], recipe: Recipe, folder: Path, **options: Any) -> Comparison:
    """Compare methods in a folder, and write the report."""
    comparison = runs.compare(methods, recipe, folder, **options)
    write_comparison(folder, comparison, recipe.description)
    return comparison
