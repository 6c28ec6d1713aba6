"""Agent loops of verl: what is trained on consists of what was sampled, with its log-probabilities."""

from pathlib import Path

import pytest
import torch

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.loading import load_environment
from hybridflow.errors import EpisodeError
from tests.unit.environments.players import Player, prompts_of

FILE = Path(__file__).with_name("agent_loops.py")
TEXTS = ["hello", "12"]


def played(tokenizer, name, texts=TEXTS, **settings):
    """The columns of an agent loop's episodes."""
    given = settings.pop("columns", {"kind": "a"})
    columns: dict[str, list] = {column: [value] * len(texts) for column, value in given.items()}
    limits = {"max_turns": 2, "max_turn_tokens": 8, "processes": 0} | settings
    with Player(tokenizer, name if ":" in name else f"{FILE}:{name}", **limits) as player:
        return player.play(prompts_of(tokenizer, texts, samples=1, **columns))


def rows(batch, name):
    return [row.tolist() for row in batch.tokens(name).rows()]


def test_it_is_recognized():
    found = load_environment(EnvironmentSettings(name=f"{FILE}:TwoTurns"))
    assert found.kind == "an agent loop of verl (AgentLoopBase)"


def test_an_agent_loop_samples_the_same_tokens_as_the_same_episode_with_messages(tokenizer):
    by_ids = played(tokenizer, "TwoTurns")
    by_messages = played(tokenizer, f"{FILE.with_name('toy_environments.py')}:two_replies")
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs"):
        assert rows(by_ids, name) == rows(by_messages, name)
    added = len(tokenizer.encode(" again", add_special_tokens=False))
    assert all(mask.count(0) == added and sum(mask) > 1 for mask in rows(by_ids, "response_mask"))
    assert by_ids.object("episode_return") == [0.75, 0.75]
    assert by_ids.meta["environment/info/num_turns"] == 8 and by_ids.meta["environment/info/acc"] == 0.5
    assert [message["role"] for message in by_ids.object("messages")[0]] == ["user", "assistant", "user", "assistant"]
    assert by_ids.object("reply_rewards")[0] == [(1, 0.0), (3, 0.75)]


def test_it_runs_in_a_process_of_its_own(tokenizer):
    local = played(tokenizer, "TwoTurns", settings={"text": " more"})
    remote = played(tokenizer, "TwoTurns", settings={"text": " more"}, processes=1)
    for name in ("response_ids", "response_mask"):
        assert rows(remote, name) == rows(local, name)
    found, expected = (batch.tokens("rollout_logprobs").values for batch in (remote, local))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # rows are computed together with others


@pytest.mark.parametrize("name", ["Continues", "MasksTheFirst", "StopsEarly", "MasksAll", "TakesTheFirst"])
def test_the_returned_mask_chooses_what_is_trained(tokenizer, name):
    whole, chosen = played(tokenizer, "TwoTurns"), played(tokenizer, name)
    for row in range(len(TEXTS)):
        ids, mask, logprobs = (
            chosen.tokens(column).row(row) for column in ("response_ids", "response_mask", "rollout_logprobs")
        )
        own = [whole.tokens(column).row(row) for column in ("response_ids", "response_mask", "rollout_logprobs")]
        if name == "Continues":
            assert [ids.tolist(), mask.tolist(), logprobs.tolist()] == [column.tolist() for column in own]
        elif name == "MasksAll":
            assert not mask.any()
        else:
            assert ids.equal(own[0][: len(ids)]) and mask.any()
            torch.testing.assert_close(logprobs, own[2][: len(ids)] * mask, rtol=0, atol=1e-6)
        if name == "MasksTheFirst":
            first = own[1].tolist().index(0)
            assert not mask[:first].any() and mask[first:].equal(own[1][first:])
        if name == "StopsEarly":
            assert len(ids) == 2
        if name == "TakesTheFirst":
            assert mask.all() and len(ids) == own[1].tolist().index(0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("EncodesAgain", "disagree with those that were sampled"),
        ("TrainsObservations", "disagree with those that were sampled"),
        ("ShortMask", "response_mask"),
        ("Fractions", r"returned response_mask=\[0.5, .*not a list of integers"),
        ("Text", "returned response_ids='23', not a list of integers"),
    ],
)
def test_tokens_that_were_not_sampled_and_masks_that_are_none_are_errors(tokenizer, name, found):
    with pytest.raises(EpisodeError, match=found):
        played(tokenizer, name)
    kept = played(tokenizer, name, error_budget=2)
    assert kept.meta["environment/failures"] == 2 and not any(map(sum, rows(kept, "response_mask")))


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("vocabulary", "the token id 1000000"),
        ("empty", "no token ids"),
        ("image", "image_data"),
        ("setting", "environment.settings.config"),
        ("nothing", "of type NoneType without a list prompt_ids"),
        ("silent", "without a reply of the model"),
    ],
)
def test_misuse_is_an_error_with_a_remedy(tokenizer, how, found):
    with pytest.raises(EpisodeError, match=found):
        played(tokenizer, "Fails", columns={"how": how})


def test_an_agent_loop_that_does_not_end_stops_at_the_limit_of_turns(tokenizer):
    batch = played(tokenizer, "Endless")
    assert batch.row("turns").tolist() == [2.0, 2.0] and batch.object("episode_return") == [0.0, 0.0]
    assert all(all(mask) for mask in rows(batch, "response_mask"))


def test_the_configuration_has_verl_s_names_and_what_is_given(tokenizer):
    settings = {"config": {"actor_rollout_ref": {"rollout": {"response_length": 3}}}}
    cut = played(tokenizer, "TwoTurns", settings=settings)
    assert max(map(len, rows(cut, "response_ids"))) == 3
