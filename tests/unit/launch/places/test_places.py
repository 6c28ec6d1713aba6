"""`hybridflow launch --dry-run`: the scripts and manifests of each place, and the errors."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from hybridflow.cli.main import main
from tests.architecture.source import ROOT

HERE = Path(__file__).parent
RUN = ["grpo", "run.yaml", "trainer.nodes=2"]
RUN_FILE = """trainer.devices: 8
trainer.experiment: first
trainer.run_dir: /shared/runs/first
trainer.stop_seconds: 90
model.path: /shared/models/mine
data.train_files: [/shared/it's.jsonl]
reward.functions: [gsm8k]
"""
PLACES = {
    "slurm": """
--partition gpu --account rl --time 1-12:00:00 --gpu h100 --directory /shared/project --mount /data:/data --env A=b=c
--image /images/hybridflow.sqsh --setup 'module load cuda' --setup 'source .venv/bin/activate' --line=--qos=high""",
    "kuberay": """
--image me/hybridflow:1 --mount claim:/shared --mount claim:/data --cpus 64 --memory 1T --time 12:00:00 --env A=b
--directory /shared/project --line 'metadata: {labels: {kueue.x-k8s.io/queue-name: team}}'""",
    "skypilot": """
--gpu H100 --cpus 64 --memory 512G --mount s3://bucket:/shared --setup 'pip install -r requirements.txt' --env A=b
--line 'resources: {use_spot: true, infra: aws}'""",
    "ray": """
--address http://head:8265 --requirements requirements.txt --env A=b --line 'excludes: [data]'""",
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with a run file and requirements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "requirements.txt").write_text("# of the rewards\nmath-verify>=0.9\n\n")
    return tmp_path


