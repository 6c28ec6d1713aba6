"""The keys of the configuration, read from the dataclasses: types, defaults, documentation and nearest keys."""

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hybridflow.config.experiment import Experiment
from hybridflow.config.ranges import Range, range_of
from hybridflow.config.section import Section

AUTO = "auto"
"""The word for a number that hybridflow chooses."""

_WORDS: dict[object, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """A leaf of the configuration: its dotted path, type (also in words, with its range), default and documentation."""

    path: str
    type: Any
    type_words: str
    default: object
    doc: str


def keys(root: type = Experiment, prefix: str = "") -> Iterator[Key]:
    """All leaves, in order; dictionaries of sections are leaves themselves."""
    hints, docs = get_type_hints(root), field_docs(root)
    annotations = get_type_hints(root, include_extras=True)
    for field in fields(root):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        if isinstance(hint, type) and is_dataclass(hint):
            yield from keys(hint, f"{path}.")
        else:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            yield Key(path, hint, type_name(annotations[field.name]), default, docs.get(field.name, ""))


def find(path: str, root: object = Experiment) -> object | None:
    """The type at a dotted path; None if the schema has no such key."""
    name, _, rest = path.partition(".")
    if get_origin(root) is dict:
        value = get_args(root)[1]
        return value if not rest or value is Any else find(rest, value)
    if not is_dataclass(root):
        return None
    hint = get_type_hints(root).get(name)
    if hint is None:
        return None
    return find(rest, hint) if rest else hint


def check_range(path: str, value: object) -> None:
    """Raises `ConfigError` for a number, or one in a list, that is outside the range of the key."""
    allowed = _range(path)
    for item in value if isinstance(value, list) else [value]:
        if allowed is not None and isinstance(item, int | float) and not isinstance(item, bool):
            allowed.check(path, item)


def meant(path: str, value: object) -> tuple[str, object]:
    """The setting that a word or null stands for: `placement.kind` for `placement=split`, `environment.name` for
    `environment=null`, 0 for `trainer.devices=auto`."""
    if value is None or isinstance(value, str):
        section = find(path)
        if isinstance(section, type) and issubclass(section, Section) and section.word is not None:
            return f"{path}.{section.word}", value
        allowed = _range(path)
        if value == AUTO and allowed is not None and allowed.auto is not None:
            return path, allowed.auto
    return path, value


def nearest(path: str) -> str | None:
    """The known key most similar to an unknown one, or several joined by `or`: also those deeper in the unknown one's
    section with its last part, if the most similar one has another."""
    head, _, last = path.rpartition(".")
    found = _nearest(path)
    if found is None or not head or _last(found) == last:
        return found
    deeper = [key.path for key in keys() if key.path.startswith(f"{head}.") and _last(key.path) == last]
    return " or ".join([found, *deeper])


def _nearest(path: str) -> str | None:
    """The known key most similar to an unknown one: by initials (`lr`), in its section, by whole path, by the words in
    it, by the last part, or because its documentation mentions the last part."""
    head, _, last = path.rpartition(".")
    section = find(head) if head else Experiment
    nearby = sorted((key.path for key in keys()), key=lambda key: not key.startswith(f"{head}."))
    for key in nearby:
        if "".join(word[0] for word in _last(key).split("_")) == last:
            return key
    if not head and (same := [key for key in nearby if _last(key) == last]):
        return same[0]
    if is_dataclass(section):
        names = {field.name: f"{head}.{field.name}" if head else field.name for field in fields(section)}
        if close := difflib.get_close_matches(last, names, n=1, cutoff=0.6):
            return names[close[0]]
    if head and section is None and (close := difflib.get_close_matches(path, nearby, n=1, cutoff=0.75)):
        return close[0]
    if shared := _nearest_by_words(path, nearby):
        return shared
    by_last = {_last(key): key for key in reversed(nearby)}
    if similar := difflib.get_close_matches(last, by_last, n=1, cutoff=0.72):
        return by_last[similar[0]]
    documented = [key.path for key in keys() if key.path.startswith(f"{head}.") and last in _words(key.doc)]
    return documented[0] if head and documented else None


def _nearest_by_words(path: str, nearby: Sequence[str]) -> str | None:
    """The key that shares the most words with the path, in any order: `kl_coef` finds `algorithm.kl.coefficient`.

    A prefix counts as the word. The last parts must share a word, and the paths more than half of all words.
    """
    typed = _words(path)
    best, most = None, 0.55
    for key in nearby:
        if not _common(_words(_last(path)), _words(_last(key))):
            continue
        words = _words(key)
        share = 2 * _common(typed, words) / (len(typed) + len(words))
        if share > most:
            best, most = key, share
    return best


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def _common(some: set[str], others: set[str]) -> int:
    """Number of words in `some` that equal a word in `others`, or of which one is a prefix of the other."""
    return sum(any(_is_beginning(word, other) or _is_beginning(other, word) for other in others) for word in some)


def _is_beginning(short: str, word: str) -> bool:
    return word == short or (len(short) > 2 and word.startswith(short))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def words(path: str) -> str:
    """The type of a key in words, with its range: "a whole number of 1 or more"."""
    return type_name(_annotated(path) or find(path))


def _range(path: str) -> Range | None:
    """The range of the key, if it has one."""
    return range_of(_annotated(path))


def _annotated(path: str) -> object | None:
    """The type of a section's field with its range."""
    head, _, name = path.rpartition(".")
    section = find(head) if head else Experiment
    return get_type_hints(section, include_extras=True).get(name) if is_dataclass(section) else None


def names_in(path: str) -> list[str]:
    """The field names of a section; empty for anything else."""
    section = find(path)
    return [field.name for field in fields(section)] if isinstance(section, type) and is_dataclass(section) else []


def is_list(hint: object) -> bool:
    """Whether a key takes several values."""
    return get_origin(hint) is list


def is_text(hint: object) -> bool:
    """Whether a key takes text and nothing else but null."""
    return hint in (str, str | None)


def type_name(hint: object) -> str:
    """A type in words: `a number above 0 or null`, `one of: auto, cpu, cuda`."""
    if get_origin(hint) is Annotated:
        allowed, words = range_of(hint), type_name(get_args(hint)[0])
        if allowed is not None:
            words = words.replace("number", f"number {allowed.words}", 1).replace(" or null", ", or null")
        return words
    if isinstance(hint, UnionType):
        return " or ".join("null" if part is type(None) else type_name(part) for part in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of: " + ", ".join(member.name for member in hint)
    if get_origin(hint) is list:
        return f"a list, each {type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a table"
    if is_dataclass(hint):
        return "settings of its own: " + ", ".join(field.name for field in fields(hint))
    if hint is Any:
        return "any value"
    return _WORDS.get(hint, str(hint))


@cache
def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef), f"{section} is not a class"
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = str(following.value.value)
    return docs
