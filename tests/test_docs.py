"""Documentation that can go stale is checked against the code."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from script_modules import module_at
from test_layers import LEVEL

import coterie
from coterie.runs import recipes

REPOSITORY = Path(__file__).parents[1]


def test_the_page_on_recipes_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/recipe_reference.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_field_that_no_comment_describes_is_refused() -> None:
    class Section(BaseModel):
        # what it
        # is for
        above: int = 0
        beside: int = 1  # likewise
        silent: int = 2

    descriptions = module_at("scripts/recipe_reference.py").descriptions
    with pytest.raises(ValueError, match="silent"):
        descriptions(Section)
    Section.model_fields["silent"].description = "in its type"
    assert list(descriptions(Section).values()) == ["what it is for", "likewise", "in its type"]


def test_the_pages_on_the_code_are_what_the_code_says() -> None:
    command = [sys.executable, "scripts/architecture.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_picture_of_the_rooms_says_what_may_be_imported() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    arrows = re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE)
    assert len(arrows) == len(set(arrows)) >= len(LEVEL) - 1
    assert all(LEVEL[low] < LEVEL[high] for high, low in arrows)
    assert {room for arrow in arrows for room in arrow} == LEVEL.keys()


@pytest.mark.parametrize(
    "name", ["docs/architecture.md", "docs/write-a-method.md", "CONTRIBUTING.md"]
)
def test_what_pages_for_developers_name_is_there(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    code = Path(coterie.__file__).parent
    paths = re.findall(
        r"`([\w./-]+/[\w.-]+\.(?:py|md|yaml)(?=[`:])|(?:tests|scripts|benchmarks)/[\w./-]*(?=`))",
        text,
    )
    assert len(paths) > 5
    for path in paths:
        assert any((root / path).exists() for root in (REPOSITORY, code)), path
    for path, dotted in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        assert defines(code / path, dotted.split(".")), f"{path}:{dotted}"
    for link, anchor in re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", text):
        target = (REPOSITORY / name).parent / link
        assert target.exists(), link
        heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else ()
        assert not anchor or anchor in {
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
        }, anchor


def defines(path: Path, names: list[str]) -> bool:
    """Whether a file has a function, or a class with a method, of this name."""
    body = ast.parse(path.read_text()).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def test_files_that_the_paper_index_names_exist() -> None:
    page = (REPOSITORY / "docs/paper-index.md").read_text()
    paths = re.findall(
        r"`((?:tests|theorems|core|data|models|aggregation|client|methods|engines|reports|personal|runs|papers|deploy|cli)/[\w./-]+)`",
        page,
    )
    assert len(paths) > 10
    for path in paths:
        assert any(
            (root / path).exists() for root in (REPOSITORY, Path(coterie.__file__).parent)
        ), path


def test_the_table_of_aims_is_of_the_results_beside_it(tmp_path: Path) -> None:
    results, copied = REPOSITORY / "benchmarks/results", tmp_path / "results"
    shutil.copytree(results, copied, ignore=shutil.ignore_patterns("*.md"))
    command = [sys.executable, "benchmarks/suite.py", "--table", "--folder", str(copied)]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    assert (copied / "suite.md").read_text() == (results / "suite.md").read_text()


SCHEMA = json.loads((REPOSITORY / "docs/recipes/recipe.schema.json").read_text())


@pytest.mark.parametrize("name", recipes.names())
def test_the_schema_for_editors_takes_every_shipped_recipe(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(recipes.find(name).read_text()))


@pytest.mark.parametrize(
    "change", [{"rounds": 3}, {"evaluate_every": "often"}, {"model": {"kind": "languages"}}]
)
def test_the_schema_for_editors_marks_mistakes(change: dict[str, object]) -> None:
    recipe = yaml.safe_load(recipes.find("quickstart").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(recipe | change)
