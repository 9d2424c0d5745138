"""Archives of each form become conversations, or are refused by file and place."""

import json
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_bases import chat_tokenizer, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invented_archives import (
    WHATSAPP,
    chatgpt,
    mail,
    node,
    said,
    telegram,
    write,
    write_mbox,
    write_slack,
)

from coterie.core.errors import DataError
from coterie.data.archives import kind_of, rows_of
from coterie.data.archives.mail import written_here
from coterie.data.chats.reading import read_conversations
from coterie.data.folders import Folders

Talk = list[tuple[str, str]]


def talks(*paths: Path, me: Any = ("Ann Miller",)) -> list[Talk]:
    """The conversations of archives: who of `u` and `a` says what."""
    conversations = read_conversations(rows_of(paths, me))
    return [[(m["role"][0], m["content"]) for m in one.messages] for one in conversations]


# --- forms ---------------------------------------------------------------------------------------


def test_chatgpt_is_the_branch_that_was_shown_last(tmp_path: Path) -> None:
    path = write(tmp_path / "conversations.json", chatgpt())
    shown = [("u", "[image]\nWhat is this?"), ("a", "A cat."), ("u", "Thanks\na lot")]
    assert kind_of(path) == "chatgpt"
    assert talks(path, me=("assistant",)) == [shown]
    swapped = {"u": "a", "a": "u"}
    assert talks(path, me=("user",)) == [[(swapped[role], text) for role, text in shown]]


def test_a_conversation_that_was_left_at_once_does_not_spoil_chatgpts(tmp_path: Path) -> None:
    cited = node("a", None, "assistant", ["Rome.\ue200cite\ue202turn0search0\ue201"])
    empty = {"mapping": {"r": node("r", None)}, "current_node": None}
    shown = {"mapping": {"a": cited}, "current_node": "a"}
    path = write(tmp_path / "conversations.json", [empty, shown])
    assert talks(path, me=("assistant",)) == [[("a", "Rome.")]]


def test_telegram_leaves_out_notices_and_words_of_others_are_not_mine(tmp_path: Path) -> None:
    linked = ["see ", {"type": "link", "text": "x.org"}, "!"]
    chat = telegram(
        {"id": 1, "type": "service", "date": "2024-05-12T14:00:00", "text": ""},
        said("Ben Jones", "Hi"),
        said("Ann Miller", linked),
        said("Ann Miller", "", photo="photo.jpg"),
        said("Ann Miller", "a poem", forwarded_from="A poet"),
        said("Ann Miller", "nice"),
        said("Ben Jones", "late", "2024-05-14T10:00:00"),
        said("Ann Miller", "yes", "2024-05-14T10:01:00"),
    )
    silent = telegram(said("Cy", "spam"), name=None)
    expected = [
        [("u", "Hi"), ("a", "see x.org!"), ("u", "a poem"), ("a", "nice")],
        [("u", "late"), ("a", "yes")],
    ]
    one = write(tmp_path / "one" / "result.json", chat)
    account = {"about": "...", "personal_information": {}, "chats": {"list": [silent, chat]}}
    every = write(tmp_path / "all" / "result.json", account)
    assert kind_of(one) == kind_of(every) == "telegram"
    assert talks(one) == talks(every) == expected


def test_people_of_one_name_are_told_apart(tmp_path: Path) -> None:
    chat = telegram(said("Ann", "one"), said("Ben", "two"), said("Ann", "three", from_id="user9"))
    path = write(tmp_path / "result.json", chat)
    with pytest.raises(DataError, match=r"Ann \(user285\) \(1\), Ben \(1\), Ann \(user9\) \(1\)"):
        talks(path, me=("Ann",))
    assert talks(path, me=("Ann (user9)",)) == [
        [("u", "Ann (user285): one\nBen: two"), ("a", "three")]
    ]


