"""Replaces secrets with `***` in everything that is written or shown.

That is config.yaml, checkpoints, trackers, the report, log lines and errors. Only this file knows what a secret looks
like.
"""

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

REDACTED = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = frozenset((
    "secret", "password", "passwd", "passphrase", "passcode", "pwd", "authorization", "credential", "cookie",
    "bearer", "apikey", "accesskey", "secretkey", "privatekey", "authkey", "apitoken", "accesstoken", "authtoken",
    "webhook", "jwt", "passkey",
))  # fmt: skip
_KEYS = frozenset((
    "api", "access", "private", "secret", "auth", "encryption", "signing", "ssh", "master", "account", "subscription",
    "license",
))  # fmt: skip
_OWNERS = frozenset((
    "db", "database", "user", "admin", "root", "login", "smtp", "mail", "ftp", "http", "proxy", "redis", "mysql",
    "postgres", "pg",
))  # fmt: skip
_HOSTS = frozenset(("github", "gh", "gitlab", "azure", "ado", "bitbucket"))
_VOCABULARY = frozenset((
    "pad", "bos", "eos", "unk", "sep", "cls", "mask", "stop", "start", "end", "image", "audio", "video", "special",
    "extra", "per", "max", "min", "num", "first", "last", "next", "new", "think", "prompt", "response",
))  # fmt: skip
_GRANTS = frozenset((
    "api", "access", "auth", "hf", "hub", "bearer", "refresh", "session", "security", "secret", "private", "bot",
    "github", "gitlab", "user", "id",
))  # fmt: skip
_FORMS = frozenset((
    "int", "integer", "str", "string", "text", "value", "val", "raw", "plain", "json", "bytes", "hex", "encoded",
))  # fmt: skip
"""Last words of a name that describe the form of the secret: `password_int`."""

_LOGINS = frozenset(("basic", "http", "proxy", "digest"))
_WRITTEN_TOGETHER = ("password", "passwd", "passphrase", "apikey")
"""Ends of words such as `PGPASSWORD`."""

_PLACES = frozenset(("url", "uri", "address", "addr", "endpoint", "link", "path"))
"""Last words of the names of webhook addresses; whoever knows such an address can use it."""

_SHORTEST = 8
"""Minimum length of an environment variable's value to be redacted; shorter ones occur in ordinary words."""

_PORT = r"(?!\d{1,5}(?:[/?#'\",;)\]}\s]|$))"
_USER = re.compile(rf"(\b\w+://)(?:[^\s/@'\":\[]*:{_PORT}[^\s@]{{1,512}}@(?:[^\s/?#@'\"]*@)*|[^/\s'\"@]+@)")
_BARE_USER = re.compile(
    r"(?<![\w/.@:+-])(?!mailto:|acct:|sips?:|xmpp:)[\w.+-]+:[^\s/@:'\",]+(?=@[\w-]+(?:\.[\w-]+|:\d{1,5}(?!\w)))"
)
"""The `user:password` of `user:password@host:3128`."""

_HOOK = re.compile(
    r"(://(?:hooks\.[^/\s'\"]+|[^\s'\"?#]{0,256}?/(?:web)?hooks?\w*)/|://[^/\s'\"]+/bot(?=\d+:))[^\s'\"?#)\]}>,]+"
)
"""The path of a webhook's address, and the token of `/bot123:TOKEN/`."""

_PARAMETER = re.compile(r"(?<=[?&])([\w-]+)=[^&\s'\"#]+")
_SCHEME = r"(?:bearer|basic|digest|token)\s+"
_PROSE = rf"(?!(?<=:\s)(?!{_SCHEME})(?-i:[a-z]{{1,7}})\s+\w)"
"""Not a short lowercase word before another, such as `use` in `no authorization: use ray`."""

_REFERENCE = r"(?!\$\{oc\.env:\w+\})"
"""Not the name of an environment variable that holds the secret."""

_HEAD = re.compile(
    r"(?:(?<![\w-])--(?P<flag>[\w-]+)(?:\s+|['\"],\s*(?=['\"]))"
    r"|(?:(?<![\w-])-{0,2}|(?<=%[0-9A-F]{2}))(?P<name>[A-Za-z][\w-]*)(?P<sign>['\"]?\s*[:=]\s*|%3[AD]))['\"]?"
)
"""Also the flags of a command as Python lists it: `['--password', 'x']`."""

