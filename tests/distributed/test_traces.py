"""trace.json of real runs: every call of every step on every rank, and what runs concurrently on separate pools."""

from itertools import pairwise
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from hybridflow.observability.calls import Section, Span
from hybridflow.observability.trace import STEP, read_trace
from tests.distributed.runs import metric_rows, reproducible, rows_of_run, run_well, small_run

PPO_CALLS = {
    "rollout.generate", "reward.score", "reference.logprobs", "critic.values", "actor.logprobs", "critic.advantages",
    "critic.update", "actor.update",
}  # fmt: skip
LOOKED_AT = ("reward.score", "reference.logprobs", "critic.values")
WITH_REFERENCE = "algorithm.kl={placement: reward, coefficient: 0.05}"
PONDERING = """
import asyncio

async def ponder(prompts, completions, answer, **columns):
    await asyncio.sleep(SECONDS)
    return [float(completion == expected) for completion, expected in zip(completions, answer)]
"""


def steps_of(run_dir: Path) -> list[Section]:
    return [section for section in read_trace(run_dir) if section.what == STEP]


def only(step: Section, name: str) -> Span:
    [span] = [span for span in step.spans if span.name == name]
    return span


def assert_sound(step: Section) -> None:
    """Each call is there on each rank of its pool, once; spans of one rank do not overlap; the path has a length."""
    places = {(span.pool, span.rank): [] for span in step.spans}
    for call in {span.call for span in step.spans}:
        own = [span for span in step.spans if span.call == call]
        assert sorted(span.rank for span in own) == list(range(step.pools[own[0].pool])), own
    for span in sorted(step.spans, key=lambda span: span.start):
        places[span.pool, span.rank].append(span)
    for spans in places.values():
        assert all(before.end <= after.start + 1e-6 for before, after in pairwise(spans))
    longest = max(map(step.seconds_within, step.spans))
    assert longest <= sum(map(step.seconds_within, step.critical_path())) <= step.seconds + 1e-4


@pytest.mark.slow
@pytest.mark.ray
def test_reference_reward_and_critic_overlap_on_separate_pools_and_the_step_is_shorter_than_its_calls(
    tmp_path: Path, ray_backend: Backend
):
    (tmp_path / "slow.py").write_text(PONDERING.replace("SECONDS", "2.5"))
    pools = "placement.pools={policy: {devices: 1}, judge: {devices: 1}, frozen: {devices: 1}, values: {devices: 1}}"
    roles = "placement.roles={reward: judge, reference: frozen, critic: values}"
    settings = [f"reward.functions=[{tmp_path}/slow.py:ponder]", "reward.processes=0", WITH_REFERENCE, pools, roles]
    settings += ["trainer={backend: ray, devices: 4, total_steps: 3, eval_every: 0, save_every: 0}"]
    rows = rows_of_run(tmp_path / "run", [*small_run(tmp_path), *settings, "rollout.samples_per_prompt=16"])
    steps = steps_of(tmp_path / "run")
    assert [step.step for step in steps] == [1, 2, 3]
    overlaps, saved = [], []
    for step, row in zip(steps, rows[-3:], strict=True):
        assert_sound(step)
        assert {span.name for span in step.spans} >= PPO_CALLS
        reward, *others = (only(step, name) for name in LOOKED_AT)
        overlaps += [min(reward.end, other.end) - max(reward.start, other.start) for other in others]
        saved.append(sum(total.seconds for total in step.totals().values()) - step.seconds)
        path = {span.name for span in step.critical_path()}
        assert "reward.score" in path and path & {"actor.update", "critic.update"}
        assert 2.5 < row["perf/critical_path_seconds"] <= row["timing_s/step"] + 1e-4
        for pool in ("policy", "frozen", "values"):  # all three wait for most of the 2.5 s of the reward
            assert 0.0 < row[f"perf/idle_fraction/{pool}"] <= 1.0
        assert row["perf/idle_fraction/judge"] < row["perf/idle_fraction/frozen"]
    assert min(overlaps) > 0.0, overlaps
    # On a busy machine, what lies between calls may take longer than the overlap in some steps.
    assert max(saved) > 0.0, saved


