"""Who has to go when too many unknown callers come: held against the sentence that says so, for
every connection by itself.
"""

import random

from coterie.core.strangers import Strangers


def expected(held: list[tuple[int, str]], alike: int, most: int) -> int | None:
    """Which connection goes after the last one has come, by the rule."""
    address = held[-1][1]
    of_it = [number for number, where in held if where == address]
    if len(of_it) > alike:
        return of_it[0]
    return held[0][0] if len(held) > most else None


def test_the_oldest_of_the_address_goes_and_else_the_oldest_of_all() -> None:
    chance, closed = random.Random(3), []
    strangers, held = Strangers[int](3, closed.append), []
    for number in range(2000):
        address, most = chance.choice("abcd"), chance.choice([0, 5, 8])
        strangers.admit(number, address, most)
        held.append((number, address))
        gone = expected(held, 3, most)
        assert closed == ([] if gone is None else [gone])
        closed.clear()
        left = {gone, chance.choice(held)[0] if chance.random() < 0.4 else None}
        for connection in left - {None}:
            strangers.leave(connection)
        held = [one for one in held if one[0] not in left]
        assert len(strangers) == len(held)


def test_nobody_goes_where_nobody_is() -> None:
    closed: list[int] = []
    Strangers[int](1, closed.append).dismiss_oldest()
    assert closed == []
