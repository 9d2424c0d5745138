"""The files of deploy/ and .github/ are what programs read, and name what exists."""

import configparser
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from coterie.cli import app

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
KUBERNETES = [*yaml.safe_load_all((ROOT / "deploy/kubernetes/server.yaml").read_text())]


def check_command(words: list[str]) -> None:
    """Parse a command line by the program itself, without running it."""
    command: Any = typer.main.get_command(app)
    name, *rest = words
    with command.make_context("coterie", ["--log-format", "text", name], resilient_parsing=True):
        own = command.commands[name]
    own.make_context(name, rest)


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def test_services_of_compose_run_commands_that_exist_on_declared_volumes() -> None:
    services = COMPOSE["services"]
    for name in ("server", "ann", "ben"):
        check_command(services[name]["command"])
    named = {v.split(":")[0] for s in services.values() for v in s["volumes"] if v[0] != "."}
    assert named == set(COMPOSE["volumes"])
    # devices reach the server through the proxy alone
    assert {*services["ann"]["networks"]}.isdisjoint(services["server"]["networks"])
    assert {*services["proxy"]["networks"]} == set(COMPOSE["networks"])
    for file in ("nginx.conf", "Dockerfile"):
        assert (ROOT / "deploy" / file).is_file()


def test_the_image_copies_what_is_there() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / name).exists() for name in line.split()[1:-1])
    assert 'ENTRYPOINT ["coterie"]' in lines


def test_the_pod_runs_a_command_that_exists_and_its_names_fit() -> None:
    deployment, claim, service = KUBERNETES
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_command(container["args"])
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("name", ["server", "client"])
def test_units_of_systemd_run_commands_that_exist(name: str) -> None:
    service = unit(ROOT / f"deploy/systemd/coterie-{name}.service")
    program, *words = shlex.split(service["Service"]["ExecStart"])
    assert Path(program).name == "coterie"
    check_command(words)
    assert service["Install"]["WantedBy"] == "multi-user.target"


def test_workflows_run_targets_that_exist_with_no_rights_to_write() -> None:
    targets = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        for words in (str(step.get("run", "")).split() for step in steps):
            if words[:1] == ["make"]:
                assert f"\n{words[1]}:" in targets


def test_forms_ask_for_something() -> None:
    for name in ("bug", "idea"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        ids = [field["id"] for field in form["body"] if "id" in field]
        assert ids
        assert len(ids) == len({*ids})
