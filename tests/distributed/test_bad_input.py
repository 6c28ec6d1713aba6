"""What a user gets wrong is reported before anything starts: what was found, what to do, and nothing is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.config.paths import builtin_path
from hybridflow.trainer import main_sft
from tests.distributed.runs import Ended, run_here, small_run
from tests.toys import MakeToy

FLOWS = """
from dataclasses import dataclass

from hybridflow.dataflows.grpo import GRPO


class Mine(GRPO):
    @dataclass
    class Settings:
        threshold: float = 0.5
        recompute_logprobs: bool = True


class Helper:
    pass
"""

Try = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that are wrong in one way each."""
    lines = {
        "broken": ['{"prompt": "1+1=", "answer": "2"}', "", '{"prompt": "1+2=", "answer'],
        "long": [json.dumps({"prompt": "1+" * n + "1=", "answer": "2"}) for n in (1, 1, 20, 1, 30, *[1] * 8)],
        "unnamed": [json.dumps({"sum": "1+1=", "result": "2"})],
        "nameless": [json.dumps({"prompt": 3, "answer": "2"})],
        "empty": [],
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
    (tmp_path / "flows.py").write_text(FLOWS)
    (tmp_path / "torn.py").write_text("def right(completions, **columns:\n")
    (tmp_path / "judges.py").write_text("def right(completions, wanted_lenght, **columns):\n    return [0.0]\n")
    return tmp_path


@pytest.fixture
def attempt(folder: Path) -> Try:
    """A function: settings -> how a command with them ended; `{}` is the folder of wrong files."""

    def run(*settings: str, **options) -> Ended:
        words = [*small_run(folder), f"trainer.run_dir={folder}/run", *settings]
        return run_here([word.replace("{}", str(folder)) for word in words], **options)

    return run


def assert_refused(ended: Ended, folder: Path, found: str, remedy: str) -> None:
    """Status 2, the words of the error and of its remedy, and no run directory."""
    assert ended.status == 2, ended.said
    message, _, advice = ended.words.partition("What to do:")
    assert found.replace("{}", str(folder)) in message
    assert remedy.replace("{}", str(folder)) in advice
    assert "Traceback" not in ended.said
    assert not list(folder.glob("run*"))


@pytest.mark.parametrize(
    ("setting", "found", "remedy"),
    [
        (
            "actor.optimizer.learningrate=1",
            "no setting 'actor.optimizer.learningrate'",
            "actor.optimizer.learning_rate",
        ),
        ("trainer.steps=5", "There is no setting 'trainer.steps'", "Did you mean trainer."),
        ("data.batch_size=many", "data.batch_size has the wrong type: Value 'many'", "takes a whole number"),
        ("trainer.device=gpu", "trainer.device=gpu is unknown", "must be one of: auto, cpu, cuda"),
        ("algorithm=pro", "There is no algorithm=pro", "Did you mean 'ppo'?"),
        ("trainer.trackers=[jsonl,tensorbord]", "names 'tensorbord'", "Did you mean 'tensorboard'?"),
        ("actor.minibatch_size=3", "actor.minibatch_size=3 does not divide data.batch_size=8", "Use 2, or another"),
        ("data.batch_size=10", "does not divide data.batch_size=10", "Use 5, or another divisor"),
        ("--epochs", "There is no option --epochs", "key=value"),
    ],
)
def test_a_wrong_setting_is_told(attempt, folder, setting, found, remedy):
    assert_refused(attempt(setting), folder, found, remedy)


@pytest.mark.parametrize(
    ("setting", "found", "remedy"),
    [
        ("data.train_files=[{}/brokn.jsonl]", "No such file or directory: '{}/brokn.jsonl'", "mean 'broken.jsonl'?"),
        ("data.train_files=[{}/broken.jsonl]", "'{}/broken.jsonl', line 3, column 20: not JSON", "Correct or remove"),
        ("data.eval_files=[{}/broken.jsonl]", "'{}/broken.jsonl', line 3, column 20: not JSON", "Correct or remove"),
        ("data.train_files=[{}/empty.jsonl]", "'{}/empty.jsonl' holds no rows", "at least one row"),
        ("data.train_files=[{}/unnamed.jsonl]", "its columns are: sum, result", "data.prompt_key=..."),
        ("data.prompt_key=prmpt", "data.prompt_key=prmpt", "Did you mean 'prompt'?"),
        ("data.train_files=[{}/nameless.jsonl]", "row 1 of '{}/nameless.jsonl' is a int", "Give text, or messages"),
        (
            "data.train_files=[{}/long.jsonl]",
            "2 of 13 prompts are longer than data.max_prompt_tokens=8 tokens (the longest, row 5 of '{}/long.jsonl'",
            "Set data.max_prompt_tokens=62 if the model reads as many, or data.drop_long_prompts=true",
        ),
        ("data.batch_size=80", "data.batch_size=80, but the data has 64 rows", "between 1 and 64"),
        ("data.max_prompt_tokens=255", "make 259 tokens; the model in", "Lower one of them, to 256 together"),
    ],
)
def test_wrong_data_is_told(attempt, folder, setting, found, remedy):
    assert_refused(attempt(setting), folder, found, remedy)


def test_long_prompts_are_left_out_when_asked_and_counted(attempt, folder):
    ended = attempt("data.train_files=[{}/long.jsonl]", "data.drop_long_prompts=true", "trainer.total_steps=1")
    assert ended.status == 0, ended.said
    assert "leaves out 2 of 13 prompts longer than data.max_prompt_tokens=8" in ended.words


def test_what_the_data_was_taken_for_is_said(attempt, folder):
    ended = attempt("model.path=nowhere")
    assert ended.status == 2
    said = attempt("data.eval_files=[{}/empty.jsonl]").words
    assert f"data={folder}/sums.jsonl rows=64 recognised=trl_prompt prompt=prompt answer=answer" in said


@pytest.mark.parametrize(
    ("setting", "found", "remedy"),
    [
        ("dataflow={}/flow.py:Mine", "there is no file '{}/flow.py'", "Did you mean 'flows.py'?"),
        (
            "dataflow={}/flows.py:Mien",
            "{}/flows.py:Mien: there is no 'Mien' in it",
            "Did you mean 'Mine'? It has: Mine, Helper",
        ),
        ("dataflow={}/flows.py:Helper", "'Helper' is not a dataflow", "Write 'class Helper(Dataflow)'"),
        ("dataflow={}/torn.py:Mine", "{}/torn.py:Mine: the file cannot be run: SyntaxError", "python {}/torn.py"),
        ("dataflow=grop", "dataflow=grop is unknown", "Did you mean 'grpo'?"),
        ("reward.functions=[{}/judge.py:right]", "there is no file '{}/judge.py'", "Did you mean 'judges.py'?"),
        ("reward.functions=[{}/judges.py:rigth]", "there is no 'rigth' in it", "Did you mean 'right'?"),
        ("reward.functions=[{}/torn.py:right]", "cannot be run: SyntaxError", "Try: python"),
        ("reward.functions=[exact_mach]", "no built-in function 'exact_mach'", "Did you mean 'exact_match'?"),
        ("reward.functions=[{}/judges.py:right]", "needs the column 'wanted_lenght'", "The columns are:"),
        ("roles.judge.kind=reward_function", "roles.judge is not a role of dataflow=ppo", "Its roles: actor, critic"),
    ],
)
def test_a_wrong_program_or_function_is_told(attempt, folder, setting, found, remedy):
    assert_refused(attempt(setting), folder, found, remedy)


@pytest.mark.parametrize(
    ("setting", "found", "remedy"),
    [
        ("threshhold=1", "no setting 'dataflow_settings.threshhold'", "Did you mean 'threshold'?"),
        ("threshold=high", "dataflow_settings.threshold: Value 'high'", "It takes a number"),
    ],
)
def test_a_wrong_setting_of_a_users_dataflow_is_told(attempt, folder, setting, found, remedy):
    words = ["dataflow={}/flows.py:Mine", "algorithm.advantage=grpo", f"dataflow_settings.{setting}"]
    assert_refused(attempt(*words), folder, found, remedy)


@pytest.mark.parametrize("key", ["model", "actor.model", "critic.model"])
def test_a_model_that_is_not_there_is_told_with_the_nearest(attempt, folder, toy_dir: MakeToy, key):
    shutil.copytree(toy_dir(), folder / "my_model")
    found, remedy = f"EngineError: {key}.path={{}}/my_modle does not exist", "Nearest model directory: {}/my_model"
    assert_refused(attempt(f"{key}.path={{}}/my_modle"), folder, found, remedy)


def test_a_reference_that_is_not_there_is_told(attempt, folder):
    words = ["roles.reference={kind: reference, model: {path: {}/gone}}", "algorithm.kl.placement=reward"]
    assert_refused(attempt(*words), folder, "roles.reference.model.path={}/gone does not exist", "Hugging Face")


def test_a_directory_that_is_no_model_is_told(attempt, folder):
    (folder / "no_model").mkdir()
    assert_refused(attempt("model.path={}/no_model"), folder, "has no config.json", "Give a Hugging Face directory")


def test_a_tokenizer_without_pad_is_told_and_given_one_works(attempt, folder):
    model = folder / "unpadded"
    shutil.copytree(builtin_path("builtin:calculator"), model)
    written = json.loads((model / "tokenizer_config.json").read_text())
    written.pop("pad_token")
    (model / "tokenizer_config.json").write_text(json.dumps(written))
    assert_refused(attempt("model.path={}/unpadded"), folder, "has no token to pad with", "model.pad_token='</s>'")
    settings = ["reward.functions=[exact_match]", "trainer={total_steps: 1, save_every: 0}"]
    ended = attempt("model.path={}/unpadded", "model.pad_token=</s>", *settings)
    assert ended.status == 0, ended.said


def test_a_critic_that_reads_less_or_other_tokens_is_told(attempt, folder, toy_dir: MakeToy):
    short, small = toy_dir(max_position_embeddings=8), toy_dir(vocab_size=32)
    for path, found in ((short, "make 12 tokens; the model in"), (small, "ids up to 63, but the model")):
        (folder / "critic").symlink_to(path)
        assert_refused(attempt("critic.model.path={}/critic"), folder, found, "")
        (folder / "critic").unlink()


@pytest.mark.vllm
def test_a_head_size_that_vllm_refuses_is_told(attempt, folder, toy_dir: MakeToy):
    (folder / "narrow").symlink_to(toy_dir(head_dim=8))
    words = ["model.path={}/narrow", "rollout.engine=vllm"]
    assert_refused(attempt(*words), folder, "attention heads have size 8", "rollout.engine=transformers")


def test_supervised_data_without_completions_is_told(attempt, folder):
    words = ["data.train_files=[{}/unnamed.jsonl]", "algorithm.kl.placement=none"]
    ended = attempt(*words, command=main_sft.main)
    assert_refused(ended, folder, "no columns known to hold demonstrations", "data.prompt_key=... and data.answer_key")
