"""code_tests: the response's program passes the tests of its row, run where it can do no harm."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.interface import Completion, Prompt, text_of
from hybridflow.rewards.sandbox.idle import can_fail, is_program
from hybridflow.rewards.sandbox.limits import Limits
from hybridflow.rewards.sandbox.questions import question_of
from hybridflow.rewards.sandbox.runs import Run, check_confinement, run_program

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FORM = 'Use {"inputs": [...], "outputs": [...]} (standard input and output), or a list of assert statements.'
_WITHOUT = "A row without tests has null there and is not scored; data.filters leaves rows out."
_COLUMNS = ("tests", "test_list", "answer")


@dataclass(frozen=True)
class RowTests:
    """The tests of a row: pairs of input and output, or statements that fail by raising, after `setup`."""

    pairs: tuple[tuple[str, str], ...] = ()
    statements: tuple[str, ...] = ()
    setup: str = ""

    def __len__(self) -> int:
        return len(self.pairs) + len(self.statements)


class CodeTestsReward:
    """1 where the program in a response passes all tests of its row (`partial`: the fraction it passes), else 0.

    The program is the last code block in the response, or all of it where there is none. The tests are the row's
    `tests` or `test_list` column, else its answer; None where the row has none. At most `max_tests` are run, from the
    first, by as many programs at a time as there are `workers`.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_tests: int | None,
        partial: bool,
        workers: int | None,
        unconfined: bool,
    ) -> None:
        for name, value in (("max_tests", max_tests), ("workers", workers)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"reward.settings.code_tests.{name}={value} is too small.", remedy="Use 1 or more, or null."
                )
        self._limits = limits
        self._max_tests = max_tests
        self._partial = partial
        self._workers = workers or len(os.sched_getaffinity(0))
        self._is_confined = not unconfined
        self._has_warned = False
        if not unconfined:
            check_confinement()
        else:
            logger.warning(
                "reward.settings.code_tests.unconfined=true: programs run with limits of time and memory alone; they"
                " can read and write whatever this process can, use the network and start processes"
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
        """A score for each completion."""
        nothing = [None] * len(completions)
        setups = columns.get("test_setup_code", nothing)
        rows = zip(completions, tests or nothing, test_list or nothing, answer or nothing, setups, strict=True)
        asked = [
            (program_in(text_of(text)), tests_of(next((each for each in found if each is not None), None), setup))
            for text, *found, setup in rows
        ]
        self._warn_of_whole([statement for _, tests in asked if tests for statement in tests.statements])
        with ThreadPoolExecutor(self._workers) as threads:
            return list(threads.map(lambda pair: self._score(*pair), asked))

    def _warn_of_whole(self, statements: Sequence[str]) -> None:
        """Says once that a test judges within the program's own process."""
        whole = (
            None if self._has_warned else next((text for text in statements if not question_of(text).is_parted), None)
        )
        if whole is not None:
            self._has_warned = True
            logger.warning(
                "reward.functions=code_tests: tests such as %.200r compare in the program's own process, where one"
                " written to deceive can claim to have passed. Compare calls with literals (assert f(1) == 2), or give"
                " inputs and outputs: see docs/how_to/code_rewards.md",
                whole,
            )

    def _score(self, program: str, tests: RowTests | None) -> float | None:
        if tests is None:
            return None
        limit = self._max_tests or len(tests)
        passed = 0
        for expected, run in self._runs(program, tests, limit):
            passed += int(same_output(run, expected)) if expected is not None else sum(run.passed)
            if not self._partial and expected is not None and not same_output(run, expected):
                return 0.0
        total = min(limit, len(tests))
        return passed / total if self._partial else float(passed == total)

    def _runs(self, program: str, tests: RowTests, limit: int) -> Iterator[tuple[str | None, Run]]:
        """The runs that the tests ask for, each with the output expected of it (None: it has verdicts)."""
        for given, expected in tests.pairs[:limit]:
            yield expected, run_program(program, self._limits, stdin=given, is_confined=self._is_confined)
        if tests.statements:
            loaded = f"{tests.setup}\n{program}" if tests.setup else program
            statements = list(tests.statements[:limit])
            yield None, run_program(loaded, self._limits, tests=statements, is_confined=self._is_confined)


def program_in(text: str) -> str:
    """The last code block of a response; all of it where it has none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def same_output(run: Run, expected: str) -> bool:
    """Whether a program ended well and wrote what was expected, but for space at the ends of lines and of the whole."""
    if run.status != 0 or run.ended_for:
        return False
    found = run.output.decode(errors="replace")
    return [line.rstrip() for line in found.strip().splitlines()] == [
        line.rstrip() for line in expected.strip().splitlines()
    ]


def check_row(row: Mapping[str, object]) -> None:
    """Raises `RewardError` for a row whose tests cannot be read, or test nothing; one without tests is not scored."""
    found = (row.get(name) for name in _COLUMNS)
    tests_of(next((each for each in found if each is not None), None), row.get("test_setup_code"))


def tests_of(value: object, setup: object = None) -> RowTests | None:
    """The tests of a row, from what its column holds: JSON text of it as well. None for none.

    Raises `RewardError` where they cannot be read, and where every program that loads would pass them.
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
            raise _idle(value, "they expect no output of any input")
        return RowTests(pairs=pairs)
    if isinstance(found, Mapping) and set(found) & {"tests", "test_list"}:
        return tests_of(found.get("tests", found.get("test_list")), found.get("test_setup_code", setup))
    if isinstance(found, str):
        found = [found]
    if isinstance(found, Sequence) and found and all(isinstance(test, str) and is_program(test) for test in found):
        statements = _joined(found)
        if not statements:
            raise _idle(value, "no statement asserts anything of the program")
        return RowTests(statements=statements, setup=str(setup or ""))
    raise _unknown(value)


def _joined(tests: Sequence[str]) -> tuple[str, ...]:
    """The tests; one that tests nothing by itself (`import math`) is run with the next that does."""
    statements: list[str] = []
    before: list[str] = []
    for test in tests:
        before.append(test)
        if can_fail(test):
            statements.append("\n".join(before))
            before = []
    return tuple(statements)


def _parsed(value: object) -> object:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _as_text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _idle(value: object, why: str) -> RewardError:
    return RewardError(f"Every program passes the tests {value!r:.200}: {why}.", remedy=f"{_FORM} {_WITHOUT}")


def _unknown(value: object) -> RewardError:
    return RewardError(f"code_tests cannot read the tests {value!r:.200}.", remedy=_FORM)
