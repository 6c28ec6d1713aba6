"""The file of a schedule after its run was killed while it wrote a line."""

import pytest

from hybridflow.dataflows.schedule import SCHEDULE_FILE, Schedule, recorded_steps
from hybridflow.errors import ConfigError

NOT_NUMBERS = [
    b'{"yielded": "abc", "trained": null}',
    b'{"yielded": [], "trained": null}',
    b'{"yielded": [3], "trained": []}',
    b'{"yielded": [[1.5]], "trained": [1]}',
    b'{"yielded": [], "trained": [true]}',
]


def written(folder, steps: int) -> bytes:
    schedule = Schedule(folder / SCHEDULE_FILE, None)
    for step in range(steps):
        schedule.yielded([[step, 3]])
        schedule.end_step(step, [2 * step, 2 * step + 1])
    return (folder / SCHEDULE_FILE).read_bytes()


def test_a_torn_last_line_is_passed_over(tmp_path):
    whole = written(tmp_path, 3)
    expected = recorded_steps(tmp_path)
    assert [list(step.trained) for step in expected] == [[0, 1], [2, 3], [4, 5]]
    end = whole.rindex(b"\n", 0, -1) + 1
    for size in range(end + 1, len(whole)):
        (tmp_path / SCHEDULE_FILE).write_bytes(whole[:size])
        assert recorded_steps(tmp_path) == expected[:2], whole[end:size]


def test_what_is_written_after_a_torn_line_is_a_line_of_its_own(tmp_path):
    whole = written(tmp_path, 2)
    (tmp_path / SCHEDULE_FILE).write_bytes(whole[:-9])
    schedule = Schedule(tmp_path / SCHEDULE_FILE, None)
    schedule.resume()
    assert (tmp_path / SCHEDULE_FILE).read_bytes() == whole[:-9], "a run that ends before its next step leaves no line"
    schedule.end_step(2, [])
    added = b'\n{"resumed": true}\n{"step": 3, "yielded": [], "trained": []}\n'
    assert (tmp_path / SCHEDULE_FILE).read_bytes() == whole[:-9] + added
    with pytest.raises(ConfigError, match="was resumed"):
        recorded_steps(tmp_path)


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"5", b'{"step": 2, "yie', *NOT_NUMBERS])
def test_another_line_that_is_no_record_is_an_error(tmp_path, line):
    (tmp_path / SCHEDULE_FILE).write_bytes(line + b"\n" + written(tmp_path, 1))
    with pytest.raises(ConfigError, match=r"line 1 of schedule\.jsonl is not the record of a step") as caught:
        recorded_steps(tmp_path)
    assert "schedule is complete" in caught.value.remedy


@pytest.mark.parametrize("text", ["", '{"step": 1, "yie'])
def test_a_schedule_without_a_step_is_an_error(tmp_path, text):
    (tmp_path / SCHEDULE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"schedule\.jsonl has no steps") as caught:
        recorded_steps(tmp_path)
    assert "has finished at least as many steps" in caught.value.remedy
