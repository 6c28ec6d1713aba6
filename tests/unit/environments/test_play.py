"""Episodes of a batch: the columns of `generate`, the tokens that were sampled, and what failures cost."""

import json
import re

import psutil
import pytest
import torch

from hybridflow.config.algorithm import Algorithm
from hybridflow.config.environment import Credit
from hybridflow.config.rollout import Sampling
from hybridflow.dataflows.evaluation import samples_of
from hybridflow.engines.rollout.sampling import row_keys
from hybridflow.environments.running import environment_seed
from hybridflow.errors import EpisodeError
from hybridflow.observability.samples import sample_of_row
from hybridflow.rewards.runners import forkserver
from hybridflow.workers.estimation import AdvantageEstimation
from tests.oracles.advantages import returns_of_replies
from tests.oracles.training import response_logprobs, rows_of
from tests.unit.algorithms.examples import itself
from tests.unit.environments.players import END, Player, prompts_of

TEXTS = ["12+34=", "7+8=", "guess:", "say something: "]
EXACT = 1e-4
"""float32: cached decoding against a whole forward pass; other tokens differ by 1e-1 and more."""


def ids_of(batch, name="response_ids"):
    return [row.tolist() for row in batch.tokens(name).rows()]


def same(found, expected):
    for name, column in expected.token_columns.items():
        assert torch.equal(found.tokens(name).values, column.values), name
        assert torch.equal(found.tokens(name).offsets, column.offsets), name
    for name, column in expected.row_columns.items():
        assert torch.equal(found.row(name), column), name


@pytest.mark.parametrize("processes", [0, 12])
def test_an_environment_of_one_turn_is_plain_generation_bit_for_bit(tokenizer, processes):
    prompts = prompts_of(tokenizer, TEXTS, samples=3)
    with Player(tokenizer, "Once", max_turns=1, processes=processes, tokens=20) as player:
        found = player.play(prompts)
        plain = player.engine.generate(prompts, Sampling(), max_response_tokens=20, seed=3)
    expected = prompts.join(plain)
    assert found.meta.items() >= expected.meta.items()
    same(found.only(expected.columns), expected)
    assert found.object("prompt") == prompts.object("prompt")
    texts = tokenizer.batch_decode([ids[: len(ids) - (ids[-1] == END)] for ids in ids_of(plain)])
    assert found.object("episode_return") == [float(len(text)) for text in texts]


@pytest.mark.parametrize(("name", "processes"), [("Echo", 0), ("Echo", 3), ("echo", 0), ("echo", 3), ("AsyncEcho", 3)])
def test_observations_lie_between_replies_and_only_sampled_tokens_have_a_mask(tokenizer, name, processes):
    with Player(tokenizer, name, processes=processes, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS, samples=2))
    digits = [environment_seed(3, uid) % 10 for uid in found.row("uid").tolist()]
    for row, digit, messages in zip(rows_of(found), digits, found.object("messages"), strict=True):
        sampled = row["response_mask"].bool()
        observed = tokenizer.decode(row["response_ids"][~sampled])
        assert re.fullmatch(f"( {digit}:.{{0,4}}){{2}}", observed, re.DOTALL)
        assert sampled[0] and sampled[-1] and [message["role"] for message in messages[::2]] == ["user"] * 3
        expected, _ = response_logprobs(player.model, row, 1.0)
        assert torch.allclose(row["rollout_logprobs"][sampled], expected[sampled], atol=EXACT)
        assert not row["rollout_logprobs"][~sampled].any()
    assert found.row("turns").tolist() == [3.0] * 8 and found.object("episode_return") == [6.0] * 8


