"""How far the time that a command says beforehand is from the time that it takes.

    python benchmarks/estimates.py [--json FILE] [--runs N] [--time [--base FILE.gguf]]

Each command is run as people run it, in a process of its own. Foreseen is what the progress display
shows at the start, for all methods together; real is the time from then to the end. The aim is a
ratio of 0.8 to 1.3 on a quiet machine.

With `--time`: how long commands with `--time` take from their start to their end, to
estimates_time.json. The texts are of corpora/topics, so much that all of them would take hours; the
aim is 0.8 to 1.2 of the time that was asked for.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS, report

import coterie

COMMANDS = {
    "run quickstart": ("run", "quickstart", {}),
    "run cobo-digits": ("run", "cobo-digits", {}),
    "compare cobo fedavg local": (
        "compare",
        "cobo-digits",
        {"methods": ["cobo", "fedavg", "local"]},
    ),
}
AIM = (0.8, 1.3)
TOPICS = Path(__file__).parents[1] / "corpora/topics/train.jsonl.gz"
TEXT = 400_000  # characters of a client
TIMED: dict[str, tuple[float, list[str]]] = {  # seconds, and the command; BASE: --base
    "folders": (180, ["folders", "--set", "data.path=folders"]),
    "a table": (180, ["table", "--set", "data.path=table.jsonl"]),
    "folders, CoMiGS-1G1S": (
        240,
        ["folders", "--set", "data.path=folders", "--set", "method=comigs-1g1s"],
    ),
    "folders, SmolLM2-135M": (
        420,
        ["folders", "--set", "data.path=folders", "--set", "model.base=BASE"],
    ),
    "a table, SmolLM2-135M, Local alone": (
        300,
        [
            *("table", "--set", "data.path=table.jsonl", "--set", "model.base=BASE"),
            *("--set", "method=local", "--set", "compare_with=[]"),
        ],
    ),
}
IN_TIME = (0.8, 1.2)


class Clock(coterie.Callback):
    """Notes what is foreseen, and when."""

    shows_estimate = True

    def __init__(self) -> None:
        self.foreseen, self.begun = 0.0, 0.0

    def expects(self, seconds: Sequence[float]) -> None:
        self.foreseen, self.begun = sum(seconds), time.monotonic()


def measure(name: str) -> dict[str, float]:
    """Return seconds foreseen and real of one command, run in this process."""
    kind, recipe, options = COMMANDS[name]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "run":
            coterie.run(recipe, out=Path(folder, "run"), callbacks=[clock])
        else:
            coterie.compare(
                options["methods"], recipe, seeds=1, out=Path(folder, "run"), callbacks=[clock]
            )
        real = time.monotonic() - clock.begun
    return {"foreseen_s": clock.foreseen, "real_s": real, "ratio": clock.foreseen / real}


def write_texts(folder: Path) -> None:
    """Write four clients' texts, as folders and as a table."""
    texts: dict[str, str] = {}
    for line in gzip.decompress(TOPICS.read_bytes()).decode().splitlines():
        document = json.loads(line)
        topic = document["topic"]
        texts[topic] = (texts.get(topic, "") + document["text"] + "\n\n")[:TEXT]
    rows = []
    for topic, text in texts.items():
        (folder / "folders" / topic).mkdir(parents=True)
        (folder / "folders" / topic / "text.txt").write_text(text, encoding="utf-8")
        rows += [{"client": topic, "text": part} for part in text.split("\n\n") if part.strip()]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "table.jsonl").write_text(lines, encoding="utf-8")


def in_time(name: str, base: str) -> dict[str, float]:
    """Return the seconds asked for and real of one command."""
    asked, options = TIMED[name]
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        command = ["coterie", "run", *(text.replace("BASE", base) for text in options)]
        start = time.monotonic()
        subprocess.run(
            [*command, "--time", f"{asked:g}s", "--out", "run"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        real = time.monotonic() - start
    return {"asked_s": asked, "real_s": real, "ratio": real / asked}


def main() -> None:
    """Measure all commands, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--time", action="store_true", help="commands with --time")
    parser.add_argument("--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="or a file")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one command, in a process of its own
    chosen = parser.parse_args()
    if chosen.only:
        print(json.dumps(measure(chosen.only)))
        return
    rows: list[dict[str, object]] = []
    for name in TIMED if chosen.time else COMMANDS:
        for _ in range(chosen.runs):
            if chosen.time:
                rows.append({"command": name, **in_time(name, chosen.base)})
            else:
                command = [sys.executable, __file__, "--only", name]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                rows.append({"command": name, **json.loads(output.splitlines()[-1])})
            print(rows[-1], flush=True)
    kept = RESULTS / f"estimates{'_time' * chosen.time}.json"
    report(rows, chosen.json or kept, aim=IN_TIME if chosen.time else AIM)


if __name__ == "__main__":
    main()
