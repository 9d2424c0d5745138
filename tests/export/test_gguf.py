"""Stock llama.cpp runs a base and a small file of each client, exactly, and several clients by
request.
"""

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from byte_pairs import byte_pairs

import coterie
from coterie.core.errors import ExportError, Refused
from coterie.export import Source, export
from coterie.export.gguf import LlamaServer
from coterie.export.gguf_files import Tokens
from coterie.models.layout import Layout

for package in ("gguf", "xllamacpp"):
    pytest.importorskip(package, reason=f"no {package} (pip install -e '.[device]')")

ROUTED = Layout(rank=3, mlp_rank=2, alpha=5.0)
FOUR = Layout(generalists=1, specialists=3, top_k=2, rank=2)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", ROUTED),
        ("llama", FOUR),
        ("llama", Layout(generalists=2, rank=2, routing="equal")),
        ("llama", Layout(specialists=0, rank=2)),
        ("scaled", ROUTED),
        ("mistral", ROUTED),
        ("qwen3", FOUR),
        ("qwen3", Layout(specialists=0, rank=2)),
    ],
)
def test_llama_cpp_gives_the_same_probabilities(family, layout, make_run, tmp_path):
    run = make_run(family, ann=layout)
    (found,) = export(Source(run), "gguf", tmp_path / "out", precision="f32")
    assert found.notes == ()
    model, ids = coterie.load(run), torch.randint(272, (2, 20))
    if family == "mistral":  # beyond its window of 5 llama.cpp takes nothing
        ids = ids[:, :4]
    wanted = model(ids).logits.log_softmax(-1)
    server = LlamaServer(found.folder / found.shared[0], 24, model.tokenizer)
    with server.running([found.folder / found.files[0]], precise=True):
        given = server.logits(ids)
        torch.testing.assert_close(given, wanted, rtol=1e-3, atol=2e-3)
        server.adapter = 1  # there is none
        assert (server.logits(ids) - wanted).abs().max() > 0.1


def test_one_server_answers_for_several_clients_by_request(quickstart, tmp_path):
    found = export(Source(quickstart, everyone=True), "gguf", tmp_path / "out")
    assert len({one.shared for one in found}) == 1
    sizes = [(one.folder / one.files[0]).stat().st_size for one in found]
    assert max(sizes) < 0.05 * (tmp_path / "out" / found[0].shared[0]).stat().st_size
    for one in found:
        assert one.check.difference < 0.05
        assert one.check.perplexity == pytest.approx(one.check.original, rel=1e-3)
    models = coterie.load_all(quickstart)
    prompts = {client: f"The {client} of a string is the" for client in models}
    readme = (tmp_path / "out/README.md").read_text()
    tokenizer = models["network"].tokenizer
    server = LlamaServer(tmp_path / "out" / found[0].shared[0], 64, tokenizer, slots=2)
    with server.running([one.folder / one.files[0] for one in found]):

        def ask(client):
            number = list(models).index(client)
            assert f"| {number} | {client} |" in readme
            lora = [{"id": number, "scale": 1.0}]
            choice = server.complete(prompts[client], n_predict=1, n_probs=5, logprobs=5, lora=lora)
            entries = choice["logprobs"]["content"][0]["top_logprobs"]
            return {entry["id"]: entry["logprob"] for entry in entries}

        with ThreadPoolExecutor(2) as pool:
            answers = dict(zip(models, pool.map(ask, models), strict=True))
    for client, answer in answers.items():
        ids = models[client].tokenizer(prompts[client], return_tensors="pt")["input_ids"]
        wanted = models[client](ids).logits[0, -1].log_softmax(-1)
        assert answer == {i: pytest.approx(wanted[i].item(), abs=0.02) for i in answer}


def test_a_quantised_base_is_smaller_and_says_its_cost(make_run, own_text, tmp_path):
    source = Source(make_run("llama", ann=ROUTED), data=own_text)
    sizes, costs = [], []
    for precision in ("f32", "f16", "q8_0", "q4_0"):
        (found,) = export(source, "gguf", tmp_path / precision, precision=precision)
        tensors = _bytes_of_tensors(found.folder / found.shared[0])
        sizes.append(tensors)
        costs.append(found.check.difference)
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.6 * sizes[1]
    assert sizes[3] < 0.8 * sizes[2]
    assert costs == sorted(costs)
    assert costs[0] < 0.1 * costs[2]


def _bytes_of_tensors(path):
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def test_clients_of_other_layouts_have_a_base_of_their_own(make_run, tmp_path):
    run = make_run("llama", ann=ROUTED, ben=FOUR, cleo=replace(ROUTED, rank=1))
    found = export(Source(run, everyone=True), "gguf", tmp_path / "out")
    assert [one.shared[0] for one in found] == [
        "base-f16-2-experts.gguf",
        "base-f16-4-experts-top-2.gguf",
        "base-f16-2-experts.gguf",
    ]
    summary = json.loads((tmp_path / "out/export.json").read_text())
    assert set(summary["clients"]["ben"]["files"]) == {
        "ben.lora.gguf",
        "base-f16-4-experts-top-2.gguf",
        "README.md",
    }
    assert summary["versions"].keys() >= {"gguf", "xllamacpp"}


