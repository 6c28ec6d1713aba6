"""`hybridflow evaluate` and `hybridflow generate`: a model, or a run with its own data and rewards."""

import json
import shutil
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from hybridflow.cli.main import main
from hybridflow.trainer import main_ppo, main_reward_model, main_sft
from tests.toys import MakeToy

QUICK = ["trainer.threads=1", "trainer.device=cpu"]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with prompts of two sources."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "data_source": "even"} for a in (1, 2, 3)]
    odd = [{"prompt": "4+5=", "answer": "9", "data_source": "odd"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *odd]))
    return tmp_path


def write_trap(desk: Path, *actions: str) -> None:
    """Writes `many.jsonl`, and a map for it that takes actions at a row of the last part, once responses are there."""
    (desk / "many.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+7="}) + "\n" for n in range(40)))
    head = "def to_row(row):\n    if row['prompt'] == '33+7=' and os.path.exists('out.jsonl.partial'):\n"
    body = "".join(f"        {action}\n" for action in actions)
    (desk / "rows.py").write_text(f"import os, signal, time\n{head}{body}    return row\n")


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_model_is_evaluated_on_all_rows_with_a_table_by_source(desk, capsys):
    words = ["builtin:calculator", "data=sums.jsonl", "reward=exact_match,length", "n=4", *QUICK]
    settings = ["reward.settings.length.target=2", "trainer.experiment=mine", "rollout.eval_sampling.temperature=0.7"]
    assert main(["evaluate", *words, *settings]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "source", "prompts", "mean", "pass@2", "pass@4", "exact_match", "length", "tokens", "cut_off"
    ]  # fmt: skip
    assert [line.split()[:2] for line in table[1:]] == [["even", "3"], ["odd", "1"], ["all", "4"]]
    samples, found = rows_of(desk / "runs/mine/samples.jsonl"), rows_of(desk / "runs/mine/evaluation.jsonl")
    assert len(samples) == 16 and {row["source"] for row in samples} == {"even", "odd"}
    assert found[-1]["mean"] == pytest.approx(sum(row["score"] for row in samples) / 16)
    assert found[-1]["exact_match"] == pytest.approx(sum(row["rewards/exact_match"] for row in samples) / 16)
    assert found[-1]["tokens"] == pytest.approx(sum(row["tokens"] for row in samples) / 16)
    assert (desk / "runs/mine/report.html").is_file() and not (desk / "runs/mine/checkpoints").exists()


