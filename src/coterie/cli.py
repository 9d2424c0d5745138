"""The command line. Heavy libraries are imported by the commands that need them, so that `--help` is quick."""

import io
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coterie import __version__
from coterie.errors import CoterieError, Refused
from coterie.names import normal
from coterie.printing import printable
from coterie.threads import wait_briefly

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.personal import PersonalClassifier, PersonalModel
    from coterie.recipe import Recipe


def _normal(given: Any) -> Any:
    """Names as they are known, however the keyboard or another machine has put accents on letters."""
    if given is None:
        return None
    return normal(given) if isinstance(given, str) else [normal(name) for name in given]


app = typer.Typer(
    name="coterie",
    help="Train personal models together without sharing data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

TRUST = "COTERIE_TRUST_REMOTE_CODE"  # see coterie.models.architecture
STOPPING_S = 15.0  # seconds for what is being stopped
RESUMABLE = "stopped. What was done until the last checkpoint is kept: the same command with --resume goes on."
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipe, e.g. method.rounds=5. Repeatable.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the run (splits of the data have their own: data.seed).")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; default: a new one under runs/.")]
Run = Annotated[Path, typer.Argument(help="The folder of a run, or of one client in it.", show_default=False)]

Clients = Annotated[
    list[str] | None, typer.Option("--client", metavar="ID", callback=_normal, help="A client of the run. Repeatable; default: all.")
]
Client = Annotated[str | None, typer.Option("--client", metavar="ID", callback=_normal, help="A client of the run.")]
Base = Annotated[str | None, typer.Option("--base", metavar="BASE", help="Where the base model is now, if not where the run found it.")]


def _trust(said: bool) -> bool:
    """Let bases bring code, in this process and those that it starts."""
    if said:
        os.environ[TRUST] = "1"
    return said


Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", callback=_trust, help="Run code that a base brings along, which may do anything that you may."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, or with the latest of this recipe under runs/.")]

Changed = Annotated[
    bool,
    typer.Option("--resume-changed", help="Like --resume, though base, data or clients have changed, or metrics were lost: you mean it."),
]


