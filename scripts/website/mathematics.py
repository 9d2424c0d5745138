"""Formulas as MathML, which browsers typeset by themselves: no script, no font, no network."""

import re

from latex2mathml.converter import convert

CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^\$\$(.+?)\$\$$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"\$([^$\n]+)\$")
OPEN = re.compile(r"</?math[^>]*>")


def typeset(text: str) -> str:
    """Return a page with its `$...$` and `$$...$$` as MathML, except for what is code."""
    return "".join(
        part if k % 2 else INLINE.sub(_inline, BLOCK.sub(_block, part))
        for k, part in enumerate(CODE.split(text))
    )


def _block(found: re.Match[str]) -> str:
    """Return a formula on lines of its own, which scroll where the screen is narrow."""
    return f'\n<div class="formula">{_mathml(found[1], "block")}</div>\n'


def _inline(found: re.Match[str]) -> str:
    """Return a formula within a line: a line that begins with `<math` would be a paragraph."""
    return f"<span>{_mathml(found[1], 'inline')}</span>"


def _mathml(source: str, display: str) -> str:
    """Return MathML in one line, without characters that Markdown would read."""
    inner = OPEN.sub("", convert(" ".join(source.split())))
    inner = inner.replace("*", "&#x2217;").replace("_", "&#x5F;").replace("`", "&#x60;")
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML" display="{display}">{inner}</math>'