def test_a_run_is_evaluated_by_its_newest_checkpoint_with_its_data_and_rewards(desk, capsys):
    (desk / "judge.py").write_text("def judge(prompts, completions, **columns):\n    return [0.25 for _ in prompts]\n")
    train = [
        "task=none", "algorithm=grpo", "model.path=builtin:calculator", "data.train_files=[sums.jsonl]",
        "data.eval_files=[sums.jsonl]", "data={batch_size: 2, max_prompt_tokens: 16, max_response_tokens: 2}",
        "reward.functions=[judge.py:judge]", "rollout.samples_per_prompt=2", "trainer={total_steps: 1, run_dir: run}",
        "actor.optimizer.learning_rate=0.01", "rollout.sampling.stop=['0','1','2','3','4','5','6','7','8','9']", *QUICK,
    ]  # fmt: skip
    assert main_ppo.main(train) == 0
    assert main(["evaluate", "run", *QUICK]) == 0
    assert [row["mean"] for row in rows_of(desk / "runs/evaluate-run-step_1/evaluation.jsonl")] == [0.25] * 3
    samples = rows_of(desk / "runs/evaluate-run-step_1/samples.jsonl")
    assert {row["tokens"] for row in samples} == {1}
    after_training = [row for row in rows_of(desk / "run/samples.jsonl") if row["split"] == "eval" and row["step"] == 1]
    assert [row["response"] for row in samples] == [row["response"] for row in after_training]
    capsys.readouterr()

    assert main(["evaluate", "run/checkpoints/step_1", "reward=nope", "data=none.jsonl", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "there is no built-in function 'nope'" in said and "data: No such file" in said
    assert "2 problems; nothing was started" in said
    assert main(["evaluate", "run", "--dry-run", *QUICK]) == 0
    assert "The run evaluates the model without training; the earlier run in" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["evaluate", "run", "--step", "7"]) == 2
    assert "has no checkpoint of step 7" in capsys.readouterr().err
    assert main_ppo.main([*train, "trainer.total_steps=0"]) == 2
    assert f"To evaluate it: hybridflow evaluate {desk / 'run'}." in " ".join(capsys.readouterr().err.split())


@pytest.mark.lora
def test_a_run_with_an_adapter_is_evaluated_with_it_merged(desk, toy_dir: MakeToy):
    train = [
        f"model.path={toy_dir()}", "data.train_files=[sums.jsonl]", "data.eval_files=[sums.jsonl]",
        "data={batch_size: 2, max_prompt_tokens: 8, max_response_tokens: 4}", "reward.functions=[exact_match]",
        "actor.lora.rank=2", "trainer={total_steps: 1, run_dir: run}", *QUICK,
    ]  # fmt: skip
    assert main_sft.main(train) == 0
    assert main(["generate", "run", "--prompts", "sums.jsonl", "--out", "out.jsonl", *QUICK]) == 0
    assert len(rows_of(desk / "out.jsonl")) == 4


def test_responses_are_written_with_their_token_ids_on_request(desk, capsys):
    (desk / "more.jsonl").write_text('{"prompt": "10+10="}\n')
    files = ["--prompts", "sums.jsonl", "--prompts", "more.jsonl"]
    assert main(["generate", "builtin:calculator", *files, "--out", "out.jsonl", "--token-ids", "n=2", *QUICK]) == 0
    rows = rows_of(desk / "out.jsonl")
    assert "out.jsonl  10 responses" in capsys.readouterr().err
    assert [row["prompt"] for row in rows[::2]] == ["1+1=", "2+2=", "3+3=", "4+5=", "10+10="]
    own = ["uid", "response", "tokens", "is_cut_off", "response_ids"]
    assert list(rows[0]) == ["prompt", "answer", "data_source", *own] and rows[-1]["data_source"] == "more"
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "hybridflow/assets/calculator/model")
    for row in rows:
        assert len(row["response_ids"]) == row["tokens"]
        assert tokenizer.decode(row["response_ids"], skip_special_tokens=True) == row["response"]
    names = {"sums.jsonl", "more.jsonl", "out.jsonl", "out.jsonl.origin", "runs"}
    assert {path.name for path in desk.iterdir()} == names and not list((desk / "runs").iterdir())


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_rows_of_prompts_keep_the_columns_of_their_file_and_have_all_responses_as_verl_has_them(desk, streaming):
    (desk / "chat.jinja").write_text(CHAT)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
            "extra_info": {"index": a},
            "uid": f"row {a}",
            "response": None if a == 3 else "2",
        }
        for a in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), desk / "verl.parquet")
    settings = ["data.chat_template=chat.jinja", f"data.streaming={streaming}", "n=3", *QUICK]
    words = ["builtin:calculator", "--prompts", "verl.parquet", "--by-prompt", "--out", "out.parquet", *settings]
    assert main(["generate", *words]) == 0
    found = pyarrow.parquet.read_table(desk / "out.parquet").to_pylist()
    for place, (row, given) in enumerate(zip(found, rows, strict=True)):
        assert row["prompt"] == given["prompt"] and row["prompt_text"] == f"{place}+1="
        assert (row["uid"], row["given_uid"], row["given_response"]) == (place, given["uid"], given["response"])
        assert [row[name] for name in ("data_source", "reward_model", "extra_info")] == [
            given[name] for name in ("data_source", "reward_model", "extra_info")
        ]
        assert row["answer"] == str(place + 1) and len(row["responses"]) == 3 == len(row["tokens"])


