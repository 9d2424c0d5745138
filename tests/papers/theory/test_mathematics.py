"""Mathematics as one types it in a terminal becomes MathML."""

import re

import pytest

from theorems.mathematics import plain, typeset


def math(text: str) -> str:
    """The MathML of a formula, without what says how large its fences are, and with signs that a
    keyboard has.
    """
    shown = re.sub(r' stretchy="false"', "", typeset(f"${text}$"))
    return shown.replace("\u2212", "-").replace("\u2217", "*").replace("\u2032", "'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A^-1", "<msup><mi>A</mi><mrow><mo>-</mo><mn>1</mn></mrow></msup>"),
        ("T^-1/2", "<msup><mi>T</mi><mrow><mo>-</mo><mn>1</mn><mo>/</mo><mn>2</mn></mrow></msup>"),
        ("x^(2k)", "<msup><mi>x</mi><mrow><mrow><mn>2</mn><mi>k</mi></mrow></mrow></msup>"),
        ("Theta*", "<msup><mi>Θ</mi><mrow><mo>*</mo></mrow></msup>"),
        (
            "w*_j'",
            "<msubsup><mi>w</mi><mrow><msup><mi>j</mi><mrow><mo>'</mo></mrow></msup></mrow><mrow><mo>*</mo></mrow></msubsup>",
        ),
        ("f_valid", "<msub><mi>f</mi><mrow><mi>valid</mi></mrow></msub>"),
        ("f_ij", "<msub><mi>f</mi><mrow><mrow><mi>i</mi><mi>j</mi></mrow></mrow></msub>"),
        (
            "||g_i||",
            "<mrow><mo>‖</mo><msub><mi>g</mi><mrow><mi>i</mi></mrow></msub><mo>‖</mo></mrow>",
        ),
        (
            "<a, b> > 0",
            "<mrow><mo>⟨</mo><mi>a</mi><mo>,</mo><mi>b</mi><mo>⟩</mo></mrow><mo>&gt;</mo><mn>0</mn>",
        ),
        ("a < b", "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"),
        ("sqrt(m / d)", "<msqrt><mi>m</mi><mo>/</mo><mi>d</mi></msqrt>"),
        ("sqrt 3 L", "<msqrt><mn>3</mn></msqrt><mi>L</mi>"),
        ("1e4", "<msup><mn>10</mn><mrow><mn>4</mn></mrow></msup>"),
    ],
)
def test_what_one_types_is_typeset(text: str, expected: str) -> None:
    assert math(text) == f"<math>{expected}</math>"


def test_text_is_escaped_and_powers_of_ten_are_mathematics_everywhere() -> None:
    shown = typeset("<b> at 3.1e-14 & $a$")
    assert shown.startswith("&lt;b&gt; at <math><mrow><mn>3.1</mn><mo>·</mo><msup><mn>10</mn>")
    assert shown.endswith(" &amp; <math><mi>a</mi></math>")
    assert "<" not in re.sub("</?m[a-z]*[^>]*>", "", typeset("$<b>$"))


def test_a_terminal_shows_what_was_typed() -> None:
    assert plain({"claims": ("at $T = 1$", 2, None)}) == {"claims": ["at T = 1", 2, None]}


@pytest.mark.parametrize("wrong", ["(a", "a)", "a^", "||a"])
def test_a_formula_that_is_not_whole_is_an_error(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"ends too early|too many"):
        typeset(f"${wrong}$")