_BLOCK = re.compile(r"[|>][-+\d]*[ \t]*(?=\n)")
"""The start of a YAML block, whose lines are indented further than its name."""

_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.DOTALL)
_COUNT = re.compile(r"\d{1,9}(?![\w.+/=~-])")
_SAMPLE = re.compile(r"^([ ]*(?:prompt|completion):[ ]+['\"\[].*)$", re.MULTILINE)
"""A line of a failed sample as `sample_lines` writes it."""

_VALUE = re.compile(
    rf"{_PROSE}(?:{_SCHEME})?+{_REFERENCE}"
    r"(?:\$\{[^}]*\}|\[[^\]]*\]|\{[^}]*\}|(?<=')[^'\n]+|(?<=\")[^\"\n]+|[^'\",}\s]+)",
    re.IGNORECASE,
)
_COOKIES = re.compile(rf"{_PROSE}{_REFERENCE}[^'\"\n]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_RANDOM = re.compile(r"['\"]?(?=[^\s'\",}]*[A-Za-z])(?=[^\s'\",}]*\d)[\w+/=~-]{8,}(?![\w.])")
"""Letters and digits unlike any word, so that `sort(key=len)` and `token: <x>` stay readable."""

_OPEN_HEADERS = ("content-type", "accept", "user-agent")


def redacted_text(text: str) -> str:
    """A text without the passwords and tokens of addresses, the values of settings and headers with secret names such
    as `Authorization` or `api_key`, and the values of secret variables, also as `repr`, JSON and URLs write them.

    Environment variables are secret by their names: WANDB_API_KEY, HF_TOKEN, DB_PASS or GITHUB_PAT. Lines of
    `sample_lines` lose the values of secret variables alone.
    """
    parts = _SAMPLE.split(text)
    return redacted_sample("".join(part if at % 2 else _without_named(part) for at, part in enumerate(parts)))


def without_login(text: str, url: str) -> str:
    """A text without the user name and the password of an address, which errors may quote without the protocol."""
    found = _USER.match(url)
    login = "" if found is None else found[0].removeprefix(found[1]).rstrip("@")
    for part in (login, unquote(login), login.partition(":")[2], unquote(login.partition(":")[2])):
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", REDACTED, text) if part else text
    return text


def redacted_sample(text: str) -> str:
    """A prompt or a response without the values of secret variables; code such as `token=5` is kept."""
    for value in _secret_values():
        text = text.replace(value, REDACTED)
    return text


def sample_lines(prompt: str, completion: str) -> str:
    """The lines of an error or a warning that show a sample, given as `repr` writes its two parts."""
    return f"  prompt:     {prompt}\n  completion: {completion}"


def _without_named(text: str) -> str:
    """The text without secrets that are recognized by a name, an address or their form."""
    text = _PEM.sub(rf"\1{REDACTED}\2", text)
    text = _HOOK.sub(rf"\1{REDACTED}", _BARE_USER.sub(REDACTED, _USER.sub(rf"\1{REDACTED}@", text)))
    text = _PARAMETER.sub(lambda found: f"{found[1]}={REDACTED}" if _is_parameter(found[1]) else found[0], text)
    return _BEARER.sub(rf"\1{REDACTED}", _without_assigned(text))


def redacted(value: object, name: str = "") -> object:
    """A nested configuration without secrets: everything below secret names, and secret values."""
    if isinstance(value, Mapping):
        return {key: redacted(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, name) for inner in value]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    sections, _, last = name.rpartition(".")
    is_count = isinstance(value, int) and _may_count(last) and not _is_secret(sections)
    if value != "" and _is_secret(name) and not is_count:
        return REDACTED
    return redacted_text(value) if isinstance(value, str) else value


def redacted_leaves(leaves: Mapping[str, object]) -> dict[str, object]:
    """The same for a flat configuration: values by dotted paths."""
    return {path: redacted(value, path) for path, value in leaves.items()}


def _without_assigned(text: str) -> str:
    """The text without the values of secret names: `name=value`, `name: value`, `'name': 'value'`, `--name value`."""
    parts, at = [], 0
    for head in _HEAD.finditer(text):
        name = head["flag"] or head["name"]
        if head.start() < at or not _is_secret_name(name) or _is_word(head):
            continue
        block = _BLOCK.match(text, head.end())
        value = (_COOKIES if name.lower().endswith("cookie") else _VALUE).match(text, head.end())
        if value and not (_may_count(name) and _COUNT.match(text, head.end())):
            parts.append(f"{text[at : head.end()]}{REDACTED}")
            at = _end_of_block(text, head.start(), block.end()) if block else value.end()
    return "".join(parts) + text[at:]


def _end_of_block(text: str, name: int, end: int) -> int:
    """The end of the lines after `end` that are indented further than the line of the name at `name`."""
    begin = text.rfind("\n", 0, name) + 1
    indent = name - begin if not text[begin:name].strip(" \t-") else 0
    lines = re.compile(rf"(?:\n(?:[^\S\n]{{{indent + 1}}}[^\n]*|[^\S\n]*(?=\n|\Z)))*")
    return found.end() if (found := lines.match(text, end)) else end


def _is_word(head: re.Match[str]) -> bool:
    """Whether `key` or `token` is an ordinary word here, not followed by random characters that could be a secret."""
    name, sign = (head["name"] or "").lower(), head["sign"]
    if _RANDOM.match(head.string, head.end("sign")) or (sign and sign[0] in "'\""):
        return False
    if name == "pass" and (sign[:1] != "=" or _COUNT.match(head.string, head.end("sign"))):
        return True
    return (name == "key" and head.string[head.start() - 1 : head.start()] not in (".", "{")) or (
        name in ("token", "tokens") and sign != "="
    )


def _words(name: str) -> list[str]:
    """The words of `api_key`, `API-Key` or `apiKey2_str` in lower case, without a number, form or place at the end."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and (words[-1].isdigit() or _says_how(*["", "", *words][-3:])):
        words.pop()
    return words


def _says_how(before: str, secret: str, last: str) -> bool:
    """Whether the last word of a name describes the form or place of a secret that the words before it name."""
    if last in _FORMS:
        return secret != "" and (secret != "token" or before in _GRANTS)
    return (last == "id" and secret == "key") or (last in _PLACES and secret in ("webhook", "webhooks"))


def _is_secret_name(name: str) -> bool:
    before, last = ["", "", *_words(name)][-2:]
    one = last if last == "pass" else last.removesuffix("s")
    if name.lower() in ("key", "pass"):
        return True
    if last == "tokens":
        return before == "" or before in _GRANTS
    qualified = {"key": _KEYS, "pass": _OWNERS, "pat": _HOSTS, "auth": _LOGINS}
    return (
        one in _SECRET
        or one.endswith(_WRITTEN_TOGETHER)
        or (one == "token" and before not in _VOCABULARY)
        or before in qualified.get(one, ())
    )


def _is_secret(path: str) -> bool:
    *sections, name = path.split(".")
    is_header = "headers" in sections and name.lower() not in _OPEN_HEADERS
    return is_header or any(_is_secret_name(part) for part in (*sections, name))


def _may_count(name: str) -> bool:
    """Whether a whole number of this name is a count, as of `max_user_tokens`, or an id, as of a `token`."""
    return name.lower() in ("token", "pass") or _words(name)[-1:] == ["tokens"]


def _is_parameter(name: str) -> bool:
    return _is_secret_name(name) or _words(name)[-1:] in (["key"], ["sig"], ["signature"], ["code"], ["auth"], ["pass"])


@lru_cache(maxsize=1024)
def _is_variable(name: str) -> bool:
    """An environment variable that holds a secret: any `..._KEY` or `..._PASS`, but not the directory `PWD`."""
    words = _words(name)
    last = words[-1].removesuffix("s") if words else ""
    return name != "PWD" and (last in ("key", "token", "pas", "pat", "auth") or _is_secret_name(name))


def _secret_values() -> list[str]:
    """The values of secret variables, the longest first, in each form that a text may contain."""
    forms: set[str] = set()
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _is_variable(name):
            forms |= {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")}
            forms |= {quote_plus(value), *(line for line in value.splitlines() if not line.startswith("-----"))}
    return sorted((form for form in forms if len(form) >= _SHORTEST), key=len, reverse=True)
