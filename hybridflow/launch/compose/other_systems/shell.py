"""The commands of a shell script, without running it: quotes, comments, variables, arrays, here-documents.

What only a running shell knows (`$(date)`, `${NAME##*/}`, a variable that is set in an `if` or by `read`) stays in a
word as it is written, with its `$`.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.other_systems.shell_arithmetic import computed, names_set
from hybridflow.launch.compose.other_systems.shell_word import Word

_BEGIN, _END = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_WITHIN = ("then", "else", "elif", "do", "{", "}", "!", "time")
_KEYWORDS = (*_BEGIN, *_END, *_WITHIN)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SETTERS = ("read", "mapfile", "readarray", "let", "unset", "getopts", "eval")
"""Commands that set the variables that they name."""

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRACES = re.compile(r"([A-Za-z_]\w*|\d)(?:(\[[@*]\])|(:?[-=])(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARGUMENTS = re.compile(r"[@*#?0-9]")
_ANSI = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPE, _ESCAPES = re.compile(r"\\(.)", re.DOTALL), {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_REDIRECTION = re.compile(r"<<<|<<-?|&>>?|>>|[<>]&?")
_CONTINUED = "\\\n"
"""The end of a line that the next one continues."""


def commands(script: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The words of each command of a script, with the variables that the script and the environment set.

    Raises `ConfigError` for a quote or parenthesis that is not closed, and for variables that grow beyond a million
    characters.
    """
    return list(_Script(script, environment).commands())