def test_whatsapp_has_long_messages_and_nights(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.txt", WHATSAPP)
    assert kind_of(path) == "whatsapp"
    assert talks(path) == [
        [
            ("u", "Are you there?"),
            ("a", "Yes: here\nwith a second line\n\nand a fourth\nand more"),
            ("u", "Good"),
        ],
        [("a", "Morning"), ("u", "Morning!"), ("a", "Tea?")],
    ]


NNBSP, LRM = "\u202f", "\u200e"
ARABIC = "\u0662\u0660\u0662\u0664/\u0666/\u0661\u0661"  # 2024/6/11


@pytest.mark.parametrize(
    ("first", "second", "later"),
    [
        ("12.05.24, 14:32 - ", "12.05.24, 14:33 - ", "13.05.24, 14:33 - "),
        ("12/05/2024, 14:32 - ", "12/05/2024, 14:33 - ", "01/06/2024, 14:33 - "),
        ("5/12/24, 2:32 PM - ", "5/12/24, 2:33 PM - ", "5/13/24, 2:33 PM - "),
        ("5/12/24, 11:59 AM - ", "5/12/24, 12:01 PM - ", "5/13/24, 12:02 AM - "),
        (f"5/12/24, 2:32{NNBSP}PM - ", f"5/12/24, 2:33{NNBSP}PM - ", f"6/1/24, 2:33{NNBSP}AM - "),
        (
            f"[5/12/24, 2:32:07{NNBSP}PM] ",
            f"{LRM}[5/12/24, 2:32:08{NNBSP}PM] ",
            f"[5/13/24, 2:32:08{NNBSP}PM] ",
        ),
        ("[12.05.24, 14:32:07] ", "[12.05.24, 14:32:08] ", "[13.05.24, 14:32:08] "),
        ("[2024-05-12, 14:32:07] ", "[2024-05-12, 14:32:09] ", "[2024-05-13, 14:32:08] "),
        ("2024-05-12, 14:32 - ", "2024-05-12, 14:33 - ", "2024-05-13, 14:33 - "),
        ("2024/05/12 14:32 - ", "2024/05/12 14:33 - ", "2024/05/13 14:33 - "),
        ("2024. 5. 12. 오후 2:32 - ", "2024. 5. 12. 오후 2:33 - ", "2024. 5. 13. 오전 2:33 - "),
        ("12/5/24, 2:32 p. m. - ", "12/5/24, 2:33 p. m. - ", "13/5/24, 2:33 p. m. - "),
        ("2024年5月12日 14:32 - ", "2024年5月12日 14:33 - ", "2024年5月13日 14:33 - "),
        ("12-05-2024 14.32 - ", "12-05-2024 14.33 - ", "13-05-2024 14.33 - "),
        ("12.05.24, 14:32:01: ", "12.05.24, 14:33:00: ", "13.05.24, 14:33:00: "),
        ("12.05.24 \u0433., 14:32 - ", "12.05.24 \u0433., 14:33 - ", "13.05.24 \u0433., 14:33 - "),
        ("5/12/24, 14h32 - ", "5/12/24, 14 h 33 - ", "5/13/24, 14h33 - "),
        ("12/05/24, 11:59 PG - ", "12/05/24, 12:01 TGH - ", "12/05/24, 9:02 MLM - "),
        ("2024/5/12 早上11:32 - ", "2024/5/12 中午12:01 - ", "2024/5/12 晚上9:02 - "),
        (f"{ARABIC}، ٢:٣٢ م - ", f"{ARABIC}، ٢:٣٣ م - ", "2024/6/12، ٢:٣٣ م - "),
    ],
)
def test_dates_of_whatsapp(tmp_path: Path, first: str, second: str, later: str) -> None:
    lines = [f"{first}Ben: {LRM}image omitted", f"{first}Ben: one", f"{second}Ann: two"]
    path = write(
        tmp_path / "_chat.txt", "\n".join([*lines, f"{later}Ben: three", f"{later}Ann: four"])
    )
    assert kind_of(path) == "whatsapp"
    assert talks(path, me=("Ann",)) == [
        [("u", "one"), ("a", "two")],
        [("u", "three"), ("a", "four")],
    ]


def test_names_in_whatsapp_may_have_quotation_marks(tmp_path: Path) -> None:
    lines = ['Ben "Big" Jones: hi', "Ann: hello", 'Ann changed the subject to "Trip: Rome"']
    path = write(tmp_path / "a.txt", "\n".join(f"12.05.24, 14:32 - {line}" for line in lines))
    assert talks(path, me=("Ann",)) == [[("u", "hi"), ("a", "hello")]]


def test_days_and_months_of_whatsapp_are_told_by_the_whole_chat(tmp_path: Path) -> None:
    """What could be the 3rd of April is the 4th of March, as the month never goes beyond 12."""
    dates = ["3/4/24", "3/5/24", "3/13/24", "4/1/24"]
    lines = [f"{date}, 23:{50 + k} - {name}: x{k}" for k, date in enumerate(dates) for name in "BA"]
    short = [*lines[:2], *(line.replace("23:51", "00:01") for line in lines[2:4])]
    path = write(tmp_path / "a.txt", "\n".join([*short, *lines[4:]]))
    assert len(talks(path, me=("A",))) == 3  # the first two are eleven minutes apart
    two = write(tmp_path / "b.txt", "\n".join(short))
    assert len(talks(two, me=("A",))) == 1  # either is possible: the 4th and 5th are nearer


@pytest.mark.parametrize(
    "absent",
    [
        "<Media omitted>",
        "<Medien ausgeschlossen>",
        "<Multimedia omitido>",
        "<Médias omis>",
        "image omitted",
        "Bild weggelassen",
        f"{LRM}afbeelding weggelaten",
        f"{LRM}This message was deleted.",
        "You deleted this message",
        "IMG-20240512-WA0001.jpg (file attached)",
        f"{LRM}<attached: 00000001-PHOTO.jpg>",
        "Sinav 2.pdf (file attached)",
        "DOC-20260506-WA0012. (file attached)",
        "",
    ],
)
def test_what_stands_for_pictures_is_left_out_of_whatsapp(tmp_path: Path, absent: str) -> None:
    lines = ["Ben: one", f"Ann: {absent}", f"Ann: two {LRM}<This message was edited>", "Ben: no"]
    text = "\n".join(f"12.05.24, 14:32 - {line}" for line in lines)
    notice = '12.05.24, 14:32 - Ann changed the subject to "Trip: Rome"'
    path = write(tmp_path / "a.txt", f"{text}\n{notice}")
    assert talks(path, me=("Ann",)) == [[("u", "one"), ("a", "two"), ("u", "no")]]


def test_slack_has_threads_names_and_no_programs(tmp_path: Path) -> None:
    folder = write_slack(tmp_path / "export")
    canvas = [{"id": "F1", "created": 1715500000, "title": "Notes", "filetype": "quip"}]
    write(folder / "general" / "canvas_in_the_conversation.json", canvas)
    write(folder / "general" / "._2024-05-12.json", "\0\5\26\7")
    assert kind_of(folder) == "slack"
    assert talks(folder) == [
        [("u", "Lunch <now>?"), ("a", "in #general")],
        [("u", "@Ann Miller tea & cake?"), ("a", "cake")],
    ]


QUOTED = """\
Fine, at eight.

On Sun, May 12, 2024 at 10:00 AM Ben Jones <ben@x.org>
wrote:
> When do we meet?
> And where?

At home.
-- \nAnn Miller
Phone 123
"""
OUTLOOK = "Yes.\n\n________________________________\nVon: Ben\nGesendet: Sonntag\nAn: Ann\n\nWhen?"


def test_threads_of_mail_are_conversations_without_what_is_quoted(tmp_path: Path) -> None:
    ids = {"Message_ID": "<2@x>", "In_Reply_To": "<1@x>"}
    html = (
        "<html><head><style>p {}</style></head><body><p>See you&nbsp;<b>then</b>,<br>Ben</p>"
        "<div>On Mon, 13 May 2024 Ann wrote:<blockquote>Fine<p>at eight</p></blockquote></div>"
    )
    inbox = write_mbox(
        tmp_path / "Inbox",
        mail("Ben Jones <BEN@x.org>", "Hello", "When do we meet?", 12, Message_ID="<1@x>"),
        mail("Ben Jones <ben@x.org>", "Re: Hello", "", 15, html, References="<1@x> <2@x>"),
        mail("News <news@x.org>", "Offers", "Buy!", 13),
        mail("Ben Jones <ben@x.org>", "Tea", "Tea?", 16),
        mail("Ben Jones <ben@x.org>", "Tea", "Only a hello of the same subject", 1, Cc="cy@x.org"),
    )
    sent = write_mbox(
        tmp_path / "Sent",
        mail("Ann Miller <Ann@X.org>", "AW: Hello", QUOTED, 14, **ids),
        mail("Ann Miller <ann@x.org>", "Re: Tea", OUTLOOK, 17),
        mail("Ann Miller <Ann@X.org>", "AW: Hello", QUOTED, 14, **ids),
    )
    assert kind_of(inbox) == kind_of(sent) == "mail"
    expected = [
        [
            ("u", "When do we meet?"),
            ("a", "Fine, at eight.\n\nAt home."),
            ("u", "See you then,\nBen"),
        ],
        [("u", "Tea?"), ("a", "Yes.")],
    ]
    assert sorted(talks(inbox, sent, me=("ann@x.org",)), key=len, reverse=True) == expected


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Oui\n\nLe dim. 12 mai 2024 à 10:00, Ben <b@x> a écrit\u00a0:\n\n> Quand ?", "Oui"),
        ("Yes\n\n*From:* Ben\n*Sent:* Sunday\n*To:* Ann\n\nold", "Yes"),
        ("はい\n\n2024年5月12日 Ben <b@x>:\n> a\n> b\n\nat 5:\n> c", "はい\n\nat 5:"),
        ("a\n---------- Forwarded message ---------\nFrom: Ben\nDate: Sunday\n\nold", "a"),
        ("a\n\nOn Sun, 12 May 2024, Ben wrote:\nold, without marks", "a"),
        ("--- Agenda ---\nOne: two\nOn Monday he wrote:\nfine", None),
        (">From here\nall", "From here\nall"),
        ("Yes\n\nSent from my iPhone", "Yes"),
        ("Ja\n\nVon meinem iPhone gesendet\n\n> Wann?", "Ja"),
        ("It was sent from my house to yours,\nby post.", None),
        ("> all of it is old", ""),
    ],
)
def test_what_is_quoted_in_mail_is_not_mine(text: str, kept: str | None) -> None:
    assert written_here(text) == (text if kept is None else kept)


