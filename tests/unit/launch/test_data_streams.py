from pathlib import Path

import pytest
import torch

from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.sft import SFT
from hybridflow.errors import ConfigError, DataError, Problems
from hybridflow.launch.plan import data as run_data
from hybridflow.launch.plan.data import PRETRAINING, RunData, with_precomputed
from tests.unit.data.conftest import written
from tests.unit.launch.plans import plan_of

SUMS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "level": -a} for a in range(10)]


def experiment(folder: Path, **data: object) -> Experiment:
    config = Experiment()
    config.model.path = "builtin:calculator"
    config.trainer.eval_every = 1
    config.reward.functions = ["exact_match"]
    settings = {"train_files": [written(folder / "sums.jsonl", SUMS)], "batch_size": 4, **data}
    for name, value in settings.items():
        setattr(config.data, name, value)
    return config


def load_data(config: Experiment, dataflow: str = "grpo") -> RunData:
    config.dataflow = dataflow
    if dataflow == "kto":
        config.algorithm.preference.loss = "kto"
    return run_data.load_data(plan_of(config))


def test_plain_texts_of_the_pretraining_are_a_stream_of_their_own(tmp_path):
    texts = written(tmp_path / "texts.jsonl", [{"text": f"one and {n}"} for n in range(5)])
    config = experiment(tmp_path, pretraining_files=[texts], answer_key="answer", difficulty_key="level", max_rows=4)
    data = load_data(config)
    batch = data.streams[PRETRAINING].next()
    assert len(data.streams[PRETRAINING]) == 5
    assert sorted(batch.columns) == ["data_source", "prompt", "prompt_ids", "response_ids", "response_mask", "uid"]
    lengths = zip(batch.tokens("prompt_ids").lengths, batch.tokens("response_ids").lengths, strict=True)
    assert {(int(prompt), int(response)) for prompt, response in lengths} == {(1, len("one and 1"))}


def test_a_stream_that_has_no_files_says_which_setting_names_them(tmp_path):
    streams = load_data(experiment(tmp_path)).streams
    with pytest.raises(ConfigError, match="data.pretraining_files is empty") as caught:
        streams[PRETRAINING].next()
    assert "data.pretraining_files=" in caught.value.remedy
    with pytest.raises(ConfigError, match="no stream 'pairs'") as caught:
        streams["pairs"].next()
    assert "prompts, pretraining" in caught.value.remedy


@pytest.mark.parametrize("setting", ["train_files", "eval_files", "pretraining_files"])
def test_a_missing_file_is_told_with_the_setting_that_names_it(tmp_path, setting):
    config = experiment(tmp_path, **{setting: [str(tmp_path / "sumz.jsonl")]})
    with pytest.raises(DataError, match=rf"data\.{setting}: No such file or directory: .*sumz\.jsonl") as caught:
        load_data(config)
    assert "Did you mean 'sums.jsonl'?" in caught.value.remedy


@pytest.mark.parametrize("model", ["builtin:calculator", "nowhere"])
def test_files_that_cannot_be_read_are_told_at_once_whatever_the_model(tmp_path, model):
    missing = {"train_files": ["a.jsonl", "b.jsonl"], "pretraining_files": ["c.jsonl"], "eval_files": ["d.jsonl", "e"]}
    config, problems = experiment(tmp_path, **missing), Problems(collects=True)
    config.model.path = model
    with problems.caught():
        load_data(config, "sft")
    told = [f"data.{key}: No such file or directory: '{name}'." for key, names in missing.items() for name in names]
    assert [error.message for error in problems.found][model == "nowhere" :] == told


def test_held_out_rows_are_measured_and_answered_where_both_can_be(tmp_path):
    held_out = written(tmp_path / "held_out.jsonl", SUMS[:3])
    config = experiment(tmp_path, eval_files=[held_out], max_rows=5, difficulty_key="level")
    both = load_data(config, "sft")
    config.reward.functions = []
    measured = load_data(config, "sft")
    assert both.questions is not None and len(both.questions) == 3
    assert both.held_out is not None and "response_ids" in both.held_out
    assert measured.questions is None and measured.held_out is not None
    config.data.eval_limit = 2
    first = load_data(config, "sft").held_out
    assert first is not None and first.row("uid").tolist() == [0, 1] and first.object("prompt") == ["0+1=", "1+1="]


def test_prompts_that_nothing_is_to_follow_are_only_answered(tmp_path, caplog):
    config = experiment(tmp_path, eval_files=[written(tmp_path / "asked.jsonl", [{"prompt": "1+1="}])])
    config.reward.functions = ["format"]
    data = load_data(config, "sft")
    assert data.questions is not None and data.held_out is None
    assert "are used to score responses" in caplog.text
    config.reward.functions = []
    with pytest.raises(DataError, match="no columns recognized as demonstrations"):
        load_data(config, "sft")


def test_rows_without_an_answer_are_refused_where_no_function_could_score_them(tmp_path):
    config = experiment(tmp_path, train_files=[written(tmp_path / "asked.jsonl", [{"prompt": "1+1="}] * 4)])
    with pytest.raises(DataError, match=r"4 of 4 rows have no answer.*first is row 1 of '.*asked.jsonl'") as caught:
        load_data(config)
    assert "data.answer_key" in caught.value.remedy
    config.reward.functions = ["exact_match", "format"]
    assert len(load_data(config).streams["prompts"]) == 4