def test_an_episode_does_not_depend_on_the_others_or_on_the_number_of_processes(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        whole = player.play(prompts)
        alone = player.play(prompts.slice(5, 6))
    with Player(tokenizer, "Echo", processes=3, max_turn_tokens=6) as player:
        apart = player.play(prompts)
    assert ids_of(apart) == ids_of(whole) and ids_of(alone) == ids_of(whole)[5:6]
    assert ids_of(whole)[0] != ids_of(whole)[1]


@pytest.mark.parametrize("processes", [3, 8])
def test_tokens_do_not_depend_on_the_time_that_environments_take(tokenizer, processes):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        expected = player.play(prompts)
    with Player(tokenizer, "SlowEcho", processes=processes, max_turn_tokens=6) as player:
        for _ in range(2):
            found = player.play(prompts)
            assert ids_of(found) == ids_of(expected) and found.object("messages") == expected.object("messages")
            logprobs = found.tokens("rollout_logprobs").values, expected.tokens("rollout_logprobs").values
            assert torch.allclose(*logprobs, atol=EXACT)


def test_an_episode_goes_on_while_the_environment_of_another_takes_long(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS, must_wait=[True, False, True, False])
    settings = {"settings": {"folder": str(tmp_path)}, "max_turn_tokens": 6, "step_seconds": 50.0, "retries": 0}
    with Player(tokenizer, "Waits", processes=4, **settings) as player:
        found = player.play(prompts)  # with a barrier, the steps that wait would exceed their limit
    assert found.object("episode_return") == [6.0] * 4


def test_after_an_error_nothing_is_left_running(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS, act=["nothing", "raise", "hang", "nothing"])
    settings = {"settings": {"folder": str(tmp_path), "times": 2}, "max_turn_tokens": 6}
    with Player(tokenizer, "Misbehaves", processes=4, **settings) as player:
        with pytest.raises(EpisodeError, match="ZeroDivisionError"):
            player.play(prompts)
        assert player.engine.num_running == 0
        (tmp_path / "1").touch()  # it has misbehaved often enough
        assert player.play(prompts).object("episode_return") == [6.0] * 4


def test_no_two_turns_share_random_numbers(tokenizer):
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=2, settings={"turns": 8}) as player:
        player.play(prompts_of(tokenizer, TEXTS, samples=4))
    keys = [row_keys(3, batch.row("uid"), batch.row("sample_index")) for batch in player.batches]
    drawn = torch.cat(keys).tolist()
    assert len(drawn) == 8 * 16 == len(set(drawn))


def test_rewards_stand_at_the_last_token_of_each_reply(tokenizer):
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS))
    for row in rows_of(found):
        places = row["turn_rewards"].nonzero().flatten().tolist()
        ends = [
            place
            for place, one in enumerate(row["response_mask"].tolist())
            if one and (place + 1 == len(row["response_mask"]) or not row["response_mask"][place + 1])
        ]
        assert places == ends and row["turn_rewards"][places].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.9])
def test_each_token_of_a_reply_gets_the_discounted_return_of_the_reply(tokenizer, gamma):
    credit = Credit.return_to_go
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6, credit=credit, gamma=gamma) as player:
        found = player.play(prompts_of(tokenizer, TEXTS, samples=2))
        evaluated = player.play(prompts_of(tokenizer, TEXTS, samples=2), is_evaluation=True)
    expected = returns_of_replies([1.0, 2.0, 3.0], gamma)
    assert found.object("episode_return") == pytest.approx([expected[0]] * len(found))
    assert evaluated.object("episode_return") == [6.0] * len(found) and "token_scores" not in evaluated
    scores = torch.tensor(found.object("episode_return"))
    plain = Algorithm(advantage="reinforce_plus_plus", gamma=1.0, whiten_advantages=False)
    advantages = AdvantageEstimation(plain, itself).estimate(found.with_columns(rows={"scores": scores}))
    for row, values in zip(rows_of(found), advantages.tokens("advantages").rows(), strict=True):
        later = row["turn_rewards"].flip(0).cumsum(0).flip(0)  # 6 in the first reply, 5 in the second, 3 in the third
        of_reply = {6.0: expected[0], 5.0: expected[1], 3.0: expected[2]}
        wanted = [of_reply[left] * one for left, one in zip(later.tolist(), row["response_mask"].tolist(), strict=True)]
        assert values.tolist() == pytest.approx(wanted, abs=1e-5)  # float32: sums of three numbers below 10


def test_an_episode_is_shown_turn_by_turn_with_the_reward_after_each_reply(tokenizer):
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:2], samples=2))
    for sample in samples_of(found, lambda ids: tokenizer.batch_decode(ids.rows()), split="train"):
        assert [turn.role for turn in sample.turns] == ["assistant", "user"] * 2 + ["assistant"]
        assert [turn.reward for turn in sample.turns] == [1.0, None, 2.0, None, 3.0]
        spoken = "".join(turn.content for turn in sample.turns)
        assert spoken == sample.response.replace(tokenizer.decode([END]), "")
        assert sample_of_row(json.loads(json.dumps(sample.row(1)))).turns == sample.turns


