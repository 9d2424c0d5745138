"""The commands that use personal models, called from Python, once and again."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import coterie

SMALL = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
SHORT = {"name": "fedavg", "rounds": 1, "local_steps": 1}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> coterie.Run:
    folder = tmp_path_factory.mktemp("functions") / "words"
    return coterie.run("synthetic", out=folder, data=SMALL, method=SHORT)


def test_the_same_cell_twice_goes_on_with_what_is_there(words: coterie.Run) -> None:
    trained = words.result
    again = coterie.run("synthetic", out=words.folder, data=SMALL, method=SHORT)
    assert again.result == trained
    with pytest.raises(coterie.CoterieError, match="is from another recipe"):
        coterie.run("synthetic", out=words.folder, data=SMALL, method={**SHORT, "rounds": 2})
    with pytest.raises(coterie.Refused, match="already holds a run"):
        coterie.run("synthetic", out=words.folder, data=SMALL, method=SHORT, resume=False)


def test_an_export_is_replaced_by_the_same_call_and_kept_when_that_fails(
    words: coterie.Run, tmp_path: Path
) -> None:
    out = tmp_path / "adapter"
    for _ in range(2):
        (exported,) = coterie.export(words.folder, out, client="client-0")
        assert (out / exported.files[0]).is_file()
    with pytest.raises(coterie.Refused, match="--format gold: unknown"):
        coterie.export(words.folder, out, client="client-0", format="gold")
    assert (out / "export.json").is_file()
    (out / "README.md").write_text("notes of my own")  # what somebody has changed is not replaced
    with pytest.raises(coterie.Refused, match="is not an empty folder"):
        coterie.export(words.folder, out, client="client-0")


def test_a_new_client_is_made_again_and_a_trained_one_never(
    words: coterie.Run, tmp_path: Path
) -> None:
    (tmp_path / "carla.txt").write_text("the water and the fire with the water " * 400)
    for _ in range(2):
        adapted = coterie.adapt(words.folder, tmp_path / "carla.txt")
        assert adapted.folder == words.folder / "clients" / "carla"
    with pytest.raises(coterie.Refused, match="exists already"):
        coterie.adapt(words.folder, tmp_path / "carla.txt", client="client-0")


def test_an_interface_on_a_port_gives_way_to_the_next(words: coterie.Run) -> None:
    from coterie.personal.api.guard import listening

    with listening("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    first = coterie.serve(words.folder, port=port, api=True)
    with coterie.serve(words.folder, port=port, api=True, clients=["client-1"]) as second:
        request = urllib.request.Request(
            f"{second.address}/models", headers={"Authorization": f"Bearer {second.token}"}
        )
        with urllib.request.urlopen(request) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["client-1"]
        assert first.address == second.address
        assert first.token != second.token
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(request)


def test_rooms_that_are_commands_too_are_both() -> None:
    import inspect

    from coterie.data import by_client
    from coterie.export import FORMATS

    assert "peft" in FORMATS
    assert callable(by_client.in_memory)
    assert list(inspect.signature(coterie.export).parameters)[:2] == ["run", "out"]
    assert "other program" not in (coterie.data.__doc__ or "")
    assert (coterie.data.__doc__ or "").startswith("Read the data of a recipe")
