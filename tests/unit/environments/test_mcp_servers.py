"""Tools of MCP servers, with a real server in a process of its own."""

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.mcp_servers import McpServers
from hybridflow.environments.tools import Toolbox
from hybridflow.errors import ConfigError
from tests.unit.environments.test_tool_conversations import Recited, played_with

pytest.importorskip("mcp")
pytestmark = pytest.mark.timeout(900)  # a server imports the package mcp, which takes a minute on a loaded machine
COMMAND = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])
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
        assert servers.is_running is (how == "hang")
    finally:
        servers.close()


@pytest.mark.parametrize(
    "command", [f"{COMMAND} --broken", "no-such-program", f"{sys.executable} -c 'import time; time.sleep(9)'"]
)
def test_a_server_that_does_not_start_is_an_error_before_the_run(command):
    with pytest.raises(ConfigError, match="does not start") as error:
        McpServers([command], seconds=SECONDS, start_seconds=3.0 if "sleep" in command else SECONDS)
    assert "in a shell" in error.value.remedy


def test_an_episode_calls_the_tools_of_a_server():
    call = f"<tool_call>{json.dumps({'name': 'multiply', 'arguments': {'first': 12, 'second': 12}})}</tool_call>"
    model = Recited("qwen2_5", [call, "144"])
    settings = EnvironmentSettings(name="tools", mcp=[COMMAND], processes=1, max_turn_tokens=100, step_seconds=SECONDS)
    found = played_with(settings, model)
    assert '"name": "multiply"' in model.prompts[0] and "<tool_response>\n144\n" in model.prompts[1]
    assert found.row("turns").tolist() == [2.0] and found.object("episode_return") == [0.0]
