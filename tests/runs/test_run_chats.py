"""Runs on conversations: from the command line to an answer that ends."""

import json
from pathlib import Path

import pytest
import torch
from chat_bases import CHATML, turns, write_chat_base, write_jsonl
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.errors import DataError, Refused
from coterie.core.result import WordScores
from coterie.personal import PersonalModel
from coterie.runs.problems import loading

SAID = {"ann": ("hello", "the end"), "ben": ("who", "and her")}
TINY = {"rounds": 2, "local_steps": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two people who always say the same."""
    root = tmp_path_factory.mktemp("texts")
    for client, said in SAID.items():
        rows = [{"messages": turns(*said), "row": i} for i in range(4)]
        for split in ("train", "valid", "test"):
            write_jsonl(root / client / f"{split}.jsonl", rows)
    return root


@pytest.fixture(scope="module")
def learned(base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> coterie.Run:
    """A run that has learned what its clients say by heart."""
    return coterie.run(
        "folders",
        out=tmp_path_factory.mktemp("runs") / "learned",
        data={"path": str(texts), "content": "chats"},
        model={"base": str(base), "context": 32},
        method={"name": "comigs-1g1s", "rounds": 1, "local_steps": 40},
        training={"batch_size": 2, "experts": {"lr": 0.01}},
        words=8,
        compare_with=[],
    )


def test_a_keyboard_foresees_the_words_of_answers_learned_by_heart(learned: coterie.Run) -> None:
    for client, (_, answer) in SAID.items():
        words = learned.result.clients[client].words
        assert words is not None
        assert words.words > 0
        assert (words.first, words.first_three) == (100, 100)
        assert words.keystrokes_saved == 100 * (1 - len(answer.split()) / (len(answer) + 1))
    row = learned.rows[-1]
    assert row.words is not None
    assert row.words.first == 100
    assert "Words foreseen, by client" in learned.report.read_text(encoding="utf-8")


def test_a_model_of_conversations_is_evaluated_by_its_template(
    learned: coterie.Run, texts: Path, tmp_path: Path
) -> None:
    scores = coterie.evaluate(learned.folder, texts / "ann" / "test.jsonl", words=4)
    assert scores["ann"].perplexity == pytest.approx(learned.result.clients["ann"].test)
    assert scores["ann"].perplexity < scores["ben"].perplexity
    assert scores["ann"].words == WordScores(4, 100, 100, 75)
    rows = [{"question": message, "answer": said} for message, said in SAID.values()]
    rows += [{"question": "hello", "choices": ["and her", "the end"], "answer": "the end"}]
    write_jsonl(tmp_path / "task.jsonl", rows)
    asked = coterie.evaluate(learned.folder, tmp_path / "task.jsonl", ["ann"])["ann"]
    assert (asked.questions, asked.exact_match, asked.accuracy) == (3, 50, 100)


def test_an_archive_is_evaluated_and_adapted_to_by_the_name_of_who_answers(
    learned: coterie.Run, tmp_path: Path
) -> None:
    asked = {day: " ".join(["hello", "who"][: day % 3] * (day // 3)) for day in range(10, 30)}
    asked = {day: question for day, question in asked.items() if question}
    lines = [
        f"{day}.05.24, 14:32 - Cy: {question}\n{day}.05.24, 14:33 - Ann: the end"
        for day, question in asked.items()
    ]
    path = tmp_path / "carla" / "chat.txt"
    path.parent.mkdir()
    path.write_text("\n".join(lines), encoding="utf-8")
    rows = [{"messages": turns(question, "the end")} for question in asked.values()]
    table = write_jsonl(tmp_path / "table.jsonl", rows)
    for use in (coterie.evaluate, coterie.adapt):
        with pytest.raises(
            DataError, match=rf"it has Cy \({len(asked)}\), Ann \({len(asked)}\)"
        ) as told:
            use(learned.folder, path.parent)
        assert "of adapt and evaluate: --me" in told.value.remedy
    scores = coterie.evaluate(learned.folder, path.parent, words=4, me=["Ann"])
    assert scores == coterie.evaluate(learned.folder, table, words=4)
    adapted = coterie.adapt(learned.folder, path.parent, me=["Ann"], out=tmp_path / "model")
    assert adapted.model.about.client == "carla"
    command = ["evaluate", str(learned.folder), "--data", str(path), "--me", "Ann", "--json"]
    shown = CliRunner().invoke(app, command)
    assert json.loads(shown.output)["ann"]["perplexity"] == scores["ann"].perplexity


def test_after_training_a_model_ends_its_answer(learned: coterie.Run, base: Path) -> None:
    """The token that ends a turn is trained: nothing else would stop the model."""
    for client, (message, answer) in SAID.items():
        model = learned.load(client)
        assert isinstance(model, PersonalModel)
        ids = model.chats.prompt([{"role": "user", "content": message}])
        end = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert end in model.chats.stops
        found = model.generate(
            torch.tensor([ids]),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=list(model.chats.stops),
        )
        assert found[0, -1] == end
        assert model.answer(message, do_sample=False) == answer
        assert model.answer(turns(message), do_sample=False) == answer


def test_perplexity_is_over_the_answers(learned: coterie.Run) -> None:
    """What is learned by heart has a perplexity near 1, though nothing of the questions was."""
    from coterie.runs.problems.prepare import prepare

    prepared = prepare(learned.recipe)
    for client, data in prepared.problem.federation.clients.items():
        model = learned.load(client)
        nll, tokens = model.score(data.test.scoring(4))
        assert tokens == data.test.predictions == int(data.test.counted.sum())
        answer = model.tokenizer(SAID[client][1], add_special_tokens=False)["input_ids"]
        assert tokens == 4 * (len(answer) + 1)
        assert nll / tokens < 0.1
        assert learned.result.clients[client].test == pytest.approx(2.718281828 ** (nll / tokens))


@pytest.mark.parametrize("engine", ["inprocess", "loopback"])
@pytest.mark.parametrize("method", ["comigs-1g1s", "cobo"])
def test_engines_and_methods_train_on_conversations(base, texts, tmp_path, method, engine) -> None:
    def scores(engine: str, name: str) -> dict[str, float]:
        run = coterie.run(
            "folders",
            out=tmp_path / name,
            engine=engine,
            data={"path": str(texts), "content": "chats"},
            model={"base": str(base), "context": 32},
            method={"name": method, **TINY},
            training={"batch_size": 2},
            compare_with=[],
        )
        return {i: own.test for i, own in run.result.clients.items()}

    found = scores(engine, "one")
    assert all(value > 1 for value in found.values())
    if engine == "loopback":
        assert found == pytest.approx(scores("inprocess", "two"))


def test_a_template_of_ones_own_travels_with_the_model(texts: Path, tmp_path: Path) -> None:
    base = write_chat_base(tmp_path / "base", None)
    (tmp_path / "own.jinja").write_text(CHATML)
    settings = {
        "model": {"base": str(base), "context": 32},
        "method": {"name": "local", "rounds": 1, "local_steps": 1},
        "compare_with": [],
    }
    data = {"path": str(texts), "content": "chats"}
    with pytest.raises(DataError, match="no chat template"):
        coterie.run("folders", out=tmp_path / "none", data=data, **settings)
    data["chat_template"] = str(tmp_path / "own.jinja")
    run = coterie.run("folders", out=tmp_path / "run", data=data, **settings)
    (tmp_path / "own.jinja").unlink()
    model = coterie.load(tmp_path / "run", "ann")
    assert isinstance(model.answer("hello", do_sample=False, max_new_tokens=4), str)
    assert coterie.Run(run.folder).recipe.data.chat_template == CHATML


def test_what_is_left_to_the_run_fits_conversations(base: Path, texts: Path) -> None:
    from coterie.runs.problems.auto import resolved
    from coterie.runs.recipes.recipe import load

    options = [f"data.path={texts}", f"model.base={base}", "data.content=chats"]
    recipe, said = resolved(load("folders", options))
    assert recipe.model.context == 64
    assert "documents of about" in said


def test_a_base_without_chat_training_is_said_before_training(base: Path, texts: Path) -> None:
    """That of the package has a template, but has never seen a conversation."""

    def notes(base: str, **data: str) -> str:
        data |= {"path": str(texts), "content": "chats"}
        recipe = coterie.Recipe.load("folders", data=data, model={"base": base, "context": 32})
        return " ".join(loading.load(recipe).federation.notes)

    assert "never trained on conversations" in notes("embedded")
    assert "never trained on conversations" not in notes(str(base))


def test_new_clients_bring_conversations(learned: coterie.Run, tmp_path: Path) -> None:
    from coterie.adapt.new_client import Training, adapt

    rows = [{"messages": turns(f"hello {i}", "the end")} for i in range(12)]
    data = write_jsonl(tmp_path / "cid" / "own.jsonl", rows).parent
    found = adapt(learned.folder, data, out=tmp_path / "model", training=Training(2))
    assert found.personalised is not None
    assert found.personalised.tokens["train"] > 0


def test_commands_chat(learned: coterie.Run, tiny_base: Path, capsys) -> None:
    from coterie.cli import app

    def output(*words: str) -> str:
        with pytest.raises(SystemExit) as done:
            app(list(words), standalone_mode=True)
        assert done.value.code == 0
        return capsys.readouterr().out

    run = str(learned.folder)
    said = output(
        "generate", run, "--client", "ben", "--text", "who", "--temperature", "0", "--chat"
    )
    assert said.strip() == "and her"
    table = output("predict", run, "--text", "hello", "--chat", "--top", "1")
    (row,) = (line for line in table.splitlines() if line.strip().startswith("ann"))
    assert row.split()[1] == "the"
    about = json.loads((learned.folder / "clients/ann/client.json").read_text())
    assert "chat_template" not in about  # it is the base's own
    plain = PersonalModel.load(learned.folder / "clients/ann")
    plain.backbone.tokenizer.chat_template = None
    with pytest.raises(DataError, match="the base has no chat template"):
        plain.answer("hello")


def test_canaries_are_for_text_alone(base: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="texts only, not in conversations") as told:
        coterie.run(
            "folders",
            out=tmp_path / "run",
            audit={"canaries": 2},
            data={"path": str(texts), "content": "chats"},
            model={"base": str(base), "context": 32},
            method={"name": "fedavg", **TINY},
            compare_with=[],
        )
    assert "audit.canaries: 0" in told.value.remedy


def test_an_audit_scores_conversations(base: Path, texts: Path, tmp_path: Path) -> None:
    from coterie.audit import Settings, audit

    run = coterie.run(
        "folders",
        out=tmp_path / "run",
        keep="last",
        patience=None,
        data={"path": str(texts), "content": "chats"},
        model={"base": str(base), "context": 32},
        method={"name": "fedavg", **TINY},
        compare_with=[],
    )
    found = audit(run.folder, Settings(("ann",), 4, 2, 3, False, 0), lambda text: None)
    assert found.shift is not None


def test_a_device_reads_no_file_that_a_server_names(tmp_path: Path) -> None:
    from coterie.runs.device.device import _with_own_paths

    section = {"data": {"kind": "folders", "chat_template": "/etc/hostname"}, "model": {}}
    with pytest.raises(Refused, match="not read here"):
        _with_own_paths(section, None, None)
    section["data"]["chat_template"] = CHATML
    assert _with_own_paths(section, str(tmp_path), None)["data"]["chat_template"] == CHATML