def test_rows_of_prompts_are_not_counted_as_responses(desk, capsys):
    words = ["builtin:calculator", "--prompts", "sums.jsonl", "--by-prompt", "--out", "out.jsonl", "n=2", *QUICK]
    assert main(["generate", *words]) == 0
    assert "out.jsonl  4 prompts" in capsys.readouterr().err


def test_an_interrupted_command_keeps_its_responses_and_continues(desk, capsys):
    """A row in the last part of prompts ends the command; half a row is there as if the process had been killed."""
    write_trap(
        desk, "if not os.path.exists('sent'):", "    open('sent', 'w').close()", "    raise RuntimeError('once')"
    )
    words = ["generate", "builtin:calculator", "--prompts", "many.jsonl", "n=2", "data.map=rows.py:to_row", *QUICK]
    words += ["rollout.eval_sampling.temperature=1", "rollout.max_sequences=2", "data.streaming=true"]
    assert main([*words, "--out", "whole.jsonl"]) == 0
    capsys.readouterr()
    assert main([*words, "--out", "out.jsonl"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    partial = desk / "out.jsonl.partial"
    kept = len(partial.read_text().splitlines()) - 1
    assert 0 < kept < 80 and f"out.jsonl.partial {kept} responses; the same command continues after them" in said
    with partial.open("a") as file:
        file.write('{"prompt": "half')

    assert main([*words, "--out", "out.jsonl", "data.max_response_tokens=3", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "made differently: data.max_response_tokens was 8 and is 3" in said and "delete the file to start" in said
    assert [path.name for path in (desk / "runs").iterdir()] == ["generate-calculator"], "the log of the failure"
    assert main([*words, "--out", "out.jsonl"]) == 0
    assert (desk / "out.jsonl").read_text() == (desk / "whole.jsonl").read_text()
    assert not partial.exists() and not list((desk / "runs").iterdir())


@pytest.fixture
def answered(desk, capsys, toy_dir: MakeToy):
    """Responses of a model directory to `sums.jsonl`, and a function that repeats the command and returns what it
    said."""
    shutil.copytree(toy_dir(), desk / "model")
    (desk / "rows.py").write_text("def to_row(row):\n    return row\n")
    sizes = ["data.max_prompt_tokens=8", "data.max_response_tokens=4", "data.map=rows.py:to_row"]
    words = ["generate", "model", "--prompts", "sums.jsonl", "--out", "out.jsonl", *sizes, *QUICK]
    assert main(words) == 0

    def again(status: int, *more: str) -> str:
        before = (desk / "out.jsonl").read_bytes()
        capsys.readouterr()
        assert main([*words, *more]) == status
        assert (desk / "out.jsonl").read_bytes() == before
        return " ".join(capsys.readouterr().err.split())

    return again


def test_a_whole_file_is_not_made_again(answered, desk):
    said = answered(0)
    assert "out.jsonl has all responses already" in said and "starting" not in said
    assert "out.jsonl has all responses already" in answered(0, "trainer.experiment=other", "--dry-run")
    shutil.copytree(desk / "model", desk / "copy")
    shutil.rmtree(desk / "model")
    (desk / "copy").rename(desk / "model")
    assert "out.jsonl has all responses already" in answered(0), "a copy of the model is the same model"


@pytest.mark.parametrize("change", ["setting", "form", "prompts", "map", "model", "origin"])
def test_a_whole_file_that_was_made_differently_is_not_overwritten(answered, desk, change):
    words, expected = [], ""
    match change:
        case "setting":
            words, expected = ["data.max_response_tokens=3"], "data.max_response_tokens was 4 and is 3."
        case "form":
            words, expected = ["--by-prompt"], "--by-prompt was false and is true."
        case "prompts":
            (desk / "sums.jsonl").write_text('{"prompt": "5+5="}\n')
            expected = "the files of --prompts have changed."
        case "map":
            (desk / "rows.py").write_text("def to_row(row):\n    return {**row, 'more': 1}\n")
            expected = "the file rows.py has changed."
        case "model":
            weights = desk / "model/model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
            expected = "the files of the model have changed."
        case "origin":
            (desk / "out.jsonl.origin").unlink()
            expected = "out.jsonl exists, and without out.jsonl.origin it is not known how it was made."
    for more in ([], ["--dry-run"]):
        said = answered(2, *words, *more)
        assert expected in said and "Give another --out, or delete the file." in said
    (desk / "out.jsonl").unlink()
    again = ["generate", "model", "--prompts", "sums.jsonl", "--out", "out.jsonl", "data.max_prompt_tokens=8"]
    again += ["data.map=rows.py:to_row"]
    assert main([*again, "data.max_response_tokens=4", *words, *QUICK]) == 0, "it is made again once it is deleted"


@pytest.mark.parametrize("setting", ["trainer.run_dir=log", "trainer={run_dir: log}"])
def test_a_directory_that_the_user_names_is_kept(desk, setting):
    words = ["generate", "builtin:calculator", "--prompts", "sums.jsonl", "--out", "out.jsonl", *QUICK]
    assert main([*words, setting]) == 0
    assert (desk / "log/run.log").is_file() and not (desk / "log/report.html").exists()


def test_another_model_does_not_continue_the_responses_of_an_interrupted_command(desk, capsys, toy_dir: MakeToy):
    shutil.copytree(toy_dir(), desk / "model")
    (desk / "rows.py").write_text(
        "import os\n"
        "def to_row(row):\n"
        "    if row['prompt'] == '4+5=' and os.path.exists('out.jsonl.partial'):\n"
        "        raise RuntimeError('once')\n"
        "    return row\n"
    )
    words = ["generate", "model", "--prompts", "sums.jsonl", "--out", "out.jsonl", "data.map=rows.py:to_row", *QUICK]
    words += ["data.max_prompt_tokens=8", "data.max_response_tokens=4", "data.streaming=true"]
    words += ["rollout.max_sequences=1"]
    assert main(words) == 1 and (desk / "out.jsonl.partial").is_file()
    config = desk / "model/generation_config.json"
    config.write_text(config.read_text().replace("{", '{"a": 1, ', 1))
    capsys.readouterr()
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "interrupted command that were made differently: the files of the model have changed." in said


@pytest.mark.ray
@pytest.mark.parametrize(
    "settings",
    [[], pytest.param(["rollout.engine=vllm"], marks=[pytest.mark.vllm, pytest.mark.slow])],
    ids=["transformers", "vllm"],
)
def test_several_devices_share_the_prompts_and_either_engine_gives_the_same_greedy_responses(desk, settings):
    greedy = ["rollout.eval_sampling.temperature=0", *QUICK]
    words = ["builtin:calculator", "--prompts", "sums.jsonl", "--out"]
    assert main(["generate", *words, "one.jsonl", *greedy]) == 0
    assert main(["generate", *words, "two.jsonl", *greedy, "trainer.devices=2", *settings]) == 0
    assert rows_of(desk / "two.jsonl") == rows_of(desk / "one.jsonl") != []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "builtin:calculator", "reward.functions=[]"], "reward"),
        (
            ["evaluate", "builtin:calculator", "data=[]"],
            "There are no rows to evaluate: data.eval_files is empty.",
        ),
        (
            ["evaluate", "builtin:calculator", "trainer.eval_every=0"],
            "only evaluates the model, but trainer.eval_every=0",
        ),
        (
            ["evaluate", "builtin:calculator", "--step", "3"],
            "--step=3 selects a checkpoint of a run, but 'builtin:calculator' is a model.",
        ),
        (["evaluate", "."], "'.' holds neither a model (config.json) nor a run (checkpoints)."),
        (["generate", "nowhere/model", "--prompts", "sums.jsonl", "--out", "a.jsonl"], "nowhere/model"),
        (
            ["generate", "builtin:calculator", "--prompts", "none.jsonl", "--out", "a.jsonl"],
            "--prompts: No such file or directory: 'none.jsonl'",
        ),
        (
            ["generate", "builtin:calculator", "--prompts", "sums.jsonl", "--out", "a.csv"],
            "must end in .jsonl or .parquet",
        ),
        (
            ["generate", "builtin:calculator", "--prompts", "sums.jsonl", "--out", "no/a.jsonl"],
            "there is no directory no",
        ),
    ],
)
def test_what_is_missing_is_said(desk, capsys, words, said):
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (desk / "runs").exists()


