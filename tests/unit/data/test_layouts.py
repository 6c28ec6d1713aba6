"""Public layouts: one row of each, written here in the layout of the data set, and what is trained on."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.data import load_demonstrations, load_labeled, load_preferences, load_prompts
from hybridflow.errors import DataError
from tests.unit.data.conftest import texts, written

LAYOUTS = Path(__file__).parent / "layouts"
SUM = "<bos>How much is 2 and 2?"
CHAT = "[user:How much is 2 and 2?]<eos>[assistant:"
STORY = "<bos>Ann has 2 figs. She gets 2 more. How many figs does she have?"


@dataclass
class Form:
    """What a loader makes of the first row of a file."""

    file: str
    load: object
    said: str
    prompt: str
    responses: list[str] = field(default_factory=list)
    answer: object = None


FORMS = [
    Form("gsm8k.jsonl", load_prompts, "format=GSM8K", SUM, answer="2 + 2 = <<2+2=4>>4\n#### 4"),
    Form("gsm8k.jsonl", load_demonstrations, "format=question,answer", SUM, ["2 + 2 = <<2+2=4>>4\n#### 4<eos>"]),
    Form("math.jsonl", load_prompts, "format=MATH", SUM, answer="It is $\\boxed{4}$."),
    Form("dapo_math_17k.jsonl", load_prompts, "format=verl", CHAT, answer="4"),
    Form("hh_rlhf.jsonl", load_preferences, "format=hh_texts", "<bos>\n\nHuman: How much is 2 and 2?\n\nAssistant:",
         [" It is 4.<eos>", " Nobody knows.<eos>"]),
    Form("hh_rlhf.jsonl", load_prompts, "format=HH", "<bos>\n\nHuman: How much is 2 and 2?\n\nAssistant:"),
    Form("ultrafeedback_binarized.jsonl", load_preferences, "format=conversations", CHAT, ["4]<eos>", "5]<eos>"]),
    Form("ultrafeedback_binarized.jsonl", load_demonstrations, "format=messages", CHAT, ["4]<eos>"]),
    Form("ultrafeedback_binarized.jsonl", load_prompts, "format=DeepSpeed-Chat", SUM),
    Form("ultrachat_200k.jsonl", load_demonstrations, "format=messages", CHAT,
         ["4]<eos>[user:Sure?]<eos>[assistant:Yes.]<eos>"]),
    Form("ultrachat.jsonl", load_demonstrations, "format=UltraChat", CHAT,
         ["4]<eos>[user:Sure?]<eos>[assistant:Yes.]<eos>"]),
    Form("sharegpt.jsonl", load_demonstrations, "format=ShareGPT", "[system:Be short.]<eos>" + CHAT,
         ["add(2,2)]<eos>[tool:4]<eos>[assistant:4]<eos>"]),
    Form("sharegpt.jsonl", load_prompts, "format=ShareGPT",
         "[system:Be short.]<eos>[user:How much is 2 and 2?]<eos>[assistant:add(2,2)]<eos>[tool:4]<eos>[assistant:",
         answer="4"),
    Form("sharegpt_preferences.jsonl", load_preferences, "format=ShareGPT", CHAT, ["4]<eos>", "5]<eos>"]),
    Form("open_assistant.jsonl", load_demonstrations, "format=OpenAssistant", CHAT,
         ["4]<eos>[user:Sure?]<eos>[assistant:Yes.]<eos>"]),
    Form("alpaca.jsonl", load_demonstrations, "format=Alpaca", "<bos>Add the numbers.\n\n2, 2", ["4<eos>"]),
    Form("alpaca.jsonl", load_prompts, "format=Alpaca", "<bos>Add the numbers.\n\n2, 2"),
    Form("dolly.jsonl", load_demonstrations, "format=Dolly", "<bos>Add the numbers.\n\n2, 2", ["4<eos>"]),
    Form("tulu_3_sft.jsonl", load_demonstrations, "format=messages", CHAT, ["4]<eos>"]),
    Form("kto_mix.jsonl", load_labeled, "format=prompt,completion,label", CHAT, ["4]<eos>"]),
    Form("svamp.jsonl", load_prompts, "format=SVAMP", STORY, answer=4),
    Form("svamp.jsonl", load_demonstrations, "format=SVAMP", STORY, ["4<eos>"]),
    Form("numina_math.jsonl", load_prompts, "format=MATH", SUM, answer="It is $\\boxed{4}$."),
    Form("numina_math.jsonl", load_demonstrations, "format=messages", CHAT, ["It is $\\boxed{4}$.]<eos>"]),
    Form("openr1_math.jsonl", load_prompts, "format=MATH", SUM, answer="4"),
    Form("openr1_math.jsonl", load_demonstrations, "format=messages", CHAT, ["<think>2+2</think> 4]<eos>"]),
    Form("skywork_reward.jsonl", load_preferences, "format=conversations", CHAT, ["4]<eos>", "5]<eos>"]),
]  # fmt: skip


def responses(batch: Batch, tokenizer) -> list[str]:
    columns = [name for name in ("response_ids", "chosen_ids", "rejected_ids") if name in batch]
    return [texts(tokenizer, batch.tokens(name).rows())[0] for name in columns]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.file}-{form.load.__name__}")
def test_the_forms_of_public_data_sets_are_recognized_and_named_in_one_line(form, chat_tokenizer, caplog):
    caplog.set_level("INFO", logger="hybridflow")
    path = str(LAYOUTS / form.file)
    batch = form.load([path], Data(), chat_tokenizer)
    assert texts(chat_tokenizer, batch.tokens("prompt_ids").rows())[0] == form.prompt
    assert responses(batch, chat_tokenizer) == form.responses
    assert (batch.object("answer")[0] if "answer" in batch else None) == form.answer
    (said,) = [record.getMessage() for record in caplog.records if "read_as=" in record.getMessage()]
    assert f"data={path} rows=" in said and f" {form.said} " in said


def test_every_file_of_a_layout_is_tested():
    assert {path.name for path in LAYOUTS.iterdir()} == {form.file for form in FORMS}


def test_a_column_that_prompt_key_names_may_have_the_turns_of_sharegpt(tmp_path, chat_tokenizer):
    row = json.loads((LAYOUTS / "sharegpt.jsonl").read_text().splitlines()[0])
    path = written(tmp_path / "a.jsonl", [{"turns": row["conversations"][:1], "conversations": "about sums"}])
    batch = load_prompts([path], Data(prompt_key="turns"), chat_tokenizer)
    assert texts(chat_tokenizer, batch.tokens("prompt_ids").rows()) == [CHAT]


@pytest.mark.parametrize(
    ("row", "key", "layout"),
    [
        ({"Body": "Two apples.", "Question": "How many?"}, "Question", "SVAMP"),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "instruction", "Alpaca"),
        ({"instruction": "Say yes", "input": "", "output": "yes"}, "instruction", None),
        ({"Body": "Two apples.", "Question": "How many?", "whole": "Two apples. How many?"}, "whole", None),
    ],
)
def test_a_prompt_key_that_leaves_out_a_part_of_the_prompts_is_warned_of(
    tmp_path, chat_tokenizer, caplog, row, key, layout
):
    load_prompts([written(tmp_path / "a.jsonl", [row])], Data(prompt_key=key), chat_tokenizer)
    assert (f"data.prompt_key=null (the layout {layout} is recognized)" in caplog.text) is (layout is not None)
    assert ("look like parts of the prompt" in caplog.text) is (layout is not None)


def test_a_reply_to_a_message_that_is_missing_is_an_error(tmp_path, chat_tokenizer):
    rows = [json.loads(line) for line in (LAYOUTS / "open_assistant.jsonl").read_text().splitlines()]
    path = written(tmp_path / "a.jsonl", rows[1:])
    with pytest.raises(DataError, match=r"row 3 of '.*a.jsonl' answers the message m1.*whole trees"):
        load_demonstrations([path], Data(), chat_tokenizer)


def test_files_of_different_forms_are_each_recognized(chat_tokenizer, caplog):
    caplog.set_level("INFO", logger="hybridflow")
    files = [str(LAYOUTS / name) for name in ("gsm8k.jsonl", "svamp.jsonl", "alpaca.jsonl", "ultrachat_200k.jsonl")]
    batch = load_prompts(files, Data(), chat_tokenizer)
    assert [said for said in ("GSM8K", "SVAMP", "Alpaca", "trl_prompt") if f"format={said} " in caplog.text] == [
        "GSM8K", "SVAMP", "Alpaca", "trl_prompt"
    ]  # fmt: skip
    assert batch.object("data_source") == ["gsm8k"] * 2 + ["svamp", "alpaca", "ultrachat_200k"]
