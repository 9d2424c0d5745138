"""What clients may be called, and the names of their files: reversible, the same everywhere, and
never a path.
"""

# ruff: noqa: RUF001 - letters of several alphabets look alike

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.core import names
from coterie.core.errors import DataError
from coterie.data.federation import CENTRALIZED, ClientData, Federation, check_id
from coterie.data.splits import SPLITS, RemoteSplit
from coterie.engines.messages import Member, Reply, Request

GOOD = [
    *("ann", "c0-1", "a.b_c-d", "-x", "_", "3", "x" * 100, "__x__"),
    *("Ayşe Yılmaz", "数学", "Zoë & Co.", "ünï code", "Иван Иванов", "Ελένη"),
    *("محمد علي", "علی\u200cرضا", "שרה", "הרצל ב׳", "प्रिया", "श\u094d\u200dन"),
    *("กมล", "김민수", "さくら・モモコ", "L·L", "O'Neil", "D\u2019Arcy"),
    *("Núñez + 1", "anna@example.org", "数" * 100, "Ünal 2"),
]  # fmt: skip
BAD = {
    "": "it is empty",
    "x" * 101: "it has 101 characters",
    "x" * 10_000: "it has 10,000 characters",
    "../../x": "it has '/'",
    ".hidden": "it begins with '.'",
    "..": "it begins with '.'",
    "a/b": "it has '/', U+002F SOLIDUS",
    "a\\b": r"it has '\\', U+005C",
    "a\nb": "it has U+000A",
    "a\0b": "it has U+0000",
    "a\x1b[31mb": "it has U+001B",
    "ann\u202enna": "it has U+202E RIGHT-TO-LEFT OVERRIDE",
    "a\u2066b": "it has U+2066",
    "a\u200bb": "it has U+200B ZERO WIDTH SPACE",
    "an\u200cna": "it has U+200C ZERO WIDTH NON-JOINER",  # where it changes nothing
    "ann\u200d": "it has U+200D",
    "a\u00adb": "it has U+00AD SOFT HYPHEN",
    "a\u3164b": "it has 'ㅤ', U+3164 HANGUL FILLER",
    "a\ufe0f": "it has '\ufe0f', U+FE0F",
    "a\ud800": "it has U+D800",
    "a\ue000": "it has U+E000",
    "a\u00a0b": "it has U+00A0 NO-BREAK SPACE",
    "a\u2028b": "it has U+2028",
    "a:b": "it has ':'",
    "a*": "it has '*'",
    "<b>": "it has '<'",
    'a"b': "it has '\"'",
    "a (2)": "it has '('",
    "a,b": "it has ','",
    "a😀": "it has '😀', U+1F600 GRINNING FACE",
    " a": "it begins with ' '",
    "a ": "it has a space at its end",
    "a  b": "two in a row",
    "\u0301a": "it begins with",
    unicodedata.normalize("NFD", "Zoë"): "not in Unicode's normal form C",
    CENTRALIZED: "it is reserved: it names the union of all clients' data",
    "Centralized": "it is reserved",
    "__metadata__": "it is reserved",  # of a tensor in a safetensors file
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_names_that_clients_may_have(name: str) -> None:
    assert names.mistake(name) == ""
    check_id(name)
    assert Request(action="hello", run="r", recipe={}, client=name).client == name
    assert Member(client=name, position=0, windows=(1, 1, 1)).client == name


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_refused_with_a_reason_wherever_they_come_from(name: str) -> None:
    assert BAD[name] in names.mistake(name)
    with pytest.raises(
        DataError,
        match=r"client id .* is not valid: it.*\n  Rename it: letters and digits of any alphabet",
    ) as refused:
        check_id(name)
    assert len(str(refused.value)) < 600
    if name == names.CENTRALIZED:
        return  # it travels in simulations; a device that is one client refuses it itself
    for made in (
        lambda: Request(action="task", run="r", recipe={}, client=name),
        lambda: Member(client=name, position=0, windows=(1, 1, 1)),
        lambda: Reply(client=name),
    ):
        with pytest.raises(ValidationError):
            made()


def test_names_of_older_runs_are_their_own_files() -> None:
    for name in ("ann", "c0-1", "a.b_c-d", "-x", "_", "x" * 100, "client-00", "A.B"):
        assert names.encoded(name) == name


def test_what_files_are_called() -> None:
    assert names.encoded("Zoë & Co.") == "Zo%C3%AB%20%26%20Co%2E"
    assert names.encoded("数学") == "%E6%95%B0%E5%AD%A6"
    assert names.encoded("..") == "%2E%2E"
    assert names.encoded("../../x") == "%2E.%2F..%2Fx"
    for device in ("CON", "nul", "Com1.txt", "lpt9", "aux.tar.gz"):
        assert names.encoded(device) == f"%{ord(device[0]):02X}{device[1:]}"
    assert names.encoded("console") == "console"
    long = names.encoded("数" * 100)
    assert (len(long), names.is_cut(long), names.decoded(long)) == (114, True, "数" * 9 + "…")
    assert long != names.encoded("数" * 99)
    with pytest.raises(ValueError, match="empty"):
        names.encoded("")


ANY = st.text(st.characters(), min_size=1, max_size=300) | st.sampled_from([*GOOD, *BAD]).filter(
    bool
)
NEAR = st.text(st.sampled_from("aA.%~ /é数\u0301\u200c-_%2E"), min_size=1, max_size=60)


@given(ANY | NEAR)
def test_a_file_s_name_is_safe_on_every_disk(name: str) -> None:
    file = names.encoded(name)
    assert re.fullmatch(
        r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})(?:[A-Za-z0-9._-]|%[0-9A-F]{2})*(?:~[0-9a-f]{32})?", file
    )
    assert not file.endswith(".")
    assert len(file.encode()) <= names.LONGEST_FILE
    assert file.partition(".")[0].lower() not in {"con", "prn", "aux", "nul", "com1", "lpt1"}