def test_a_run_without_a_policy_is_refused(desk, capsys):
    settings = ["trainer={total_steps: 1, run_dir: run, eval_every: 0}", "data.batch_size=8", *QUICK]
    assert main_reward_model.main(settings) == 0
    capsys.readouterr()
    assert main(["evaluate", "run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "contains no policy (role 'actor'), so it cannot generate" in said and "reward.model.path=DIRECTORY" in said
    shutil.rmtree(desk / "run" / "checkpoints" / "step_1")
    assert main(["evaluate", "run"]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_any_trainer_evaluates_without_training_and_without_training_files(desk, capsys):
    settings = ["trainer={total_steps: 0, run_dir: run}", "data.train_files=[]", "data.eval_limit=16", *QUICK]
    assert main_sft.main(settings) == 0
    said = capsys.readouterr().err
    assert (
        "evaluation without" not in said
        and "without training" in said
        and "done  evaluation" in said
        and "held-out loss" in said
    )
    (row,) = rows_of(desk / "run" / "metrics.jsonl")
    assert row["step"] == 0 and "val-core/calculator/loss" in row


def test_ctrl_c_stops_a_generation_soon_and_keeps_what_is_written(desk, capsys):
    write_trap(desk, "os.kill(os.getpid(), signal.SIGINT)", "time.sleep(20)")
    words = ["generate", "builtin:calculator", "--prompts", "many.jsonl", "--out", "out.jsonl", *QUICK]
    words += ["data.map=rows.py:to_row", "data.streaming=true", "rollout.max_sequences=2"]
    began = time.monotonic()
    assert main(words) == 130
    assert time.monotonic() - began < 20
    said = " ".join(capsys.readouterr().err.split())
    assert "SIGINT: stopping within 1 s (trainer.stop_seconds); a second signal stops immediately." in said
    assert "interrupted before the end of the generation of responses (SIGINT)" in said
    assert "responses; the same command continues after them" in said and "evaluat" not in said


def test_generate_speaks_of_responses_not_of_an_evaluation(desk, capsys):
    assert main(["generate", "builtin:calculator", "--prompts", "sums.jsonl", "--out", "out.jsonl", *QUICK]) == 0
    said = capsys.readouterr().err
    assert "generating responses to 4 prompts ..." in said and "done  generation of responses" in said
    assert "evaluat" not in said


def test_a_column_that_a_reward_misses_is_said_without_advice_for_training(desk, capsys):
    (desk / "judge.py").write_text("def judge(completions, level):\n    return [0.0 for _ in completions]\n")
    assert main(["evaluate", "builtin:calculator", "data=sums.jsonl", "reward=judge.py:judge", *QUICK]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "data=[" in said and "level" in said and "data.eval_files" not in said and "Without evaluation" not in said


def test_only_the_model_is_required(desk, capsys):
    with pytest.raises(SystemExit):
        main(["evaluate"])
    assert capsys.readouterr().err.rstrip().endswith("required: MODEL_OR_RUN")
