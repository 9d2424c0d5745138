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
        made: list[list[int]] = [[] for _ in range(10 * gc.get_threshold()[0])]
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


def test_what_was_made_within_is_old_and_still_collected() -> None:
    gc.enable()
    with uncollected():
        made: list[object] = []
        made.append(made)
    assert not any(found is made for found in gc.get_objects(generation=0))
    assert gc.get_freeze_count() == 0
    del made
    assert gc.collect() > 0


def test_what_others_have_frozen_stays_so() -> None:
    gc.enable()
    frozen: list[object] = []
    frozen.append(frozen)
    gc.freeze()
    try:
        with uncollected():
            pass
        # one object, not their number: other tests' threads may let go of theirs meanwhile
        assert not any(found is frozen for found in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(found is frozen for found in gc.get_objects())
