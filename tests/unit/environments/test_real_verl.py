"""Tools and agent loops of verl: the same rewards, token ids and masks as when verl runs them (`make adapters`)."""

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.environments.played import Played, call
from tests.unit.environments.players import Parrot, conversations

pytestmark = pytest.mark.library("verl")

FILE = Path(__file__).with_name("verl_loops.py")
LOOPS = "tests.unit.environments.verl_loops"


@pytest.mark.parametrize("answers", [["abc", "abcdef"], ["abc"], []])
def test_a_tool(answers):
    loops = import_module(LOOPS)
    tool = loops.Length({}, import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(loops.SCHEMA))

    async def driven() -> tuple[list[str], list[float]]:
        instance, _ = await tool.create(None, add=2)
        outcomes = [await tool.execute(instance, {"answer": answer}) for answer in answers]
        final = await tool.calc_reward(instance)
        await tool.release(instance)
        return [response.text for response, *_ in outcomes], [*(reward for _, reward, _ in outcomes), final]

    texts, rewards = asyncio.run(driven())
    row = {"tools_kwargs": {"grade": {"create_kwargs": {"add": 2}}}}
    settings = {"config": {}, "tool_schema": loops.SCHEMA}
    replies = [*(call("grade", answer=answer) for answer in answers), "done"]
    found = Played(f"{FILE}:Length", replies, settings=settings, **row)
    assert found.finished.rewards == rewards and found.last_shown == ["Begin.", *texts]
    assert [ask.tools for ask in found.asked] == [[loops.SCHEMA]] * len(replies)


class Server:
    """Takes the place of verl's client of inference servers, with known replies."""

    def __init__(self, replies: list[list[int]]) -> None:
        self.left, self.kind = iter(replies), import_module("verl.workers.rollout.replica").TokenOutput

    async def generate(self, **_: object) -> object:
        ids = next(self.left)
        return self.kind(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed")


def driven(name: str, model: Parrot, model_type: str) -> list[list[int]]:
    """Prompt, response and mask of an agent loop that verl runs with its own configuration."""
    agent_loop = import_module("verl.experimental.agent_loop.agent_loop")
    hydra = import_module("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        changes = ["rollout.multi_turn.format=hermes", "rollout.prompt_length=900", "rollout.response_length=900"]
        config = hydra.compose("ppo_trainer", [f"actor_rollout_ref.{change}" for change in changes])

    async def run() -> object:
        loop = vars(import_module(LOOPS))[name](
            agent_loop.DictConfigWrap(config),
            Server([*model.replies]),
            model.tokenizer,
            None,
            object,
            agent_loop.DictConfigWrap(config.data),
            hf_model_type=model_type,
        )
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "Begin."}])

    output = asyncio.run(run())
    return [output.prompt_ids, output.response_ids, output.response_mask]


CALLS = [call("grade", answer="abc"), call("grade", answer="no, abcd"), "done"]


@pytest.mark.parametrize(
    ("name", "family", "model_type", "replies"),
    [
        ("Grades", "qwen2_5", "qwen2", CALLS),
        ("Grades", "qwen3", "qwen3", CALLS),
        ("Grades", "chatml", "llama", CALLS),
        ("Answers", "llama3", "llama", ["fine"]),
    ],
)
def test_an_agent_loop(name, family, model_type, replies):
    model = Parrot(family, *replies)
    theirs = driven(name, model, model_type)
    settings = {"processes": 1, "max_turns": 4, "max_turn_tokens": 200, "step_seconds": 300.0}
    found = model.play(conversations(["Begin."]), name=f"{FILE}:{name}", model_type=model_type, **settings)
    ours = [found.tokens(column).row(0).tolist() for column in ("prompt_ids", "response_ids", "response_mask")]
    assert ours == theirs and found.row("turns").tolist() == [float(len(replies))]
    if family in ("qwen2_5", "qwen3"):
        assert "<|im_end|>\n<|im_start|>" in str(model.tokenizer.decode(ours[1]))
