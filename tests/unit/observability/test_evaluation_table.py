"""The table of an evaluation: the best of k samples, and one line per data source."""

from itertools import combinations

import pytest

from hybridflow.observability.evaluation_table import best_of, summaries, table_text


@pytest.mark.parametrize("scores", [[0.0, 1.0, 0.0, 1.0, 0.0], [1.0], [0.3, -2.0, 0.3, 5.0], [0.0, 0.0]])
def test_best_of_k_is_the_mean_over_all_subsets_of_k(scores):
    for k in range(1, len(scores) + 1):
        best = [max(chosen) for chosen in combinations(scores, k)]
        assert best_of(scores, k) == pytest.approx(sum(best) / len(best))


def row(source, uid, score, tokens=3, **further):
    return {"source": source, "uid": uid, "score": score, "tokens": tokens, "is_cut_off": False, **further}


def test_sources_are_apart_and_together():
    sums = [
        row("sums", uid, score) for uid, scores in enumerate([(1.0, 0.0, 0.0), (0.0, 0.0, 0.0)]) for score in scores
    ]
    words = [row("words", 7, 0.5, 9), row("words", 7, 1.5, 8, is_cut_off=True), row("words", 7, None, 1)]
    of_sums, of_words, of_all = summaries([*sums, *words])
    assert list(of_sums) == ["source", "prompts", "mean", "pass@2", "pass@3", "tokens", "cut_off"]
    assert list(of_sums.values()) == ["sums", 2, pytest.approx(1 / 6), pytest.approx(1 / 3), 0.5, 3.0, 0.0]
    assert of_words == {
        "source": "words", "prompts": 1, "mean": 1.0, "pass@2": 1.5, "tokens": 6.0, "cut_off": pytest.approx(1 / 3)
    }  # fmt: skip
    assert (of_all["source"], of_all["prompts"], of_all["mean"]) == ("all", 3, pytest.approx(3 / 8))
    lines = table_text([of_sums, of_words]).splitlines()
    assert lines[0].split() == ["source", "prompts", "mean", "pass@2", "pass@3", "tokens", "cut_off"]
    assert lines[1].split() == ["sums", "2", "0.167", "0.333", "0.500", "3", "0"]
    assert lines[2].index("words") == lines[1].index("sums") and lines[2].index("1.50") == lines[0].index("pass@2")


def test_each_of_several_functions_has_its_mean_over_what_it_scored():
    rows = [row("s", 0, 1.0, **{"rewards/a": 1.0}), row("s", 1, 0.0, **{"rewards/a": None}), row("s", 2, 0.0)]
    (found,) = summaries([{**each, "rewards/b": 0.5} for each in rows])
    assert found["a"] == 1.0 and found["b"] == 0.5
