"""The driver's data: training streams, held-out rows, and the columns that a dataflow precomputes.

These columns are computed once per row before the first step, and kept with the run.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.choices import is_own
from hybridflow.config.data import Data
from hybridflow.config.derived import is_evaluated
from hybridflow.config.experiment import Experiment
from hybridflow.data.chat_template import with_chat_template
from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.hub import check_splits_named
from hybridflow.data.labeled_responses import load_labeled
from hybridflow.data.length_limits import RowsTooLong
from hybridflow.data.loader import BatchStream, Rows, training_stream
from hybridflow.data.preferences import load_preferences
from hybridflow.data.prompts import load_prompts
from hybridflow.data.selection import unselected
from hybridflow.data.sources import joined, read_table
from hybridflow.data.streaming import JoinedRows, StreamedRows
from hybridflow.dataflows.evaluate import Evaluate, Generate
from hybridflow.dataflows.interface import PREFERENCE_DATA, Dataflow, role_needs
from hybridflow.dataflows.roles import TrainableRewardModel
from hybridflow.elastic.storage import write_aside
from hybridflow.errors import STRICT, ConfigError, DataError, HybridflowError, raised_together
from hybridflow.launch.compose.trainers import shown_name
from hybridflow.launch.plan.dataflow import WITHOUT_TRAINING
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR
from hybridflow.models.tokenizers import decode_responses, eos_ids, load_tokenizer
from hybridflow.rewards.factory import all_need_answers, row_checks

logger = logging.getLogger(__name__)

Part = TypeVar("Part")
Reader = Callable[..., Batch]

READERS: Mapping[str, Reader] = {
    "prompts": load_prompts,
    "demonstrations": load_demonstrations,
    "preferences": load_preferences,
    "labelled": load_labeled,
}
"""Loads files as rows, for each kind of data that a dataflow trains on."""

PRETRAINING = "pretraining"
TRAIN_FILES, EVAL_FILES, PRETRAINING_FILES = "data.train_files", "data.eval_files", "data.pretraining_files"

_EVAL_FILES_OF = {Evaluate: "data", Generate: "--prompts"}
_PROMPTS_OF_THE_TASK = ("builtin:calculator/train", "builtin:calculator/eval")
_ALWAYS_THERE = ["prompt", "answer", "data_source"]
"""Columns that all prompts have, whatever their files."""

_FOLDER = "precomputed"
"""Below the run's directory: `train.safetensors` and `held_out.safetensors`."""

_ROWS_AT_ONCE = 512
_OFFSETS = ":offsets"
"""Suffix of the entry with the offsets of a token column's rows."""


class Streams(dict[str, BatchStream]):
    """The training streams by name. Raises `ConfigError` for one that a dataflow needs and that has no files."""

    def __missing__(self, name: str) -> BatchStream:
        if name == PRETRAINING:
            raise ConfigError(
                "The dataflow reads the stream 'pretraining', but data.pretraining_files is empty.",
                remedy="Give files of texts or demonstrations: data.pretraining_files=[path,...].",
            )
        raise ConfigError(f"There is no stream '{name}'.", remedy=f"Streams: {', '.join(('prompts', PRETRAINING))}.")


@dataclass(frozen=True)
class RunData:
    """The training streams, the held-out rows, and the tokenizer that turns tokens into text."""

    streams: Mapping[str, BatchStream]
    """`prompts`, whatever the dataflow trains on, and `pretraining` if the configuration names such files."""

    questions: Rows | None
    """Held-out prompts to be answered and scored; None for a run without this evaluation."""

    held_out: Batch | None
    """Held-out rows of the kind that the dataflow trains on, if it evaluates on them."""

    tokenizer: PreTrainedTokenizerBase
    scored_columns: Mapping[str, list[str]]
    """Columns of all that reward functions will see, by the setting of the files."""

    def decode(self, ids: Ragged) -> list[str]:
        """Texts of token ids, one per row."""
        return decode_responses(self.tokenizer, ids)


