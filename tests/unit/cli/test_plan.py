"""`hybridflow plan`: runs planned for devices that are not here."""

import json
from statistics import median
from xml.etree import ElementTree

import pytest
import yaml

from hybridflow.cli.main import main
from hybridflow.observability.formatting import short
from tests.distributed.runs import metric_rows, rows_of_run, small_run

OPTIONS = ["--on", "4xcpu"]


def test_a_plan_is_saved_as_a_run_file_that_composes_to_the_same_placement(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "ppo", "placement=split", *OPTIONS, "--save", "planned.yaml", "--figure", "planned.svg"]) == 0
    saved = yaml.safe_load((tmp_path / "planned.yaml").read_text())
    assert sum(value for key, value in saved.items() if key.startswith("placement.pools.") and "devices" in key) == 4
    assert saved["placement.roles.critic"] != saved["placement.roles.actor"] == saved["placement.roles.rollout"]
    assert ElementTree.parse(tmp_path / "planned.svg").getroot().tag.endswith("svg")
    assert "It fits: a step takes about" in capsys.readouterr().out
    assert main(["run", "planned.yaml", "--dry-run", "trainer.threads=1"]) == 0
    assert f"critic   {saved['placement.roles.critic']}" in capsys.readouterr().err


def test_models_are_known_by_name_and_need_no_data(capsys):
    assert main(["plan", "grpo", "model.path=Qwen3-30B-A3B", "--on", "4x8xH100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["asked"]["parameters"]["actor"] == pytest.approx(30.5e9, rel=0.01)
    assert answer["asked"]["active_parameters"]["actor"] < 4e9


def test_a_saved_plan_without_data_says_what_to_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "ppo", "model.path=1B", "--on", "H100", "--save", "planned.yaml"]) == 0
    assert yaml.safe_load((tmp_path / "planned.yaml").read_text())["data.train_files"] == ["data.jsonl"]
    assert "planned.yaml (data.jsonl in it stands for your data: set data.train_files)" in capsys.readouterr().err
    assert main(["plan", "ppo", "--on", "cpu", "--save", "planned.yaml"]) == 0
    assert "stands for" not in capsys.readouterr().err


def test_the_reference_of_an_adapter_takes_time_on_the_devices_of_the_actor(capsys):
    words = ["grpo", "actor.lora.rank=4", "algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1", *OPTIONS]
    assert main(["plan", *words, "--json"]) == 0
    calls = {call["name"]: call for call in json.loads(capsys.readouterr().out)["step"]["calls"]}
    reference = calls["reference.reference_logprobs"]
    assert reference["pool"] == calls["actor.update"]["pool"]
    assert 0 < reference["seconds"] < calls["actor.update"]["seconds"]


def test_without_a_rollout_no_weights_are_sent(capsys):
    assert main(["plan", "sft", "--on", "cpu", "--json"]) == 0
    seconds = {call["name"]: call["seconds"] for call in json.loads(capsys.readouterr().out)["step"]["calls"]}
    assert seconds["actor.publish_weights"] == 0 < seconds["actor.supervised_step"]


