"""`hybridflow doctor RUN_DIR`: runs that were killed, failed, stopped, are damaged, or still run."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from hybridflow.cli.main import main
from hybridflow.doctor.finding import Finding, Status, what_to_do
from hybridflow.doctor.run import disk as disk_room
from hybridflow.doctor.run.all import examine_run
from hybridflow.doctor.run.kills import Kill, kills_in, kills_of_run
from hybridflow.elastic.claim import claim, release
from hybridflow.errors import DataError
from hybridflow.observability.ending import Ending, read_ending, write_ending

SETTINGS = [
    "trainer.total_steps=500",
    "trainer.save_every=2",
    "trainer.backend=local",
    "trainer.eval_every=0",
    "data.batch_size=4",
    "actor.minibatch_size=null",
    "critic.minibatch_size=null",
]
SECONDS = 120.0

REWARD = """import time
from pathlib import Path

def right(completions, answer, **columns):
    if Path({checkpoint!r}).exists():
        time.sleep(600)
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""
"""A reward function that does not return any more once there is a checkpoint."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run that was killed after its second checkpoint, and whose end its witness has recorded."""
    folder = tmp_path_factory.mktemp("doctor")
    run_dir, reward = folder / "run", folder / "reward.py"
    checkpoint = run_dir / "checkpoints" / "step_4" / "manifest.json"
    reward.write_text(REWARD.format(checkpoint=str(checkpoint)))
    words = [
        *SETTINGS,
        "trainer.async_save=false",
        "reward.processes=0",
        f"reward.functions=[{reward}:right]",
        f"trainer.run_dir={run_dir}",
    ]
    command = [sys.executable, "-m", "hybridflow", "ppo", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + SECONDS
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    while not (run_dir / "report.html").exists() or "no ending" not in (run_dir / "report.html").read_text():
        assert time.monotonic() < until
        time.sleep(0.1)
    return run_dir


@pytest.fixture
def copy(killed, tmp_path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "copy"))


def examined(run_dir: Path, *, is_quick: bool = False) -> dict[str, Finding]:
    """The findings by name; of several, the worst."""
    found: dict[str, Finding] = {}
    for finding in examine_run(run_dir, is_quick=is_quick, on_doing=lambda what: None):
        known = found.get(finding.name)
        if known is None or [*Status].index(finding.status) > [*Status].index(known.status):
            found[finding.name] = finding
    return found


def logged(run_dir: Path, rows: list[dict]) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_a_killed_run_is_told_from_a_failed_one_and_the_command_resumes_it(killed, capsys):
    assert main(["doctor", str(killed)]) == 1
    said = capsys.readouterr().out
    found = examined(killed)
    assert found["ending"].status is Status.problem
    assert "was killed in step " in found["ending"].found
    assert "ppo, builtin:calculator" in found["settings"].found
    assert "complete (checksums)" in found["checkpoints"].found
    assert f"hybridflow ppo {SETTINGS[0]}" in found["started"].found
    command = f"hybridflow run {killed}/config.yaml"
    assert said.rstrip().endswith(f"Resume it: {command}")
    step = int(found["resume"].found.split()[2])
    assert f"from step {step} of 500" in found["resume"].found
    resumed = [sys.executable, "-m", *shlex.split(command), "--dry-run"]
    done = subprocess.run(resumed, capture_output=True, text=True, check=False)
    assert f"resumes from step {step}, {killed}/checkpoints/step_{step}" in " ".join(
        (done.stdout + done.stderr).split()
    )


def test_without_its_witness_a_killed_run_is_recognized_too(copy):
    (copy / "ending.json").unlink()
    assert "was killed in step" in examined(copy)["ending"].found


def test_a_run_that_must_not_resume_by_itself_is_resumed_by_a_setting(copy):
    file = copy / "config.yaml"
    file.write_text(file.read_text().replace("resume: auto", "resume: never"))
    assert examined(copy)["resume"].remedy.endswith("config.yaml trainer.resume=auto")


def test_without_settings_the_command_of_the_log_resumes(copy):
    (copy / "config.yaml").unlink()
    found = examined(copy)
    assert found["settings"].status is Status.warning
    assert f"cd {Path.cwd()} && " in found["resume"].remedy and "trainer.run_dir=" in found["resume"].remedy