def load_data(plan: RunPlan) -> RunData:
    """Reads and checks all data files; raises before any process is started.

    Held-out rows are prompts if the run has a rollout and a reward, and of the kind that the dataflow trains on if it
    has its own evaluation. A run without training steps reads no training files.
    """
    config, dataflow, data, seed = plan.config, plan.dataflow, plan.config.data, plan.config.trainer.seed
    try:
        tokenizer = load_tokenizer(plan.models.tokenizer_directory(ACTOR, plan.policy), pad_token=plan.policy.pad_token)
        tokenizer = with_chat_template(tokenizer, data)
        ends = eos_ids(tokenizer, plan.models.directory(ACTOR))
    except HybridflowError as error:
        error.further = [*file_problems(config)]
        raise
    answered = config.reward.functions if all_need_answers(config.reward) else []
    functions = [*config.reward.functions, *(name for role in config.roles.values() for name in role.functions)]
    scored_prompts = partial(
        load_prompts, answer_functions=answered, row_checks=row_checks(functions), as_written=plan.only_generates
    )
    readers = {kind: partial(read, stop_ids=ends) for kind, read in READERS.items()} | {"prompts": scored_prompts}
    read, streams, questions, held_out = readers[dataflow.data], Streams(), None, None
    is_asked = plan.generates and (not plan.trained or any(role.name == "reward" for role in plan.roles))
    with raised_together() as faults:
        with faults.caught():
            are_files = plan.is_evaluated and data.dataset is None
            check_splits_named(data.eval_files if are_files else [], key=eval_files_key(config))
        are_splits_named = not faults.found
        with faults.caught():
            STRICT.check([pair_problems], config, dataflow)
            if config.trainer.total_steps:
                parts = _parts(plan, TRAIN_FILES, data.train_files, partial(_training_rows, data, tokenizer, read))
                streams["prompts"] = training_stream(parts, data, seed=seed)
                if data.system_prompt and any(isinstance(p, str) for p in streams["prompts"].peek().object("prompt")):
                    logger.warning("data.system_prompt has no effect on plain-text prompts; set data.as_chat=true")
        if data.pretraining_files and config.trainer.total_steps:
            plain = replace(
                unselected(data), train_files=data.pretraining_files, prompt_key=None, answer_key=None,
                map=None, prompt_template=None, dataset=None,
            )  # fmt: skip
            with faults.caught():
                texts = _parts(
                    plan, PRETRAINING_FILES, plain.train_files,
                    lambda name: load_demonstrations([name], plain, tokenizer, ends),
                )  # fmt: skip
                streams[PRETRAINING] = training_stream(texts, plain, seed=seed)
        with faults.caught():
            if is_asked and are_splits_named:
                questions = _questions(plan, scored_prompts, tokenizer)
            is_task = {*data.eval_files} <= {*_PROMPTS_OF_THE_TASK} and any(pair_problems(config, dataflow))
            if dataflow.evaluate is not Dataflow.evaluate and are_splits_named and not is_task:
                held_out = _measured(plan, read, tokenizer, is_scored=questions is not None)
    scored = {TRAIN_FILES: streams["prompts"].columns} if dataflow.data == "prompts" and "prompts" in streams else {}
    scored |= {} if questions is None else {eval_files_key(config): questions.columns}
    return RunData(streams, questions, held_out, tokenizer, scored or {TRAIN_FILES: _ALWAYS_THERE})


def file_problems(config: Experiment) -> Iterator[HybridflowError]:
    """Data files that cannot be read, whatever their rows are for; needs no plan and no tokenizer."""
    files = {TRAIN_FILES: config.data.train_files, PRETRAINING_FILES: config.data.pretraining_files}
    if is_evaluated(config):
        files[eval_files_key(config)] = config.data.eval_files
    for key, name in ((key, name) for key, names in files.items() for name in names):
        if config.data.dataset is not None and key != PRETRAINING_FILES:
            continue
        try:
            read_table(name)
        except HybridflowError as error:
            yield _named(error, key)


def eval_files_key(config: Experiment) -> str:
    """The name of the held-out files in errors: as `hybridflow evaluate` and `generate` take them, or the setting."""
    return _EVAL_FILES_OF.get(WITHOUT_TRAINING.get(config.dataflow), EVAL_FILES)


