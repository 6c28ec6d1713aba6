"""Held-out prompts, answered and scored."""

import math

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.dataflows.evaluation import Parts, evaluate_responses, samples_of
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.samples import Sample
from tests.unit.dataflows.programs import calculator_prompts, local_roles


def evaluated(
    directory, *, rewards=("exact_match",), answer="9", parts=1, on_part=lambda done, total: None, **changes
) -> tuple[Metrics, list[Sample]]:
    roles, tokenizer = local_roles(directory, rewards=rewards), load_tokenizer(directory)
    prompts = calculator_prompts(directory, 5).with_columns(
        rows={"uid": torch.arange(5)}, objects={"answer": [answer] * 5}
    )
    return evaluate_responses(
        roles.groups["rollout"],
        roles.groups["reward"],
        Parts(prompts, parts, on_part),
        decode=lambda ids: decode_responses(tokenizer, ids),
        **{"samples_per_prompt": 2, "sample_rows": 3, "what": "acc"} | changes,
    )


def by_uid(directory, rule: str) -> str:
    """A reward function that reads the number in front of the prompt."""
    (directory / "rule.py").write_text(
        f"def rule(prompts, completions, **columns):\n    return [{rule} for p in prompts]\n"
    )
    return f"{directory}/rule.py:rule"


def test_each_source_has_its_mean_over_all_samples(toy_dir, tmp_path):
    metrics, _ = evaluated(toy_dir(), rewards=[by_uid(tmp_path, "float(p[0]) ** 2")])
    assert {name: (measure.value, measure.weight) for name, measure in metrics.items()} == {
        "val-core/easy/acc/mean@2": ((0 + 16) / 2, 4),
        "val-core/easy/acc/pass@2": ((0 + 16) / 2, 2),
        "val-core/sums/acc/mean@2": (pytest.approx((1 + 4 + 9) / 3), 6),
        "val-core/sums/acc/pass@2": (pytest.approx((1 + 4 + 9) / 3), 3),
    }


def test_parts_make_no_difference_and_each_is_announced(toy_dir, tmp_path):
    directory, rewards, announced = toy_dir(), [by_uid(tmp_path, "float(p[0]) ** 2")], []
    found = evaluated(directory, rewards=rewards, parts=3, sample_rows=9, on_part=lambda *part: announced.append(part))
    assert found == evaluated(directory, rewards=rewards, sample_rows=9)
    assert announced == [(0, 5), (2, 5), (4, 5)]


