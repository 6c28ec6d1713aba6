r"""Finds final answers in texts (after `####`, in `\boxed{}`, or the last number) and compares them."""

import re

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_LAST_NUMBER = re.compile(rf"((?:(?<![\w.)])-)?(?:{_NUMBER}))")
_WHOLE_NUMBER = re.compile(rf"([-+]?)({_NUMBER})")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\?[$%]|\\\(|\\\)|\^\{?\\circ\}?")


def final_answer(text: str) -> str | None:
    r"""The final answer of a text: its last `#### ...`, else its last `\boxed{...}`, else its last number."""
    found = (hash_answer(text), boxed_answer(text), last_number(text))
    return next((answer for answer in found if answer is not None), None)


def expected_answer(answer: object) -> str:
    r"""The answer of a data row: the text after its `####` or in its `\boxed{}`, else all of it.

    A float without a fraction (145.0) is read as an integer.
    """
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    text = str(answer)
    return next((found for found in (hash_answer(text), boxed_answer(text)) if found is not None), text).strip()


def hash_answer(text: str) -> str | None:
    """GSM8K: the rest of the line after the last `####`; None if there is none, or nothing after it."""
    found = _HASHES.findall(text)
    return (found[-1].strip() or None) if found else None


def boxed_answer(text: str) -> str | None:
    r"""MATH: the content of the last `\boxed{...}`, with balanced braces; None without one that closes."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    depth, start = 0, boxes[-1].end()
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + 1 : index].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number in a text, as written."""
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None


def same_answer(found: str, expected: str) -> bool:
    """Whether two answers are equal after normalization; if a number is expected, words around it are ignored."""
    left, right = normalized(found), normalized(expected)
    if left == right:
        return True
    numbers = _LAST_NUMBER.findall(left)
    return _WHOLE_NUMBER.fullmatch(right) is not None and len(numbers) == 1 and normalized(numbers[0]) == right


def has_answer(text: str, expected: str) -> bool:
    """Whether the final answer of a text is the expected one."""
    found = final_answer(text)
    return found is not None and same_answer(found, expected)


def normalized(answer: str) -> str:
    """An answer without LaTeX markup, spaces and case; numbers without separators and redundant zeros."""
    text = _DROPPED.sub("", answer.strip())
    text = _FRACTION.sub(r"\1/\2", _WORDS.sub(r"\1", text))
    text = re.sub(r"\s+", "", text).rstrip(".").casefold()
    number = _WHOLE_NUMBER.fullmatch(text)
    return _plain_number(number[1], number[2]) if number else text


def _plain_number(sign: str, digits: str) -> str:
    whole, _, decimals = digits.replace(",", "").partition(".")
    plain = (whole.lstrip("0") or "0") + (f".{decimals.rstrip('0')}" if decimals.rstrip("0") else "")
    return f"-{plain}" if sign == "-" and plain != "0" else plain
