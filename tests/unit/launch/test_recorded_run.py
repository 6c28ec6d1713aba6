"""The plan of a run as its directory records it."""

import pytest

from hybridflow.launch.automatic import with_plan
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.planning import plan_on
from hybridflow.launch.recorded_run import RecordedRun
from hybridflow.mapping.clusters import cluster_of
from tests.distributed.runs import rows_of_run, small_run

NO_DATA = "data.train_files=[data.jsonl]"


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ([], "4xcpu"),
        (["placement=split", "algorithm.kl.placement=reward"], "4xcpu"),
        ([NO_DATA, "algorithm=grpo", "model.path=Qwen3-30B-A3B", "data.max_response_tokens=8192"], "4x8xH100"),
        ([NO_DATA, "model.path=13B", "placement=standalone", "trainer.parallelism=auto"], "8x8xA100-80"),
    ],
)
def test_a_recorded_plan_costs_what_the_search_found(words, devices, tmp_path):
    plan, found = plan_on(compose_run(words, config_name="ppo"), devices)
    best = found.plans[0]
    (tmp_path / "config.yaml").write_text(config_text(with_plan(plan, best)))
    run = RecordedRun(tmp_path)
    step = run.planned_on(run.devices(devices), found.request.workload)
    assert {role: layout.in_words for role, layout in step.layouts.items()} == {
        role: layout.in_words for role, layout in best.layouts.items()
    }
    assert step.seconds == pytest.approx(best.seconds, rel=0.02)  # a share of a GPU is rounded to a percent
    if "cpu" not in devices:  # where the rollout does not sleep, so that its cache stays
        peaks = [[max(phase.total for phase in each.phases(pool)) for pool in each.pools] for each in (step, best)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_every_operation_of_a_run_is_measured(tmp_path):
    run_dir = tmp_path / "run"
    rows = rows_of_run(run_dir, small_run(tmp_path))
    run = RecordedRun(run_dir)
    measured, step = run.measured(), run.planned_on(run.devices())
    assert measured.num_steps == 3
    assert measured.seconds_of(step.request.operations).keys() == {each.name for each in step.request.operations}
    assert max(measured.seconds_of(step.request.operations).values()) < measured.seconds
    assert measured.peak_bytes["main"] > 100 << 20, "PyTorch alone takes more"
    assert measured.critical_seconds == pytest.approx(
        sorted(row["perf/critical_path_seconds"] for row in rows if row["step"] > 1)[1], abs=1e-4
    )
    work = step.request.workload
    assert work.responses.mean == pytest.approx(
        sorted(row["response_length/mean"] for row in rows if row["step"] > 1)[1], rel=1e-3
    )
    assert work.responses.longest == sorted(row["response_length/max"] for row in rows if row["step"] > 1)[1]
    assert step.request.cluster == cluster_of("cpu")
