"""The part of `multilingual` and `topics` in the repository: found by itself, equal to the full
folder, licensed, and in no wheel.
"""

import csv
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import coterie
from coterie.data import Multilingual, Topics
from coterie.data.origins import MULTILINGUAL, TOPICS, seen_in_pretraining
from coterie.papers import tables
from coterie.runs import recipes
from coterie.runs.folder.inputs import INPUTS
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run

REPOSITORY = Path(__file__).parents[2]
PART = REPOSITORY / "corpora"
FILES = ("multilingual/train.jsonl.gz", "topics/train.jsonl.gz")
OURS = ("multilingual", "topics")
PINNED = "src/coterie/data/python/modules.jsonl.gz"  # the quickstart's text, the one a wheel has


def rows(file: str) -> list[dict[str, str]]:
    with gzip.open(PART / file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def texts(section) -> dict[str, list[list[str]]]:
    return {id: [list(part) for part in parts] for id, parts in section.source().read().items()}


# Found by itself


def test_a_checkout_has_all_languages_and_topics(tokenizer) -> None:
    few = {"train_tokens": 500, "valid_tokens": 500, "test_tokens": 500}
    for section in (
        Multilingual(languages=("ca", "de", "es", "fr", "it", "nl"), **few),
        Topics(**few),
    ):
        federation = section.load(tokenizer, 32)
        assert len(federation.clients) == len(section.names)
        assert "the part of it in this repository" in federation.description
        [(name, digest)] = federation.files.items()
        assert digest == hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()


def test_a_run_says_which_data_it_read(tiny_base: Path, tmp_path: Path, monkeypatch) -> None:
    options = [
        "data.train_tokens=200",
        "data.valid_tokens=100",
        "data.test_tokens=100",
        f"model.base={tiny_base}",
        "model.context=32",
    ]
    options += [
        "model.rank=2",
        "training.batch_size=2",
        "method.rounds=1",
        "method.local_steps=1",
        "samples=false",
        "words=null",
        "compare_with=[]",
    ]
    for name, root, expected in (("here", "null", "corpora/"), ("named", PART, "data.root/")):
        run(load("topics", [*options, f"data.root={root}"]), tmp_path / name)
        [(file, digest)] = json.loads((tmp_path / name / INPUTS).read_text())["files"].items()
        assert file == f"{expected}topics/train.jsonl.gz"
        assert digest == hashlib.sha256((PART / FILES[1]).read_bytes()).hexdigest()
    monkeypatch.setenv("COTERIE_DATA", str(PART))
    run(
        load("topics", options), tmp_path / "here", resume=True
    )  # the same text from elsewhere is no change


def test_a_named_folder_goes_before_the_part(data_root: Path, monkeypatch) -> None:
    assert list(Topics(root=data_root).source().files) == ["data.root/topics/train.jsonl.gz"]
    monkeypatch.setenv("COTERIE_DATA", str(data_root))
    assert list(Topics().source().files) == ["COTERIE_DATA/topics/train.jsonl.gz"]


# Equal to the full folder


def test_shipped_recipes_read_the_same_from_the_part(data_root: Path) -> None:
    """Bounds only cut what is compared here, and rows of reproductions that set `data.*` set
    bounds.
    """
    found = [recipe for name in recipes.names() if (recipe := load(name)).data.kind in OURS]
    assert {recipe.name for recipe in found} >= {
        "multilingual",
        "topics",
        "languages-topics",
        "cobo-languages",
        "attacked",
    }
    sections = {
        recipe.data.model_copy(
            update={f"{s}_tokens": None for s in ("train", "valid", "test")}
        ).model_dump_json(): recipe.data
        for recipe in found
    }
    for section in sections.values():
        assert section.exclude_pretraining
        assert texts(section) == texts(section.model_copy(update={"root": data_root}))
    for path in Path(tables.__file__).parent.rglob("*.yaml"):
        assert not re.search(r"exclude_pretraining|data\.(seed|fractions)", path.read_text()), path


@pytest.mark.slow
def test_the_script_makes_what_is_committed(data_root: Path, tmp_path: Path) -> None:
    script = [sys.executable, "scripts/part_of_corpora.py", "--data", str(data_root)]
    subprocess.run(
        [*script, "--out", str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True
    )
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {*FILES, "topics/sources.tsv"}
    for file in written:
        read = (
            gzip.open if file.endswith(".gz") else open
        )  # another zlib may compress to other bytes
        with read(tmp_path / file, "rb") as made, read(PART / file, "rb") as committed:
            assert made.read() == committed.read(), file
    with gzip.open(tmp_path / FILES[0], "at", encoding="utf-8") as file:
        file.write("{}\n")
    changed = subprocess.run(
        [*script, "--check", "--out", str(tmp_path)],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
    )
    assert changed.returncode == 1


def test_the_part_has_nothing_that_the_base_was_pretrained_on() -> None:
    assert not any(seen_in_pretraining("multilingual", row["text"]) for row in rows(FILES[0]))
    assert not any(
        seen_in_pretraining(f"topics/{row['topic']}", row["id"]) for row in rows(FILES[1])
    )


# Sources and licences


def test_every_work_has_a_source_and_a_licence() -> None:
    with open(PART / "topics/sources.tsv", encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file, delimiter="\t"))
    assert {(row["topic"], row["id"]) for row in listed} == {
        (row["topic"], row["id"]) for row in rows(FILES[1])
    }
    assert all(row["licence"] and row["address"].startswith("https://") for row in listed)


def test_the_readme_says_of_each_language_and_topic_how_much_and_under_what_licence() -> None:
    page = (PART / "README.md").read_text(encoding="utf-8")
    for file, column in zip(FILES, ("language", "topic"), strict=True):
        counts, characters = Counter(row[column] for row in rows(file)), Counter[str]()
        for row in rows(file):
            characters[row[column]] += len(row["text"])
        for name in counts:
            [line] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
            assert f" {counts[name]:,} |" in line
            assert f" {characters[name]:,} |" in line
    for path in re.findall(r"\]\((?!https)([^)]+)\)", page):
        assert (PART / path).is_file()
    assert "GNU Free Documentation License" in (PART / "licenses/GFDL-1.2.txt").read_text()
    assert (
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2"
        in (PART / "licenses/PSF-2.0.txt").read_text()
    )


def test_the_part_is_small() -> None:
    assert sum(path.stat().st_size for path in PART.rglob("*") if path.is_file()) < 5_000_000


# Installed, without it


def refusals_of(site: Path) -> dict[str, str]:
    """What is said by a package in a folder `site` where no data are named."""
    program = (
        "import json; from coterie.data import Multilingual, Topics; from coterie.core.errors "
        "import DataError; found = {}\n"
        "for section in (Multilingual(), Topics()):\n"
        "    try:\n        section.source()\n"
        "    except DataError as error:\n        found[section.kind] = str(error)\n"
        "print(json.dumps(found))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "COTERIE_DATA"} | {
        "PYTHONPATH": str(site)
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=site,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def assert_says_all(found: dict[str, str]) -> None:
    for kind, origins in (("multilingual", MULTILINGUAL), ("topics", TOPICS)):
        needed = [
            part for origin in origins for part in (origin.address, origin.licence, *origin.of)
        ]
        for part in (
            *needed,
            "scripts/build_corpora.py --out DIR",
            "--set data.root=DIR",
            "COTERIE_DATA=DIR",
        ):
            assert part in found[kind]


def test_an_installed_package_says_where_the_text_comes_from(tmp_path: Path) -> None:
    site = tmp_path / "lib/site-packages"
    shutil.copytree(Path(coterie.__file__).parent, site / "coterie")
    assert_says_all(refusals_of(site))


def test_the_wheel_is_of_the_package_alone() -> None:
    built = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]
    assert built["wheel"]["packages"] == ["src/coterie"]
    assert not {"include", "force-include", "artifacts"} & built["wheel"].keys()
    assert "/corpora" in built["sdist"]["exclude"]
    assert [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("src/**/*.jsonl*")] == [
        PINNED
    ]


@pytest.mark.slow
def test_no_wheel_has_the_part(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(REPOSITORY),
    ]
    if subprocess.run(build, check=False, capture_output=True).returncode:
        pytest.skip("no wheel can be built: the build backend cannot be had")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert [f"src/{name}" for name in names if ".jsonl" in name] == [PINNED]
        assert not [name for name in names if name.startswith("corpora")]
        archive.extractall(tmp_path / "site")
    assert_says_all(refusals_of(tmp_path / "site"))
