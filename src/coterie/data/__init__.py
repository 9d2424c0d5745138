"""Texts and images as federations: clients with train, valid and test splits of their own.

`data.kind` names a section of this package; or a user's, as `my_package.my_file:MySection`, a class
of texts, images or labelled texts in any module; or an entry point of the group `coterie.data`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    Discriminator,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from coterie.core.importing import imported, installed, is_own, own_name
from coterie.data.by_client import Table
from coterie.data.corpora import AgNews, Multilingual, Stdlib, Topics
from coterie.data.folders import Folders
from coterie.data.hub import Hub, HubClients
from coterie.data.images import Cifar10, Cifar100, Digits, Emnist, Images, Mnist
from coterie.data.labelled import Clinc150, DBpedia14, LabelledTexts, YahooAnswers
from coterie.data.section import Section, Source
from coterie.data.synthetic import Synthetic, Team

GROUP = "coterie.data"  # of the entry points
BASES = (Section, Images, LabelledTexts)


def kind_of(section: BaseModel) -> str:
    """Return the name of a section's class in recipes."""
    return str(getattr(section, "kind", None) or own_name(type(section)))


def _validated(value: Any, shipped: ValidatorFunctionWrapHandler) -> Any:
    """Return the section of a mapping, of the class that `kind` names: shipped, installed or the
    user's. Raises ValueError if there is no such class, pydantic.ValidationError if a field is
    wrong.
    """
    if isinstance(value, BASES) and "kind" not in type(value).model_fields:
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not is_own(kind):
        try:
            return shipped(value)
        except ValidationError as error:
            if error.errors()[0]["type"] != "union_tag_invalid" or kind not in installed(GROUP):
                raise
        kind = installed(GROUP)[str(kind)].value
    try:
        section = imported(str(kind))
    except ImportError as error:
        raise ValueError(f"kind {kind!r} cannot be imported: {error}") from None
    if not (isinstance(section, type) and issubclass(section, BASES)):
        bases = ", ".join(base.__name__ for base in BASES)
        raise ValueError(f"kind {kind!r} is not a subclass of coterie.data's {bases}")
    try:
        return section.model_validate({key: field for key, field in value.items() if key != "kind"})
    except ValidationError as error:
        raise _located(error, str(kind)) from None


def _written(
    section: BaseModel, shipped: SerializerFunctionWrapHandler, info: SerializationInfo
) -> Any:
    if "kind" in type(section).model_fields:
        return shipped(section)
    return {"kind": kind_of(section)} | section.model_dump(mode=info.mode)


def _located(error: ValidationError, kind: str) -> ValidationError:
    """Return an error whose locations begin with the kind, as those of shipped sections do."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError(e["type"], "{message}", {"message": e["msg"]}),
            loc=(kind, *e["loc"]),
            input=e["input"],
        )
        for e in error.errors()
    ]
    return ValidationError.from_exception_data(error.title, details)


_Texts = Stdlib | AgNews | Multilingual | Topics | Folders | Hub | HubClients | Table
_Labelled = Digits | Cifar100 | Cifar10 | Mnist | Emnist | Clinc150 | DBpedia14 | YahooAnswers
Data = Annotated[
    _Texts | Synthetic | Team | _Labelled,
    Discriminator("kind"),
    WrapValidator(_validated),
    WrapSerializer(_written),
]

__all__ = ["AgNews", "Cifar10", "Cifar100", "Clinc150", "DBpedia14", "Data", "Digits", "Emnist"]
__all__ += ["Folders", "Hub", "HubClients", "Images", "LabelledTexts", "Mnist", "Multilingual"]
__all__ += ["Section", "Source", "Stdlib", "Synthetic", "Table", "Team", "Topics", "YahooAnswers"]
__all__ += ["kind_of"]
