"""All formats by name, and the choice of their options."""

from coterie.core.errors import Refused
from coterie.core.extras import require
from coterie.export.executorch import ExecuTorch
from coterie.export.format import Format, Options
from coterie.export.gguf import Gguf
from coterie.export.mixtral import Mixtral
from coterie.export.onnx import Onnx
from coterie.export.peft import Peft
from coterie.export.web import Web

_ALL = (Peft(), Mixtral(), Gguf(), Onnx(), Web(), ExecuTorch())
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}


def chosen(
    name: str,
    part: str | None,
    precision: str | None,
    expert: str | None,
    base_precision: str | None,
    chat: bool,
) -> tuple[Format, Options]:
    """Return a format and its options, with the format's default for each option that is None.

    Raises:
        Refused: There is no such format, a package is missing, or the format lacks a part, a
            precision or --chat.
    """
    if name not in FORMATS:
        raise Refused(
            f"--format {name}: unknown",
            "; ".join(f"{known}: {format.about}" for known, format in FORMATS.items()) + ".",
        )
    format = FORMATS[name]
    if format.packages:
        require(f"--format {name}", format.extra, *format.packages)
    if expert is not None and part is None and "generalist" in format.parts:
        part = "generalist"
    for option, value, known in (
        ("--part", part, format.parts),
        ("--precision", precision, format.precisions),
        ("--base-precision", base_precision, format.base_precisions),
    ):
        if value is not None and value not in known:
            remedy = f"It has: {', '.join(known)}." if known else f"Leave {option} out."
            raise Refused(f"--format {name} has no {option} {value}", remedy)
    if chat and not format.chats:
        with_chats = ", ".join(known for known, other in FORMATS.items() if other.chats)
        raise Refused(
            f"--format {name} has no --chat", f"Leave it out, or use --format {with_chats}."
        )
    options = Options(
        part or format.parts[0],
        precision or format.precisions[0],
        expert,
        base_precision or next(iter(format.base_precisions), ""),
        chat,
    )
    if expert is not None and options.part != "generalist":
        raise Refused(
            f"--expert {expert} is for an export of one expert",
            "Use --format peft --part generalist, or leave --expert out.",
        )
    return format, options
