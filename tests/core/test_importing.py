"""The garbage collector rests while libraries are imported, and no longer."""

import gc
from collections.abc import Iterator

import pytest

from coterie.core.importing import uncollected


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_within_and_everything_as_before_after_it() -> None:
    gc.enable()
    with uncollected():
        before = gc.get_stats()[0]["collections"]
        made = [[] for _ in range(10 * gc.get_threshold()[0])]
        assert gc.get_stats()[0]["collections"] == before
    assert gc.isenabled()
    assert made


def test_whoever_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_it_may_be_nested_and_goes_on_after_an_error() -> None:
    gc.enable()

    @uncollected()
    def failing() -> None:
        with uncollected():
            pass
        assert not gc.isenabled()
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        failing()
    assert gc.isenabled()
