"""Reward models on several ranks against one: what they say of responses and of tokens, and how they learn."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.training import TrainingEngine
from hybridflow.workers.model_worker import TrainingSetup
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_model_trainer import RewardModelTrainer
from tests.parity.layouts import Layout
from tests.preferences import PAIRS, pairs
from tests.reward_models import make_decoder, make_encoder
from tests.spmd import preload, run_ranks

preload("hybridflow.workers.reward_model", "hybridflow.workers.reward_model_trainer")

TOLERANCE = 2e-5
"""float32 sums in another order, through three steps; a token too few or too many moves a score by 0.1."""

STEPS, PROMPTS = 3, [f"{number}+1=" for number in range(2 * PAIRS)]


def layout(ranks: int, engine: TrainingEngine, **sizes: int):
    """A case by name."""
    found = Layout(ranks, engine, sizes)
    is_slow = ranks > 2 or "sequence" in sizes or "virtual_pipeline" in sizes
    return pytest.param(found, id=found.name, marks=found.marks(slow=is_slow))


LAYOUTS = [
    layout(2, TrainingEngine.fsdp),
    layout(2, TrainingEngine.megatron, tensor=2),
    layout(2, TrainingEngine.megatron, pipeline=2),
    layout(2, TrainingEngine.fsdp, sequence=2),
    layout(2, TrainingEngine.megatron, pipeline=2, virtual_pipeline=2),
    layout(3, TrainingEngine.fsdp),
    layout(4, TrainingEngine.fsdp, tensor=2),
    layout(4, TrainingEngine.megatron, tensor=2),
]


@dataclass
class Told:
    """Of some rows: scores, scores of tokens, scores after training; and the losses and norms of three steps."""

    columns: list[list[float]]
    losses: list[float]
    norms: list[float]


def judged(rank: int, layout: Layout, judge: Path, policy: Path, learns: bool) -> Told:
    """What one rank says of its rows; without `learns` only their scores."""
    training, rows = layout.training, layout.own_pairs(pairs().with_columns(objects={"prompt": PROMPTS}), rank)

    def served(*, process: bool) -> Batch:
        reward = Reward(model=Model(path=str(judge)), process=process)
        context, model = layout.context("reward", rank), Model(path=str(policy))
        return RewardModelWorker(context, reward=reward, policy=model, training=training).score(rows)

    outcome = Told([served(process=False).row("scores").tolist()], [], [])
    if learns:
        outcome.columns.append(served(process=True).tokens("token_scores").values.tolist())
        setup = TrainingSetup(Model(path=str(judge)), training, 2 * PAIRS, 100, 8, temperature=1.0)
        algorithm = Algorithm(preference=Preference(center_coefficient=0.05))
        worker = RewardModelTrainer(layout.context("reward_model", rank), setup=setup, algorithm=algorithm)
        for _ in range(STEPS):
            step = worker.preference_step(rows)
            outcome.losses.append(step["train/loss"].value / layout.mesh.axis_size("data"))
            outcome.norms.append(step["reward_model/grad_norm"].value)
        outcome.columns.append(worker.score(rows).row("scores").tolist())
    return outcome


def together(layout: Layout, judge: Path, policy: Path, *, learns: bool = True) -> Told:
    """What all ranks say of the whole batch."""
    arguments = (layout, judge, policy, learns)
    answers: list[Told] = [judged(0, *arguments)] if layout.ranks == 1 else run_ranks(judged, layout.ranks, *arguments)
    mesh = layout.mesh
    answering = [answers[mesh.rank({"data": index, "pipeline": -1})] for index in range(mesh.axis_size("data"))]
    columns = [
        [number for part in parts for number in part] for parts in zip(*(a.columns for a in answering), strict=True)
    ]
    losses = [sum(parts) for parts in zip(*(answer.losses for answer in answering), strict=True)]
    return Told(columns, losses, answers[0].norms)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    return make_decoder(folder, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)


@pytest.fixture(scope="module")
def alone(decoder, toy_dir) -> Told:
    """What one rank says."""
    return together(Layout(), decoder, toy_dir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_judge_says_and_learns_the_same_on_several_ranks(layout, alone, decoder, toy_dir):
    outcome = together(layout, decoder, toy_dir())
    for found, expected in zip(outcome.columns, alone.columns, strict=True):
        assert found == pytest.approx(expected, abs=TOLERANCE)
    assert outcome.losses == pytest.approx(alone.losses, abs=TOLERANCE)
    assert outcome.norms == pytest.approx(alone.norms, rel=1e-4)


def test_an_encoder_says_the_same_on_two_ranks(toy_dir, tmp_path):
    encoder = make_encoder(tmp_path)
    two = Layout(2, TrainingEngine.fsdp)
    found, expected = (together(case, encoder, toy_dir(), learns=False).columns for case in (two, Layout()))
    assert found[0] == pytest.approx(expected[0], abs=TOLERANCE)