@pytest.mark.parametrize(
    ("family", "layout", "precision", "problem", "remedy"),
    [
        ("gpt2", ROUTED, "f16", "gpt2 has no relative", "--format onnx"),
        ("qwen2", ROUTED, "f16", "qwen2 has no relative", "--format onnx"),
        ("llama", Layout(rank=2, biased=True), "f16", "its routers have biases", "--format peft"),
        ("biased", ROUTED, "f16", r"no place for.*k_proj\.bias", "--format peft"),
        ("narrow", ROUTED, "q8_0", r"does not divide.*down \(24\)", "--precision f16"),
    ],
)
def test_what_llama_cpp_cannot_hold_is_refused(
    family, layout, precision, problem, remedy, make_run, tmp_path
):
    source = Source(make_run(family, ann=layout))
    with pytest.raises(Refused) as refused:
        export(source, "gguf", tmp_path / "out", precision=precision)
    assert re.search(problem, refused.value.problem)
    assert remedy in refused.value.remedy
    assert not (tmp_path / "out").exists()


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = [("2", "3"), ("23", "4"), ("234", "5"), ("Ċ", "Ċ"), (".", "Ċ"), ("ĠĠ", "a"), ("(", "a")]


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_texts_are_split_as_the_base_splits_them(split, base_of, make_run, tmp_path):
    from tokenizers import Regex, pre_tokenizers

    run, base = make_run("llama", ann=ROUTED), tmp_path / "base"
    shutil.copytree(base_of("llama"), base)
    tokenizer = byte_pairs([("Ġ", "Ġ"), *MERGES])
    backend = tokenizer.backend_tokenizer
    apart = {
        "gpt-2": None,
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "llama-bpe": pre_tokenizers.Split(Regex(WORDS.replace("NUMBERS", "{1,3}")), "isolated"),
        "qwen2": pre_tokenizers.Split(Regex(WORDS.replace("NUMBERS", "")), "isolated"),
    }[split]
    whole = split in ("gpt-2", "smollm")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=whole)
    backend.pre_tokenizer = pre_tokenizers.Sequence([step for step in (apart, bytes_of) if step])
    tokenizer.save_pretrained(base)
    numbers = tokenizer.tokenize("2345.\n\n(a")
    assert numbers[:1] == [{"gpt-2": "2345", "llama-bpe": "234"}.get(split, "2")]
    (found,) = export(Source(run, base=str(base)), "gguf", tmp_path / "out")
    server = LlamaServer(found.folder / found.shared[0], 24, tokenizer)
    text = "2345.\n\n(a 2  ab's IT'S\n \n   a23 é — 123456"
    with server.running([]):
        given = server.tokens(text)
    assert given == tokenizer(text)["input_ids"]


ENDED = """
import sys
from pathlib import Path
from coterie.export.gguf import LlamaServer
for _ in range(10):
    with LlamaServer(Path(sys.argv[1]), 24, lambda text, **_: {"input_ids": [5]}).running([]):
        pass
"""


def test_a_server_ends_that_nobody_has_asked_anything(make_run, tmp_path):
    """llama.cpp's waits for good where it is ended before its loop has begun, which on a busy
    machine it often is.
    """
    (found,) = export(Source(make_run("llama", ann=ROUTED)), "gguf", tmp_path / "out")
    base = found.folder / found.shared[0]
    busy = [subprocess.Popen([sys.executable, "-c", ENDED, str(base)]) for _ in range(4)]
    try:
        assert [process.wait(timeout=120) for process in busy] == [0] * 4
    finally:
        for process in busy:
            process.kill()


def test_what_splits_texts_in_another_way_is_not_kept(make_run, tmp_path, monkeypatch):
    embedded = coterie.models.architecture.tokenizer("embedded")
    tokens = Tokens.of(embedded, 4096)
    assert (tokens.split, len(tokens.texts), tokens.kinds[0]) == ("smollm", 4096, 3)
    some = [17, 300, 4095]
    assert embedded.convert_ids_to_tokens(some) == [tokens.texts[i] for i in some]
    run = make_run("llama", ann=ROUTED)
    whole = Tokens.write

    def fewer(self, writer, tokenizer):
        whole(replace(self, merges=self.merges[:1]), writer, tokenizer)

    monkeypatch.setattr(Tokens, "write", fewer)
    with pytest.raises(ExportError, match=r"llama\.cpp splits text into"):
        export(Source(run), "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("coterie.export.gguf_files._split", lambda found: "")
    with pytest.raises(Refused, match=r"tokenizer.*\n.*--format mixtral"):
        export(Source(run), "gguf", tmp_path / "out")
