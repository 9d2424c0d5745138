"""Mathematics in sentences, as MathML, which browsers typeset by themselves: no script, no font and
no file from elsewhere.

It stands between two `$` and is written as one types it in a terminal,
`$||Theta_k - Theta*||_A <= (L - mu) / L$`, so that terminals and JSON show it as it is. That is why
it is not TeX.
"""

import re
from collections.abc import Mapping
from typing import Any

from coterie.reports.parts import escape

GREEK = dict(
    zip(
        (
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "zeta",
            "eta",
            "lambda",
            "mu",
            "rho",
            "sigma",
            "tau",
            "chi",
        ),
        "αβγδεζηλμρστχ",
        strict=True,
    )
) | {"Theta": "Θ", "Phi": "Φ", "Lambda": "Λ", "theta": "θ"}
UPRIGHT = ("valid", "train", "max", "min", "diag", "exp", "ln", "cos")
MINUS, STAR, PRIME = "\u2212", "\u2217", "\u2032"
OPERATORS = {"<=": "≤", ">=": "≥", "!=": "≠", "-": MINUS, "*": STAR, "..": "…", "grad": "∇"}
# the opening and closing fence as shown, by the opening one as typed
FENCES = {
    "(": ("(", ")"),
    "[": ("[", "]"),
    "{": ("", ""),
    "||": ("‖", "‖"),
    "|": ("|", "|"),
    "<": ("⟨", "⟩"),
}
CLOSING = {"(": ")", "[": "]", "{": "}", "||": "||", "|": "|", "<": ">"}
TOKEN = re.compile(
    r"\s*(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|[A-Za-z]+|<=|>=|!=|\|\||\.\.|<(?=\S)|<|\S)"
)
SMALL = re.compile(r"(?<![\w.])\d(?:\.\d+)?e[+-]\d+\b")  # 3.1e-14, anywhere


def plain(value: Any) -> Any:
    """Return text, or texts within a structure, for terminals and JSON: without `$` marks."""
    if isinstance(value, str):
        return value.replace("$", "")
    if isinstance(value, Mapping):
        return {key: plain(held) for key, held in value.items()}
    return [plain(held) for held in value] if isinstance(value, list | tuple) else value


def typeset(text: str) -> str:
    """Return text as HTML: mathematics as MathML, all else escaped."""
    parts = text.split("$")
    return "".join(_math(part) if k % 2 else _prose(part) for k, part in enumerate(parts))


def _prose(text: str) -> str:
    """Return escaped text, with powers of ten as mathematics."""
    shown, at = "", 0
    for number in SMALL.finditer(text):
        shown += escape(text[at : number.start()]) + _math(number[0])
        at = number.end()
    return shown + escape(text[at:])


def _math(source: str) -> str:
    return f"<math>{_Parser(source).all()}</math>"


class _Parser:
    """A parser that reads `source` from left to right, each atom with its scripts."""

    def __init__(self, source: str) -> None:
        self.source, self.at = source, 0

    def peek(self) -> str:
        """Return the next token; "" at the end."""
        match = TOKEN.match(self.source, self.at)
        return match[1] if match else ""

    def touches(self, token: str) -> bool:
        """Return whether a token comes next, without a space before it."""
        return self.source.startswith(token, self.at)

    def take(self) -> str:
        match = TOKEN.match(self.source, self.at)
        if not match:
            raise ValueError(f"{self.source!r} ends too early")
        self.at = match.end()
        return match[1]

    def all(self) -> str:
        return self.until("")

    def until(self, stop: str) -> str:
        shown = ""
        while (token := self.peek()) and not self._closes(token, stop):
            shown += self.scripted()
        return shown

    def _closes(self, token: str, stop: str) -> bool:
        """Return whether a token ends what is within fences: `>` only if it touches the text before
        it, as otherwise it compares.
        """
        return token == stop and (token != ">" or self.touches(">"))

    def scripted(self) -> str:
        """Return an atom with what is below and above it."""
        base, below, above = self.atom(), "", ""
        while True:
            if self.touches("*") and not above:
                self.take()
                above = _operator("*")
            elif self.touches("'"):
                self.take()
                above += _operator(PRIME)
            elif self.touches("_"):
                self.take()
                below = self.script()
            elif self.touches("^"):
                self.take()
                above += self.script()
            else:
                break
        return _with_scripts(base, below, above)

    def script(self) -> str:
        """Return a sign, and a number, a ratio of two, a name with its primes, or something in
        parentheses, which are not shown.
        """
        sign = _operator(self.take()) if self.peek() == "-" else ""
        token = self.peek()
        if token in ("(", "{"):
            self.take()
            inside = self.until(CLOSING[token])
            self.take()
            return f"<mrow>{sign}{inside}</mrow>"
        shown = self.atom()
        if self.touches("/") and token[0].isdigit():
            shown += _operator(self.take()) + self.atom()
        while self.touches("'"):
            self.take()
            shown = _with_scripts(shown, "", _operator(PRIME))
        return sign + shown

    def atom(self) -> str:
        token = self.take()
        if token == "sqrt":
            return f"<msqrt>{self.radicand()}</msqrt>"
        if token in FENCES and (token != "<" or not self.source[self.at : self.at + 1].isspace()):
            return self.fenced(token)
        if token[0].isdigit():
            return _number(token)
        if token in (")", "]", "}"):
            raise ValueError(f"{self.source!r} has a {token} too many")
        return _operator(token) if token in OPERATORS or not token.isalpha() else _name(token)

    def radicand(self) -> str:
        if self.peek() != "(":
            return self.scripted()
        self.take()
        inside = self.until(")")
        self.take()
        return inside

    def fenced(self, token: str) -> str:
        (opening, closing), inside = FENCES[token], self.until(CLOSING[token])
        self.take()
        return f"<mrow>{_fence(opening)}{inside}{_fence(closing)}</mrow>"


def _fence(sign: str) -> str:
    return f'<mo stretchy="false">{sign}</mo>' if sign else ""


def _operator(token: str) -> str:
    return f"<mo>{escape(OPERATORS.get(token, token))}</mo>"


def _number(token: str) -> str:
    digits, _, exponent = token.partition("e")
    if not exponent:
        return f"<mn>{digits}</mn>"
    if not float(digits):
        return "<mn>0</mn>"
    sign = _operator("-") if int(exponent) < 0 else ""
    power = f"<msup><mn>10</mn><mrow>{sign}<mn>{abs(int(exponent))}</mn></mrow></msup>"
    return power if digits == "1" else f"<mrow><mn>{digits}</mn><mo>·</mo>{power}</mrow>"


def _name(token: str) -> str:
    """Return a Greek letter, a word, or letters side by side."""
    if token in GREEK:
        return f"<mi>{GREEK[token]}</mi>"
    letters = (
        f"<mi>{token}</mi>"
        if token in UPRIGHT
        else "".join(f"<mi>{letter}</mi>" for letter in token)
    )
    return letters if token in UPRIGHT or len(token) == 1 else f"<mrow>{letters}</mrow>"


def _with_scripts(base: str, below: str, above: str) -> str:
    if below and above:
        return f"<msubsup>{base}<mrow>{below}</mrow><mrow>{above}</mrow></msubsup>"
    if below or above:
        kind = "msub" if below else "msup"
        return f"<{kind}>{base}<mrow>{below or above}</mrow></{kind}>"
    return base
