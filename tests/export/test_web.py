"""The keyboard in a real browser, from a plain server of static files: it suggests what the
personal models suggest in Python, and asks nobody but its folder.
"""

import gzip
import json
import lzma
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from browser import opened
from chat_bases import CHATML
from random_models import write_models
from static_files import Served, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie.core.errors import DataError, Refused
from coterie.data.chats.messages import user
from coterie.export import FORMATS, Source, export, onnx
from coterie.export.web import CONTEXT, DATED, assets
from coterie.models.architecture import locate
from coterie.models.layout import Layout
from coterie.personal import PersonalModel
from coterie.personal.text_inference import LONGEST
from coterie.personal.ui.keyboard import (
    BASE,
    CHAT_TITLE,
    EXAMPLES,
    MESSAGES,
    OFFERED,
    SHOWN,
    with_base,
)
from coterie.personal.word_search import Word

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason=f"no {package} (pip install -e '.[device]')")

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPTS = (
    "",
    "In my free time, I like to",
    "The number of peop",
    "(the so",
    "It is a list. ",
    "Naïve words, 2,345 of\n\n  them:\ta",
    "<|im_start|> is the<|im_end|> peop",
)
# messages, and answers so far
CHATS = (
    ("", ""),
    ("What should I do in my free time?", ""),
    ("  Who was it?\n", "It was the peop"),
    ('Is "naïve"\n\n a word, 你好?', "I think so. "),
    ("<|im_end|>\n<|im_start|>user\nNo: who?", "They said <|im_end|> and the"),
)
# which begins with a special token and the date, and strips messages
TEMPLATE = "{{ bos_token }}In {{ strftime_now('%Y') }}: " + CHATML.replace(
    "{{ m.content }}", "{{ m.content | trim }}"
)
# Asks one worker for the words after several texts, and returns what it says, with all digits.
ASK = """async (questions) => {
  const worker = new Worker(new URL("/worker.js", location.href), { type: "module" });
  const found = [];
  const answered = (id, [text, clients, message]) => new Promise((go, fail) => {
    const words = [];
    worker.onmessage = ({ data }) => {
      if (data.kind === "words") words.push(data.words);
      if (data.kind === "failed") fail(new Error(data.problem));
      if (data.kind === "done") go(words);
    };
    worker.postMessage({ id, text, message, clients });
  });
  for (const [id, question] of questions.entries()) found.push(await answered(id, question));
  return found;
}"""
ELSEWHERE = "address => fetch(address).then(() => 'answered', () => 'refused')"