class _Script:
    """Reads a script from its beginning to its end."""

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        self._text = re.sub(r"\\[ \t]+\n", _CONTINUED, script.replace("\r\n", "\n"))
        self._at = 0
        self._values: dict[str, str | list[str]] = dict(environment)
        self._blocks: list[tuple[str, dict[str, str | list[str]]]] = []
        """Parentheses, braces, `if`, `for` and lists with `&&` that are not closed, and the variables before each."""

        self._joins = False
        """Whether the next command is joined to the last by an operator."""

        self._assigned_at: list[int] = []
        """Where the assignments of the command begin."""

        self._here: list[tuple[str, bool, list[str]]] = []
        """Here-documents whose text begins on the next line: the word that ends it, whether tabs may precede that word,
        and the command."""

    def commands(self) -> Iterator[list[str]]:
        words: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            is_first = all(word in _KEYWORDS for word in words)
            if character == "(" and is_first and self._text.startswith("((", self._at):
                self._at += 2
                self._forget(*names_set(self._balanced("(", ")", depth=2)))
            elif _REDIRECTION.match(self._text, self._at):
                self._redirect(words)
            elif character in "\n;&|()":
                self._at += 1
                yield from self._ended_by(character, words)
                self._join(character, is_first=is_first)
                words, self._assigned_at = [], []
                if character == "\n":
                    self._read_documents()
            elif character in " \t":
                self._at += 1
            elif character == "#":
                self._skip_line()
            else:
                self._joins, start = False, self._at
                found = self._words()
                self._assigned_at += [start] * sum(_ASSIGNED.fullmatch(word) is not None for word in found)
                words += found
        yield from self._ended(words)

    def _ended_by(self, operator_text: str, words: list[str]) -> Iterator[list[str]]:
        """A command before an operator, which may make it a process of its own: `N=9 &`, `N=9 | cat`."""
        before, is_single = dict(self._values), not self._text.startswith((operator_text, ">"), self._at)
        yield from self._ended(words)
        if operator_text in "&|" and is_single and not any(word in _KEYWORDS for word in words):
            self._values = before

    def _join(self, operator_text: str, *, is_first: bool) -> None:
        """Begins and ends blocks whose assignments hold only in them, or only if the shell executes them."""
        if operator_text in "&|" and self._text.startswith(("&", "|"), self._at):
            operator_text += self._text[self._at]
            self._at += 1
        if operator_text == "(":
            self._begin("(" if is_first else "f")  # f()
        elif operator_text == ")":
            _ = self._end("(") or self._end("f")
        elif operator_text in ("&&", "||", "|", "|&"):
            self._joins = True
            if not self._blocks or self._blocks[-1][0] != "&&":
                self._begin("&&")
        elif not self._joins:
            self._end("&&")

    def _begin(self, sign: str) -> None:
        self._blocks.append((sign, dict(self._values)))

    def _end(self, sign: str) -> bool:
        """Ends a block, if it is the innermost: a subshell keeps its variables to itself, others may have set them."""
        if sign != "&&":
            self._end("&&")
        if not self._blocks or self._blocks[-1][0] != sign:
            return False
        before = self._blocks.pop()[1]
        changed = [name for name in self._values if self._values[name] != before.get(name)]
        if sign == "(":
            self._values = before
        else:
            self._forget(*changed)
        return True

    @property
    def _is_conditional(self) -> bool:  # only a running shell knows if this part of the script is executed
        return any(sign == "if" for sign, _ in self._blocks)

    def _forget(self, *names: str) -> None:
        """Makes variables unknown, so that a word with one keeps its name and `$`."""
        self._values.update({name: f"${name}" for name in names})

    def _ended(self, words: list[str]) -> Iterator[list[str]]:
        """A command, after its keywords and assignments, if anything is left of it."""
        words = words[2:] if words[:1] == ["function"] else list(words)
        while words and words[0] in _KEYWORDS:
            word = words.pop(0)
            self._note_keyword(word)
            if word in ("for", "case", "select"):
                if word != "case" and words:
                    self._values[words[0]] = f"${words[0]}"
                return
        if is_declared := bool(words) and words[0] in _DECLARE:
            words = [word for word in words if _ASSIGNED.fullmatch(word)]
        assigned = list(takewhile(_ASSIGNED.fullmatch, words))
        words = words[len(assigned) :]
        if not words:  # those before a command are for the command alone
            sees_others = not is_declared and len(assigned) == len(self._assigned_at)
            for number, word in enumerate(assigned):
                self._assign(self._read_again(number) if number and sees_others else word)
            return
        self._note_set(words)
        yield words

    def _note_keyword(self, word: str) -> None:
        """Begins or ends the block of a keyword."""
        if word in _BEGIN:
            self._begin("if")
        elif word in _END:
            self._end("if")
        elif word == "{":
            self._begin("{")
            self._forget(*"123456789")  # the arguments of a function
        elif word == "}":
            self._end("{")

    def _note_set(self, words: list[str]) -> None:
        """Makes the variables unknown that a command sets."""
        named = [word for word in words[1:] if not word.startswith("-")]
        if (words[0] == "set" and (named or "--" in words)) or words[0] == "shift":
            self._forget(*"123456789")
        elif words[0] in _SETTERS or (words[0] == "printf" and words[1:2] == ["-v"]):
            self._forget(*_NAME.findall(" ".join(named)))

    def _read_again(self, number: int) -> str:
        """An assignment of the command, with the values of the variables that those before it have set."""
        here, self._at = self._at, self._assigned_at[number]
        word, self._at = "".join(self._words()), here
        return word

    def _assign(self, word: str) -> None:
        name, more, value = _ASSIGNED.fullmatch(word).groups()  # pyright: ignore[reportOptionalMemberAccess]
        before = self._values.get(name, "")
        self._values[name] = f"${name}" if self._is_conditional else f"{before}{value}" if more else value

    def _words(self) -> list[str]:
        """The words up to a space or an operator; an array is assigned."""
        word = Word()
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "(" and (array := _ASSIGNED.fullmatch(word.text)) and not array[3]:
                self._read_array(array[1], is_added=bool(array[2]))
                return []
            if character in " \t\n;&|()<>":
                break
            self._at += 1
            self._read(character, word)
        return word.close()

    def _read(self, character: str, word: Word) -> None:
        """A character outside quotes, and what it begins."""
        if character == "'":
            word.add(self._until("'"))
        elif character == '"':
            self._quoted(word)
        elif character == "\\":
            escaped = self._text[self._at : self._at + 1]
            _ = None if escaped == "\n" else word.add(escaped)
            self._at += 1
        elif character == "$" and (ansi := _ANSI.match(self._text, self._at)):
            self._at = ansi.end()
            is_known = all(sign in _ESCAPES for sign in _ESCAPE.findall(ansi[1]))
            word.add(_ESCAPE.sub(lambda found: _ESCAPES[found[1]], ansi[1]) if is_known else f"${ansi[0]}")
        elif character == "$" and self._text.startswith('"', self._at):
            pass  # a text in quotes that may be translated into another language
        elif character == "$":
            self._expand(word, is_quoted=bool(_ASSIGNED.fullmatch(word.text)))
        elif character == "`":
            word.add(f"$(`{self._until('`')}`)")
        else:
            word.add(character)

    def _quoted(self, word: Word) -> None:
        word.add("")
        while self._peek() != '"':
            character = self._text[self._at]
            self._at += 1
            if character == "\\" and self._peek() in '$`"\\\n':
                word.add(self._text[self._at].strip("\n"))
                self._at += 1
            elif character == "$":
                self._expand(word, is_quoted=True)
            else:
                word.add(character)
        self._at += 1

    def _expand(self, word: Word, *, is_quoted: bool) -> None:
        """Expands what follows a `$`."""
        add = word.add if is_quoted else word.add_divided
        rest = self._text[self._at :]
        if rest.startswith("(("):
            self._at += 2
            add(self._arithmetic(self._balanced("(", ")", depth=2)[:-1]))
        elif rest.startswith("("):
            self._at += 1
            add(f"$({self._balanced('(', ')')})")
        elif rest.startswith("{"):
            self._at += 1
            self._expand_braces(word, self._balanced("{", "}"), is_quoted=is_quoted)
        elif name := _NAME.match(rest):
            self._at += name.end()
            add(_first(self._values.get(name[0], "")))
        elif _ARGUMENTS.match(rest):
            self._at += 1
            if known := "" if rest[0] in "@*" else f"${rest[0]}" if rest[0] in "#?0" else self._values.get(rest[0]):
                add(str(known))
            elif is_quoted and not word.text:
                word.is_begun = False  # "$@" without arguments is not a word
        else:
            add("$")

    def _expand_braces(self, word: Word, inside: str, *, is_quoted: bool) -> None:
        add = word.add if is_quoted else word.add_divided
        found = _BRACES.fullmatch(inside)
        if found is None:
            if inside not in ("@", "*"):
                add(f"${{{inside}}}")
            return
        name, is_array, sign, default = found.groups()
        value = self._values.get(name, "")
        if is_array:
            elements = value if isinstance(value, list) else [value] if value else []
            word.is_begun = bool(word.text)
            for number, element in enumerate(elements):
                _ = word.close() if number else None
                word.add(element)
        elif sign and (name not in self._values or (sign.startswith(":") and not value)):
            value = self._inner(default)
            if sign.endswith("="):
                self._values[name] = f"${name}" if self._is_conditional else value
            add(value)
        else:
            add(_first(value))

    def _inner(self, text: str) -> str:
        """Text within another expansion, expanded."""
        inner = _Script("", {})
        inner._text, inner._values, word = f'{text.replace(chr(34), "")}"', self._values, Word()
        inner._quoted(word)
        return word.text

    def _arithmetic(self, text: str) -> str:
        """`$((1024 * n))`; any other text than arithmetic of whole numbers stays."""
        self._forget(*names_set(text))
        found = computed(text, self._values)
        return f"$(({text}))" if found is None else found

    def _read_array(self, name: str, *, is_added: bool) -> None:
        self._at += 1
        elements: list[str] = []
        while self._peek() != ")":
            if self._peek() == "#":
                self._skip_line()
            elif self._peek() in " \t\n":
                self._at += 1
            else:
                elements += self._words()
        self._at, before = self._at + 1, self._values.get(name, []) if is_added else []
        known = before if isinstance(before, list) else [before]
        self._values[name] = [*known, *([f"${{{name}[@]}}"] if self._is_conditional and elements else elements)]

    def _redirect(self, words: list[str]) -> None:
        """Skips `2>&1`, `> file` and `< file`; notes `<<EOF`."""
        operator_text = _REDIRECTION.match(self._text, self._at)
        assert operator_text is not None, "called at a redirection"
        self._at, sign = operator_text.end(), operator_text[0]
        if words and words[-1].isdigit() and sign[0] != "&" and self._text[operator_text.start() - 1].isdigit():
            words.pop()
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        if self._text.startswith((">(", "<("), self._at):  # a process in place of a file
            self._at += 2
            self._balanced("(", ")")
            return
        target = self._words()
        if sign in ("<<", "<<-") and target:
            self._here.append((target[0], sign == "<<-", words))

    def _read_documents(self) -> None:
        """`read -r -d '' NAME <<EOF` assigns a text, `bash <<EOF` executes it; other here-documents are skipped."""
        for end, is_indented, words in self._here:
            line = ("^\t*" if is_indented else "^") + re.escape(end) + "$"
            closed = re.compile(line, re.MULTILINE).search(self._text, self._at)
            if closed is None:
                raise ConfigError(f"The here-document that ends with {end} is not closed.", remedy=f"Add a line {end}.")
            text = self._text[self._at : closed.start()]
            self._at = closed.end()
            if words[:1] == ["read"]:
                self._values[words[-1]] = self._inner(text.replace('"', '\\"'))
            elif words[:1] in (["bash"], ["sh"]):
                self._text = f"{self._text[: self._at]}\n({text})\n{self._text[self._at :]}"
        self._here = []

    def _skip_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _until(self, end: str) -> str:
        found = self._text.find(end, self._at)
        if found < 0:
            raise _unclosed(end)
        text, self._at = self._text[self._at : found], found + 1
        return text

    def _balanced(self, begin: str, end: str, depth: int = 1) -> str:
        """The text up to the end of parentheses or braces, which is skipped."""
        start = self._at
        while depth:
            character = self._peek()
            depth += (character == begin) - (character == end)
            self._at += 1
            if begin == "(" and character in "'\"":
                self._skip_quoted(character)
        return self._text[start : self._at - 1].replace(_CONTINUED, "")

    def _skip_quoted(self, quote: str) -> None:
        while (character := self._peek()) != quote:
            self._at += 2 if character == "\\" and quote == '"' else 1
        self._at += 1

    def _peek(self) -> str:
        if self._at >= len(self._text):
            raise _unclosed("quote or parenthesis")
        return self._text[self._at]


def _first(value: str | list[str]) -> str:
    """The value of a variable without an index: of an array, the first element."""
    return value if isinstance(value, str) else value[0] if value else ""


def _unclosed(what: str) -> ConfigError:
    return ConfigError(f"A {what} of the command is not closed.", remedy="Give the whole command or script.")
