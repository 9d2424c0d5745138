"""The site, built once for all tests of it."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning while building is an error here."""
    pytest.importorskip("zensical", reason="no zensical (pip install -e '.[docs]')")
    folder = tmp_path_factory.mktemp("website")
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/website/build.py"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