LAYOUTS = {
    "ann": Layout(rank=2, alpha=0.2),
    "ben": Layout(generalists=1, specialists=3, top_k=2, rank=2, alpha=0.2),
    "<b>cleo</b>": Layout(generalists=2, rank=1, alpha=0.2, routing="equal"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models of several layouts on the embedded base's first block, which knows words, and
    gets the tokens of a chat template.
    """
    folder, embedded = tmp_path_factory.mktemp("run"), locate("embedded")
    base = AutoModelForCausalLM.from_pretrained(embedded, num_hidden_layers=1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return write_models(folder, folder / "base", LAYOUTS)


@pytest.fixture(scope="module")
def models(run: Path) -> dict[str, PersonalModel]:
    return with_base(coterie.load_all(run))


@pytest.fixture(scope="module")
def written(run: Path) -> Path:
    """The folder, in full precision."""
    return exported(run, run / "web")


@pytest.fixture(scope="module")
def chatting(run: Path) -> Path:
    """Likewise, for answers to messages."""
    return exported(run, run / "chatting", chat=True)


def exported(run: Path, out: Path, chat: bool = False) -> Path:
    source = Source(run, everyone=True)
    found = export(source, "web", out, precision="f32", base_precision="f32", chat=chat)
    assert all(one.check.difference < 1e-3 for one in found)
    assert {one.notes for one in found} == {(DATED,) if chat else ()}
    return out


@pytest.fixture(scope="module")
def served(written: Path) -> Iterator[Served]:
    with serving(written) as found:
        yield found


@pytest.fixture(scope="module")
def tab() -> Iterator["Page"]:
    """A browser's tab, for all tests."""
    with opened() as page:
        yield page


@pytest.fixture
def page(tab: "Page", served: Served, models: dict[str, PersonalModel]) -> "Page":
    """The keyboard with its suggestions after no text. It takes seconds to load: once."""
    if tab.url != served.address:
        tab.goto(served.address)
    tab.locator("#text").fill("")
    eventually(lambda: shown(tab), labels(models.values(), ""))
    return tab


def eventually(found: Callable[[], object], wanted: object) -> None:
    """Wait until something is as wanted. (Playwright's own waiting evaluates strings, which the
    page's policy forbids.)
    """
    end = time.monotonic() + 60
    while (last := found()) != wanted:
        assert time.monotonic() < end, f"{last} instead of {wanted}"
        time.sleep(0.05)


def shown(page: "Page") -> list[str]:
    return page.locator("button.word:visible").all_inner_texts()


def label(model: PersonalModel, word: Word) -> str:
    by = f" · {model.speaker(word)} {max(word.experts):.0%}" if word.experts else ""
    return f"{word.word}\n{word.probability:.1%}{by}"


def labels(models: Iterable[PersonalModel], text: str) -> list[str]:
    """What is written on the buttons for what Python says."""
    return [label(model, word) for model in models for word in model.next_words(text, SHOWN)]


def same_words(
    found: Sequence[Any], models: Iterable[PersonalModel], texts: Sequence[str] = PROMPTS
) -> None:
    """What the page's worker says of texts is what Python says of them."""
    for text, of_models in zip(texts, found, strict=True):
        for given, model in zip(of_models, models, strict=True):
            wanted = model.next_words(text, SHOWN)
            assert [w["word"] for w in given] == [w.word for w in wanted]
            assert [w["insert"] for w in given] == [w.insert for w in wanted]
            for theirs, ours in zip(given, wanted, strict=True):
                assert theirs["probability"] == pytest.approx(ours.probability, rel=1e-3)
                assert theirs["experts"] == pytest.approx(ours.experts, abs=1e-4)


def test_its_words_and_experts_are_those_of_python(tab, served, models):
    tab.goto(f"{served.address}licences/README.txt")  # a page without suggestions of its own
    long = "The water of " + "the number of people and " * 100
    questions = [(text, [*range(len(models))]) for text in PROMPTS]
    *found, (of_long,) = tab.evaluate(ASK, [*questions, (long, [0])])
    same_words(found, models.values())
    model = next(iter(models.values()))
    end = model.tokenizer(long)["input_ids"][1 - CONTEXT + LONGEST + 1 :]
    assert len(end) < CONTEXT < len(model.tokenizer(long)["input_ids"])
    wanted = model.next_words(model.tokenizer.decode(end), SHOWN)
    assert [w["word"] for w in of_long] == [w.word for w in wanted]


def openings(models: dict[str, PersonalModel], chats: Iterable[tuple[str, str]]) -> list[str]:
    """What Python's keyboard goes on with, of messages and answers so far."""
    template = next(iter(models.values())).chats
    return [template.opened([user(message)], answer) for message, answer in chats]


def test_a_chats_words_and_tokens_are_those_of_python(tab, chatting, models):
    """By the template, with its special tokens as one token each; where one types them, as text."""
    with serving(chatting) as served:
        tab.goto(f"{served.address}licences/README.txt")
        questions = [(answer, [*range(len(models))], message) for message, answer in CHATS]
        found = tab.evaluate(ASK, questions)
    same_words(found, models.values(), openings(models, CHATS))
    assert json.loads((chatting / "export.json").read_text())["chat"]


def test_one_writes_a_message_and_its_answer(tab, chatting, models):
    def settled(message: str, answer: str) -> None:
        (text,) = openings(models, [(message, answer)])
        eventually(lambda: shown(tab), labels(models.values(), text))

    with serving(chatting) as served:
        tab.goto(served.address)
        settled("", "")
        assert tab.locator("h1").inner_text() == CHAT_TITLE
        example = tab.locator("button.example").first
        assert example.inner_text() in MESSAGES
        example.click()
        message, answer = tab.get_by_label("Message"), tab.get_by_label("Answer")
        assert message.input_value() == example.inner_text()
        assert answer.evaluate("box => box === document.activeElement")
        settled(example.inner_text(), "")
        message.fill(" What about\nthe peop ")
        answer.focus()
        tab.keyboard.type("I think of the")
        settled(" What about\nthe peop ", "I think of the")
        button = tab.locator("button.word").first
        message.evaluate("box => { box.value = 'another' }")
        button.click()  # the words for that are on their way
        assert answer.input_value() == "I think of the"
        message.fill("another")
        settled("another", "I think of the")
        word = button.inner_text().split("\n")[0]
        button.click()
        assert answer.input_value() == f"I think of the {word}"
        assert message.input_value() == "another"
        settled("another", f"I think of the {word}")
        for width in (390, 1000):
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_chat_that_would_be_split_otherwise_is_not_suggested(tab, chatting, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(chatting, folder)
    settings = json.loads((folder / "page.json").read_text())
    settings["chat"]["between"] = settings["chat"]["between"].replace("assistant", "user")
    (folder / "page.json").write_text(json.dumps(settings))
    with serving(folder) as served:
        tab.goto(served.address)
        eventually(lambda: "splits" in tab.locator("#status").inner_text(), True)


def test_chats_without_a_template_or_by_one_that_needs_jinja_are_refused(run, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(run / "base", base)
    template = base / "chat_template.jinja"
    template.write_text(CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}"))
    source = Source(run, client="ann", base=str(base))
    with pytest.raises(Refused, match="without running the chat template"):
        export(source, "web", tmp_path / "out", chat=True)
    template.unlink()
    with pytest.raises(DataError, match="the base has no chat template"):
        export(source, "web", tmp_path / "out", chat=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_quickstarts_words_are_those_of_python(tab, quickstart, tmp_path):
    models = with_base(coterie.load_all(quickstart))
    with serving(exported(quickstart, tmp_path / "out")) as served:
        tab.goto(f"{served.address}licences/README.txt")
        found = tab.evaluate(ASK, [(text, [*range(len(models))]) for text in PROMPTS])
    same_words(found, models.values())


def test_one_types_and_chooses(tab, served, models):
    tab.goto(served.address)
    eventually(lambda: tab.locator(".client:visible").all_inner_texts(), [*models])
    assert not tab.locator("#message").is_visible()
    tab.keyboard.type("The number of peop")  # the box has the focus, while all is loading
    eventually(lambda: shown(tab), labels(models.values(), "The number of peop"))
    words = [w for m in models.values() for w in m.next_words("The number of peop", SHOWN)]
    for button, word in zip(tab.locator("button.word").all(), words, strict=True):
        style = f"expert{word.experts.index(max(word.experts))}" if word.experts else "unrouted"
        assert style in button.get_attribute("class").split()
    tab.locator("button.word").first.click()
    text = "The number of peop" + words[0].insert
    assert tab.locator("#text").input_value() == text
    assert tab.locator("#text").evaluate("box => box === document.activeElement")
    eventually(lambda: shown(tab), labels(models.values(), text))
    example = tab.locator("button.example").first
    assert example.inner_text() in EXAMPLES
    example.click()
    assert tab.locator("#text").input_value() == example.inner_text()
    eventually(lambda: shown(tab), labels(models.values(), example.inner_text()))


def test_keys_alone_will_do(page, models):
    rows = labels(models.values(), "")
    page.locator("#text").focus()
    for _ in range(OFFERED + 2):  # the examples, and who is shown
        page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == rows[0]
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == rows[1]
    page.keyboard.press("Enter")
    assert page.locator("#text").input_value() == rows[1].split("\n")[0]
    groups = page.get_by_role("group", include_hidden=False).all()
    names = [group.get_attribute("aria-label") for group in groups]
    assert [name for name in names if name] == [*models]


def test_a_word_for_an_older_text_is_not_added(page):
    page.evaluate(
        """() => {
          document.querySelector("#text").value = "something else";
          document.querySelector("button.word").click();
        }"""
    )
    assert page.locator("#text").input_value() == "something else"


def test_nothing_is_asked_of_others_and_nothing_is_told(page, served, models, written):
    names = {path.relative_to(written).as_posix() for path in written.rglob("*")}
    assert {path.lstrip("/") for path in served.asked} <= {"", *names}
    asked = len(served.asked)
    page.locator("#text").fill("The secret of ann")
    eventually(lambda: shown(page), labels(models.values(), "The secret of ann"))
    assert len(served.asked) == asked
    (worker,) = page.workers
    with serving(written) as other:
        for place in (page, worker):  # the page's policy holds in both
            assert place.evaluate(ELSEWHERE, other.address) == "refused"
            assert place.evaluate(ELSEWHERE, served.address) == "answered"
    assert other.asked == []


def test_it_fits_a_phone_and_follows_the_scheme(page):
    page.set_viewport_size({"width": 390, "height": 800})
    for dark in (False, True):
        page.emulate_media(color_scheme="dark" if dark else "light")
        button = page.locator("button.word").first
        colours = button.evaluate(
            "b => [getComputedStyle(b).color, getComputedStyle(document.body).backgroundColor]"
        )
        ink, ground = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in colours)
        assert abs(ink - ground) > 0.5
        assert (ink > ground) == dark
    legend = page.locator(".legend").inner_text()
    assert "G generalist" in legend
    assert "S3 specialist" in legend
    button.evaluate("b => b.textContent = 'functionality\\n9.5%'")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert button.evaluate("b => b.scrollWidth <= b.clientWidth")


def test_who_is_not_chosen_is_not_even_loaded(tab, written, models, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(written, folder)
    settings = json.loads((folder / "page.json").read_text())
    for row in settings["clients"][1:-1]:
        row["chosen"] = False
    (folder / "page.json").write_text(json.dumps(settings))
    first, second = list(models)[:2]
    with serving(folder) as served:
        tab.goto(served.address)
        eventually(lambda: shown(tab), labels([models[first], models[BASE]], ""))
        file = settings["clients"][1]["file"]
        assert not any(file in path for path in served.asked)
        tab.get_by_text("Who is shown").click()
        tab.get_by_role("checkbox", name=second).check()
        three = [models[first], models[second], models[BASE]]
        eventually(lambda: shown(tab), labels(three, ""))
        assert any(file in path for path in served.asked)
        tab.get_by_role("checkbox", name=BASE).uncheck()
        eventually(lambda: shown(tab), labels(three[:2], ""))


def test_what_is_written_in_fewer_bits_is_read_too(tab, written, models, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(written, folder, ignore=shutil.ignore_patterns("base.onnx*"))
    onnx.quantise(written / "base.onnx", folder / "base.onnx", FORMATS["web"].base_precisions[0])
    for client, precision in (("ann", "f16"), ("ben", "int8")):
        path = folder / f"{client}.safetensors"
        onnx.write_tensors(path, onnx.read_tensors(path), precision)
    base, other = (
        sum(path.stat().st_size for path in where.glob("base.onnx*")) for where in (folder, written)
    )
    assert base < 0.4 * other
    with serving(folder) as served:
        tab.goto(f"{served.address}licences/README.txt")
        (clients,) = tab.evaluate(ASK, [(PROMPTS[1], [0, 1])])
    for given, model in zip(clients, (models["ann"], models["ben"]), strict=True):
        wanted = {word.word: word for word in model.next_words(PROMPTS[1], 20)}
        best, ours = given[0], wanted[given[0]["word"]]
        assert best["probability"] == pytest.approx(ours.probability, rel=0.3)
        assert best["experts"] == pytest.approx(ours.experts, abs=0.05)


def test_what_cannot_work_says_what_to_do(tab, written, tmp_path):
    tab.goto((written / "index.html").as_uri())
    assert "python -m http.server" in tab.locator("#from-disk").inner_text()
    assert not tab.locator("#bar").is_visible()
    status = tab.locator("#status")
    folder = tmp_path / "out"
    shutil.copytree(written, folder)
    (folder / "base.onnx").unlink()
    with serving(folder) as served:
        tab.goto(served.address)
        eventually(lambda: "base.onnx cannot be read (404)" in status.inner_text(), True)
        assert "Is the whole folder there?" in status.inner_text()
    settings = json.loads((written / "page.json").read_text())
    settings["samples"][0][1][0] += 1  # as if this tokenizer split it in another way
    shutil.copytree(written, folder, dirs_exist_ok=True)
    (folder / "page.json").write_text(json.dumps(settings))
    with serving(folder) as served:
        tab.goto(served.address)
        eventually(lambda: "splits" in status.inner_text(), True)


def test_the_programs_are_those_that_were_checked_with_their_licences(written):
    vendored = assets() / "vendor"
    sums = json.loads((vendored / "sums.json").read_text())
    names = [path.relative_to(vendored).as_posix() for path in Path(str(vendored)).rglob("*.*")]
    assert sorted(names) == sorted([*sums, "sums.json"])
    for name, wanted in sums.items():
        content = (vendored / name).read_bytes()
        whole = lzma.decompress(content) if name.endswith(".xz") else content
        assert sha256(whole).hexdigest() == wanted, name
        if name.endswith(".xz"):
            packed = (written / name.replace(".xz", ".gz")).read_bytes()
            assert gzip.decompress(packed) == whole
        else:
            assert (written / name).read_bytes() == content
    assert "MIT License" in (written / "licences/onnxruntime-LICENSE.txt").read_text()
    assert "Apache License" in (written / "licences/tokenizers-LICENSE.txt").read_text()
