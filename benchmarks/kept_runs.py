"""Results of runs that took hours, kept in archives, so that another machine goes on from them."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

# What a table reads of a run: no checkpoints, no models. Few runs have samples, and so routing.
FILES = (
    "recipe.yaml",
    "inputs.json",
    "metrics.jsonl",
    "routing.json",
    "result.json",
    "SHA256SUMS",
    "candidate.json",
    "unfit.json",
)


def unpack(archives: Path, folder: Path) -> int:
    """Write the kept runs into a folder; those that are there already are left as they are.

    Returns:
        How many runs were written.
    """
    found, folder = 0, folder.resolve()
    for path in sorted(archives.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            there = {own for own in _runs(members) if (folder / own).exists()}
            wanted = [m for m in members if str(Path(m.name).parent) not in there]
            for member in wanted:
                _write(archive, member, folder)
            found += len(_runs(wanted))
    return found


def pack(archives: Path, folder: Path) -> Path | None:
    """Keep the runs of a folder that have ended and are in no archive yet, in a new one.

    Returns:
        The archive; None where there is nothing new.
    """
    kept: set[str] = set()
    for path in archives.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            kept |= _runs(archive.getmembers())
    new = [run for run in _ended(folder) if run.relative_to(folder).as_posix() not in kept]
    if not new:
        return None
    archives.mkdir(parents=True, exist_ok=True)
    target = archives / f"{len(list(archives.glob('*.tar.xz'))) + 1:03}.tar.xz"
    begun = target.with_suffix(".part")
    with tarfile.open(begun, "w:xz") as archive:
        for run in new:
            for name in FILES:
                if (run / name).exists():
                    where = (run / name).relative_to(folder).as_posix()
                    archive.add(run / name, where, filter=_nobodys)
    begun.rename(target)
    return target


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a file of an archive, if it is one of a run's."""
    content, path = archive.extractfile(member), folder / member.name
    if content is None or path.name not in FILES or not path.resolve().is_relative_to(folder):
        raise ValueError(f"{member.name} in {archive.name} is no file of a run")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.read())


def _runs(members: list[tarfile.TarInfo]) -> set[str]:
    """Return the folders of the runs that members of an archive belong to."""
    return {str(Path(member.name).parent) for member in members}


def _ended(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs that have a result, or are known to come to none."""
    for path in sorted(folder.glob("*/*/*/*")):
        if path.is_dir() and any((path / name).exists() for name in ("result.json", "unfit.json")):
            yield path


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member that does not name who packed it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
