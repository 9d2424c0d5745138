"""What Windows lacks is not needed for a run: modules of POSIX, and folders that can be opened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.core import files

SCRIPT = """
import os, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog"):
    sys.modules[name] = None
import coterie, coterie.audit, coterie.cli.base, coterie.export, coterie.personal
from coterie.core import files

opened = os.open
def as_windows(path, *given, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied")
    return opened(path, *given, **named)
files._WINDOWS, os.open = True, as_windows

class Stops(coterie.Callback):
    def round(self, done):
        if done == 2:
            raise RuntimeError("enough")

short = {"compare_with": [], "checkpoint_every": 1, "method": {"rounds": 3}, "threads": 1}
try:
    coterie.run("cobo-digits", out=sys.argv[1], callbacks=[Stops()], **short)
except coterie.CallbackError:
    print("stopped")
print(coterie.run("cobo-digits", out=sys.argv[1], resume=True, **short).result.rounds)
"""


def test_a_run_goes_on_from_its_checkpoint_without_what_windows_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.split() == ["stopped", "3"], done.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("windows", [False, True])
def test_a_file_is_flushed_by_a_descriptor_that_windows_flushes(
    windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlushFileBuffers wants a handle that may write; folders are flushed elsewhere alone."""
    (tmp_path / "file").write_text("x")
    flushed = []

    def fsync(descriptor: int) -> None:
        flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[3], 8)
        flushed.append(flags & os.O_ACCMODE)

    monkeypatch.setattr(files, "_WINDOWS", windows)
    monkeypatch.setattr(os, "fsync", fsync)
    files.flush(tmp_path / "file")
    files.flush(tmp_path)
    assert flushed == ([os.O_RDWR] if windows else [os.O_RDONLY, os.O_RDONLY])