def test_numbers_in_the_information_of_steps_are_summed(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6, settings={"turns": 2}) as player:
        whole = player.play(prompts)
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6, max_turns=2) as player:
        limited = player.play(prompts)
    assert whole.meta["environment/info/turns"] == limited.meta["environment/info/turns"] == 16.0
    assert whole.meta["environment/episodes_with/turns"] == 8.0


def test_the_first_observation_replaces_the_prompt(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:2], opening=["begin: ", None])
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.object("prompt") == ["begin: ", TEXTS[1]]
    assert ids_of(found, "prompt_ids") == [tokenizer.encode("begin: "), tokenizer.encode(TEXTS[1])]


def test_a_first_prompt_beyond_the_limit_is_an_error(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:1], opening=["begin: " * 10])
    with Player(tokenizer, "Echo", processes=0) as player, pytest.raises(EpisodeError, match="has 70 tokens") as error:
        player.play(prompts)
    assert "Raise data.max_prompt_tokens" in error.value.message


@pytest.mark.parametrize(
    ("settings", "limit", "remedy"),
    [
        ({"max_turns": 2}, "environment.max_turns=2", "raise environment.max_turns"),
        ({"tokens": 17, "settings": {"turns": 8}}, "data.max_response_tokens=17", "lower environment.max_turn_tokens"),
    ],
)
def test_it_is_counted_and_said_once_that_most_episodes_end_at_a_limit(tokenizer, caplog, settings, limit, remedy):
    prompts, name = prompts_of(tokenizer, TEXTS, samples=2), limit.split("=")[0].split(".")[1]
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6, **settings) as player:
        for _ in range(2):
            found = player.play(prompts)
    assert found.meta[f"environment/limited/{name}"] == 8.0
    assert caplog.text.count(f"8 of 8 episodes ended at {limit} before they were done") == 1 and remedy in caplog.text
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.meta["environment/limited/max_turns"] == found.meta["environment/limited/max_response_tokens"] == 0.0
    assert caplog.text.count("before they were done") == 1


def test_an_episode_that_has_reached_a_limit_gets_no_further_reply(tokenizer):
    with Player(tokenizer, "insists", processes=0, max_turn_tokens=6, tokens=9) as player:
        found = player.play(prompts_of(tokenizer, TEXTS))
    assert found.row("turns").tolist() == [1.0] * 4 and found.object("episode_return") == [3.0] * 4


