"""The endpoint of a program over plain sockets: every request gets an answer, and no thread is left behind."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from hybridflow.environments.chat_completions import ChatCompletions, RequestError
from hybridflow.environments.endpoint import Endpoint
from hybridflow.environments.interface import Ask, Model, Reply

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
CHAT = "POST /v1/chat/completions"


def request(variables: dict[str, str], what: str, body: bytes, header: str) -> bytes:
    key = variables["OPENAI_API_KEY"]
    return f"{what} HTTP/1.1\r\nHost: local\r\nAuthorization: Bearer {key}\r\n{header}\r\n\r\n".encode() + body


def connection_to(variables: dict[str, str]) -> socket.socket:
    port = int(variables["OPENAI_BASE_URL"].rpartition(":")[2].partition("/")[0])
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def during(act: Callable[[dict[str, str]], object], *, seconds: float = 0.0) -> object:
    """What a program does with an endpoint whose model replies after some time."""

    async def exchange(ask: Ask) -> Reply:
        await asyncio.sleep(seconds)
        return Reply("fine", {"role": "assistant", "content": "fine"})

    async def episode() -> object:
        with Endpoint(Model(exchange)) as endpoint:
            return await asyncio.to_thread(act, endpoint.variables)

    return asyncio.run(episode())


def all_from(connection: socket.socket) -> str:
    """What comes until the connection is closed."""
    found = b""
    while received := connection.recv(1 << 16):
        found += received
    return found.decode()


def answer_to(what: str, body: bytes, header: str, *, seconds: float = 0.0) -> str:
    """What a program gets that closes its side of the connection after its request."""

    def act(variables: dict[str, str]) -> str:
        with connection_to(variables) as connection:
            connection.sendall(request(variables, what, body, header))
            connection.shutdown(socket.SHUT_WR)
            return all_from(connection)

    return str(during(act, seconds=seconds))


@pytest.mark.parametrize(
    ("what", "body", "header", "seconds", "status", "found"),
    [
        (CHAT, BODY, f"Content-Length: {len(BODY)}", 60.0, 400, "keep it open, also for writing, until the response"),
        (CHAT, BODY, f"Content-Length: {len(BODY) + 9}", 0.0, 400, f"ended after {len(BODY)} of {len(BODY) + 9} bytes"),
        (CHAT, BODY, f"Content-Length: {'9' * 5000}", 0.0, 413, "The body has more than 67108864 bytes."),
        (CHAT, BODY, f"Content-Length: {(64 << 20) + 1}", 0.0, 413, "The body has more than 67108864 bytes."),
        (CHAT, BODY, "Accept: */*", 0.0, 411, "needs a Content-Length"),
        (CHAT, b"0\r\n\r\n", "Transfer-Encoding: chunked", 0.0, 411, "needs a Content-Length"),
        ("GET /v1/models", b"0\r\n\r\n", "Transfer-Encoding: chunked", 0.0, 411, "needs a Content-Length"),
    ],
)
def test_a_request_that_is_not_complete_gets_a_status_and_a_reason(what, body, header, seconds, status, found):
    begun = time.monotonic()
    answer = answer_to(what, body, header, seconds=seconds)
    head, _, content = answer.partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ") and found in json.loads(content)["error"]["message"]
    assert time.monotonic() - begun < 10 and answer.count("HTTP/1.1") == 1


def test_a_list_of_models_may_be_asked_for_with_parameters():
    assert '"id": "policy"' in answer_to("GET /v1/models?limit=1", b"", "Connection: close")
    assert "There is no /v1/model;" in answer_to("GET /v1/model", b"", "Connection: close")


@pytest.mark.parametrize("arguments", ['"\\"abc\\""', '"[1]"', '"null"', '"NaN"', "null", "[1]", "NaN", '"{"'])
@pytest.mark.parametrize(
    "call", ['{"id": "a", "type": "function", "function": {"name": "add", "arguments": %s}}', "%s"]
)
def test_a_tool_call_whose_arguments_are_not_an_object_gets_a_status_of_400(arguments, call):
    message = '{"role": "assistant", "content": "", "tool_calls": [' + call % arguments + "]}"
    with pytest.raises(RequestError, match="'function.arguments', which is a JSON object") as error:
        ChatCompletions().question(f'{{"messages": [{message}]}}'.encode())
    assert error.value.status == 400


def test_the_body_of_a_get_is_not_taken_for_the_next_request():
    def act(variables: dict[str, str]) -> str:
        with connection_to(variables) as connection:
            header = f"Content-Length: {len(BODY)}"
            connection.sendall(request(variables, "GET /v1/models", BODY, header))
            connection.sendall(request(variables, CHAT, BODY, f"{header}\r\nConnection: close"))
            return all_from(connection)

    answer = str(during(act))
    assert answer.count("HTTP/1.1 200 OK") == 2 and '"id": "policy"' in answer and '"content": "fine"' in answer


def test_connections_that_a_program_leaves_open_are_closed_with_their_threads():
    before, kept = set(threading.enumerate()), []

    def act(variables: dict[str, str]) -> None:
        for body in (b"", BODY[:9]):
            connection = connection_to(variables)
            connection.sendall(request(variables, CHAT, body, f"Content-Length: {len(BODY)}")[: None if body else 20])
            kept.append(connection)
        while len(set(threading.enumerate()) - before) < len(kept) + 1:
            time.sleep(0.01)

    during(act)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    for connection in kept:
        connection.close()


def test_a_connection_that_is_reset_prints_nothing(capfd):
    def act(variables: dict[str, str]) -> None:
        with connection_to(variables) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
            connection.sendall(request(variables, CHAT, BODY[:9], f"Content-Length: {len(BODY)}"))
        time.sleep(0.3)

    during(act)
    assert capfd.readouterr() == ("", "")
