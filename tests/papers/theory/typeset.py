"""What must be true of every theorem's page."""

import re
from html import unescape
from xml.etree import ElementTree

from theorems import Experiment
from theorems.page import experiment_page

KINDS = {"math", "mrow", "mi", "mn", "mo", "msub", "msup", "msubsup", "msqrt"}
ARGUMENTS = {"msub": 2, "msup": 2, "msubsup": 3}
RAW = re.compile(
    r"\$|\\[a-z]|\^|\|\||[A-Za-z]_[A-Za-z0-9{]|\b(?:sqrt|lambda|sigma|alpha|gamma|rho|eta|mu|grad)\b|\de[-+]\d"
)


def check_page(experiment: Experiment) -> str:
    """The page, after a look at its mathematics and its curves."""
    page = experiment_page(experiment).decode()
    shown = page[page.index("<body>") : page.index("<script>")]
    assert not re.search(r"(?:src|href)=|https?://", shown)
    formulae = re.findall("<math>.*?</math>", shown)
    assert formulae
    for formula in formulae:
        for element in ElementTree.fromstring(formula).iter():
            assert element.tag in KINDS
            assert len(element) == ARGUMENTS.get(element.tag, len(element)), formula
    words = unescape(re.sub(r"<math>.*?</math>|<title>.*?</title>|<[^>]*>", " ", shown))
    assert not RAW.findall(words), words
    curves = sum(len(panel.curves) for panel in experiment.panels)
    assert shown.count('class="line"') == 2 * curves  # with those of the legends
    assert all(
        d.count("L")
        for d in re.findall(r'class="line" d="([^"]*)" stroke="[^"]*" stroke-opacity', shown)
        if "H28" not in d
    )
    return page
