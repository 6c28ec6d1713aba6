"""The file of `hybridflow generate`: written while responses are generated, and continued by the same command."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pyarrow
from pyarrow import parquet

from hybridflow.elastic.compatibility import Fingerprints, words_of
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.launch.compose.compose import Composed
from hybridflow.observability.full_disk import why_full

_ROWS_AT_ONCE = 1024
_OF_RESPONSES = (
    "data.eval_files", "data.eval_limit", "data.max_", "data.truncation", "data.prompt_", "data.answer_key", "data.map",
    "data.dataset", "data.chat_template", "data.system_prompt", "data.as_chat", "rollout.eval_",
    "rollout.sampling.stop", "model.tokenizer_path", "model.pad_token", "dataflow_settings.by_prompt",
    "dataflow_settings.token_ids", "trainer.seed",
)  # fmt: skip
"""Beginnings of the settings on which responses and their rows depend."""
_PROMPTS, _MODEL = "files of --prompts", "files of the model"
_OPTIONS = {f"dataflow_settings.{name}": f"--{name.replace('_', '-')}" for name in ("by_prompt", "token_ids")}
_OPTIONS["data.eval_files"] = "--prompts"


def origin_of_responses(composed: Composed, inputs: Fingerprints) -> dict[str, object]:
    """The settings on which the rows of a file depend, and fingerprints of the prompts, the model and the other files,
    such as that of `data.map`; as JSON."""
    settings = composed.redacted()
    found = {_OPTIONS.get(key, key): value for key, value in settings.items() if key.startswith(_OF_RESPONSES)}
    prompts, model = [str(name) for name in words_of(settings["data.eval_files"])], str(settings["model.path"])
    found[_PROMPTS] = [inputs.get(name) for name in prompts]
    found[_MODEL] = inputs.get(model)
    others = [name for name in inputs if name not in (*prompts, model) and not name.startswith("module ")]
    found |= {f"file {name}": inputs[name] for name in sorted(others)}
    return json.loads(json.dumps(found, default=str))


@dataclass(frozen=True)
class ResponsesFile:
    """Rows of responses in the order of the prompts, as JSON lines or Parquet.

    Until all are there, they are lines of `OUT.partial`, whose first line has their origin: what they were made with.
    Then `OUT.origin` has it.

        file = ResponsesFile(Path("out.jsonl"))
        if not file.is_whole(origin):
            with file.opened(origin, rows_per_prompt=1) as opened:  # continues after the rows of an interrupted command
                opened.write(rows)
            file.finish()
    """

    out: Path

    @property
    def partial(self) -> Path:
        """The file that is written while responses are generated."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def exists(self) -> bool:
        """Whether there are responses, all or some."""
        return self.out.exists() or self.partial.exists()

    @property
    def _origin(self) -> Path:
        return self.out.with_name(f"{self.out.name}.origin")

    def is_whole(self, origin: Mapping[str, object]) -> bool:
        """Whether all responses are there. Raises `ConfigError` if the file, or the rows that an interrupted command
        left, have another origin or an unknown one."""
        if not self.out.exists():
            self._check_partial(origin)
            return False
        remedy = "Give another --out, or delete the file."
        before = _read_origin(self._origin)
        if before is None:
            raise ConfigError(
                f"{self.out} exists, and without {self._origin.name} it is not known how it was made.", remedy=remedy
            )
        if changes := _changes(before, origin):
            raise ConfigError(f"{self.out} has responses that were made differently: {changes}.", remedy=remedy)
        return True

    def _check_partial(self, origin: Mapping[str, object]) -> None:
        before = _read_origin(self.partial)
        if before is not None and (changes := _changes(before, origin)):
            raise ConfigError(
                f"{self.partial} has responses of an interrupted command that were made differently: {changes}.",
                remedy="Use the same settings to continue it, delete the file to start again, or give another --out.",
            )

    @contextmanager
    def opened(self, origin: Mapping[str, object], *, rows_per_prompt: int) -> Iterator["OpenedResponses"]:
        """The partial file, cut after the last prompt of which all rows are there."""
        self._check_partial(origin)
        with _explained(self.partial), self.partial.open("a+b", buffering=0) as file:
            file.seek(0)
            if _header(file.readline()) is None:
                file.truncate(0)
                file.write((json.dumps({"origin": origin}, ensure_ascii=False) + "\n").encode())
            end = file.seek(0, 1)
            rows = 0
            for row, line in enumerate(iter(file.readline, b""), start=1):
                if not line.endswith(b"\n"):
                    break
                if row % rows_per_prompt == 0:
                    rows, end = row, file.tell()
            file.truncate(end)
            yield OpenedResponses(file, rows // rows_per_prompt)

    def rows(self) -> int:
        """The number of rows in the partial file."""
        return sum(1 for _ in self._lines()) if self.partial.is_file() else 0

    def finish(self) -> int:
        """Makes the partial file the whole one, and returns its number of rows."""
        whole = self.out.with_name(f"{self.out.name}.whole")
        with _explained(self.out):
            with self.partial.open("rb") as file:
                self._origin.write_bytes(file.readline())
            rows = _write_parquet(self._lines, whole) if self.out.suffix == ".parquet" else self._copy(whole)
            whole.replace(self.out)
            self.partial.unlink()
        return rows

    def _copy(self, whole: Path) -> int:
        rows = 0
        with whole.open("wb") as file:
            for line in self._lines():
                file.write(line)
                rows += 1
        return rows

    def _lines(self) -> Iterator[bytes]:
        with self.partial.open("rb") as file:
            file.readline()
            yield from file


@dataclass
class OpenedResponses:
    """A partial file to write to; `prompts` is the number of those of which all rows are there."""

    file: BinaryIO
    prompts: int

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Writes the rows of whole prompts."""
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        left = memoryview(text.encode("utf-8", "replace"))
        while left:
            left = left[self.file.write(left) :]


def _read_origin(path: Path) -> dict[str, object] | None:
    """The origin in the first line of a file; None if there is no file, or no whole line."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return _header(file.readline())


def _header(line: bytes) -> dict[str, object] | None:
    """The origin in the first line; None if there is no whole one."""
    if not line.endswith(b"\n"):
        return None
    return json.loads(line).get("origin", {})


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """How two origins differ, in words; empty if they do not."""
    changed = [key for key in now if before.get(key) != now[key]]
    said = [
        f"the {key} {'has' if key.startswith('file ') else 'have'} changed"
        if key.startswith("file")
        else f"{key} was {json.dumps(before.get(key))} and is {json.dumps(now[key])}"
        for key in changed[:4]
    ]
    return "; ".join(said)


def _write_parquet(lines: Callable[[], Iterator[bytes]], path: Path) -> int:
    """Writes JSON lines as Parquet, in groups of rows; their columns and types are those of all rows together."""
    schema = pyarrow.schema([])
    for group in _groups(lines()):
        names = dict.fromkeys(name for row in group for name in row)
        columns = {name: [row.get(name) for row in group] for name in names}
        schema = pyarrow.unify_schemas([schema, pyarrow.table(columns).schema], promote_options="permissive")
    rows = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for group in _groups(lines()):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            rows += len(group)
    return rows


def _groups(lines: Iterator[bytes]) -> Iterator[list[dict[str, object]]]:
    while group := [json.loads(line) for line in islice(lines, _ROWS_AT_ONCE)]:
        yield group


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path} could not be written: {why_full(error) or error}.",
            remedy="Free some space or use another directory; the same command continues.",
        ) from error
