"""Texts that must not be in what experiment trackers keep, see the fixture `offline`."""

from pathlib import Path

SECRETS = ("quibblefrost", "zephyrine", "marrowgate")  # words of the clients' texts


def every_byte(place: Path) -> bytes:
    """A file, or all of a folder with their names, one after the other; SQLite's journals too."""
    paths = [place] if place.is_file() else sorted(place.rglob("*"))
    return b"\0".join(
        str(path).encode() + b"\0" + path.read_bytes() for path in paths if path.is_file()
    )


def secret_texts(folder: Path, *clients: str) -> None:
    """Clients whose texts hold secret words."""
    for client in clients:
        (folder / client).mkdir(parents=True)
        for k in range(20):
            line = f"{SECRETS[k % 3]} said {SECRETS[(k + 1) % 3]} by the river number {k}. "
            (folder / client / f"{k}.txt").write_text(line * 6)


def assert_no_secrets(kept: bytes) -> None:
    """Nothing of the texts is there."""
    for secret in (*SECRETS, "by the river"):
        assert secret.encode() not in kept
