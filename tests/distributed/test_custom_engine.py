"""Rollout engines that users write: a model of their own in both backends, a program without a model, and refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.runs import assert_refused, rows_of_run, run_here, sample_rows, small_run

RECIPE = Path(__file__).parents[2] / "recipes" / "custom_engine.py"
BASE = "from hybridflow.engines.rollout.custom import CustomEngine, CustomEngineSetup, Response\n"
SCRIPTED = """
class Engine(CustomEngine):
    def respond(self, prompts, sampling, *, max_response_tokens, seeds):
        texts = [self.setup.tokenizer.decode(prompt) for prompt in prompts]
        sums = [str(sum(map(int, text.rstrip("=").split("+"))) * (row % 2)) for row, text in enumerate(texts)]
        rows = [self.setup.tokenizer(text)["input_ids"] + [self.setup.eos_token_ids[0]] for text in sums]
        return [Response(row, [0.0] * len(row)) for row in rows]
"""
WHOLE_BATCHES = """
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.engines.rollout.memory import Released

class Engine:
    '''The interface without `submit`, `poll` and `withdraw`: every row is the digit of its place and the end.'''

    def __init__(self, setup):
        self.mesh, self.setup, self.version = setup.ranks.mesh, setup, 0

    def generate(self, prompts, sampling, *, max_response_tokens, seed):
        count, end = len(prompts), self.setup.eos_token_ids[0]
        rows = [self.setup.tokenizer(str(row % 10))["input_ids"] + [end] for row in range(count)]
        ids = Ragged.from_rows(rows, torch.int64)
        zeros = ids.like(torch.zeros(len(ids.values)))
        versions = torch.full((count,), self.version)
        runs = torch.stack([versions, torch.zeros_like(versions)], 1)
        return Batch.of(
            rows={"weight_version": versions, "truncated": torch.zeros(count, dtype=torch.bool)},
            tokens={
                "response_ids": ids,
                "response_mask": zeros.like(zeros.values + 1),
                "rollout_logprobs": zeros,
                "version_runs": Ragged.from_lengths(runs, torch.ones(count, dtype=torch.int64)),
            },
            meta={"temperature": sampling.temperature or 1.0},
        )

    def weight_slots(self):
        return {}

    def pause(self, *, keep_cache=False): ...

    def resume(self, *, version):
        self.version = version

    def sleep(self, kept=()):
        return Released(0, 0, 0)

    def wake(self): ...
