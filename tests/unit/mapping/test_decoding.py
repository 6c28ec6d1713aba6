"""The batch of an engine while it generates, against continuous batching one step after another."""

import random

import numpy as np
import pytest

from hybridflow.mapping.layouts import ModelUse, RolloutLayout
from hybridflow.mapping.timing.decoding import decoding_runs, length_in_flight, steady
from hybridflow.mapping.timing.generation import cache_bytes_per_token, generation_seconds
from hybridflow.mapping.workload import Lengths, Workload
from tests.oracles.decoding import arrival_order, decoding_steps
from tests.unit.mapping.clusters import CLUSTER, dense


def runs_of(steps: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Steps, tokens, and tokens attended to, of all steps."""
    return len(steps), sum(n for n, _ in steps), sum(cached for _, cached in steps)


@pytest.mark.parametrize("seed", range(60))
def test_schedule_equals_a_simulation_of_every_step(seed: int):
    choose = random.Random(seed)
    rows = choose.randint(1, 100)
    lengths = sorted(float(choose.randint(1, choose.choice((3, 50, 400)))) for _ in range(rows))
    limit = choose.randint(1, 120)
    expected = decoding_steps(arrival_order(lengths), limit)
    found = decoding_runs(tuple(lengths), rows, limit)
    sums = (found.steps.sum(), found.steps @ found.sequences, found.steps @ found.generated)
    assert sums == pytest.approx(runs_of(expected))
    expanded = np.repeat(found.sequences, found.steps.astype(int))
    assert expanded == pytest.approx([sequences for sequences, _ in expected])


@pytest.mark.parametrize(("rows", "limit"), [(2048, 2048), (2048, 256), (1000, 96), (777, 1)])
def test_rows_that_share_a_length_give_the_tokens_of_all_rows(rows: int, limit: int):
    lengths = Lengths.spread(500, 4000)
    found = decoding_runs(lengths.quantiles, rows, limit)
    # groups of rows, and a longest row among few, change the mean by less than 1 %
    assert found.steps @ found.sequences == pytest.approx(rows * lengths.mean, rel=0.01)
    assert found.sequences.max() <= limit * (1 + 1e-9)


def test_equal_responses_beyond_the_limit_are_generated_in_waves():
    found = decoding_runs((100.0,), 512, 128)
    assert found.steps.sum() == 400
    assert set(found.sequences) == {128.0}


def test_the_last_steps_of_a_batch_generate_the_longest_response_alone():
    found = decoding_runs((10.0, 10.0, 10.0, 1000.0), 4, 4)
    assert found.steps.tolist() == [10.0, 990.0]
    assert found.sequences.tolist() == [4.0, 1.0]


@pytest.mark.parametrize("limit", [4, 16, 64])
def test_generation_equals_the_sum_over_simulated_steps(limit: int):
    model, choose = dense(), random.Random(limit)
    use, layout = ModelUse(model, 2, is_trained=False), RolloutLayout(engine="vllm", max_sequences=limit)
    lengths = sorted(float(choose.randint(1, 300)) for _ in range(64))
    workload = Workload(64, Lengths.constant(100), Lengths(tuple(lengths)), optimizer_steps=1)
    weights = 2 * (8 * (1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 32000 * 1024)
    per_token = 2 * 2 * 8 * 256
    steps = decoding_steps(arrival_order(lengths), limit)
    read = sum(weights + per_token * (sequences * 100 + cached) for sequences, cached in steps)
    found = generation_seconds(use, layout, workload, CLUSTER)
    assert found.parts["weights"] + found.parts["cache"] == pytest.approx(read / 2e12)
    assert found.parts["matrix"] == 0.0
    assert found.parts["latency"] == 0.0


def test_a_small_cache_limits_the_responses_generated_together():
    use = ModelUse(dense(), 2, is_trained=False)
    workload = Workload(64, Lengths.constant(100), Lengths.constant(200), optimizer_steps=1)
    ample = RolloutLayout(engine="vllm")
    quarter = RolloutLayout(engine="vllm", cache_bytes=16 * 200 * cache_bytes_per_token(use, ample))
    one, four = (generation_seconds(use, layout, workload, CLUSTER) for layout in (ample, quarter))
    assert four.parts["weights"] == pytest.approx(4 * one.parts["weights"])
    assert four.parts["cache"] == pytest.approx(one.parts["cache"])


def test_batches_in_flight_hide_the_tail_until_the_longest_response_takes_all_of_them():
    lengths = (10.0, 10.0, 10.0, 1000.0)
    drained = decoding_runs(lengths, 4, 1000).steps.sum()
    intervals = [float(steady(lengths, 4, 1000, batches).steps[0]) for batches in (2, 4, 8)]
    assert intervals == pytest.approx([drained / 2, drained / 4, drained / 8])
    limited = steady(lengths, 4, 8, 1000)
    assert float(limited.steps[0]) == pytest.approx(1030 / 8)


def test_the_mean_length_in_flight_weighs_long_responses_by_their_steps():
    assert length_in_flight((100.0,)) == 50
    assert length_in_flight((1.0, 99.0)) == pytest.approx((1 + 99**2) / 200)


def test_a_long_queue_is_a_steady_state_between_its_beginning_and_its_end():
    lengths = Lengths.spread(500, 4000).quantiles
    mean = sum(lengths) / len(lengths)
    for rows, limit in ((1e5, 1.0), (1e6, 64.0), (1e12, 256.0)):
        runs = decoding_runs(lengths, rows, limit)
        assert len(runs.steps) < 20_000
        assert runs.steps @ runs.sequences == pytest.approx(rows * mean, rel=0.01)
    short, long = (decoding_runs(lengths, rows, 64.0) for rows in (1e6, 2e6))
    assert (long.steps.sum() - short.steps.sum()) * 64 == pytest.approx(1e6 * mean)
    most = [decoding_runs(lengths, rows, 256.0) for rows in (16384.0, 16400.0)]  # before and after the limit
    for name in ("steps", "generated"):
        before, after = (float(runs.steps @ vars(runs)[name]) if name != "steps" else runs.steps.sum() for runs in most)
        assert after == pytest.approx(before, rel=0.005)
