"""Conversations as data: the forms they come in, what of them counts, how they are packed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_bases import (
    CHATML,
    ENDLESS,
    INEXACT,
    MARKED,
    REWRITING,
    chat_tokenizer,
    turns,
    write_jsonl,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from coterie.core.errors import DataError
from coterie.data import Data
from coterie.data.chats import ChatSplit, ChatTemplate, Conversation
from coterie.data.chats.reading import read_conversations
from coterie.data.chats.splits import packed
from coterie.data.folders import Folders
from coterie.data.hub import Hub

TALK = turns("hello there", "and you", "the other", "her")


def read(row: dict[str, Any], column: str | None = None) -> Conversation:
    (found,) = read_conversations([("here:1", row)], column)
    return found


def written(rendered: Any, tokenizer: Any) -> list[str]:
    """What counts, run by run."""
    runs = np.split(np.arange(len(rendered.ids)), np.flatnonzero(np.diff(rendered.counted)) + 1)
    return [tokenizer.decode(rendered.ids[run]) for run in runs if rendered.counted[run[0]]]


# --- forms ---------------------------------------------------------------------------------------


def test_the_forms_of_others_are_one_conversation() -> None:
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    nothing = [m | {"tool_calls": None, "name": None} for m in TALK]  # as Parquet has them
    for row in (
        {"messages": TALK, "id": 3},
        {"messages": json.dumps(TALK)},
        {"messages": parts},
        {"messages": nothing, "tools": None},
        {"conversations": sharegpt},
        {"messages": None, "conversations": TALK},
    ):
        assert read(row).messages == TALK
    assert read({"talk": TALK}, "talk").messages == TALK
    spoken = read({"conversations": sharegpt, "system": "be kind"})
    assert spoken.messages == [{"role": "system", "content": "be kind"}, *TALK]
    pair = read({"prompt": TALK[:3], "completion": TALK[3:]})
    assert (pair.messages, pair.given) == (TALK, 3)
    assert read({"prompt": "Two: ", "completion": "2"}).text == ("Two: ", "2")


def test_rows_that_hold_no_conversation_are_refused_by_their_places() -> None:
    rows = [
        {"text": "hello"},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "gardener", "content": "hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"prompt": "a", "completion": [3]},
    ]
    for value in (1, [{"role": "assistant", "content": "b"}]):
        with pytest.raises(DataError, match="not both text, or both messages"):
            read_conversations([("f.jsonl:1", {"prompt": "a", "completion": value})])
    with pytest.raises(DataError) as told:
        read_conversations((f"f.jsonl:{i}", row) for i, row in enumerate(rows, start=1))
    problem = told.value.problem
    assert "f.jsonl:1: no messages, conversations" in problem
    assert "(found: text)" in problem
    assert "f.jsonl:2: messages is empty" in problem
    assert "f.jsonl:3: messages is text, not a list" in problem
    assert "f.jsonl:4: messages[0] has role 'gardener'" in problem
    assert "f.jsonl:5: messages[0] has a part that is not text (image)" in problem
    assert "... and 2 more" in problem


# --- what counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_count_with_the_token_that_ends_them(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    chats = ChatTemplate(tokenizer)
    (found,) = chats.encode(Conversation("", TALK))
    assert written(found, tokenizer) == ["and you<|im_end|>", "her<|im_end|>"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chats.stops == (tokenizer.eos_token_id, end)
    assert found.ids[-1] == end
    whole = chats.render(TALK)
    assert tokenizer.decode(found.ids) == whole.removesuffix("\n")
    prompt = chats.prompt(TALK[:3])
    assert prompt == found.ids[: len(prompt)].tolist()
    assert found.counted[len(prompt) :].all()


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_a_prompt_and_its_completion_only_the_completion_counts(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    row = read({"prompt": TALK[:3], "completion": TALK[3:]})
    (found,) = ChatTemplate(tokenizer).encode(row)
    assert written(found, tokenizer) == ["her<|im_end|>"]


SPACED = (  # of which " t" would be one token, begun by the prompt
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.content }}: {% endif %}{% endfor %}"
)
MARKED_SPACED = SPACED.replace(
    "{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
)


@pytest.mark.parametrize("template", [SPACED, MARKED_SPACED])
def test_no_token_begins_in_a_prompt_and_ends_in_its_answer(template: str) -> None:
    """What is trained begins with what a model is asked with, at every turn."""
    tokenizer, talk = chat_tokenizer(template), turns("hello", "the one", "and", "the other")
    assert len(tokenizer(": the", add_special_tokens=False)["input_ids"]) == 2
    chats = ChatTemplate(tokenizer)
    (found,) = chats.encode(Conversation("", talk))
    assert written(found, tokenizer) == ["the one<|im_end|>", "the other<|im_end|>"]
    for known in (1, 3):
        prompt = chats.prompt(talk[:known])
        assert prompt == found.ids[: len(prompt)].tolist()
        assert found.counted[len(prompt)]
        assert not found.counted[len(prompt) - 1]
    (pair,) = chats.encode(Conversation("", text=("Who? ", "the cat")))
    asked = tokenizer("Who? ", add_special_tokens=False)["input_ids"]
    assert pair.ids[: len(asked)].tolist() == asked
    assert written(pair, tokenizer) == ["the cat<|endoftext|>"]


def test_all_tokens_count_if_asked_for() -> None:
    tokenizer = chat_tokenizer()
    (found,) = ChatTemplate(tokenizer).encode(Conversation("", TALK), "all")
    assert not found.counted[0]
    assert found.counted[1:].all()
    assert tokenizer.decode(found.ids) == ChatTemplate(tokenizer).render(TALK)


def test_a_template_that_rewrites_gives_each_answer_a_conversation_of_its_own() -> None:
    tokenizer = chat_tokenizer(REWRITING)
    chats = ChatTemplate(tokenizer)
    assert "of its own" in chats.way
    first, second = chats.encode(Conversation("", TALK))
    thought = "<think>\n\n</think>\n\n"
    assert written(first, tokenizer) == [f"{thought}and you<|im_end|>"]
    assert written(second, tokenizer) == [f"{thought}her<|im_end|>"]
    prompt = chats.prompt(TALK[:3])
    assert prompt == second.ids[: len(prompt)].tolist()
    short = chats.encode(Conversation("", TALK), room=len(first.ids))
    assert [own.cut for own in short] == [False, True]
    assert written(short[1], tokenizer) == [f"{thought}her<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "why"), [(ENDLESS, "no special token ends an answer"), (INEXACT, "otherwise")]
)
def test_templates_whose_answers_cannot_be_told_are_refused(template: str, why: str) -> None:
    with pytest.raises(DataError, match=why) as told:
        ChatTemplate(chat_tokenizer(template)).way  # noqa: B018
    assert "data.chat_template=FILE" in told.value.remedy
    served = ChatTemplate(chat_tokenizer(template))  # it can be used all the same
    assert served.prompt(TALK[:1])
    assert served.stops == (0,)


def test_without_a_template_pairs_are_plain_text_and_messages_are_refused() -> None:
    tokenizer = chat_tokenizer(None)
    chats = ChatTemplate(tokenizer)
    (found,) = chats.encode(Conversation("", text=("2 + 2 = ", "4")))
    assert written(found, tokenizer) == ["4<|endoftext|>"]
    assert tokenizer.decode(found.ids) == "2 + 2 = 4<|endoftext|>"
    with pytest.raises(DataError, match="here:1: the base has no chat template") as told:
        chats.encode(Conversation("here:1", TALK))
    assert "-Instruct" in told.value.remedy
    assert "data.chat_template" in told.value.remedy


def test_what_a_template_raises_names_the_row() -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    chats = ChatTemplate(chat_tokenizer(strict + CHATML))
    with pytest.raises(DataError, match=r"f\.jsonl:7: the chat template refuses.*user first"):
        chats.encode(Conversation("f.jsonl:7", [TALK[1]]))


# --- what does not fit ---------------------------------------------------------------------------


def test_the_oldest_turns_are_left_out_and_the_last_stays() -> None:
    tokenizer = chat_tokenizer()
    chats = ChatTemplate(tokenizer)
    talk = [
        {"role": "system", "content": "be kind"},
        *turns("a b", "c", "d e", "f", "g", "the end"),
    ]
    whole = len(chats.encode(Conversation("", talk))[0].ids)
    for room in range(2, whole + 1):
        (found,) = chats.encode(Conversation("", talk), room=room)
        assert len(found.ids) <= room
        assert found.cut == (room < whole)
        assert found.counted.any()
        assert not found.counted[0]
        assert tokenizer.decode(found.ids).endswith("end<|im_end|>"[-room:])
    last = chats.encode(Conversation("", [talk[0], *talk[5:]]))[0]
    (found,) = chats.encode(Conversation("", talk), room=len(last.ids))
    assert found.ids.tolist() == last.ids.tolist()  # whole messages, the system's among them
    assert written(found, tokenizer) == ["the end<|im_end|>"]


def test_the_end_of_a_long_plain_pair_stays() -> None:
    tokenizer = chat_tokenizer(None)
    chats = ChatTemplate(tokenizer)
    (found,) = chats.encode(Conversation("", text=("so long a prompt ", "her")), room=6)
    assert tokenizer.decode(found.ids).endswith("her<|endoftext|>")
    assert (len(found.ids), found.cut) == (6, True)


# --- packing -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_conversation_is_in_one_row_and_rows_are_full(lengths: list[int]) -> None:
    rows = packed(np.array(lengths), 20)
    assert sorted(own for row in rows for own in row) == list(range(len(lengths)))
    sizes = [sum(lengths[own] for own in row) for row in rows]
    assert max(sizes) <= 20
    halves = [size for size in sizes if size <= 10]
    assert len(halves) <= 1  # two of them would have been one


def test_rows_hold_conversations_one_behind_the_other() -> None:
    ids = np.arange(1, 13, dtype=np.uint32)
    counted = np.array([0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=np.uint32)
    split = ChatSplit("train", ids, counted, np.array([2, 3, 5, 2]), 6, 0)
    assert split.rows == [[2, 0], [1, 3]]
    batch = split.take(np.array([1, 0]))
    assert batch.ids.tolist() == [[3, 4, 5, 11, 12, 0, 0], [6, 7, 8, 9, 10, 1, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, -1, -1], [0, 1, 2, 3, 4, 0, 1]]
    assert batch.counted.tolist()[0] == [False, True, True, True, True, False, False]
    assert batch.packed
    assert batch.predictions == 4 + 3
    seen = [number for start in range(3) for number in split.numbers(2 * start, 2)]
    assert sorted(seen) == [0, 0, 0, 1, 1, 1]
    again = split.join(batch.split(1), np.array([1, 0]))
    assert again.ids.tolist() == split.take(np.array([0, 1])).ids.tolist()
    one = ChatSplit("train", ids, counted, np.array([2, 3, 5, 2]), 6, 0, packing=False)
    assert (one.windows, one.take(np.arange(4)).packed) == (4, False)
    assert one.digest() == split.digest()


# --- sections ------------------------------------------------------------------------------------


def rows_of(client: str, count: int) -> list[dict[str, Any]]:
    return [{"messages": turns(f"{client} asks {i}", f"the answer {i}")} for i in range(count)]


def write_clients(root: Path, count: int = 10) -> Path:
    for client in ("ann", "ben"):
        write_jsonl(root / client / "chats.jsonl", rows_of(client, count))
    return root


def test_folders_of_conversations(tmp_path: Path) -> None:
    tokenizer, root = chat_tokenizer(), write_clients(tmp_path / "texts")
    (root / "ben" / "notes.txt").write_text("left alone")
    found = Folders(path=root, content="chats").load(tokenizer, 64)
    assert "20 conversations; loss on the answers, found by what each answer adds" in (
        found.description
    )
    ann = found.clients["ann"]
    assert [len(split.lengths) for split in ann.splits] == [8, 1, 1]
    texts = [
        tokenizer.decode(split.conversation(i))
        for split in ann.splits
        for i in range(len(split.lengths))
    ]
    wanted = [ChatTemplate(tokenizer).render(row["messages"])[:-1] for row in rows_of("ann", 10)]
    assert sorted(texts) == sorted(wanted)
    answers = sum(int(split.counted.sum()) for split in ann.splits)
    assert answers == sum(split.predictions for split in ann.splits)
    again = Folders(path=root, content="chats").load(tokenizer, 64)
    assert again.description == found.description  # of the cache
    short = Folders(path=root, content="chats").load(tokenizer, 24)
    assert "20 of them without their oldest turns or tokens" in short.description


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_files_of_every_kind(tmp_path: Path, form: str) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    for client in ("ann", "ben"):
        (tmp_path / "texts" / client).mkdir(parents=True)
        path = tmp_path / "texts" / client / f"own.{form}"
        pairs = [{"prompt": f"{client}, {i}: ", "completion": f"so {i}"} for i in range(12)]
        table = pa.Table.from_pylist(rows_of(client, 12))
        match form:
            case "jsonl":
                write_jsonl(path, rows_of(client, 12))
            case "json":
                path.write_text(json.dumps(rows_of(client, 12)))
            case "csv":
                csv.write_csv(pa.Table.from_pylist(pairs), path)
            case "parquet":
                parquet.write_table(table, path)
    found = Folders(path=tmp_path / "texts", content="chats").load(chat_tokenizer(), 64)
    assert "24 conversations" in found.description


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    root = write_clients(tmp_path / "texts")
    (root / "ann" / "own.json").write_text("{}")
    (root / "ben" / "own.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError) as told:
        Folders(path=root, content="chats").load(chat_tokenizer(), 64)
    assert "own.json: not a list of objects" in told.value.problem
    assert "own.parquet: cannot be read" in told.value.problem


def test_conversations_without_an_answer_are_refused_or_left_out_by_name(tmp_path: Path) -> None:
    root, tokenizer = tmp_path / "texts", chat_tokenizer()
    for client in ("ann", "ben"):
        rows = [*rows_of(client, 10), {"messages": turns("nobody answers")}]
        write_jsonl(root / client / "own.jsonl", rows)
    with pytest.raises(DataError) as told:
        Folders(path=root, content="chats").load(tokenizer, 64)
    assert "ann/own.jsonl:11: no answer of an assistant to train on" in told.value.problem
    assert "ben/own.jsonl:11" in told.value.problem
    assert "data.unanswered: leave-out" in told.value.remedy
    found = Folders(path=root, content="chats", unanswered="leave-out").load(tokenizer, 64)
    assert "20 conversations" in found.description
    assert "left out, without an answer" in found.description
    assert "ann/own.jsonl:11" in found.description
    whole = Folders(path=root, content="chats", loss="all").load(tokenizer, 64)
    assert "22 conversations" in whole.description


def test_text_rows_that_are_conversations_say_what_to_set(tmp_path: Path) -> None:
    root = write_clients(tmp_path / "texts")
    with pytest.raises(DataError, match="no column 'text'") as told:
        Folders(path=root).load(chat_tokenizer(), 64)
    assert "data.content=chats" in told.value.remedy


def test_hub_rows_are_conversations_too(tmp_path: Path) -> None:
    rows = [
        own | {"who": c, "id": i} for c in ("ann", "ben") for i, own in enumerate(rows_of(c, 10))
    ]
    path = write_jsonl(tmp_path / "all.jsonl", rows)
    section = Hub(dataset=str(path), client_column="who", content="chats")
    found = section.load(chat_tokenizer(), 64)
    assert list(found.clients) == ["ann", "ben"]
    assert "20 conversations" in found.description
    broken = write_jsonl(tmp_path / "broken.jsonl", [*rows, rows[0] | {"messages": []}])
    with pytest.raises(DataError, match=r"broken.jsonl:21: messages is empty"):
        section.model_copy(update={"dataset": str(broken)}).load(chat_tokenizer(), 64)


def test_a_template_of_ones_own_is_kept_as_text(tmp_path: Path) -> None:
    root, path = write_clients(tmp_path / "texts"), tmp_path / "own.jinja"
    path.write_text(CHATML)
    section = Folders(path=root, content="chats", chat_template=str(path))
    assert section.chat_template == CHATML
    path.unlink()
    assert Folders.model_validate(section.model_dump()).chat_template == CHATML
    assert "20 conv" in section.load(chat_tokenizer(None), 64).description
    with pytest.raises(DataError, match="the base has no chat template"):
        Folders(path=root, content="chats").load(chat_tokenizer(None), 64)


def test_fields_of_chats_are_refused_for_text(tmp_path: Path) -> None:
    for wrong in (
        {"loss": "all"},
        {"packing": False},
        {"content": "chats", "chat_template": str(tmp_path / "none.jinja")},
    ):
        with pytest.raises(ValidationError):
            TypeAdapter(Data).validate_python({"kind": "folders", "path": "x"} | wrong)


def test_bounds_keep_whole_conversations(tmp_path: Path) -> None:
    root, tokenizer = write_clients(tmp_path / "texts"), chat_tokenizer()
    whole = Folders(path=root, content="chats").load(tokenizer, 64).clients["ann"].train
    bound = len(whole) // 2
    few = Folders(path=root, content="chats", train_tokens=bound).load(tokenizer, 64)
    own = few.clients["ann"].train
    assert len(own) <= bound
    assert 0 < len(own.lengths) < len(whole.lengths)
    assert tokenizer.decode(own.conversation(0)).endswith("<|im_end|>")
