"""A class derived from a dataflow of ours trains as that one does: the same roles, reference, checks and evaluation."""

import json

import pytest

from hybridflow.config.paths import builtin_path
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.dpo import DPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.kto import KTO
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.sft import SFT
from hybridflow.trainer import main_dpo, main_kto, main_ppo, main_sft
from tests.distributed.runs import reproducible, rows_of_run, small_run

PAIRS = ["algorithm.preference.beta=0.1"]
CASES = [
    (PPO, main_ppo.main, ["algorithm.kl.placement=reward"]),
    (DAPO, main_ppo.main, ["algorithm=dapo", "dataflow_settings.max_refills=1"]),
    (SFT, main_sft.main, []),
    (DPO, main_dpo.main, PAIRS),
    (KTO, main_kto.main, PAIRS),
]


def data_of(dataflow: type[Dataflow], folder) -> list[str]:
    """Settings that name small files of the dataflow's kind of data."""
    if dataflow.data == "prompts":
        return []
    if dataflow.data == "demonstrations":
        lines = [json.dumps({"prompt": f"{a}+{a}=", "response": f"{2 * a}"}) for a in range(24)]
    else:
        lines = builtin_path("calculator/pairs").read_text().splitlines()[:24]
    for name, part in (("train", lines[:16]), ("held_out", lines[16:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    return [f"data={{train_files: [{folder}/train.jsonl], eval_files: [{folder}/held_out.jsonl]}}"]


@pytest.mark.parametrize(
    ("dataflow", "command", "settings"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[] if case[0] in (PPO, SFT) else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_derived_class_trains_as_the_one_it_derives_from(tmp_path, dataflow, command, settings):
    own = tmp_path / "own.py"
    own.write_text(f"from {dataflow.__module__} import {dataflow.__name__}\n\n\nclass Mine({dataflow.__name__}): ...\n")
    common = [s for s in small_run(tmp_path) if not s.startswith("critic") or dataflow is PPO]
    common += [*data_of(dataflow, tmp_path), *settings, "trainer={total_steps: 2, save_every: 0, samples_every: 0}"]
    rows = {}
    for name, chosen in (("ours", []), ("derived", [f"dataflow={own}:Mine"])):
        rows[name] = reproducible(rows_of_run(tmp_path / name, [*common, *chosen], command=command))
    assert rows["derived"] == rows["ours"]
    assert any(key.startswith("val-core/") for key in rows["ours"][-1])
