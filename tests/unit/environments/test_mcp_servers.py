"""Tools of MCP servers, with a real server in a process of its own."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.mcp_servers import McpServers, check_servers, server_tools
from hybridflow.environments.tools import ToolAnswer, Toolbox
from hybridflow.errors import ConfigError
from tests.unit.environments.test_tool_conversations import Recited, played_with

pytest.importorskip("mcp")
pytestmark = pytest.mark.timeout(900)  # a server imports the package mcp, which takes a minute on a loaded machine
COMMAND = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])
PLAIN = shlex.join([sys.executable, str(Path(__file__).with_name("plain_mcp_server.py"))])
SECONDS = 60.0
"""Enough for any call on a loaded machine."""


@pytest.fixture(scope="module")
def servers():
    found = McpServers([COMMAND], seconds=SECONDS)
    yield found
    found.close()
    assert not found.is_running


def answered(servers: McpServers, name: str, **arguments: object) -> str:
    ((message,), _) = asyncio.run(Toolbox(servers.tools).answers([{"name": name, "arguments": arguments}]))
    return str(message["content"])


def test_the_tools_of_a_server_have_schemas_and_answer(servers):
    multiply, fail = servers.tools
    assert (multiply.name, fail.name) == ("multiply", "fail")
    function = multiply.schema["function"]
    assert isinstance(function, dict) and function["description"] == "Multiplies two integers."
    assert function["parameters"]["properties"]["first"]["type"] == "integer"
    assert [answered(servers, "multiply", first=number, second=12) for number in (12, 3)] == ["144", "36"]


def test_mistakes_are_explained_to_the_model(servers):
    assert "Error" in answered(servers, "multiply", first="x", second=12)
    assert answered(servers, "fail", how="raise").startswith("Error")
    assert answered(servers, "multiply", first=2, second=2) == "4"


@pytest.mark.parametrize(("how", "error"), [("exit", ConnectionError), ("hang", TimeoutError)])
def test_a_lost_or_silent_server_is_an_infrastructure_failure(how, error):
    servers = McpServers([COMMAND], seconds=SECONDS if how == "exit" else 1.0)
    try:
        with pytest.raises(error):
            answered(servers, "fail", how=how)
        assert not servers.is_running
    finally:
        servers.close()


@pytest.mark.parametrize(
    "command", [f"{COMMAND} --broken", "no-such-program", f"{sys.executable} -c 'import time; time.sleep(9)'"]
)
def test_a_server_that_does_not_start_is_an_error_before_the_run(command):
    with pytest.raises(ConfigError, match="does not start") as error:
        McpServers([command], seconds=SECONDS, start_seconds=3.0 if "sleep" in command else SECONDS)
    assert "in a shell" in error.value.remedy


def test_the_tools_of_all_pages_are_found():
    servers = McpServers([f"{PLAIN} all one two three"], seconds=SECONDS)
    servers.close()
    assert [tool.name for tool in servers.tools] == ["one", "two", "three"]


def test_a_list_of_tools_without_an_end_is_an_error():
    with pytest.raises(ConfigError, match="more than 100 pages") as error:
        McpServers([f"{PLAIN} endless one"], seconds=SECONDS)
    assert "nextCursor" in error.value.remedy


@pytest.mark.parametrize("commands", [[f"{PLAIN} all one two two"], [f"{PLAIN} all two", f"{PLAIN} all one two"]])
def test_two_tools_of_the_same_name_are_an_error_before_the_run(commands):
    with pytest.raises(ConfigError, match="two tools are named 'two'") as error:
        check_servers(EnvironmentSettings(name="tools", mcp=commands))
    assert all(f"the server '{command}'" in error.value.message for command in commands)
    assert "Rename one of them" in error.value.remedy


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resource", "fine\nof a file"),
        ("image", "[image]"),
        ("structured", '{"degrees": 21}'),
        ("nothing", ""),
        ("closed_file", "Error: the file is closed"),
        ("own_code", "Error: Connection closed by the database"),
    ],
)
def test_the_model_gets_all_text_of_an_answer_and_the_errors_of_a_server(name, text):
    servers = McpServers([f"{PLAIN} all {name}"], seconds=SECONDS)
    try:
        assert answered(servers, name) == text and servers.is_running
    finally:
        servers.close()


def test_a_server_that_hung_is_replaced_for_the_next_episode():
    config = EnvironmentSettings(name="tools", mcp=[f"{PLAIN} all hang nothing"], step_seconds=0.5)
    hang, _ = server_tools(config)
    with pytest.raises(TimeoutError, match=r"longer than 0.5 s"):
        hang.call({})
    _, nothing = server_tools(config)
    assert nothing.call({}) == ToolAnswer("")


def test_an_episode_calls_the_tools_of_a_server():
    call = f"<tool_call>{json.dumps({'name': 'multiply', 'arguments': {'first': 12, 'second': 12}})}</tool_call>"
    model = Recited("qwen2_5", [call, "144"])
    settings = EnvironmentSettings(name="tools", mcp=[COMMAND], processes=1, max_turn_tokens=100, step_seconds=SECONDS)
    found = played_with(settings, model)
    assert '"name": "multiply"' in model.prompts[0] and "<tool_response>\n144\n" in model.prompts[1]
    assert found.row("turns").tolist() == [2.0] and found.object("episode_return") == [0.0]