def test_a_line_of_text_that_begins_as_mails_do_stays(tmp_path: Path) -> None:
    text = "one\n\nFrom here on\nit is fine\n\ntwo"
    content = bytes(mail("ann@x.org", "Hello", text, 12)) + b"\n"
    path = tmp_path / "Sent"
    path.write_bytes(b"From a@b Sunday\n" + content + b"From a@b Sunday\n" + content)
    assert talks(path, me=("ann@x.org",)) == [[("a", text)]] * 2


def test_spam_drafts_and_deleted_mails_are_nobodys_words(tmp_path: Path) -> None:
    for number, (name, value) in enumerate(
        [
            ("X-Gmail-Labels", "Spam,Unread"),
            ("X-Gmail-Labels", "=?UTF-8?Q?Entw=C3=BCrfe?="),
            ("X-Gmail-Labels", "Trash"),
            ("X-Mozilla-Status", "0009"),
        ]
    ):
        kept = mail(
            "ann@x.org", "Hello", "Yes.", 12, X_Gmail_Labels="Sent", X_Mozilla_Status="0001"
        )
        gone = mail("ann@x.org", "Prize", "You won", 13)
        gone[name] = value
        path = write_mbox(tmp_path / f"{number}.mbox", kept, gone)
        assert talks(path, me=("ann@x.org",)) == [[("a", "Yes.")]]


