"""The overrides of verl's example scripts: translated, composed, and counted."""

from collections.abc import Callable

import pytest
import yaml

from benchmarks.translated_commands import Example, examples, table
from hybridflow.config.experiment import Experiment
from tests.architecture.source import ROOT

Composed = Callable[[str], Experiment]
SCRIPTS = yaml.safe_load((ROOT / "benchmarks" / "published" / "verl_overrides.yaml").read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Example]:
    """All scripts by their sources: composing them takes seconds."""
    return {example.said["source"]: example for example in examples()}


@pytest.fixture
def composed(found) -> Composed:
    """A function: part of a source -> the configuration of its script."""

    def of(part: str) -> Experiment:
        (config,) = [example.config for source, example in found.items() if part in source]
        return config

    return of


@pytest.mark.parametrize("source", [script["source"] for script in SCRIPTS])
def test_the_overrides_of_a_script_compose_or_their_missing_counterparts_are_listed(found, source):
    example = found[source]
    assert example.problems == []
    assert sorted(example.missing) == sorted(example.said["missing"])


def test_every_algorithm_and_both_families_are_there_and_the_quickstart_needs_nothing(found):
    kinds = {(example.said["algorithm"], example.said["model"]) for example in found.values()}
    assert {algorithm for algorithm, _ in kinds} == {"PPO", "GRPO", "RLOO", "ReMax", "DAPO"}
    assert {("PPO", "Llama"), ("GRPO", "Llama")} <= kinds
    quickstarts = [example for source, example in found.items() if "quickstart" in source]
    assert [example.missing for example in quickstarts] == [[], []]


def test_a_script_with_dynamic_batch_sizes_keeps_its_tokens_and_another_counts_rows_of_maximum_length(composed):
    assert composed("grpo_trainer/run_qwen2-7b_seq_balance.sh").actor.microbatch_tokens == 24000
    assert composed("grpo_trainer/run_qwen2-7b.sh").actor.microbatch_tokens == 40 * (512 + 1024)
    assert composed("grpo_trainer/run_deepseek7b_llm.sh").actor.microbatch_tokens == 128 // 8 * (512 + 1024)


def test_the_numbers_of_dapo_are_kept(composed):
    config = composed("run_dapo_qwen2.5_32b.sh")
    assert (config.dataflow, config.algorithm.advantage, config.algorithm.aggregation) == ("dapo", "grpo", "token-mean")
    assert config.dataflow_settings == {"max_refills": 29, "overlong_buffer": 0.2, "overlong_penalty": 1}
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.dual_clip) == (0.2, 0.28, 3.0)
    assert not config.algorithm.mask_truncated
    # verl counts 10 steps, hybridflow optimizer steps: 512 / 32 per step
    assert config.actor.optimizer.warmup_steps == 160
    early = composed("run_dapo_early_qwen2.5_32b.sh")
    assert (early.dataflow, early.reward.functions) == ("grpo", ["gsm8k", "overlong"])
    assert early.reward.settings == {"overlong": {"buffer_tokens": 4096, "penalty": 1}}
    assert composed("test_dapo_7b_math.sh").actor.parallelism.replicas == 2


def test_the_divergence_and_megatron_are_kept(composed):
    config = composed("grpo_trainer/run_qwen2-7b_math_megatron.sh")
    assert (config.actor.engine.name, config.actor.parallelism.pipeline, config.actor.parallelism.tensor) == (
        "megatron",
        2,
        2,
    )
    assert (config.algorithm.kl.placement.name, config.algorithm.kl.estimator) == ("loss", "low_var_kl")
    config = composed("rloo_trainer/run_qwen2-7b.sh")
    assert (config.algorithm.kl.placement.name, config.algorithm.kl.estimator) == ("reward", "kl")
    assert config.algorithm.kl.coefficient == 0.001 and config.algorithm.advantage == "rloo"
    config = composed("qwen2.5math-1.5b_grpo")
    assert (config.algorithm.advantage, config.algorithm.kl.placement.name) == ("dr_grpo", "none")


def test_the_table_counts_every_setting(found):
    lines = table([*found.values()]).splitlines()
    for example, line in zip(found.values(), lines[1:], strict=False):
        script, *_, settings, translated, not_needed, missing, composes = line.split()
        assert example.said["source"].split()[1].endswith(script) and composes == "yes"
        assert int(settings) == int(translated) + int(not_needed) + int(missing)


def test_the_page_counts_them(found):
    page = " ".join((ROOT / "docs" / "how_to" / "translate.md").read_text().split())
    complete = sum(not example.missing for example in found.values())
    assert f"of {len(found)} example scripts of verl" in page and f"and {complete} need no change." in page