def _version(show: bool) -> None:
    if show:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (`coterie recipes`) or a YAML file.")],
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    resume_changed: Changed = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record a few steps of the second round: a trace for PyTorch's tools.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take: clients, tokens, parameters, bytes, time and memory.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Run a recipe: train, score, and keep every client's personal model."""
    with _stopping("stopped." if dry_run else RESUMABLE):
        loaded = _load(recipe, set_, seed)  # first: what is refused needs nothing of the rest
        if dry_run:
            _foretell(loaded)
            return
        from rich.console import Console

        from coterie import evaluation
        from coterie import run as runs
        from coterie.profiling import Profile
        from coterie.reports.terminal import Terminal, profiled

        folder = out or _folder(loaded.name, resume or resume_changed)
        console, trace = Console(), Profile(folder / "profile" / "trace.json.gz" if profile else None)
        with Terminal(console, len(loaded.compare_with) + 1) as terminal:
            results = runs.run(loaded, folder, resume=resume, changed=resume_changed, reporter=terminal, profile=trace)
        _show(console, evaluation.rows(results), loaded.name, loaded.method["name"])
        if profile:
            profiled(console, trace, elsewhere=loaded.engine == "flower")
        console.print(
            f"Everything is in {folder}: open {folder}/report.html, or `tensorboard --logdir {folder}`.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _foretell(recipe: "Recipe") -> None:
    """Print what a recipe would take, a line for each of its methods; nothing is written."""
    from rich.console import Console

    from coterie.estimate import estimate
    from coterie.places import OnThisMachine
    from coterie.reports.terminal import foretold

    rows = [recipe.with_method(name) for name in recipe.compare_with] + [recipe]
    for index, row in enumerate(rows):
        prepared = OnThisMachine().prepare(row)
        foretold(Console(), prepared, estimate(prepared), first=index == 0)
    print("Estimates of this machine as busy as it is now, from a few steps.\nNothing was written.")


@app.command()
def compare(
    methods: Annotated[list[str], typer.Argument(help="Methods (`coterie methods`).")],
    recipe: Annotated[str, typer.Option("--recipe", help="A shipped recipe or a YAML file: the data, base and budget of all rows.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per method, with consecutive seeds.")] = 3,
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    resume_changed: Changed = False,
    trust_remote_code: Trust = False,
) -> None:
    """One table: methods on the same data, base and budget, mean and deviation over seeds."""
    with _stopping():
        loaded = _load(recipe, set_, seed)
        from rich.console import Console

        from coterie import run as runs
        from coterie.reports.terminal import Terminal

        folder = out or _folder(f"compare-{loaded.name}", resume or resume_changed)
        console = Console()
        with Terminal(console, len(set(methods)) * seeds) as terminal:
            comparison = runs.compare(methods, loaded, folder, seeds=seeds, resume=resume, changed=resume_changed, reporter=terminal)
        _show(console, comparison["rows"], f"{loaded.name}, {seeds} seed{'s' * (seeds > 1)}", loaded.method["name"])
        console.print(f"Everything is in {folder}; open {folder}/report.html.", markup=False, highlight=False, soft_wrap=True)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A table, figure or theorem, e.g. comigs/table2; without it, all that there are.")
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="small: the embedded base, two cores; paper: the paper's bases and sizes.")
    ] = "small",
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Runs per cell; default: as many as the paper has.")] = None,
    columns: Annotated[str, typer.Option("--columns", metavar="A,B", help="Only these columns.")] = "",
    rows: Annotated[str, typer.Option("--rows", metavar="A,B", help="Only these rows.")] = "",
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the paper's runs; default: runs/reproduce-PAPER-SCALE.")] = None,
    resume_changed: Changed = False,
    trust_remote_code: Trust = False,
) -> None:
    """A table or figure of a paper: measured beside published, and which of its statements hold. Runs made before are used again."""
    with _stopping():
        from rich.console import Console

        from coterie import reproductions
        from coterie.theory import THEOREMS

        console = Console()
        if name is None:
            for known in reproductions.names():
                print(f"{known:<21} {reproductions.load(known).title}")
            for known in THEOREMS:
                print(f"{known:<21} a theorem, as an experiment with checked claims")
            return
        if name not in reproductions.names() and name not in THEOREMS:
            raise Refused(f"{name}: there is no such table, figure or theorem", "Without a name, `coterie reproduce` lists all.")
        if scale not in reproductions.SCALES:
            raise Refused(f"--scale {scale}: there is no such scale", f"Choose among: {', '.join(reproductions.SCALES)}.")
        folder = out or Path("runs") / f"reproduce-{name.partition('/')[0]}-{scale}"
        if name in THEOREMS:
            if seeds or columns or rows or set_ or scale != "small":
                raise Refused(f"{name} is a theorem: it has no scales, seeds, columns, rows or recipes", "Leave those options out.")
            from coterie.reports import theorem

            stem = folder / name.replace("/", "-")
            theorem.show(console, THEOREMS[name](0), stem)
            console.print(f"The picture is in {stem}.html.", markup=False, highlight=False, soft_wrap=True)
            return
        from coterie import reproduce as reproducing
        from coterie.reports.reproduction import notes, said, terminal
        from coterie.reports.terminal import Terminal, verdicts

        job = reproducing.Job(name, scale, folder, seeds, _parts(columns), _parts(rows), set_ or (), resume_changed)
        with Terminal(console, job.most) as reporter:
            found = reproducing.reproduce(job, reporter)
        changed = f", with {', '.join(found['overrides'])}" if found["overrides"] else ""
        heading = f"\n{found['title']}, scale {scale}, seeds {found['seeds']}{changed}"
        console.print(heading, style="bold", markup=False, highlight=False)
        for table in terminal(found):
            console.print(table)
        if found["statements"]:
            console.print("what the paper says", style="italic")
            verdicts(console, said(found))
        for note in notes(found):
            console.print(f"- {note}", markup=False, highlight=False)
        stem = folder / name.replace("/", "-")
        console.print(f"Everything is in {folder}: open {stem}.html, or read {stem}.md.", markup=False, highlight=False, soft_wrap=True)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


@app.command("methods")
def list_methods() -> None:
    """The methods, one line each, with where they come from."""
    from coterie.methods import METHODS

    _list({name: entry.paper for name, entry in METHODS.items()})


@app.command("recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="A shipped recipe, whose YAML is printed.", show_default=False)] = None,
) -> None:
    """The shipped recipes, one line each; or the YAML of one, to start from: coterie recipes quickstart > mine.yaml."""
    from coterie import recipes

    if name is not None:
        with _stopping("stopped."):
            print(recipes.find(name).read_text(encoding="utf-8"), end="")
        return
    found = {name: recipes.read(recipes.find(name)) for name in recipes.names()}
    _list({n: f"{s.get('description', '')}" + (f" [{s['paper']}]" if s.get("paper") else "") for n, s in found.items()})


def _list(items: Mapping[str, str]) -> None:
    """Print names and what they are, within 80 columns: what is longer goes on below."""
    from textwrap import wrap

    margin = max(map(len, items)) + 2
    for name, text in items.items():
        lines = wrap(text, 80 - margin, break_on_hyphens=False) or [""]
        print(f"{name:<{margin}}{lines[0]}".rstrip())
        for line in lines[1:]:
            print(" " * margin + line)


@app.command()
def adapt(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", help='The client\'s images, or texts (.txt, or .jsonl with "text"): a folder or a file.')],
    client: Annotated[
        str | None, typer.Option("--client", metavar="ID", callback=_normal, help="Of the new client; default: that of --data.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A new folder; default: clients/ID of the run.")] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Personalise a language model: train specialist and router, or a LoRA, on this text.")
    ] = False,
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, help="With --train, at most; default: as many as a client of the run does.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Give a client that the run has never seen a personal model; its data need no labels, and never leave it."""
    with _stopping("stopped; nothing is kept."):
        from coterie import adapt as adapting
        from coterie.personal import PersonalClassifier
        from coterie.reports import adapted as told

        if iterations is not None and not train:
            raise Refused("--iterations are of --train", "Give both, or neither.")
        training = adapting.Training(iterations, lambda line: print(f"  {line}", flush=True)) if train else None
        found = adapting.adapt(run, data, client, out, training=training)
        about, classifies = found.model.about, isinstance(found.model, PersonalClassifier)
        if about.round < found.rounds:
            print(f"The run has done {about.round} of {found.rounds} rounds: what follows is of what it knows by then.")
        if classifies:
            print(f"{printable(about.client)}: {found.samples:,} sample{'s' * (found.samples != 1)}, labels neither needed nor read.")
        for expert in sorted(found.experts, key=lambda m: -found.scores[m]) if found.scores else found.experts:
            print(f"  expert {expert}" + (f": {found.scores[expert]:.1%} of the scores" if found.scores else ""))
        if rest := [score for m, score in enumerate(found.scores) if m not in found.experts]:
            print(f"  not sent: {len(rest)} others, {sum(rest):.1%} of the scores")
        if not found.experts and classifies:
            print("  the model that everybody gets")
        if not classifies:
            for sentence in told.sentences(printable(about.client), found.personalised):
                print(sentence)
        sent = f"{found.up:,} bytes (its scores)" if found.up else "nothing"
        once = f"; and before, as everybody does, {found.once:,} of the common expert" if found.once else ""
        print(f"It sent {sent} and got {found.down:,} bytes{once}.")
        given = f"--data {shlex.quote(str(data))}" if classifies else '--text "What you would write"'
        print(f"Its model is in {found.folder}. To use it:\n  coterie predict {shlex.quote(str(found.folder))} {given}")


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.", show_default=False)],
    client: Clients = None,
    windows: Annotated[int, typer.Option("--windows", min=2, help="Training windows, and as many test windows, of each client.")] = 100,
    words: Annotated[int, typer.Option("--words", min=1, help="Rare words of each client.")] = 20,
    top: Annotated[int, typer.Option("--top", min=1, max=20, help="Suggestions that a rare word may be among.")] = 3,
    secure: Annotated[bool, typer.Option("--secure", help="As if the server saw sums alone, as under secure aggregation.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is chosen by chance.")] = 0,
) -> None:
    """Measure how much of a client's text the shared part of a run gives away, to the server and to another client.

    Canaries and what the server sees of each client are there for runs with a section `audit` in their recipe, e.g.
    `coterie run quickstart --set 'audit={}'`; without it, membership and rare words are measured. Nothing leaves this machine.
    """
    with _stopping("stopped; nothing is written."):
        from coterie.audit import Settings  # first: what is refused needs nothing of the rest
        from coterie.audit import audit as auditing

        settings = Settings(tuple(dict.fromkeys(client or ())), windows, words, top, secure, seed)
        found = auditing(run, settings, lambda text: print(f"  {text} ...", flush=True))
        from rich.console import Console

        from coterie.reports import audit as told

        console = Console()
        console.print(f"\n{told.about(found)}: what the shared part gives away", style="bold", markup=False, highlight=False)
        for table in told.terminal(found):
            console.print(table)
        for sentence in told.sentences(found):
            console.print(f"- {sentence}", markup=False, highlight=False)
        console.print(
            f"Intervals are of 95 %. All figures are in {run}/audit.json, a picture in {run}/report.html.", markup=False, highlight=False
        )


