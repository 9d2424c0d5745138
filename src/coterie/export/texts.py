"""The models of a run's clients, with the texts by which they are folded and measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from coterie.core import names
from coterie.core.errors import CoterieError, Refused
from coterie.core.protocol import ClientId
from coterie.data.chats.splits import ChatSplit
from coterie.data.federation import ClientData
from coterie.data.folders import Folders
from coterie.data.section import Section
from coterie.data.splits import Split
from coterie.export.format import ClientModel
from coterie.models.artifact import model_folders
from coterie.models.backbone import Backbone
from coterie.personal import PersonalModel, clients_of, folder_of, load_all, read_about
from coterie.runs.folder import names as files
from coterie.runs.problems.own_text import own_text, section_of
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import LanguageSection


@dataclass(frozen=True)
class Source:
    """The models to export, and their texts."""

    run: Path  # a run's folder, or a client's folder
    client: ClientId | None = None  # None for the only client
    everyone: bool = False  # whether to export all clients of the run
    base: str | None = None  # path or Hub id of the base, if it has moved
    data: Path | None = None  # the client's own text, if the run's recipe does not name it

    def load(self) -> list[ClientModel]:
        """Load the models, all on one backbone, with the clients' validation and test texts, if
        available. Raises Refused if a client is missing, damaged or a classifier, or a base or text
        cannot be used.
        """
        if self.everyone and self.client is not None:
            raise Refused("--all and --client exclude each other", "Give one of them.")
        if self.everyone and self.data is not None:
            raise Refused("--data is the text of one client", "Give --client instead of --all.")
        ids: list[ClientId | None] = [*clients_of(self.run)] if self.everyone else [self.client]
        folders = [folder_of(self.run, id) for id in ids]
        abouts = [read_about(model_folders(folder)[0]) for folder in folders]
        bases = {self.base or about.base for about in abouts}
        bits = {about.quantise for about in abouts}
        problem = ""
        if len({about.chat_template for about in abouts}) > 1:
            problem = "different chat templates"
        elif len(bases) > 1 or len(bits) > 1:
            problem = f"different bases ({', '.join(sorted(bases))})"
        if problem:
            raise Refused(
                f"--all: the clients have {problem}", "Export them one by one, with --client."
            )
        backbone = Backbone.load(bases.pop(), quantised=bits.pop(), plain=True)
        clients = None if self.client is None else [self.client]
        loaded = load_all(self.run, clients, backbone=backbone)
        models = cast(list[PersonalModel], [*loaded.values()])
        for model in models:
            model.about = replace(model.about, base=self.base or model.about.base)
        recipe, absent = self._recipe(folders[0])
        data, absent = self._texts(models[0], recipe, absent)
        return [_with_text(model, data, absent) for model in models]

    def _recipe(self, folder: Path) -> tuple[Recipe | None, str]:
        """Return the recipe of the run, or None and the reason why there is none."""
        run = self.run if (self.run / files.RECIPE).is_file() else folder.parent.parent
        if not (run / files.RECIPE).is_file():
            return None, f"{run} has no {files.RECIPE}, which would name it"
        try:
            return recipes.resolve(run), ""
        except CoterieError as error:
            return None, error.problem

    def _texts(
        self, model: PersonalModel, recipe: Recipe | None, absent: str
    ) -> tuple[Mapping[ClientId, ClientData], str]:
        """Return the clients' data, and the reason if there are none."""
        about = model.about
        if self.data is not None:
            section = _section(model, recipe)
            client_data = own_text(
                section, model.tokenizer, about.context, about.seed, about.client, self.data
            )
            return {about.client: client_data}, ""
        if recipe is None:
            return {}, absent
        if not isinstance(recipe.model, LanguageSection) or not isinstance(recipe.data, Section):
            return {}, f"{recipe.name} is no recipe of language models"
        try:
            federation = recipe.data.load(
                model.tokenizer, recipe.model.context, order_seed=recipe.seed
            )
        except CoterieError as error:
            return {}, error.problem
        return federation.everyone, ""


def _section(model: PersonalModel, recipe: Recipe | None) -> Folders:
    """Return the settings to read a client's own files: those of the run."""
    if recipe is not None:
        return section_of(recipe.data)
    if model.about.content != "chats":
        return Folders()
    return Folders(content="chats", chat_template=model.about.chat_template)


def _with_text(
    model: PersonalModel, data: Mapping[ClientId, ClientData], absent: str
) -> ClientModel:
    client_data = data.get(names.normal(model.about.client))
    if client_data is None:
        return ClientModel(model, absent=absent or "it is no client of the recipe")
    valid, test = _apart(client_data.valid), _apart(client_data.test)
    return ClientModel(model, valid, test, train=client_data.train)


def _apart(split: Split) -> Split:
    """Return a split with one conversation in each row, since other programs have no masks."""
    return replace(split, packing=False) if isinstance(split, ChatSplit) else split