@pytest.mark.ray
def test_slow_reward_functions_overlap_with_other_calls_by_default_and_the_run_is_the_same(
    tmp_path: Path, ray_backend: Backend
):
    (tmp_path / "slow.py").write_text(PONDERING.replace("SECONDS", "0.5"))
    settings = [*small_run(tmp_path), f"reward.functions=[{tmp_path}/slow.py:ponder]", WITH_REFERENCE]
    settings += ["trainer={backend: ray, total_steps: 2, eval_every: 0, save_every: 0}"]
    found = rows_of_run(tmp_path / "run", settings)
    for step in steps_of(tmp_path / "run"):
        assert step.pools == {"main": 1, "cpus": 1}
        score = only(step, "reward.score")
        for other in (only(step, name) for name in ("reference.logprobs", "critic.values", "actor.logprobs")):
            assert (score.pool, other.pool) == ("cpus", "main")
            assert min(score.end, other.end) > max(score.start, other.start), other.name
    together = rows_of_run(tmp_path / "together", [*settings, "placement.roles.reward=main"])
    assert {pool for step in steps_of(tmp_path / "together") for pool in step.pools} == {"main"}
    assert reproducible(found) == reproducible(together)


@pytest.mark.slow  # the quick case of the same rule: tests/distributed/test_partial_rollouts.py
@pytest.mark.ray
def test_with_a_rollout_of_its_own_pool_the_next_batch_is_generated_while_the_actor_learns_and_then_waits(
    tmp_path: Path, ray_backend: Backend
):
    """The reward takes 1 s in the rollout's pool, so that the actor waits as long to publish; that counts as idle."""
    (tmp_path / "slow.py").write_text(PONDERING.replace("SECONDS", "1.0"))
    pools = (
        "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: generate}}"
    )
    settings = ["trainer={backend: ray, devices: 2, total_steps: 6, eval_every: 0, save_every: 0}", pools]
    settings += ["algorithm=grpo", "rollout.samples_per_prompt=16", "asynchrony.max_staleness=1"]
    settings += [f"reward.functions=[{tmp_path}/slow.py:ponder]", "reward.processes=0"]
    rows = rows_of_run(tmp_path / "run", [*small_run(tmp_path), *settings])
    spans = [span for step in steps_of(tmp_path / "run") for span in step.spans]
    generated = sorted((span for span in spans if span.name == "rollout.generate"), key=lambda span: span.start)
    updated = sorted((span for span in spans if span.name == "actor.update"), key=lambda span: span.start)
    assert len(generated) == len(updated) == 6
    shared = [
        min(generate.end, update.end) - max(generate.start, update.start)
        for generate, update in zip(generated[1:], updated, strict=False)
    ]
    assert max(shared[1:]) > 0.0, shared  # the first two batches are generated before the first update
    assert [row["async/staleness/max"] for row in rows[-6:]] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    received = {span.call: span for span in spans if span.name == "rollout.receive_weights"}
    published = [span for span in spans if span.name == "actor.publish_weights" and span.call + 1 in received]
    assert len(published) >= 3 and max(span.waited_seconds for span in published) > 0.05
    assert all(span.work_start > received[span.call + 1].start - 0.01 for span in published)


@pytest.mark.slow
@pytest.mark.ray
def test_ranks_of_one_pool_run_all_calls_in_call_order_and_rows_are_counted_once(tmp_path: Path, ray_backend: Backend):
    settings = ["trainer={backend: ray, devices: 4, total_steps: 2, eval_every: 2, save_every: 2}", WITH_REFERENCE]
    settings += ["actor={engine: fsdp, parallelism: {tensor: 2}}"]
    rows_of_run(tmp_path / "run", [*small_run(tmp_path), *settings])
    sections = read_trace(tmp_path / "run")
    assert [(section.what, section.step) for section in sections] == [
        ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2)
    ]  # fmt: skip
    for step in steps_of(tmp_path / "run"):
        assert_sound(step)
        totals = {f"{role}.{method}": total for (role, method), total in step.totals().items()}
        assert set(totals) >= PPO_CALLS
        assert {name: totals[name].rows for name in PPO_CALLS} == dict.fromkeys(PPO_CALLS, 16)
        assert totals["actor.update"].tokens == totals["critic.values"].tokens > totals["rollout.generate"].tokens > 0
        [score] = {span.call for span in step.spans if span.name == "reward.score"}
        [generate] = {span.call for span in step.spans if span.name == "rollout.generate"}
        assert all(generate in span.needs for span in step.spans if span.call == score)


def test_a_resumed_run_continues_its_trace_and_no_trace_is_written_if_none_is_wanted(tmp_path: Path):
    settings = [*small_run(tmp_path), f"trainer.run_dir={tmp_path}/run"]
    run_well([*settings, "trainer.total_steps=2"])
    run_well([*settings, "trainer.total_steps=4"])
    assert [step.step for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    for step, row in zip(steps_of(tmp_path / "run"), metric_rows(tmp_path / "run")[1:], strict=True):
        assert step.seconds == pytest.approx(row["timing_s/step"], abs=0.05)
    rows_of_run(tmp_path / "without", [*small_run(tmp_path), "trainer={total_steps: 1, trace_steps: 0}"])
    assert not (tmp_path / "without" / "trace.json").exists()
