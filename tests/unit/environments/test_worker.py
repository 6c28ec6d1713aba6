"""An actor whose rollout plays episodes: the same columns as without, and their way between processes."""

import pickle
from dataclasses import replace

import torch

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout
from hybridflow.controller.worker import WorkerContext
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.rollout import GENERATED_COLUMNS, RolloutSetup
from tests.unit.environments.players import FILE, prompts_of
from tests.unit.workers.roles import GRPO, setup_of


def actor(directory, environment):
    generation = RolloutSetup(
        Rollout(sleep=False), Model(path=str(directory)), max_prompt_tokens=16, max_response_tokens=12, seed=0
    )
    setup = replace(setup_of(directory, minibatch_sequences=6), max_response_tokens=12)
    worker = ActorWorker(
        WorkerContext("actor"), setup=setup, algorithm=GRPO, rollout=replace(generation, environment=environment)
    )
    worker.publish_weights(version=0)
    return worker


def test_an_environment_of_one_turn_samples_and_trains_bit_for_bit_as_none(toy_dir, tokenizer):
    prompts = prompts_of(tokenizer, ["12+34=", "7+8=", "guess:"], samples=2)
    updated = []
    for environment in (EnvironmentSettings(), EnvironmentSettings(name=f"{FILE}:Once", max_turns=1, processes=0)):
        worker = actor(toy_dir("llama"), environment)
        batch = prompts.join(worker.generate(prompts))
        batch = pickle.loads(pickle.dumps(batch))
        scored = batch.with_columns(rows={"scores": torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 1.0])})
        scored = scored.join(worker.logprobs(scored))
        metrics = worker.update(scored.join(worker.advantages(scored)))
        worker.publish_weights(version=1)
        updated.append((batch, float(metrics["actor/grad_norm"]), worker.generate(prompts)))
        worker.close()
    (plain, plain_norm, plain_next), (played, norm, following) = updated
    for name in GENERATED_COLUMNS:
        for found, expected in ((played, plain), (following, plain_next)):
            if name in expected.token_columns:
                assert torch.equal(found.tokens(name).values, expected.tokens(name).values), name
            else:
                assert torch.equal(found.row(name), expected.row(name)), name
    assert norm == plain_norm > 0
    assert played.row("turns").tolist() == [1.0] * 6 and len(played.object("messages")[0]) == 2