@app.command()
def predict(
    run: Run,
    text: Annotated[str | None, typer.Option("--text", help="What was written so far, e.g. 'In my free time, I like to'.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Of classifiers: a file or folder of images or texts.")] = None,
    client: Clients = None,
    top: Annotated[int, typer.Option("--top", min=1, max=20, help="How many words.")] = 3,
    base: Base = None,
    trust_remote_code: Trust = False,
) -> None:
    """What each client's model says, side by side: the next words of a text, or of what class images or texts are."""
    with _stopping():
        from rich.console import Console

        from coterie.models.text import TextShape
        from coterie.personal import ManyModels, terminal

        if (text is None) == (data is None):
            raise Refused("predict needs either --text or --data", "Give one of them: texts by --text, images or files of texts by --data.")
        models, classifiers = _personal(run, client, base)
        if models:
            if text is None:
                raise Refused(f"{run} holds language models, which classify nothing", "Give --text instead of --data.")
            terminal.show(Console(), models, ManyModels(models).next_words(text, top), text)
            return
        from coterie.personal.samples import as_samples

        shape = next(iter(classifiers.values())).shape
        if data is None and not isinstance(shape, TextShape):
            raise Refused(f"{run} holds classifiers of images", "Give --data instead of --text.")
        samples = as_samples(data or text, shape)
        terminal.show_classes(Console(), samples.names, {i: model.predict(samples) for i, model in classifiers.items()})


