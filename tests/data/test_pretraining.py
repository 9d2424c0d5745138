"""The script that pretrains the embedded base, on sources and streams made here: what it takes
from the sources, and that a training interrupted or branched off is the same training.
"""

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from coterie.data.origins import seen_in_pretraining

REPOSITORY = Path(__file__).parents[2]
ENGLISH = (
    "The old man was by the window, and he had not seen that it was she who came in with the "
    "letters of his brother from the town."
)
OTHER = "They were all there when the doctor told him that this would be the last of her visits."


@pytest.fixture(scope="module", autouse=True)
def _scripts():
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    yield
    sys.path.remove(str(REPOSITORY / "scripts"))


@pytest.fixture(scope="module")
def text(_scripts) -> ModuleType:
    return import_module("pretraining_text")


@pytest.fixture
def script(_scripts, monkeypatch) -> ModuleType:
    """The script, with a network of 8 columns in place of the base."""
    module = import_module("pretrain_base")
    config = LlamaConfig(
        vocab_size=300, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    monkeypatch.setattr(module, "build", lambda: LlamaForCausalLM(config))
    return module


# ---- text ---------------------------------------------------------------------------------------


def test_standard_ebooks_and_openstax_lose_markup_notes_and_formulas(text):
    book = (
        '<?xml version="1.0" encoding="utf-8"?>\n<html xmlns="http://www.w3.org/1999/xhtml" '
        'xmlns:epub="http://www.idpf.org/2007/ops"><head><title>I</title></head><body>'
        "<section><h2>Chapter <span>I</span></h2>\n<p>He said:\u2060\u2014\u200a<i>no</i>."
        '<a href="#n" epub:type="noteref">1</a></p><blockquote><p>A <b>second</b>\n\t one.</p>'
        "</blockquote></section></body></html>"
    )
    assert text.xml(book) == [["Chapter I", "He said:\u2014 no.", "A second one."]]
    module = (
        '<document xmlns="http://cnx.rice.edu/cnxml" xmlns:m="http://www.w3.org/1998/Math/MathML">'
        "<title>Cells</title><metadata><para>no</para></metadata><content><para>Cells <term>live"
        "</term>.</para><para>So <m:math><m:mi>x</m:mi></m:math> holds.</para><!-- c --><table>"
        "<title>T</title></table><list><item>first</item></list></content></document>"
    )
    assert text.xml(module) == [["Cells", "Cells live.", "first"]]
    assert text.xml("<p>broken") == []


def test_markdown_loses_front_matter_program_text_pictures_and_addresses(text):
    page = (
        "---\ntitle: x\n---\n## A *title*\n\nSee [the guide](https://a.b) and\n**more** of it.\n\n"
        "![a picture](x.png)\n\n```python\nprint()\n```\n\n{{< card >}}\n- one `item`\n"
        "- two_items\n\n| a | b |\n<div class='x'>kept &amp; told</div>\n"
    )
    (paragraphs,) = text.markdown(page)
    assert [p for p in paragraphs if p] == [
        "A title", "See the guide and more of it.", "one item", "two_items", "kept & told",
    ]  # fmt: skip


def test_treebanks_and_dialogues_become_lines(text):
    treebank = "# newpar\n# text = One.\n1\tOne\n# text = Two.\n# newpar\n# text = Three.\n"
    assert text.conllu(treebank) == [["One. Two.", "Three."]]
    chat = json.dumps({"t": {"content": [{"message": "Hi  you"}, {"message": "Hello"}]}})
    assert text.topical_chat(chat) == [["- Hi you", "- Hello"]]
    guided = json.dumps([{"turns": [{"utterance": "A room?"}, {"utterance": "Where?"}]}])
    assert text.guided_dialogue(guided) == [["- A room?", "- Where?"]]


def test_only_english_prose_passes(text):
    assert text.english_prose(ENGLISH)
    german = "Der alte Mann stand am Fenster und hatte nicht gesehen, dass sie es war, die mit "
    assert not text.english_prose(german * 3)
    program = "for (i = 0; i < n; i++) { the = of[i]; and_to(the); } if (a == in) { return it; } "
    assert not text.english_prose(program * 5)
    assert not text.english_prose("Too short to be told.")


def test_what_clients_hold_and_what_stands_twice_is_left_out(text):
    client = f"Before it. {ENGLISH} After it."
    sieve = text.Sieve([client])
    document = text.Document("fiction", "a/b", (ENGLISH, OTHER, OTHER, OTHER + " So they went."))
    assert sieve(document) == f"{OTHER}\n{OTHER} So they went."
    assert sieve.dropped["held by clients"] == len(ENGLISH)
    assert sieve.dropped["twice"] == len(OTHER)


def test_sources_are_pinned_licensed_and_of_no_author_whom_clients_hold(text, tmp_path):
    found = text.sources()
    assert all(len(source.commit) == 40 and source.licence for source in found)
    assert {source.form for source in found} <= set(text.FORMS)
    group = json.loads(text.SOURCES.read_text(encoding="utf-8"))[0]
    group["repositories"] = {"standardebooks/h-g-wells_the-time-machine": "0" * 40}
    listing = tmp_path / "sources.json"
    listing.write_text(json.dumps([group]), encoding="utf-8")
    with pytest.raises(SystemExit, match="author whom clients hold"):
        text.sources(listing)


def test_every_kind_trains_and_some_works_of_it_are_held_back(text, script):
    kinds = {source.kind for source in text.sources()} | {"encyclopedia"}
    assert kinds == set(script.WEIGHTS)
    for kind in ("fiction", "essays"):
        works = [s.repository for s in text.sources() if s.kind == kind]
        assert 0 < sum(map(text.held_back, works)) < 0.1 * len(works)
    assert 0.03 < np.mean([text.held_back(f"a/b/page{n}#0") for n in range(2000)]) < 0.07
    assert text.held_back("dbpedia14/test#3")
    assert not text.held_back("dbpedia14/train#3")


def test_the_figures_on_corpora_are_of_documents_that_no_base_has_seen(text, data_root):
    every, kept = text.clients(data_root), text.clients(data_root, kept_back=True)
    assert every.keys() == kept.keys()
    assert kept["ag_news"] == every["ag_news"]
    for corpus in every.keys() - {"ag_news"}:
        assert 0 < len(kept[corpus]) < len(every[corpus])
    assert not any(seen_in_pretraining("multilingual", row) for row in kept["de"])


def git(folder: Path, *command: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *command], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_source_is_read_at_its_commit(text, tmp_path):
    folder = tmp_path / "owner+name"
    (folder / "text").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "text/a.md").write_text("First.\n\nSecond é.\n", encoding="utf-8")
    (folder / "other.md").write_text("Not asked for.\n", encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a")
    commit = git(folder, "rev-parse", "HEAD")
    (folder / "text/a.md").write_text("Later.\n", encoding="utf-8")
    git(folder, "commit", "-qam", "b")
    source = text.Source("web", "markdown", "CC0", "owner/name", commit, ("text/*.md",), "file")
    assert list(text.documents(source, tmp_path)) == [
        text.Document("web", "owner/name/text/a.md#0", ("First.", "Second é."))
    ]


# ---- training -----------------------------------------------------------------------------------


def streams() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kinds = {"fiction": 3_000, "essays": 2_000}
    return {kind: rng.integers(0, 300, n).astype(np.uint16) for kind, n in kinds.items()}


def trained(script, folder: Path, *options: str) -> dict:
    """The state that the script leaves with these options, on the streams above."""
    defaults = ["--work", str(folder), "--rows", "2", "--no-compile", "--device", "cpu"]
    args = script.arguments().parse_args([*defaults, "--no-bf16", *options])
    script.train(script.Training(streams(), args.seed, "cpu"), args)
    return torch.load(folder / "checkpoint.pt", weights_only=False)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.random.Generator):
        return a.bit_generator.state == b.bit_generator.state
    return a == b


