"""The rollout: an engine that draws responses, on weights of the actor's process or, in another pool, of its own."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Unpack

from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout
from hybridflow.controller.protocols import BROADCAST, EACH_REPLICA, GENERATION
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.data.chat_template import with_chat_template
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.environments.episode_log import EpisodeLog
from hybridflow.environments.episode_stream import EpisodeStream
from hybridflow.environments.interface import ModelInfo
from hybridflow.environments.play import EpisodePlayer
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import eos_ids, load_tokenizer
from hybridflow.workers.incoming_weights import IncomingWeights, actor_rollout_group
from hybridflow.workers.model_worker import chosen_device
from hybridflow.workers.partial_rollouts import PartialRollouts, TurnArguments
from hybridflow.workers.row_sampler import RowSampler

logger = logging.getLogger(__name__)

GENERATED_COLUMNS = ("response_ids", "response_mask", "rollout_logprobs", "weight_version", "version_runs", "truncated")

ADVANCING = {
    "provides": ("uid", "sample_index", *GENERATED_COLUMNS),
    "changes": False,
    "keeps_rows": False,
    "yields": True,
}
"""How the driver calls `advance`."""


@dataclass(frozen=True)
class RolloutSetup:
    """The settings of a rollout."""

    rollout: Rollout
    model: Model
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    chat_template: str | None = None
    """`data.chat_template`, for the turns of an environment."""
    gamma: float = 1.0
    """`algorithm.gamma`, for an environment whose replies it discounts."""
    is_colocated: bool = True
    """It runs in the actor's processes; otherwise in its own pool."""
    max_staleness: int = 0
    """Largest number of publications by which samples may be older than the weights that they train."""
    reads_weights: bool = False
    """It reads the weights in `model.path`, because no actor sends any."""
    copies_weights: bool = False
    """New weights arrive in a copy."""


class ResponseGenerator:
    """A rollout engine on one rank, which receives its weights later, and the run's settings for sampling."""

    def __init__(self, context: WorkerContext, setup: RolloutSetup) -> None:
        directory = resolve_model_path(str(setup.model.path))
        tokenizer = load_tokenizer(tokenizer_directory(setup.model), pad_token=setup.model.pad_token)
        self._context = context
        self._setup = setup
        ends = eos_ids(tokenizer, directory)
        self._ranks = context.rendezvous.ranks(context.role, context.meshes["generation"])
        self.engine = make_rollout_engine(
            setup.model,
            setup.rollout,
            limit_tokens=setup.max_prompt_tokens + setup.max_response_tokens,
            eos_token_ids=ends,
            tokenizer=tokenizer,
            device=chosen_device(context),
            ranks=self._ranks,
            reads_weights=setup.reads_weights,
        )
        sampling = setup.rollout.sampling
        self._model_type = read_json_object(directory / "config.json").get("model_type")
        self._episodes: tuple[EpisodePlayer, EpisodeStream] | None = None
        rows = self._sampler("train")
        if setup.environment.chosen is not None:
            turns = with_chat_template(tokenizer, Data(chat_template=setup.chat_template))
            # Whole batches have a player of their own, because the stream's episodes keep their places meanwhile.
            is_quiet = self._ranks.mesh.index_along(self._ranks.rank, ("pipeline", "tensor")) > 0
            log = EpisodeLog(setup.environment, setup.max_response_tokens, is_quiet=is_quiet)
            rows = EpisodeStream(self._new_player(turns, ends, log), rows, seed=setup.seed)
            self._episodes = self._new_player(turns, ends, log), rows
        self.partial = PartialRollouts(context, rows, max_sequences=setup.rollout.max_sequences)
        if context.rank == 0 and sampling.is_restricted:
            logger.warning(
                "rollout.sampling.top_p=%g rollout.sampling.top_k=%d: the rollout's log-probabilities are renormalized"
                " over the kept tokens, so they are not compared with the actor's; draw from all tokens"
                " (top_p=1 top_k=0), or correct the loss with importance weights (algorithm.correction.weights=token).",
                sampling.top_p,
                sampling.top_k,
            )

    def generate(self, prompts: Batch, purpose: str) -> Batch:
        """One response per prompt. `purpose` chooses the sampling settings: train, eval or greedy."""
        sampler = self._sampler(purpose)
        # The ranks of a sharded replica compute each token together: none may leave the others.
        is_alone = self.engine.mesh.count_along(("pipeline", "tensor")) == 1
        with self._context.interruptible() if is_alone else nullcontext():
            if self._episodes is not None:
                player, stream = self._episodes
                stream.settle()
                return player.play(prompts, sampler, seed=sampler.seed, is_evaluation=purpose == "eval")
            return self.engine.generate(
                prompts, sampler.sampling, max_response_tokens=sampler.max_response_tokens, seed=sampler.seed
            )

    def close(self) -> None:
        """Ends the processes of the environment, if there is one."""
        for each in self._episodes or ():
            each.close()

    def _new_player(self, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], log: EpisodeLog) -> EpisodePlayer:
        setup = self._setup
        info = ModelInfo(
            tokenizer,
            setup.max_prompt_tokens,
            setup.max_response_tokens,
            setup.environment.max_turns,
            self._model_type,
        )
        return EpisodePlayer(setup.environment, info, ends, gamma=setup.gamma, log=log, ranks=self._ranks)

    def _sampler(self, purpose: str) -> RowSampler:
        """The engine with the settings of a purpose; an evaluation has a seed of its own, so that two of them differ
        only by the weights."""
        setup = self._setup
        return RowSampler(
            self.engine,
            setup.rollout.sampling_for(purpose),
            setup.seed if purpose == "train" else setup.seed + 1,
            setup.max_response_tokens,
        )


