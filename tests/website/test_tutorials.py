"""The tutorials run as they are printed, and print what is printed there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TUTORIALS = REPOSITORY / "docs/tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "README")
sys.path.insert(0, str(REPOSITORY / "scripts"))
from website.tutorials import cells, differences, notebook, written  # noqa: E402

PAGE = "# A page\n\n```python\nprint(1, 'a')\n```\n\n```text\n1 a\n```\n\nThe end.\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_prints_what_it_says(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/website/tutorials.py"), "--check", name],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_has_programs_and_outputs(name: str) -> None:
    text = (TUTORIALS / f"{name}.md").read_text("utf-8")
    found = list(cells(text))
    assert len(found) >= 3
    assert all(cell.output is None or cell.output.strip() for cell in found)
    assert any(cell.output for cell in found)
    for cell in found:
        if cell.kind == "python":
            compile(cell.code, name, "exec")
        elif cell.output:  # wider ones are cut at the right on a phone
            assert max(map(len, cell.output.splitlines())) <= 80, cell.code
    assert f"({name}.md)" in (TUTORIALS / "README.md").read_text("utf-8")


def test_numbers_of_an_output_may_differ_and_words_may_not() -> None:
    assert not differences(PAGE, ["2.5 a\n"])
    assert differences(PAGE, ["1 b\n"])
    assert not differences(PAGE.replace("```text", '```text title="for example"'), ["1 b\n"])
    assert differences(PAGE.replace("```text", '```text title="for example"'), ["\n"])
    assert written(PAGE, ["2 b\n"]) == PAGE.replace("1 a\n", "2 b\n")


def test_a_notebook_has_the_page_s_cells_and_outputs() -> None:
    made = json.loads(json.dumps(notebook(PAGE)))
    kinds = [cell["cell_type"] for cell in made["cells"]]
    assert kinds == ["markdown", "code", "markdown"]
    assert made["cells"][1]["source"] == "print(1, 'a')"
    assert made["cells"][1]["outputs"][0]["text"] == "1 a\n"
    assert (made["nbformat"], len({cell["id"] for cell in made["cells"]})) == (4, 3)
