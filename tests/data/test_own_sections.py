"""Kinds of data that do not come with coterie: a class in a module, which devices do not import."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

import coterie
from coterie.data import Data, kind_of
from coterie.engines.messages import Reply, Request, parsed
from coterie.runs.device.device import Device
from coterie.runs.device.limits import Limits
from coterie.runs.recipes.recipe import dump, load, resolve

OWN = '''
import numpy as np
from coterie.data import Images, Section, Source
from coterie.data.partition import Labelled


class Sayings(Section):
    """Two clients with sayings."""

    word: str = "word"

    @property
    def title(self):
        return "sayings"

    def source(self):
        return Source(1, self.read)

    def read(self):
        said = [f"the {self.word} of client and of day {k}" for k in range(20)]
        return {"ann": [said, said[:9], said[:9]], "ben": [said[::-1], said[5:], said[5:]]}


class Others(Sayings):
    """The same, as another class."""

    def read(self):
        said = [f"other {self.word} {k}" for k in range(20)]
        return {"ann": [said, said[:9], said[:9]], "ben": [said[::-1], said[5:], said[5:]]}


class Stripes(Images):
    """Pictures of stripes, in two classes."""

    name = "stripes"
    shape, classes, mean, std = (1, 4, 4), 2, (0.5,), (0.5,)

    def images(self, cache):
        labels = np.arange(80) % 2
        pictures = np.zeros((80, 1, 4, 4), dtype=np.float32)
        pictures[labels == 1, :, ::2] = 1
        return Labelled(pictures[:60], labels[:60], pictures[60:], labels[60:])


class NoSection:
    pass
'''
SMALL = {"name": "fedavg", "rounds": 1, "local_steps": 1}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_sections.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_texts_of_ones_own_are_trained_on_and_written_down(package: Path, tiny_base: Path) -> None:
    recipe = coterie.Recipe(
        name="own",
        data={"kind": "own_sections:Sayings", "word": "bread"},
        model={"base": str(tiny_base), "context": 8},
        method=SMALL,
        training={"batch_size": 2},
    )
    assert recipe.data.word == "bread"
    run = coterie.run(recipe, out=package / "run")
    assert list(run.result.clients) == ["ann", "ben"]
    assert "kind: own_sections:Sayings" in dump(recipe)
    assert resolve(run.folder) == recipe
    assert coterie.Recipe(**recipe.model_dump()) == recipe
    assert coterie.run(recipe, out=package / "run", resume=True).result == run.result


def test_images_of_ones_own_are_trained_on(package: Path) -> None:
    run = coterie.run(
        coterie.Recipe(
            name="own",
            data={"kind": "own_sections:Stripes", "partition": "iid", "clients": 2},
            model={"kind": "classifier", "network": "mlp", "hidden": [4]},
            method=SMALL,
        ),
        out=package / "run",
    )
    assert len(run.result.clients) == 2


def test_sections_of_two_classes_share_no_cache(package: Path, tiny_base: Path) -> None:
    from coterie.models.architecture import tokenizer

    found = [
        TypeAdapter(Data)
        .validate_python({"kind": f"own_sections:{name}"})
        .load(tokenizer(str(tiny_base)), 8)
        for name in ("Sayings", "Others")
    ]
    first, second = (federation.clients["ann"].train.digest() for federation in found)
    assert first != second


def test_a_section_itself_is_data_too(package: Path) -> None:
    import own_sections

    section = own_sections.Sayings(word="salt")
    recipe = load("quickstart").with_changes(name="own")
    found = coterie.Recipe(**recipe.model_dump(exclude={"data"}), data=section)
    assert found.data == section
    assert kind_of(found.data) == "own_sections:Sayings"


@pytest.mark.parametrize(
    ("section", "mistake"),
    [
        (
            {"kind": "own_sections:NoSection"},
            "'own_sections:NoSection' is not a subclass of coterie.data's Section",
        ),
        ({"kind": "own_sections:Missing"}, "cannot be imported: AttributeError"),
        ({"kind": "no_such:Thing"}, "cannot be imported: ModuleNotFoundError"),
        ({"kind": "own_sections:Sayings", "wrod": 1}, "data.wrod: unknown key"),
    ],
)
def test_what_is_no_section_is_refused(
    package: Path, section: dict[str, object], mistake: str
) -> None:
    with pytest.raises(coterie.Refused) as refused:
        coterie.Recipe(name="own", data=section, method=SMALL)
    assert mistake in str(refused.value)


def test_a_device_imports_no_data_that_a_server_names(package: Path) -> None:
    (package / "sprung_data.py").write_text(
        f"open({str(package / 'sprung')!r}, 'w').close()\n" + OWN
    )
    recipe = load(
        "cobo-digits", ["method.name=fedavg", "method.rounds=2", "compare_with=[]", "engine=flower"]
    )
    section = recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"})
    section["data"] = {"kind": "sprung_data:Stripes", "partition": "iid", "clients": 2}
    request = Request(
        recipe=section, task="local_round", action="hello", run="run"
    ).model_dump_json()
    name = "sprung_data:Stripes"
    for limits, sprung in ((Limits(), False), (Limits(data=(name,)), True)):
        text, _ = Device(package / "home", client="0", limits=limits).answer(request, b"")
        refused = (
            f"data.kind: this device does not import modules that a server names, here {name!r}"
        )
        assert (refused in parsed(Reply, text).problem) != sprung, text
        assert (package / "sprung").exists() == sprung