def test_the_last_turn_of_the_user_is_the_question_of_a_conversation(toy_dir):
    turns = [[{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant", "user")] for n in range(4)]
    roles, directory = local_roles(toy_dir()), toy_dir()
    prompts = calculator_prompts(directory, 5).with_columns(objects={"prompt": [*turns, "0+9="]}).repeat(1)
    batch = prompts.with_columns(rows={"uid": torch.arange(5), "scores": torch.zeros(5)})
    shown = samples_of(roles.groups["rollout"].generate(batch).fetch(), lambda ids: ["x"] * len(ids), split="train")
    assert [sample.question for sample in shown] == ["user 0", "user 1", "user 2", "user 3", None]
    assert [sample.asked for sample in shown] == ["user 0", "user 1", "user 2", "user 3", "x"]


def test_a_prompt_passes_with_the_best_of_its_samples(toy_dir, tmp_path):
    # Scores of the samples in turn: right, wrong, right, ... for two of five prompts the second counts as well.
    rule = "float((i + int(p[0])) % 2) if int(p[0]) < 2 else 0.0"
    (tmp_path / "rule.py").write_text(
        f"def rule(prompts, completions, **columns):\n    return [{rule} for i, p in enumerate(prompts)]\n"
    )
    metrics, _ = evaluated(toy_dir(), rewards=[f"{tmp_path}/rule.py:rule"])
    values = {name: measure.value for name, measure in metrics.items()}
    assert values["val-core/easy/acc/mean@2"] == 0.25
    assert values["val-core/easy/acc/pass@2"] == 0.5
    assert values["val-core/sums/acc/pass@2"] == pytest.approx(1 / 3)


def test_failed_episodes_are_left_out_of_an_evaluation(toy_dir, tmp_path):
    roles, directory = local_roles(toy_dir(), rewards=[by_uid(tmp_path, "float(p[0]) ** 2")]), toy_dir()
    prompts = calculator_prompts(directory, 5).with_columns(
        rows={"uid": torch.arange(5)}, objects={"answer": ["9"] * 5}
    )
    lost = torch.zeros(10, dtype=torch.bool).index_fill(0, torch.tensor([0, 2, 4, 5]), value=True)

    class Loses:
        def generate(self, prompts, purpose="train"):
            return roles.groups["rollout"].generate(prompts, purpose).join(Batch.of(rows={"failed": lost}))

    def evaluate():
        return evaluate_responses(
            Loses(),
            roles.groups["reward"],
            Parts(prompts, 1, lambda done, total: None),
            samples_per_prompt=2,
            sample_rows=0,
            decode=lambda ids: [""] * len(ids),
            what="acc",
        )

    metrics, _ = evaluate()
    # of the prompts with the scores 0, 1, 4, 9 and 16, the first two have lost a sample, and the third both
    assert {name: (measure.value, measure.weight) for name, measure in metrics.items()} == {
        "val-core/easy/acc/mean@2": (pytest.approx((0 + 16 + 16) / 3), 3),
        "val-core/easy/acc/pass@2": ((0 + 16) / 2, 2),
        "val-core/sums/acc/mean@2": (pytest.approx((1 + 9 + 9) / 3), 3),
        "val-core/sums/acc/pass@2": ((1 + 9) / 2, 2),
        "val-aux/easy/failed_fraction": (0.25, 4),
        "val-aux/sums/failed_fraction": (0.5, 6),
    }
    lost[:] = True
    metrics, _ = evaluate()
    means = [measure.value for name, measure in metrics.items() if name.startswith("val-core/")]
    assert len(means) == 4 and all(math.isnan(value) for value in means), "a run of failures has no score, not 0"


def test_of_several_functions_each_has_its_own_mean(toy_dir, tmp_path):
    (tmp_path / "rules.py").write_text(
        "def one(completions):\n    return [1.0 for _ in completions]\n"
        "def odd(prompts, completions):\n    return [2.0 if int(p[0]) % 2 else None for p in prompts]\n"
    )
    rewards = [f"{tmp_path}/rules.py:one", f"{tmp_path}/rules.py:odd"]
    metrics, _ = evaluated(toy_dir(), rewards=rewards, samples_per_prompt=1, what="reward")
    values = {name: measure.value for name, measure in metrics.items()}
    assert values == {
        "val-core/easy/reward/mean@1": 1.0,  # prompts 0 and 4
        "val-core/sums/reward/mean@1": pytest.approx((3 + 1 + 3) / 3),
        "val-aux/easy/one/mean": 1.0,
        "val-aux/sums/one/mean": 1.0,
        "val-aux/sums/odd/mean": 2.0,  # of the two that it scored
    }


def test_the_first_samples_are_shown_as_text(toy_dir, tmp_path):
    _, samples = evaluated(toy_dir(), rewards=[by_uid(tmp_path, "float(p[0])")])
    assert [(s.prompt, s.answer, s.score, s.uid, s.split) for s in samples] == [
        ("0+9=", "9", 0.0, 0, "eval"),
        ("0+9=", "9", 0.0, 0, "eval"),
        ("1+8=", "9", 1.0, 1, "eval"),
    ]
    assert all("</s>" not in sample.response for sample in samples)


def test_of_a_worked_solution_the_final_answer_is_shown(toy_dir):
    _, samples = evaluated(toy_dir(), answer="4 and 5 make 9.\n#### 9")
    assert {sample.answer for sample in samples} == {"9"}
