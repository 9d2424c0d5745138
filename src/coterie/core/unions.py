"""Sections of a recipe of several kinds."""

from typing import Any, get_args

from pydantic import BaseModel, Discriminator


def by(field: str, *sections: type[BaseModel]) -> Discriminator:
    """Return the discriminator of a union of sections, tagged with the only value of a field in
    each. Without the field it is the first.
    """
    kinds = [str(get_args(section.model_fields[field].annotation)[0]) for section in sections]

    def kind(section: Any) -> str:
        if isinstance(section, dict):
            return str(section.get(field, kinds[0]))
        return str(getattr(section, field, None))

    *others, last = map(repr, kinds)
    problem = f"{field} should be {', '.join(others)} or {last}"
    return Discriminator(kind, custom_error_type=field, custom_error_message=problem)
