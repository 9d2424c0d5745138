"""Conversations in people's own archives, as messengers and mail programs export them."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.foreign import opened
from coterie.data.archives import chatgpt, mail, slack, telegram, whatsapp
from coterie.data.archives.conversations import Chat, Row, conversation_rows, name_keys
from coterie.data.plain_text import named

Kind = Literal["chatgpt", "telegram", "whatsapp", "slack", "mail"]
Me = Sequence[str] | Mapping[str, Sequence[str]] | None  # my names: everywhere, or by client

_BEGINNING = 1 << 14  # bytes by which a file's form is told
_SHOWN = 10  # names that a message lists
_FORMS = {"chatgpt": chatgpt, "telegram": telegram, "whatsapp": whatsapp, "slack": slack}


def kind_of(path: Path) -> Kind | None:
    """Return the format of an archive by its first bytes; None for other files. Raises OSError."""
    if path.is_dir():
        return "mail" if mail.is_maildir(path) else "slack" if slack.is_export(path) else None
    if not path.is_file():
        return None
    with opened(path) as file:
        content = file.read(_BEGINNING)
    encoding = named("marks", content) or "utf-8"
    beginning = content.decode(encoding, "ignore")
    if path.suffix.lower() == ".json":
        if chatgpt.BEGINNING.match(beginning):
            return "chatgpt"
        return "telegram" if telegram.BEGINNING.match(beginning) else None
    if whatsapp.recognises(beginning):
        return "whatsapp"
    return "mail" if mail.BEGINNING.match(beginning) else None


def files_of(path: Path) -> list[Path]:
    """Return the files of an archive to read."""
    if not path.is_dir():
        return [path]
    return mail.files(path) if mail.is_maildir(path) else slack.files(path)


def archives_in(paths: Iterable[Path]) -> list[Path]:
    """Return those paths that are archives. Raises DataError for one that cannot be read."""
    try:
        return [path for path in paths if kind_of(path)]
    except OSError as error:
        raise _unreadable(error) from None


def is_part_of_export(path: Path, archives: Iterable[Path]) -> bool:
    """Whether a file lies in the folder of an account's archive: settings and attachments."""
    return any(
        archive.suffix.lower() == ".json" and archive.parent in path.parents for archive in archives
    )


def not_text(archive: Path) -> DataError:
    """Return the refusal to read an archive as text: most of it was written by other people."""
    problem = f"{_title([archive])}: its messages are of several people"
    return DataError(problem, "Train on yours: --set data.content=chats; or leave it out.")


def rows_of(paths: Iterable[Path], me: Me) -> Iterator[Row]:
    """Yield the conversations in a client's archives as rows for `read_conversations`, with the
    messages of `me` as the assistant's. Raises DataError for damaged archives, or if nobody in one
    is `me`.
    """
    archives = [(group, list(_chats(group))) for group in _groups(paths)]
    _check_names([(_title(group), chats) for group, chats in archives], me)
    keys = name_keys(_names(me))
    for _, chats in archives:
        yield from conversation_rows(chats, keys)


def _names(me: Me) -> list[str]:
    if isinstance(me, Mapping):
        return [name for part in me.values() for name in part]
    return list(me or ())


def _groups(paths: Iterable[Path]) -> list[list[Path]]:
    """Return the archives in groups; those of mail form one, as a reply may be in another file."""
    paths = list(paths)
    mails = [path for path in paths if kind_of(path) == "mail"]
    return [[path] for path in paths if path not in set(mails)] + [mails] * bool(mails)


def _chats(group: Sequence[Path]) -> Iterator[Chat]:
    kind = kind_of(group[0])
    try:
        if kind in _FORMS:
            yield from _FORMS[kind].chats(group[0])
        else:
            yield from mail.chats(group)
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> DataError:
    problem = f"{error.filename or 'an archive'}: cannot be read ({error.strerror})"
    return DataError(problem, "Check its permissions.")


def _title(group: Sequence[Path]) -> str:
    form = _FORMS.get(kind_of(group[0]) or "", mail)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{group[0]}{more} ({form.TITLE})"


def _check_names(archives: Sequence[tuple[str, Sequence[Chat]]], me: Me) -> None:
    """Refuse archives in which none of the names `me` occurs, and names that occur in none."""
    given, speakers = _names(me), list[str]()
    problems, advised = list[str](), list[str]()
    for title, chats in archives:
        counts = Counter(post.speaker for chat in chats for post in chat.posts)
        speakers += counts
        if not counts:
            raise DataError(f"{title}: no messages of people", "Export it again, or leave it out.")
        if not name_keys(given) & name_keys(counts):
            problem = "data.me does not say whose messages are to be written by the model"
            if given:
                problem = f"data.me is {', '.join(map(repr, given))}, who wrote nothing in it"
            problems.append(f"{title}: {problem}; it has {_listed(counts)}")
            # similar to the client's id, or the most frequent
            client = names.folded(_client(me))
            advised.append(max(counts, key=lambda n: (client in names.folded(n), counts[n])))
    unknown = [name for name in given if not name_keys([name]) & name_keys(speakers)]
    if isinstance(me, Mapping) and archives and unknown and not problems:
        listed = ", ".join(map(repr, unknown))
        problems.append(f"data.me: no archive has {listed}; they have {_listed(Counter(speakers))}")
    if problems:
        known = [name for name in given if name not in unknown]
        setting = _setting(list(dict.fromkeys(known + advised)), me)
        remedy = f"Say whose messages are trained, for instance: {setting}."
        raise DataError("\n".join(problems), remedy)


def _listed(counts: Counter[str]) -> str:
    listed = [f"{name} ({count:,})" for name, count in counts.most_common(_SHOWN)]
    more = len(counts) - len(listed)
    return ", ".join(listed) + f" and {more:,} more" * (more > 0)


def _client(me: Me) -> str:
    return next(iter(me)) if isinstance(me, Mapping) and len(me) == 1 else ""


def _setting(people: Sequence[str], me: Me) -> str:
    value: Any = people[0] if len(people) == 1 else people
    client, key = _client(me), "data.me"
    if not client:
        key = "data.me.CLIENT"
    elif "." not in client:
        key = f"data.me.{client}"
    else:
        value = {client: value}
    setting = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return f"--set {setting}; of adapt and evaluate: --me {shlex.quote(people[0])}"
