"""The script that builds `multilingual` and `topics` from their public sources, on sources made
here in the same formats.
"""

import gzip
import json
import re
import sys
import sysconfig
import tarfile
from pathlib import Path
from types import ModuleType
from xml.sax.saxutils import quoteattr

import pytest
from script_modules import module_at

from coterie.data import Multilingual, Topics
from coterie.data.origins import MULTILINGUAL, TOPICS

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts/build_corpora.py"
WORDS = {
    "de": ["Der", "Film", "(", "1999", ")", "lief", ",", "so", "sagt", "man", ",", "gut", "."],
    "fr": ["L'", "arbre", "est", "«", "grand", "»", "."],
    "it": ["L'", "albero", "è", '"', "alto", '"', "."],
    "nl": ["Het", "is", "zo", "."],
    "es": ["Así", "es", "."],
}
SENTENCES = {
    "de": "Der Film (1999) lief, so sagt man, gut.",
    "fr": "L'arbre est «grand».",
    "it": 'L\'albero è "alto".',
    "nl": "Het is zo.",
    "es": "Así es.",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module_at("scripts/build_corpora.py")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def archived(folder: Path) -> Path:
    """A folder as GitHub and python.org pack it: below one folder."""
    path = folder.with_name(folder.name + ".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=f"{folder.name}-master")
    return path


def wikineural(folder: Path) -> Path:
    splits = "".join(
        f"  - split: train_{language}\n    path: data/train_{language}.jsonl\n"
        for language in WORDS
    )
    write(
        folder,
        {"README.md": f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n"},
    )
    for language, words in WORDS.items():
        row = json.dumps({"tokens": words, "ner_tags": [0] * len(words), "lang": language})
        write(folder, {f"data/train_{language}.jsonl": "\n".join([row] * 20)})
    return folder


def novel(title: str) -> str:
    body = "".join(
        f"<p>{title} went on,\n   and <hi>on</hi>, for the {n}th time.</p>" for n in range(200)
    )
    return (
        f'<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc><p>header of '
        f"{title}</p></fileDesc></teiHeader>"
        f'<text><front><p>front of {title}</p></front><body><div type="chapter"><head>CHAPTER '
        f"I.</head>{body}</div></body></text></TEI>"
    )


def chapter(title: str) -> str:
    body = "\n\n".join(
        f"\\begin{{lemma}}\n\\label{{lemma-{title}-{n}}}\nLet $X$ be a scheme.\n\\end{{lemma}}"
        for n in range(50)
    )
    return (
        f"\\input{{preamble}}\n\\begin{{document}}\n\\title{{{title}}}\n\\tableofcontents\n"
        f"{body}\n\\input{{chapters}}\n\\end{{document}}"
    )


def posts(folder: Path) -> Path:
    def row(**columns: object) -> str:
        return (
            "<row "
            + " ".join(f"{name}={quoteattr(str(value))}" for name, value in columns.items())
            + " />"
        )

    why = "Because $a &lt; b$ in <code>H</code>. " * 20
    rows = []
    for id in range(1, 20):
        rows += [
            row(Id=100 + id, PostTypeId=2, ParentId=id, Body=f"<p>Answer {id}. {why}</p>"),
            row(
                Id=id,
                PostTypeId=1,
                Title=f"Question {id}?",
                Body=f"<p>Asked.</p>\n\n<p>{id} times.</p>",
            ),
        ]
    return write(
        folder,
        {"Posts.xml": f"<?xml version='1.0' encoding='utf-8'?>\n<posts>\n{''.join(rows)}</posts>"},
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder in the format of each source."""
    root = tmp_path_factory.mktemp("sources")
    module = "".join(f"def f{n}():\n    return {n}\n\n" for n in range(400))
    return {
        "wikineural": wikineural(root / "wikineural"),
        "catalan": write(
            root / "catalan",
            {"data/a.txt": "\n".join(f"Frase {n} d'aquí." for n in range(20)), "README.md": "res"},
        ),
        "novels": write(
            root / "novels", {f"level1/ENG{n}_Author.xml": novel(f"Novel {n}") for n in range(4)}
        ),
        "stacks": write(
            root / "stacks",
            {f"{name}.tex": chapter(name) for name in ("sheaves", "curves", "fields", "chapters")},
        ),
        "questions": posts(root / "questions"),
        "cpython": write(
            root / "cpython",
            {f"Lib/{n}.py": module for n in ("a", "b/c", "d", "test/e")} | {"Tools/t.py": module},
        ),
    }


def build(script: ModuleType, *options: object) -> None:
    """Run the script with a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, options)])
        script.main()


def rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def built(script, sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built")
    build(
        script,
        "--out",
        out,
        "--characters",
        3000,
        *(part for name, folder in sources.items() for part in (f"--{name}", folder)),
    )
    return out


def test_sentences_of_the_hub_become_rows(built: Path) -> None:
    found = rows(built / "multilingual/train.jsonl.gz")
    assert {row["language"] for row in found} == {
        language for origin in MULTILINGUAL for language in origin.of
    }
    for language, sentence in SENTENCES.items():
        assert {row["text"] for row in found if row["language"] == language} == {
            " ".join([sentence] * count) for count in (8, 4)
        }
    catalan = [row["text"] for row in found if row["language"] == "ca"]
    assert sorted(" ".join(catalan).split(". ")) != " ".join(catalan).split(
        ". "
    )  # kinds of sentences lie among one another
    assert sum(text.count("Frase") for text in catalan) == 20


def test_works_become_pieces(built: Path) -> None:
    found = rows(built / "topics/train.jsonl.gz")
    assert {row["topic"] for row in found} == {topic for origin in TOPICS for topic in origin.of}
    assert all(200 <= len(row["text"]) <= 4000 for row in found)
    works = {
        topic: {row["id"] for row in found if row["topic"] == topic}
        for topic in ("books", "arxiv", "code", "stackexchange")
    }
    assert works["books"] < {f"ENG{n}_Author" for n in range(4)}
    assert works["arxiv"] < {"sheaves", "curves", "fields"}
    assert works["code"] < {"a.py", "b/c.py", "d.py"}
    text = {
        topic: "\n".join(row["text"] for row in found if row["topic"] == topic) for topic in works
    }
    assert " went on, and on, for the 7th time." in text["books"]
    assert not any(word in text["books"] for word in ("header", "front", "<"))
    assert "\\label{lemma-" in text["arxiv"]
    assert not any(word in text["arxiv"] for word in ("\\title", "\\input"))
    [question, *_] = [row for row in found if row["topic"] == "stackexchange"]
    assert question["text"].startswith(
        f"Q: Question {question['id']}?\nAsked.\n{question['id']} times.\n\nA: Answer "
        f"{question['id']}. "
    )
    assert "$a < b$ in H" in question["text"]


def test_the_folder_is_one_for_recipes(built: Path) -> None:
    for section in (
        Multilingual(root=built, languages=("ca", "de", "it")),
        Topics(root=built, topics=("stackexchange",)),
    ):
        assert all(sum(map(len, parts)) for parts in section.source().read().values())
    said = (built / "SOURCES.md").read_text()
    assert all(
        origin.address in said and origin.licence in said for origin in (*MULTILINGUAL, *TOPICS)
    )


def test_archives_are_as_good_as_folders_and_the_rows_are_the_same(
    script, built: Path, sources, tmp_path: Path
) -> None:
    packed = {name: archived(sources[name]) for name in ("novels", "stacks", "cpython")} | {
        "questions": sources["questions"] / "Posts.xml"
    }
    options = ["--out", tmp_path, "--characters", 3000, "--only", "topics"]
    build(
        script, *options, *(part for name, path in packed.items() for part in (f"--{name}", path))
    )
    assert rows(tmp_path / "topics/train.jsonl.gz") == rows(built / "topics/train.jsonl.gz")
    assert not (tmp_path / "multilingual").exists()


@pytest.mark.skipif(
    sys.version_info[:3] != (3, 11, 7), reason="the full folder's code is that of CPython 3.11.7"
)
def test_pieces_of_modules_are_those_of_the_full_folder(script, data_root: Path) -> None:
    full: dict[str, set[str]] = {}
    for row in rows(data_root / "topics/train.jsonl.gz"):
        if row["topic"] == "code":
            full.setdefault(row["id"], set()).add(row["text"])
    works = dict(script.modules(Path(sysconfig.get_path("stdlib"))))
    assert len(full) == 110
    assert {id: set(script.pieces(works[id])) for id in full} == full


def test_a_source_is_downloaded_once(script, tmp_path: Path, capsys) -> None:
    content = tmp_path / "there/a.tar.gz"
    content.parent.mkdir()
    content.write_bytes(b"packed")
    first = script.downloaded(content.as_uri(), tmp_path / "here")
    assert first.read_bytes() == b"packed"
    content.unlink()
    assert script.downloaded(content.as_uri(), tmp_path / "here") == first
    assert capsys.readouterr().out.count("downloading") == 1
    with pytest.raises(SystemExit, match=r"cannot be had .*name it by the option"):
        script.downloaded((tmp_path / "nowhere.tar.gz").as_uri(), tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == [first.name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--only", "topics", "--novels", "/nowhere", "--stacks", "{stacks}"],
            "--novels /nowhere: there is no such folder",
        ),
        (
            ["--only", "multilingual", "--wikineural", "/nowhere", "--catalan", "{catalan}"],
            "train_de, cannot be read",
        ),
        (
            [
                "--only",
                "topics",
                "--stacks",
                "{novels}",
                "--novels",
                "{novels}",
                "--cpython",
                "{cpython}",
                "--questions",
                "{questions}",
            ],
            "nothing for arxiv",
        ),
    ],
)
def test_what_is_not_there_is_refused(
    script, sources, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        build(script, "--out", tmp_path, *(option.format(**sources) for option in options))


def test_a_dump_is_unpacked_or_the_remedy_said(script, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="neither bsdtar nor 7z"):
        script.unpacked(tmp_path / "dump.7z", tmp_path)
    with open(
        tmp_path / "bsdtar", "w"
    ) as program:  # takes the arguments that bsdtar takes: -xf ARCHIVE -C FOLDER MEMBER
        program.write(
            '#!/bin/sh\n[ "$1 $3 $5" = "-xf -C Posts.xml" ] && echo "<posts/>" > "$4/Posts.xml"\n'
        )
    (tmp_path / "bsdtar").chmod(0o755)
    assert script.unpacked(tmp_path / "dump.7z", tmp_path).read_text() == "<posts/>\n"