def pair_problems(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """The built-in task's prompts, which are not preferences, for a dataflow that learns from preferences."""
    prompts = [name for name in config.data.train_files if name in _PROMPTS_OF_THE_TASK]
    if prompts and dataflow.data in PREFERENCE_DATA:
        trains_reward_model = any(need.kind is TrainableRewardModel for need in role_needs(dataflow).values())
        trainer = "reward_model" if trains_reward_model else {"preferences": "dpo", "labelled": "kto"}[dataflow.data]
        own = f" dataflow={config.dataflow}" if is_own(config.dataflow) else ""
        yield ConfigError(
            f"dataflow={config.dataflow} learns from preferences, but data.train_files=[{prompts[0]}] contains"
            " prompts, not pairs.",
            remedy=f"Give pairs in data.train_files, or run hybridflow {shown_name(trainer)}{own} without it for the"
            " built-in pairs.",
        )


def with_precomputed(program: Dataflow, data: RunData, directory: Path) -> RunData:
    """The data with the columns of `Dataflow.precompute`; called while the models have their initial weights.

    A resumed run reads them from its directory, if they were computed for the same rows.
    """
    if type(program).precompute is Dataflow.precompute:
        return data
    stream = data.streams.get("prompts")
    if stream is not None and stream.table is None:
        _check_streamed(program, stream)
        return data
    tables = {} if stream is None or stream.table is None else {"train": stream.table}
    if data.held_out is not None:
        tables["held_out"] = data.held_out
    kept = {name: _kept(directory / _FOLDER / f"{name}.safetensors", table) for name, table in tables.items()}
    found = {name: columns for name, columns in kept.items() if columns is not None}
    if len(found) < len(tables):
        started = time.perf_counter()
        found = {name: _computed(program, table) for name, table in tables.items()}
        if not any(columns.columns for columns in found.values()):
            return data
        _keep(directory / _FOLDER, {name: (tables[name], columns) for name, columns in found.items() if len(columns)})
        logger.info(
            "precomputed columns=%s rows=%d seconds=%.1f directory=%s",
            ",".join(next(iter(found.values())).columns), sum(map(len, tables.values())), time.perf_counter() - started,
            directory / _FOLDER,
        )  # fmt: skip
    if "train" in found:
        data.streams["prompts"].add_columns(found["train"])
    return data if data.held_out is None else replace(data, held_out=data.held_out.join(found["held_out"]))


def _check_streamed(program: Dataflow, stream: BatchStream) -> None:
    """Raises `ConfigError` if the dataflow adds columns to rows that are read on demand."""
    if precomputed(program, stream.peek()).columns:
        raise ConfigError(
            f"{type(program).__name__}.precompute adds columns to all rows, but data.streaming=true reads rows on"
            " demand.",
            remedy="Set data.streaming=false, or compute the columns in the step (for DPO and KTO:"
            " dataflow_settings.precompute_reference=false).",
        )


def precomputed(program: Dataflow, rows: Batch) -> Batch:
    """The columns of `Dataflow.precompute` for some rows. Raises `ConfigError` for any other result."""
    columns, hook = program.precompute(rows), f"{type(program).__name__}.precompute"
    if not isinstance(columns, Mapping):
        raise ConfigError(
            f"{hook} returned {type(columns).__name__}, not a mapping of names to columns.",
            remedy="Return {} for none.",
        )
    for name, column in columns.items():
        if isinstance(column, Ragged) or (isinstance(column, Tensor) and column.dim() > 0):
            wrong = "" if len(column) == len(rows) else f"with {len(column)} rows"
        else:
            wrong = "as a single number" if isinstance(column, Tensor) else f"as {type(column).__name__}"
        if wrong:
            raise ConfigError(
                f"{hook} returned '{name}' {wrong} for {len(rows)} rows.",
                remedy="Return tensors with one value per row, or Ragged columns with one value per token.",
            )
        if name in rows:
            raise ConfigError(
                f"{hook} returned '{name}', a column that the rows already have.", remedy="Give it another name."
            )
    return Batch(columns)


def _training_rows(data: Data, tokenizer: PreTrainedTokenizerBase, read: Reader, name: str) -> Batch | StreamedRows:
    """The rows of one file, in memory or on demand."""
    if not data.streaming:
        return read([name], data, tokenizer)
    return StreamedRows(name, data, lambda table: read([table], data, tokenizer), tokenizer)


def _parts(plan: RunPlan, key: str, files: Sequence[str], read: Callable[[str], Part]) -> list[Part]:
    """The rows of each file; raises the errors of all files together, which name the setting that lists them.

    No remedy suggests more tokens than the model accepts.
    """
    if not files:
        raise ConfigError(f"{key} is empty.", remedy=f"Give a file, or {_PROMPTS_OF_THE_TASK[0]}.")
    parts = []
    with raised_together() as faults:
        for name in files:
            try:
                parts.append(read(name))
            except RowsTooLong as error:
                limit = plan.models.geometry(ACTOR).max_positions
                faults.add(_named(error.of_model(limit, asked=plan.sequence_tokens), key))
            except HybridflowError as error:
                faults.add(_named(error, key))
    return parts


def _named(error: HybridflowError, key: str) -> HybridflowError:
    """The error of a data file, whose message names the setting that lists the file."""
    if error.message.startswith(f"{key}:") or not isinstance(error, DataError):
        return error
    named = DataError(f"{key}: {error.message}", remedy=error.remedy)
    named.further = [_named(other, key) for other in error.further]
    return named


def _held_out(plan: RunPlan, read: Reader, tokenizer: PreTrainedTokenizerBase) -> Batch | None:
    """The first rows of the evaluation files, with their positions as `uid`."""
    if not plan.is_evaluated:
        return None
    data = plan.config.data
    parts = _parts(
        plan, eval_files_key(plan.config), data.eval_files, lambda name: read([name], unselected(data), tokenizer)
    )
    table = joined(parts, data.eval_files)
    rows = min(len(table), data.eval_limit or len(table))
    return table.slice(0, rows).with_columns(rows={"uid": torch.arange(rows)})


def _questions(plan: RunPlan, read: Reader, tokenizer: PreTrainedTokenizerBase) -> Rows | None:
    """Held-out prompts; None if no row has a reference answer and the dataflow needs none.

    With `data.streaming`, prompts that are only answered are read on demand.
    """
    if plan.only_generates and plan.config.data.streaming:
        data = replace(unselected(plan.config.data), streaming=True)
        rows = partial(_training_rows, data, tokenizer, read)
        parts = _parts(plan, eval_files_key(plan.config), data.eval_files, rows)
        return JoinedRows([part for part in parts if isinstance(part, StreamedRows)])
    try:
        return _held_out(plan, read, tokenizer)
    except DataError:
        if plan.dataflow.data == "prompts" or plan.dataflow.evaluate is Dataflow.evaluate:
            raise
        questions = _held_out(plan, load_prompts, tokenizer)
        if questions is None or any(answer is not None for answer in questions.object("answer")):
            raise
    logger.warning(
        "data.eval_files have no reference answers, which reward.functions=[%s] need: responses are not scored; name a"
        " column of answers with data.answer_key",
        ",".join(plan.config.reward.functions),
    )
    return None


def _measured(plan: RunPlan, read: Reader, tokenizer: PreTrainedTokenizerBase, *, is_scored: bool) -> Batch | None:
    """Held-out rows that the dataflow itself evaluates; if responses are scored, files may have only prompts."""
    try:
        rows = _held_out(plan, read, tokenizer)
    except DataError as error:
        if not is_scored:
            raise
        logger.warning("data.eval_files are used to score responses, but give no held-out loss: %s", error.message)
        return None
    if rows is not None and "is_chosen" in rows and len(rows) < 2:
        raise DataError(
            "data.eval_files give one held-out response: KTO compares responses with those to other prompts.",
            remedy="Give two rows or more (data.eval_files, data.eval_limit), or trainer.eval_every=0.",
        )
    return rows


def _computed(program: Dataflow, table: Batch) -> Batch:
    """The columns of all rows, in parts of equal size so that every rank gets some rows of each."""
    table = table.with_columns(rows={"uid": torch.arange(len(table))})
    count = -(-len(table) // _ROWS_AT_ONCE)
    parts = torch.arange(len(table)).tensor_split(count)
    return Batch.concat([precomputed(program, table.select(rows)) for rows in parts])


def _keep(folder: Path, found: dict[str, tuple[Batch, Batch]]) -> None:
    with write_aside(folder) as partial:
        for name, (table, columns) in found.items():
            tensors = columns.row_columns
            for column, ids in columns.token_columns.items():
                tensors |= {column: ids.values, column + _OFFSETS: ids.offsets}
            # safetensors writes neither shared memory nor strided tensors
            tensors = {column: t.clone(memory_format=torch.contiguous_format) for column, t in tensors.items()}
            save_file(tensors, partial / f"{name}.safetensors", metadata={"rows": _fingerprint(table)})


def _kept(file: Path, table: Batch) -> Batch | None:
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as kept:
        if kept.metadata().get("rows") != _fingerprint(table):
            logger.warning("file=%s was computed for different data; recomputing", file)
            return None
        found = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118 (not a dict)
    tokens = {name: Ragged(found[name], found.pop(name + _OFFSETS)) for name in [*found] if name + _OFFSETS in found}
    return Batch({**found, **tokens})


def _fingerprint(table: Batch) -> str:
    """A digest of the tokens, in their order."""
    digest = hashlib.sha256()
    for name, column in sorted(table.token_columns.items()):
        digest.update(name.encode())
        digest.update(column.offsets.numpy().tobytes())
        digest.update(column.values.contiguous().numpy().tobytes())
    return digest.hexdigest()
