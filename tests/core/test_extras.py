"""What is optional is refused by name where it is missing, and the quickstart needs none of it."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from coterie.core import importing
from coterie.core.errors import Refused
from coterie.core.importing import EXTRAS, require

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted({module for _, modules in EXTRAS.values() for module in modules})
WITHOUT = """
import sys
for module in {modules!r}:
    sys.modules[module] = None
from coterie.cli.base import main
sys.argv = ["coterie", *{words!r}]
main()
"""


def without_extras(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command line in a process where no optional package can be imported."""
    code = WITHOUT.format(modules=MODULES, words=words)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_extra_is_described() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {*EXTRAS, "all", "dev", "docs", "fuzz"}


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refused, match=r"engine flower needs ray, which is not .*\n.*simulation"):
        require("engine flower", "simulation", "ray")
    assert "ray" in importing.missing("simulation")


def test_an_installed_package_says_how_to_install_an_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from coterie.core import errors

    pytest.importorskip("hatchling", reason="no hatchling (pip install -e '.[dev]')")
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    # of this checkout: an editable installation may be older
    extras = ProjectMetadata(str(REPOSITORY), PluginManager()).core.optional_dependencies
    lines = [f"{one}; extra == '{name}'" for name, listed in extras.items() for one in listed]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    monkeypatch.setattr(errors, "_in_checkout", lambda: False)
    assert errors.extra("hub") == "pip install 'datasets>=4.0'"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for name in EXTRAS:
        told = shlex.split(errors.extra(name).removeprefix("pip install "))
        names = {re.split(r"[<>=\[]", requirement)[0] for requirement in told}
        assert "coterie" not in names
        listed = project["optional-dependencies"][name]
        own = {re.split(r"[<>=\[]", one)[0] for one in listed} - {"coterie"}
        assert own <= names


def test_the_quickstart_runs_without_any_extra(tiny_base: Path, tmp_path: Path) -> None:
    settings = ["method.rounds=1", "method.local_steps=1", "data.test_tokens=600"]
    settings += ["data.valid_tokens=300", "compare_with=[]", "threads=1", f"model.base={tiny_base}"]
    words = ["run", "quickstart", "--out", "mine"]
    words += [word for setting in settings for word in ("--set", setting)]
    done = without_extras(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tensorboard" not in done.stdout
    assert (tmp_path / "mine/report.html").exists()
    assert not (tmp_path / "mine/tensorboard").exists()
    words = ["generate", "mine", "--client", "network", "--text", "The", "--tokens", "2"]
    assert without_extras(words, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["run", "cobo-digits"], "vision"),
        (["run", "quickstart", "--set", "method.name=fdlora", "--set", "compare_with=[]"], "scipy"),
        (["audit", "runs/mine"], "scipy"),
        (["export", "runs/mine", "--out", "adapter"], "export"),
    ],
)
def test_what_needs_an_extra_is_refused_before_it_starts(
    words: list[str], extra: str, tmp_path: Path
) -> None:
    done = without_extras(words, tmp_path)
    assert done.returncode == 2
    assert "not installed" in done.stderr
    assert f"[{extra}]" in done.stderr
    assert "Traceback" not in done.stderr
