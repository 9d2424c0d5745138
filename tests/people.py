"""Folders of text of people with names of any alphabet, for tests of runs and of devices."""

import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path

DECOMPOSED = unicodedata.normalize("NFD", "ünï code")  # as macOS writes it


def folders_of_text(root: Path, people: Sequence[str], words: Sequence[str]) -> Path:
    """Write a folder for each, that of "ünï code" under its decomposed name."""
    for person in people:
        folder, rng = root / (DECOMPOSED if person == "ünï code" else person), random.Random(person)
        folder.mkdir()
        for k in range(30):
            (folder / f"{k:02d}.txt").write_text(" ".join(rng.choices(words, k=12)))
    return root
