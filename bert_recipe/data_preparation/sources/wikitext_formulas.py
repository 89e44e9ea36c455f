"""Converts short LaTeX formulas to text: x_i, sin(n + 1)/2, ∑ a_i. Sentences without their formulas
read badly.
"""

import re

from bert_recipe.data_preparation.sources.wikipedia_names import words

MAX_FORMULA = 60  # characters; a longer one is not part of a sentence


def pairs(text: str) -> dict[str, str]:
    tokens = text.split()
    return dict(zip(tokens[::2], tokens[1::2], strict=True))


# Commands that only change the appearance.
LOOK = re.compile(
    r"\\(?:(?:text|textrm|textit|mbox|mathrm|mathit|mathbf|mathbb|mathcal|mathsf|boldsymbol"
    r"|operatorname|rm|bf|it|left|right|big|Big|displaystyle|textstyle|quad|qquad|limits)\b\s*"
    r"|[,;:! ])"
)
SIGNS = pairs(
    "times × cdot · div ÷ pm ± le ≤ leq ≤ ge ≥ geq ≥ ll ≪ gg ≫ ne ≠ neq ≠ approx ≈ equiv ≡ sim ~ "
    "propto ∝ infty ∞ ldots ... cdots ... dots ... dotsc ... dotsb ... sum ∑ prod ∏ int ∫ partial "
    "∂ nabla ∇ prime ′ circ ∘ star * ast * to → rightarrow → leftrightarrow ↔ Rightarrow ⇒ mapsto "
    "↦ forall ∀ exists ∃ neg ¬ land ∧ lor ∨ in ∈ notin ∉ subset ⊂ subseteq ⊆ cup ∪ cap ∩ emptyset ∅"
)
WORDS = words(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi "
    "psi omega sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min lim "
    "sup inf det dim ker gcd mod"
)
COMBINING = {
    "bar": "\u0304",
    "overline": "\u0304",
    "hat": "\u0302",
    "widehat": "\u0302",
    "vec": "\u20d7",
    "tilde": "\u0303",
    "dot": "\u0307",
}

ACCENT = re.compile(rf"\\({'|'.join(COMBINING)})\b\s*(?:\{{(\\?\w+)\}}|(\\[A-Za-z]+|\w))")
DEGREES = re.compile(r"\^(?:\\circ|\{\\circ\})")
ROOT = re.compile(r"\\sqrt\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
EXPONENT = re.compile(r"\^\{([^{}]+[-+*/ ][^{}]*)\}")
SCRIPT = re.compile(r"([_^])\{([^{}]*)\}")
ONE_TERM = re.compile(r"[\\√]?\w+|\([^()]*\)")
COMMAND = re.compile(r"\\([A-Za-z]+)(\s*)")


def short_formula(formula: str) -> str:
    """`formula` as text; empty if it is too long or has a command without a text form."""
    if len(formula) > 4 * MAX_FORMULA:
        return ""
    text = LOOK.sub("", formula)
    text = DEGREES.sub("°", text)
    text = ACCENT.sub(lambda accent: (accent[2] or accent[3]) + COMBINING[accent[1]], text)
    text = EXPONENT.sub(r"^(\1)", text)
    text = SCRIPT.sub(r"\1\2", text)
    text = ROOT.sub(lambda root: "√" + one_term(root[1]), text)
    text = FRACTION.sub(
        lambda f: one_term(f[1] or f[3] or "") + "/" + one_term(f[2] or f[4] or ""), text
    )
    text = COMMAND.sub(command_text, text)
    text = re.sub(r"[{}]", "", text).strip(" ~")
    return "" if re.search(r"[\\&|]", text) or len(text) > MAX_FORMULA else text


def one_term(formula: str) -> str:
    return formula if ONE_TERM.fullmatch(formula) else f"({formula})"


def command_text(command: re.Match[str]) -> str:
    """The sign for a command, such as "≤" for \\leq, or its word, such as "sin", with spaces where
    it would touch others; a backslash for an unknown command.
    """
    name = command[1].removeprefix("var")
    spaces = command[2]
    if name in SIGNS:
        return SIGNS[name] + spaces
    if name.lower() not in WORDS:
        return "\\"
    formula = command.string
    before = formula[max(command.start() - 1, 0) : command.start()]
    after = formula[command.end() : command.end() + 1]
    word = name
    if before.isalnum() or before == "}":
        word = f" {word}"
    if spaces:
        return word + spaces
    if after.isalnum() or after == "\\":
        word = f"{word} "
    return word
