"""What the model cannot be shown fails the episode that asked, and not the run."""

import json
import time
from copy import copy
from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.errors import EpisodeError, ProcessKilled
from tests.oracles.training import response_logprobs, rows_of
from tests.unit.environments.players import FILE, Parrot, Player, conversations, prompts_of
from tests.unit.environments.test_program import program

EXACT = 1e-4
"""float32: cached decoding against a whole forward pass; other tokens differ by 1e-1 and more."""

USER = {"role": "user", "content": "and now?"}
REFUSED = [
    ([USER, USER], "Conversation roles must alternate"),
    ([{"role": "asistant", "content": "yes"}], "the role 'asistant', which the chat template does not know"),
    ([{"content": "yes"}], "messages[%d] has no role"),
    (["yes"], "messages[%d] is of type str, not a dictionary"),
    ([{"role": "user", "content": 5}], "messages[%d] has content of type int"),
    ("\ud800", "not valid Unicode"),
]


@pytest.mark.parametrize(("processes", "says", "reason"), [*((0, *each) for each in REFUSED), (2, *REFUSED[0])])
def test_an_observation_that_cannot_be_shown_fails_its_episode_alone(caplog, processes, says, reason):
    prompts = conversations(["12+12?"], samples=3, says=[None, says, None])
    settings = {"name": f"{FILE}:Says", "processes": processes}
    found = Parrot("gemma3").play(prompts, **settings, error_budget=1)
    assert found.row("failed").tolist() == [False, True, False]
    assert [bool(mask.any()) for mask in found.tokens("response_mask").rows()] == [True, False, True]
    assert found.object("episode_return") == [6.0] * 3 and found.row("turns").tolist() == [3.0, 1.0, 3.0]
    expected = reason.replace("%d", "0")
    assert expected in caplog.text and "failures=1 environment.error_budget=1" in caplog.text
    assert found.meta["environment/failures"] == 1.0
    with pytest.raises(EpisodeError) as error:
        Parrot("gemma3").play(prompts, **settings)
    assert expected in error.value.message and "environment.error_budget" in error.value.remedy


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        *REFUSED,
        ([], "it asked the model with no messages"),
        (5, "an object of type int, not messages"),
        ([{"role": "user"}], "messages[0] has no content"),
    ],
)
def test_a_coroutine_is_told_what_was_wrong_and_may_ask_again(caplog, says, reason):
    prompts = conversations(["12+12?"], samples=2, says=[says, None])
    found = Parrot("gemma3").play(prompts, name=f"{FILE}:asks", processes=0, error_budget=1)
    assert found.row("failed").tolist() == [True, False]
    assert reason.replace("%d", "0") in caplog.text
    corrected = Parrot("gemma3")
    found = corrected.play(conversations(["12+12?"], says=[says]), name=f"{FILE}:asks_again", processes=0)
    assert found.object("episode_return") == [0.5] and not found.row("failed").any()
    assert len(corrected.prompts) == 1 and found.tokens("fork_starts").lengths.tolist() == [0]
    assert [message["role"] for message in found.object("messages")[0]] == ["user", "assistant"]


def test_the_death_of_the_fork_server_is_named(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, ["12+34="] * 4, act=[*["nothing"] * 3, "end server"])
    settings = {"processes": 2, "max_turn_tokens": 6, "step_seconds": 1.0, "settings": {"folder": str(tmp_path)}}
    with Player(tokenizer, "Misbehaves", **settings) as player:
        for _ in range(2):
            with pytest.raises(ProcessKilled, match="fork server"):
                player.play(prompts)
        fine = prompts.with_columns(objects={"act": ["nothing"] * 4})
        assert not player.play(fine).row("failed").any()


def test_a_role_that_the_template_knows_is_shown():
    says, model = [{"role": "observation", "content": "go on"}], Parrot("gemma3")
    model.tokenizer = copy(model.tokenizer)
    model.tokenizer.chat_template = (
        "{% for m in messages if m.role != 'observation' or m.content %}{{ m.content }};{% endfor %}"
    )
    found = model.play(conversations(["12+12?"], says=[says]), name=f"{FILE}:asks", processes=0)
    assert model.prompts == ["go on;"] and not found.row("failed").any()


def test_a_first_prompt_that_is_too_long_fails_its_episode_alone(caplog, tokenizer):
    prompts = prompts_of(tokenizer, ["12+34=", "7+8="], opening=["begin: " * 10, None])
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6, error_budget=1) as player:
        found = player.play(prompts)
    assert found.row("failed").tolist() == [True, False]
    assert "its first prompt has 70 tokens; data.max_prompt_tokens=40" in caplog.text


