"""Python's standard library as a corpus: real text that comes with the package."""

from pathlib import Path
from typing import Literal

from coterie.core.protocol import ClientId
from coterie.data.documents import cut, read_rows
from coterie.data.section import Section, Source, TextFractions, Texts, stamps
from coterie.data.splitting import keyed_by_text, split

MODULES = Path(__file__).parent / "python/modules.jsonl.gz"  # by scripts/stdlib_texts.py


class Stdlib(Section):
    """Four topics of the standard library of Python 3.11.7: real text that comes with the package,
    and that the embedded base has not seen.
    """

    kind: Literal["stdlib"] = "stdlib"
    fractions: TextFractions = (0.8, 0.1, 0.1)

    @property
    def title(self) -> str:
        return "Python's standard library"

    def source(self) -> Source:
        return Source(stamps([MODULES]), self._read)

    def _read(self) -> Texts:
        chunks: dict[ClientId, list[str]] = {}
        for row in read_rows(MODULES, {"client": str, "text": str}):
            chunks.setdefault(row["client"], []).extend(cut(row["text"]))
        return {
            topic: split(keyed_by_text(texts), self.fractions, self.seed)
            for topic, texts in chunks.items()
        }
