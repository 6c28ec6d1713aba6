"""A rollout engine of the user's own (`rollout.engine=path/file.py:Engine`): its base class, and what it is given."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Ragged
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.config.user_code import load_member
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.engines.rollout.memory import WeightBuffer
from hybridflow.engines.rollout.requests import Request, Responses
from hybridflow.engines.rollout.shell import RolloutShell
from hybridflow.errors import ConfigError, EngineError
from hybridflow.models.loading import load_causal_lm, torch_dtype
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.observability.activity import ACTIVITY, FOREVER
from hybridflow.parallel.groups import Ranks

_METHODS = ("generate", "weight_slots", "pause", "resume", "sleep", "wake")
_RENAMED = {"weights_changing": "pause", "weights_changed": "resume"}


@dataclass(frozen=True)
class CustomEngineSetup:
    """The only argument of an engine's constructor: the policy, the settings, and this process's place in the run."""

    directory: Path
    """Directory of `model.path`."""

    model: Model
    """The section `model`."""

    rollout: Rollout
    """The section `rollout`."""

    limit_tokens: int
    """`data.max_prompt_tokens` and `data.max_response_tokens` together."""

    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""

    device: torch.device
    """The device of this process."""

    ranks: Ranks
    """This process's rank in the generation mesh."""

    def load_model(self) -> PreTrainedModel:
        """The policy in transformers, on this process's device, with the weights in `model.path`."""
        model = load_causal_lm(
            self.directory,
            dtype=torch_dtype(self.model.dtype),
            device=self.device,
            trust_remote_code=self.model.trust_remote_code,
        )
        return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Response:
    """The response to one prompt. All of its tokens are trained on, including the one that ended it.

    `logprobs` are those with which the engine drew the tokens: 0.0 where it had no choice.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut_off: bool = False
    """It reached the length limit before it ended."""


class CustomEngine(RolloutShell):
    """Base class of a rollout engine that a user writes; each rank of the run makes one, with its own prompts.

    A subclass implements `respond`. An engine that runs the policy passes it to `__init__`: the trained weights are
    written to its parameters after each training step; then `resume` is called, which a subclass may extend. An engine
    without a model receives no weights. Rows are generated to their ends, all rows of a call of `submit` at the next
    `poll`.

        class Engine(CustomEngine):
            def __init__(self, setup: CustomEngineSetup) -> None:
                super().__init__(setup, setup.load_model())

            def respond(self, prompts, sampling, *, max_response_tokens, seeds):
                return [Response(tokens, logprobs) for tokens, logprobs in ...]
    """

    def __init__(self, setup: CustomEngineSetup, model: PreTrainedModel | None = None) -> None:
        self.setup = setup
        self.model = model
        buffer = None if model is None else WeightBuffer(model.parameters())
        named = () if model is None else model.named_parameters()
        slots = {
            slot.name: slot
            for name, parameter in named
            for slot in views(parameter.data, parts_of(name, parameter.shape))
        }
        self._waiting: list[list[Request]] = []
        self._answers: list[Responses] = []
        super().__init__(setup.ranks.mesh, buffer, slots, limit_tokens=setup.limit_tokens)

    @abstractmethod
    def respond(
        self, prompts: list[list[int]], sampling: Sampling, *, max_response_tokens: int, seeds: list[int]
    ) -> Sequence[Response]:
        """One response per prompt, in order.

        `prompts` are token ids; `seeds` holds one 64-bit number per prompt, which is the same whenever the run is
        repeated. Responses have 1 to `max_response_tokens` tokens.
        """

    def _start(self, requests: Sequence[Request]) -> None:
        if requests:
            self._waiting.append(list(requests))

    def _step(self) -> int:
        """Generates the rows of one call of `generate` or `submit` to their ends."""
        answered = self._answered(self._waiting[0])
        self._answers.append(answered)
        del self._waiting[0]
        return len(answered.requests)

    def _collect(self) -> list[Responses]:
        answers, self._answers = self._answers, []
        return answers

    def _interrupt(self) -> None:
        """No request has a state."""

    def _so_far(self) -> Iterable[tuple[Request, int]]:
        return [(request, 0) for requests in self._waiting for request in requests]

    def _removed(self, requests: Sequence[Request]) -> Responses:
        """Rows that wait, without tokens."""
        left = [[request for request in part if request not in requests] for part in self._waiting]
        self._waiting = [part for part in left if part]
        tokens, logprobs = (Ragged.from_rows([[]] * len(requests), dtype) for dtype in (torch.int64, torch.float32))
        return Responses(requests, tokens, logprobs, torch.ones(len(requests), dtype=torch.bool))

    def _answered(self, requests: list[Request]) -> Responses:
        """Raises `EngineError` for responses that cannot be trained on."""
        rows, seeds = [request.prompt.tolist() for request in requests], [request.key for request in requests]
        sampling, max_response_tokens = requests[0].sampling, requests[0].max_response_tokens
        with ACTIVITY.waiting(FOREVER):
            found = self.respond(rows, sampling, max_response_tokens=max_response_tokens, seeds=seeds)
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise self._error(
                f"an object of type {type(found).__name__}", "Return a list with one Response per prompt."
            )
        if len(found) != len(rows):
            raise self._error(f"{len(found)} responses to {len(rows)} prompts", "Return one Response per prompt.")
        for row, response in enumerate(found):
            if not isinstance(response, Response):
                what = f"an object of type {type(response).__name__} for prompt {row}"
                raise self._error(what, "Return Response(tokens, logprobs).")
            tokens, logprobs = len(response.tokens), len(response.logprobs)
            if not 1 <= tokens <= max_response_tokens or logprobs != tokens:
                raise self._error(
                    f"a response of {tokens} tokens with {logprobs} log-probabilities to prompt {row}",
                    f"Return 1 to {max_response_tokens} tokens (data.max_response_tokens), and as many"
                    " log-probabilities.",
                )
        return Responses(
            requests,
            Ragged.from_rows([response.tokens for response in found], torch.int64),
            Ragged.from_rows([response.logprobs for response in found], torch.float32),
            torch.tensor([response.is_cut_off for response in found], dtype=torch.bool),
        )

    def _error(self, found: str, remedy: str) -> EngineError:
        return EngineError(f"rollout.engine={self.setup.rollout.engine}: respond returned {found}.", remedy=remedy)


def custom_engine(setting: str) -> Callable[[CustomEngineSetup], RolloutEngine]:
    """The class that `rollout.engine` names. Raises `ConfigError` if it is not an engine, and says what is missing."""
    key = f"rollout.engine={setting}"
    found = load_member(setting, key="rollout.engine")
    if not isinstance(found, type):
        raise ConfigError(f"{key} is of type {type(found).__name__}, not a class.", remedy="Name a class.")
    known = dict(inspect.getmembers(found, callable))
    if old := [name for name in _RENAMED if name in known]:
        raise ConfigError(
            f"{key} has a method {old[0]}, which would never be called.",
            remedy=f"Rename it to {_RENAMED[old[0]]}.",
        )
    missing = [name for name in _METHODS if name not in known]
    missing += sorted(vars(found).get("__abstractmethods__", ()))
    if missing:
        lacking = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise ConfigError(
            f"{key} is not a rollout engine: it lacks {lacking}.",
            remedy="Derive it from hybridflow.engines.rollout.custom.CustomEngine and write respond().",
        )
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {found.__name__}{inspect.signature(found)} cannot be called with one argument: {error}.",
            remedy="Write def __init__(self, setup: CustomEngineSetup).",
        ) from error
    if issubclass(found, CustomEngine):
        _check_respond(found, key)
    return cast(Callable[[CustomEngineSetup], RolloutEngine], found)


def _check_respond(engine: type[CustomEngine], key: str) -> None:
    """Raises `ConfigError` if `respond` cannot be called as it will be."""
    signature = inspect.signature(engine.respond)
    try:
        signature.bind(None, [], None, max_response_tokens=1, seeds=[])
    except TypeError as error:
        raise ConfigError(
            f"{key}: respond{signature} cannot be called: {error}.",
            remedy="Write def respond(self, prompts, sampling, *, max_response_tokens, seeds).",
        ) from error