def test_what_cannot_fit_is_answered_with_what_would(capsys):
    assert main(["plan", "ppo", "model.path=70B", "--on", "RTX-4090"]) == 2
    said = capsys.readouterr().out
    assert "It does not fit." in said
    assert "Host memory for what is offloaded or copied: 43.2 GiB per device." in said
    assert "The smallest number of RTX-4090 that fits: 112" in said
    assert "The single change that helps most: LoRA of rank 16" in said
    assert "Then: GB200 instead of RTX-4090" in said
    assert "it then fits\n    on 48 x RTX-4090" in said  # without copies of the state
    assert main(["plan", "ppo", "model.path=70B", "--on", "112xRTX-4090", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    trains = [pool for pool in step["pools"] if any(role["role"] in ("actor", "critic") for role in pool["roles"])]
    assert all(0 < pool["host_contents"]["copies"] <= pool["host_bytes"] <= pool["offload_bytes"] for pool in trains)
    assert step["storage"]["checkpoint_bytes"] == pytest.approx(2 * 14 * 70e9, rel=0.01)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("planned")
    rows_of_run(folder / "run", small_run(folder))
    return folder / "run"


def test_the_steps_of_a_run_are_compared_with_their_prediction(run_dir, capsys):
    assert main(["plan", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = metric_rows(run_dir)[2:]
    assert json.loads((run_dir / "trace.json").read_text())[-1]["name"] == "checkpoint 4"
    assert found["num_steps"] == len(rows) == 3
    assert found["measured_seconds"] == pytest.approx(median(row["perf/time_per_step"] for row in rows), rel=0.05)
    lengths = [median(row[f"{part}_length/mean"] for row in rows) for part in ("prompt", "response")]
    assert found["mean_row_tokens"] == pytest.approx(sum(lengths), rel=1e-3)
    calls = {call["name"]: call for call in found["calls"]}
    assert all(call["measured_seconds"] > 0 for call in calls.values())
    modeled = [call["predicted_seconds"] for call in calls.values() if call["predicted_seconds"] is not None]
    assert sum(modeled) == pytest.approx(found["predicted_seconds"])
    assert calls["reward.score"]["predicted_seconds"] is None
    [pool] = found["pools"]
    assert pool["roles"]["actor"].startswith("single")
    assert pool["predicted_idle_fraction"] == 0 < pool["measured_idle_fraction"]
    assert min(pool["predicted_peak_bytes"], pool["measured_peak_bytes"]) > 100 << 20

    assert main(["plan", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ppo with calculator on 1 x CPU: predicted and measured\nMeasured: medians of 3 steps.")
    for name, call in calls.items():
        [line] = [line for line in said.splitlines() if line.startswith(f"{name} ")]
        assert short(call["measured_seconds"]) in line
    assert "The search " in said.splitlines()[-1] or "The search would now choose" in said


def test_a_run_whose_placement_costs_time_is_told_a_shorter_one(run_dir, tmp_path, capsys):
    config = (run_dir / "config.yaml").read_text()
    slower = config.replace("microbatch_tokens: 4096  # origin: device", "microbatch_tokens: 12  # origin: plan")
    assert slower != config
    (tmp_path / "config.yaml").write_text(slower)
    (tmp_path / "trace.json").write_bytes((run_dir / "trace.json").read_bytes())
    assert main(["plan", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "microbatches of 12 tokens" in said
    assert "Predicted: for rows of an assumed mean length (the run logged none), " in said
    assert "The search would now choose" in said


def test_directories_without_measured_steps_are_named(run_dir, tmp_path, capsys):
    def error(*words: str) -> str:
        assert main(["plan", *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    config = (run_dir / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config)
    assert "has no finished training step in trace.json" in error(str(tmp_path))
    (tmp_path / "config.yaml").write_text(config.replace("trace_steps: 20", "trace_steps: 0"))
    assert "trainer.trace_steps=0. What to do: Run it again with trainer.trace_steps=20" in error(str(tmp_path))
    assert f"There is no run in '{tmp_path}/none'. What to do: Give the directory" in error(f"{tmp_path}/none")
    assert "There is no run in '/etc'. What to do: Give the directory" in error("/etc")
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "trace.json").write_bytes((run_dir / "trace.json").read_bytes())
    (tmp_path / "metrics.jsonl").mkdir()
    assert "metrics.jsonl, cannot be read: Is a directory." in error(str(tmp_path))
    assert "placement=auto does not apply. What to do: Leave it out." in error(str(run_dir), "placement=auto")
    assert "--save does not apply" in error(str(run_dir), "--save", "plan.yaml")
    assert "the run in" in (said := error(str(run_dir), "--on", "4xcpu")) and "as in --on CPU" in said


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["--on", "cpu,a=cpu,a=2xcpu"], "gives the devices of pool 'a' twice", "Leave one of them out"),
        (
            ["data.batch_size=3", "actor.minibatch_size=4", *OPTIONS],
            "size=4 does not divide data.batch_size=3",
            "Use 3",
        ),
        (
            ["safe_rlhf", "actor.parallelism.pipeline=2", "actor.engine=fsdp", "--on", "6xH100"],
            "actor.parallelism.pipeline=2, but actor.engine=fsdp has no such parallelism",
            "actor.engine=megatron",
        ),
        (
            ["ppo", "model.path=Qwen2.5-7B", "actor.parallelism.tensor=3", "actor.engine=fsdp", "--on", "8xH100"],
            "tensor=3 does not divide the model's 28 attention heads",
            "28 heads",
        ),
        (["--on", "8xH1000"], "'H1000' is not a known device", "Known devices:"),
        (
            ["--on", "4xH100", "trainer.devices=8"],
            "trainer.devices=8 contradicts the devices of --on, which are trainer.devices=4.",
            "Leave out trainer.devices",
        ),
        (["model.path=Qwen9-32B", "--on", "8xH100"], "'Qwen9-32B' is not a known model", "Give a known name"),
        (["placement=split", "placement.pools.a.devices=1", *OPTIONS], "lets hybridflow choose the pools", "Leave out"),
        (["--on", "cpu", "--save", "none/plan.yaml"], "could not be written", "existing directory"),
        (["--on", "cpu", "--figure", "plan.png"], "--figure plan.png is not an SVG file", "ends with .svg"),
        (["--calibrate", "ppo"], "--calibrate ppo is not a YAML file", "ends with .yaml"),
        (["--calibrate", "none/devices.yaml"], "there is no directory", "existing directory"),
        (["grpo", "--calibrate", "devices.yaml"], "to which grpo does not apply", "then plan with --on devices.yaml"),
        (["--calibrate", "--json"], "to which --json does not apply", "hybridflow plan --calibrate devices.yaml"),
        (["trainer.devices=2", "trainer.device_file=none.yaml"], "none.yaml cannot be read", "existing file"),
        (["--mean-response", "-5", *OPTIONS], "--mean-response=-5 is not above 0 and at most", "Give the mean tokens"),
        (["--mean-response", "0", *OPTIONS], "--mean-response=0 is not above 0 and at most", "Give the mean tokens"),
        (["--mean-response", "nan", *OPTIONS], "--mean-response=nan is not above 0", "Give the mean tokens"),
        (
            ["data.max_response_tokens=12", "--mean-response", "12.5", *OPTIONS],
            "--mean-response=12.5 is not above 0 and at most data.max_response_tokens=12.",
            "Give the mean tokens",
        ),
    ],
)
def test_wrong_requests_are_named(words, message, remedy, capsys):
    assert main(["plan", *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert remedy in said


def test_several_nodes_without_a_cluster_need_named_devices(monkeypatch, capsys):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of this process may use Ray
    assert main(["plan", "trainer.nodes=2", "trainer.devices=8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "RAY_ADDRESS is not set" in said
    assert "not here, name them, as in --on 2x8xH100" in said


def test_a_described_device_is_planned_and_used_by_runs(tmp_path, monkeypatch, capsys):
    slow = "CPU:\n  like: CPU\n  cores: 1\n  launch_seconds: {single: 0.01, fsdp: 0.01, transformers: 0.01}\n"
    (tmp_path / "devices.yaml").write_text(slow)
    monkeypatch.chdir(tmp_path)
    seconds = {}
    for words in (
        ["--on", "2xcpu"],
        ["--on", "2xdevices.yaml"],
        ["trainer.devices=2", "trainer.device_file=devices.yaml"],
    ):
        assert main(["plan", "ppo", "actor.engine=fsdp", "placement=colocated", "--json", *words]) == 0
        seconds[words[-1]] = json.loads(capsys.readouterr().out)["step"]["seconds"]
    assert seconds["2xdevices.yaml"] > 1.9 * seconds["2xcpu"]
    assert seconds["trainer.device_file=devices.yaml"] == seconds["2xdevices.yaml"]


def test_a_described_gpu_is_not_used_for_a_run_on_cpus(tmp_path, capsys):
    (tmp_path / "devices.yaml").write_text("mine:\n  like: H100\n")
    words = ["trainer.device=cpu", "trainer.devices=2", f"trainer.device_file={tmp_path}/devices.yaml"]
    assert main(["plan", "ppo", *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "describes a GPU, and the run uses a CPU" in said
    assert "hybridflow plan --calibrate FILE.yaml" in said
