"""Python's standard library as a corpus: real text that is on every machine."""

import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from coterie.core.protocol import ClientId
from coterie.data.documents import cut, keyed_by_text, read_text, split
from coterie.data.pretraining import STDLIB_TOPICS
from coterie.data.refusals import Refusals
from coterie.data.section import Section, Source, TextFractions, Texts, stamps


class Stdlib(Section):
    """Four topics of Python's standard library: real text that every machine has, and that the
    embedded base has not seen.

    The files differ from version to version of Python, and so do the figures.
    """

    kind: Literal["stdlib"] = "stdlib"
    fractions: TextFractions = (0.8, 0.1, 0.1)

    @property
    def title(self) -> str:
        return "Python's standard library"

    def source(self) -> Source:
        folder = Path(sysconfig.get_path("stdlib"))
        files = {
            topic: [path for pattern in patterns for path in _matches(folder, pattern)]
            for topic, patterns in STDLIB_TOPICS.items()
        }
        with Refusals() as refusals:
            for topic in (topic for topic, paths in files.items() if not paths):
                patterns = ", ".join(STDLIB_TOPICS[topic])
                refusals.add(
                    f"client {topic!r}: none of {patterns} in {folder}",
                    "Use a full installation of Python, or other data.",
                )
        return Source(
            stamps(path for paths in files.values() for path in paths), lambda: self._read(files)
        )

    def _read(self, files: Mapping[ClientId, Sequence[Path]]) -> Texts:
        chunks = {
            topic: [chunk for path in paths for chunk in cut(_text_of(path))]
            for topic, paths in files.items()
        }
        return {
            topic: split(keyed_by_text(texts), self.fractions, self.seed)
            for topic, texts in chunks.items()
        }


def _matches(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern, without the empty ones that make folders into packages."""
    return [path for path in sorted(folder.glob(pattern)) if path.stat().st_size]


def _text_of(path: Path) -> str:
    """Return the text of a module; of the language reference the text itself, without the Python
    literals it is wrapped in.
    """
    if path.match("pydoc_data/topics.py"):
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values())
    return read_text(path)
