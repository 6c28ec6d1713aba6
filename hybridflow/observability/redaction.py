"""Secrets do not leave the process: the one place that knows what a secret looks like, and puts `***` in its place.

Whatever is written down or shown passes here: config.yaml, checkpoints, trackers, the report, log lines and errors.
"""

import os
import re
from collections.abc import Mapping

REDACTED = "***"

_KEY = r"(?:api|access|private|secret|auth)[_-]?key(?:[_-]id)?"
_NAMES = rf"(?:{_KEY}|secret|password|passwd|authorization|credentials?|cookie)"
_TOKEN = r"(?<!pad[_-])(?<!bos[_-])(?<!eos[_-])token"
_NAME = re.compile(rf"(?:^|[_-])(?:{_NAMES}|{_TOKEN})$", re.IGNORECASE)
_VARIABLE = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|ACCESS_KEY_ID)$", re.IGNORECASE)
_SHORTEST = 8
"""Characters of an environment variable's value; a shorter one would be found in half of all words."""

_USER = re.compile(r"(\w+://)[^/\s'\"@]+@")
_PARAMETER = re.compile(rf"([?&](?:[\w-]*[_-])?(?:{_NAMES}|token|key|sig|signature)=)[^&\s'\"#]+", re.IGNORECASE)
_SCHEME = r"(?:bearer|basic|token)\s+"
_PROSE = rf"(?!(?<!['\"])(?!{_SCHEME})(?-i:[a-z]{{1,7}})(?![^\s,.;]))"
"""Not a short lowercase word without quotes, such as the `use` of `no authorization: use ray`."""

_REFERENCE = r"(?!\$\{oc\.env:\w+\})"
"""Not the name of an environment variable that holds the secret."""

_HEADER = re.compile(
    rf"(authorization['\"]?\s*[:=]\s*['\"]?){_PROSE}(?:{_SCHEME})?+{_REFERENCE}(?:\$\{{[^}}]*\}}|[^'\",}}\s]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_OPEN_HEADERS = ("content-type", "accept", "user-agent")


def redacted_text(text: str) -> str:
    """A text without passwords and tokens of addresses, Authorization headers, and values of secret variables.

    Secret are environment variables with names such as WANDB_API_KEY, HF_TOKEN or DB_PASSWORD.
    """
    text = _USER.sub(rf"\1{REDACTED}@", text)
    for pattern in (_PARAMETER, _HEADER, _BEARER):
        text = pattern.sub(rf"\1{REDACTED}", text)
    for value in _secret_values():
        text = text.replace(value, REDACTED)
    return text


def redacted(value: object, name: str = "") -> object:
    """A nested configuration without secrets: values under secret names, and secret values."""
    if isinstance(value, Mapping):
        return {key: redacted(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    return REDACTED if value and _is_secret(name) else redacted_text(value)


def redacted_leaves(leaves: Mapping[str, object]) -> dict[str, object]:
    """The same for a flat configuration: values by dotted paths."""
    return {path: redacted(value, path) for path, value in leaves.items()}


def _is_secret(path: str) -> bool:
    *sections, name = path.split(".")
    return bool(_NAME.search(name)) or ("headers" in sections and name.lower() not in _OPEN_HEADERS)


def _secret_values() -> list[str]:
    found = {value for name, value in os.environ.items() if len(value) >= _SHORTEST and _VARIABLE.search(name)}
    return sorted(found, key=len, reverse=True)
