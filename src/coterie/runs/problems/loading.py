"""Load and check the base and the data of a recipe, or their shapes alone on a server."""

import torch

from coterie.core import devices
from coterie.core.errors import ModelError, RecipeError
from coterie.data.chats.fields import ChatFields
from coterie.data.federation import Federation
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.section import Section
from coterie.models.architecture import tokenizer
from coterie.models.backbone import Backbone
from coterie.runs.problems.base_texts import fitted_federation
from coterie.runs.problems.classification import Classification, _common, _trained_here
from coterie.runs.problems.language import Language, load_backbone, pick_dtype
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import ClassifierSection, LanguageSection, TextClassifierSection


def pick_device(device: str) -> str:
    """`auto`: this machine's accelerator where there is one.

    Raises:
        RecipeError: The device asked for is not here.
    """
    if device == "auto":
        return devices.accelerator() or "cpu"
    if not devices.is_available(device):
        allowed = " or ".join(["auto", *devices.here()])
        raise RecipeError(
            "recipe", [f"model.device: {device} is not available here; use {allowed}"]
        )
    return device


def load(recipe: Recipe) -> LearningProblem:
    """Return the base and the data of a recipe.

    Raises:
        Refused: The base or the data cannot be used.
    """
    device = pick_device(recipe.model.device)
    match recipe.model, recipe.data:
        case ClassifierSection() as section, Images() as data:
            federation = data.load(order_seed=recipe.seed)
            shape = section.shape(data.shape, data.classes)
            common = _common(
                section.common,
                section.common_shape(data.shape, data.classes),
                federation,
                data,
                device,
            )
            return Classification(
                shape, common, section, torch.device(device), federation, data.names
            )
        case TextClassifierSection() as section, LabelledTexts() as data:
            federation = data.load(tokenizer(section.base), section.length, order_seed=recipe.seed)
            common = _common(
                section.common, section.common_shape(data.classes), federation, data, device
            )
            return Classification(
                section.shape(data.classes),
                common,
                section,
                torch.device(device),
                federation,
                data.names,
            )
        case LanguageSection() as section, Section() as data:
            backbone = load_backbone(
                section.base, pick_dtype(section.dtype, device), device, section.quantise
            )
            if section.context > backbone.context_limit:
                problem = (
                    f"model.context: {section.context} tokens, but {section.base} allows "
                    f"{backbone.context_limit}"
                )
                raise ModelError(problem, f"Set model.context to at most {backbone.context_limit}.")
            federation = data.load(backbone.tokenizer, section.context, order_seed=recipe.seed)
            return language(section, backbone, data, fitted_federation(federation, backbone))
    raise AssertionError("the recipe checked that data and model fit")


def language(
    section: LanguageSection, backbone: Backbone, data: Section, federation: Federation
) -> Language:
    """Return language models of clients whose data are read as a section says."""
    if not isinstance(data, ChatFields):
        return Language(section, backbone, federation, control_tokens=data.control_tokens)
    return Language(
        section, backbone, federation, data.chat_template, data.content, data.control_tokens
    )


def distant(recipe: Recipe, federation: Federation) -> LearningProblem:
    """Return what a server knows of the base and the data of a recipe: shapes, from configurations,
    and who the clients are. No weights of a base.

    A common expert is everybody's, and so the server's too: from a file that the recipe names, or
    trained on the recipe's public examples.

    Args:
        recipe: Resolved.
        federation: The clients, whose data are on their devices.

    Raises:
        Refused: The configuration of the base, the common expert or the public examples will not
            do.
    """
    match recipe.model, recipe.data:
        case ClassifierSection() as section, Images() as data:
            shape, normalisation = (
                section.shape(data.shape, data.classes),
                section.common_shape(data.shape, data.classes),
            )
            public = (
                data.load(order_seed=recipe.seed) if _trained_here(section.common) else federation
            )
            return Classification(
                shape,
                _common(section.common, normalisation, public, data, "cpu"),
                section,
                torch.device("cpu"),
                federation,
                data.names,
            )
        case TextClassifierSection() as section, LabelledTexts() as data:
            wide = _trained_here(section.common)
            public = (
                data.load(tokenizer(section.base), section.length, order_seed=recipe.seed)
                if wide
                else federation
            )
            common = _common(
                section.common, section.common_shape(data.classes), public, data, "cpu"
            )
            return Classification(
                section.shape(data.classes),
                common,
                section,
                torch.device("cpu"),
                federation,
                data.names,
            )
        case LanguageSection() as section, Section():
            return Language(section, Backbone.outlined(section.base), federation)
    raise AssertionError("the recipe checked that data and model fit")
