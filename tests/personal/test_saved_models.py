"""Personal models that earlier code wrote still load and predict the same.

`saved/` was written by commit d325dad: a base of one block and twelve tokens, three clients with
random adapters, and a classifier of the recipe ddome-digits; with what that code predicted.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import coterie

SAVED = Path(__file__).parent / "saved"
BASE = str(SAVED / "base")
CLIENTS = ("ann", "ben", "fay")
EXPECTED = load_file(SAVED / "expected.safetensors")
SAID = json.loads((SAVED / "expected.json").read_text())


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_language_model_of_before_predicts_the_same(client, merged):
    model = coterie.load(SAVED, client, base=BASE, merged=merged)
    logits = model(EXPECTED["ids"]).logits
    torch.testing.assert_close(logits, EXPECTED[f"logits.{client}"], rtol=1e-4, atol=1e-5)
    first = model(EXPECTED["ids"][:, :1]).logits  # one token has a path of its own
    torch.testing.assert_close(first, logits[:, :1], rtol=1e-4, atol=1e-5)
    assert model.generate("cab a", max_new_tokens=8, do_sample=False) == (SAID["texts"][client])


def test_many_models_of_before_predict_the_same():
    together = coterie.load_many(SAVED, base=BASE)
    logits = together(EXPECTED["ids"].expand(3, -1), CLIENTS).logits
    wanted = torch.cat([EXPECTED[f"logits.{client}"] for client in CLIENTS])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    for client, words in together.next_words("cab a").items():
        for word, (shown, insert, probability) in zip(words, SAID["words"][client], strict=True):
            assert (word.word, word.insert) == (shown, insert)
            assert word.probability == pytest.approx(probability, rel=1e-4)


def test_a_classifier_of_before_predicts_the_same():
    model = coterie.load(SAVED / "classifiers" / "aligned-00")
    log_probabilities, experts = model.answer(EXPECTED["images"])
    torch.testing.assert_close(log_probabilities, EXPECTED["log_probabilities"])
    assert torch.equal(experts, EXPECTED["experts"])
