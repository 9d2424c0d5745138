"""The model card of a personal model, or of the shared part of a run."""

from dataclasses import dataclass

from coterie.core.metrics import direction
from coterie.core.result import MetricInfo, PrivacySpent
from coterie.core.version import __version__
from coterie.methods import METHODS
from coterie.models.architecture import EMBEDDED


@dataclass(frozen=True)
class Facts:
    """The facts that a card states; None if a fact is not known.

    Args:
        client: The client whose model it is; None for the shared part.
        base: The public name of the base: `embedded`, a Hub id, or the last part of a path.
        method: The name of the method.
        rounds: Rounds done.
        clients: Number of clients that trained together.
        size: The training data in words, e.g. "12,000 tokens".
        metric: The metric of the scores.
        before: The score of the base without any training, on test data.
        after: The score of the published model, on the same data.
        privacy: The privacy spent; None if no noise was added.
        language: Whether it is a language model.
        chats: Whether it was trained on conversations.
    """

    client: str | None
    base: str | None
    method: str
    rounds: int
    clients: int | None
    size: str | None
    metric: MetricInfo
    before: float | None
    after: float | None
    privacy: PrivacySpent | None
    language: bool = True
    chats: bool = False


def card(facts: Facts, repo: str) -> str:
    """Return the text of README.md, with the front matter that the Hub reads."""
    entry = METHODS[facts.method]
    of = "the shared part of a run" if facts.client is None else "one client's personal model"
    name = repo.rpartition("/")[2]
    rows = {
        "base": f"`{facts.base}`" if facts.base else "none: the whole network is here",
        "method": f"{entry.title} (`{facts.method}`), {facts.rounds} rounds; {entry.paper}",
        "clients that trained together": _number(facts.clients),
        "training data": facts.size or "not recorded",
        f"{facts.metric} before, without training": _number(facts.before, ".2f"),
        f"{facts.metric} after": _number(facts.after, ".2f"),
        "privacy spent": spent(facts.privacy),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""{_front_matter(facts)}
# {name}

{of[0].upper()}{of[1:]}, trained with [coterie](https://pypi.org/project/coterie/) {__version__}
without the clients' data leaving them.

| | |
| --- | --- |
{table}

Scores are on test data, {direction(facts.metric)}; {_scored_on(facts)}. {_privacy_note(facts)}

```
coterie pull {repo} --out {name}
{_commands(facts, name)}
```
{_TEMPLATE if facts.chats else ""}
The files are JSON, YAML and safetensors; `SHA256SUMS` has their checksums. Loading them runs no
code.
"""


def _front_matter(facts: Facts) -> str:
    """Return the metadata of a card, with the base if it is on the Hub."""
    lines = ["library_name: coterie", "tags:", "- personalization", "- federated-learning"]
    if facts.base and facts.base != EMBEDDED and "/" in facts.base:
        lines += [f"base_model: {facts.base}"]
    if facts.language:
        lines += ["pipeline_tag: text-generation"]
    return "\n".join(["---", *lines, "---"])


def _scored_on(facts: Facts) -> str:
    """Return the phrase that says on whose data the model was scored."""
    return "the mean over the clients" if facts.client is None else "this client's own"


def _privacy_note(facts: Facts) -> str:
    """Return sentences on what the model may reveal of its training data."""
    if facts.client is None:
        return (
            "No specialist or router of a client is in it. What its clients' texts had in common "
            "can be read out of it: `coterie audit` measures how much of a text it gives away."
        )
    return (
        "It was published by its owner's choice: its own experts were trained on the owner's data "
        "alone, and parts of these may be read out of it."
    )


_TEMPLATE = """
It was trained on conversations, and answers messages by the chat template of that training, which
`client.json` holds where it is not the base's own.
"""


def _commands(facts: Facts, name: str) -> str:
    """Return the commands that use the model."""
    if not facts.language:
        return f"coterie predict {name} --data FILES"
    options = '--chat --text "How are you?"' if facts.chats else '--text "The weather is"'
    lines = [f"coterie generate {name} {options}"]
    if facts.client is None:
        lines += [f"coterie adapt {name} --data MY_TEXTS --train --out mine"]
    return "\n".join(lines)


def spent(privacy: PrivacySpent | None) -> str:
    """Return the privacy that a model's training has spent, in words."""
    if privacy is None:
        return "no noise was added: the training gives no formal guarantee of privacy"
    epsilon = "infinite" if privacy.epsilon is None else f"{privacy.epsilon:.3g}"
    known = ", with noise from a known seed, which protects nobody" if privacy.experiment else ""
    return f"epsilon {epsilon} at delta {privacy.delta:g} ({privacy.where} noise{known})"


def _number(value: float | None, form: str = ",") -> str:
    """Return a formatted number, or "not recorded" for None."""
    return "not recorded" if value is None else format(value, form)
