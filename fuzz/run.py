"""Run atheris, a coverage-guided fuzzer, on one reader of foreign bytes.

    python fuzz/run.py TARGET [MINUTES]
    python fuzz/run.py TARGET FILE

Its inputs are kept in build/fuzz/TARGET/, where the next run goes on. The first input of every kind
that breaks the rule of `targets` is written to build/fuzz/TARGET-finding-N, with its traceback
beside it; given as FILE it is run alone. One that takes too long or too much memory ends the run,
and is written to build/fuzz/TARGET-timeout-... or TARGET-oom-...
"""

import sys
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["coterie", "yaml", "email", "mailbox", "csv"]):
    import targets

FOLDER = Path(__file__).parents[1] / "build/fuzz"
LONGEST = 1 << 16  # bytes of an input
SECONDS, MEGABYTES = 30, 3000  # that one input may take


def main(name: str, rest: str = "10") -> None:
    """Fuzz a target for some minutes, or run one input of it."""
    target = targets.TARGETS[name]
    if Path(rest).is_file():
        targets.run(target, Path(rest).read_bytes())
        return
    corpus = FOLDER / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        targets.run(target, seed)  # so that what it imports is imported
        (corpus / f"seed-{number}").write_bytes(seed)
    words = FOLDER / f"{name}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
    bounds = [f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}"]
    places = [f"-artifact_prefix={corpus}-", f"-dict={words}", str(corpus)]
    limits = [*bounds, f"-max_total_time={60 * float(rest):.0f}", "-print_final_stats=1"]
    findings = Findings(name)
    atheris.Setup([sys.argv[0], *limits, *places], lambda data: findings.run(target, data))
    atheris.Fuzz()


class Findings:
    """Keeps the first input of every kind that breaks the rule, and goes on.

    Args:
        name: Of the target.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen = set[str]()

    def run(self, target: targets.Target, data: bytes) -> None:
        """Run an input."""
        try:
            targets.run(target, data)
        except BaseException as error:  # a panic of a library in Rust, too
            if isinstance(error, KeyboardInterrupt):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
            if kind not in self.seen:
                self.seen.add(kind)
                path = FOLDER / f"{self.name}-finding-{len(self.seen)}"
                path.write_bytes(data)
                path.with_suffix(".txt").write_text(traceback.format_exc(), errors="replace")
                print(f"FINDING {path}: {kind}: {str(error)[:200]!r}", flush=True)


def _escaped(word: str) -> str:
    """Return a word as libFuzzer's dictionaries have it."""
    return "".join(
        f"\\x{byte:02x}" if byte in b'"\\' or not 32 <= byte < 127 else chr(byte)
        for byte in word.encode()
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
