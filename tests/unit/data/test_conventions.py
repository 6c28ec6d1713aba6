"""Data as other systems write it, from file to batch: for prompts and for demonstrations."""

import gzip
import json
import logging
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.config.data import Data
from hybridflow.data import load_demonstrations, load_prompts
from hybridflow.models.tokenizers import load_tokenizer

USER, REPLY = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
GSM8K = "It is 1+1.\n#### 2"
DIALOGUE = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: so?\n\nAssistant:"


def written(folder, name, row):
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    elif ".jsonl" in name:
        content = 2 * (json.dumps(row) + "\n")
        path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    else:
        path.write_text(json.dumps([row, row]))
    return str(path)


VERL = {
    "data_source": "openai/gsm8k", "prompt": [USER], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
}  # fmt: skip
SKYRL = {"data_source": "gsm8k", "prompt": [USER], "reward_spec": {"method": "rule", "ground_truth": "2"}}


@pytest.mark.parametrize(
    ("name", "row", "layout", "prompt", "beside"),
    [
        ("trl.jsonl", {"prompt": "1+1=", "solution": "2"}, "trl_prompt", "1+1=", ("2", "trl")),
        ("trl.parquet", {"prompt": [USER], "answer": "2"}, "trl_prompt", [USER], ("2", "trl")),
        ("verl.parquet", VERL, "verl", [USER], ("2", "openai/gsm8k")),
        ("skyrl.parquet", SKYRL, "SkyRL", [USER], ("2", "gsm8k")),
        ("open.jsonl", {"input": "1+1=", "label": "2"}, "OpenRLHF", "1+1=", ("2", "open")),
        ("slime.jsonl.gz", {"prompt": [USER], "label": "2", "metadata": {}}, "trl_prompt", [USER], ("2", "slime")),
        ("gsm8k.json", {"question": "1+1?", "answer": GSM8K}, "GSM8K", "1+1?", (GSM8K, "gsm8k")),
        ("ds.json", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "DeepSpeed-Chat", "1+1=", (None, "ds")),
        ("chat.jsonl", {"messages": [USER, REPLY]}, "messages", [USER], ("2", "chat")),
        ("hh.jsonl", {"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b"}, "HH", DIALOGUE, (None, "hh")),
    ],
)
def test_prompts_of_other_systems(tmp_path, chat_tokenizer, caplog, name, row, layout, prompt, beside):
    caplog.set_level(logging.INFO, logger="hybridflow")
    batch = load_prompts([written(tmp_path, name, row)], Data(), chat_tokenizer)
    assert batch.object("prompt") == [prompt, prompt]
    assert list(zip(batch.object("answer"), batch.object("data_source"), strict=True)) == [beside, beside]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"rows=2 recognised={layout} prompt=" in line


@pytest.mark.parametrize(
    ("name", "row", "prompt", "completion"),
    [
        ("trl.jsonl", {"prompt": "1+1=", "completion": "2"}, "1+1=", "2"),
        ("trl.parquet", {"prompt": [USER], "completion": [REPLY]}, "[user:1+1=?]<eos>[assistant:", "2]"),
        ("chat.parquet", {"messages": [USER, REPLY]}, "[user:1+1=?]<eos>[assistant:", "2]"),
        ("text.jsonl.gz", {"text": "Once"}, "", "Once"),
        ("open.jsonl", {"input": "1+1=", "output": "2"}, "1+1=", "2"),
        ("alpaca.json", {"instruction": "Add", "input": "1 1", "output": "2"}, "Add\n\n1 1", "2"),
        ("alpaca.json", {"instruction": "Wait", "input": "", "output": "2"}, "Wait", "2"),
        ("gsm8k.json", {"question": "1+1?", "answer": GSM8K}, "1+1?", GSM8K),
        ("ds.json", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1=", "2"),
        ("hh.jsonl", {"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b"}, DIALOGUE, " a"),
        ("trl.jsonl", {"chosen": [USER, REPLY], "rejected": [USER]}, "[user:1+1=?]<eos>[assistant:", "2]"),
    ],
)
def test_demonstrations_of_other_systems(tmp_path, chat_tokenizer, name, row, prompt, completion):
    batch = load_demonstrations([written(tmp_path, name, row)], Data(), chat_tokenizer)
    columns = [batch.tokens(column).row(0).tolist() for column in ("prompt_ids", "response_ids")]
    found = ["".join(chat_tokenizer.convert_ids_to_tokens(ids)) for ids in columns]
    assert [text.removeprefix("<bos>").removesuffix("<eos>") for text in found] == [
        prompt.removesuffix("<eos>"), completion
    ]  # fmt: skip


@pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
@pytest.mark.parametrize(
    ("file", "rows"), [("tinystories/tinystories_1000.json", 1000), ("hh-rlhf/harmless-base-test.jsonl.gz", 2308)]
)
def test_real_texts_are_demonstrations(file, rows):
    assets = Path(os.environ["HYBRIDFLOW_ASSETS"])
    tokenizer = load_tokenizer(assets / "models" / "stories260K", pad_token="</s>")
    config = Data(max_prompt_tokens=4000, max_response_tokens=4000)
    batch = load_demonstrations([str(assets / "data" / file)], config, tokenizer)
    assert len(batch) == rows  # 4 of 2,312 dialogues end with a blank reply
    assert bool((batch.tokens("response_mask").values == 1).all())
