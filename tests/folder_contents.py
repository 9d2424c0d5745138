"""Folders of runs, to compare them: what must be equal, bit for bit."""

import json
from hashlib import sha256
from pathlib import Path

LATE = {"wall_s", "peak_memory_bytes", "seconds"}


def clean(found: object) -> object:
    if isinstance(found, dict):
        return {key: clean(value) for key, value in found.items() if key not in LATE}
    return [clean(value) for value in found] if isinstance(found, list) else found


def contents(folder: Path) -> dict[str, str]:
    """All files but pictures and events, by their content without what is measured by a clock."""
    found = {}
    for path in sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "tensorboard" not in path.parts and path.suffix != ".html"
    ):
        text = path.read_bytes()
        if path.name in ("result.json", "checkpoint.json"):
            text = json.dumps(clean(json.loads(text)), sort_keys=True).encode()
        elif path.name == "SHA256SUMS":  # of files with a clock in them
            text = b"".join(
                line
                for line in text.splitlines(True)
                if b"result.json" not in line and b"checkpoint.json" not in line
            )
        found[str(path.relative_to(folder))] = sha256(text).hexdigest()
    return found
