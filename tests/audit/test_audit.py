"""Audits of whole runs: through the command line, with and without canaries, of what memorised
and what did not.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import reported
import torch
from folders import WORDS, written
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from coterie import personal
from coterie.audit import Settings, audit
from coterie.audit.auditing import _Auditor
from coterie.cli.base import app
from coterie.core.errors import Refused
from coterie.core.files import load
from coterie.core.result.audit import AuditResult
from coterie.personal.classifier import ClassifierMixture
from coterie.personal.mixture import PersonalMixture
from coterie.reports import audit as told
from coterie.runs import run as runs
from coterie.runs.folder.metrics import Observations
from coterie.runs.problems.members import prepare_remote
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe as recipes

CANARIES = "audit={canaries: 8, repeats: 2, prefix: 1, length: 4, references: 24}"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("people"), documents=30)


def trained(texts: Path, base: Path | str, out: Path, *changes: str) -> Path:
    common = [
        f"data.path={texts}",
        "compare_with=[]",
        "samples=false",
        "words=null",
        f"model.base={base}",
        "training.batch_size=4",
        "method.rounds=2",
    ]
    common += ["model.context=16", "method.local_steps=2", "method.name=fedavg"]
    reported.run(recipes.load("folders", [*common, *changes]), out)
    return out


@pytest.fixture(scope="module")
def planted(texts: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with canaries and several exchanges, which learns nothing."""
    out = tmp_path_factory.mktemp("runs") / "planted"
    return trained(texts, tiny_base, out, CANARIES, "training.experts={lr: 1.0e-9}")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg of the three people on the embedded base, long enough to learn their texts."""
    folder = tmp_path_factory.mktemp("runs")
    changes = [
        "method.rounds=3",
        "method.local_steps=96",
        "model.context=32",
        "training.batch_size=8",
    ]
    changes += ["audit={canaries: 12, repeats: 3, references: 48, length: 6}"]
    return trained(written(folder / "texts"), "embedded", folder / "people", *changes)


@pytest.fixture(scope="module")
def found(people: Path) -> AuditResult:
    return audit(people, Settings(windows=16, words=9))


def invoked(*words: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["audit", *words])
    return done.exit_code, done.output


# What one person's words do in another's model


@pytest.mark.slow
def test_a_diarys_words_reach_the_models_of_others_and_the_audit_shows_it(
    found: AuditResult,
) -> None:
    words = found.words
    assert words is not None
    assert words.others is not None
    assert words.shared is not None
    assert words.words > 5
    assert words.others.low > 0  # words of one client, in a model whose client never wrote them
    assert words.shared.low > 0
    reached = {(e.owner, e.word) for e in words.examples}
    assert reached
    for owner, word in reached:
        others = [
            text
            for person, texts in WORDS.items()
            if person != owner
            for some in texts
            for text in some
        ]
        assert word not in others


@pytest.mark.slow
def test_the_programmers_keyboard_suggests_the_people_of_the_diary(people: Path) -> None:
    """The finding by hand: what is typed on the programmer's device, and what its base would
    have said.
    """
    models = personal.load_all(people, ["programmer"])
    programmer = models["programmer"]
    assert isinstance(programmer, personal.PersonalModel)
    typed = "I showed the letter to"
    assert "Leopold" in {word.word for word in programmer.next_words(typed, 3)}
    for parameter in programmer.adapter.parameters():
        parameter.zero_()
    base = personal.PersonalModel(programmer.language, programmer.about)
    assert "Leopold" not in {word.word for word in base.next_words(typed, 3)}


@pytest.mark.slow
def test_what_was_planted_is_found_by_the_server_and_by_no_one_better(found: AuditResult) -> None:
    server, others = (found.observers[name].canaries for name in ("server", "others"))
    assert server is not None
    assert others is not None
    assert server.auc is not None
    assert server.exposure.low > server.exposure.chance
    assert server.auc.low > 0.6
    assert server.epsilon.at_least > 0
    assert server.epsilon.at_least <= server.epsilon.most
    assert server.exposure.value >= others.exposure.value


@pytest.mark.slow
def test_a_server_that_sees_sums_alone_finds_what_every_client_could(
    people: Path, found: AuditResult, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(people, tmp_path / "run"))
    sums = audit(again, Settings(windows=16, words=1, secure=True))
    assert sums.secure
    assert not found.secure
    assert sums.observers["others"] == found.observers["others"]
    server, others = (sums.observers[name] for name in ("server", "others"))
    apart = [own.canaries.auc for own in (server, others) if own.canaries and own.canaries.auc]
    assert len(apart) == 2
    assert apart[0].value == pytest.approx(apart[1].value, abs=0.01)
    assert server.membership.auc.value == pytest.approx(others.membership.auc.value, abs=0.01)
    assert found.observers["server"].membership != server.membership
    assert "A server of sums" in " ".join(told.sentences(sums))


# What learned nothing gives nothing away


def test_of_a_model_that_learned_nothing_nothing_is_found(planted: Path) -> None:
    nothing = audit(planted, Settings(windows=20, words=4))
    assert list(nothing.observers) == ["server", "others"]
    for own in nothing.observers.values():
        canaries = own.canaries
        assert canaries is not None
        assert canaries.auc is not None
        assert canaries.epsilon.at_least == 0
        assert canaries.exposure.low < canaries.exposure.chance + 0.3
        assert canaries.auc.low <= 0.5 <= canaries.auc.high
    assert nothing.words is not None
    assert nothing.words.others is None or nothing.words.others.value == 0
    assert AuditResult.read(planted) == nothing


# The command line


def test_the_command_measures_writes_and_says_what_it_means(planted: Path) -> None:
    code, output = invoked(str(planted), "--windows", "10", "--words", "3")
    assert code == 0, output
    assert all(len(line) <= 80 for line in output.splitlines() if str(planted) not in line)
    for expected in (
        "canary exposure, bits",
        "epsilon is at least",
        "windows told apart, AUC",
        "the server",
        "another client",
    ):
        assert expected in output
    assert "…" not in output  # no figure is cut off
    written_ = json.loads((planted / "audit.json").read_text())
    assert written_["canaries"]["candidates"] == 24
    assert {"value", "low", "high", "interval"} <= written_["observers"]["server"]["membership"][
        "auc"
    ].keys()
    report = (planted / "report.html").read_text()
    assert 'id="audit"' in report
    assert "What the shared part reveals" in report


def test_of_one_client(planted: Path) -> None:
    code, output = invoked(str(planted), "--client", "cook", "--windows", "10", "--words", "2")
    assert code == 0, output
    assert "client cook" in output
    assert list(
        json.loads((planted / "audit.json").read_text())["observers"]["server"]["membership"][
            "clients"
        ]
    ) == ["cook"]


def test_without_a_section_membership_and_words_are_measured(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    run = trained(texts, tiny_base, tmp_path / "run")
    assert not (run / "audit").exists()
    assert 'id="audit"' not in (run / "report.html").read_text()
    plain = audit(run, Settings(windows=10, words=3))
    assert list(plain.observers) == ["others"]
    assert plain.canaries is None
    assert plain.observers["others"].canaries is None
    assert plain.observers["others"].membership.members == 30
    assert told.terminal(plain)


def test_of_image_classifiers_membership_alone(tmp_path: Path) -> None:
    changes = [
        "method.name=fedavg",
        "method.rounds=2",
        "compare_with=[]",
        "evaluate_every=0",
        "data.clients=4",
    ]
    run = tmp_path / "run"
    runs.run(recipes.load("cobo-digits", [*changes, "audit={}"]), run)
    images = audit(run, Settings(windows=10))
    assert (images.words, images.canaries, images.data) == (None, None, "examples")
    assert list(images.observers) == ["server", "others"]
    assert "examples told apart, AUC" in [line[0] for line in told.rows(images)]


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (["nowhere"], "nowhere holds no run", "coterie run"),
        (
            ["{planted}", "--client", "nobody"],
            "--client nobody",
            "There are: cook, diarist, programmer",
        ),
        (["{planted}", "--windows", "1"], "--windows", ""),
    ],
)
def test_what_is_wrong_is_refused_with_the_remedy(
    planted: Path, words: Sequence[str], problem: str, remedy: str
) -> None:
    code, output = invoked(*(word.format(planted=planted) for word in words))
    assert code == 2
    text = re.sub(r"\s+", " ", output)
    assert problem in text
    assert remedy in text


@pytest.mark.parametrize(
    "changes",
    [
        ("method.name=local",),
        ("method.rounds=0", "method.name=pretrained"),
        ("method.name=fedsa-lora",),
    ],
)
def test_methods_without_a_shared_model_are_refused(
    changes: Sequence[str], texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    run = trained(texts, tiny_base, tmp_path / "run", *changes)
    with pytest.raises(Refused, match=r"audit: .*shares no") as refused:
        audit(run)
    assert "fedavg" in refused.value.remedy


# What a run keeps


def test_without_the_section_nothing_changes(
    texts: Path, tiny_base: Path, planted: Path, tmp_path: Path
) -> None:
    """A section without canaries keeps what was sent, and leaves every number as it is."""
    plain = trained(texts, tiny_base, tmp_path / "plain")
    kept = trained(texts, tiny_base, tmp_path / "kept", "audit={canaries: 0}")
    assert not (plain / "audit").exists()
    for client in WORDS:
        one, other = (
            load(run / f"clients/{client}/adapter.safetensors")[0] for run in (plain, kept)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
    scores = [json.loads((run / "result.json").read_text())["clients"] for run in (plain, kept)]
    assert scores[0] == scores[1]
    assert not (kept / "audit/canaries.json").exists()
    assert len(list((kept / "audit").glob("round-*"))) == 2


def test_the_canaries_of_the_list_are_those_of_the_training_data(planted: Path) -> None:
    about = json.loads((planted / "audit/canaries.json").read_text())["clients"]
    federation = prepare(recipes.resolve(planted)).problem.federation
    for client, own in about.items():
        text = federation.clients[client].train.tokens.tolist()
        for tokens, here in zip(own["tokens"], own["planted"], strict=True):
            canary = [0, *own["prefix"], *tokens, 0]
            assert sum(text[k : k + len(canary)] == canary for k in range(len(text))) == (
                2 if here else 0
            )
        for split in (federation.clients[client].valid, federation.clients[client].test):
            assert str(own["tokens"][0])[1:-1] not in str(split.tokens.tolist())


def test_the_server_sees_what_left_the_clients_and_others_what_the_server_made_of_it(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """Under local privacy noise is in what the server received; under central privacy only in
    what it sends on.
    """
    noisy = {
        where: trained(
            texts,
            tiny_base,
            tmp_path / where,
            "audit={canaries: 0}",
            f"privacy={{where: {where}, clip: 1.0, noise: {noise}, delta: 1.0e-5}}",
            "training.experts={lr: 1.0e-9}",
        )
        for where, noise in (("local", 1.0), ("central", 1.0))
    }
    size = {}
    for where, run in noisy.items():
        first, second = Observations(run / "audit", None).before(2)
        sent, before = first.sent("cook"), first.to("cook")
        update = torch.cat([(sent[name] - before[name]).flatten() for name in before])
        passed = torch.cat([(second.to("cook")[name] - before[name]).flatten() for name in before])
        size[where] = float(update.std()), float(passed.std())
    assert size["local"][0] == pytest.approx(1.0, rel=0.05)
    assert size["local"][1] == pytest.approx(1 / np.sqrt(3), rel=0.05)
    assert size["central"][0] < 1e-6
    assert size["central"][1] == pytest.approx(1 / 3, rel=0.05)


def test_only_the_last_exchanges_are_kept(tmp_path: Path) -> None:
    seen = Observations(tmp_path, 2)
    for round in range(4):
        seen.keep(
            round,
            0,
            {"ann": {"x": torch.tensor([round])}},
            {"ann": {"x": torch.tensor([round + 10])}},
        )
    kept = seen.before(4)
    assert [exchange.round for exchange in kept] == [2, 3]
    assert [exchange.sent("ann")["x"].item() for exchange in kept] == [12, 13]
    assert [exchange.round for exchange in seen.before(3)] == [
        2
    ]  # a checkpoint of round 3 knows nothing of what came after it


def test_what_all_have_alike_is_there_once(tmp_path: Path) -> None:
    same = {"x": torch.ones(3)}
    Observations(tmp_path, None).keep(
        0,
        0,
        {"ann": same, "ben": same},
        {"ann": {"x": torch.zeros(1)}, "ben": {"x": torch.ones(1)}},
    )
    (kept,) = Observations(tmp_path, None).before(1)
    assert sorted(kept.tensors) == ["from/ann/x", "from/ben/x", "to/*/x"]
    assert torch.equal(kept.to("ben")["x"], torch.ones(3))
    assert kept.sent("cleo") == {}


def test_devices_plant_nothing(texts: Path, tiny_base: Path) -> None:
    from coterie.engines.messages import Member
    from coterie.runs.device.device import _loaded
    from coterie.runs.device.limits import Limits

    recipe = recipes.load(
        "folders", [f"data.path={texts}", f"model.base={tiny_base}", "engine=flower", CANARIES]
    )
    with pytest.raises(Refused, match="plant canaries in this device's data"):
        _loaded(recipe.model_dump_json(), str(texts), None, Limits())
    with pytest.raises(Refused, match="clients are on separate devices"):
        prepare_remote(recipe, [Member(client="ann", position=0, windows=(9, 9, 9))])


def test_of_several_parts_the_one_that_sends_is_audited(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """Observers of Local and FedAvg, mixed, can tell what those of FedAvg alone can."""
    together = trained(
        texts, tiny_base, tmp_path / "together", CANARIES, "method.name=interpolation"
    )
    alone = trained(texts, tiny_base, tmp_path / "alone", CANARIES)
    for secure in (False, True):
        few = Settings(windows=6, words=3, secure=secure)
        result, expected = audit(together, few), audit(alone, few)
        mixed = result.observers.pop("user")
        assert result.observers == expected.observers
        assert mixed.exchanges == 1
        assert mixed.canaries is not None
        assert result.shift == expected.shift
        assert result.method == "interpolation"
        assert result.words is not None
        assert expected.words is not None
        assert result.words.shared == expected.words.shared
    assert invoked(str(together), "--words", "3")[0] == 0


def test_the_user_of_a_mixture_has_its_mixed_probabilities(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """Both scores by the probabilities of each part, mixed naively, and those of the base."""
    changes = "method.name=interpolation", "training.experts={lr: 1.0e-9}"
    run = trained(texts, tiny_base, tmp_path / "run", *changes)
    auditor = _Auditor(run, Settings(windows=5, words=3), print)
    mixture, view = auditor.in_use["cook"], auditor.views["user"]["cook"]
    assert isinstance(mixture, PersonalMixture)
    mixture.weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    for value in (p for part in mixture.parts.values() for p in part.adapter.parameters()):
        value.copy_(torch.randn(value.shape, generator=random) / 4)
    base = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    ratios, lowest = [], []
    for row in auditor.rows["cook"][0]:
        ids, right = row[None, :-1], row[1:, None]
        with torch.no_grad():
            before = base(ids).logits[0].double().softmax(dim=-1).gather(1, right)
            p = sum(
                weight * part(ids).logits[0].double().softmax(dim=-1)
                for weight, part in zip((0.3, 0.7), mixture.parts.values(), strict=True)
            )
        after = p.gather(1, right)
        ratios.append((after.log() - before.log()).mean().item())
        mean = (p * p.log()).sum(dim=1)
        deviation = ((p * p.log() ** 2).sum(dim=1) - mean**2).sqrt()
        standardised = ((after[:, 0].log() - mean) / deviation).sort().values
        lowest.append(standardised[: len(row[1:]) // 5].mean().item())
    model = auditor.models["cook"]
    np.testing.assert_allclose(auditor._membership("cook", view).members, ratios, atol=1e-5)
    found = auditor._min_k(model, view, auditor.rows["cook"]).members
    np.testing.assert_allclose(found, lowest, rtol=5e-3)  # a difference of squares, fp32
    # the shared part is asked again afterwards, at its initial values
    shift = auditor._membership("cook").members
    assert model.personal is None
    assert np.abs(shift).min() > 1.0


def test_classifiers_that_are_mixed_are_audited_by_their_mixed_probabilities(
    tmp_path: Path,
) -> None:
    parts = "method={name: interpolation, parts: [local, fedavg], rounds: 3}"
    run = tmp_path / "run"
    reported.run(recipes.load("cobo-digits", [parts, "compare_with=[]"]), run)
    auditor = _Auditor(run, Settings(windows=8), print)
    client, mixture = next(
        (i, model) for i, model in auditor.in_use.items() if isinstance(model, ClassifierMixture)
    )
    rows, _ = auditor.rows[client]
    by_part = [part(rows.x).exp() for part in mixture.parts.values()]
    p = sum(w * of for w, of in zip(mixture.weights.tolist(), by_part, strict=True))
    before = auditor._membership(client).members
    expected = p.gather(1, rows.y[:, None])[:, 0].log().numpy() - before
    found = auditor._membership(client, auditor.views["user"][client]).members
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    result = audit(run, Settings(windows=8))
    assert result.words is None
    assert list(result.observers) == ["others", "user"]
    assert result.observers["user"].canaries is None


def test_a_run_of_which_two_parts_send_is_refused(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    parts = "method={name: interpolation, parts: [fedavg, ditto], rounds: 1, local_steps: 1}"
    run = trained(texts, tiny_base, tmp_path / "run", parts, "method.rounds=1")
    with pytest.raises(Refused, match=r"fedavg and ditto send both.*\n.*each method alone"):
        audit(run, Settings(windows=6, words=3))