@app.command()
def generate(
    run: Run,
    text: Annotated[str, typer.Option("--text", help="What is to be continued.")],
    client: Client = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many tokens at most.")] = 40,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the choice of tokens.")] = 0,
    base: Base = None,
    trust_remote_code: Trust = False,
) -> None:
    """Continue a text by one client's model."""
    with _stopping():
        import torch

        from coterie.personal import PersonalModel, folder_of

        model = PersonalModel.load(folder_of(run, client), base)
        torch.manual_seed(seed)
        chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
        print(printable(model.generate(text, max_new_tokens=tokens, **chosen), lines=True))


@app.command()
def serve(
    run: Run,
    client: Clients = None,
    port: Annotated[int, typer.Option("--port", min=1024, max=65535, help="Of the page, which only this machine can open.")] = 7860,
    base: Base = None,
    trust_remote_code: Trust = False,
) -> None:
    """A local page like a phone's keyboard: type, and see each client's suggestions; or what its classifier says (extra `serve`)."""
    with _stopping("stopped."):
        from coterie.personal import keyboard, sorter

        models, classifiers = _personal(run, client, base)
        with keyboard.served(models, port) if models else sorter.served(classifiers, port) as address:
            print(f"Open {address} (only this machine can). Ctrl-C stops it.", flush=True)
            threading.Event().wait()


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    client: Client = None,
    format: Annotated[Literal["peft"], typer.Option("--format", help="peft: an adapter that PeftModel.from_pretrained loads.")] = "peft",
    expert: Annotated[str | None, typer.Option("--expert", help="G, G2, S1 ...; default: the first generalist, or the only one.")] = None,
    base: Base = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write one expert and the attention of a client's model in a form that other programs load."""
    with _stopping():
        from coterie.personal import peft

        left_out = peft.export(run, client, out, expert, base)
        print(f"The adapter is in {out}; {out}/README.md says how to load it.")
        for sentence in left_out:
            print(f"  {printable(sentence)}")


