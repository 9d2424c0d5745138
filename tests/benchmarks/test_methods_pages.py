"""Figures on pages of methods are those of the tables."""

from collections.abc import Iterator
from typing import Any

import pytest
from script_modules import ROOT, module_at


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield module_at("benchmarks/methods_pages.py")


def test_pages_have_the_figures_of_the_tables(script: Any) -> None:
    pages = {path: path.read_text("utf-8") for path in script.PAGES.glob("*.md")}
    assert [path.stem for path, text in pages.items() if text != script.page(path)] == []
    rivals = {"fedalt", "feddpa-f", "fedlease", "apfl", "fedala", "fedproto"}
    assert rivals <= {path.stem for path, text in pages.items() if script.TITLE in text}
