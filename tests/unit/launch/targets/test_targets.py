"""`hybridflow launch --dry-run`: the scripts and manifests of each target, and the errors."""

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
TARGETS = {
    "slurm": """
--partition gpu --account rl --time 1-12:00:00 --gpu h100 --directory /shared/project --mount /data:/data --env A=b=c
--mount /shared:/shared --secret HF_TOKEN
--image /images/hybridflow.sqsh --setup 'module load cuda' --setup 'source .venv/bin/activate' --line=--qos=high""",
    "kuberay": """
--image me/hybridflow:1 --mount claim:/shared --mount claim:/data --cpus 64 --memory 1T --time 12:00:00 --env A=b
--secret tokens --directory /shared/project --line 'metadata: {labels: {kueue.x-k8s.io/queue-name: team}}'""",
    "skypilot": """
--gpu H100 --cpus 64 --memory 512G --mount s3://bucket:/data --setup 'pip install -r requirements.txt' --env A=b
--secret HF_TOKEN --line 'resources: {use_spot: true, infra: aws}' --line 'volumes: {/shared: fast}'""",
    "ray": """
--address http://head:8265 --requirements requirements.txt --env A=b --line 'excludes: [data]'""",
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with a run file and requirements."""
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "the secret")
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


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_given_what_is_in_its_golden_file(desk, capsys, target):
    text = printed(capsys, "--on", target, *shlex.split(TARGETS[target]), *RUN)
    assert "the secret" not in text
    text = re.sub(r"(RAY_AUTH_TOKEN: )[0-9a-f]{64}", r"\1TOKEN", text)
    text = re.sub(r"(rayVersion: )\"[0-9.]+\"", r"\1VERSION", text)
    if target in ("slurm", "skypilot"):
        text = without_asset(text, f"{target}.sh")
    golden = HERE / "golden" / f"{target}.txt"
    if os.environ.get("WRITE_GOLDEN_FILES"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("words", [RUN, ["grpo", "trainer.device=cpu", "trainer.run_dir=/shared/r", "task=calculator"]])
def test_manifests_have_the_published_schemas(desk, capsys, words):
    schema = {target: yaml.safe_load((HERE / f"{target}_schema.yaml").read_text()) for target in ("rayjob", "skypilot")}
    rayjob = yaml.safe_load(printed(capsys, "--on", "kuberay", *shlex.split(TARGETS["kuberay"]), *words))
    jsonschema.validate(rayjob, schema["rayjob"])
    subprocess.run(["bash", "-n"], input=annotations(rayjob)["hybridflow/start.sh"], check=True, text=True)
    task = yaml.safe_load(printed(capsys, "--on", "skypilot", *shlex.split(TARGETS["skypilot"]), *words))
    jsonschema.validate(task, schema["skypilot"])
    subprocess.run(["bash", "-n"], input=task["run"], check=True, text=True)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**rayjob, "spec": {**rayjob["spec"], "entryPoint": "x"}}, schema["rayjob"])


def test_the_settings_in_a_manifest_are_those_of_the_run(desk, capsys):
    rayjob = yaml.safe_load(printed(capsys, "--on", "kuberay", *shlex.split(TARGETS["kuberay"]), *RUN))
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


def test_no_text_leaves_its_quotes_in_a_script(desk, capsys):
    escape = "a\nEND_OF_TEXT\n)\ntouch escaped #'"
    run = [
        "grpo",
        "trainer.devices=8",
        "trainer.nodes=2",
        "trainer.run_dir=/shared/run",
        f'data.system_prompt="{escape}"',
    ]
    text = printed(capsys, "--on", "slurm", "--directory", "/no/'END_OF_TEXT", *run)
    task = printed(capsys, "--on", "skypilot", *shlex.split(TARGETS["skypilot"]), *run)
    for script in (each.partition("mapfile")[0] for each in (text, yaml.safe_load(task)["run"])):
        shown = 'hybridflow() { printf "%s\\n" "${@: -1}"; }'
        ran = subprocess.run(
            ["bash"], input=f'{script}\n{shown}\neval "$run"', check=True, text=True, capture_output=True
        )
        assert ran.stdout == f'data.system_prompt="{escape}"\n'
    assert not (desk / "escaped").exists()


def test_a_target_file_gives_options_and_the_command_line_wins(desk, capsys):
    (desk / "cluster.yaml").write_text(
        "target: slurm\npartition: gpu\ntime: 04:00:00\nsetup: [module load cuda]\nenv: {A: 0123, B: no}\nrequeues: 0\n"
    )
    script = printed(
        capsys, "--on", "cluster.yaml", "--partition", "short", "--setup", "source v", "--env", "A=2", *RUN
    )
    for line in ("--partition=short", "--time=04:00:00", "--no-requeue"):
        assert f"#SBATCH {line}\n" in script
    assert "export A=2\nexport B=no\nmodule load cuda\nsource v\n" in script
    (desk / "k8s.yaml").write_text("target: kuberay\nimage: i\nmount: c:/shared\nline: {spec: {suspend: true}}\n")
    rayjob = yaml.safe_load(printed(capsys, "--on", "k8s.yaml", *RUN))
    assert rayjob["spec"]["suspend"] is True and rayjob["spec"]["backoffLimit"] == 3


def test_a_value_keeps_its_spaces_and_later_lines_win(desk, capsys):
    assert "export A='1 '\n" in printed(capsys, "--on", "slurm", "--env", "A=1 ", *RUN).replace("'\"'\"'", "'")
    (desk / "k8s.yaml").write_text("target: kuberay\nimage: i\nmount: c:/shared\nline: {spec: {suspend: true}}\n")
    rayjob = yaml.safe_load(printed(capsys, "--on", "k8s.yaml", "--line", "spec: {suspend: false, a: 1}", *RUN))
    assert rayjob["spec"]["suspend"] is False and rayjob["spec"]["a"] == 1


def test_a_run_on_cpus_and_one_in_an_apptainer_image(desk, capsys):
    words = ["--cpus", "8", "--image", "h.sif", "--mount", "/shared:/shared", *RUN, "trainer.device=cpu"]
    script = printed(capsys, "--on", "slurm", *words)
    assert "--gpus-per-node" not in script and "#SBATCH --cpus-per-task=8\n" in script and "--exclusive" not in script
    assert "devices=(--num-cpus=8)" in script
    assert "inside=(apptainer exec --nv --bind /shared:/shared h.sif)" in script


def test_local_prints_and_runs_the_command(desk, capsys):
    assert printed(capsys, "--on", "local", "task=calculator", "trainer.seed=1") == (
        "hybridflow ppo task=calculator trainer.seed=1\n"
    )
    (desk / "my.yaml").write_text("command: grpo\ntrainer.total_steps: 1\ndata.batch_size: 2\ntrainer.eval_every: 0\n")
    assert printed(capsys, "--on", "local", "my.yaml") == "hybridflow run my.yaml\n"
    assert main(["launch", "--on", "local", "my.yaml", "task=calculator"]) == 0
    assert json.loads((desk / "runs" / "calculator" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


def test_a_run_in_the_current_directory_needs_no_mount_in_a_container(desk, capsys):
    words = ["--image", "h.sqsh", *RUN, "trainer.run_dir=runs/first"]
    script = printed(capsys, "--on", "slurm", *words)
    assert f"--container-mounts=/tmp:/tmp,{desk}:{desk})" in script


def test_the_script_of_slurm_has_the_settings_of_the_run_files(desk, capsys):
    script = printed(capsys, "--on", "slurm", *RUN)
    head = script.partition("mapfile")[0]
    shown = subprocess.run(
        ["bash"], input=f'{head}\nprintf "%s" "$run_file"', check=True, text=True, capture_output=True
    ).stdout
    assert yaml.safe_load(shown)["trainer.nodes"] == 2 and yaml.safe_load(shown)["trainer.stop_seconds"] == 90
    (desk / "submitted.yaml").write_text(shown)
    assert main(["run", "submitted.yaml", "--cfg", "job"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", *RUN, "trainer.elastic.min_devices=8"], "trainer.elastic has no effect on slurm"),
        (["skypilot", "--gpu", "H100", "--line", "volumes: {/shared: v}", *RUN, "trainer.elastic.min_devices=8"],
         "trainer.elastic has no effect on skypilot"),
        (["local", *RUN], "trainer.nodes=2 needs a running Ray cluster"),
        (["kuberay", "--image", "i", "--mount", "c:/shared", *RUN, "trainer.elastic.min_devices=8"], ""),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_is_missing_where_the_job_runs_is_a_warning(desk, capsys, words, said):
    capsys.readouterr()
    assert main(["launch", "--on", *words, "--dry-run"]) == 0
    warned = " ".join(capsys.readouterr().err.split())
    assert said in warned and ("Warning" in warned) == bool(said), warned


def test_secrets_are_given_to_sky_by_name(desk, capsys, monkeypatch):
    (desk / "sky").write_text('#!/bin/bash\nprintf "%s " "${@:1:$#-1}" > submitted\n')
    (desk / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{desk}:{os.environ['PATH']}")
    assert main(["launch", "--on", "skypilot", *shlex.split(TARGETS["skypilot"]), *RUN]) == 0
    assert (desk / "submitted").read_text() == "jobs launch --yes --secret HF_TOKEN "


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["grpo"], "--on is required", "--on local, ray, slurm, kuberay, skypilot, or a target file"),
        (
            ["--on", "slurm", "--partitoin=x", "grpo"],
            "There is no option --partitoin=x.",
            "Did you mean '--partition'?",
        ),
        (["--on", "slrum"], "--on=slrum is not a target.", "Did you mean 'slurm'? Use local, ray, slurm,"),
        (["--on", "none.yaml"], "--on none.yaml: the file cannot be read", "Give the path of a YAML file"),
        (["--on", "bare.yaml"], "bare.yaml: target is missing.", "a file that says target: slurm"),
        (["--on", "typo.yaml"], "typo.yaml: partitoin is not a setting of a target.", "Did you mean 'partition'?"),
        (["--on", "broken.yaml"], "broken.yaml is not YAML", "Correct it"),
        (["--on", "slurm", "--time", "90"], "--time=90 is not a time", "HH:MM:SS"),
        (["--on", "slurm", "--memory", "lots"], "--memory=lots is not an amount", "512G"),
        (["--on", "slurm", "--cpus", "-1"], "--cpus=-1 is not a whole number", "such as 64"),
        (["--on", "slurm", "--env", "A"], "--env=A is not NAME=VALUE", "NAME=VALUE"),
        (["--on", "slurm", "--mount", "/data"], "--mount=/data is not SOURCE:DIRECTORY", "/data:/data"),
        (["--on", "slurm", "--mount", "/data:/data"], "--image is missing for slurm.", "or leave --mount out"),
        (["--on", "slurm", "--image", "i", "run.yaml"], "not in a mounted directory", "--mount /shared:/shared"),
        (["--on", "slurm", "--image", "i", "--directory", "/in/image"], "(/in/image/runs/", "--mount /shared:/shared"),
        (["--on", "slurm", "--image", "i", "--mount", "/a:/tmp"], "gives the container another /tmp", "elsewhere"),
        (["--on", "slurm", "--secret", "NONE"], "has no variable NONE", "export NONE="),
        (["--on", "slurm", "--secret", "A=b"], "is not a name, without a value", "Give a name"),
        (
            ["--on", "slurm", "run.yaml", "trainer.nodes=4", "trainer.elastic.min_devices=64"],
            "The run begins on 32 devices, fewer than trainer.elastic.min_devices=64.",
            "at most 32",
        ),
        (["--on", "slurm", "--name", "My run"], "--name=My run is not a name", "lowercase"),
        (["--on", "ray", "--partition", "x"], "--partition does not apply to ray, only to slurm.", "Leave it out"),
        (["--on", "slurm", "trainer.devices=auto"], "trainer.devices=auto takes", "Set trainer.devices"),
        (["--on", "slurm", "trainer.resume=never"], "would not continue", "or --requeues 0"),
        (["--on", "slurm", "trainer.nodse=2"], "trainer.nodse", "trainer.nodes"),
        (["--on", "slurm", "actor.parallelism.tensor=3"], "tensor", "Use"),
        (["--on", "slurm", "grop"], "There is no trainer or algorithm 'grop'", "Did you mean 'grpo'?"),
        (["--on", "kuberay"], "--image is missing for kuberay", "the image of the pods"),
        (["--on", "kuberay", "trainer.run_dir=/elsewhere"], "not below a mounted directory", "--mount CLAIM:/shared"),
        (["--on", "kuberay", "--image", "i", "--line", "[1]"], "is not a mapping", "key: value"),
        (["--on", "skypilot", "run.yaml", "trainer.nodes=2"], "is in a bucket, but several nodes", "checkpoint_url"),
        (["--on", "skypilot"], "--gpu is missing for skypilot", "trainer.device=cpu"),
        (["--on", "ray"], "There is no address of a Ray cluster", "--address http://head:8265"),
        (["--on", "ray", "--address", "a", "--requirements", "none"], "--requirements none cannot be read", "existing"),
        (["--on", "ray", "--address", "a", "trainer.run_dir=runs"], "is relative, and on ray", "absolute"),
        (["--on", "slurm", "--partition", "gpu\ntouch x"], "is not one word of printable", "Give one word"),
        (["--on", "slurm", "--gpu", "h100 x"], "--gpu=h100 x is not one word", "without quotes"),
        (["--on", "slurm", "--account", "a b; c"], "--account=a b; c is not one word", "without quotes"),
        (["--on", "slurm", "--line=--qos=a\ntouch x"], "is not an option of sbatch on one line", "--qos=high"),
        (["--on", "maps.yaml"], "--line of slurm=a: 1 is not an option of sbatch", "--qos=high"),
        (["--on", "slurm", "--setup", "a\x1bb"], "is not a text of printable characters", "Give a text"),
        (["--on", "slurm", "--cpus", "²"], "--cpus=² is not a whole number above 0", "such as 64"),
        (["--on", "slurm", "--cpus", "0"], "--cpus=0 is not a whole number above 0", "such as 64"),
        (["--on", "slurm", "--requeues", "9" * 5000], "9 is not a whole number", "such as 64"),
        (["--on", "slurm", "--memory", "0G"], "--memory=0G is not an amount", "512G"),
        (["--on", "slurm", "--memory", "٣G"], "--memory=٣G is not an amount", "512G"),
        (["--on", "slurm", "--env", "Aé=1"], "--env=Aé=1 is not NAME=VALUE", "one line"),
        (["--on", "slurm", "--env", "A=1\nB=2"], "is not NAME=VALUE", "one line"),
        (["--on", "env.yaml"], "env.yaml: env: A={'b': 'c'} is not a text", "Give a text"),
        (["--on", "null.yaml"], "null.yaml: env: B=null is not a text", "Give a text"),
        (["--on", "twice.yaml"], "twice.yaml has partition twice.", "Remove one of the two"),
        (["--on", "slurm", "--mount", "/a:/b,/c:/d", "--image", "i"], "without commas", "/data:/data"),
        (["--on", "slurm", "--mount", "s3://bucket:/d", "--image", "i"], "is not a directory and where", "/data:/data"),
        (["--on", "slurm", "--time", "00:01:00"], "--time=00:01:00 leaves the run no time", "longer --time"),
        (["--on", "slurm", "trainer.stop_seconds=100000"], "is above the 65475 seconds", "one step"),
        (["--on", "kuberay", "--image", "i", "--mount", "C_laim A:/x"], "is not one word", "without quotes"),
        (["--on", "kuberay", "--image", "i", "--mount", "C_laim:/x"], "is not a claim and where", "claim:/data"),
        (["--on", "kuberay", "--image", "i", "--line", "x: 2024-13-45"], "is not YAML: month must be", "Correct it"),
        (["--on", "kuberay", "--image", "i", "--line", "x: &a {b: *a}"], "has an alias", "Write its values"),
        (["--on", "kuberay", "--image", "i", "--line", "{a: 1, a: 2}"], "has a twice", "Remove one"),
        (["--on", "kuberay", "trainer.run_dir=/shared/../tmp/x"], "not below a mounted directory", "CLAIM:/shared"),
        (["--on", "skypilot", "--mount", "s3://bucket"], "is not SOURCE:DIRECTORY", "absolute directory"),
        (["--on", "ray", "--address", "a", "--line", "a: 2020-01-01"], "neither text, number", "Quote it"),
        (["--on", "ray", "--address", "a", "--line", "a: !!set {x}"], "neither text, number", "Quote it"),
        (["--on", "ray", "--address", "a", "--line", "a: !!binary aGVsbG8="], "neither text, number", "Quote it"),
        (
            ["--on", "ray", "--address", "a", "--requirements", "requirements.txt", "--line", "pip: [x]"],
            "--requirements and pip in --line both",
            "Leave out one",
        ),
        (["--on", "slurm"], "There is nothing to launch", "Add a training command"),
        (["--on", "kuberay", "--image", "i", "--line", "spec: 5"], "gives spec the value 5, but", "a mapping"),
        (["--on", "ray", "--address", "a", "../run.yaml"], "is not in the working directory", "relative path"),
    ],
)
def test_bad_input_is_a_sentence_with_a_remedy(desk, capsys, words, message, remedy):
    (desk / "bare.yaml").write_text("partition: x\n")
    (desk / "typo.yaml").write_text("target: slurm\npartitoin: x\n")
    (desk / "broken.yaml").write_text("target: [\n")
    (desk / "maps.yaml").write_text("target: slurm\nline: {a: 1}\n")
    (desk / "env.yaml").write_text("target: slurm\nenv: {A: {b: c}}\n")
    (desk / "null.yaml").write_text("target: slurm\nenv: {A: c, B: null}\n")
    (desk / "twice.yaml").write_text("target: slurm\npartition: a\npartition: b\n")
    (desk.parent / "run.yaml").write_text(RUN_FILE)
    if words[1:] and words[1] in ("kuberay", "skypilot", "ray"):
        mounts = {"ray": [], "kuberay": ["--mount", "b:/shared"], "skypilot": ["--mount", "s3://b:/shared"]}[words[1]]
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
