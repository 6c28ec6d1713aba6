"""Programs that talk to an OpenAI-style endpoint: the same episodes, clear errors, and rewards."""

import json
import sys
from pathlib import Path

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.dataflows.evaluation import samples_of
from hybridflow.environments.chat_completions import ChatCompletions
from hybridflow.environments.interface import Reply
from hybridflow.environments.loading import load_environment
from hybridflow.errors import ConfigError, EpisodeError
from hybridflow.observability.redaction import REDACTED
from tests.unit.environments.players import Player, prompts_of

AGENT = Path(__file__).with_name("agent.py")
TEXTS = ["12+34=", "7+8="]


def program(*how: object) -> str:
    return " ".join([sys.executable, str(AGENT), *(f"'{part}'" for part in how)])


def test_a_program_plays_the_same_episodes_as_a_coroutine(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "echo", processes=0, max_turn_tokens=6) as player:
        expected = player.play(prompts)
    with Player(tokenizer, program=program("echo"), processes=4, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.tokens("response_ids").values.tolist() == expected.tokens("response_ids").values.tolist()
    assert found.tokens("response_mask").values.tolist() == expected.tokens("response_mask").values.tolist()
    assert found.object("episode_return") == [6.0] * 4 and found.meta["environment/info/turns"] == 12.0


def test_openais_client_understands_the_endpoint(tokenizer):
    pytest.importorskip("openai")
    with Player(tokenizer, program=program("client"), processes=1, max_turn_tokens=6) as player:
        assert player.play(prompts_of(tokenizer, TEXTS[:1])).object("episode_return") == [1.5]


def test_openais_client_understands_streams(tokenizer):
    pytest.importorskip("openai")
    with Player(tokenizer, program=program("streams"), processes=1, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found.object("episode_return")[0] >= 1.0 and found.row("turns").tolist() == [2.0]
    assert found.tokens("fork_starts").lengths.tolist() == [0]


def test_a_stream_has_tool_calls_by_their_position_and_the_usage_if_it_is_wanted():
    call = {"name": "add", "arguments": {"a": 1}}
    said = {"role": "assistant", "content": "", "tool_calls": []}
    chat = ChatCompletions()
    question = chat.question(b'{"messages": [{"role": "user", "content": "1+1?"}]}')
    completion = chat.answer(question, Reply("", said, [call, call], num_prompt_tokens=3, num_tokens=2))
    *lines, last = completion.events(with_usage=True).decode().strip().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last == "data: [DONE]" and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    (first,), (end,) = (chunk["choices"] for chunk in chunks[:2])
    assert [each["index"] for each in first["delta"]["tool_calls"]] == [0, 1]
    assert first["finish_reason"] is None and end["finish_reason"] == "tool_calls"
    assert chunks[2]["choices"] == [] and chunks[2]["usage"]["total_tokens"] == 5
    assert completion.events(with_usage=False).decode().count("data:") == 3


class Conversation:
    """A conversation of a program, which sends what it got."""

    def __init__(self, chat: ChatCompletions, text: str) -> None:
        self.chat, self.sent, self.known = chat, [{"role": "user", "content": text}], []

    def add(self, text: str) -> None:
        """Asks the model, which replies with a text that contains a call, and answers the call."""
        question = self.chat.question(json.dumps({"messages": self.sent}).encode())
        self.known.append([message for message in question.messages if message["role"] == "assistant"])
        call, message = {"name": "list", "arguments": {}}, {"role": "assistant", "content": text, "tool_calls": []}
        self.sent.append(self.chat.answer(question, Reply(text, message, [call])).message)
        self.sent.append({"role": "tool", "content": "a file"})


def test_replies_with_the_same_call_in_different_spelling_are_told_apart():
    texts = ["<tool_call>{}</tool_call>", "<tool_call> {}</tool_call>", "<tool_call>  {}</tool_call>"]
    chat = ChatCompletions()
    first, second = Conversation(chat, "one"), Conversation(chat, "two")
    for text in texts:
        first.add(text)
        second.add(f"{text} ")
    for conversation, end in ((first, ""), (second, " ")):
        spelled = [[message["content"] for message in known] for known in conversation.known]
        assert spelled == [[f"{text}{end}" for text in texts[:count]] for count in range(3)]


def test_a_reply_is_recognized_without_what_was_said_before_it():
    chat = ChatCompletions()
    conversation = Conversation(chat, "one")
    conversation.add("<tool_call> {}</tool_call>")
    del conversation.sent[0]
    found = chat.question(json.dumps({"messages": conversation.sent}).encode())
    assert found.messages[0]["content"] == "<tool_call> {}</tool_call>"


def test_requests_that_cannot_be_answered_say_why(tokenizer, tmp_path):
    answers = tmp_path / "answers.json"
    with Player(tokenizer, program=program("mistakes", answers), processes=1, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found.row("turns").tolist() == [1.0]
    *refused, answered = json.loads(answers.read_text())
    assert answered == [200, None]
    assert [(status, error["code"]) for status, error in refused] == [
        (401, "invalid_api_key"),
        (404, "not_found"),
        (400, "unsupported_parameter"),
        (400, "unsupported_parameter"),
        (400, "invalid_request"),
        (400, "invalid_request"),
        (400, "invalid_request"),
        (400, "invalid_request"),
        (400, "unsupported_parameter"),
        (400, "invalid_request"),
    ]
    wanted = (
        "OPENAI_API_KEY",
        "POST /v1/chat/completions",
        "'logprobs'",
        "n=1",
        "at least one message",
        "with a role",
        "must be text",
        "'tools' must be",
        "tool_choice='auto'",
        "'tool_calls' of messages[0] must be a list",
    )
    assert all(part in error["message"] for part, (_, error) in zip(wanted, refused, strict=True))


def test_a_program_may_begin_another_conversation(tokenizer):
    settings = {"processes": 1, "max_turn_tokens": 6, "settings": {"reward": "none"}}
    with Player(tokenizer, program=program("forks"), **settings) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found.row("turns").tolist() == [2.0] and found.tokens("fork_starts").lengths.tolist() == [1]


def test_what_a_program_that_succeeds_writes_to_its_standard_error_is_logged_once_and_in_samples(tokenizer, caplog):
    prompts = prompts_of(tokenizer, TEXTS)
    with (
        caplog.at_level("INFO", "hybridflow"),
        Player(tokenizer, program=program("warns"), processes=2, max_turn_tokens=6) as player,
    ):
        found = [player.play(prompts) for _ in range(2)]
    assert caplog.text.count("the program of an episode wrote to its standard error") == 1
    shown = samples_of(found[1], lambda ids: ["" for _ in ids.rows()], split="train")
    assert [sample.stderr for sample in shown] == ["x" * 1975 + f" password={REDACTED} is slow"] * 2


def test_a_program_that_is_refused_at_a_limit_ends_its_episode_with_nothing(tokenizer):
    with Player(tokenizer, program=program("until_over"), processes=1, max_turns=2, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found.row("turns").tolist() == [2.0] and found.object("episode_return") == [0.0]


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("hangs", "took longer than environment.step_seconds=5"),
        ("fails", "its program exited with status 1: no more disk"),
        ("silent", "without a reply of the model"),
        ("talks", "is not a reward between -1e+15 and 1e+15: 'well done'"),
        ("boasts", "is not a reward between -1e+15 and 1e+15: '1e+16'"),
    ],
)
def test_a_program_that_fails_is_an_error(tokenizer, how, found):
    settings = {"processes": 1, "max_turn_tokens": 6, "step_seconds": 5.0, "retries": 0}
    with Player(tokenizer, program=program(how), **settings) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found in error.value.message and error.value.remedy


def test_a_process_that_outlives_its_program_does_not_delay_it(tokenizer):
    with Player(tokenizer, program=program("leaves"), processes=1, max_turn_tokens=6, step_seconds=15.0) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found.object("episode_return") == [2.0] and "environment/info/huge" not in str(found.meta)


@pytest.mark.parametrize(
    ("how", "reward", "expected"),
    [("loses", "exit_status", 0.0), ("talks", "exit_status", 1.0), ("talks", "none", 0.0)],
)
def test_the_reward_may_be_the_exit_status_or_that_of_another_function(tokenizer, how, reward, expected):
    settings = {"processes": 1, "max_turn_tokens": 6, "settings": {"reward": reward}}
    with Player(tokenizer, program=program(how), **settings) as player:
        assert player.play(prompts_of(tokenizer, TEXTS[:1])).object("episode_return") == [expected]


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"program": "pythn agent.py"}, "there is no program 'pythn'", "PATH"),
        ({"program": ""}, "there is no program ''", "PATH"),
        ({"program": "python 'agent.py"}, "is not a command", "Quote"),
        ({"program": "true none.py"}, "there is no file none.py", "every node"),
        ({"program": "true", "name": "guess_number"}, "are both set", "Leave one"),
        ({"program": "true", "processes": 0}, "needs environment.processes=1", "environment.processes"),
        ({"program": "true", "settings": {"reward": "last"}}, "no setting reward=last", "exit_status"),
        ({"program": "true", "settings": {"reward": ["none"]}}, "no setting reward=['none']", "exit_status"),
        ({"program": "true", "settings": {"size": 4}}, "no setting size=4", "settings.reward"),
    ],
)
def test_a_program_that_cannot_run_is_an_error(settings, found, remedy):
    with pytest.raises(ConfigError) as error:
        load_environment(EnvironmentSettings(**settings))
    assert found in error.value.message and remedy in error.value.remedy
