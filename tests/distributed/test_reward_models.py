"""Reward models through the real commands: trained, served to PPO, alone and beside functions, and what is refused."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from hybridflow.cli import main as cli
from hybridflow.controller import Backend
from hybridflow.trainer import main_reward_model
from tests.distributed.runs import Ended, Row, metric_rows, reproducible, rows_of_run, run_here, run_well, small_run
from tests.reward_models import make_encoder

RAY = "trainer.backend=ray"


def pairs_run(folder: Path, *, steps: int = 4) -> list[str]:
    """Settings of a run of seconds on pairs of a right and a wrong sum."""
    sums = [(a, b) for a in range(12, 92, 9) for b in range(7, 95, 11)]
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 10), "margin": 0.1} for a, b in sums]
    for name, chosen in (("pairs", rows[16:]), ("held_out_pairs", rows[:16])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return [
        f"trainer={{total_steps: {steps}, save_every: 2, eval_every: 2, threads: 1, device: cpu}}",
        "trainer={backend: local, trackers: [console, jsonl]}",
        "model.path=builtin:calculator",
        f"data={{train_files: [{folder}/pairs.jsonl], eval_files: [{folder}/held_out_pairs.jsonl]}}",
        "data={batch_size: 8, max_prompt_tokens: 8, max_response_tokens: 8}",
        "actor={minibatch_size: 4}",
        "actor.optimizer={learning_rate: 1e-3, warmup_steps: 0, schedule: constant}",
    ]


def trained(folder: Path, *settings: str, name: str = "scorer", steps: int = 4) -> Ended:
    """A run of main_reward_model in `folder/name`."""
    words = [*pairs_run(folder, steps=steps), f"trainer.run_dir={folder}/{name}", *settings]
    return run_well(words, command=main_reward_model.main)


def words_of(folder: Path, scorer: Path | str, *settings: str) -> list[str]:
    """Two steps of PPO against a reward model alone."""
    words = ["trainer={total_steps: 2, save_every: 0}", "reward.functions=[]", f"reward.model.path={scorer}"]
    return [*small_run(folder), *words, *settings]


def served(folder: Path, scorer: Path | str, *settings: str, name: str = "policy") -> list[Row]:
    """The metrics of those steps."""
    return rows_of_run(folder / name, words_of(folder, scorer, *settings))


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A reward model trained for four steps."""
    folder = tmp_path_factory.mktemp("scorer")
    return trained(folder), folder / "scorer"


@pytest.fixture(scope="module")
def scorer(reward_run: tuple[Ended, Path]) -> Path:
    """The directory to serve it from."""
    return reward_run[1] / "checkpoints/step_4/reward_model/huggingface"


def test_a_reward_model_begins_as_a_coin_and_learns(reward_run):
    rows = metric_rows(reward_run[1])
    first, last = rows[0], rows[-1]
    assert first["val-core/held_out_pairs/acc"] == 0.5
    assert first["val-core/held_out_pairs/loss"] == pytest.approx(0.7444, abs=5e-4)  # -log sigmoid(-0.1), the margin
    assert last["val-core/held_out_pairs/loss"] < first["val-core/held_out_pairs/loss"]
    for row in rows[1:]:
        assert {"train/loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"} <= set(row)
        assert row["reward_model/grad_norm"] > 0.0


def test_the_last_line_says_how_to_serve_it(reward_run, scorer):
    assert f"reward.model.path={scorer}" in reward_run[0].words
    with safe_open(scorer / "model.safetensors", framework="pt") as file:
        assert {"score.weight", "score.bias"} <= set(file.keys())


def test_it_goes_on_with_the_same_bits(reward_run, tmp_path):
    checkpoint = f"trainer.resume={reward_run[1]}/checkpoints/step_2"
    whole = reproducible(metric_rows(reward_run[1]))
    trained(tmp_path, checkpoint, "trainer.resume_changed=accept")
    assert reproducible(metric_rows(tmp_path / "scorer")) == whole[-2:]


