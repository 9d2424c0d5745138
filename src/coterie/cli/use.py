"""Commands that use a run: adapt, audit, predict, generate, evaluate."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import base as common
from coterie.core.errors import Refused
from coterie.core.printing import printable

Words = Annotated[
    str | None,
    typer.Argument(
        metavar="[TEXT]",
        help="Text to continue, e.g. 'In my free time, I like to', or a message. Default: it is "
        "asked for.",
        show_default=False,
    ),
]
_Me = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Whose messages in an archive are the answers. Repeatable."),
]
Text = Annotated[str | None, typer.Option(help="The same as TEXT.")]


def _text(words: str | None, text: str | None) -> str:
    """Return the text of a command, given once, or else asked for. Raises Refused."""
    if words is not None and text is not None:
        raise Refused("TEXT and --text are the same", "Give one of them.")
    if (given := text if words is None else words) is not None:
        return given
    try:
        return str(typer.prompt("Text", err=True))
    except typer.Abort:
        problem = "no text was given"
        raise Refused(problem, "Give one: coterie generate RUN 'The weather is'.") from None


@common.app.command()
def adapt(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, finished or not.", show_default=False)
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help='The new client\'s images, or texts (.txt, or .jsonl with "text"): a folder or a '
            "file."
        ),
    ] = None,
    fresh: Annotated[
        Path | None,
        typer.Option(
            help="New texts of a client that has trained, to which its router, then its own "
            "experts, are refitted."
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            callback=common._normal,
            help="Id of the client. Default with --data, of a new one: from there.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A new folder. Default: clients/ID in the run's folder; with --fresh, fresh in it."
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            help="Whether the specialist and router, or a LoRA, of a language model are trained on "
            "this text; classifiers need no training."
        ),
    ] = True,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most local iterations of that training, or with --fresh. Default: as many as a "
            "client of the run does.",
        ),
    ] = None,
    me: _Me = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Make a personal model for a new client, or refit a client's to new text. Its data need no
    labels and never leave it.
    """
    with common._stopping("stopped. Nothing is kept."):
        from coterie.adapt import fresh as refits
        from coterie.adapt import new_client, personalisation
        from coterie.personal import PersonalClassifier
        from coterie.runs.recipes.recipe import resolve

        if fresh is not None:
            if data is not None or me or client is None or not train:
                raise Refused(
                    "--fresh refits the model of a client that has trained: it needs --client, and "
                    "neither --data, --me nor --no-train",
                    "For a new client give --data alone.",
                )
            refitted = refits.refit(run, client, fresh, out, iterations=iterations, say=common._say)
            print(*refits.sentences(printable(client), refitted), sep="\n")
            return
        if data is None:
            problem = "adapt needs the client's data"
            raise Refused(problem, "Give --data, or --fresh for one that has trained.")
        if iterations is not None and not train:
            raise Refused("--no-train does no --iterations", "Leave out one of them.")
        trains = train and resolve(run).model.kind == "language"
        training = new_client.Training(iterations, common._say) if trains else None
        adapted = new_client.adapt(run, data, client, out, training=training, me=tuple(me or ()))
        about, classifies = adapted.model.about, isinstance(adapted.model, PersonalClassifier)
        if about.round < adapted.rounds:
            print(
                f"The run has done {about.round} of {adapted.rounds} rounds. The model is from "
                f"that round."
            )
        if classifies:
            print(
                f"{printable(about.client)}: {adapted.samples:,} "
                f"sample{'s' * (adapted.samples != 1)}, labels not needed and not read."
            )
        scores = adapted.scores
        for m in sorted(adapted.experts, key=lambda m: -scores[m] if scores else 0):
            print(f"  expert {m}" + (f": {scores[m]:.1%} of the scores" if scores else ""))
        if rest := [score for m, score in enumerate(scores) if m not in adapted.experts]:
            print(f"  not sent: {len(rest)} others, {sum(rest):.1%} of the scores")
        if not adapted.experts and classifies:
            print("  the model that every client gets")
        if not classifies:
            effect = adapted.personalised
            for sentence in personalisation.sentences(printable(about.client), effect):
                print(sentence)
        sent = f"{adapted.up:,} bytes (its scores)" if adapted.up else "nothing"
        once = ""
        if adapted.once:
            expert = f"{adapted.once:,} bytes of the common expert"
            once = f", and before that {expert}, as every client does"
        print(f"It sent {sent} and received {adapted.down:,} bytes{once}.")
        given = (
            f"--data {shlex.quote(str(data))}" if classifies else '--text "What you would write"'
        )
        print(
            f"Its model is in {adapted.folder}. To use it:\n  coterie predict "
            f"{shlex.quote(str(adapted.folder))} {given}"
        )