def test_damaged_checkpoints_are_named_and_passed_over(copy):
    newest = sorted((copy / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))[-1]
    weights = next(newest.glob("actor/huggingface/*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = examined(copy)
    assert found["checkpoints"].status is Status.warning
    assert f"{newest.name} is not usable" in found["checkpoints"].found
    assert f"{newest.name} of" not in found["resume"].found
    assert examined(copy, is_quick=True)["checkpoints"].status is Status.ok  # sizes only
    for other in set((copy / "checkpoints").glob("step_*")) - {newest}:
        shutil.rmtree(other)
    found = examined(copy)["checkpoints"]
    assert found.status is Status.problem and f"Restore {newest.name} from a copy" in found.remedy


def test_a_save_that_was_cut_off_is_said(copy):
    (copy / "checkpoints" / ".step_99.partial-host-1").mkdir()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99}\n')
    findings = [*examine_run(copy, is_quick=True, on_doing=lambda what: None)]
    assert any(finding.found.startswith("step_99 was being saved") for finding in findings)
    assert any(finding.found.startswith("was killed while it saved step 99 at about") for finding in findings)


@pytest.mark.parametrize("name", ["config.yaml", "run.log", "metrics.jsonl", "ending.json", "faults.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "empty", "noise", "cut", "directory"])
def test_every_damaged_file_leaves_a_diagnosis(copy, name, damage):
    file = copy / name
    content = file.read_bytes() if file.exists() else b'{"step": 3, "role": "actor"}\n{"step": [1]}\n'
    if damage != "empty":
        file.unlink(missing_ok=True)
    match damage:
        case "empty":
            file.write_bytes(b"")
        case "noise":
            file.write_bytes(bytes(range(256)) * 20 + b"\n[1, 2]\nnull\n{: - [\n")
        case "cut":
            file.write_bytes(content[: len(content) * 2 // 3])
        case "directory":
            file.mkdir()
    found = examined(copy, is_quick=True)
    assert "resume" in found and what_to_do(found.values())
    assert main(["doctor", str(copy), "--quick", "--json"]) in (0, 1)


def test_lines_that_cannot_be_read_are_counted(copy):
    assert not {"ledger", "log"} & examined(copy, is_quick=True).keys()
    (copy / "faults.jsonl").write_bytes(b'{"step": 3, "role": "actor"}\nno row\n\xff\xfe\n{"step": 4}\n{"torn')
    log = (copy / "run.log").read_bytes()
    (copy / "run.log").write_bytes(
        b"before the first record\n" + log + b"Traceback (most recent call last):\n\0\0\xff\n"
    )
    found = examined(copy, is_quick=True)
    assert (found["ledger"].status, found["ledger"].found) == (Status.warning, "2 lines of faults.jsonl cannot be read")
    assert found["faults"].found.startswith("2 faults")
    assert (found["log"].status, found["log"].found) == (Status.warning, "2 lines of run.log cannot be read")
    assert found["started"].status is Status.ok


def test_aliases_in_the_settings_are_not_followed(copy):
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    (copy / "config.yaml").write_text(f"a0: &a0 [x]\n{levels}dataflow: *a11\nmodel: {{path: *a11}}\n")
    began = time.monotonic()
    found = examined(copy, is_quick=True)["settings"]
    assert found.status is Status.warning and "config.yaml is damaged: it has an alias in line 2" in found.found
    assert time.monotonic() - began < SECONDS / 2


def test_a_failed_run_is_told_with_its_remedy_and_the_place(tmp_path):
    logged(tmp_path, [{"step": 1}])
    place = "[role=actor rank=1 node=n method=update]"
    write_ending(tmp_path, Ending("failed", f"EngineError: It is NaN.\n  line 2 {place} What to do: Lower it."))
    found = examined(tmp_path)["ending"]
    assert (found.status, found.found, found.remedy) == (Status.problem, "failed: EngineError: It is NaN.", "Lower it.")
    assert found.details == (f"  line 2 {place}",)


def test_a_run_that_is_done_needs_nothing(tmp_path, capsys):
    logged(tmp_path, [{"step": 1, "train/loss": 0.5}])
    (tmp_path / "config.yaml").write_text("dataflow: sft\ntrainer: {total_steps: 1}\n")
    write_ending(tmp_path, Ending("done", "1 step"))
    assert main(["doctor", str(tmp_path)]) == 0
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_later_start_that_failed_is_told_next_to_the_ending(copy):
    with (copy / "run.log").open("a") as log:
        log.write("2030-01-01 00:00:00,000 INFO    a.b started hybridflow=0.1.0\n")
        log.write("2030-01-01 00:00:01,000 ERROR   a.b failed: CheckpointError: Other data. What to do: Restore it.\n")
    found = examined(copy, is_quick=True)["last start"]
    assert (found.found, found.remedy) == ("failed: CheckpointError: Other data.", "Restore it.")


def test_a_process_that_the_kernel_killed_is_read_from_its_log():
    log = (
        "[ 5794.817602] oom-kill:constraint=CONSTRAINT_MEMCG,task=hybridflow,pid=29550,uid=0\n"
        "[ 5794.817648] Memory cgroup out of memory: Killed process 29550 (hybridflow) total-vm:1828356kB, UID:0\n"
        "[ 5801.000001] eth0: link up\n"
    )
    [kill] = kills_in(log, datetime(2026, 1, 1))
    assert (kill.pid, kill.name) == (29550, "hybridflow")
    assert kill.time.strftime("%H:%M:%S") == "01:36:34"


def test_numbers_that_are_not_finite_or_explode_are_named(tmp_path):
    rows = [{"step": step, "actor/pg_loss": 0.1, "actor/grad_norm": 1.0 + step % 2} for step in range(1, 9)]
    found = examined(logged(tmp_path, rows))["metrics"]
    assert found.status is Status.ok
    rows += [{"step": 9, "actor/pg_loss": None, "actor/grad_norm": 900.0}]
    found = examined(logged(tmp_path, rows))["metrics"]
    assert found.status is Status.warning and "learning_rate" in found.remedy
    assert (
        found.found == "actor/pg_loss is NaN or infinite in step 9; actor/grad_norm was 900 in step 9, and 1.50 usually"
    )


def test_ties_are_named(tmp_path):
    rows = [{"step": step, "frac_reward_zero_std": 1.0} for step in range(1, 5)]
    assert "all samples of each prompt have the same score" in examined(logged(tmp_path, rows))["learning"].found


def test_the_last_fault_of_a_worker_is_told_with_role_rank_and_call(tmp_path):
    fault = {"step": 3, "fault": "WorkerDied", "role": "rollout", "rank": 1, "node": "n", "method": "rollout.generate"}
    lines = [fault | {"resumed_step": 2, "seconds": 6.1}, fault]
    (logged(tmp_path, [{"step": 3}]) / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = examined(tmp_path)["faults"].found
    assert said.startswith("2 faults, 1 survived; the last in step 3, WorkerDied: rollout rank 1 on n in")
    assert said.endswith("rollout.generate, which ended the run")


def test_faults_that_were_survived_need_no_action_and_several_of_one_node_do(tmp_path):
    def found(*nodes: str) -> Finding:
        faults = zip(nodes, ("actor", "critic", "reward", "rollout"), strict=False)
        lines = [{"step": 3, "role": role, "node": node, "rank": 0, "resumed_step": 2} for node, role in faults]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (logged(tmp_path, [{"step": 3}]) / "faults.jsonl").write_text(text)
        return examined(tmp_path)["faults"]

    for nodes in (["n1"], ["n1", "n2", "n3"]):
        assert (found(*nodes).status, found(*nodes).remedy) == (Status.ok, "")
    assert found("n1", "n2", "n2", "n2").remedy.endswith("faults.jsonl: 3 of 4 faults were of node n2.")


def test_several_faults_that_took_much_of_the_time_are_a_warning(tmp_path):
    def found(cost: float) -> Finding:
        line = json.dumps({"step": 3, "role": "actor", "rank": 0, "resumed_step": 2, "cost_seconds": cost}) + "\n"
        (logged(tmp_path, [{"step": 3, "timing_s/step": 30.0}]) / "faults.jsonl").write_text(2 * line)
        return examined(tmp_path)["faults"]

    assert found(1.0).status is Status.ok
    assert found(5.0).status is Status.warning and "which cost 10 s (25% of the time)" in found(5.0).found


def test_an_ending_that_only_the_log_has_is_told(tmp_path):
    logged(tmp_path, [{"step": 6}])
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [start_line(2**22 - 1), f"{now},000 INFO    a.b all roles have started; 0 of 9 steps are done\n"]
    lines += [f"{now},000 ERROR   a.b failed: The disk is full: '/x' could not be written. What to do: Free space.\n"]
    (tmp_path / "run.log").write_text("".join(lines))
    (tmp_path / "ending.json").write_text("")
    found = examined(tmp_path)
    assert found["ending"].found == "failed: The disk is full: '/x' could not be written."
    assert found["ending"].remedy == "Free space." and "last start" not in found


def test_a_full_disk_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_room, "_LEAST_BYTES", 1 << 60)
    found = examined(logged(tmp_path, []))["disk"]
    assert found.status is Status.problem and "is full" in found.found


def start_line(pid: int) -> str:
    now, host = time.strftime("%Y-%m-%d %H:%M:%S"), os.uname().nodename
    message = f"host={host} pid={pid} cpus=1 memory_gb=1 gpus=none directory=/ commit=none"
    return f"{now},000 INFO    a.b started hybridflow=0.1.0\n{now},000 INFO    a.b {message}\n"


def test_a_run_that_runs_is_told_with_its_last_sign_and_a_stopped_one_is_a_problem(tmp_path):
    logged(tmp_path, [{"step": 1, "timing_s/step": 0.1}])
    program = "import sys, time\nfrom pathlib import Path\nfrom hybridflow.elastic.claim import claim\n"
    program += "claim(Path(sys.argv[1]))\nprint(flush=True)\ntime.sleep(999)\n"
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None and run.stdout.readline()
        (tmp_path / "run.log").write_text(start_line(run.pid))
        found = examined(tmp_path)
        assert found["process"].found == f"{run.pid} runs"
        assert "in step 2" in found["progress"].found and "resume" not in found and "ending" not in found
        long_ago = time.time() - 3600
        os.utime(tmp_path / "metrics.jsonl", (long_ago, long_ago))
        (tmp_path / "run.log").write_text(start_line(run.pid).replace(time.strftime("%Y"), "2020"))
        assert "resume" in examined(tmp_path)  # this process is younger than that start
        os.kill(run.pid, signal.SIGSTOP)
        (tmp_path / "run.log").write_text(start_line(run.pid))
        while psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert examined(tmp_path)["process"].remedy == f"kill -CONT {run.pid}"
    finally:
        run.kill()
        run.wait()


def test_a_lock_of_another_process_is_told(tmp_path):
    logged(tmp_path, [{"step": 1}])
    (tmp_path / "run.log").write_text(start_line(2**22 - 1))
    claim(tmp_path)
    found = examined(tmp_path)
    release(tmp_path)
    assert "another process holds the lock" in found["process"].found and "resume" in found


def test_other_directories_are_refused_in_words(tmp_path):
    def refusal(path: Path) -> str:
        with pytest.raises(DataError) as raised:
            examine_run(path, is_quick=True, on_doing=lambda what: None)
        return str(raised.value)

    assert "it is empty" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert "is not the directory of a run" in refusal(tmp_path)
    assert "is a file" in refusal(tmp_path / "notes.txt")
    assert "There is no directory" in refusal(tmp_path / "nowhere")
    (tmp_path / "first" / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "first" / "run.log").write_text("")
    assert f"It contains runs: {tmp_path / 'first'}." in refusal(tmp_path)
    assert f"It lies in the run {tmp_path / 'first'}" in refusal(tmp_path / "first" / "checkpoints" / "step_1")


def test_other_things_in_the_places_of_a_runs_files_are_survived(tmp_path):
    logged(tmp_path, [{"step": 1}])
    (tmp_path / "checkpoints").write_text("not a directory")
    found = examined(tmp_path)
    assert found["checkpoints"].found.startswith("none was saved") and "resume" in found
    (tmp_path / "run.log").mkdir()
    (tmp_path / "config.yaml").symlink_to(tmp_path / "config.yaml")  # a loop
    assert "resume" in examined(tmp_path)


def test_deleted_checkpoints_are_told_from_those_that_were_never_saved(copy):
    shutil.rmtree(copy / "checkpoints")
    found = examined(copy)["checkpoints"]
    assert found.found.startswith("none is left: the run saved ") and "which was deleted or moved" in found.found


def test_a_run_with_a_checkpoint_was_not_killed_while_it_started(copy):
    for name in ("metrics.jsonl", "run.log", "ending.json"):
        (copy / name).unlink(missing_ok=True)
    assert "while it started" not in examined(copy)["ending"].found


@pytest.mark.parametrize("text", ['{"how": 5, "said": []}', '{"how": "well", "said": "x"}', '{"how": [], "said": ""}'])
def test_a_damaged_ending_is_none(copy, text):
    (copy / "ending.json").write_text(text)
    assert read_ending(copy) is None and "was killed" in examined(copy)["ending"].found


def test_only_processes_that_may_belong_to_the_run_are_its_kills():
    since, until = datetime(2026, 1, 1), datetime(2026, 1, 3, 0, 2)
    early, late = datetime(2026, 1, 1, 12), datetime(2026, 1, 3)
    driver, other = Kill(early, 7, "python3"), Kill(early, 8, "python3")
    worker, browser = Kill(late, 9, "ray::RayHost"), Kill(late, 10, "chrome")
    assert kills_of_run([other, driver, worker], 7, since, until) == [driver]
    assert kills_of_run([other, worker, browser], 7, since, until) == [worker]
    assert kills_of_run([other, browser], 7, since, until) == []