OPINIONS = [{"prompt": row["prompt"], "completion": row["answer"], "label": row["level"] < -4} for row in SUMS]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in SUMS]


@pytest.mark.parametrize(("dataflow", "rows"), [("kto", OPINIONS), ("dpo", PAIRS)])
def test_held_out_rows_without_answers_are_measured_and_not_answered(tmp_path, caplog, dataflow, rows):
    file = written(tmp_path / "mine.jsonl", rows)
    data = load_data(experiment(tmp_path, train_files=[file], eval_files=[file]), dataflow)
    assert data.questions is None and data.held_out is not None and len(data.held_out) == len(rows)
    assert "data.eval_files have no reference answers, which reward.functions=[exact_match] need" in caplog.text
    some = written(tmp_path / "some.jsonl", [rows[0] | {"answer": "1"}, *rows[1:]])
    with pytest.raises(DataError, match="9 of 10 rows have no answer") as caught:
        load_data(experiment(tmp_path, train_files=[file], eval_files=[some]), dataflow)
    assert "data.answer_key" in caught.value.remedy


def test_held_out_data_of_the_hub_names_its_split_before_anything_is_read(tmp_path):
    config = experiment(tmp_path, train_files=["nowhere.jsonl"], eval_files=["openai/gsm8k"])
    with pytest.raises(ConfigError, match="data.eval_files: 'openai/gsm8k'") as caught:
        load_data(config)
    assert "openai/gsm8k?split=test" in caught.value.remedy
    config.trainer.eval_every = 0
    with pytest.raises(DataError, match=r"No such file or directory: 'nowhere.jsonl'"):
        load_data(config)


def test_entries_of_a_class_need_not_be_files_or_datasets(tmp_path):
    (tmp_path / "my.py").write_text(
        "class Sums:\n    def __init__(self, source): self.source = source\n"
        "    def __iter__(self): return iter([{'prompt': '1+1=', 'answer': '2', 'source': self.source}] * 4)\n"
    )
    files = {"train_files": ["my/train"], "eval_files": ["my/test"]}
    config = experiment(tmp_path, dataset=f"{tmp_path}/my.py:Sums", batch_size=4, **files)
    data = load_data(config)
    assert data.streams["prompts"].next().object("source") == ["my/train"] * 4
    assert data.questions is not None and data.questions.object("source") == ["my/test"] * 4
    assert not [*run_data.file_problems(config)]


def test_rows_are_read_on_demand_if_the_run_asks_for_it(tmp_path):
    in_memory, on_demand = (load_data(experiment(tmp_path, streaming=streaming)) for streaming in (False, True))
    assert on_demand.streams["prompts"].table is None and in_memory.scored_columns == on_demand.scored_columns
    for _ in range(3):
        found, expected = on_demand.streams["prompts"].next(), in_memory.streams["prompts"].next()
        assert found.objects == expected.objects and torch.equal(found.row("uid"), expected.row("uid"))


def test_a_system_prompt_that_nobody_is_shown_is_told(tmp_path, caplog):
    load_data(experiment(tmp_path, system_prompt="Add"))
    assert "set data.as_chat=true" in caplog.text


@pytest.mark.parametrize(("limit", "length", "raises"), [(8, 206, True), (8, 207, False), (120, 300, False)])
def test_a_remedy_for_long_prompts_names_no_length_that_the_model_cannot_read(tmp_path, limit, length, raises):
    long = written(
        tmp_path / "of data.train_files and data.eval_files.jsonl", [*SUMS, {"prompt": "1" * length, "answer": "1"}]
    )
    for name in ("train_files", "eval_files"):
        with pytest.raises(DataError) as caught:
            load_data(experiment(tmp_path, max_prompt_tokens=limit, max_response_tokens=50, **{name: [long]}))
        assert (f"Set data.max_prompt_tokens={length} if" in caught.value.remedy) == raises
        assert caught.value.remedy.endswith(
            "data.truncation=drop to leave out long rows (1), or =left or =right to cut them."
        )
        assert raises or "The model reads 256 tokens" in caught.value.message
        assert raises or "Set data.max_prompt_tokens=206, the most that fits" in caught.value.remedy


class Sums(SFT):
    """Precomputes columns that share memory, are not contiguous or repeat one number."""

    def precompute(self, rows):
        sums = rows.tokens("prompt_ids").row_sums()
        both = torch.stack([sums, -sums], 1)
        return {"sum": both[:, 0], "less": both[:, 1], "same": torch.ones(1).expand(len(rows))}


def test_precomputed_columns_are_kept_with_the_run_for_the_same_rows_only(tmp_path, caplog):
    def found(rows: list[dict]) -> list[torch.Tensor]:
        data = load_data(experiment(tmp_path, train_files=[written(tmp_path / "rows.jsonl", rows)]), "sft")
        table = with_precomputed(Sums({}, settings=None, samples_per_prompt=1), data, tmp_path).streams["prompts"].table
        assert torch.equal(table.row("sum"), table.tokens("prompt_ids").row_sums())
        return [table.row(name) for name in ("sum", "less", "same")]

    caplog.set_level("INFO")
    first, again = found(SUMS), found(SUMS)
    assert all(map(torch.equal, first, again)) and caplog.text.count("precomputed columns=") == 1
    found([*SUMS[1:], SUMS[0]])
    assert "computed for different data" in caplog.text
