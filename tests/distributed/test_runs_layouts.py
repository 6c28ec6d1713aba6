"""The same run in other layouts: engines, ranks and pools change seconds and bytes, not what is learnt."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from tests.distributed.runs import Row, reproducible, rows_of_run, small_run

pytestmark = pytest.mark.ray

GENTLE = ["actor.optimizer.epsilon=1e-3", "critic.optimizer.epsilon=1e-3"]
"""With AdamW's usual 1e-8 a gradient that is zero but for rounding is a whole step of the learning rate."""

FSDP = ["trainer.devices=2", "actor.engine=fsdp"]
MEGATRON = [
    "trainer.devices=2",
    "actor.engine=megatron",
    "actor.parallelism.tensor=2",
    "rollout.engine=vllm",
    "rollout.parallelism.tensor=2",
]
STAGES = ["trainer.devices=4", "actor.parallelism={tensor: 2, pipeline: 2}"]
SPLIT = (
    "placement={{pools: {{training: {{devices: {}}}, generation: {{devices: 1}}}},"
    " roles: {{actor: training, rollout: generation}}}}"
)
OF_LAYOUT = ("reshard/", "perf/", "timing_s/")
"""Metrics that say how a run was laid out."""

Run = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function: settings -> the metrics of a run of three steps."""

    def metrics(*settings: str, folder: Path | None = None) -> list[Row]:
        folder = folder or tmp_path_factory.mktemp("layout")
        words = ["trainer={total_steps: 3, save_every: 0, eval_every: 3, backend: auto}", *settings]
        return rows_of_run(folder / "run", [*small_run(folder), *GENTLE, *words])

    return metrics


@pytest.fixture(scope="module")
def plain(run: Run) -> list[Row]:
    """The run on one device."""
    return run()


def assert_alike(rows: list[Row], expected: list[Row], *, tolerance: float) -> None:
    """Every metric of every step, but those of the layout."""
    for row, other in zip(reproducible(rows), reproducible(expected), strict=True):
        names = {name for name in row if not name.startswith(OF_LAYOUT)}
        assert names == {name for name in other if not name.startswith(OF_LAYOUT)}
        for name in names:
            if "rollout_" not in name:  # differences between engines, themselves of the size of the rounding
                assert math.isclose(row[name], other[name], rel_tol=tolerance, abs_tol=tolerance), name


def test_two_ranks_of_fsdp_learn_what_one_device_learns_and_leave_checkpoints_that_it_goes_on_from(
    ray_backend: Backend, run, plain, tmp_path
):
    rows = run(*FSDP, "trainer={total_steps: 2, save_every: 1}", folder=tmp_path)
    assert rows[1]["reshard/bytes_moved"] > 0
    rows = run("trainer.save_every=1", folder=tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # float32 sums in another order, through three steps
    assert_alike([_trained(row) for row in rows], [_trained(row) for row in plain], tolerance=2e-3)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rollout_in_a_pool_of_its_own_is_sent_the_weights(ray_backend: Backend, run, plain, ranks):
    rows = run(f"trainer.devices={ranks + 1}", SPLIT.format(ranks))
    assert_alike(rows, plain, tolerance=2e-3)
    assert rows[1]["reshard/bytes_moved"] > 0
    assert rows[1]["timing_s/reshard"] > 0


@pytest.mark.megatron
@pytest.mark.vllm
@pytest.mark.parametrize(
    "more", [[], pytest.param(STAGES, marks=pytest.mark.slow)], ids=["tensor", "tensor and pipeline"]
)
def test_megatron_with_vllm_learns(ray_backend: Backend, run, plain, more):
    rows = run(*MEGATRON, *more)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["training/rollout_logprobs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
    assert set(rows[1]) >= {name for name in plain[1] if not name.startswith(OF_LAYOUT)}


def _trained(row: Row) -> Row:
    """Without evaluations: each part of a run ends with one."""
    return {name: value for name, value in row.items() if not name.startswith("val-")}
