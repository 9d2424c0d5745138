"""The wheel and the sdist: built, checked by twine, complete, and installed apart from here."""

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from coterie.core.version import HOME, __version__

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
VENDORED = SOURCE / "coterie/export/web_page/vendor/licences"
LICENCES = [str(path.relative_to(REPOSITORY)) for path in VENDORED.iterdir()]
LICENCES += ["src/coterie/models/mini/README.md", "src/coterie/data/python/LICENSE"]
UNWANTED = re.compile(r"__pycache__|\.pyc$|(^|/)(tests|runs-of|corpora|\.venv|\.git|dist)(/|$)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built by the backend that pyproject.toml names."""
    for module in ("build", "hatchling"):
        pytest.importorskip(module, reason=f"no {module} (pip install -e '.[dev]')")
    folder = tmp_path_factory.mktemp("dist")
    words = ["-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder


def wheel(built: Path) -> Path:
    return built / f"coterie-{__version__}-py3-none-any.whl"


def names_in(built: Path) -> set[str]:
    with zipfile.ZipFile(wheel(built)) as archive:
        return set(archive.namelist())


def test_the_wheel_has_all_of_the_package_and_nothing_else(built: Path) -> None:
    held = names_in(built)
    ours = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "coterie").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len([name for name in ours if name.endswith(".yaml")]) > 40
    assert {name for name in held if ".dist-info/" not in name} == ours
    for name in (
        "coterie/py.typed",
        "coterie/models/mini/model.safetensors",
        "coterie/models/mini/tokenizer.json",
        "coterie/data/python/modules.jsonl.gz",
        "coterie/runs/recipes/quickstart.yaml",
        "coterie/reports/page.js",
        "coterie/reports/page.css",
        "coterie/personal/ui/web/index.html",
        "coterie/personal/ui/web/local.js",
    ):
        assert name in held
    assert wheel(built).stat().st_size < 20e6


def test_the_metadata_keep_the_core_small(built: Path) -> None:
    with zipfile.ZipFile(wheel(built)) as archive:
        info = f"coterie-{__version__}.dist-info"
        found = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        held = {name.removeprefix(f"{info}/licenses/") for name in archive.namelist()}
        assert held >= {"LICENSE", *LICENCES}
        assert {*LICENCES} < set(found.get_all("License-File", []))
        assert found["License-Expression"] == "Apache-2.0 AND MIT AND CC-BY-SA-4.0 AND PSF-2.0"
        assert b"coterie = coterie.cli:main" in archive.read(f"{info}/entry_points.txt")
    core = {
        re.split(r"[<>=!~; \[]", text)[0]
        for text in found.get_all("Requires-Dist", [])
        if "extra ==" not in text
    }
    assert core == {
        "torch",
        "transformers",
        "huggingface-hub",
        "safetensors",
        "tokenizers",
        "numpy",
        "pydantic",
        "pyyaml",
        "typer",
        "rich",
        "filelock",
        "chardet",
    }
    assert found["Requires-Python"] == ">=3.11"


def test_the_sdist_has_source_and_tests_and_no_foreign_text(built: Path) -> None:
    with tarfile.open(built / f"coterie-{__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "constraints.txt"} <= held
    assert "tests/conftest.py" in held
    for name in held:
        assert not re.search(r"__pycache__|\.pyc$|^(corpora|\.venv|\.git|runs|dist)/", name), name


def test_twine_finds_nothing_wrong(built: Path) -> None:
    pytest.importorskip("twine", reason="no twine (pip install -e '.[dev]')")
    files = [str(path) for path in built.iterdir()]
    words = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_release_is_published_without_a_token() -> None:
    text = (REPOSITORY / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in text
    assert "secrets." not in text
    assert jobs["try"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    (check,) = [step["run"] for step in jobs["build"]["steps"] if "GITHUB_REF" in str(step)]
    done = subprocess.run(
        ["bash", "-c", check],
        cwd=REPOSITORY,
        env={**os.environ, "GITHUB_REF_NAME": f"v{__version__}"},
        check=False,
    )
    assert done.returncode == 0


@pytest.mark.slow
def test_the_wheel_runs_apart_from_the_checkout(built: Path, tmp_path: Path) -> None:
    """In an environment of its own, which has this one's packages (torch is large) but not this
    checkout: the wheel is installed into it, and the quickstart runs from another folder.
    """
    here = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(here)], check=True)
    (site,) = here.glob("lib/python*/site-packages")
    packages = Path(importlib.util.find_spec("torch").origin).parents[1]
    (site / "around.pth").write_text(str(packages))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    install = [str(here / "bin/pip"), "install", "-q", "--no-deps", str(wheel(built))]
    subprocess.run([*install, "--ignore-installed"], check=True, env=environment)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    words = ["run", "quickstart", "--out", "mine", "--set", "method.rounds=1"]
    words += ["--set", "method.local_steps=1", "--set", "compare_with=[]", "--set", "threads=1"]
    where = "import coterie; print(coterie.__file__)"
    for command in (["bin/coterie", *words], ["bin/coterie", "--version"]):
        subprocess.run(
            [here / command[0], *command[1:]], cwd=elsewhere, env=environment, check=True
        )
    done = subprocess.run(
        [here / "bin/python", "-c", where],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(here) in done.stdout
    assert (elsewhere / "mine/report.html").is_file()


def test_nobody_is_told_to_install_a_package_of_our_name_that_may_be_anothers() -> None:
    if HOME is not None:
        pytest.skip(f"published at {HOME}")
    kinds = {".py", ".md", ".html", ".txt", ".yaml", ".yml", ".ipynb"}
    folders = ("src", "docs", "examples")
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in kinds
    }
    texts[REPOSITORY / "README.md"] = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    wrong = re.compile(
        r"(pip install|uvx|uv add|pipx run) (-\S+ )*['\"]?coterie\b(?!-\d)|pypi.org/project/coterie"
    )
    told = {str(path): found[0] for path, text in texts.items() if (found := wrong.search(text))}
    assert not told
