"""Whole runs that compute a prefix once, and runs that compute it for each row."""

import math
from collections.abc import Callable, Sequence

import pytest

from hybridflow.trainer import main_dpo, main_kto, main_ppo, main_reward_model
from tests.distributed.runs import reproducible, rows_of_run, small_run
from tests.distributed.test_preference_runs import small_pairs
from tests.distributed.test_reward_models import pairs_run

TOLERANCE = 1e-4
GENTLE = "actor.optimizer.epsilon=1e-3"
"""With AdamW's usual 1e-8, a gradient that is zero but for rounding is a whole step of the learning rate."""

FSDP = ["trainer={devices: 2, backend: auto}", "actor.engine=fsdp"]
MEGATRON = ["trainer={devices: 2, backend: auto}", "actor.engine=megatron", "actor.parallelism.tensor=2"]
ON_SAMPLES = ["rollout.samples_per_prompt=4", "trainer.eval_every=10"]

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
    "grpo": (main_ppo.main, ["algorithm=grpo", *ON_SAMPLES]),
    "ppo": (main_ppo.main, ["critic.optimizer.epsilon=1e-3", *ON_SAMPLES]),
    "dpo": (main_dpo.main, []),
    "kto": (main_kto.main, []),
    "reward": (main_reward_model.main, ["actor.optimizer.learning_rate=1e-4"]),
}
DATA = {
    main_ppo.main: small_run,
    main_dpo.main: small_pairs,
    main_kto.main: small_pairs,
    main_reward_model.main: pairs_run,
}
TRAINED = {"ppo": ("actor", "critic")}
"""The roles that learn, where it is not the actor alone."""
COINS = {("kto", 0, "val-core/held_out/acc"), ("kto", 1, "rewards/accuracies")}
"""Metrics that are left out: before the first update, policy and reference differ only by rounding, and these are the
signs of their differences."""


QUICK = [("grpo", "single"), ("dpo", "single")]
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else pytest.mark.slow)
    for name in COMMANDS
    for layout in ("single", "fsdp", "megatron")
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_twenty_steps_have_the_same_metrics_with_shared_prefixes_and_without(tmp_path, request, name, layout):
    command, settings = COMMANDS[name]
    if layout != "single":
        request.getfixturevalue("ray_backend")
    settings = [*DATA[command](tmp_path), GENTLE, *settings]
    settings += {"single": [], "fsdp": FSDP, "megatron": MEGATRON}[layout]
    settings += ["trainer={total_steps: 20, save_every: 0}"]
    roles = TRAINED.get(name, ("actor",))
    shared, apart = (
        reproducible(
            rows_of_run(
                tmp_path / said, [*settings, *(f"{role}.share_prefixes={said}" for role in roles)], command=command
            )
        )
        for said in ("true", "false")
    )
    assert len(shared) == len(apart) >= 20
    for ours, theirs in zip(shared, apart, strict=True):
        assert ours.keys() == theirs.keys()
        for metric, value in theirs.items():
            if (name, theirs["step"], metric) in COINS:
                continue
            assert math.isclose(ours[metric], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (ours["step"], metric)
    assert shared != apart, "the prefixes were not shared"
