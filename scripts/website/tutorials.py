"""Tutorials: Markdown whose programs are run, and whose outputs are what they print.

    python scripts/website/tutorials.py [--check] [NAME ...]

A block of `python` or `sh` is a cell; a block of `text` right behind it is its output, which this
program writes. The cells of a page run one after the other in a new folder, those in Python in one
interpreter. `--check` runs them, too, and compares. Numbers may differ, for they depend on the
machine and the versions; words may not, but where the block is `text title="for example"`.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
CELL = re.compile(
    r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n```text(?P<mark>[^\n]*)\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
PROGRESS = re.compile(
    r"\[\d+/\d+\] |  (after |)round \d|  scoring|  the machine|is short of|loading "
    r"|about .*estimated| *short of cores|chosen: |(processes )?compute\)"
    r"|\S+: \d+ rounds, \d+ clients$"
)
NUMBER = re.compile(r"[-+]?\d[\d.,:e+-]*")


@dataclass(frozen=True)
class Cell:
    """A program of a page.

    Args:
        kind: `python` or `sh`.
        code: The program.
        mark: Behind ```` ```text ````; not empty where words of the output may differ.
        output: What the page says that it prints; None if it shows none.
    """

    kind: str
    code: str
    mark: str
    output: str | None


def cells(page: str) -> Iterator[Cell]:
    """Yield the programs of a page, in order."""
    for found in CELL.finditer(page):
        yield Cell(found["kind"], found["code"], found["mark"] or "", found["output"])


def run(page: str) -> list[str]:
    """Run the programs of a page in the current folder; return what each printed."""
    names: dict[str, object] = {"__name__": "__main__"}
    sys.path.insert(0, "")
    outputs = []
    for number, cell in enumerate(cells(page), 1):
        if cell.kind == "sh":
            outputs.append(shell(cell.code))
        else:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(cell.code, f"cell {number}", "exec"), names)
            outputs.append(said.getvalue())
    return ["\n".join(map(str.rstrip, output.strip().splitlines())) + "\n" for output in outputs]


def shell(code: str) -> str:
    """Return what commands print, without their progress."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-e", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{code}exited with {done.returncode}:\n{done.stderr}")
    return without_progress(done.stdout)


def without_progress(output: str) -> str:
    """Return an output without the lines that say how far a run is, which differ each time."""
    return "".join(line for line in output.splitlines(True) if not PROGRESS.match(line))


def written(page: str, outputs: list[str]) -> str:
    """Return a page with its outputs as they are now, where it shows any."""
    remaining = iter(outputs)

    def renew(found: re.Match[str]) -> str:
        output = next(remaining)
        if found["output"] is None:
            return found[0]
        return (
            f"```{found['kind']}\n{found['code']}```\n\n```text{found['mark'] or ''}\n{output}```\n"
        )

    return CELL.sub(renew, page)


def differences(page: str, outputs: list[str]) -> list[str]:
    """Return which outputs of a page have other words than these."""
    wrong = []
    for cell, output in zip(cells(page), outputs, strict=True):
        shown = cell.output
        if shown is None or (cell.mark and output.strip()):
            continue
        if words(shown) != words(output):
            wrong.append(f"{cell.code}prints\n{output}and not\n{shown}")
    return wrong


def words(text: str) -> list[str]:
    """Return the words of an output: without numbers, and without the lines of tables."""
    return [w for w in NUMBER.sub("#", text).split() if not re.fullmatch(r"[─━═|+#-]+", w)]


def notebook(page: str) -> Mapping[str, object]:
    """Return a page as a notebook of Jupyter, with its outputs."""
    found: list[dict[str, Any]] = []
    at = 0
    for match in CELL.finditer(page):
        found.append({"cell_type": "markdown", "metadata": {}, "source": page[at : match.start()]})
        magic = "%%bash\n" if match["kind"] == "sh" else ""
        output = [{"output_type": "stream", "name": "stdout", "text": match["output"] or ""}]
        found.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "metadata": {},
                "outputs": output if match["output"] else [],
                "source": magic + match["code"].rstrip(),
            }
        )
        at = match.end()
    found.append({"cell_type": "markdown", "metadata": {}, "source": page[at:]})
    kept = [cell for cell in found if cell["cell_type"] == "code" or str(cell["source"]).strip()]
    for number, cell in enumerate(kept):
        cell["id"] = f"cell-{number}"
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": python, "language_info": {"name": "python"}}
    return {"cells": kept, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main(names: list[str], check: bool) -> int:
    """Run tutorials, and write or compare their outputs; returns how many are wrong."""
    wrong = 0
    for name in names or sorted(path.stem for path in TUTORIALS.glob("*.md")):
        if name == "README":
            continue
        page = TUTORIALS / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = run(text)
        if not check:
            page.write_text(written(text, outputs), encoding="utf-8")
        elif found := differences(text, outputs):
            print(f"{page}:", *found, sep="\n")
            wrong += 1
    return wrong


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--check"]
    sys.exit(main(given, "--check" in sys.argv))
