"""Words and phrases that documents, docstrings, comments and messages do not use, and what to write instead."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import Violation, tracked_files
from tests.architecture.test_tracked_files import text_of

CHECKED = re.compile(
    r"(?:hybridflow|recipes|docs|trainer_configs|benchmarks(?!/results))/|[^/]+\.(?:md|toml|yml)$|Makefile"
)
_COUNTED = r"(?:loss|losses|numbers?|samples?|responses|tokens|rows|seconds|times|lines?|columns?|calls?|one file)"
_UNITS = r"(?:token|prompt|response|step|second|minute|epoch|device|rank|node|row|group|sample|process|call|command)"
_STEMS = (
    r"(?:author|character|custom|factor|final|general|initial|local|material|maxim|minim|normal|optim|organ|parallel|"
    r"penal|quant|random|real|recogn|serial|special|summar|synchron|token|util|visual)"
)

BANNED: dict[str, str] = {
    rf"\b{_COUNTED} an? {_UNITS}\b": "per: 'one loss per token', 'tokens per second'",
    r"(?<!there )\b(?:is|are) no (?!longer|more|less|better|worse|other)": "'is not a ...', or what it must be",
    r'(?<=""")(?:Of|What) ': "a docstring that begins with a noun or a verb: what the thing is or does",
    r"\b(?:is|are) to be\b": "must be",
    r"\b(?:is|are) without effect\b": "has no effect",
    r"\bbesides?\b": "next to, in addition to, other than",
    r"\banew\b": "again, from scratch",
    r"\bworked out\b": "computed",
    r"\bcomes? to (?!a halt)": "reaches, becomes",
    r"\btold\b": "reported, given",
    r"\b(?:up|down)stairs\b": "in a higher or lower layer",
    r"\bforeknown\b": "precomputed",
    r"\b(?:nursery|begets?)\b": "fork server",
    r"\b(?-i:Judges?)\b": "reward model",
    r"\bre-?reading\b": "retokenization",
    r"\breconciliation\b": "rollout correction",
    r"\bend to end\b": "concatenated",
    r"\breturns? at once\b": "immediately",
    r"\b(?:is|are) gone\b": "has ended, no longer exists",
    r"\d %(?=[\s.,;:)])": "40%, without a space",
    r"\b(?:goes|go|went|going) on\b": "continues",
    r"\blet(?:s|ting)? (?:go|pass)\b": "releases, accepts",
    r"\bwhat is to\b": "what must",
    r"\bthat of the one\b": "the first one's",
    rf"\b\w*{_STEMS}is(?:e|ed|es|er|ing|ation)\b": "American spelling: -ize",
    r"\b(?:behaviour|colour|neighbour|favour|honour|centre|labelled|modelled|learnt)": "American spelling",
}
"""A regular expression for each phrase, in any case, and what to write instead."""

_PATTERNS = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in BANNED.items()}
_NAMES = re.compile(r"""`[^`]*`|(["'])[\w-]+\1|aria-labelledby""")
"""Names of things that exist are no part of the language: code in backticks, and single words in quotes."""


def violations(path: str, text: str) -> Iterator[Violation]:
    """Each banned phrase of a file, with its line."""
    for number, line in enumerate(text.splitlines(), start=1):
        prose = _NAMES.sub("NAME", line)
        for pattern, instead in _PATTERNS.items():
            if match := pattern.search(prose):
                yield Violation("language", f"{path}:{number}", f"'{match[0]}': write {instead}")


def test_no_text_uses_a_banned_phrase():
    found = [each for path in tracked_files() if CHECKED.match(path) for each in violations(path, text_of(path))]
    assert not found, "\n".join(f"{violation.subject}: {violation.found}" for violation in found)


def test_every_table_of_a_page_has_a_header():
    pages = [path for path in tracked_files() if path.endswith(".md")]
    assert [path for path in pages if re.search(r"^\|[ |]+\n\|-", text_of(path), re.MULTILINE)] == []


def test_no_message_refers_to_a_page_that_is_not_installed():
    found = []
    for path in tracked_files():
        if path.startswith("hybridflow/") and path.endswith(".py"):
            tree = ast.parse(text_of(path))
            plain = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
            constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in plain]
            found += [path for node in constants if isinstance(node.value, str) and "docs/" in node.value]
    assert found == [], "say it in the message: the wheel has no docs/"


@pytest.mark.parametrize(
    "text",
    [
        "one loss a token",
        "roles is no table",
        '"""Of an adapter: its rank."""',
        "Beside it",
        "it goes on",
        "renormalised",
    ],
)
def test_each_of_these_is_found(text):
    assert list(violations("a.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "There is no GPU.",
        "It is no longer used.",
        "promised, exercises",
        'data = "labelled"',
        "`foreknown` is `precompute`",
    ],
)
def test_correct_sentences_pass(text):
    assert not list(violations("a.py", text))
