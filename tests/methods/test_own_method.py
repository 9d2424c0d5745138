"""Methods that do not come with coterie: one file anywhere, or an installed package."""

import json
from pathlib import Path

import pytest
import reported
from figures import as_json
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.errors import RecipeError
from coterie.core.files import write_all_sums
from coterie.core.importing import installed
from coterie.engines.messages import Reply, Request, parsed
from coterie.methods import METHODS, import_problem
from coterie.runs.device.device import Device
from coterie.runs.device.limits import Limits
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run

HALF = '''
"""FedAvg that takes half a step to the mean."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from coterie.methods.fedavg import FedAvg
from coterie.core.protocol import Ask


@dataclass(frozen=True)
class Half(FedAvg):
    """theta <- (1 - step) theta + step mean_i theta_i."""

    step: Annotated[float, Field(gt=0, le=1, description="of the way to the mean")] = 0.5

    def round(self, state, clients, rng):
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        mean = self.combine(replies, state)
        return {name: old + self.step * (mean[name] - old) for name, old in state.items()}


class NoMethod:
    pass
'''
SMALL = ["method.rounds=2", "method.local_steps=1", "compare_with=[]", "samples=false"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "half.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_method_in_a_file_of_ones_own_runs_by_its_name(package: Path, tiny_base: Path) -> None:
    recipe = load(
        "quickstart",
        [
            f"model.base={tiny_base}",
            "model.context=16",
            "method.name=mine.half:Half",
            *SMALL,
            "method.step=0.25",
        ],
    )
    (result,) = as_json(reported.run(recipe, package / "run"))
    assert result["method"] == "mine.half:Half"
    assert METHODS["mine.half:Half"].title == "Half"
    assert "Half" in (package / "run/report.html").read_text()
    (row,) = as_json(
        run(
            load(
                "quickstart",
                [f"model.base={tiny_base}", "model.context=16", "method.name=fedavg", *SMALL],
            ),
            package / "fedavg",
        )
    )
    assert row["mean"] != result["mean"]


def test_it_stands_beside_others_in_a_comparison(package: Path, tiny_base: Path) -> None:
    settings = [
        f"model.base={tiny_base}",
        "model.context=16",
        "method.name=local",
        *SMALL,
        "compare_with=['mine.half:Half']",
    ]
    rows = as_json(run(load("quickstart", settings), package / "run"))
    assert sorted(row["method"] for row in rows) == ["local", "mine.half:Half"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine.half:Whole", "AttributeError: module 'mine.half' has no attribute 'Whole'"),
        ("mine.half:NoMethod", "NoMethod is not a subclass of coterie.methods.Method"),
        ("mine.none:Half", "ModuleNotFoundError: No module named 'mine.none'"),
    ],
)
def test_what_is_no_method_is_refused_and_the_reason_named(
    package: Path, name: str, why: str
) -> None:
    with pytest.raises(RecipeError, match=f"method.name: '{name}' is not a method: .*{why}"):
        load("quickstart", [f"method.name={name}"])
    assert name not in METHODS
    assert import_problem(name)


def test_a_field_that_it_lacks_is_refused_by_its_name(package: Path) -> None:
    with pytest.raises(RecipeError, match=r"method\.stpe: unknown key"):
        load("quickstart", ["method.name=mine.half:Half", "method.stpe=1"])


def test_an_installed_package_adds_methods(package: Path) -> None:
    from coterie import methods

    info = package / "half_steps-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-steps\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        f"[{methods.GROUP}]\nhalf = mine.half:Half\nfedavg = mine.half:Half\n"
    )
    installed.cache_clear()
    try:
        assert METHODS["half"].paper == "half-steps 1.2"
        assert METHODS["fedavg"].title == "FedAvg"  # no package takes a shipped name
        assert list(METHODS).count("fedavg") == 1
        assert (
            type(load("quickstart", ["method.name=half", "method.step=1"]).build_method()).__name__
            == "Half"
        )
        assert "half-steps 1.2" in CliRunner().invoke(app, ["methods"]).stdout
    finally:
        installed.cache_clear()


def test_a_device_imports_no_module_that_a_server_names(package: Path) -> None:
    (package / "trap.py").write_text(f"open({str(package / 'sprung')!r}, 'w').close()\n" + HALF)
    recipe = load(
        "cobo-digits", ["method.name=fedavg", "method.rounds=2", "compare_with=[]", "engine=flower"]
    )
    section = recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"})
    section["method"]["name"] = "trap:Half"
    request = Request(
        recipe=section, task="local_round", action="task", run="run", client="c0-0"
    ).model_dump_json()
    for limits, sprung in ((Limits(), False), (Limits(methods=("trap:Half",)), True)):
        text, body = Device(package / "home", client="c0-0", limits=limits).answer(request, b"")
        assert (
            "does not import modules that a server names" in parsed(Reply, text).problem
        ) != sprung, json.loads(text)
        assert (package / "sprung").exists() == sprung
        assert bool(body) == sprung


def test_who_uses_a_personal_model_does_not_import_its_method(
    package: Path, tiny_base: Path
) -> None:
    run(
        load(
            "quickstart",
            [f"model.base={tiny_base}", "model.context=16", "method.name=fedavg", *SMALL],
        ),
        package / "run",
    )
    (package / "trap.py").write_text(f"open({str(package / 'sprung')!r}, 'w').close()\n")
    for file in (package / "run/clients").glob("*/client.json"):
        file.write_text(file.read_text().replace('"fedavg"', '"trap:Half"'))
        write_all_sums(file.parent)
    models = coterie.load_many(package / "run", base=tiny_base)
    assert models.next_words("the")
    assert coterie.load(package / "run", "network", base=tiny_base).about.method == "trap:Half"
    assert not (package / "sprung").exists()