def test_limits_of_turns_and_tokens_end_an_episode_with_what_it_has_earned(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "Echo", processes=0, max_turns=2, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.row("turns").tolist() == [2.0] * 8 and found.object("episode_return") == [3.0] * 8
    with Player(tokenizer, "Echo", processes=0, tokens=17, max_turn_tokens=6, settings={"turns": 8}) as player:
        found = player.play(prompts)
    lengths = found.tokens("response_ids").lengths
    assert int(lengths.max()) <= 17 and found.row("truncated").all()
    assert all(row["response_mask"][-1] for row in rows_of(found))
    assert [sum(range(1, int(turns) + 1)) for turns in found.row("turns")] == found.object("episode_return")


def test_an_observation_longer_than_the_budget_ends_the_episode_before_it(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS[:1], act=["long"])
    with Player(tokenizer, "Misbehaves", processes=0, max_turn_tokens=6, settings={"folder": str(tmp_path)}) as player:
        found = player.play(prompts)
    assert found.row("turns").tolist() == [2.0] and found.row("truncated").all()
    assert "xxx" not in tokenizer.decode(ids_of(found)[0]) and found.object("episode_return") == [2.0]


@pytest.mark.parametrize(
    ("act", "found"),
    [
        ("raise", "ZeroDivisionError: division by zero (toy_environments.py, line"),
        ("parse", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) (toy_"),
        ("huge", "the reward 1e+16 of type float, not a number between -1e+15 and 1e+15"),
        ("none", "'step' returned None, not four values"),
        ("three", "'step' returned 3 values"),
        ("text reward", "the reward 'failed' of type str"),
        ("nan", "the reward nan"),
        ("done", "done='yes'"),
        ("number", "returned 5 of type int as the observation"),
        ("info", "info=None"),
    ],
)
@pytest.mark.parametrize("processes", [0, 1])
def test_a_step_that_returns_something_else_is_an_error(tokenizer, tmp_path, act, found, processes):
    prompts = prompts_of(tokenizer, TEXTS[:1], act=[act])
    settings = {"processes": processes, "max_turn_tokens": 6, "settings": {"folder": str(tmp_path)}}
    with Player(tokenizer, "Misbehaves", **settings) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts)
    assert found in error.value.message and "environment.error_budget" in error.value.remedy
    assert len(list(tmp_path.iterdir())) == 1  # it is not tried again


@pytest.mark.parametrize("seconds", [0, 0.001, None])
def test_an_environment_that_needs_an_event_loop_is_told_how_to_get_one(tokenizer, seconds):
    prompts = prompts_of(tokenizer, TEXTS[:1], seconds=[seconds])
    with Player(tokenizer, "WaitsForTasks", processes=0) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts)
    assert "Set environment.processes to 1 or more" in f"{error.value.message} {error.value.remedy}"


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_of_close_does_not_hide_that_of_a_step(tokenizer, processes):
    prompts = prompts_of(tokenizer, TEXTS[:1])
    with Player(tokenizer, "FailsTwice", processes=processes) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts)
    assert "it raised ZeroDivisionError: the cause (toy_environments.py, line" in error.value.message
    assert "Its method 'close' then raised ValueError: closing (toy_environments.py, line" in error.value.message
    with Player(tokenizer, "FailsToClose", processes=processes) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts)
    assert "it raised ValueError: closing" in error.value.message


def test_an_environment_may_return_information_from_reset_as_in_gymnasium(tokenizer):
    with Player(tokenizer, "Informs", processes=0, max_turn_tokens=6) as player:
        found = player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert found.object("prompt") == ["begin: "] and found.object("episode_return") == [6.0]


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("hang", "took longer than environment.step_seconds=1"),
        ("kill", "was killed by signal 9"),
        ("exit", "exited with status 5"),
        ("disconnect", "ConnectionResetError: gone"),
    ],
)
def test_an_episode_whose_process_fails_starts_again_and_ends_as_it_would_have(
    tokenizer, tmp_path, caplog, act, reason
):
    prompts = prompts_of(tokenizer, TEXTS, act=["nothing", act, "nothing", "nothing"])
    settings = {"settings": {"folder": str(tmp_path), "times": 2}, "max_turn_tokens": 6, "step_seconds": 1.0}
    with Player(tokenizer, "Misbehaves", processes=2, **settings) as player:
        found = player.play(prompts)
    with Player(tokenizer, "Echo", processes=0, max_turn_tokens=6) as player:
        expected = player.play(prompts)
    assert ids_of(found) == ids_of(expected) and found.object("episode_return") == [6.0] * 4
    assert caplog.text.count(reason) == 2 and "uid=6 sample_index=0 starts again" in caplog.text


def test_processes_that_die_while_they_are_idle_are_replaced_without_a_retry(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS)
    with Player(tokenizer, "Echo", processes=4, max_turn_tokens=6, retries=0) as player:
        expected = player.play(prompts)
        servers = [each for each in psutil.Process().children() if forkserver.__name__ in " ".join(each.cmdline())]
        idle = [process for server in servers for process in server.children()]
        for process in idle:
            process.kill()
        psutil.wait_procs(idle, timeout=10)
        found = player.play(prompts)
    assert len(idle) >= 4
    assert ids_of(found) == ids_of(expected)
    assert not found.meta.get("environment/retries")


