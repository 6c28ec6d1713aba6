"""code_tests: whether the program in a response passes the tests of its row, run in a sandbox."""

import ast
import builtins
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from hybridflow.errors import ConfigError, RewardError
from hybridflow.process import num_cores
from hybridflow.rewards.interface import Completion, Prompt, text_of
from hybridflow.rewards.sandbox.questions import question_of
from hybridflow.rewards.sandbox.runs import Limits, Run, check_confinement, run_program

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FORM = 'Use {"inputs": [...], "outputs": [...]} (standard input and output), or a list of assert statements.'
_WITHOUT = "A row with null instead of tests is not scored; data.filters removes rows."
_COLUMNS = ("tests", "test_list", "answer")
_LONGEST_TEST = 1_000_000
"""Longest test in characters; the trainer's process parses every test."""

_REFLECTIVE = {"exec", "eval", "globals", "locals", "vars", "getattr", "__import__"}
"""Built-in functions through which a test may use the program's names without naming them."""

_BUILT_IN = set(dir(builtins)) - _REFLECTIVE


@dataclass(frozen=True)
class RowTests:
    """The tests of a row: pairs of input and output, or statements that fail by raising; `setup` runs first."""

    pairs: tuple[tuple[str, str], ...] = ()
    statements: tuple[str, ...] = ()
    setup: str = ""

    def __len__(self) -> int:
        return len(self.pairs) + len(self.statements)


class CodeTestsReward:
    """1 if the program in the response passes all tests of its row, else 0; with `partial`, the fraction it passes.

    The program is the last code block of the response or, if there is none, the whole response. The tests are in the
    column `tests` or `test_list`, else in the answer; a row without tests is not scored. At most `max_tests` are run,
    by up to `workers` programs at a time (all processors by default).
    """

    def __init__(
        self,
        cpu_seconds: int = 5,
        wall_seconds: float = 10.0,
        memory_mb: int = 512,
        scratch_mb: int = 16,
        max_tests: int | None = None,
        partial: bool = False,
        workers: int | None = None,
        unconfined: bool = False,
    ) -> None:
        for name, value in (("max_tests", max_tests), ("workers", workers)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"reward.settings.code_tests.{name}={value} is too small.", remedy="Use 1 or more, or null."
                )
        self._limits = Limits(cpu_seconds, wall_seconds, memory_mb, scratch_mb)
        self._max_tests = max_tests
        self._partial = partial
        self._workers = workers or num_cores()
        self._is_confined = not unconfined
        self._has_warned = False
        if not unconfined:
            check_confinement()
        else:
            logger.warning(
                "reward.settings.code_tests.unconfined=true: programs are limited in time and memory only; they can"
                " read and write whatever this process can, use the network and start processes"
            )

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        answer: list | None = None,
        tests: list | None = None,
        test_list: list | None = None,
        **columns: list,
    ) -> list[float | None]:
        """One score per completion."""
        nothing = [None] * len(completions)
        setups = columns.get("test_setup_code", nothing)
        rows = zip(completions, tests or nothing, test_list or nothing, answer or nothing, setups, strict=True)
        submissions = [
            (program_in(text_of(text)), tests_of(next((each for each in found if each is not None), None), setup))
            for text, *found, setup in rows
        ]
        self._warn_of_unsplit([statement for _, tests in submissions if tests for statement in tests.statements])
        with ThreadPoolExecutor(self._workers) as threads:
            return list(threads.map(lambda pair: self._score(*pair), submissions))

    def _warn_of_unsplit(self, statements: Sequence[str]) -> None:
        """Warns once about a test that compares values in the program's own process."""
        unsplit = next((text for text in statements if not self._has_warned and not question_of(text).is_split), None)
        if unsplit is not None:
            self._has_warned = True
            logger.warning(
                "reward.functions=code_tests: tests such as %.200r compare in the program's own process, where a"
                " deceptive program can claim to have passed. Compare calls with literals (assert f(1) == 2), or give"
                ' {"inputs": [...], "outputs": [...]}',
                unsplit,
            )

    def _score(self, program: str, tests: RowTests | None) -> float | None:
        if tests is None:
            return None
        limit = self._max_tests or len(tests)
        passed = 0
        for expected, run in self._runs(program, tests, limit):
            if expected is None:
                passed += sum(run.passed)
            elif same_output(run, expected):
                passed += 1
            elif not self._partial:
                return 0.0
        total = min(limit, len(tests))
        return passed / total if self._partial else float(passed == total)

    def _runs(self, program: str, tests: RowTests, limit: int) -> Iterator[tuple[str | None, Run]]:
        """Runs the program: per input with the expected output, or once for all statements (expected: None)."""
        for given, expected in tests.pairs[:limit]:
            yield expected, run_program(program, self._limits, stdin=given, is_confined=self._is_confined)
        if tests.statements:
            loaded = f"{tests.setup}\n{program}" if tests.setup else program
            statements = list(tests.statements[:limit])
            yield None, run_program(loaded, self._limits, tests=statements, is_confined=self._is_confined)


