"""A recipe with all that it names loaded and checked, on this machine or seen from a server."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from coterie.aggregation.secure import FEWEST
from coterie.client.blueprint import Blueprint, Trainable
from coterie.client.client import Client
from coterie.client.outbound import Outbound
from coterie.client.site import ClientOfParts, Site
from coterie.client.state import kept_round, recall
from coterie.core.errors import DataError, RecipeError
from coterie.core.importing import require
from coterie.core.names import encoded
from coterie.core.protocol import ClientId, protects_examples
from coterie.core.tensors import Tensors, under
from coterie.data.canaries import PlantedCanaries, plant
from coterie.data.chats.fields import ChatFields
from coterie.data.federation import CENTRALIZED, Federation
from coterie.data.text_encoding import TextEncoder
from coterie.methods import METHODS, Method
from coterie.models import artifact
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.runs.problems import loading
from coterie.runs.problems.auto import resolved
from coterie.runs.problems.language import Language
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe


@dataclass
class Prepared:
    """A recipe with all that it names loaded and checked: nothing can be refused any more."""

    recipe: Recipe  # resolved
    method: Method
    problem: LearningProblem  # the base and the data
    site: Site  # what clients of this process need
    clients: tuple[ClientId, ...]  # those that train, in the order of the data
    planted: PlantedCanaries | None = None  # the canaries in the data
    threads: int | None = None  # of this process; None: as suits the model, or PyTorch's default
    at_once: int = 1  # clients that compute at once, with so many threads each

    @property
    def iterations(self) -> float:
        """The local iterations of a client in a round; with `local_epochs` their mean."""
        size, clients = self.recipe.training.batch_size, self.problem.federation.clients.values()
        return fmean(self.method.steps_of(data.train.windows, size) for data in clients)

    @property
    def blueprint(self) -> Blueprint:
        federation = self.problem.federation
        trainable = self.problem.trainable
        return Blueprint(
            trainable, self.site.layouts, self.recipe.seed, federation.clusters, federation.anchors
        )

    def keep(
        self, client: Client | ClientOfParts, tensors: Tensors, round: int, folder: Path
    ) -> None:
        """Write a client's personal model: the one that it kept, or its state. Raises SaveError."""
        if isinstance(client, ClientOfParts):
            return self._keep_parts(client, tensors, round, folder)
        client.bind()  # clients of one layout take turns in one model
        if (best_round := kept_round(client)) is None:
            client.load(self.method.loadable(client, tensors))
        else:
            recall(client)
            round = best_round
        recipe = self.recipe
        origin = artifact.Origin(recipe.method["name"], recipe.name, round, recipe.seed)
        self.problem.keep(folder, client, self.site.layouts[client.id], origin)
        return None

    def _keep_parts(
        self, client: ClientOfParts, tensors: Tensors, round: int, folder: Path
    ) -> None:
        """Write the models of parts with a weight, and how they are mixed. Raises SaveError."""
        tensors = self.method.loadable(client, tensors)
        weights = {name: weight for name, weight in client.weights.items() if weight}
        for name in client.weights:
            below = folder / encoded(name)
            if name not in weights or len(weights) == 1:
                shutil.rmtree(below, ignore_errors=True)  # of an earlier end of the run
            if name in weights:
                with client.part(name) as one:
                    to = below if len(weights) > 1 else folder
                    self.part(name).keep(one, under(name, tensors), round, to)
        if len(weights) > 1:
            recipe = self.recipe
            origin = artifact.Origin(recipe.method["name"], recipe.name, round, recipe.seed)
            artifact.save_mixture(folder, client.id, weights, origin)

    def part(self, name: str) -> "Prepared":
        """Return the same with one part of the method alone."""
        recipe = self.recipe.model_copy(update={"method": {"name": name}})
        method, site = self.method.methods[name], self.site.part(name)
        return replace(self, recipe=recipe, method=method, site=site)


def prepare(recipe: Recipe, loaded: LearningProblem | None = None) -> Prepared:
    """Load base and data, unless shared, and check that they fit the recipe. Raises Refused."""
    recipe, _ = resolved(recipe)
    problem = loading.load(recipe) if loaded is None else loaded
    planted = _plant(recipe, problem)
    return replace(assembled(recipe, problem), planted=planted)


