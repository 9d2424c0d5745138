"""Chat templates as text or in files."""

from pathlib import Path

from coterie.core.foreign import read_text


def template_text(value: str) -> str:
    """Return a template, given as Jinja or as the path of a file with it.

    Raises:
        ValueError: There is no such file, or it holds no template.
    """
    if is_template(value):
        return value
    path = Path(value).expanduser()
    try:
        template = read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a chat template ({error})") from None
    if not is_template(template):
        raise ValueError(f"{path} is no chat template: it has no Jinja in it")
    return template


def is_template(value: str) -> bool:
    """Whether a value is Jinja and not a path."""
    return "{%" in value or "{{" in value
