"""A dataflow in a user's file, with rewards and settings of its own, runs through the real command."""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from hybridflow.controller import Backend
from tests.distributed.runs import Row, metric_rows, reproducible, rows_of_run, run_well, sample_rows, small_run

TUTOR = '''
"""Right answers, and short ones: two rewards whose scores the dataflow itself adds up."""

from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Policy, Scorer
from hybridflow.observability.metrics import last


class Tutor(Dataflow):
    actor: Policy
    rollout: Sampler
    correct: Scorer
    brief: Scorer

    @dataclass
    class Settings:
        brevity: float = 0.5

    def __init__(self, roles, **given):
        super().__init__(roles, **given)
        self.lessons = 0

    def step(self, prompts):
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        correct, brief = self.correct.score(batch), self.brief.score(batch)
        scores = correct.row("scores") + self.settings.brevity * brief.row("scores")
        batch = batch.join(correct, brief, self.actor.logprobs(batch), Batch.of(rows={"scores": scores}))
        metrics = wait(self.actor.update(self.actor.advantages(batch)))
        self.actor.publish_weights(version=self.iteration + 1)
        self.lessons += len(prompts)
        return metrics | self.observe(batch) | {"tutor/lessons": last(self.lessons)}

    def state(self):
        return {"lessons": self.lessons}

    def restore(self, state):
        self.lessons = state["lessons"]
'''
BREVITY = '''
def short(prompts, completions):
    """-1 a character."""
    return [-float(len(text)) for text in completions]
'''

Teach = Callable[..., Path]


@pytest.fixture
def teach(tmp_path: Path) -> Teach:
    """A function: settings -> the directory of a run of the tutor with them."""
    (tmp_path / "tutor.py").write_text(TUTOR)
    (tmp_path / "brevity.py").write_text(BREVITY)

    def run(*settings: str) -> Path:
        words = [f"dataflow={tmp_path}/tutor.py:Tutor", "algorithm.advantage=grpo", f"trainer.run_dir={tmp_path}/run"]
        words += ["roles.correct={kind: reward_function, functions: [exact_match]}"]
        words += [f"roles.brief={{kind: reward_function, functions: ['{tmp_path}/brevity.py:short']}}"]
        ended = run_well([*small_run(tmp_path), *words, *settings])
        assert "has no roles 'rollout' and 'reward' to evaluate with" in ended.words
        return tmp_path / "run"

    return run


def rows_of(run_dir: Path) -> list[Row]:
    return reproducible(metric_rows(run_dir))


def test_its_judges_and_settings_are_those_of_the_command_line(teach):
    rows = rows_of(teach("dataflow_settings.brevity=0.25"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        added = row["rewards/exact_match/mean"] + 0.25 * row["rewards/short/mean"]
        assert row["critic/score/mean"] == pytest.approx(added)
        assert row["tutor/lessons"] == 8 * row["step"]
        assert row["actor/grad_norm"] > 0.0


def test_its_samples_carry_the_score_it_made(teach):
    samples = sample_rows(teach())
    assert samples
    for row in samples:
        assert row["score"] == float(row["response"] == row["answer"]) - 0.5 * len(row["response"])


def test_its_own_state_is_resumed(teach):
    teach("trainer.total_steps=2")
    assert [row["tutor/lessons"] for row in rows_of(teach())] == [8, 16, 24, 32]


def test_a_batch_of_its_own_making_is_learnt_from_at_the_temperature_of_the_run(teach, tmp_path):
    """At another temperature the update would find that rollout and training disagree, and stop the run."""
    tutor = tmp_path / "tutor.py"
    drawn = "batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))"
    own = "Batch.of(rows=drawn.row_columns, tokens=drawn.token_columns, objects=drawn.objects)"
    assert drawn in TUTOR
    tutor.write_text(
        TUTOR.replace(drawn, f"{drawn.replace('batch', 'drawn', 1)}.fetch()\n        batch = self.correct.score({own})")
    )
    (row,) = rows_of(teach("rollout.sampling.temperature=0.7", "trainer={total_steps: 1, save_every: 0}"))
    assert row["training/rollout_logprobs_diff_max"] < 1e-4


@pytest.mark.slow  # the quick case of the same rule: tests/distributed/test_runs_engines.py
@pytest.mark.ray
def test_it_gives_the_same_bits_on_ray_with_a_judge_elsewhere(teach, ray_backend: Backend):
    local = rows_of(teach())
    pools = "placement={pools: {policy: {devices: 1}, scorers: {devices: 1}}, roles: {brief: scorers}}"
    assert rows_of(teach("trainer.resume=never", "trainer={backend: ray, devices: 2}", pools)) == local


PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "own_dataflow.md"
FILTERED = """
from hybridflow.controller import BatchRef
from hybridflow.dataflows.grpo import GRPO

class Filtered(GRPO):
"""
BRIEF = "trainer={total_steps: 2, save_every: 0, eval_every: 0, samples_every: 0}"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A folder with the code of the page on one's own algorithm: mine.py, halves.py and filtered.py."""
    advantage, loss, dataflow, method = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(advantage + "\n\n" + loss)
    (tmp_path / "halves.py").write_text(dataflow)
    (tmp_path / "filtered.py").write_text(f"{FILTERED}{indent(method, '    ')}")
    return tmp_path


@pytest.mark.parametrize(
    "own",
    [
        "algorithm=grpo algorithm.advantage={}/mine.py:better_than_the_median algorithm.advantage_settings.temper=0.5"
        " algorithm.policy_loss={}/mine.py:plain_gradient algorithm.loss_settings.bonus=0.01",
        "algorithm.advantage=grpo dataflow={}/halves.py:BetterHalf dataflow_settings.fraction=0.25",
        "algorithm.advantage=grpo dataflow={}/filtered.py:Filtered asynchrony.partial_rollouts=true"
        " asynchrony.max_staleness=1",
    ],
    ids=["advantage and loss", "dataflow", "filter"],
)
def test_the_code_of_the_documents_learns(page: Path, own: str):
    rows = rows_of_run(page / "run", [*small_run(page), BRIEF, *own.replace("{}", str(page)).split()])
    assert [row["actor/grad_norm"] > 0.0 for row in rows] == [True, True]
