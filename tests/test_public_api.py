"""The public API: every name of `coterie.__all__` has a docstring with an example, and the examples
run.
"""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

NAMES = [name for name in coterie.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.cleandoc(getattr(coterie, name).__doc__ or "")
    found = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert found.examples, f"coterie.{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(found, out=said.append)
    assert not said, "".join(said)


def test_names_are_imported_when_they_are_asked_for(tmp_path: Path) -> None:
    code = (
        "import coterie, sys\n"
        "dir(coterie), coterie.CoterieError\n"
        "print(*{'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules))\n"
        "[getattr(coterie, name) for name in coterie.__all__]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