def test_an_interrupted_training_goes_on_bit_for_bit(script, tmp_path):
    step = 2 * script.CONTEXT
    whole = trained(script, tmp_path / "whole", "--tokens", str(12 * step))
    trained(script, tmp_path / "parts", "--tokens", str(5 * step))
    parts = trained(script, tmp_path / "parts", "--tokens", str(12 * step))
    assert whole["done"] == 12 * step
    assert same(whole, parts)
    other = trained(script, tmp_path / "other", "--tokens", str(12 * step), "--seed", "1")
    assert not same(whole["model"], other["model"])


def test_a_training_killed_between_checkpoints_goes_on_from_the_last(script, tmp_path, monkeypatch):
    step = 2 * script.CONTEXT
    whole = trained(script, tmp_path / "whole", "--tokens", str(12 * step))
    real, taken = script.Training.step, []

    def killed(self, *args):
        taken.append(1)
        if len(taken) == 8:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(script.Training, "step", killed)
    ticks = iter(range(0, 100_000, 61))  # a minute and more passes at every look at the clock
    monkeypatch.setattr(script.time, "time", lambda: next(ticks))
    ending = ["--tokens", str(12 * step), "--minutes", "3"]
    with pytest.raises(KeyboardInterrupt):
        trained(script, tmp_path / "killed", *ending)
    before = torch.load(tmp_path / "killed/checkpoint.pt", weights_only=False)["done"]
    assert 0 < before < 7 * step
    assert same(whole, trained(script, tmp_path / "killed", *ending))


