"""In the form of a task set of verifiers v1, with as much of its package as the adapter uses."""

import os
import types
from typing import Generic, TypeVar

import openai

Config = TypeVar("Config")


class TasksetConfig:
    def __init__(self, highest=3):
        self.highest = highest


class Taskset(Generic[Config]):
    def __init__(self, config):
        assert type(config).__name__ == "SumsConfig", config
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def toolsets(cls, config):
        return ["a server"] if config.highest == 99 else []

    def load(self): ...

    def include(self): ...

    def exclude(self): ...

    def shuffle(self): ...

    def select(self): ...


class AgentConfig(types.SimpleNamespace): ...


class Agent:
    """Asks once, with a stream, as verifiers' own program does."""

    def __init__(self, config):
        assert (config.harness["id"], config.runtime) == ("null", {"type": "subprocess"}), config
        self.config = config

    async def run(self, task):
        trace = types.SimpleNamespace(ok=True, reward=0.0, rewards={}, metrics={"asked": 0.0}, last_error=None)
        trace.stop_condition = "agent_completed"
        if self.config.max_turns == 0:
            return trace
        client = openai.AsyncOpenAI(
            base_url=self.config.client["base_url"], api_key=os.environ[self.config.client["api_key_var"]]
        )
        question = [{"role": "user", "content": task.question}]
        text, usage = "", None
        try:
            stream = await client.chat.completions.create(
                model="policy", messages=question, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
        except openai.BadRequestError as error:
            failure = types.SimpleNamespace(type="ProviderError", message=str(error))
            trace.ok, trace.last_error = False, failure
            return trace
        assert usage is not None
        assert "OPENAI_API_KEY" not in os.environ or not os.environ["OPENAI_API_KEY"].startswith("hf-")
        if text in ("SandboxError", "TaskError"):
            trace.ok, trace.last_error = False, types.SimpleNamespace(type=text, message="gone")
            return trace
        if text == "late":
            trace.rewards, trace.stop_condition = {"correct": None}, "scoring_timeout"
            return trace
        trace.metrics["asked"] += 1
        trace.reward = float(text == task.answer)
        trace.rewards["correct"] = types.SimpleNamespace(value=trace.reward)
        return trace


def concrete_type(kind, base, *, origin):
    assert (base.__name__, origin.__name__) == ("TasksetConfig", "Taskset")
    return kind.__orig_bases__[0].__args__[0]


class SumsConfig(TasksetConfig): ...


class Sums(Taskset[SumsConfig]):
    is_interrupted = False

    def load(self):
        if self.config.highest == 7 and not Sums.is_interrupted:
            Sums.is_interrupted = True
            raise ConnectionError("lost")
        for number in range(self.config.highest):
            yield types.SimpleNamespace(question=f"{number}+{number}=", answer=str(2 * number))