@common.app.command()
def audit(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, finished or not.", show_default=False)
    ],
    client: common.Clients = None,
    windows: Annotated[
        int, typer.Option(min=2, help="Training windows per client, and as many test windows.")
    ] = 100,
    words: Annotated[int, typer.Option(min=1, help="Rare words per client.")] = 20,
    top: Annotated[
        int,
        typer.Option(
            min=1, max=20, help="Number of suggestions in which a rare word counts as found."
        ),
    ] = 3,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Assume that the server sees only sums, as under secure aggregation."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random choices.")] = 0,
) -> None:
    """Measure how much of a client's text the shared part of a run reveals to the server and to
    other clients.

    Canaries, and what the server sees of each client, are measured in runs whose recipe has a
    section `audit`, e.g. `coterie run quickstart --set 'audit={}'`. In other runs, membership and
    rare words are measured. Nothing leaves this machine.
    """
    with common._stopping("stopped. Nothing is written."):
        # before the heavy imports, so that mistakes show at once
        from coterie.audit import Settings
        from coterie.audit import audit as auditing

        settings = Settings(tuple(dict.fromkeys(client or ())), windows, words, top, secure, seed)
        report = auditing(run, settings, lambda text: print(f"  {text} ...", flush=True))
        from rich.console import Console

        from coterie.reports import audit as audit_report

        console = Console()
        common._line(
            console, f"\n{audit_report.about(report)}: what the shared part reveals", style="bold"
        )
        for table in audit_report.terminal(report):
            console.print(table)
        for sentence in audit_report.sentences(report):
            common._line(console, f"- {sentence}")
        common._line(
            console,
            f"Intervals are 95 % confidence intervals. All figures are in {run}/audit.json, a "
            f"chart in {run}/report.html.",
        )


@common.app.command()
def predict(
    run: common.Run,
    words: Words = None,
    text: Text = None,
    data: Annotated[
        Path | None, typer.Option(help="For classifiers: a file or folder of images or texts.")
    ] = None,
    client: common.Clients = None,
    top: Annotated[int, typer.Option(min=1, max=20, help="Number of words.")] = 3,
    chat: common.Chat = False,
    follow: common.Follow = False,
    reset_weights: common.Reset = False,
    base: common.Base = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Show the predictions of each client's model side by side: the next words of a text, or the
    classes of images or texts.
    """
    with common._stopping():
        from rich.console import Console

        from coterie.data.chats.messages import user
        from coterie.models.text import TextShape
        from coterie.personal import ManyModels
        from coterie.personal.ui import terminal

        if data is not None and (text is not None or words is not None):
            remedy = "Use --data for images or files of texts, and leave the text out."
            raise Refused("predict needs either a text or --data", remedy)
        models, classifiers = common._personal(run, client, base, follow, reset_weights)
        shape = next((one.shape for one in classifiers.values()), None)
        if data is None and (models or isinstance(shape, TextShape)):
            text = _text(words, text)
        if models:
            if text is None:
                problem = f"{run} holds language models, which do not classify"
                raise Refused(problem, "Give a text instead of --data.")
            together = ManyModels(models)
            opened = together.chats.opened([user(text)]) if chat else text
            for model in models.values():
                model.observe(text, growing=not chat)
            terminal.show(Console(), models, together.next_words(opened, top), text)
            return
        if chat:
            raise Refused(f"{run} holds classifiers, which do not chat", "Leave --chat out.")
        from coterie.personal.samples import as_samples

        assert shape is not None
        if data is None and not isinstance(shape, TextShape):
            raise Refused(f"{run} holds classifiers of images", "Give their files: --data.")
        samples = as_samples(data or text, shape)
        predictions = {i: model.predict(samples) for i, model in classifiers.items()}
        terminal.show_classes(Console(), samples.names, predictions)


@common.app.command()
def generate(
    run: common.Run,
    words: Words = None,
    text: Text = None,
    client: common.Client = None,
    chat: common.Chat = False,
    tokens: Annotated[
        int, typer.Option("--tokens", "--max-new-tokens", min=1, help="Most tokens to generate.")
    ] = 40,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature. 0: always the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    follow: common.Follow = False,
    reset_weights: common.Reset = False,
    base: common.Base = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Continue a text with one client's model, or answer a message."""
    with common._stopping():
        import torch

        from coterie.personal import folder_of

        folder = folder_of(run, client)
        models, _ = common._personal(folder, None, base, follow, reset_weights)
        if not models:
            problem = f"{folder} holds a classifier, not a language model"
            raise Refused(problem, "See `coterie predict --data`.")
        text = _text(words, text)
        (model,) = models.values()
        torch.manual_seed(seed)
        chosen = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature > 0
            else {"do_sample": False}
        )
        speak = model.answer if chat else model.generate
        print(printable(speak(text, max_new_tokens=tokens, **chosen), lines=True))


@common.app.command()
def evaluate(
    run: common.Run,
    data: Annotated[
        Path,
        typer.Option(help="A text, conversations, or JSON lines of questions: a file or a folder."),
    ],
    client: common.Clients = None,
    words: Annotated[
        int, typer.Option(min=0, help="Words of a text on which suggestions are scored.")
    ] = 100,
    me: _Me = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    base: common.Base = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Score clients' models on any text (perplexity, words foreseen, keystrokes saved), or on a
    task: choices by likelihood, answers by exact match.
    """
    with common._stopping():
        from coterie import personal
        from coterie.reports.tables import evaluated

        scores = personal.evaluate(run, data, client, words=words, me=me or (), base=base)
        if json_:
            print(json.dumps({i: of.to_json() for i, of in scores.items()}, indent=2))
            return
        from rich.console import Console

        Console().print(evaluated(scores, Console().width))