def test_after_all_retries_a_failed_episode_is_masked_and_does_not_change_its_groups_mean(tokenizer, tmp_path, caplog):
    prompts = prompts_of(tokenizer, TEXTS[:2], samples=2).with_columns(
        objects={"act": ["nothing", "kill", "nothing", "nothing"]}
    )
    settings = {"settings": {"folder": str(tmp_path)}, "max_turn_tokens": 6, "retries": 1, "error_budget": 1}
    with Player(tokenizer, "Misbehaves", processes=2, **settings) as player:
        found = player.play(prompts)
        assert [bool(row["response_mask"].any()) for row in rows_of(found)] == [True, False, True, True]
        assert found.object("episode_return") == [6.0] * 4
        assert len(list(tmp_path.iterdir())) == 2 and "failures=1" in caplog.text
        with pytest.raises(EpisodeError, match="rank so far: 2;"):
            player.play(prompts)


def test_a_conversation_that_is_not_continued_is_a_further_sequence_of_its_row(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:2], samples=2, forks=[True, False])
    with Player(tokenizer, "forking", processes=0, max_turn_tokens=6) as player:
        found = player.play(prompts)
    assert found.meta["environment/forks"] == 2.0 and found.object("episode_return") == [1.0] * 4
    samples = samples_of(found, lambda ids: ["" for _ in ids.rows()], split="train", with_ids=True)
    for row, sample in zip(rows_of(found), samples, strict=True):
        starts = row["fork_starts"].tolist()
        assert sample.fork_starts == starts and sample.response_mask == row["response_mask"].tolist()
        assert [turn.content for turn in sample.turns if turn.begins_fork] == ["again"] * len(starts)
        parts, first = [], row["prompt_ids"]
        for start in starts:
            prompt = tokenizer.encode("again")
            assert row["response_ids"][start : start + len(prompt)].tolist() == prompt
            assert not row["response_mask"][start : start + len(prompt)].any()
            parts += [(first, 0, start), (torch.tensor(prompt), start + len(prompt), len(row["response_ids"]))]
        for prompt, start, end in parts or [(first, 0, len(row["response_ids"]))]:
            alone = {"prompt_ids": prompt, "response_ids": row["response_ids"][start:end]}
            expected, _ = response_logprobs(player.model, alone, 1.0)
            sampled = row["response_mask"][start:end].bool()
            assert torch.allclose(row["rollout_logprobs"][start:end][sampled], expected[sampled], atol=EXACT)
        assert [turn.reward for turn in sample.turns] == [0.0, None, 1.0]


def test_the_tokens_of_forks_count_towards_the_limit(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:1], forks=[True])
    with Player(tokenizer, "forking", processes=0, max_turn_tokens=6, tokens=9) as player:
        found = player.play(prompts)
    assert int(found.tokens("response_ids").lengths[0]) <= 9 and found.row("truncated").all()


def test_a_whole_episode_has_a_limit_too(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS[:1], act=["hang"])
    settings = {"settings": {"folder": str(tmp_path)}, "max_turn_tokens": 6, "retries": 0, "episode_seconds": 1.0}
    limit = pytest.raises(EpisodeError, match=r"environment.episode_seconds=1")
    with Player(tokenizer, "Misbehaves", processes=1, **settings) as player, limit:
        player.play(prompts)


def test_coroutines_that_wait_for_something_else_need_a_process(tokenizer):
    with Player(tokenizer, "AsyncEcho", processes=0) as player, pytest.raises(EpisodeError) as error:
        player.play(prompts_of(tokenizer, TEXTS[:1]))
    assert "environment.processes" in error.value.remedy


def test_a_row_that_cannot_be_sent_is_an_error(tokenizer):
    with Player(tokenizer, "Echo", processes=1) as player, pytest.raises(EpisodeError, match="cannot be sent") as error:
        player.play(prompts_of(tokenizer, TEXTS[:1], when=[{1, 2}]))
    assert "environment.processes=0" in error.value.remedy


def test_kuhn_poker_trains_one_seat_and_samples_for_both(tokenizer):
    prompts = prompts_of(tokenizer, ["card: "] * 6, samples=2)
    with Player(tokenizer, "kuhn_poker", max_turn_tokens=4) as player:
        found = player.play(prompts)
    sampled = sum(len(batch) for batch in player.batches)
    replies = sum(message["role"] == "assistant" for messages in found.object("messages") for message in messages)
    assert 12 <= replies < sampled == int(found.row("turns").sum())
    assert all(abs(value) in (1.0, 2.0) for value in found.object("episode_return"))
    assert {prompt[:6] for prompt in found.object("prompt")} == {"card: "}