"""
PARTIAL = "class Engine:\n    def generate(self): ...\n    weight_slots = wake = generate"
ONE_STEP = ["algorithm=grpo", "trainer={total_steps: 2, save_every: 0}"]


@pytest.fixture
def engine(tmp_path: Path) -> Callable[[str], str]:
    """A function: the text of a file -> the setting that names its class `Engine`."""

    def written(text: str) -> str:
        (tmp_path / "my.py").write_text(BASE + text)
        return f"rollout.engine={tmp_path}/my.py:Engine"

    return written


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_an_engine_that_runs_the_policy_draws_from_the_trained_weights(tmp_path, backend):
    """Were the weights of step 2 not written, its log-probabilities would differ by more than rounding."""
    words = [f"rollout.engine={RECIPE}:GenerateEngine", "actor.optimizer.learning_rate=1e-2", "actor.minibatch_size=8"]
    devices = f"trainer={{backend: {backend}, devices: {1 + (backend == 'ray')}}}"
    rows = rows_of_run(tmp_path / "run", [*small_run(tmp_path), *ONE_STEP, *words, devices])
    steps = [row for row in rows if "training/rollout_logprobs_diff_max" in row]
    assert len(steps) == 2 and all(row["training/rollout_logprobs_diff_max"] < 1e-4 for row in steps)


def test_a_program_without_a_model_is_trained_on(tmp_path, engine):
    """Every other response is right, so half of each group of two."""
    words = [engine(SCRIPTED), "rollout.max_logprob_difference=1000"]
    rows = rows_of_run(tmp_path / "run", [*small_run(tmp_path), *ONE_STEP, *words])
    steps = [row for row in rows if "actor/pg_loss" in row]
    assert [row["critic/score/mean"] for row in steps] == [0.5, 0.5]
    assert steps[0]["response_length/clip_ratio"] == 0.0 and steps[0]["actor/grad_norm"] > 0


def test_an_engine_that_only_generates_whole_batches_serves_a_synchronous_run(tmp_path, engine):
    words = [engine(WHOLE_BATCHES), "rollout.max_logprob_difference=1000", "trainer.sample_rows=16"]
    words += [f"reward.functions=[{tmp_path}/my.py:is_even]", "trainer={samples_every: 1, eval_every: 0}"]
    with (tmp_path / "my.py").open("a") as file:
        file.write("\ndef is_even(completions):\n    return [float(int(text) % 2 == 0) for text in completions]\n")
    run = [*small_run(tmp_path), *ONE_STEP, *words]
    steps = [row for row in rows_of_run(tmp_path / "run", run) if "actor/pg_loss" in row]
    assert [row["critic/score/mean"] for row in steps] == [0.5, 0.5]
    assert all(row["actor/grad_norm"] > 0 and row["response_length/mean"] == 2.0 for row in steps)
    responses = [sample["response"] for sample in sample_rows(tmp_path / "run") if sample["split"] == "train"]
    assert responses[:16] == [str(row % 10) for row in range(16)]


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        (PARTIAL, "is not a rollout engine: it lacks pause, resume and sleep", "Derive it from"),
        (SCRIPTED + "    def weights_changed(self, *, version): ...",
            "has a method weights_changed, which would never be called", "Rename it to resume"),
        ("class Engine(CustomEngine):\n    pass", "it lacks respond", "write respond()"),
        ("class Engine(CustomEngine):\n    def respond(self, prompts, sampling, *, seeds): ...",
            "cannot be called: got an unexpected keyword argument 'max_response_tokens'", "Write def respond(self"),
        ("def Engine(): ...", "is of type function, not a class", "Name a class"),
        (SCRIPTED + "    def __init__(self): ...", "Engine() cannot be called with one argument", "CustomEngineSetup"),
    ],
)  # fmt: skip
def test_a_class_that_is_no_engine_is_refused_before_the_start(tmp_path, engine, text, found, remedy):
    run = [*small_run(tmp_path), *ONE_STEP, f"trainer.run_dir={tmp_path}/run"]
    assert_refused(run_here([*run, engine(text)]), found, remedy)
    assert not (tmp_path / "run").exists()


def test_an_unknown_engine_is_refused_with_the_nearest(tmp_path):
    ended = run_here([*small_run(tmp_path), "rollout.engine=vlm"])
    assert_refused(ended, "rollout.engine=vlm is unknown", "Did you mean 'vllm'? Choose from: transformers, vllm; or")


@pytest.mark.parametrize(
    ("returned", "found", "remedy"),
    [
        (
            "['5' for _ in prompts]",
            "respond returned an object of type str for prompt 0",
            "Return Response(tokens, logprobs).",
        ),
        ("None", "respond returned an object of type NoneType", "a list with one Response per prompt"),
        ("[]", "respond returned 0 responses to 16 prompts", "one Response per prompt"),
        ("[Response([5], []) for _ in prompts]", "1 tokens with 0 log-probabilities", "1 to 4 tokens"),
    ],
)
def test_responses_that_cannot_be_trained_on_end_the_run(tmp_path, engine, returned, found, remedy):
    text = f"class Engine(CustomEngine):\n    def respond(self, prompts, *_, **__):\n        return {returned}"
    words = [*small_run(tmp_path), *ONE_STEP, "trainer.eval_every=0", f"trainer.run_dir={tmp_path}/run"]
    ended = run_here([*words, engine(text)])
    assert ended.status != 0 and found in ended.words and remedy in ended.words, ended.said
