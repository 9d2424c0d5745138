"""The pages in `examples/` that hold a whole paper's algorithm compute what the library does."""

from pathlib import Path

import pytest
import torch

import coterie

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_LINES = 200


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def scores(recipe: str, rounds: int, folder: Path) -> coterie.Result:
    return coterie.run(
        recipe, out=folder, method={"rounds": rounds}, compare_with=[], curve_every=None
    ).result


@pytest.mark.slow
def test_comigs(tmp_path: Path) -> None:
    import comigs_in_one_file

    page = comigs_in_one_file.comigs(rounds=3)  # the routers take their steps in the third
    result = scores("quickstart", 3, tmp_path)
    assert page == pytest.approx({i: c.test for i, c in result.clients.items()}, rel=1e-4)


def test_cobo(tmp_path: Path) -> None:
    import cobo_in_one_file

    accuracies, weights = cobo_in_one_file.cobo(rounds=90)  # from round 30 on fewer pairs
    result = scores("cobo-digits", 90, tmp_path)
    assert accuracies == pytest.approx({i: c.test for i, c in result.clients.items()}, abs=1e-4)
    expected = torch.tensor(result.evaluations[-1].weights, dtype=torch.float64)
    assert torch.allclose(weights, expected, atol=1e-4)


def test_ddome(tmp_path: Path) -> None:
    import ddome_in_one_file

    accuracies = ddome_in_one_file.ddome(rounds=20)
    result = scores("ddome-digits", 20, tmp_path)
    assert len(result.clients) == 20
    assert accuracies == pytest.approx({i: c.test for i, c in result.clients.items()}, abs=1e-4)


@pytest.mark.parametrize("page", sorted(EXAMPLES.glob("*_in_one_file.py")), ids=lambda p: p.stem)
def test_a_page_is_short_and_takes_only_data_from_the_library(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    imports = [line for line in source.splitlines() if "import" in line.split()[:3:2]]
    ours = [line for line in imports if "coterie" in line.split()[1]]
    assert ours
    assert all(line.startswith("from coterie.data.") for line in ours)
