"""Evaluations in parts: enough of them to show progress, none too small for the devices."""

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.launch.assemble import _parts
from hybridflow.launch.compose.compose import compose_run


@pytest.mark.parametrize(
    ("rows", "devices", "sequences", "samples", "sizes"),
    [
        (1318, 1, 256, 1, [264, 264, 264, 263, 263]),
        (3000, 1, 256, 1, [300] * 10),
        (30000, 1, 256, 1, [1000] * 30),
        (100, 1, 256, 1, [100]),
        (64, 1, 256, 16, [16] * 4),
        (9, 8, 1, 1, [9]),
        (17, 8, 1, 1, [9, 8]),
        (9, 4, 1, 64, [5, 4]),
    ],
)
def test_a_part_has_a_full_batch_or_more_and_there_are_ten_if_they_fit(rows, devices, sequences, samples, sizes):
    settings = [
        f"rollout.max_sequences={sequences}",
        f"rollout.eval_samples_per_prompt={samples}",
        "data.eval_limit=null",
    ]
    config, done = compose_run(settings, config_name="ppo").config, []
    table = Batch.of(rows={"n": torch.arange(rows)})
    parts = [*_parts(table, config, devices, lambda start, total: done.append((start, total)))]
    assert [len(part) for part in parts] == sizes
    assert done == [(sum(map(len, parts[:place])), rows) for place in range(len(parts))]
