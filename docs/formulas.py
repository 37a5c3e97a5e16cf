r"""The formulas of the zoo's cards, which are plain text, as TeX.

A card writes `W1_jk ~ N(0, sigma^2 / F)` in an indented block, where two or more spaces separate formulas. Names of one
letter, Greek names and functions are symbols; all other words stay words.

>>> tex("W1_jk ~ N(0, sigma^2 / F)")
'W_{1,jk} \\sim \\mathcal{N}(0, \\sigma^{2} / F)'
"""

from __future__ import annotations

import re

GREEK = {"alpha", "beta", "gamma", "nu", "pi", "sigma", "tau"}
FUNCTIONS = {"cos", "exp", "log", "max", "sin", "sum", "tanh"}
# Functions and distributions without a TeX command of their own.
UPRIGHT = {
    "Dirichlet", "FRN", "Gamma", "HalfCauchy", "HalfNormal", "InverseGamma", "LN", "NegativeBinomial", "conv", "dense",
    "gelu", "logit", "pool", "relu", "softmax", "softplus",
}  # fmt: skip
SIGNS = {
    "~": r"\sim ",
    "|": r"\mid ",
    "<-": r"\leftarrow ",
    "<=": r"\le ",
    "...": r"\dots ",
    "..": r"\ldots ",
    "×": r"\times ",
    " . ": r" \cdot ",
    "*": r"\cdot ",
    "⟦": r"\sqrt{",
    "⟧": "}",
}
# What follows an underscore: (l+1), nc', k,g(n).
INDEX = r"_(?P<{}>\([^()]*\)|[A-Za-z0-9]+'?(?:\([a-z]\))?(?:,[a-z]\([a-z]\))?)"
TOKEN = re.compile(
    rf"""(?P<name>fan-in|[A-Za-z]+)(?P<digits>\d*)(?P<primes>'*)(?:{INDEX.format("index")})?
    |{INDEX.format("lonely")}
    |\^(?P<power>\([^()]*\)|-?[A-Za-z0-9]+)
    |`(?P<code>[^`]*)`
    |(?P<sign>\.\.\.|\.\.|<-|<=|\ \.\ |[~|*⟦⟧×])
    |(?P<other>.)""",
    re.VERBOSE,
)


def formulas(docstring: str) -> list[str]:
    """The formulas of the first indented block of a card, as they are written.

    Parameters
    ----------
    docstring : str
        The docstring of a model file.

    Returns
    -------
    list of str
    """
    found: list[str] = []
    for line in docstring.splitlines():
        if line.startswith("    "):
            # Columns of a card are aligned: two spaces may also stand inside of a formula, before its sign.
            found += re.split(r"(?<=[^\s,])\s{2,}(?!\s*[~=])", line.strip())
        elif found:
            break
    return [each.strip().rstrip(",") for each in found if each.strip()]


def tex(formula: str) -> str:
    """One formula as TeX.

    Parameters
    ----------
    formula : str
        A formula of a card.

    Returns
    -------
    str
    """
    parts: list[str] = []
    previous = ""
    # The letter between two sizes, as in "3 x 3", is a sign.
    formula = re.sub(r"(?<=[\dk]) x (?=[\dk])", " × ", formula)
    for token in TOKEN.finditer(_roots(formula)):
        if (name := token["name"]) is None:
            text = _sign(token)
        elif _is_word(token, previous):
            text = rf"\text{{{token[0]}}}"
        else:
            text = _symbol(token, name)
        parts.append(text)
        previous = token[0] if token[0].strip() else previous
    joined = "".join(parts)
    # Words that follow each other are one text, in which spaces count.
    while (merged := re.sub(r"\\text\{([^{}]*)\}(\s+)\\text\{", r"\\text{\1\2", joined)) != joined:
        joined = merged
    joined = re.sub(r"\\text\{([^{}]*)\}(?=\s)", r"\\text{\1 }", joined)
    joined = re.sub(r"(?<=[\w)}])\s+\\text\{(?=\w)", r"\\text{ ", joined)
    return re.sub(r"\s+", " ", joined).strip()


def block(docstring: str) -> str:
    """The formulas of a card as one display in TeX, a line for each.

    Parameters
    ----------
    docstring : str
        The docstring of a model file.

    Returns
    -------
    str
    """
    lines = " \\\\\n".join(tex(each) for each in formulas(docstring))
    return f"\\begin{{array}}{{l}}\n{lines}\n\\end{{array}}"


def _roots(formula: str) -> str:
    """The formula with the parentheses of each `sqrt(...)` marked, which may hold others."""
    while (start := formula.find("sqrt(")) >= 0:
        depth = 1
        end = start + 5
        while depth:
            depth += {"(": 1, ")": -1}.get(formula[end], 0)
            end += 1
        formula = f"{formula[:start]}⟦{formula[start + 5 : end - 1]}⟧{formula[end:]}"
    return formula


def _is_word(token: re.Match[str], previous: str) -> bool:
    name = token["name"]
    if name in GREEK | FUNCTIONS | UPRIGHT:
        return False
    # "a standard deviation", but "a_j", "a = ..." and "x_n . a".
    article = (
        name == "a" and token[0] == "a" and re.match(r" [a-z]{3,}", token.string[token.end() :]) is not None
    )
    return len(name) > 1 or (article and previous != "=")


def _symbol(token: re.Match[str], name: str) -> str:
    if name in GREEK | FUNCTIONS:
        text = rf"\{name}"
    elif name in UPRIGHT:
        text = rf"\operatorname{{{name}}}"
    else:
        text = r"\mathcal{N}" if name == "N" and token.string[token.end() :].startswith("(") else name
    text += token["primes"]
    index = token["index"] or ""
    # (l+1) loses its parentheses, g(n) keeps them.
    index = index[1:-1] if index.startswith("(") else index
    if indices := ",".join(filter(None, (token["digits"], index))):
        return f"{text}_{{{indices}}}"
    # A command ends at a space before a letter.
    following = token.string[token.end() :][:1]
    return f"{text} " if text.startswith("\\") and following.isalnum() else text


def _sign(token: re.Match[str]) -> str:
    if (index := token["lonely"]) is not None:
        return f"_{{{index}}}"
    if (power := token["power"]) is not None:
        return f"^{{{tex(power[1:-1]) if power.startswith('(') else power}}}"
    if (code := token["code"]) is not None:
        return rf"\texttt{{{code}}}"
    return SIGNS.get(token["sign"], token["other"] or "")