def test_export_takes_the_reward_model_without_being_told(reward_run, scorer, tmp_path):
    assert cli.main(["export", str(reward_run[1]), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (scorer / "model.safetensors").read_bytes()


def test_ppo_learns_from_it(scorer, tmp_path):
    rows = served(tmp_path, scorer)
    assert "val-core/held_out/reward/mean@1" in rows[0]
    for row in rows[1:]:
        assert row["rewards/model/mean"] == pytest.approx(row["critic/score/mean"], abs=1e-6)
        assert row["critic/score/max"] > row["critic/score/min"]
        assert row["actor/grad_norm"] > 0.0


def test_a_function_in_addition_counts_with_its_weight(scorer, tmp_path):
    beside = ["reward={functions: [exact_match], weights: [2.0], model_weight: 0.5}"]
    rows = served(tmp_path, scorer, *beside)
    for row in rows[1:]:
        total = 2.0 * row["rewards/exact_match/mean"] + 0.5 * row["rewards/model/mean"]
        assert row["critic/score/mean"] == pytest.approx(total, abs=1e-5)


def test_a_process_reward_reaches_every_token(scorer, tmp_path):
    rows = served(tmp_path, scorer, "reward.process=true")
    for row in rows[1:]:
        assert row["critic/score/mean"] == pytest.approx(row["rewards/model/mean"], abs=1e-6)
        assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"], abs=1e-5)  # counted once


def test_an_encoder_with_its_own_tokens_serves_grpo(tmp_path):
    encoder = make_encoder(tmp_path / "encoder", labels=2)
    ended = run_well([*words_of(tmp_path, encoder, "algorithm=grpo"), f"trainer.run_dir={tmp_path}/policy"])
    assert "reads=text, in its own tokens" in ended.words
    assert "log-odds of 'LABEL_1' against 'LABEL_0'" in ended.words
    for row in metric_rows(tmp_path / "policy")[1:]:
        assert row["rewards/model/mean"] == pytest.approx(row["critic/score/mean"], abs=1e-5)


WIDE = "parallelism: {tensor: 2}"
REFUSED = {
    "language": ("builtin:calculator", [], ["has no head that computes", "hybridflow reward-model"]),
    "process": ("encoder", ["reward.process=true"], ["has a tokenizer of its own", "Leave reward.process out"]),
    "whole": (
        "encoder",
        [f"reward={{engine: fsdp, {WIDE}}}", "trainer={devices: 2, backend: ray}"],
        ["reward.parallelism.tensor=2", "Leave the size out"],
    ),
    "engine": (
        "encoder",
        [f"reward={{engine: single, {WIDE}}}"],
        ["reward.parallelism.tensor=2", "reward.engine=auto or fsdp"],
    ),
}
"""What is wrong: the model, settings beside, and the words that tell."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_reward_model_is_refused_before_anything_starts(what, tmp_path):
    name, settings, words = REFUSED[what]
    model = make_encoder(tmp_path / name) if name == "encoder" else name
    ended = run_here([*words_of(tmp_path, model, *settings), f"trainer.run_dir={tmp_path}/policy"])
    assert ended.status == 2, ended.said
    assert [word for word in words if word not in ended.words] == [], ended.said
    assert not (tmp_path / "policy").exists()


@pytest.mark.slow  # the quick case: rewards in a pool of their own, test_runs_engines.py
@pytest.mark.ray
def test_a_reward_model_in_a_pool_of_its_own_gives_the_same_bits(ray_backend: Backend, scorer, tmp_path):
    words = ["trainer={total_steps: 1, eval_every: 0}"]
    plain = served(tmp_path, scorer, *words)
    pools = ["placement.pools={main: {devices: 1}, scorers: {devices: 1}}", "placement.roles.reward=scorers"]
    apart = served(tmp_path, scorer, *words, *pools, RAY, "trainer.devices=2", name="apart")
    assert reproducible(apart) == reproducible(plain)


@pytest.mark.lora
def test_an_adapter_of_a_reward_model_is_exported_and_served(tmp_path):
    ended = trained(tmp_path, "actor.lora.rank=4", "actor.optimizer.learning_rate=3e-3")
    rows = metric_rows(tmp_path / "scorer")
    assert rows[-1]["val-core/held_out_pairs/loss"] < rows[0]["val-core/held_out_pairs/loss"]
    assert "hybridflow export" in ended.words
    assert cli.main(["export", str(tmp_path / "scorer"), str(tmp_path / "out")]) == 0
    row = served(tmp_path, tmp_path / "out")[-1]
    assert row["critic/score/max"] > row["critic/score/min"]
