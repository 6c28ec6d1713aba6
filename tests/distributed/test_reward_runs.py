"""What reward functions of other systems say beside their scores reaches the dataflow that can use it."""

from tests.distributed.runs import rows_of_run, small_run

EQUAL_REWARDS = """
def f(queries, prompts, labels):
    return {"rewards": [1.0] * len(queries), "scores": [float(row % 2) for row in range(len(queries))]}
"""


def test_dapo_judges_groups_by_the_scores_that_an_openrlhf_function_gives_for_this(tmp_path):
    (tmp_path / "judge.py").write_text(EQUAL_REWARDS)
    settings = [f"reward.functions={tmp_path}/judge.py:f", "reward.processes=0", "algorithm=dapo"]
    settings += ["trainer={total_steps: 1, eval_every: 0, save_every: 0}"]
    (row,) = rows_of_run(tmp_path / "run", [*small_run(tmp_path), *settings])
    assert (row["dapo/groups_kept"], row["dapo/refills"]) == (8, 0)
    assert row["rewards/f/scores"] == 0.5
    assert row["rewards/f/mean"] == 1.0
