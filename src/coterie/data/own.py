"""Kinds of data of one's own: `data.kind: my_package.my_file:MySection`, a class of texts, images
or labelled texts in any module.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import (
    BaseModel,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
)

from coterie.core.own import imported, is_own
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.section import Section

BASES = (Section, Images, LabelledTexts)


def kind_of(section: BaseModel) -> str:
    """Return what a recipe names a section's class by."""
    return str(
        getattr(section, "kind", None) or f"{type(section).__module__}:{type(section).__qualname__}"
    )


def validated(value: Any, shipped: ValidatorFunctionWrapHandler) -> Any:
    """Return the section of a mapping: of a class of one's own where `kind` names one, otherwise
    one that comes with coterie.

    Raises:
        ValueError: `kind` names no such class.
        pydantic.ValidationError: A field is wrong.
    """
    if isinstance(value, BASES) and "kind" not in type(value).model_fields:
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not is_own(kind):
        return shipped(value)
    try:
        found = imported(str(kind))
    except ImportError as error:
        raise ValueError(f"kind {kind!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, BASES)):
        bases = ", ".join(base.__name__ for base in BASES)
        raise ValueError(f"kind {kind!r} is no class of coterie.data's {bases}")
    return found.model_validate({name: given for name, given in value.items() if name != "kind"})


def written(
    section: BaseModel, shipped: SerializerFunctionWrapHandler, info: SerializationInfo
) -> Any:
    """Return the mapping of a section, with its `kind`."""
    if "kind" in type(section).model_fields:
        return shipped(section)
    return {"kind": kind_of(section)} | section.model_dump(mode=info.mode)
