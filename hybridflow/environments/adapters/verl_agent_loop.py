"""Agent loops of verl: classes with a coroutine function `run(sampling_params, **row)`, which work with token ids.

They ask `self.server_manager.generate(request_id=..., prompt_ids=..., sampling_params=...)` for replies, and return an
`AgentLoopOutput`. `environment.settings` are further arguments of the class; `config` among them is merged into the
configuration that the class is given, which has verl's names for the limits of the run.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Make, Methods, accepted
from hybridflow.environments.interface import Finished, Model, ModelInfo, Reply
from hybridflow.errors import EpisodeError

_FURTHER = ("reward_score", "num_turns", "extra_fields")
_TOKENS = ("prompt_ids", "response_ids", "response_mask")
_MEDIA = ("image_data", "video_data", "audio_data")


class _Loop(Protocol):
    def run(self, sampling_params: dict, **row: object) -> Awaitable[object]: ...


@dataclass(frozen=True)
class Sampled:
    """A reply with the attributes of verl's `TokenOutput`."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str = "completed"
    num_preempted: int | None = None
    routed_experts: None = None
    extra_fields: dict[str, object] = field(default_factory=dict)


class Server:
    """Takes the place of verl's client of inference servers."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def generate(
        self,
        request_id: str = "",
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping | None = None,
        **named: object,
    ) -> Sampled:
        """A reply to a prompt; the run decides how it is sampled. Raises `EpisodeError` for images, video and audio."""
        if media := [name for name in _MEDIA if named.get(name)]:
            raise EpisodeError(f"it asked the model with {media[0]}.", remedy="Use text alone.")
        reply: Reply = await self._model.sample(prompt_ids)
        return Sampled([*reply.token_ids], [*reply.logprobs])


class Configuration(dict[str, object]):
    """A part of a configuration, whose keys are also attributes, as those of OmegaConf."""

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise AttributeError(f"verl's configuration has no '{name}' here; set it in environment.settings.config")


def configuration(info: ModelInfo, given: Mapping[str, object]) -> Configuration:
    """The settings of verl that agent loops read, and those that are given."""
    turns = {
        "enable": True,
        "format": "hermes",
        "function_tool_path": None,
        "max_assistant_turns": info.max_turns,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "max_user_turns": info.max_turns,
        "tool_config_path": None,
        "tool_response_truncate_side": "middle",
    }
    rollout = {
        "calculate_log_probs": True,
        "full_determinism": False,
        "multi_turn": turns,
        "name": "hybridflow",
        "prompt_length": info.max_prompt_tokens,
        "response_length": info.max_response_tokens,
    }
    data = {
        "apply_chat_template_kwargs": {},
        "max_prompt_length": info.max_prompt_tokens,
        "max_response_length": info.max_response_tokens,
        "mm_processor_kwargs": {},
        "tool_config_path": None,
    }
    return _merged({"actor_rollout_ref": {"model": {}, "rollout": rollout}, "data": data}, given)


def _merged(known: Mapping, given: Mapping) -> Configuration:
    found = Configuration(known)
    for name, value in given.items():
        found[name] = value
    for name, value in found.items():
        if isinstance(value, Mapping):
            before = known.get(name)
            found[name] = _merged(before if isinstance(before, Mapping) else {}, value)
    return found


def _finished(output: object, num_replies: int) -> Finished:
    """The outcome of a loop. Its log-probabilities are not used: those of the sampled tokens are known."""
    missing = [name for name in _TOKENS if not isinstance(getattr(output, name, None), Sequence)]
    if missing:
        raise EpisodeError(
            f"its method 'run' returned an object of type {type(output).__name__} without a list {missing[0]}.",
            remedy="Return AgentLoopOutput(prompt_ids=..., response_ids=..., response_mask=..., ...).",
        )
    tokens = {name: _integers(name, getattr(output, name)) for name in _TOKENS}
    if len(tokens["response_ids"]) != len(tokens["response_mask"]):
        raise EpisodeError(
            f"it returned {len(tokens['response_ids'])} response_ids and a response_mask of"
            f" {len(tokens['response_mask'])}.",
            remedy="Give each token of response_ids a 1 if the model sampled it, else a 0.",
        )
    if not num_replies:
        raise EpisodeError(
            "it ended without a reply of the model.", remedy="Call 'await self.server_manager.generate(...)'."
        )
    score, number, extra = (getattr(output, name, None) for name in _FURTHER)
    extra = extra or {}
    info = {**extra, **(extra.get("reward_extra_info") or {}), "num_turns": number or 0}
    rewards = [*[0.0] * (num_replies - 1), 0.0 if score is None else score]
    return Finished(rewards, info, tokens)


def _integers(name: str, given: Sequence) -> list[int]:
    """The values of a list as integers; raises `EpisodeError` if they are not."""
    try:
        found = [int(value) for value in given]
    except (TypeError, ValueError, OverflowError):
        found = []
    if found == [*given]:
        return found
    raise EpisodeError(
        f"its method 'run' returned {name}={repr(given)[:60]}, not a list of integers.",
        remedy="Return prompt_ids and response_ids as token ids, and response_mask as a list of 0 and 1.",
    )


def _recognizes(methods: Methods) -> bool:
    run = methods.get("run")
    return run is not None and "sampling_params" in inspect.signature(run).parameters


def _adapted(make: Make) -> Callable[..., object]:
    async def episode(
        model: Model, row: Mapping[str, object], seed: int, *, config: Mapping | None = None, **settings: object
    ) -> Finished:
        assert model.info is not None, "an agent loop needs the tokenizer"
        own = configuration(model.info, config or {})
        given = {
            "trainer_config": SimpleNamespace(config=own),
            "server_manager": Server(model),
            "tokenizer": model.info.tokenizer,
            "processor": None,
            "dataset_cls": object,
            "data_config": SimpleNamespace(config=own["data"]),
            "hf_model_type": model.info.model_type,
        }
        loop: _Loop = make(**{**accepted(make, given), **settings})  # pyright: ignore[reportAssignmentType]
        prompt = row["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        columns = accepted(loop.run, {**row, "raw_prompt": messages})
        return _finished(await loop.run({"logprobs": True}, **columns), model.num_replies)

    return episode


VERL_AGENT_LOOP = Adapter(
    "an agent loop of verl (AgentLoopBase)", _recognizes, _adapted, is_coroutine=True, needs_info=True
)
