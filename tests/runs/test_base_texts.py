"""Clients' texts as a base takes them."""

import numpy as np
import pytest
import torch
from tiny_bases import tiny_base

from coterie.core.errors import DataError, ModelError
from coterie.data.chats import ChatSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.splits import TokenSplit
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.runs.problems.language import fitted_federation

ROWS = 61  # of the tiny bases


class Names:
    """A tokenizer of which only the names of tokens are asked."""

    def convert_ids_to_tokens(self, id: int) -> str:
        return f"<{id}>"


def backbone(kind: str) -> Backbone:
    made = Backbone(tiny_base(kind))
    made.__dict__["tokenizer"] = Names()
    return made


def running(name: str, largest: int) -> TokenSplit:
    return TokenSplit(name, np.array([1, 2, largest, 3], np.uint16), 2, 0)


def separate(name: str) -> ChatSplit:
    lengths = np.array([4, 5, 3], np.uint32)
    tokens = np.arange(1, 13, dtype=np.uint32)
    counted = np.ones(12, np.uint32)
    counted[[0, 4, 9]] = 0
    return ChatSplit(name, tokens, counted, lengths, 11, 0)


def test_tokens_that_the_base_lacks_are_refused_by_client_split_and_name() -> None:
    def client(id: str, *largest: int) -> ClientData:
        names = ("train", "valid", "test")
        return ClientData(id, *(running(*own) for own in zip(names, largest, strict=True)))

    good = client("ann", 3, 60, 60)
    base = backbone("llama")
    federation = Federation({"ann": good}, "one")
    assert fitted_federation(federation, base).clients == federation.clients
    bad = Federation(
        {"ann": good, "ben": client("ben", 61, 3, 70)},
        "two",
        unseen={"new": {"eva": client("eva", 3, 3, 64)}},
    )
    with pytest.raises(DataError) as told:
        fitted_federation(bad, base)
    assert told.value.problem.split("\n") == [
        "client 'ben', train: the tokenizer has token 61 '<61>', the base has 61 rows",
        "client 'ben', test: the tokenizer has token 70 '<70>', the base has 61 rows",
        "client 'eva', test: the tokenizer has token 64 '<64>', the base has 61 rows",
    ]
    assert "resize_token_embeddings" in told.value.remedy


def test_ids_in_use_are_checked_alike() -> None:
    base = backbone("llama")
    base.check_ids([0, 60])
    base.check_ids(torch.tensor([[0, 60]]))
    for ids in ([61], torch.tensor([[3, 61]])):
        with pytest.raises(ModelError, match="token 61 '<61>'"):
            base.check_ids(ids)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_documents_of_one_row_do_not_see_each_other_whatever_the_base(kind: str) -> None:
    base = backbone(kind)
    data = ClientData("ann", *(separate(name) for name in ("train", "valid", "test")))
    fitted = fitted_federation(Federation({"ann": data}, "one"), base).clients["ann"]
    assert fitted.test.windows == (3 if kind == "opt" else 1)
    with torch.no_grad():
        total = 0.0
        for start, end in ((0, 4), (4, 9), (9, 12)):
            ids = torch.arange(1, 13)[None, start:end]
            p = base.model(ids).logits.log_softmax(-1)[0]
            total -= float(p[:-1].gather(1, ids[0, 1:, None]).sum())
    nll, tokens = (
        LanguageModel(base, Layout(specialists=0, rank=1)).score(fitted.test.scoring(4)).tolist()
    )
    assert tokens == 9
    assert nll == pytest.approx(total, rel=1e-5)