Server = Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server listens.")]
Authority = Annotated[Path | None, typer.Option("--ca", help="The certificate of the server's authority (ca.crt).")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without encryption and keys: only for trying things out.")]
Home = Annotated[Path | None, typer.Option("--home", help="Folder for everything that is kept.")]


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where they go; of those that are there, none is made again.", show_default=False)],
    host: Annotated[list[str] | None, typer.Option("--host", help="By which devices reach the server. Repeatable.")] = None,
    client: Clients = None,
) -> None:
    """Make a certificate for a server and a key for each client's device (extra `flower`)."""
    with _stopping("stopped."):
        from coterie import keys as making

        making.make(folder, host or [], client or [])
        print(f"The server needs {folder}; a device {folder}/{making.CA} and its own {folder}/{making.CLIENTS}/ID, and nothing else of it.")
        for id in client or ():
            if (path := making.private(folder, id)).name != id:
                print(f"  {printable(id)}: {path}")


@app.command()
def server(
    keys: Annotated[Path | None, typer.Option("--keys", help="The folder that `coterie keys` made.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0: all of this machine's.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="For devices.")] = 9500,
    runs_port: Annotated[
        int | None, typer.Option("--runs-port", min=1, max=65535, help="For `coterie submit`, on this machine only; default: the next one.")
    ] = None,
    largest: Annotated[int, typer.Option("--largest", min=1, metavar="MIB", help="What a device may send at once, in MiB.")] = 256,
    home: Home = None,
    trust_remote_code: Trust = False,
    insecure: Insecure = False,
) -> None:
    """Start a server that devices connect to: Flower's SuperLink (extra `flower`). Runs are given to it by `coterie submit`."""
    with _stopping("stopped."):
        from coterie import deploy

        if (keys is None) != insecure:
            raise Refused("give either --keys or --insecure", "Keys are made by: coterie keys DIR --host HOST --client ID ...")
        folder = home or Path("coterie-server")
        with deploy.server(keys, folder, host, port, runs_port or port + 1, largest << 20) as serving:
            print(f"Devices come to {host}:{port}{' WITHOUT encryption and keys' if insecure else ''}. Its log is {folder}/{deploy.LOG}.")
            link = serving.runs
            print(f"Give it a run: coterie submit quickstart --server {link.address}{f' --ca {link.ca}' if link.ca else ' --insecure'}")
            print("Ctrl-C stops it.", flush=True)
            for line in serving.watch():
                print(line, flush=True)


@app.command()
def client(
    server: Server,
    id: Annotated[
        str | None, typer.Option("--client", metavar="ID", callback=_normal, help="Who this is; default: the only client of --data.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="This client's data: data.path or data.root of recipes, here.")] = None,
    base: Base = None,
    ca: Authority = None,
    key: Annotated[Path | None, typer.Option("--key", help="This device's private key (clients/ID of `coterie keys`).")] = None,
    home: Home = None,
    resident: Annotated[bool, typer.Option(help="Keep the base model loaded in a process between messages.")] = True,
    secure: Annotated[bool, typer.Option("--secure", help="Let nothing that was trained leave but by secure aggregation.")] = False,
    limits: Annotated[Path | None, typer.Option("--limits", help="What this device allows, whatever a run says: a YAML file.")] = None,
    trust_remote_code: Trust = False,
    insecure: Insecure = False,
) -> None:
    """Make this machine the device of a client: Flower's SuperNode, and a process that keeps the base model loaded (extra `flower`)."""
    with _stopping("stopped. What this client has learned is kept."):
        from coterie import apps, deploy
        from coterie.records import check_apart

        if (ca is None and key is None) != insecure:
            raise Refused("give --ca and --key, or --insecure alone", "They are made where the server is: coterie keys.")
        folder = home or apps.default_home()
        if data is not None:
            check_apart(folder, data, "--home")
        node = deploy.Node(deploy.Link(server, ca), folder, id, data, base, key, resident, secure, limits)
        node.check()
        if limits is not None:
            from coterie import account
            from coterie import limits as allowed

            print(account.described(folder, allowed.read(limits)))
        if not node.link.answers("fleet"):
            print(f"Nobody answers at {server} yet; this device asks again and again.")
        with deploy.device(node) as supervisor:
            who = printable(id or "a client")
            print(f"The device of {who} asks {server} for work. It keeps everything in {folder}. Ctrl-C stops it.", flush=True)
            for line in supervisor.watch():
                print(line, flush=True)


@app.command(hidden=True)
def resident(configuration: str) -> None:
    """The process of a device that keeps the base loaded; `coterie client` starts it."""
    with _stopping("stopped."):
        import json

        from coterie import apps
        from coterie.engines import resident as serving

        node = json.loads(configuration)
        device = apps.device(node)
        serving.serve(device.home, device.answer, lambda: print("ready", flush=True))


@app.command()
def submit(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a YAML file.")],
    server: Server,
    set_: Set = None,
    seed: Seed = None,
    out: Annotated[str, typer.Option("--out", help="Folder of the run, on the server's machine; default: a new one.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out from its last checkpoint.")] = False,
    resume_changed: Changed = False,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Start when so many have come.")] = 2,
    ca: Authority = None,
    home: Home = None,
    insecure: Insecure = False,
) -> None:
    """Give a server a run, and show what happens; `flwr run` does the same (extra `flower`)."""
    with _stopping("left. The run goes on where the server is."):
        from coterie import deploy

        if (ca is None) != insecure:
            raise Refused("give either --ca or --insecure", "ca.crt is among the server's keys.")
        if (resume or resume_changed) and not out:
            raise Refused("--resume needs the run's folder", "Give its --out, as it was on the server's machine.")
        loaded = _load(recipe, set_, seed)
        folder = out or str(_folder(loaded.name, False))
        config = {"recipe": loaded.model_dump_json(), "out": folder, "resume": resume, "changed": resume_changed, "clients": clients}
        deploy.submit(deploy.Link(server, ca), home or Path("coterie-server"), config, lambda line: print(line, flush=True))


@app.command("deploy")
def deploy_(
    demo: Annotated[bool, typer.Option("--demo", help="A server and devices on this machine, encrypted and with keys.")] = False,
    recipe: Annotated[str, typer.Option("--recipe", help="A shipped recipe or a YAML file.")] = "quickstart",
    clients: Annotated[int | None, typer.Option("--clients", min=1, help="Devices; default: all clients of the recipe's data.")] = None,
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    trust_remote_code: Trust = False,
) -> None:
    """Try it all on this machine: a real server, real devices and a run on them; nothing is left running (extra `flower`)."""
    with _stopping("stopped; nothing is left running."):
        if not demo:
            raise Refused("only the demonstration is one command", "coterie deploy --demo; for real machines see docs/deploy.md.")
        from coterie import deploy, modality

        loaded = _load(recipe, set_, seed)
        folder = out or _folder(f"deploy-{loaded.name}", False)
        if (folder / "recipe.yaml").exists():
            raise Refused(f"{folder} already holds a run", "Choose another --out.")
        ids = list(modality.load(loaded).federation.everyone)[:clients]
        deploy.demo(loaded, ids, folder, lambda line: print(line, flush=True))
        print(f"The server's side is in {folder}: open {folder}/report.html. Each device keeps its own: {folder}/devices/ID.")


def _personal(run: Path, clients: list[str] | None, base: str | None) -> tuple[dict[str, "PersonalModel"], dict[str, "PersonalClassifier"]]:
    """The language models of a run, and its classifiers: it has one kind."""
    from coterie import personal

    models = personal.load_all(run, clients, base=base)
    language = {i: model for i, model in models.items() if isinstance(model, personal.PersonalModel)}
    return language, {i: model for i, model in models.items() if isinstance(model, personal.PersonalClassifier)}


def _load(recipe: str, overrides: list[str] | None, seed: int | None) -> "Recipe":
    from coterie import recipe as recipes

    return recipes.load(recipe, [*(overrides or ()), *((f"seed={seed}",) if seed is not None else ())])


def _folder(name: str, resume: bool) -> Path:
    """A new folder under runs/, or the latest one of that name."""
    if not resume:
        return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    found = sorted(Path("runs").glob(f"{name}-*-*"))
    if not found:
        raise Refused(f"there is no run of {name} under runs/ to resume", "Name its folder by --out, or start it without --resume.")
    return found[-1]


def _show(console: "Console", rows: Sequence[Mapping[str, Any]], title: str, own: str) -> None:
    from coterie.evaluation import comparability, direction, metric_of
    from coterie.methods import METHODS
    from coterie.reports.terminal import tables
    from coterie.reports.verdict import verdict

    *beside, scores = tables(rows, {name: entry.title for name, entry in METHODS.items()}, console.width)
    for table in beside:
        console.print(table)
    for note in comparability(rows, own):
        console.print(f"- {note}", markup=False, highlight=False)
    console.print(f"\n{printable(title)}", style="bold", markup=False, highlight=False)
    console.print(scores)
    scored = "Each client's model right after its last local iteration; synced: after one more synchronisation."
    if rows[0].get("groups"):
        scored = "Clients that never took part, with the model that the server gives them."
    console.print(f"{direction(metric_of(rows[0])).capitalize()}, best in bold. {scored}", highlight=False)
    if said := verdict(rows, own):
        console.print(f"\n{said}", markup=False, highlight=False)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


def _stop_at_signals() -> None:
    """Have SIGINT and SIGTERM stop the command: once, for what is being stopped must not be left half done by another one.

    Where it has not ended after `STOPPING_S`, a signal stops it again.
    """
    stopped = -STOPPING_S

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if (now := time.monotonic()) - stopped >= STOPPING_S:
            stopped = now
            raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(number, stop)


@contextmanager
def _stopping(note: str = RESUMABLE) -> Iterator[None]:
    """Turn errors into one message and an exit code, and signals into a stop, of which `note` says what is left."""
    _stop_at_signals()
    try:
        yield
    except CoterieError as error:
        print(f"coterie: {printable(str(error), lines=True)}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:  # whoever read what is printed has gone
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"coterie: {printable(f'{where}{error.strerror or error}', lines=True)}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as stop:
        for number in (signal.SIGINT, signal.SIGTERM):  # nothing is left to be stopped, and Python on its way out would die of another one
            signal.signal(number, signal.SIG_IGN)
        print(f"coterie: {note}", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    wait_briefly()
    app()