def share_data(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes load the same data unchanged: audited runs plant canaries."""
    alike = (one.model, one.data, one.seed) == (other.model, other.data, other.seed)
    return alike and one.audit is None and other.audit is None


def _plant(recipe: Recipe, problem: LearningProblem) -> PlantedCanaries | None:
    """Plant the canaries of a recipe, if any, in its clients' training text. Raises DataError."""
    if recipe.audit is None or not recipe.audit.canaries or not isinstance(problem, Language):
        return None
    if isinstance(recipe.data, ChatFields) and recipe.data.content == "chats":
        raise DataError(
            "audit.canaries: they are planted in texts only, not in conversations",
            "Set audit.canaries: 0; what members tell is measured all the same.",
        )
    tokenizer = problem.backbone.tokenizer
    texts = TextEncoder(tokenizer)
    tokens = set(range(min(len(tokenizer), problem.backbone.architecture.vocabulary)))
    vocabulary = sorted(tokens - set(tokenizer.all_special_ids))
    begin = texts.begin or texts.end
    problem.federation, canaries, references = plant(
        problem.federation, recipe.audit, recipe.seed, vocabulary, begin, texts.end
    )
    return PlantedCanaries(canaries, references)


def assembled(recipe: Recipe, problem: LearningProblem) -> Prepared:
    """Return a recipe with its base and data, checked to fit. Raises Refused."""
    method, federation = recipe.build_method(), problem.federation
    for module in method.packages:
        require(f"method.name: {recipe.method['name']}", module, module)
    data, clients = federation.everyone, tuple(federation.clients)
    layouts = _layouts(recipe, method, problem, clients)
    layouts |= dict.fromkeys(data.keys() - layouts.keys(), method.layout(0, problem.base))
    _check_presence(recipe, method, federation)
    training = recipe.training
    if method.centralized:
        data[CENTRALIZED] = federation.centralized()
        layouts[CENTRALIZED] = method.layout(0, problem.base)
        size, micro_batch = training.batch_size, training.micro_batch or training.batch_size
        batch = {"batch_size": size * len(clients), "micro_batch": micro_batch}
        training = training.model_copy(update=batch)
    _check_privacy(recipe, method, problem, layouts[clients[0]])
    fewest = _fewest(recipe, federation)
    _check_secure(recipe, method, fewest)
    leaving, rows = outbound(recipe, clients), (recipe.evaluate_rows, recipe.final_rows)
    iterations = method.total_iterations
    site = Site(problem.build, layouts, data, training, recipe.seed, iterations, leaving, rows)
    prepared = Prepared(recipe, method, problem, site, clients)
    method.check(replace(prepared.blueprint, fewest=fewest), clients, training)
    return prepared


def _fewest(recipe: Recipe, federation: Federation) -> int:
    """Return the least number of clients that take part in a round."""
    part, rounds = recipe.participation, {0, *filter(None, chain(*recipe.presence.values()))}
    if part.schedule != "all":
        turns = len(set((federation.clusters or {}).values()))
        rounds |= {part.every * turn for turn in range(turns)}
    last = max(recipe.build_method().rounds, 1)
    return min(len(recipe.active(federation, round)) for round in rounds if round < last)


def _layouts(
    recipe: Recipe, method: Method, problem: LearningProblem, clients: Sequence[ClientId]
) -> dict[ClientId, Layout]:
    """Return the adapter of each client. Raises RecipeError for impossible ones."""
    wrong = []
    for field in method.per_client:
        values = getattr(method, field)
        if isinstance(values, tuple) and len(values) != len(clients):
            expected = f"values for {len(clients)} clients ({', '.join(clients)})"
            wrong.append(f"method.{field}: {len(values)} {expected}")
    if wrong:
        raise RecipeError(f"recipe {recipe.name}", wrong)
    try:
        layouts = {i: method.layout(position, problem.base) for position, i in enumerate(clients)}
    except ValueError as error:
        raise RecipeError(f"recipe {recipe.name}", [f"method: {error}"]) from None
    for layout in dict.fromkeys(layout for of in layouts.values() for layout in of.models):
        problem.check(recipe.method["name"], layout)
    return layouts


def outbound(recipe: Recipe, clients: Sequence[ClientId], secret: bool = False) -> Outbound:
    """Return what happens to replies. Raises RecipeError for attackers that are no clients."""
    attackers = recipe.attack.attackers(clients) if recipe.attack else frozenset[ClientId]()
    return Outbound(recipe.seed, recipe.privacy, recipe.attack, attackers, secret)


def _beyond_sums(field: str, recipe: Recipe, method: Method) -> list[str]:
    if method.needs_only_mean:
        return []
    able = "fedavg, comigs-1g1s and ditto with aggregation rule mean, weighting uniform"
    why = f"{recipe.method['name']} {method.beyond_mean}"
    return [f"{field}: {why} (docs/privacy.md); possible with {able}"]


def _beyond_examples(recipe: Recipe, method: Method, model: Trainable) -> list[str]:
    """Return the problems of protecting single examples with a method and its model."""
    if not protects_examples(method):
        able = [name for name, entry in METHODS.items() if "by_examples" in vars(entry.method)]
        why = "shares values that gradients of single examples do not train"
        problem = f"privacy.unit: {recipe.method['name']} {why}"
        return [f"{problem}; possible with {', '.join(able)}"]
    if method.shared and isinstance(model, Classifier) and not model.separable:
        return [
            "privacy.unit: gradients of single examples need a language model or an image "
            "network whose norm is group or none"
        ]
    return []


def _check_privacy(
    recipe: Recipe, method: Method, problem: LearningProblem, layout: Layout
) -> None:
    """Refuse privacy settings that would not protect. Raises RecipeError."""
    if recipe.privacy is None:
        return
    model = problem.trainable(layout.models[0])
    if recipe.privacy.unit == "client":
        mistakes = _beyond_sums("privacy", recipe, method)
    else:
        mistakes = _beyond_examples(recipe, method, model)
    if sum(bool(part.shared) for part in method.methods.values()) > 1:
        mistakes.append("privacy: only one of the parts may send anything: each spends the budget")
    if isinstance(model, Classifier) and model.statistics is not None and model.buffers:
        mistakes.append(
            "privacy: running statistics travel with the network, and noise would break them; "
            "use model.norm group or local"
        )
    if mistakes:
        raise RecipeError(f"recipe {recipe.name}", mistakes)


def _check_secure(recipe: Recipe, method: Method, clients: int) -> None:
    """Refuse secure aggregation that is impossible or useless. Raises RecipeError."""
    if not recipe.secure:
        return
    mistakes = _beyond_sums("secure", recipe, method)
    if recipe.engine != "flower":
        mistakes.append(
            f"secure: engine {recipe.engine} has no secure aggregation; use engine: flower"
        )
    if recipe.privacy is not None and recipe.privacy.where == "central":
        mistakes.append(
            "secure: for privacy.where central the server has to see and clip each update; use "
            "where: local, or secure: false"
        )
    if recipe.quorum.otherwise == "wait":
        mistakes.append(
            "quorum.otherwise: with secure: true the few that are asked again would form "
            "a separate, small sum; use stop"
        )
    if clients < FEWEST:
        mistakes.append(
            f"secure: {clients} clients; a sum of fewer than {FEWEST} would reveal their updates"
        )
    if mistakes:
        raise RecipeError(f"recipe {recipe.name}", mistakes)


def _check_presence(recipe: Recipe, method: Method, federation: Federation) -> None:
    """Refuse clients that cannot take part, and methods that cannot serve them."""
    clients, name, part = tuple(federation.clients), recipe.method["name"], recipe.participation
    mistakes = []
    for i, (first, end) in recipe.presence.items():
        info = recipe.data.client_info(i) if federation.open else None
        if i not in clients and (info is None or info.group):
            mistakes.append(f"presence.{i}: unknown client; there are {', '.join(clients)}")
        if end is not None and end <= first:
            mistakes.append(
                f"presence.{i}: round {end}, the first without it, must come after round {first}"
            )
    if part.schedule != "all" and federation.clusters is None:
        mistakes.append(
            f"participation.schedule: {part.schedule} needs clusters, which these data do not "
            f"have; see data.partition"
        )
    if recipe.presence and not method.dynamic_membership:
        mistakes.append(
            f"presence: {name} needs its clients from the start to the end; cobo, comigs-1g1s, "
            f"ddome, fedavg and local do not"
        )
    if recipe.keep == "best" and (federation.unseen or recipe.training.stateless):
        whose = "training.stateless: clients that keep nothing between rounds are"
        if federation.unseen:
            whose = "data.unseen: clients that come when training is over are"
        mistakes.append(f"keep: best needs clients that keep a model; {whose} not; use keep: last")
    serves, stateless = method.serves_unseen_clients, recipe.training.stateless
    problem = f"{name} has no model for clients without one of their own; fedavg and ddome do"
    if federation.unseen and not serves:
        mistakes.append(f"data.unseen: {problem}")
    if stateless and (method.stateful or not serves):
        mistakes.append(f"training.stateless: {problem}")
    if mistakes:
        raise RecipeError(f"recipe {recipe.name}", mistakes)
