"""Clients with names of any alphabet on devices of their own, and devices that say they have a
name which nobody can have.
"""

# ruff: noqa: RUF001 - letters of several alphabets look alike

import json
from pathlib import Path
from typing import Any

import pytest
from figures import as_json
from flwr.app import Message
from nodes import Nodes, Notes, content, devices, finished, parts
from people import DECOMPOSED, folders_of_text

from coterie import personal
from coterie.core import names
from coterie.core.errors import Refused
from coterie.deploy.keys import Link
from coterie.deploy.supernode import Node
from coterie.runs import run
from coterie.runs.recipes import recipe
from coterie.runs.recipes.recipe import Recipe

PEOPLE = ("Ayşe Yılmaz", "O'Neil", "Zoë & Co.", "ünï code", "数学")
SHORT = {
    "model.context": 16,
    "training.batch_size": 4,
    "method.rounds": 2,
    "method.local_steps": 1,
    "evaluate_every": 0,
    "evaluate_rows": None,  # with texts on devices `auto` is a fixed number
    "patience": None,
    "compare_with": [],
    "samples": False,
    "words": None,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each, one of them as macOS writes its name."""
    words = ["the", "cat", "sat", "on", "a", "warm", "mat"]
    return folders_of_text(tmp_path_factory.mktemp("texts"), PEOPLE, words)


def recipe_of(texts: Path, base: Path, method: str, **settings: Any) -> Recipe:
    return recipe.load(
        "folders",
        recipe.overrides(
            {"method.name": method}
            | SHORT
            | {"data.path": str(texts), "model.base": str(base)}
            # what one process would choose by the texts, and a server without them cannot
            | {"training.batch_size": 4, "training.experts.lr": 0.01, "method.local_steps": 1}
            | settings
        ),
    )


@pytest.mark.parametrize("method", ["comigs-1g1s", "cobo"])
def test_devices_come_to_what_one_process_comes_to(
    method: str, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    grid = Nodes()
    for person in PEOPLE:
        known_as = DECOMPOSED if person == "ünï code" else person
        grid.add(
            {
                "client": known_as,
                "data": str(texts),
                "home": str(tmp_path / "homes" / names.encoded(person)),
            }
        )
    settings = recipe_of(texts, tiny_base, method, engine="flower")
    result = finished(settings, tmp_path / "there", devices(grid, settings, len(PEOPLE)))
    (expected,) = as_json(
        run.run(settings.model_copy(update={"engine": "loopback"}), tmp_path / "here")
    )
    assert result["lost"] == {}
    assert {i: own["flops_per_token"] for i, own in result["clients"].items()} == {
        i: own["flops_per_token"] for i, own in expected["clients"].items()
    }
    assert result["evaluations"] == json.loads(json.dumps(expected["evaluations"]))
    for person in PEOPLE:
        (kept,) = (tmp_path / "homes" / names.encoded(person)).glob("*/clients/*")
        assert kept.name == names.encoded(person)
        assert (kept / "adapter.safetensors").read_bytes() == (
            tmp_path / "here/clients" / kept.name / "adapter.safetensors"
        ).read_bytes()
        assert personal.load(kept.parent.parent, person).about.client == person


HOSTILE = {
    "../../x": "it has '/'",
    "a\nb": "it has U+000A",
    "Zoe\u202eeoZ": "RIGHT-TO-LEFT OVERRIDE",
    "x" * 10_000: "at most 100",
    "\x1b[31mred": "U+001B",
    "__metadata__": "it is reserved",
    DECOMPOSED: "normal form C",
    "O'NEIL": 'there is a client "O\'Neil": names must differ by more than capitals',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_device_with_a_name_that_nobody_can_have_is_refused(
    name: str, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """Whatever its program says, and the run goes on without it."""
    grid, told = Nodes(), Notes()
    for person in PEOPLE[:2]:
        grid.add(
            {
                "client": person,
                "data": str(texts),
                "home": str(tmp_path / "homes" / names.encoded(person)),
            }
        )

    def lie(request: Message, reply: Message) -> Message:
        said, body = parts(reply)
        found = json.loads(said.model_dump_json())
        found["client"] = found["member"]["client"] = name
        return Message(content(json.dumps(found), body), reply_to=request)

    grid.add(
        {"client": "数学", "data": str(texts), "home": str(tmp_path / "homes/liar")}, spoil=lie
    )
    settings = recipe_of(texts, tiny_base, "fedavg", engine="flower")
    backend = devices(grid, settings, 2, told)
    ((node, task, reason),) = told.losses
    assert (node, task) == ("node 1014", "hello")
    assert HOSTILE[name] in reason
    assert len(reason) < 1000
    assert reason.isprintable() or reason.replace("\n", "").isprintable()
    result = finished(settings, tmp_path / "run", backend)
    assert set(result["clients"]) == set(PEOPLE[:2])
    assert {path.name for path in tmp_path.iterdir()} == {"homes", "run"}


def test_the_command_of_a_supernode_says_the_name() -> None:
    """As Flower reads it."""
    from flwr.common.config import parse_config_args

    for person in PEOPLE:
        node = Node(Link("localhost:9500", None), Path("/tmp/a home/数 𝒳"), person)
        node.check()
        found = parse_config_args([node.supernode()[-1]])
        assert (found["client"], found["home"]) == (person, "/tmp/a home/数 𝒳")
    with pytest.raises(Refused, match=r"--client '\.\./x': it has '/'"):
        Node(Link("localhost:9500", None), Path("/tmp"), "../x").check()