def test_a_note_that_begins_like_a_mail_is_none(tmp_path: Path) -> None:
    assert kind_of(write(tmp_path / "a.txt", "From my diary\nMonday: rain all day.")) is None


def test_maildir_is_mail_with_the_folders_in_it(tmp_path: Path) -> None:
    first = mail("Ben <ben@x.org>", "Hello", "When?", 12, Message_ID="<1@x>")
    answer = mail("ann@x.org", "Re: Hello", "Now.", 13, In_Reply_To="<1@x>")
    draft = mail("ann@x.org", "Re: Hello", "Never.", 13, In_Reply_To="<1@x>")
    for folder in (tmp_path, tmp_path / ".Sent"):
        for name in ("cur", "new", "tmp"):
            (folder / name).mkdir(parents=True)
    (tmp_path / "new" / "1.host").write_bytes(bytes(first))
    (tmp_path / ".Sent" / "cur" / "2.host:2,S").write_bytes(bytes(answer))
    (tmp_path / ".Sent" / "cur" / "3.host:2,DS").write_bytes(bytes(draft))
    assert kind_of(tmp_path) == "mail"
    assert talks(tmp_path, me=("ann@x.org",)) == [[("u", "When?"), ("a", "Now.")]]


def test_mail_without_a_date_is_behind_what_it_answers(tmp_path: Path) -> None:
    answer = mail("ann@x.org", "Re: Hello", "Now.", 13, In_Reply_To="<1@x>")
    answer.replace_header("Date", "yesterday")
    circle = {"Message_ID": "<1@x>", "References": "<3@x> <1@x>"}
    first = mail("Ben <ben@x.org>", "Hello", "When?", 12, **circle)
    path = write_mbox(tmp_path / "a.mbox", answer, first)
    assert talks(path, me=("ann@x.org",)) == [[("u", "When?"), ("a", "Now.")]]