class RolloutWorker(Worker):
    """One rank of a rollout that shares no device with the actor.

    `receive_weights` is called together with the actor's `publish_weights`. Before the first transfer, and after one
    that failed (unless the weights arrive in a copy), `generate` raises. Without an actor, the rollout reads the
    model's weights itself and keeps them.
    """

    def __init__(self, context: WorkerContext, *, setup: RolloutSetup) -> None:
        super().__init__(context)
        context.ranks()  # all ranks connect before vLLM makes its groups
        self._setup = setup
        self._generator = ResponseGenerator(context, setup)
        self._incoming: IncomingWeights | None = None

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._generator.close()

    @transfer(BROADCAST, changes=False)
    def is_ready(self) -> bool:
        """Returns once the engine has started, which may take longer than the time limit of a transfer."""
        return True

    @transfer(BROADCAST, changes=False)
    def join_actor(self, address: StoreAddress, sizes: tuple[int, int]) -> None:
        """Connects to the actor's ranks at their store; `sizes` counts the actor's and the rollout's ranks."""
        if self._incoming is not None:
            self._incoming.abandon()
        self._incoming = self._generator.partial.incoming = None  # frees its copies before others are made
        transfer, copies = self._setup.rollout.transfer, self._setup.copies_weights
        group = actor_rollout_group(self.context, address, sizes, transfer, first_rank=sizes[0])
        self._incoming = IncomingWeights(self.context, self._generator.engine, group, transfer, has_copies=copies)
        self._generator.partial.incoming = self._incoming if copies else None

    @transfer(BROADCAST, changes=False)
    def receive_weights(self, version: int) -> None:
        """Receives the weights that the actor sends."""
        assert self._incoming is not None, "the rollout has not joined the actor"
        self._incoming.receive(version)

    @transfer(GENERATION, provides=GENERATED_COLUMNS, changes=False)
    def generate(self, prompts: Batch, purpose: str = "train") -> Batch:
        return self._generator.generate(prompts, purpose)

    @transfer(EACH_REPLICA, **ADVANCING)
    def advance(
        self, prompts: Batch | None = None, *, stays_awake: bool = False, **turn: Unpack[TurnArguments]
    ) -> Batch:
        """See `PartialRollouts.advance`; this rollout never sleeps."""
        return self._generator.partial.advance(prompts, **turn)


@dataclass(frozen=True)
class RolloutRole:
    """The keyword arguments of a rollout in its own pool."""

    worker_class: ClassVar[type[Worker]] = RolloutWorker
    setup: RolloutSetup