def printed(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["launch", *words, "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["launch", *words, "--dry-run"]) == 2
    return " ".join(capsys.readouterr().err.split())


def annotations(rayjob: dict) -> dict[str, str]:
    """The files of the head's pod."""
    return rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["annotations"]


def without_asset(text: str, name: str) -> str:
    """A script without the part that is the same for every run."""
    asset = (ROOT / "hybridflow" / "assets" / name).read_text()
    indented = "".join(f"  {line}" if line.strip() else line for line in asset.splitlines(keepends=True))
    assert asset in text or indented in text
    return text.replace(asset, f"({name})\n").replace(indented, f"  ({name})\n")


@pytest.mark.parametrize("place", PLACES)
def test_a_place_is_given_what_is_in_its_golden_file(desk, capsys, place):
    text = printed(capsys, "--on", place, *shlex.split(PLACES[place]), *RUN)
    text = re.sub(r"(RAY_AUTH_TOKEN: )[0-9a-f]{64}", r"\1TOKEN", text)
    if place in ("slurm", "skypilot"):
        text = without_asset(text, f"{place}.sh")
    golden = HERE / "golden" / f"{place}.txt"
    if os.environ.get("WRITE_GOLDEN_FILES"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("words", [RUN, ["grpo", "trainer.device=cpu", "trainer.run_dir=/shared/r", "task=calculator"]])
def test_manifests_have_the_published_schemas(desk, capsys, words):
    schema = {place: yaml.safe_load((HERE / f"{place}_schema.yaml").read_text()) for place in ("rayjob", "skypilot")}
    rayjob = yaml.safe_load(printed(capsys, "--on", "kuberay", *shlex.split(PLACES["kuberay"]), *words))
    jsonschema.validate(rayjob, schema["rayjob"])
    subprocess.run(["bash", "-n"], input=annotations(rayjob)["hybridflow/start.sh"], check=True, text=True)
    task = yaml.safe_load(printed(capsys, "--on", "skypilot", *shlex.split(PLACES["skypilot"]), *words))
    jsonschema.validate(task, schema["skypilot"])
    subprocess.run(["bash", "-n"], input=task["run"], check=True, text=True)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**rayjob, "spec": {**rayjob["spec"], "entryPoint": "x"}}, schema["rayjob"])


def test_the_settings_in_a_manifest_are_those_of_the_run(desk, capsys):
    rayjob = yaml.safe_load(printed(capsys, "--on", "kuberay", *shlex.split(PLACES["kuberay"]), *RUN))
    (desk / "from_manifest.yaml").write_text(annotations(rayjob)["hybridflow/run.yaml"])
    texts = []
    for words in (RUN, ["run", "from_manifest.yaml"]):
        assert main([*words, "--cfg", "job"]) == 0
        texts.append(re.sub(r"\s+#.*", "", capsys.readouterr().out))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_the_batch_script_is_bash_and_keeps_the_words_of_the_command(desk, capsys, nodes):
    words = ["ppo", f"trainer.nodes={nodes}", 'data.system_prompt="It\'s $HOME and `date` \\\\ more"']
    script = printed(capsys, "--on", "slurm", "--setup", 'export GREETING="it\'s me"', *words)
    subprocess.run(["bash", "-n"], input=script, check=True, text=True)
    head = script.partition("mapfile")[0]
    shown = subprocess.run(
        ["bash"], input=f'{head}\nhybridflow() {{ printf "%s\\n" "$@"; }}\neval "$run"; eval "$setup"; echo $GREETING',
        check=True, text=True, capture_output=True,
    ).stdout.splitlines()  # fmt: skip
    assert shown == [*words, "it's me"]


def test_a_place_file_gives_options_and_the_command_line_wins(desk, capsys):
    (desk / "cluster.yaml").write_text(
        "place: slurm\npartition: gpu\ntime: 04:00:00\nsetup: [module load cuda]\nenv: {A: 0123, B: no}\nrequeues: 0\n"
    )
    script = printed(
        capsys, "--on", "cluster.yaml", "--partition", "short", "--setup", "source v", "--env", "A=2", *RUN
    )
    for line in ("--partition=short", "--time=04:00:00", "--no-requeue"):
        assert f"#SBATCH {line}\n" in script
    assert "export A=2\nexport B=no\nmodule load cuda\nsource v\n" in script
    (desk / "k8s.yaml").write_text("place: kuberay\nimage: i\nmount: c:/shared\nline: {spec: {suspend: true}}\n")
    rayjob = yaml.safe_load(printed(capsys, "--on", "k8s.yaml", *RUN))
    assert rayjob["spec"]["suspend"] is True and rayjob["spec"]["backoffLimit"] == 3


def test_a_run_on_cpus_and_one_in_an_apptainer_image(desk, capsys):
    words = ["--cpus", "8", "--image", "h.sif", "--mount", "/data:/data", *RUN, "trainer.device=cpu"]
    script = printed(capsys, "--on", "slurm", *words)
    assert "--gpus-per-node" not in script and "#SBATCH --cpus-per-task=8\n" in script and "--exclusive" not in script
    assert "devices=(--num-cpus=8)" in script
    assert "inside=(apptainer exec --nv --bind /data:/data h.sif)" in script


def test_local_prints_and_runs_the_command(desk, capsys):
    assert printed(capsys, "--on", "local", "task=calculator", "trainer.seed=1") == (
        "hybridflow ppo task=calculator trainer.seed=1\n"
    )
    (desk / "my.yaml").write_text("command: grpo\ntrainer.total_steps: 1\ndata.batch_size: 2\ntrainer.eval_every: 0\n")
    assert printed(capsys, "--on", "local", "my.yaml") == "hybridflow run my.yaml\n"
    assert main(["launch", "--on", "local", "my.yaml", "task=calculator"]) == 0
    assert json.loads((desk / "runs" / "calculator" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["grpo"], "--on is missing", "--on local, ray, slurm, kuberay, skypilot, or a place file"),
        (
            ["--on", "slurm", "--partitoin=x", "grpo"],
            "There is no option --partitoin=x.",
            "Did you mean '--partition'?",
        ),
        (["--on", "slrum"], "--on=slrum is not a place.", "Did you mean 'slurm'? Use local, ray, slurm,"),
        (["--on", "none.yaml"], "--on none.yaml: the file cannot be read", "Give the path of a YAML file"),
        (["--on", "bare.yaml"], "bare.yaml: place is missing.", "a file that says place: slurm"),
        (["--on", "typo.yaml"], "typo.yaml: partitoin is not a setting of a place.", "Did you mean 'partition'?"),
        (["--on", "broken.yaml"], "broken.yaml is not YAML", "Correct it"),
        (["--on", "slurm", "--time", "90"], "--time=90 is not a time", "HH:MM:SS"),
        (["--on", "slurm", "--memory", "lots"], "--memory=lots is not an amount", "512G"),
        (["--on", "slurm", "--cpus", "-1"], "--cpus=-1 is not a whole number", "such as 64"),
        (["--on", "slurm", "--env", "A"], "--env=A is not NAME=VALUE", "NAME=VALUE"),
        (["--on", "slurm", "--mount", "/data"], "--mount=/data is not SOURCE:DIRECTORY", "/data:/data"),
        (["--on", "slurm", "--mount", "/data:/data"], "--image is missing for slurm.", "or leave --mount out"),
        (["--on", "slurm", "--name", "My run"], "--name=My run is not a name", "lowercase"),
        (["--on", "ray", "--partition", "x"], "--partition does not apply to ray, only to slurm.", "Leave it out"),
        (["--on", "slurm", "trainer.devices=auto"], "trainer.devices=auto takes", "Set trainer.devices"),
        (
            ["--on", "slurm", "trainer.devices=8", "trainer.elastic.min_devices=64"],
            "begins on 8 devices, fewer than trainer.elastic.min_devices=64",
            "at most 8",
        ),
        (["--on", "slurm", "trainer.resume=never"], "would not continue", "or --requeues 0"),
        (["--on", "slurm", "trainer.nodse=2"], "trainer.nodse", "trainer.nodes"),
        (["--on", "slurm", "actor.parallelism.tensor=3"], "tensor", "Use"),
        (["--on", "slurm", "grop"], "There is no trainer or algorithm 'grop'", "Did you mean 'grpo'?"),
        (["--on", "kuberay"], "--image is missing for kuberay", "the image of the pods"),
        (["--on", "kuberay", "trainer.run_dir=/elsewhere"], "not below a mounted directory", "--mount CLAIM:/shared"),
        (["--on", "kuberay", "--image", "i", "--line", "[1]"], "is not a mapping", "key: value"),
        (["--on", "skypilot"], "--gpu is missing for skypilot", "trainer.device=cpu"),
        (["--on", "ray"], "There is no address of a Ray cluster", "--address http://head:8265"),
        (["--on", "ray", "--address", "a", "--requirements", "none"], "--requirements none cannot be read", "existing"),
        (["--on", "ray", "--address", "a", "trainer.run_dir=runs"], "is relative, and on ray", "absolute"),
        (["--on", "ray", "--address", "a", "../run.yaml"], "is not in the working directory", "relative path"),
    ],
)
def test_bad_input_is_a_sentence_with_a_remedy(desk, capsys, words, message, remedy):
    (desk / "bare.yaml").write_text("partition: x\n")
    (desk / "typo.yaml").write_text("place: slurm\npartitoin: x\n")
    (desk / "broken.yaml").write_text("place: [\n")
    (desk.parent / "run.yaml").write_text(RUN_FILE)
    if words[1:] and words[1] in ("kuberay", "skypilot", "ray"):
        mounts = [] if words[1] == "ray" else ["--mount", "s3://b:/shared"]
        words = [*words[:2], *mounts, "trainer.run_dir=/shared/run", *words[2:]]
    said = refused(capsys, *words)
    assert message in said and remedy in said, said


def test_a_missing_program_is_named(desk, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(desk))
    assert main(["launch", "--on", "slurm", *RUN]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "There is no program 'sbatch' on this machine." in said and "login node" in said


def test_a_program_that_fails_is_named_with_its_status(desk, capsys, monkeypatch):
    (desk / "kubectl").write_text("#!/bin/bash\nexit 3\n")
    (desk / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{desk}:{os.environ['PATH']}")
    assert main(["launch", "--on", "kuberay", "--image", "i", "--mount", "c:/shared", *RUN]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Nothing was submitted: kubectl create ended with exit status 3." in said
    assert "Read above why 'kubectl' failed." in said


def test_what_is_submitted_is_what_was_printed(desk, capsys, monkeypatch):
    (desk / "sbatch").write_text('#!/bin/bash\ncp "$1" submitted\n')
    (desk / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{desk}:{os.environ['PATH']}")
    script = printed(capsys, "--on", "slurm", *RUN)
    assert main(["launch", "--on", "slurm", *RUN]) == 0
    assert (desk / "submitted").read_text() == script
    assert "submitted  hybridflow-first  hybridflow grpo run.yaml trainer.nodes=2" in capsys.readouterr().err
