"""Documentation that can go stale is checked against the code."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import coterie
from coterie.methods import METHODS

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


def test_the_readme_names_every_method() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in METHODS)


def test_files_that_the_paper_index_names_exist() -> None:
    page = (REPOSITORY / "docs/paper-index.md").read_text()
    paths = re.findall(
        r"`((?:tests|core|data|models|aggregation|client|methods|engines|reports|personal|runs|papers|deploy|cli)/[\w./-]+)`",
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
