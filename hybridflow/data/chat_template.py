"""Renders conversations by the tokenizer's chat template, which is a program: its time and memory are limited."""

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import psutil
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import Data
from hybridflow.config.paths import user_path
from hybridflow.data.conversations import Message
from hybridflow.errors import DataError, HybridflowError
from hybridflow.observability.slow_work import SlowWork

T = TypeVar("T")
R = TypeVar("R")

ROW_SECONDS = 20.0
"""Time limit per row. Rendering takes less than a thousandth of it on a slow machine."""

MEMORY_BYTES = 2 << 30
"""Memory that the process may allocate in addition to what it starts with."""

_OTHER_TEMPLATE = "Set data.chat_template=FILE to another template, or give texts instead of conversations."


def with_chat_template(tokenizer: PreTrainedTokenizerBase, config: Data) -> PreTrainedTokenizerBase:
    """The tokenizer with the template in the file `data.chat_template`, if that is set, instead of its own."""
    if config.chat_template is None:
        return tokenizer
    path = user_path(config.chat_template, key="data.chat_template")
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={config.chat_template} cannot be read: {error}",
            remedy="Name a text file with a Jinja template, such as a model's chat_template.jinja.",
        ) from error
    chosen = copy(tokenizer)
    chosen.chat_template = template
    greeting = [{"role": "user", "content": "Hello"}]
    with_limits(lambda turns: rendered(turns, chosen, add_generation_prompt=True), [greeting])
    return chosen


def rendered_prompt(conversation: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a conversation up to where the reply begins, or continues if the last turn is the assistant's."""
    continues = conversation[-1]["role"] == "assistant"
    return rendered(conversation, tokenizer, add_generation_prompt=not continues, continue_final_message=continues)


def rendered(
    conversation: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, object]] = (),
) -> str:
    """The text of a conversation by the tokenizer's chat template, which also shows the JSON schemas of `tools`.

    Raises `DataError` if the template fails.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "Rows are conversations (messages, or texts by data.as_chat=true), but the tokenizer has no chat template.",
            remedy="Set data.chat_template=FILE, use a model with a chat template, or give plain text without"
            " data.as_chat.",
        )
    messages: list[dict] = [dict(message) for message in conversation]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except MemoryError as error:
        message = f"The chat template ran out of memory for the conversation {str(list(conversation))[:200]}"
        raise DataError(message, remedy=_OTHER_TEMPLATE) from error
    except Exception as error:  # a template is a program
        words = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"The tokenizer's chat template refuses a conversation: {words[:400].rstrip('.')}. The conversation:"
            f" {str(list(conversation))[:200]}",
            remedy="Write its turns the way the model's template expects them.",
        ) from error
    assert isinstance(text, str), f"the chat template made a {type(text)}"
    return text


def with_limits(render: Callable[[T], R], rows: Sequence[T]) -> list[R]:
    """Calls `render` on each row in a forked process, which is killed if a row takes too long or too much memory.

    That is a `DataError`; errors of `render` are raised here as `DataError`. Results cross a pipe as JSON, so nothing
    that a template makes of that process is unpickled here; tuples become lists.
    """
    if not rows:
        return []
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        receiver.close()
        _render_all(render, rows, sender)
    sender.close()
    try:
        return list(_answers(receiver, len(rows)))
    finally:
        receiver.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _answers(receiver: Connection, count: int) -> Iterator:
    work = SlowWork("applying the chat template to", "conversations", count)
    for row in range(1, count + 1):
        work.reach(row)
        if not receiver.poll(ROW_SECONDS):
            message = f"The chat template did not finish row {row} in {ROW_SECONDS:g} seconds."
            raise DataError(message, remedy=_OTHER_TEMPLATE)
        try:
            answer = json.loads(receiver.recv_bytes())
        except (EOFError, ValueError) as error:
            limit = f"{MEMORY_BYTES >> 20} MB of memory"
            message = f"The chat template took more than {limit} for row {row}, or crashed."
            raise DataError(message, remedy=_OTHER_TEMPLATE) from error
        if "error" in answer:
            raise DataError(answer["error"], remedy=answer["remedy"])
        yield answer["result"]


def _render_all(render: Callable[[T], R], rows: Sequence[T], sender: Connection) -> NoReturn:
    """The forked process: sends one answer per row, and exits without the parent's exit handlers."""
    try:
        limit = psutil.Process().memory_info().vms + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for row in rows:
            try:
                answer = {"result": render(row)}
            except HybridflowError as error:
                answer = {"error": error.message, "remedy": error.remedy}
            sender.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(0)