@given(ANY | NEAR)
def test_a_file_s_name_says_which_client_it_is_of(name: str) -> None:
    file = names.encoded(name)
    if names.is_cut(file):
        assert name.startswith(names.decoded(file)[:-1])
    elif not any("\ud800" <= c <= "\udfff" for c in name):
        assert names.decoded(file) == name


@given(NEAR, NEAR)
def test_unlike_names_have_unlike_files(one: str, other: str) -> None:
    assert (names.encoded(one) == names.encoded(other)) == (one == other)


@given(ANY | NEAR, ANY | NEAR)
def test_unlike_valid_names_have_files_that_no_disk_takes_for_one(one: str, other: str) -> None:
    one, other = names.nearest(one) or "x", names.nearest(other) or "y"
    if names.folded(one) != names.folded(other):
        assert names.encoded(one).lower() != names.encoded(other).lower()


@given(ANY | NEAR)
def test_the_nearest_name_is_one(text: str) -> None:
    found = names.nearest(text)
    assert names.mistake(found) in ("", "it is empty") or "reserved" in names.mistake(found)
    if names.mistake(text) == "":
        assert found == text


def data(*clients: str) -> dict[str, ClientData]:
    return {i: ClientData(i, *map(RemoteSplit, SPLITS, (1, 1, 1))) for i in clients}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ann", "ann"),
        ("ŞULE", "şule"),
        ("Straße", "STRASSE"),
        ("علی\u200cرضا", "علیرضا"),
        ("ΣΑΣ", "σας"),
    ],
)
def test_two_clients_must_differ_by_more_than_capitals(one: str, other: str) -> None:
    with pytest.raises(DataError, match=r"names of clients '.*' and '.*' differ only in case"):
        Federation(data(one, other), "two")
    with pytest.raises(DataError, match="differ only in case"):
        Federation(data(one), "one and one unseen", unseen={"new": data(other)})
    Federation(data(one, "ben"), "two")
