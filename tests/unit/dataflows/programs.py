"""Roles over toy models on the local backend, prompts of the calculator, and dataflows that do little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.rollout import Rollout
from hybridflow.config.training import Optimizer, Training
from hybridflow.controller import ResourcePool, WorkerGroup
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Policy
from hybridflow.dataflows.run import Run
from hybridflow.models.tokenizers import load_tokenizer
from hybridflow.observability.metrics import Metrics, last
from hybridflow.observability.samples import Sample
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward_function import RewardFunctionWorker
from hybridflow.workers.rollout import RolloutSetup
from tests.unit.workers.roles import RESPONSE, setup_of

PROMPTS = 4


def calculator_prompts(directory: Path, count: int = PROMPTS) -> Batch:
    """Sums as a loader reads them from files of two names."""
    tokenizer = load_tokenizer(directory)
    texts = [f"{i}+{9 - i % 10}=" for i in range(count)]
    return Batch.of(
        tokens={"prompt_ids": Ragged.from_rows([tokenizer(text).input_ids for text in texts], torch.int64)},
        objects={
            "prompt": texts,
            "answer": ["9"] * count,
            "data_source": ["sums" if i % 4 else "easy" for i in range(count)],
        },
    )


@dataclass(frozen=True)
class Roles:
    """Groups by role, and the backend they are on."""

    groups: dict[str, WorkerGroup]
    backend: LocalBackend


def local_roles(
    directory: Path,
    *,
    algorithm: Algorithm | None = None,
    samples: int = 2,
    rewards: Sequence[str] = ("exact_match",),
    rate: float = 0.01,
    costs: Sequence[str] = (),
    max_staleness: int = 0,
) -> Roles:
    """Actor, rollout, critic, reward and reference on one model; a cost and its critic where `costs` has functions."""
    model = Model(path=str(directory))
    optimizer = Optimizer(learning_rate=rate, epsilon=1e-3)
    setup = setup_of(directory, minibatch_sequences=PROMPTS * samples, optimizer=optimizer)
    trained = {"setup": setup, "algorithm": algorithm or Algorithm(advantage="grpo")}
    rollout = RolloutSetup(
        Rollout(sleep=False),
        model,
        max_prompt_tokens=8,
        max_response_tokens=RESPONSE,
        seed=0,
        max_staleness=max_staleness,
    )
    backend, pool = LocalBackend(), ResourcePool("main", 1)
    kinds = {
        "actor": (ActorWorker, trained | {"rollout": rollout}),
        "critic": (CriticWorker, trained),
        "reward": (RewardFunctionWorker, {"reward": Reward(functions=list(rewards)), "model": model}),
        "reference": (ReferenceWorker, {"model": model, "training": Training(), "temperature": 1.0}),
    }
    if costs:
        kinds["cost"] = (RewardFunctionWorker, {"reward": Reward(functions=list(costs)), "model": model})
        kinds["cost_critic"] = (CriticWorker, trained)
    groups = {
        name: WorkerGroup(kind, pool, backend, role=name, kwargs=trained) for name, (kind, trained) in kinds.items()
    }
    return Roles(groups | {"rollout": groups["actor"].view("rollout")}, backend)


class Counting(Dataflow):
    """Adds up the positions of the prompts it was given."""

    actor: Policy

    def __init__(self, roles: Mapping[str, object], *, settings: object, samples_per_prompt: int) -> None:
        super().__init__(roles, settings=settings, samples_per_prompt=samples_per_prompt)
        self.total = 0

    def step(self, prompts: Batch) -> Metrics:
        self.total += int(prompts.row("uid").sum())
        return {"total": last(self.total), "iteration": last(self.iteration)}

    def state(self) -> dict[str, object]:
        return {"total": self.total}

    def restore(self, state: dict[str, object]) -> None:
        self.total = int(str(state["total"]))


@dataclass
class Notebook:
    """A tracker that remembers."""

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert step not in self.rows, f"step {step} was logged twice"
        self.rows[step] = dict(metrics)

    def rewind(self, step: int, *, is_unlogged: bool) -> None:
        """Forgets later rows."""
        self.rows = {known: row for known, row in self.rows.items() if known <= step - is_unlogged}

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        self.samples.setdefault(step, []).extend(rows)

    def close(self) -> None:
        pass


def numbers(run: Run) -> dict[int, dict[str, float]]:
    """The rows of a run with a `Notebook`, without times."""
    skipped = ("timing_s/", "perf/")
    rows = run.tracker.rows.items()
    return {step: {name: value for name, value in row.items() if not name.startswith(skipped)} for step, row in rows}


def weights(run: Run) -> list[torch.Tensor]:
    """Copies of the actor's weights, in a run on one local device."""
    [host] = run.calls._hosts[run.learners["actor"].pool]
    return [shard.tensor.clone() for shard in host.workers["actor"].engine.weight_shards()]
