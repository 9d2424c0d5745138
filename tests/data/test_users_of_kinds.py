"""Users of one language and topic share its documents; the last of them are new."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from coterie.data.corpora import Multilingual


def test_somebody_of_each_kind_trains() -> None:
    with pytest.raises(ValueError, match="2 of 2 users of each kind leaves none to train"):
        Multilingual(users=2, unseen=2)


def test_users_of_one_kind_share_its_documents_and_the_last_are_new(
    tiny_base: Path, tmp_path: Path
) -> None:
    from coterie.models.architecture import tokenizer

    texts = {
        language: [
            f"{language} on the {topic}, number {k}."
            for k in range(60)
            for topic in ("sea", "land")
        ]
        for language in ("de", "fr")
    }
    lines = [
        json.dumps({"language": language, "text": text})
        for language, own in texts.items()
        for text in own
    ]
    (tmp_path / "multilingual").mkdir()
    (tmp_path / "multilingual/train.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    topics = {topic: {"de": topic, "fr": topic} for topic in ("sea", "land")}
    section = Multilingual(root=tmp_path, languages=("de", "fr"), topics=topics, users=3, unseen=1)
    federation = section.load(tokenizer(tiny_base), 8, tmp_path)
    kinds = [f"{language}-{topic}" for language in ("de", "fr") for topic in topics]
    assert list(federation.clients) == [f"{kind}-{k}" for kind in kinds for k in (1, 2)]
    assert list(federation.unseen) == ["new"]
    assert list(federation.unseen["new"]) == [f"{kind}-3" for kind in kinds]
    documents = [text for own in section.source().read().values() for part in own for text in part]
    assert sorted(documents) == sorted(text for own in texts.values() for text in own)
    everybody = section.model_copy(update={"unseen": 0}).load(tokenizer(tiny_base), 8, tmp_path)
    for i, data in everybody.clients.items():
        assert torch.equal(data.train.batch(0, 9), federation.everyone[i].train.batch(0, 9))