def test_texts_that_are_far_too_long_end_episodes_without_being_tokenized_to_their_end(caplog):
    begun, long = time.monotonic(), "word " * 4_000_000  # as a whole, they would take minutes
    found = Parrot("gemma3").play(conversations(["12+12?"], says=[long]), name=f"{FILE}:Says", processes=0)
    assert found.row("turns").tolist() == [1.0] and found.row("truncated").all()
    assert found.object("episode_return") == [1.0] and found.meta["environment/limited/max_response_tokens"] == 1.0
    prompts = conversations(["12+12?"] * 2, says=[long, None])
    found = Parrot("gemma3").play(prompts, name=f"{FILE}:asks", processes=0, error_budget=1)
    assert found.row("failed").tolist() == [True, False]
    assert "its first prompt has at least " in caplog.text and "tokens; data.max_prompt_tokens=900" in caplog.text
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("forks", [False, True])
def test_an_empty_prompt_fails_its_episode_alone(caplog, tokenizer, forks):
    prompts = prompts_of(tokenizer, ["12+34=", "7+8="], says=["", "go:"], forks=[forks] * 2)
    with Player(tokenizer, "twice", processes=0, max_turn_tokens=6, error_budget=1) as player:
        found = player.play(prompts)
    assert found.row("failed").tolist() == [True, False] and found.row("turns").tolist() == [float(forks), 1.0 + forks]
    assert "it asked the model with an empty text. Ask with" in caplog.text


def test_a_program_gets_a_status_of_400_with_the_reason_and_may_go_on(tmp_path: Path):
    answers = tmp_path / "answers.json"
    found = Parrot("gemma3").play(conversations(["12+12?"]), program=program("refused", answers), processes=1)
    (status, error), (again, _) = json.loads(answers.read_text())
    assert (status, again, error["code"]) == (400, 200, "invalid_request")
    assert "Conversation roles must alternate" in error["message"]
    assert not found.row("failed").any() and found.object("episode_return") == [0.25]
    assert found.row("turns").tolist() == [1.0] and found.tokens("fork_starts").lengths.tolist() == [0]


def test_a_batch_without_any_reply_is_an_error(tokenizer):
    with Player(tokenizer, "silent", processes=0) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts_of(tokenizer, ["12+34=", "7+8="]))
    assert "None of the 2 episodes" in error.value.message and "(0 of them failed)" in error.value.message
    assert "ask the model at least once" in error.value.remedy


@pytest.mark.parametrize("again", [False, True])
def test_a_reply_that_nobody_waited_for_is_not_trained_on_and_not_taken_for_another(tokenizer, again):
    prompts = prompts_of(tokenizer, ["12+34=", "7+8="], again=[again] * 2)
    with Player(tokenizer, "impatient", processes=2, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.row("turns").tolist() == [4.0 if again else 3.0] * 2
    assert found.tokens("fork_starts").lengths.tolist() == [0] * 2
    another = tokenizer.encode(" another", add_special_tokens=False)
    for row, messages, value in zip(
        rows_of(found), found.object("messages"), found.object("episode_return"), strict=True
    ):
        assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
        sampled = row["response_mask"].bool()
        assert row["response_ids"][~sampled].tolist() == another
        expected, _ = response_logprobs(player.model, row, 1.0)
        assert torch.allclose(row["rollout_logprobs"][sampled], expected[sampled], atol=EXACT)
        first, replied = len(row["prompt_ids"]), int((~sampled).nonzero()[0])
        assert value == first + (first + replied + len(another))


def test_an_episode_that_did_not_wait_for_its_first_reply_begins_with_the_second_question(tokenizer):
    prompts = prompts_of(tokenizer, ["12+34=", "7+8="])
    with Player(tokenizer, "hasty", processes=2, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.object("prompt") == ["12+34=", "7+8="] and found.tokens("fork_starts").lengths.tolist() == [0, 0]
    assert found.object("episode_return") == [float(len(tokenizer.encode(text))) for text in ("12+34=", "7+8=")]
    assert [len(messages) for messages in found.object("messages")] == [2, 2]


def test_a_client_that_stops_waiting_and_asks_again_continues_its_conversation(tokenizer, monkeypatch):
    with Player(tokenizer, program=program("stops_waiting"), processes=1, max_turn_tokens=6) as player:
        poll, seconds = player.poll, iter([1.5])

        def slow() -> Batch:
            time.sleep(next(seconds, 0.0))
            return poll()

        monkeypatch.setattr(player, "poll", slow)
        found = player.play(prompts_of(tokenizer, ["12+34="]))
    assert found.object("episode_return") == [1.0] and found.row("turns").tolist() == [2.0]
    assert found.tokens("fork_starts").lengths.tolist() == [0]
    assert [message["role"] for message in found.object("messages")[0]] == ["user", "assistant"]
