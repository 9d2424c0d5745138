"""`coterie deploy --demo`: a real server and real devices, each with its own data alone, come to
what one process comes to.
"""

import json
import signal
import socket
import unicodedata
from pathlib import Path

import pytest
from figures import as_json
from terminals import MINUTE, OWN, demonstration, left, loaded, terminals, texts, written

import coterie
from coterie.core import names
from coterie.runs.run import run


def test_devices_come_to_the_same_as_one_process_and_nothing_is_left(tmp_path: Path) -> None:
    data, recipe = texts(tmp_path / "texts", "ann", "ben"), written(tmp_path)
    (expected,) = as_json(run(loaded(recipe, data), tmp_path / "one"))
    with terminals(tmp_path) as terminal:
        demo = terminal("demo", *demonstration(recipe, data))
        assert demo.ends(400) == 0, demo.text
        assert not left(tmp_path / "demo")
    folder = tmp_path / "demo/run"
    result = json.loads((folder / "result.json").read_text())
    assert {k: v for k, v in result.items() if k not in OWN} == json.loads(
        json.dumps({k: v for k, v in expected.items() if k not in OWN})
    )
    assert not (folder / "clients").exists()  # personal models stay on devices
    for client in ("ann", "ben"):
        home = folder / "devices" / client
        assert [path.name for path in (home / "data").iterdir()] == [client]
        (mine,) = home.glob("*/clients/*")
        assert mine.name == client
        assert (mine / "adapter.safetensors").read_bytes() == (
            tmp_path / f"one/clients/{client}/adapter.safetensors"
        ).read_bytes()
        assert (
            coterie.load(mine.parent.parent, client)
            .generate("the", max_new_tokens=1)
            .startswith("the")
        )
    for name in ("recipe.yaml", "metrics.jsonl", "report.html"):
        assert (folder / name).stat().st_size
    assert "\x1b" not in demo.text
    assert "after round 2" in demo.text


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demonstration_that_is_stopped_leaves_nothing_running(
    tmp_path: Path, how: int, code: int
) -> None:
    data, recipe = texts(tmp_path / "texts", "ann", "ben"), written(tmp_path, method__rounds=100)
    with terminals(tmp_path) as terminal:
        demo = terminal("demo", *demonstration(recipe, data))
        demo.says("round 1/100")
        demo.process.send_signal(how)
        assert demo.ends(MINUTE) == code
        assert "Nothing is left running" in demo.text
        assert not left(tmp_path / "demo")
    config = (tmp_path / "demo/run/server/flwr/config.toml").read_text()
    host, _, port = config.partition('address = "')[2].partition('"')[0].rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["demo", "simulation"])
def test_clients_have_names_of_any_alphabet_in_flower_s_own_programs(
    how: str, tmp_path: Path
) -> None:
    people = {
        "O'Neil & Söhne": "ann",
        unicodedata.normalize("NFD", "ünï code"): "ben",
        "数学": "cleo",
    }
    data = texts(tmp_path / "texts", *people.values())
    for person, folder in people.items():
        (data / folder).rename(data / person)
    recipe, given = (
        written(tmp_path, method__rounds=1),
        ("--set", f"data.path={data}", "--out", "run"),
    )
    command = (
        ("deploy", "--demo", "--recipe", str(recipe))
        if how == "demo"
        else ("run", str(recipe), "--set", "engine=flower")
    )
    with terminals(tmp_path) as terminal:
        shown = terminal("here", *command, *given)
        assert shown.ends(400) == 0, shown.text
    result = json.loads((tmp_path / "here/run/result.json").read_text(encoding="utf-8"))
    assert result["lost"] == {}
    assert set(result["clients"]) == {unicodedata.normalize("NFC", person) for person in people}
    for person in result["clients"]:
        ((kept,),) = [
            list(
                (tmp_path / "here/run").glob(
                    f"{'devices/*/*/' * (how == 'demo')}clients/{names.encoded(person)}"
                )
            )
        ]
        assert coterie.load(kept).about.client == person