def test_several_others_are_told_apart_and_long_talk_is_cut(tmp_path: Path) -> None:
    lines = [("Ben", "b" * 900), ("Cy", "c" * 900), ("Ben", "b" * 900), ("Ann", "a"), ("Cy", "x")]
    text = "\n".join(f"12.05.24, 14:32 - {name}: {words}" for name, words in lines * 3)
    path = write(tmp_path / "a.txt", text)
    before = f"Cy: {'c' * 900}\nBen: {'b' * 900}"  # of more than 2,000 characters the end
    assert talks(path, me=("Ann",)) == [
        [("u", before), ("a", "a"), ("u", f"Cy: x\nBen: {'b' * 900}")],
        [("u", before), ("a", "a"), ("u", f"Cy: x\nBen: {'b' * 900}")],
        [("u", before), ("a", "a"), ("u", "Cy: x")],
    ]


# --- clients -------------------------------------------------------------------------------------


def a_year() -> str:
    """The same chat every month, but for a few words."""
    months = (WHATSAPP.replace(".05.", f".{month:02}.") for month in range(1, 13))
    texts = (text.replace("ing", f"ing {month}") for month, text in enumerate(months))
    return "".join(text.replace("there", f"there {k}") for k, text in enumerate(texts))


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Folders of two clients, one of whom has an archive of each form."""
    ann = tmp_path / "people" / "ann"
    write(ann / "WhatsApp Chat mit Ben.txt", a_year())
    write_slack(ann / "slack")
    export = ann / "chatgpt"
    write(export / "conversations.json", chatgpt())
    write(export / "user.json", {"id": "user-1"})
    write(export / "files" / "table.csv", "a,b\n1,2\n")
    write_mbox(
        ann / "mail" / "Sent",
        mail("Ben <ben@x.org>", "Hello", "When?", 12, Message_ID="<1@x>"),
        mail("ann@x.org", "Re: Hello", "Now.", 13, In_Reply_To="<1@x>"),
    )
    ben = tmp_path / "people" / "ben"
    days = [(p, f"{p} {n}", f"2024-05-{n:02}T09:00:00") for n in range(1, 31) for p in PAIR]
    write(ben / "result.json", telegram(*(said(*day) for day in days)))
    return tmp_path / "people"


PAIR = ("Ann Miller", "Ben Jones")
ME = {"ann": ["Ann Miller", "user", "ann@x.org"], "ben": "Ben Jones"}


def section(people: Path, **more: Any) -> Folders:
    return Folders.model_validate({"path": people, "content": "chats", **more})


def test_archives_in_folders_are_trained_on_my_words_alone(people: Path, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    data = section(people, me=ME, fractions=(0.6, 0.2, 0.2))
    ann = data.load(tokenizer, 4000, tmp_path / "cache").clients["ann"]
    counted, others = "", ""
    for split in (ann.train, ann.valid, ann.test):
        ids, flags = np.asarray(split.tokens), np.asarray(split.counted, dtype=bool)
        counted += tokenizer.decode(ids[flags])
        others += tokenizer.decode(ids[~flags])
    for words in ("Yes: here\nwith a second", "Tea?", "in #general", "What is this?", "Now."):
        assert words in counted
        assert words not in others
    for words in ("Are you there", "@Ann Miller tea & cake?", "A cat.", "When?"):
        assert words in others
        assert words not in counted


@pytest.mark.parametrize("form", ["whatsapp", "group", "mail"])
def test_what_two_people_have_of_one_chat_is_in_one_split(tmp_path: Path, form: str) -> None:
    """Who speaks is another in either's archive, and so is where a conversation is cut."""
    me = {"ann": "Ann Miller", "ben": "Ben Jones"}
    days = [date(2024, 1, 1) + timedelta(k) for k in range(40)]
    if form == "mail":
        me = {"ann": "ann@x.org", "ben": "ben@x.org"}
        mails = []
        for k in range(40):
            mails.append(mail("ben@x.org", f"s{k}", f"question {k}", 12, Message_ID=f"<{k}@x>"))
            answer = mail("ann@x.org", f"Re: s{k}", f"reply {k}", 13, In_Reply_To=f"<{k}@x>")
            mails.append(answer)
        for client in me:
            write_mbox(tmp_path / client / "all.mbox", *mails)
    else:
        people = ["Cy Low"] * (form == "group") + ["Ben Jones", "Ann Miller"]
        lines = (
            f"{day:%d.%m.%y}, 14:{m:02} - {people[m % len(people)]}: {day} {m} {'x' * 150}"
            for day in days
            for m in range(30)
        )
        text = "\n".join(lines)
        for client in me:
            write(tmp_path / client / "chat.txt", text)
    texts = section(tmp_path, me=me).source().read()
    written: dict[str, list[set[str]]] = {}
    for client, parts in texts.items():
        messages = [[m for one in part for m in json.loads(one)[1]] for part in parts]
        written[client] = [
            {line.rpartition(": ")[2] for m in part for line in m["content"].split("\n")}
            for part in messages
        ]
    for split in (1, 2):
        assert written["ann"][split] & written["ben"][split]
        for one, other in (("ann", "ben"), ("ben", "ann")):
            assert not written[one][split] & written[other][0]


