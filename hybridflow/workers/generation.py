"""What a rollout does on one rank, whoever owns its weights: responses to prompts, under the run's sampling."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import eos_ids, load_tokenizer
from hybridflow.workers.model_worker import chosen_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSetup:
    """The settings of a rollout."""

    rollout: Rollout
    model: Model
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int
    is_colocated: bool = True
    """It lives in the actor's processes; else in a pool of its own."""


class Generation:
    """A rollout engine without weights of its own as yet, and how the run draws from it."""

    def __init__(self, context: WorkerContext, setup: RolloutSetup) -> None:
        directory = resolve_model_path(str(setup.model.path))
        tokenizer = load_tokenizer(tokenizer_directory(setup.model), pad_token=setup.model.pad_token)
        self._context = context
        self._setup = setup
        self.engine = make_rollout_engine(
            setup.model,
            setup.rollout,
            max_prompt_tokens=setup.max_prompt_tokens,
            max_response_tokens=setup.max_response_tokens,
            eos_token_ids=eos_ids(tokenizer, directory),
            device=chosen_device(context),
            ranks=context.rendezvous.ranks(context.role, context.meshes["generation"]),
            reads_weights=False,
        )
        if context.rank == 0:
            _warn_of_restricted_sampling(setup.rollout.sampling)

    def generate(self, prompts: Batch, purpose: str) -> Batch:
        """One response per prompt. `purpose` chooses how tokens are drawn: train, eval or greedy."""
        setup = self._setup
        samplings = {
            "train": setup.rollout.sampling,
            "eval": setup.rollout.eval_sampling,
            "greedy": Sampling(temperature=0.0),
        }
        # Evaluation draws its own numbers, the same at each evaluation, so that two of them differ by weights alone.
        seed = setup.seed if purpose == "train" else setup.seed + 1
        # The ranks of a divided replica take each token together: none may leave the others.
        is_alone = self.engine.mesh.count_along(("pipeline", "tensor")) == 1
        with self._context.interruptible() if is_alone else nullcontext():
            return self.engine.generate(
                prompts, samplings[purpose], max_response_tokens=setup.max_response_tokens, seed=seed
            )


def _warn_of_restricted_sampling(sampling: Sampling) -> None:
    if sampling.is_restricted:
        logger.warning(
            "rollout.sampling.top_p=%g rollout.sampling.top_k=%d: the rollout's log-probabilities are"
            " renormalised over the kept tokens, so they are not compared with the actor's; draw from all tokens"
            " (top_p=1 top_k=0), or correct the loss with importance weights (algorithm.correction.weights=token).",
            sampling.top_p,
            sampling.top_k,
        )
