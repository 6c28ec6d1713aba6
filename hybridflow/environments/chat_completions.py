"""Requests and responses of OpenAI's chat completions, as questions to the model and its replies."""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridflow.environments.interface import Message, Reply, Tool
from hybridflow.environments.messages import ROLES, call_id

_CALLS_BEGIN = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>")
_NOT_SUPPORTED = {
    "logprobs": "Log-probabilities are kept for training; leave out 'logprobs'.",
    "stop": "The run decides where replies end (rollout.sampling.stop); leave out 'stop'.",
    "functions": "Use 'tools' in place of 'functions'.",
    "audio": "Only text is supported; leave out 'audio'.",
}


class RequestError(Exception):
    """A request that cannot be answered: the HTTP status, and the message and code of the error object."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def content(self) -> dict[str, object]:
        """The body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class Question:
    """The conversation and the tools of a request, and the form of the response."""

    messages: list[Message]
    tools: list[Tool]
    is_streamed: bool
    streams_usage: bool
    path: str
    """Identifies the conversation as the program sent it."""


@dataclass(frozen=True)
class Completion:
    """A reply in the form of OpenAI's API."""

    id: str
    message: Message
    finish_reason: str
    usage: dict[str, int]
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self) -> bytes:
        """The body of a response that is not streamed."""
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": None}
        return self._packed("chat.completion", [choice], usage=self.usage)

    def events(self, *, with_usage: bool) -> bytes:
        """Server-sent events: the whole reply in the first, then how it ended, and the usage if it is wanted."""
        delta, calls = dict(self.message), self.message.get("tool_calls")
        if isinstance(calls, list):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        kind, no_usage = "chat.completion.chunk", {"usage": None} if with_usage else {}
        chunks = [
            self._packed(kind, [{"index": 0, "delta": delta, "finish_reason": None}], **no_usage),
            self._packed(kind, [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}], **no_usage),
        ]
        if with_usage:
            chunks.append(self._packed(kind, [], usage=self.usage))
        return b"".join(b"data: %b\n\n" % chunk for chunk in [*chunks, b"[DONE]"])

    def _packed(self, kind: str, choices: list[dict[str, object]], **more: object) -> bytes:
        common = {"id": self.id, "object": kind, "created": self.created, "model": "policy"}
        return json.dumps({**common, "choices": choices, **more}).encode()


class ChatCompletions:
    """The requests of one episode.

    A program sends the whole conversation each time, with replies as it got them. They are recognized by their content,
    and by what was said before them, and replaced by the messages that the transcript knows, so that the conversation
    continues token by token. If a program leaves out earlier messages, a reply is taken to be the newest one with this
    content.
    """

    def __init__(self) -> None:
        self._replies: dict[str, Message] = {}
        """By the path to each reply, and by its key alone."""

        self._num_replies = self._num_calls = 0

    def question(self, body: bytes) -> Question:
        """The question of a request. Raises `RequestError` for what is not supported."""
        request = _object(body)
        for name, reason in _NOT_SUPPORTED.items():
            if request.get(name):
                raise RequestError(reason, code="unsupported_parameter")
        if request.get("n") not in (None, 1):
            raise RequestError("One reply per request: leave out 'n', or use n=1.", code="unsupported_parameter")
        if request.get("tool_choice") not in (None, "auto"):
            raise RequestError("Only tool_choice='auto' is supported.", code="unsupported_parameter")
        form = request.get("response_format")
        if form is not None and form != {"type": "text"}:
            raise RequestError("Only response_format={'type': 'text'} is supported.", code="unsupported_parameter")
        messages, tools = request.get("messages"), request.get("tools") or []
        if not isinstance(messages, list) or not messages:
            raise RequestError("'messages' must be a list with at least one message.")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
            raise RequestError("'tools' must be a list of {'type': 'function', 'function': {...}}.")
        known, path = self._known(messages)
        options = request.get("stream_options")
        streams_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return Question(known, tools, bool(request.get("stream")), streams_usage, path)

    def answer(self, question: Question, reply: Reply) -> Completion:
        """The completion with the reply to a question."""
        calls: list[dict[str, object]] = []
        for call in reply.calls if "tool_calls" in reply.message else ():
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": call_id(self._num_calls), "type": "function", "function": function})
            self._num_calls += 1
        content: str | None = reply.text
        if calls:
            parts = _CALLS_BEGIN.split(reply.text, maxsplit=1)
            content = (parts[0].strip() if len(parts) > 1 else "") or None
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        self._replies[_path(question.path, message)] = self._replies[_key(message)] = reply.message
        self._num_replies += 1
        ending = "tool_calls" if calls else "length" if reply.is_truncated else "stop"
        tokens = reply.num_prompt_tokens, reply.num_tokens
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
        return Completion(f"chatcmpl-{self._num_replies}", message, ending, usage)

    def _known(self, given: list) -> tuple[list[Message], str]:
        """The messages of a request, with replies as the transcript knows them; and the path to the next reply."""
        known, path = [], ""
        for number, each in enumerate(given):
            message = _message(each, number)
            path = _path(path, message)
            is_reply = message["role"] == "assistant"
            known.append(self._replies.get(path, self._replies.get(_key(message), message)) if is_reply else message)
        return known, path


def _object(body: bytes) -> dict:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.") from error
    if not isinstance(request, dict):
        raise RequestError("The body must be a JSON object.")
    return request


def _message(given: object, number: int) -> Message:
    """A message as chat templates expect it."""
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise RequestError(f"messages[{number}] must be an object with a role: {', '.join(ROLES)}.")
    message: Message = {"role": given["role"], "content": _text(given.get("content"), number)}
    message |= {name: given[name] for name in ("name", "tool_call_id") if given.get(name) is not None}
    if given["role"] != "assistant":
        return message
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"'tool_calls' of messages[{number}] must be a list.")
        message["tool_calls"] = [_call(call, number) for call in calls]
    return message


def _text(content: object, number: int) -> str:
    """The text of a message, which may be in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [str(part["text"]) for part in parts if isinstance(part.get("text"), str)]
    if isinstance(content, list) and len(texts) == len(content):
        return "".join(texts)
    raise RequestError(f"The content of messages[{number}] must be text; images and sound are not supported.")


def _call(call: object, number: int) -> dict[str, object]:
    """A tool call whose arguments are an object."""
    given = call if isinstance(call, dict) else {}
    try:
        function, arguments = given["function"], given["function"]["arguments"]
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(found, dict):
            return {"id": given["id"], "type": "function", "function": {"name": function["name"], "arguments": found}}
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise RequestError(
        f"A tool call of messages[{number}] must have 'id', 'function.name' and 'function.arguments', which is a JSON"
        " object."
    )


def _path(before: str, message: Mapping[str, object]) -> str:
    """Identifies a message together with everything before it."""
    return hashlib.sha256(f"{before}{_key(message)}".encode()).hexdigest()


def _key(message: Mapping[str, object]) -> str:
    """The content of a message: its role, its text and its calls."""
    calls = message.get("tool_calls") or []
    assert isinstance(calls, list)
    functions = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    plain = [[name, json.loads(found) if isinstance(found, str) else found] for name, found in functions]
    return json.dumps([message["role"], message["content"] or "", plain], sort_keys=True)
