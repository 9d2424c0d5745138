"""Sources and licences of `multilingual` and `topics` (built by `scripts/build_corpora.py`), and
the part of them in a checkout of the repository.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coterie.core.foreign import read_text, yaml_of

PART = "corpora"  # the folder of the repository: outside of the package, so no wheel has it
BUILD = "scripts/build_corpora.py"


class Origin(NamedTuple):
    """A source of text."""

    of: Sequence[str]  # the languages or the topic from this source
    what: str
    address: str
    licence: str


_SOURCES = yaml_of(read_text(Path(__file__).with_name("origins.yaml")))
MULTILINGUAL, TOPICS = (
    tuple(Origin(**source) for source in _SOURCES[corpus]) for corpus in ("multilingual", "topics")
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
