"""Write the text of the recipe `quickstart`: a part of the standard library of a version of Python.

    python scripts/stdlib_texts.py LIB [--out src/coterie/data/python/modules.jsonl.gz]

LIB is the folder `Lib` of CPython's source, or `lib/python3.11` of an installation; what is in the
package is of 3.11.7. Each line is a module: the client that reads it, its file, and its text; of
the language reference the text itself, without the Python literals that it is wrapped in. The same
input makes the same bytes (with the same zlib).
"""

import argparse
import ast
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

from coterie.data.corpora import MODULES
from coterie.data.origins import STDLIB_TOPICS


def modules(lib: Path) -> Iterator[dict[str, str]]:
    """Yield the modules of each client, without the empty ones that make folders into packages."""
    for client, patterns in STDLIB_TOPICS.items():
        for pattern in patterns:
            found = [path for path in sorted(lib.glob(pattern)) if path.stat().st_size]
            if not found:
                raise SystemExit(f"{lib} has no {pattern}: give the standard library's folder")
            for path in found:
                yield {
                    "client": client,
                    "file": path.relative_to(lib).as_posix(),
                    "text": _text_of(path),
                }


def _text_of(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    if not path.match("pydoc_data/topics.py"):
        return source
    [topics] = [s.value for s in ast.parse(source).body if isinstance(s, ast.Assign)]
    return "\n\n".join(ast.literal_eval(topics).values())


def packed(rows: Iterator[dict[str, str]]) -> bytes:
    """Return JSON lines, gzipped."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lib", type=Path)
    parser.add_argument("--out", type=Path, default=MODULES)
    args = parser.parse_args()
    args.out.write_bytes(packed(modules(args.lib)))


if __name__ == "__main__":
    main()