def test_whose_words_they_are_must_be_said(people: Path) -> None:
    with pytest.raises(DataError) as refused:
        section(people).source().read()
    for line in (
        "WhatsApp's export): data.me does not say whose messages are to be written by the model; "
        "it has Ann Miller (48), Ben Jones (36)",
        "ChatGPT's export)",
        "mail): data.me does not say whose messages are to be written by the model; it has "
        "ben@x.org (1), ann@x.org (1)",
    ):
        assert line in refused.value.problem
    assert """--set 'data.me.ann=["Ann Miller", "user", "ann@x.org"]'""" in refused.value.remedy
    assert """--set 'data.me.ben="Ben Jones"'""" in refused.value.remedy


@pytest.mark.parametrize(
    ("me", "message"),
    [
        (ME | {"ben": "Benn"}, "client 'ben': .*data.me is 'Benn', who wrote nothing in it"),
        (ME | {"ben": ["Ben Jones", "Bne"]}, "client 'ben': data.me: no archive has 'Bne'"),
        ("Ann Miller", "ChatGPT's export.: data.me is 'Ann Miller', who wrote nothing in it"),
        (ME | {"bob": "Bob"}, "data.me: .* has no 'bob'"),
    ],
)
def test_names_that_nobody_has_are_refused(people: Path, me: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        section(people, me=me).source().read()


def test_names_without_archives_are_refused(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(tmp_path / "ann" / "a.jsonl", [{"messages": turn}])
    with pytest.raises(DataError, match=r"data\.me: no archive in"):
        section(tmp_path, me="Ann").source()


@pytest.mark.parametrize("name", ["a.txt", "slack", "result.json"])
def test_archives_are_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ann" / name
    write(tmp_path / "ann" / "diary.txt", "Dear diary, " * 300)
    if name == "slack":
        write_slack(path)
    else:
        write(path, WHATSAPP if name == "a.txt" else telegram(said("Ben", "hi")))
    with pytest.raises(DataError, match=f"{name} .*messages are of several people") as refused:
        Folders(path=tmp_path).source()
    assert "--set data.content=chats" in refused.value.remedy


def test_what_lies_beside_an_export_is_not_read_but_counted(people: Path) -> None:
    skipped = section(people, me=ME).source().skipped["ann"]
    assert sorted(path.name for path in skipped) == ["table.csv", "user.json"]


def test_a_changed_mail_is_read_anew(tmp_path: Path) -> None:
    for name in ("cur", "new", "tmp"):
        (tmp_path / "ann" / name).mkdir(parents=True)
    file = tmp_path / "ann" / "cur" / "1:2,S"
    prints = []
    for text in ("Hello", "Hello, hello"):
        file.write_bytes(bytes(mail("ann@x.org", "Hello", text, 12)))
        prints.append(json.dumps(section(tmp_path, me="ann@x.org").source().fingerprint))
    assert prints[0] != prints[1]


def test_one_archive_of_a_device_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.txt", a_year())
    train, valid, test = section(tmp_path, me={"ann": "Ann Miller"}).of_client("ann").read_one(file)
    assert train
    assert valid
    assert test


# --- damage --------------------------------------------------------------------------------------

CIRCLE = [{"mapping": {"a": node("a", "b"), "b": node("b", "a")}, "current_node": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", [{"mapping": {"a": node("a", None)}}], "conversation 1: 'current_node' is miss"),
        ("c.json", CIRCLE, "conversation 1: message 'a' follows itself"),
        ("c.json", [{"mapping": {"a": {}}, "current_node": "b"}], "mapping: 'b' is missing"),
        ("r.json", telegram({"type": "message"}), "message 1: 'None' is no time"),
        ("r.json", telegram(said("A", 3)), "message 1: 'text' is damaged"),
        ("r.json", telegram(said("A", "b", "yesterday-")), "'yesterday-' is no time"),
        ("r.json", json.dumps(telegram(said("A", "b")))[:-1], "not JSON"),
        ("r.json", '{"type": "message", "messages": ' + "[" * 9000, "nested more than 50 deep"),
        ("w.txt", "12.05.24, 14:32 - A: a\n45.13.24, 14:32 - A: b", ":2: 45/13/24 is no date"),
        ("w.txt", "12.05.24, 14:32 - A: a\n12.05.24, 99:32 - A: b", ":2: 99:32 is no time"),
    ],
)
def test_damage_is_refused_by_its_place(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    path = write(tmp_path / name, content)
    assert kind_of(path)
    with pytest.raises(DataError, match=message) as refused:
        talks(path, me=("A", "user"))
    assert str(path) in refused.value.problem
    assert refused.value.remedy


KEYS = ("mapping", "current_node", "message", "author", "role", "content", "parts", "text", "type")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)


def mutated(value: Any, draw: Any) -> Any:
    """A copy in which one member is anything else."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 6)) == 0:
        return draw(JSON)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key: Any = draw(st.sampled_from(sorted(copy) if isinstance(copy, dict) else range(len(copy))))
    copy[key] = mutated(copy[key], draw)
    return copy


QUICK = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUICK
@given(st.data(), st.integers(0, 4))
def test_nothing_but_refusals_comes_of_damaged_json(tmp_path: Path, data: Any, which: int) -> None:
    slack = write_slack(tmp_path / "slack")
    day = slack / "general" / "2024-05-12.json"
    path, value = [
        (tmp_path / "conversations.json", chatgpt()),
        (tmp_path / "result.json", telegram(said("Ben Jones", "Hi"), said("Ann", ["a", {}]))),
        (tmp_path / "all.json", {"chats": {"list": [telegram(said("Ann", "a"))]}}),
        (slack / "users.json", json.loads((slack / "users.json").read_text())),
        (day, json.loads(day.read_text())),
    ][which]
    write(path, json.dumps(mutated(value, data.draw)))
    accept_or_refuse(slack if which > 2 else path)


@QUICK
@given(
    st.sampled_from([WHATSAPP.encode(), bytes(mail("ann@x.org", "Re: a", QUOTED, 12))]),
    st.lists(st.tuples(st.integers(0, 900), st.binary(max_size=12)), max_size=6),
)
def test_nothing_but_refusals_comes_of_damaged_bytes(
    tmp_path: Path, content: bytes, changes: list[tuple[int, bytes]]
) -> None:
    path = tmp_path / "archive"
    for place, inserted in changes:
        content = content[:place] + inserted + content[place + len(inserted) // 2 :]
    path.write_bytes(b"From x\n" * content.startswith(b"From: ") + content)
    accept_or_refuse(path)


def accept_or_refuse(path: Path) -> None:
    try:
        if kind_of(path):
            read_conversations(rows_of([path], ("Ann Miller", "user", "ann@x.org", "Ann")))
    except DataError:
        pass


@pytest.mark.parametrize(
    "content",
    [
        "From x\nFrom: " + "(" * 30000 + "\n\na",
        "From x\nSubject: " + "=?" * 30000 + "\n\na",
        "From x\nReferences: " + "<" * 90000 + "\n\na",
        "From x\nFrom: ann@x.org\n\n" + "On 1 " * 60000 + "\n> a",
        "From x\nFrom: ann@x.org\n\n" + "\n> a\n" * 90000,
        "From x\nFrom: ann@x.org\n\n" + "On 1 Ben wrote:\n> a\n" * 60000,
        "From x\nContent-Type: text/html\n\n" + "<b>a</b>" * 60000 + "<!--" * 60000,
        "From x\n"
        + "".join(f"Content-Type: multipart/x; boundary={n}\n\n--{n}\n" for n in range(900)),
        "12.05.24, 14:32 - A: " + "<" * 90000 + " \u200e<" * 9000,
        "12.05.24, 14:32 - A: a\n" + "12.05.24, " * 30000,
    ],
)
def test_hostile_archives_take_no_time(
    tmp_path: Path, content: str, timed: Callable[..., float]
) -> None:
    path = write(tmp_path / "archive", content)
    assert timed(lambda: accept_or_refuse(path)) < 5


@pytest.fixture
def timed() -> Callable[..., float]:
    from time import perf_counter

    def seconds(call: Callable[[], None]) -> float:
        start = perf_counter()
        call()
        return perf_counter() - start

    return seconds
