"""The data that the driver holds: training streams and held-out rows."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.experiment import Experiment
from hybridflow.data.chat_template import with_chat_template
from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.hub import check_splits_named
from hybridflow.data.labelled_responses import load_labelled
from hybridflow.data.length_limits import RowsTooLong
from hybridflow.data.loader import BatchStream, eval_batches, training_stream
from hybridflow.data.preferences import load_preferences
from hybridflow.data.prompts import load_prompts
from hybridflow.data.selection import unselected
from hybridflow.dataflows.interface import Dataflow
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.errors import ConfigError, DataError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR
from hybridflow.models.tokenizers import decode_responses, eos_ids, load_tokenizer
from hybridflow.rewards.factory import all_need_answers, row_checks

logger = logging.getLogger(__name__)

Reader = Callable[..., Batch]

READERS: Mapping[str, Reader] = {
    "prompts": load_prompts,
    "demonstrations": load_demonstrations,
    "preferences": load_preferences,
    "labelled": load_labelled,
}
"""How files become rows, for each kind of data that a dataflow learns from."""

PRETRAINING = "pretraining"

_ALWAYS_THERE = ["prompt", "answer", "data_source"]
"""Columns of all prompts, whatever their files have."""


class Streams(dict[str, BatchStream]):
    """The training streams by name; one that a dataflow asks for and that has no files is a `ConfigError`."""

    def __missing__(self, name: str) -> BatchStream:
        if name == PRETRAINING:
            raise ConfigError(
                "The dataflow takes the stream 'pretraining', and data.pretraining_files is empty.",
                remedy="Name texts or demonstrations: data.pretraining_files=[path,...].",
            )
        raise ConfigError(f"There is no stream '{name}'.", remedy=f"Streams: {', '.join(('prompts', PRETRAINING))}.")


@dataclass(frozen=True)
class RunData:
    """The training streams, the held-out rows, and the tokenizer that turns tokens into text."""

    streams: Mapping[str, BatchStream]
    """`prompts`, whatever the dataflow learns from, and `pretraining` where the configuration names such files."""

    questions: Batch | None
    """Held-out prompts to be answered and scored; None for a run without this evaluation."""

    held_out: Batch | None
    """Held-out rows of the kind that the dataflow learns from, if it measures something on them."""

    tokenizer: PreTrainedTokenizerBase
    scored_columns: list[str]
    """Columns of all that reward functions will see."""

    def decode(self, ids: Ragged) -> list[str]:
        """Texts of token ids, one per row."""
        return decode_responses(self.tokenizer, ids)


def load_data(plan: RunPlan) -> RunData:
    """Reads and checks all data files; raises before any process is started.

    Held-out rows are prompts to be answered where the run has a rollout and a reward, and of the kind that the dataflow
    learns from where it has a measure of its own.
    """
    config, dataflow, data, seed = plan.config, plan.dataflow, plan.config.data, plan.config.trainer.seed
    if plan.is_evaluated:
        check_splits_named(data.eval_files, key="data.eval_files")
    tokenizer = load_tokenizer(tokenizer_directory(plan.policy), pad_token=plan.policy.pad_token)
    tokenizer = with_chat_template(tokenizer, data)
    functions = config.reward.functions if all_need_answers(config.reward) else []
    scored_prompts = partial(load_prompts, answer_functions=functions, row_checks=row_checks(_functions(config)))
    ends = eos_ids(tokenizer, plan.models.directory(ACTOR))
    readers = {kind: partial(read, stop_ids=ends) for kind, read in READERS.items()} | {"prompts": scored_prompts}
    read = readers[dataflow.data]
    with _naming("data.train_files", plan):
        parts = [read([name], data, tokenizer) for name in data.train_files]
    if data.system_prompt is not None and any(isinstance(p, str) for part in parts for p in part.object("prompt")):
        logger.warning("data.system_prompt is without effect on prompts that are texts; set data.as_chat=true")
    stream = training_stream(parts, data, seed=seed)
    is_scored = plan.generates and any(role.name == "reward" for role in plan.roles)
    questions = _questions(plan, scored_prompts, tokenizer) if is_scored else None
    scored = [stream.columns] if dataflow.data == "prompts" else []
    scored += [] if questions is None else [questions.columns]
    common = [name for name in scored[0] if all(name in columns for columns in scored)] if scored else _ALWAYS_THERE
    streams = Streams(prompts=stream)
    if data.pretraining_files:
        plain = replace(unselected(data), train_files=data.pretraining_files, prompt_key=None, answer_key=None)
        with _naming("data.pretraining_files", plan):
            texts = [load_demonstrations([name], plain, tokenizer, ends) for name in data.pretraining_files]
        streams[PRETRAINING] = training_stream(texts, plain, seed=seed)
    held_out = None
    if dataflow.evaluate is not Dataflow.evaluate:
        held_out = _measured(plan, read, tokenizer, is_scored=questions is not None)
    return RunData(streams, questions, held_out, tokenizer, common)


@contextmanager
def _naming(key: str, plan: RunPlan) -> Iterator[None]:
    """Errors in data files name the setting that lists them; no remedy asks for more tokens than the model reads."""
    try:
        yield
    except DataError as found:
        error = found
        if isinstance(found, RowsTooLong):
            error = found.of_model(plan.models.geometry(ACTOR).max_positions, asked=plan.sequence_tokens)
        if error is found and key in error.message:
            raise
        named = error.message if key in error.message else f"{key}: {error.message}"
        raise DataError(named, remedy=error.remedy) from found


def _held_out(plan: RunPlan, read: Reader, tokenizer: PreTrainedTokenizerBase) -> Batch | None:
    """The first rows of the evaluation files."""
    if not plan.is_evaluated:
        return None
    data = plan.config.data
    with _naming("data.eval_files", plan):
        table = read(data.eval_files, unselected(data), tokenizer)
    return next(iter(eval_batches(table, len(table), limit=data.eval_limit)))


def _questions(plan: RunPlan, read: Reader, tokenizer: PreTrainedTokenizerBase) -> Batch | None:
    """Held-out prompts to be answered; None if no row has an answer to compare with and the dataflow needs none."""
    try:
        return _held_out(plan, read, tokenizer)
    except DataError:
        if plan.dataflow.data == "prompts" or plan.dataflow.evaluate is Dataflow.evaluate:
            raise
        questions = _held_out(plan, load_prompts, tokenizer)
        if questions is None or any(answer is not None for answer in questions.object("answer")):
            raise
    logger.warning(
        "data.eval_files have no answers, which reward.functions=[%s] compare with: responses are not scored; name a"
        " column of answers with data.answer_key",
        ",".join(plan.config.reward.functions),
    )
    return None


def _measured(plan: RunPlan, read: Reader, tokenizer: PreTrainedTokenizerBase, *, is_scored: bool) -> Batch | None:
    """Held-out rows that the dataflow itself measures; files may hold only prompts where responses are scored."""
    try:
        rows = _held_out(plan, read, tokenizer)
    except DataError as error:
        if not is_scored:
            raise
        logger.warning("data.eval_files are answered and scored, but have no held-out loss: %s", error.message)
        return None
    if rows is not None and "is_chosen" in rows and len(rows) < 2:
        raise DataError(
            "data.eval_files give one held-out response: KTO compares responses with those to other prompts.",
            remedy="Give two rows or more (data.eval_files, data.eval_limit), or trainer.eval_every=0.",
        )
    return rows


def _functions(config: Experiment) -> list[str]:
    """All reward functions of the run, those of further roles too."""
    return [*config.reward.functions, *(name for role in config.roles.values() for name in role.functions)]
