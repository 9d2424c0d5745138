"""Sources and licences of `multilingual` and `topics` (built by `scripts/build_corpora.py`), and
the part of them in a checkout of the repository.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PART = "corpora"  # the folder of the repository: outside of the package, so no wheel has it
BUILD = "scripts/build_corpora.py"


class Origin(NamedTuple):
    """A source of text."""

    of: tuple[str, ...]  # the languages or the topic from this source
    what: str
    address: str
    licence: str


MULTILINGUAL = (
    Origin(
        ("de", "es", "fr", "it", "nl"),
        "Wikipedia sentences of WikiNEuRal",
        "https://huggingface.co/datasets/Babelscape/wikineural",
        "CC BY-SA; its labels, which are not used, CC BY-NC-SA",
    ),
    Origin(
        ("ca",),
        "Softcatala's sentences and Common Voice prompts",
        "https://github.com/Softcatala/ca-text-corpus",
        "CC0",
    ),
)
TOPICS = (
    Origin(
        ("books",),
        "English novels of ELTeC",
        "https://github.com/COST-ELTeC/ELTeC-eng",
        "public domain",
    ),
    Origin(
        ("arxiv",),
        "the Stacks project",
        "https://github.com/stacks/stacks-project",
        "GFDL 1.2 or later",
    ),
    Origin(
        ("stackexchange",),
        "Quantum Computing Stack Exchange",
        "https://archive.org/download/stackexchange/quantumcomputing.stackexchange.com.7z",
        "CC BY-SA",
    ),
    Origin(
        ("code",),
        "CPython's standard library",
        "https://www.python.org/ftp/python/3.11.7/Python-3.11.7.tgz",
        "PSF",
    ),
)


def listed(origins: Sequence[Origin]) -> str:
    """Return a line per source: its topics, description, address and licence."""
    return "\n".join(f"  {', '.join(o.of)}: {o.what}, {o.address} ({o.licence})" for o in origins)


def in_checkout(files: Sequence[str]) -> dict[str, Path]:
    """Return the paths of files such as `topics/train.jsonl.gz` in the checkout, by name; {} if one
    is missing or this package is not in a checkout.
    """
    source = Path(__file__).resolve().parents[2]
    paths = {f"{PART}/{file}": source.parent / PART / file for file in files}
    return paths if source.name == "src" and all(path.is_file() for path in paths.values()) else {}
