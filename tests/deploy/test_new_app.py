"""The beginning of a Flower app, packed by Flower itself, with the code of its programs in it."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp
from flwr.common.config import validate_config
from flwr.serverapp import ServerApp
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.deploy.process import APP, environment, program


def test_a_new_app_is_packed_with_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "two-towns"
    assert CliRunner().invoke(app, ["new", "app", str(folder)]).exit_code == 0
    about = tomllib.loads((folder / "pyproject.toml").read_text())
    assert about["project"]["name"] == "two-towns"
    monkeypatch.syspath_prepend(folder)
    assert validate_config(about, project_dir=folder)[:2] == (True, [])
    flower = about["tool"]["flwr"]["app"]
    assert flower["fab-format-version"] == 1
    assert flower["config"] == tomllib.loads(APP.read_text())["tool"]["flwr"]["app"]["config"]
    command = [program("flwr"), "build", "--app", str(folder)]
    kwargs = {"cwd": tmp_path, "env": environment(tmp_path), "capture_output": True}
    done = subprocess.run(command, check=False, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    (bundle,) = tmp_path.rglob("*.fab")
    with zipfile.ZipFile(bundle) as packed:
        names = set(packed.namelist())
    assert {"pyproject.toml", "LICENSE", "two_towns/server_app.py"} <= names
    from importlib import import_module

    assert isinstance(import_module("two_towns.server_app").app, ServerApp)
    assert isinstance(import_module("two_towns.client_app").app, ClientApp)
    for name in [name for name in sys.modules if name.startswith("two_towns")]:
        del sys.modules[name]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["new", "app", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(app, ["new", "method", str(tmp_path / "a")]).exit_code == 2
    assert CliRunner().invoke(app, ["new", "app", str(tmp_path / "2 Towns")]).exit_code == 2
    assert not list(tmp_path.iterdir())
