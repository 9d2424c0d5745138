"""Clients with names of any alphabet through whole runs: on disk, on the wire, on devices, and
in what people read.
"""

# ruff: noqa: RUF001 - letters of several alphabets look alike

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import reported
from figures import as_json, typed
from people import DECOMPOSED, folders_of_text
from rich.console import Console
from typer.testing import CliRunner

from coterie import personal
from coterie.cli.base import app
from coterie.core import names
from coterie.core.callback import Callback
from coterie.core.errors import DataError
from coterie.core.files import load, read_json
from coterie.deploy import keys
from coterie.reports.tables import tables
from coterie.runs import run
from coterie.runs.recipes import recipe
from coterie.runs.recipes.recipe import Recipe

PEOPLE = ("Ayşe Yılmaz", "Zoë & Co.", "ünï code", "数学")  # in the order of their letters' numbers
WORDS = ["the", "cat", "sat", "on", "a", "warm", "mat", "and", "slept"]
SHORT = {
    "model.context": 16,
    "training.batch_size": 4,
    "method.rounds": 3,
    "method.local_steps": 2,
    "method.router_every": 1,
    "method.router_steps": 1,
    "evaluate_every": 0,
    "patience": None,
    "compare_with": [],
    "samples": False,
    "words": None,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each, one of them as macOS writes its name."""
    root = folders_of_text(tmp_path_factory.mktemp("texts"), PEOPLE, WORDS)
    assert DECOMPOSED in {path.name for path in root.iterdir()}
    return root


def recipe_of(texts: Path, base: Path, **settings: Any) -> Recipe:
    found = (
        SHORT
        | {"data.path": str(texts), "model.base": str(base)}
        | {key.replace("__", "."): v for key, v in settings.items()}
    )
    name = found.get("method.name", "comigs-1g1s")
    if not str(name).startswith("comigs"):
        found = {key: value for key, value in found.items() if not key.startswith("method.router")}
    return recipe.load("folders", recipe.overrides({"method.name": name} | found))


@pytest.fixture(scope="module")
def finished(texts: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    reported.run(recipe_of(texts, tiny_base, compare_with=["local"], samples=True), out)
    return out


def tensors(folder: Path) -> dict[str, Any]:
    return {name: t.tolist() for name, t in load(folder / "adapter.safetensors")[0].items()}


def test_the_files_of_a_run_have_names_for_every_disk_and_say_who_is_meant(finished: Path) -> None:
    everything = [str(path.relative_to(finished)) for path in finished.rglob("*")]
    assert [
        name for name in everything if not name.isascii() or any(sign in name for sign in " &'\\:")
    ] == []
    assert sorted(path.name for path in (finished / "clients").iterdir()) == sorted(
        map(names.encoded, PEOPLE)
    )
    assert personal.clients_of(finished) == list(PEOPLE)
    result = json.loads((finished / "result.json").read_text(encoding="utf-8"))
    assert list(result["clients"]) == list(PEOPLE)
    for text in (
        (finished / name).read_text(encoding="utf-8")
        for name in ("metrics.jsonl", "result.json", "report.html", "routing.json")
    ):
        assert all(
            name.replace("&", "&amp;") in text or name in text for name in PEOPLE
        )  # so that one can search for them
    for person in PEOPLE:
        assert personal.load(finished, person).about.client == person


def invoked(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_take_names_as_keyboards_write_them(finished: Path, tmp_path: Path) -> None:
    said = invoked("predict", finished, "--client", DECOMPOSED, "--client", "数学", "--text", "the")
    assert "ünï code" in said
    assert "数学" in said
    assert invoked(
        "generate",
        finished,
        "--client",
        "Ayşe Yılmaz",
        "--text",
        "the",
        "--tokens",
        2,
        "--temperature",
        0,
    ).startswith("the")
    invoked("export", finished, "--client", "Zoë & Co.", "--out", tmp_path / "adapter")
    assert "# Zoë & Co., exported" in (tmp_path / "adapter/README.md").read_text(encoding="utf-8")
    refused = CliRunner().invoke(
        app, ["predict", str(finished), "--client", "Zoe", "--text", "the"]
    )
    assert refused.exit_code == 2
    assert f"has no client 'Zoe'\n  Its clients: {', '.join(PEOPLE)}." in refused.output


def test_a_folder_called_otherwise_on_another_disk_is_found(finished: Path, tmp_path: Path) -> None:
    """As a person, or a disk that decomposes letters, may have renamed it."""
    shutil.copytree(finished / "clients", tmp_path / "run/clients")
    (tmp_path / "run/clients" / names.encoded("ünï code")).rename(
        tmp_path / "run/clients" / DECOMPOSED
    )
    assert personal.clients_of(tmp_path / "run") == list(PEOPLE)
    assert personal.load(tmp_path / "run", "ünï code").about.client == "ünï code"


def test_a_name_too_long_for_a_file_is_read_from_it(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    long = ["数" * 80, "数" * 79 + "学"]
    for name in long:
        shutil.copytree(texts / "数学", tmp_path / "texts" / name)
    once = recipe_of(tmp_path / "texts", tiny_base, method__rounds=1)
    run.run(once, tmp_path / "run")
    assert personal.clients_of(tmp_path / "run") == sorted(long)
    assert [personal.load(tmp_path / "run", name).about.client for name in long] == long
    run.run(once, tmp_path / "run", resume=True)


@pytest.mark.parametrize("memory", [None, 0])  # 0: states lie in files
def test_a_run_that_is_stopped_goes_on(
    memory: int | None, texts: Path, tiny_base: Path, finished: Path, tmp_path: Path
) -> None:
    out, settings = tmp_path / "out", recipe_of(texts, tiny_base, memory=memory)

    class Stops(Callback):
        def round(self, done: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(settings, out, reporter=Stops())
    index = read_json(out / "checkpoints/round-00002/clients.json")
    assert sorted(index["clients"]) == sorted(PEOPLE)
    run.run(settings, out, resume=True)
    for person in PEOPLE:
        own = Path("clients") / names.encoded(person)
        assert tensors(out / own) == tensors(finished / own)


METHODS: dict[str, dict[str, Any]] = {
    "cobo": {"method__pairs": "all", "method__rho": 0.01},
    "pcl": {},
    "fc": {"method__cluster_size": 2},
    "ifca": {"method__centres": 2},
    "finetuned-fedavg": {},
    "hetlora": {"method__ranks": [4, 2, 3, 4, 2, 3]},
}


QUICK = ("cobo", "pcl")


@pytest.mark.parametrize(
    "method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_methods_name_tensors_by_clients_of_any_name(
    method: str, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """Through bytes as in one process; also for clients called like what methods hold."""
    for person in ("chosen", "generalist"):
        shutil.copytree(texts / "数学", tmp_path / "texts" / person)
    for person in (DECOMPOSED, "数学", "Zoë & Co.", "Ayşe Yılmaz"):
        shutil.copytree(texts / person, tmp_path / "texts" / person)
    settings = METHODS[method] | {"method__name": method, "method__rounds": 2}
    results = {}
    for engine in ("inprocess", "loopback"):
        (results[engine],) = as_json(
            run.run(
                recipe_of(tmp_path / "texts", tiny_base, engine=engine, **settings),
                tmp_path / engine,
            )
        )
    assert set(results["loopback"]["clients"]) == {*PEOPLE, "chosen", "generalist"}
    assert results["loopback"]["evaluations"] == results["inprocess"]["evaluations"]
    assert results["loopback"]["lost"] == {}


def test_two_folders_whose_names_are_one_are_refused(
    texts: Path, tmp_path: Path, tiny_base: Path
) -> None:
    for name in ("Zoë", unicodedata.normalize("NFD", "Zoë"), "ZOË", "a (2)", "right\u202eleft"):
        shutil.copytree(texts / "数学", tmp_path / "texts" / name)
    with pytest.raises(DataError) as refused:
        run.run(recipe_of(tmp_path / "texts", tiny_base), tmp_path / "run")
    said = str(refused.value)
    assert "are both named 'Zoë', with accents stored differently" in said
    assert "client id 'a (2)' is not valid: it has '(', U+0028 LEFT PARENTHESIS" in said
    assert r"client id 'right\u202eleft' is not valid: it has U+202E RIGHT-TO-LEFT OVERRIDE" in said
    assert not (tmp_path / "run/recipe.yaml").exists()


def test_recipes_may_name_clients_as_keyboards_write_them(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    present = recipe_of(
        texts, tiny_base, method__name="fedavg", presence={DECOMPOSED: [1, None]}, method__rounds=2
    )
    (result,) = as_json(run.run(present, tmp_path / "run"))
    assert result["rounds_taken_part"] == {
        "Ayşe Yılmaz": 2,
        "Zoë & Co.": 2,
        "ünï code": 1,
        "数学": 2,
    }
    lied = recipe_of(
        texts,
        tiny_base,
        method__name="fedavg",
        attack={"kind": "nan", "clients": [DECOMPOSED]},
        method__rounds=1,
    )
    (result,) = as_json(run.run(lied, tmp_path / "attacked"))
    assert result["lost"].keys() == {"ünï code"}


def test_columns_of_a_terminal_are_as_wide_as_their_names(finished: Path) -> None:
    from coterie.core.result.rows import rows
    from coterie.methods import METHODS as ENTRIES

    found = as_json(
        rows(
            typed(
                [
                    json.loads((finished / part / "result.json").read_text())
                    for part in ("baselines/local", "")
                ]
            )
        )
    )
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(
            tables(typed(found), {name: entry.title for name, entry in ENTRIES.items()}, 80)[-1]
        )
    from rich.cells import cell_len

    header, *_ = [line for line in capture.get().splitlines() if "数学" in line]
    body = [
        line for line in capture.get().splitlines() if line.strip().startswith(("Local", "CoMiGS"))
    ]
    assert (
        len({cell_len(line.rstrip()) for line in (header, *body)}) == 1
    )  # numbers end below the ends of their names
    end = cell_len(header[: header.index("数学") + 2])
    assert all(line[end - 1].isdigit() and line[end] == " " for line in body)


def test_a_picture_has_room_for_wide_letters() -> None:
    from coterie.reports.heat import _margin, _short

    assert _short("数学系统计专业") == "数学系统计…"  # five of two columns, and the ellipsis
    assert _margin(["数学系统计"]) == _margin(["a" * 10])


def test_keys_of_devices(tmp_path: Path) -> None:
    keys.make(tmp_path, [], [*PEOPLE, "ann"])
    found, wrong = keys.public_keys(tmp_path)
    assert wrong == {}
    assert {keys.owner(path) for path in found.values()} == {*PEOPLE, "ann"}
    assert all(path.name.isascii() for path in (tmp_path / "clients").iterdir())
    assert (tmp_path / "clients/ann").is_file()
    (tmp_path / f"clients/{DECOMPOSED}.pub").touch()  # as somebody else may have written it
    assert keys.owner(tmp_path / f"clients/{DECOMPOSED}.pub") == "ünï code"
    said = invoked("keys", tmp_path, "--client", DECOMPOSED, "--client", "ann")
    assert f"  ünï code: {keys.private(tmp_path, 'ünï code')}\n" in said
    for name in ("../../x", "a\nb", "a\u202eb", "x" * 10_000):
        refused = CliRunner().invoke(app, ["keys", str(tmp_path), "--client", name])
        assert (refused.exit_code, list(tmp_path.parent.glob("x*"))) == (2, [])


def test_metrics_are_text_of_any_alphabet_and_of_none(tmp_path: Path) -> None:
    from coterie.runs.folder.metrics import MetricsFile

    file = MetricsFile(tmp_path)
    file.write("lost", 1, 1, "数学", {"reason": "half of a pair: \ud83d"})
    file.close()
    assert "数学" in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert (
        json.loads((tmp_path / "metrics.jsonl").read_bytes())["reason"] == "half of a pair: \ud83d"
    )
