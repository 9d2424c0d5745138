"""Exports open in EleutherAI's evaluation harness, which comes to the same scores as `evaluate`."""

from pathlib import Path

import pytest
from chat_bases import write_jsonl

import coterie
from coterie.export import Source, export
from coterie.models.layout import Layout

TASK = """
task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
LETTERS = "abcdefghij"


@pytest.mark.slow
def test_the_harness_scores_an_export_as_evaluate_does(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = make_run("llama", ann=Layout(generalists=1, specialists=0, routing="equal", rank=2))
    path = tmp_path / "task.jsonl"
    rows = [
        {
            "question": f"{LETTERS[i % 10]} {LETTERS[i // 3]}?",
            "choices": [LETTERS[i % 7], LETTERS[i % 5 : i % 5 + 3], "no " + LETTERS[i % 4]],
            "answer": i % 3,
        }
        for i in range(24)
    ]
    write_jsonl(path, rows)
    (ours,) = coterie.evaluate(run, path).values()
    (exported,) = export(Source(run, "ann"), "peft", tmp_path / "peft")
    base = coterie.load(run, "ann").about.base
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(path=path))
    results = simple_evaluate(
        HFLM(pretrained=base, peft=str(exported.folder), device="cpu", batch_size=4),
        tasks=["local"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    theirs = results["results"]["local"]
    assert 100 * theirs["acc,none"] == pytest.approx(ours.accuracy)
    assert 100 * theirs["acc_norm,none"] == pytest.approx(ours.by_length)
