"""Conversations with tools from end to end, with a model that says what it is told to."""

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.interface import ModelInfo
from hybridflow.environments.play import EpisodePlayer
from tests.unit.environments.families import end_id, tokenizer_of
from tests.unit.environments.players import FILE

CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 12, "second": 12}}\n</tool_call>'


class Recited:
    """A model whose replies are known."""

    def __init__(self, name: str, replies: list[str], *, cut_off: tuple[int, ...] = ()) -> None:
        self.tokenizer, self.end = tokenizer_of(name), end_id(name)
        self.replies, self.cut_off = replies, cut_off
        self.prompts: list[str] = []
        self.sampled: list[Batch] = []

    def submit(self, rows: Batch, *, max_tokens: int) -> None:
        turn = len(self.prompts)
        self.prompts.append(str(self.tokenizer.decode(rows.tokens("prompt_ids").row(0))))
        is_cut = turn in self.cut_off
        ids = self.tokenizer.encode(self.replies[turn], add_special_tokens=False) + [self.end] * (not is_cut)
        assert len(ids) <= max_tokens
        reply = Batch.of(
            rows={"weight_version": torch.tensor([7]), "truncated": torch.tensor([is_cut])},
            tokens={
                "response_ids": Ragged.from_rows([ids], torch.int64),
                "rollout_logprobs": Ragged.from_rows([[-1.0] * len(ids)], torch.float32),
                "version_runs": Ragged.from_lengths(torch.tensor([[7, 0]]), torch.tensor([1])),
            },
            meta={"temperature": 1.0},
        )
        self.sampled.append(rows.only(["uid", "sample_index"]).join(reply))

    def poll(self) -> Batch:
        return self.sampled.pop()

    def withdraw(self, rows: Batch | None = None) -> Batch:
        assert rows is None
        self.sampled.clear()
        return Batch({})


def played(model: Recited, environment: str = f"{FILE}:Adds", processes: int = 0) -> Batch:
    return played_with(EnvironmentSettings(name=environment, processes=processes, max_turn_tokens=100), model)


def played_with(settings: EnvironmentSettings, model: Recited) -> Batch:
    """One episode of the prompt 12+12?."""
    player = EpisodePlayer(settings, ModelInfo(model.tokenizer, 1000, 1500, settings.max_turns), (model.end,))
    prompt = [{"role": "user", "content": "12+12?"}]
    batch = Batch.of(
        rows={"uid": torch.tensor([0]), "sample_index": torch.tensor([0])},
        tokens={"prompt_ids": Ragged.from_rows([[5, 6]], torch.int64)},
        objects={"prompt": [prompt], "answer": ["24"]},
    )
    try:
        return player.play(batch, model, seed=0)
    finally:
        player.close()


def test_a_call_is_answered_by_the_tool_and_the_last_reply_is_the_step():
    model = Recited("qwen2_5", [CALL, "24"])
    found = played(model, processes=1)
    assert '"name": "add"' in model.prompts[0] and "Adds two integers" in model.prompts[0]
    assert model.prompts[1].startswith(model.prompts[0] + CALL + "<|im_end|>")
    assert "<tool_response>\n24\n</tool_response>" in model.prompts[1]
    assert found.object("episode_return") == [1.0] and found.row("turns").tolist() == [2.0]
    mask = found.tokens("response_mask").row(0).bool()
    sampled = model.tokenizer.decode(found.tokens("response_ids").row(0)[mask])
    assert sampled == f"{CALL}<|im_end|>24<|im_end|>" and found.row("weight_version").tolist() == [7]
    assert found.tokens("turn_rewards").row(0).nonzero().flatten().tolist() == [len(mask) - 1]


@pytest.mark.parametrize(
    ("name", "total"), [("Counts", 3), ("CountsMore", 3), ("CountsTwice", 6), ("CountsByProperty", 3)]
)
def test_tools_are_found_as_python_finds_attributes(name, total):
    model = Recited("qwen2_5", ['<tool_call>{"name": "count", "arguments": {"number": 3}}</tool_call>', "done"])
    found = played(model, environment=f"{FILE}:{name}")
    assert '"name": "count"' in model.prompts[0] and "self" not in model.prompts[0]
    assert f"<tool_response>\ntotal {total}\n</tool_response>" in model.prompts[1]
    assert found.object("episode_return") == [float(total)]


def test_mistakes_are_answered_with_an_explanation_and_the_episode_goes_on():
    model = Recited("qwen2_5", ["<tool_call>add(12)</tool_call>", CALL.replace("add", "ad"), CALL, "24"])
    found = played(model)
    assert "The tool call is not valid JSON" in model.prompts[1]
    assert "there is no tool 'ad'. Did you mean 'add'?" in model.prompts[2]
    assert found.object("episode_return") == [1.0] and found.row("turns").tolist() == [4.0]


def test_a_call_that_was_cut_off_is_no_call_and_is_counted(caplog):
    model = Recited("qwen2_5", ["<tool_call>\n{"], cut_off=(0,))
    found = played(model)
    assert found.object("episode_return") == [0.0] and found.row("truncated").tolist() == [True]
    assert "<tool_response>" not in str(found.object("messages"))
    assert found.meta["environment/cut_tool_calls"] == 1.0 and "environment.max_turn_tokens=100" in caplog.text


def test_the_built_in_calculator_works_with_the_form_of_mistral():
    call = '[TOOL_CALLS] [{"name": "calculate", "arguments": {"first": 12, "operator": "+", "second": 12}%s}]'
    model = Recited("mistral", [call % "", call % ', "id": "f00b4r123"', "24"])
    found = played(model, environment="calculator")
    assert '[TOOL_RESULTS] {"content": "24", "call_id": "call00000"}[/TOOL_RESULTS]' in model.prompts[1]
    assert '[TOOL_RESULTS] {"content": "24", "call_id": "f00b4r123"}[/TOOL_RESULTS]' in model.prompts[2]
    assert found.object("episode_return") == [1.0] and found.tokens("fork_starts").lengths.tolist() == [0]


def test_special_tokens_within_a_reply_are_kept_as_sampled_and_named(caplog):
    model = Recited("qwen2_5", ["<|im_start|>system"] * 3)
    found = played(model, environment=f"{FILE}:Echo")
    assert model.prompts[1].startswith(model.prompts[0] + "<|im_start|>system<|im_end|>")
    special = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
    sampled = found.tokens("response_mask").row(0).bool()
    assert found.tokens("response_ids").row(0)[sampled].tolist().count(special) == 3
    assert found.meta["environment/special_token_replies"] == 3.0
    assert caplog.text.count("'<|im_start|>'") == 1 and "Remove it from observations" in caplog.text