def test_a_branch_decays_and_leaves_the_constant_checkpoint_alone(script, tmp_path):
    step = 2 * script.CONTEXT
    trained(script, tmp_path / "work", "--tokens", str(4 * step))
    constant = tmp_path / "work/checkpoint.pt"
    before = constant.read_bytes()
    branch = ["--from", str(constant), "--decay", str(6 * step)]
    finished = trained(script, tmp_path / "branch", *branch)
    assert finished["done"] == 10 * step
    assert constant.read_bytes() == before
    again = trained(script, tmp_path / "branch", *branch)  # is finished: nothing more is trained
    assert same(finished, again)
    with pytest.raises(SystemExit, match="folder of its own"):
        trained(script, tmp_path / "work", *branch)
    with pytest.raises(SystemExit, match="--decay needs"):
        trained(script, tmp_path / "new", "--decay", str(step))


def test_the_learning_rate_rises_stays_and_falls(script):
    assert script.schedule(0, None, 0) < 0.05
    assert script.schedule(10**9, None, 0) == 1.0
    falling = [script.schedule(10**7 + n, 2 * 10**7, 10**7) for n in range(0, 10**7, 10**6)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 1.0
    assert script.schedule(2 * 10**7, 2 * 10**7, 10**7) == pytest.approx(0.01)


def test_an_epoch_gives_every_window_once(script):
    batches = script.Batches({"fiction": np.arange(20 * script.CONTEXT)}, seed=0)
    offset = int(np.random.default_rng(0).integers(script.CONTEXT))
    starts = range(offset, 20 * script.CONTEXT - script.CONTEXT - 1, script.CONTEXT)
    assert sorted(int(batches.window("fiction")[0]) for _ in starts) == list(starts)


def test_bits_per_byte_counts_every_token_once(script):
    model = script.build().eval()
    ids = np.random.default_rng(1).integers(1, 300, script.CONTEXT + 40).tolist()
    found = script.bits_per_byte(model, ids, 100)
    nats = 0.0
    for start in (0, script.CONTEXT):
        row = torch.tensor(ids[start : start + script.CONTEXT + 1])
        logp = F.log_softmax(model(input_ids=row[None, :-1]).logits[0].float(), dim=-1)
        nats -= sum(logp[i, row[i + 1]].item() for i in range(len(row) - 1))
    assert found == pytest.approx(nats / math.log(2) / 100, rel=1e-5)


def test_prepared_and_finished_once_the_model_encodes_any_language(
    script, text, tmp_path, monkeypatch
):
    seen = {"fiction": [ENGLISH, OTHER], "essays": [OTHER + " And so on."]}
    rows = [{"repository": "a/b", "kind": "fiction", "licence": "CC0", "bytes": 9_000_000}]
    held = {"fiction": [ENGLISH]}
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    monkeypatch.setattr(script, "gather", lambda *_: (seen, held, rows))
    monkeypatch.setattr(
        script, "clients", lambda *_, **__: {"de": ["Grüße aus Köln, schöne Straße."]}
    )
    script.prepare(prepared, tmp_path, tmp_path)
    monkeypatch.setattr(script, "gather", None)  # is not asked again
    script.prepare(prepared, tmp_path, tmp_path)
    args = script.arguments().parse_args(
        ["--prepared", str(prepared), "--out", str(out), "--device", "cpu"]
    )
    args.data = tmp_path
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4096, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    monkeypatch.setattr(script, "build", lambda: model)
    script.finish(script.Training(streams(), 0, "cpu"), args)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "| a/b | fiction | CC0 | 9.00 |" in card
    assert "| de | " in card
    tokenizer = script.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("Grüße, où? ça!")["input_ids"]) == "Grüße, où? ça!"
    assert tokenizer.eos_token_id == 0
