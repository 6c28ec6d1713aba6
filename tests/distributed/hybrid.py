"""An actor on several ranks, step by step: what it holds and says, and what plain transformers says of the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.derived import training_mesh
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout
from hybridflow.config.training import Training
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.boxes import Box
from hybridflow.resharding.grouping import generation_mesh
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.model_worker import TrainingSetup
from hybridflow.workers.rollout import RolloutSetup
from tests.toys import numbers_like, token_rows

NUM_PROMPTS, RESPONSE_TOKENS = 8, 6
Held = dict[str, list[tuple[Box, tuple[int, ...], np.ndarray]]]
"""The pieces of each weight: box, whole shape, values (a tensor would be shared with a process that ends)."""


@dataclass(frozen=True)
class Step:
    """One step on one rank: the weights it trains, and the tokens it generated, by row, before its update."""

    held: Held
    greedy: dict[int, list[int]]
    metrics: dict[str, float]


def train_and_generate(
    rank: int, directory: Path, training: Training, rollout: Rollout, num_ranks: int, num_steps: int
) -> list[Step]:
    """A rank program: publishes, generates greedily, and updates on random advantages, several times."""
    worker = actor_on_rank(rank, directory, training, rollout, num_ranks)
    mesh = worker.context.mesh
    prompts, own = all_prompts(), own_prompts(worker)
    steps = []
    for number in range(num_steps):
        worker.publish_weights(number)
        answers = worker.generate(prompts.select(own), "greedy")
        assert set(answers.row("weight_version").tolist()) == {number}
        tokens = [row.tolist() for row in answers.tokens("response_ids").rows()]
        greedy = dict(zip(own.tolist(), tokens, strict=True))
        batch = sampled(worker, prompts, own)
        rows = torch.arange(NUM_PROMPTS).tensor_split(mesh.axis_size("data"))[mesh.coordinate(rank)["data"]]
        held = _held(worker)
        metrics = worker.update(batch.select(rows))
        steps.append(Step(held, greedy, {name: measure.value for name, measure in metrics.items()}))
    return steps


def actor_on_rank(rank: int, directory: Path, training: Training, rollout: Rollout, num_ranks: int) -> ActorWorker:
    """The actor's worker of one rank, in the world that is up."""
    mesh = ParallelMesh(training_mesh(training.parallelism, num_ranks))
    sizes = rollout.parallelism
    generation = generation_mesh(
        mesh,
        copies=TRAINING_ENGINES[training.engine].copies(mesh.sizes, training.parallelism.replicas),
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
    )
    context = WorkerContext("actor", rank, mesh, generation, rendezvous=Rendezvous(rank, num_ranks))
    model = Model(path=str(directory))
    setup = TrainingSetup(model, training, NUM_PROMPTS, 100, RESPONSE_TOKENS, temperature=1.0)
    rollout = replace(rollout, sleep=bool(rollout.sleep))  # null is false on CPUs
    sampling = RolloutSetup(rollout, model, max_prompt_tokens=8, max_response_tokens=RESPONSE_TOKENS, seed=0)
    return ActorWorker(context, setup=setup, algorithm=Algorithm(advantage="grpo"), rollout=sampling)


def own_prompts(worker: ActorWorker) -> Tensor:
    """The rows that this rank's generation replica answers."""
    mesh, axes = worker.context.meshes["generation"], ("data", "micro_pipeline", "micro_tensor")
    return torch.arange(NUM_PROMPTS).tensor_split(mesh.count_along(axes))[mesh.index_along(worker.context.rank, axes)]


def all_prompts() -> Batch:
    """Prompts of unequal lengths."""
    ids = token_rows([3, 5, 2, 7, 4, 4, 6, 1], seed=0)
    uid = torch.arange(NUM_PROMPTS)
    return Batch.of(rows={"uid": uid, "sample_index": torch.zeros_like(uid)}, tokens={"prompt_ids": ids})


def assembled(ranks: Sequence[Held]) -> dict[str, Tensor]:
    """Whole weights from the pieces of all ranks; every element must be held by one at least, and alike by all."""
    whole: dict[str, Tensor] = {}
    for held in ranks:
        for name, pieces in held.items():
            for box, shape, array in pieces:
                values = torch.from_numpy(array)
                target = whole.setdefault(name, torch.full(shape, torch.nan))
                region = target[tuple(slice(low, high) for low, high in box)]
                assert torch.isnan(region).all() or torch.equal(region, values), f"{name} {box} is held differently"
                region.copy_(values)
    assert not any(torch.isnan(weight).any() for weight in whole.values()), "a part of a weight is held by no rank"
    return whole


def greedy_of_transformers(directory: Path, weights: Mapping[str, Tensor], eos: int) -> dict[int, list[int]]:
    """What `transformers` alone generates with these weights, token by token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    load_canonical(model, weights)
    found = {}
    for row, prompt in enumerate(all_prompts().tokens("prompt_ids").rows()):
        ids, response = prompt.tolist(), []
        while len(response) < RESPONSE_TOKENS and (not response or response[-1] != eos):
            with torch.no_grad():
                response.append(int(model(torch.tensor([ids + response])).logits[0, -1].argmax()))
        found[row] = response
    return found


def load_canonical(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights under the names of a checkpoint into a model that may keep experts together."""
    state = dict(weights)
    for name, parameter in model.named_parameters():
        if name in state:
            continue
        path, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        experts = [torch.cat([state.pop(f"{path}.{e}.{part}.weight") for part in parts]) for e in range(len(parameter))]
        state[name] = torch.stack(experts)
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing


def sampled(worker: ActorWorker, prompts: Batch, own: Tensor) -> Batch:
    """Samples of all replicas on every rank, with advantages."""
    answers = worker.generate(prompts.select(own), "train")
    said = {
        name: [row.tolist() for row in answers.tokens(name).rows()] for name in ("response_ids", "rollout_logprobs")
    }
    everyone: list = [None] * worker.context.world_size
    if worker.context.world_size > 1:
        dist.all_gather_object(everyone, (own.tolist(), said))
    else:
        everyone = [(own.tolist(), said)]
    columns: dict[str, dict[int, list]] = {name: {} for name in said}
    for rows, of_rank in everyone:
        for name, values in of_rank.items():
            columns[name] |= dict(zip(rows, values, strict=True))
    ids = Ragged.from_rows([columns["response_ids"][row] for row in range(NUM_PROMPTS)], torch.int64)
    logprobs = Ragged.from_rows([columns["rollout_logprobs"][row] for row in range(NUM_PROMPTS)], torch.float32)
    tokens = {"response_ids": ids, "rollout_logprobs": logprobs, "response_mask": ids.like(torch.ones(len(ids.values)))}
    return prompts.with_columns(tokens=tokens | {"advantages": numbers_like(ids, seed=1)})


def _held(worker: ActorWorker) -> Held:
    held: Held = {}
    for shard in worker.engine.weight_shards():
        pieces = held.setdefault(shard.name, [])
        pieces.append((shard.layout.box, shard.layout.shape, shard.tensor.detach().numpy().copy()))
    return held
