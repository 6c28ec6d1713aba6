"""What a fault has cost."""

import json

from hybridflow.config.loop import Trainer
from hybridflow.elastic.fault_recovery import FaultHistory, FaultRecovery
from hybridflow.errors import NodeLost
from tests.unit.dataflows.test_recovery import PLACE, Restarts


def test_a_fault_costs_the_work_that_is_repeated_also_if_all_roles_start_again(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("hybridflow.elastic.fault_recovery.time.monotonic", lambda: now)
    parts = {"trainer": Trainer(), "learner_pools": {"main"}, "pool_of": {"actor": "main"}, "reconnect": lambda: None}
    history = FaultHistory()
    parts |= {"ledger": tmp_path / "faults.jsonl", "history": history}
    before = FaultRecovery(Restarts(is_unchanged=False), **parts)
    for step in range(4):
        now = 10.0 * step
        before.reached(step)
    now = 35.0
    assert before.can_survive(NodeLost("gone", **PLACE), step=4, done=3)
    now, after = 60.0, FaultRecovery(Restarts(is_unchanged=False), **parts)
    after.reached(1)
    after.continued(step=1, source="the checkpoint", plan="1 device instead of 2")
    [fault] = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    assert (fault["seconds"], fault["cost_seconds"], fault["repeated_steps"]) == (25.0, 50.0, 2)
