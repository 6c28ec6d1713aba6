"""Workers over toy models, as one rank of their role, called without a group."""

from dataclasses import replace
from pathlib import Path

import torch

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout
from hybridflow.config.training import Optimizer, Training
from hybridflow.controller.worker import WorkerContext
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.model_worker import TrainingSetup
from hybridflow.workers.rollout import RolloutSetup
from tests.toys import numbers_like, token_rows

PROMPTS, SAMPLES, RESPONSE = 3, 2, 6
GRPO = Algorithm(advantage="grpo")


def setup_of(
    directory: Path, *, minibatch_sequences: int = PROMPTS * SAMPLES, temperature: float = 1.0, **training: object
) -> TrainingSetup:
    """What a trained role needs; `training` are fields of `Training`."""
    settings = {"optimizer": Optimizer(learning_rate=0.01, epsilon=1e-3)} | training
    return TrainingSetup(
        model=Model(path=str(directory)),
        training=Training(**settings),
        minibatch_sequences=minibatch_sequences,
        total_optimizer_steps=100,
        max_response_tokens=RESPONSE,
        temperature=temperature,
    )


def actor(directory: Path, *, rollout: Rollout | None = None, algorithm: Algorithm = GRPO, **training) -> ActorWorker:
    """An actor with a rollout engine on its weights."""
    model, rollout = Model(path=str(directory)), rollout or Rollout()
    rollout = replace(rollout, sleep=bool(rollout.sleep))  # null is false on CPUs
    generation = RolloutSetup(rollout, model, max_prompt_tokens=8, max_response_tokens=RESPONSE, seed=0)
    setup = setup_of(directory, temperature=rollout.sampling.temperature, **training)
    return ActorWorker(WorkerContext("actor"), setup=setup, algorithm=algorithm, rollout=generation)


def critic(directory: Path, *, algorithm: Algorithm | None = None, **training) -> CriticWorker:
    """A critic that begins at zero."""
    return CriticWorker(
        WorkerContext("critic"), setup=setup_of(directory, **training), algorithm=algorithm or Algorithm()
    )


def prompts(seed: int = 0) -> Batch:
    """Some prompts of unequal lengths, as a loader gives them, each as often as it is sampled."""
    ids = token_rows([3, 5, 2], seed=seed)
    return Batch.of(rows={"uid": torch.arange(PROMPTS)}, tokens={"prompt_ids": ids}).repeat(SAMPLES)


def sampled(worker: ActorWorker, seed: int = 0) -> Batch:
    """Samples of the actor with advantages, ready for its update."""
    given = prompts(seed)
    batch = given.join(worker.generate(given))
    batch = batch.join(worker.logprobs(batch))
    return batch.with_columns(tokens={"advantages": numbers_like(batch.tokens("response_ids"), seed=seed)})
