"""The methods that people compare with, by what the data of a recipe are."""

from coterie.runs.recipes.recipe import Recipe

BOUNDS = ("local", "fedavg", "finetuned-fedavg")
LORAS = ("ditto", "apfl", "fedper", "fedsa-lora", "pfedmoe", "fedalt", "fedlease", "comigs-1g1s")
PERSONAL = ("ditto", "apfl", "fedper", "fedrep", "fedala", "fedfomo", "ifca", "cobo")
UNSEEN = ("common-expert", "fedavg", "fedprox", "fedmix", "ensemble", "ddome", "ddome-shared")


def rivals_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the sensible rows for a recipe, its own method last: of language models, of personal
    classifiers, or of classifiers for clients that are never seen in training.
    """
    if getattr(recipe.data, "unseen", None):
        rows: tuple[str, ...] = UNSEEN
    elif recipe.model.kind == "language":
        rows = (*BOUNDS, *LORAS, "interpolation")
    else:
        rows = (*BOUNDS, *PERSONAL, "interpolation")
    first = recipe.method["name"]
    return (*(name for name in rows if name != first), first)