def program_in(text: str) -> str:
    """The last code block of a response, or the whole response if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def same_output(run: Run, expected: str) -> bool:
    """Whether a program exited with 0 and wrote the expected output, except for whitespace at the ends of lines."""
    if run.status != 0 or run.ended_for:
        return False
    found = run.output.decode(errors="replace")
    return [line.rstrip() for line in found.strip().splitlines()] == [
        line.rstrip() for line in expected.strip().splitlines()
    ]


def check_row(row: Mapping[str, object]) -> None:
    """Raises `RewardError` for a row whose tests cannot be parsed or test nothing. A row may have no tests."""
    found = (row.get(name) for name in _COLUMNS)
    tests_of(next((each for each in found if each is not None), None), row.get("test_setup_code"))


def tests_of(value: object, setup: object = None) -> RowTests | None:
    """The tests of a row from the value of its column, or from JSON text of it; None for None.

    Raises `RewardError` if they cannot be parsed, or if every program that loads would pass them.
    """
    found = _parsed(value)
    if found is None:
        return None
    if isinstance(found, Mapping) and "inputs" in found and "outputs" in found:
        inputs, outputs = list(found["inputs"]), list(found["outputs"])
        if len(inputs) != len(outputs) or found.get("fn_name"):
            raise _unknown(value)
        pairs = tuple((_as_text(i), _as_text(o)) for i, o in zip(inputs, outputs, strict=True))
        if not any(expected.strip() for _, expected in pairs):
            raise _idle(value, "they expect no output for any input")
        return RowTests(pairs=pairs)
    if isinstance(found, Mapping) and set(found) & {"tests", "test_list"}:
        return tests_of(found.get("tests", found.get("test_list")), found.get("test_setup_code", setup))
    if isinstance(found, str):
        found = [found]
    if isinstance(found, Sequence) and found and all(isinstance(test, str) and _is_program(test) for test in found):
        statements = _joined(found)
        if not statements:
            raise _idle(value, "no statement asserts anything about the program")
        return RowTests(statements=statements, setup=str(setup or ""))
    raise _unknown(value)


def _joined(tests: Sequence[str]) -> tuple[str, ...]:
    """The tests; one that tests nothing (`import math`) is joined with the next that does."""
    statements: list[str] = []
    pending: list[str] = []
    for test in tests:
        pending.append(test)
        if _can_fail(test):
            statements.append("\n".join(pending))
            pending = []
    return tuple(statements)


def _parsed(value: object) -> object:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


@lru_cache(maxsize=4096)
def _is_program(test: str) -> bool:
    """Whether a text is a program rather than an answer such as `42`, `3/4` or `Paris`."""
    body = _body(test)
    is_call = (isinstance(part, ast.Call) for node in body for part in ast.walk(node))
    return any(not isinstance(node, ast.Expr) for node in body) or any(is_call)


@lru_cache(maxsize=4096)
def _can_fail(test: str) -> bool:
    """Whether some program can fail a test: it asserts, raises or calls something, and uses a name it does not define.

    A bare comparison (`f(1) == 2`) cannot fail, since its result is not used.
    """
    effective = [node for node in _body(test) if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call)]
    parts = [part for node in effective for part in ast.walk(node)]
    if not any(isinstance(part, ast.Assert | ast.Raise | ast.Call) for part in parts):
        return False
    used = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    return bool(used - _defined(parts) - _BUILT_IN)


def _defined(parts: list[ast.AST]) -> set[str]:
    """Names that a test defines itself, apart from imports from `program`."""
    defined: set[str] = set()
    for part in parts:
        match part:
            case ast.Import(names=names):
                defined |= {(name.asname or name.name).partition(".")[0] for name in names if name.name != "program"}
            case ast.ImportFrom(module=module, names=names) if module != "program":
                defined |= {name.asname or name.name for name in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
    return defined


def _body(test: str) -> list[ast.stmt]:
    if len(test) > _LONGEST_TEST:
        return []
    try:
        return ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _as_text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _idle(value: object, why: str) -> RewardError:
    return RewardError(f"Every program passes the tests {value!r:.200}: {why}.", remedy=f"{_FORM} {_WITHOUT}")


def _unknown(value: object) -> RewardError:
    return RewardError(f"code_tests cannot parse the tests {value!r:.200}.", remedy=_FORM)
