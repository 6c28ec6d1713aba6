"""The token ids with which verl 0.9.1 continues conversations; run by that environment's Python.

    .peers/verl/bin/python benchmarks/peers/verl_tokens.py tests/parity/peers/verl_tokens.json

The tokenizers are those of `tests/unit/environments/families.py`. The file holds the conversations as well.
"""

import json
import sys
from pathlib import Path

import verl
from jinja2.exceptions import TemplateError
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.unit.environments.families import FAMILIES, tokenizer_of

Message = dict[str, object]
Turn = tuple[str | Message, list[Message]]
"""A reply, as text or with a message of its own, and the messages that follow it."""

MODEL_TYPES = {
    "llama2": "llama",
    "llama3": "llama",
    "qwen2_5": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "gemma3": "gemma3_text",
    "phi3_5": "phi3",
    "deepseek_v3": "deepseek_v3",
    "gemma4": "gemma4",
    "lfm2": "lfm2",
    "smollm2": "llama",
    "chatml": "llama",
}
"""`model_type` in the config.json of a family, by which verl chooses its rules."""

TOOL_FAMILIES = ("qwen2_5", "qwen3", "mistral")
"""Their templates show tool calls in a form that hybridflow parses."""

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def called(count: int) -> Turn:
    """A reply with tool calls, and their results."""
    calls = [
        {"id": f"call{index:05}", "type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
        for index in range(count)
    ]
    text = "\n".join([CALL] * count)
    results = [
        {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": f"result {index}"}
        for index, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, "text": text}, results


CONVERSATIONS: dict[str, tuple[list[Message], list[Turn], list[dict]]] = {
    "turns": ([user("Go north.")], [("then south", [user("a door")]), ("the maze", [user("lower\n")])], []),
    "system": (
        [{"role": "system", "content": "Be brief."}, user("guess 50")],
        [("higher", [user("no")]), ("lower", [user("yes")])],
        [],
    ),
    "cut off": ([user("Go north.")], [("then sou", [user("a door")])], []),
    "thought": ([user("guess 50")], [("<think>\nlower\n</think>\n\nhigher", [user("no")])], []),
    "tool": ([user("12+12?")], [called(1), ("24", [user("12+12?")])], [TOOL]),
    "tools": ([user("12+12?")], [called(2)], [TOOL]),
}


def main() -> None:
    """Writes all results to the file that the command line names."""
    found = {
        family: {
            name: continued(family, name)
            for name, (*_, tools) in CONVERSATIONS.items()
            if not tools or family in TOOL_FAMILIES
        }
        for family in FAMILIES
    }
    text = json.dumps({"verl": verl.__version__, "families": found}, separators=(",", ":"), ensure_ascii=True)
    Path(sys.argv[1]).write_text(text + "\n")


def continued(family: str, name: str) -> dict[str, object]:
    """A conversation: its first prompt, and what verl appends after each reply; or why it refuses."""
    messages, turns, tools = CONVERSATIONS[name]
    tokenizer = tokenizer_of(family)
    result: dict[str, object] = {"messages": messages, "tools": tools, "turns": []}
    try:
        builder = create_continuous_token_builder(tokenizer, hf_model_type=MODEL_TYPES[family])
        ids = builder.build_initial_tokens(messages, tools=tools or None)
        result["prompt_ids"] = ids
        for reply, following in turns:
            message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply, "text": reply}
            end = [] if name == "cut off" else [tokenizer.convert_tokens_to_ids(FAMILIES[family].end)]
            reply_ids = [*tokenizer.encode(message["text"], add_special_tokens=False), *end]
            message = {key: value for key, value in message.items() if key != "text"}
            ids = builder.merge_assistant_tokens(ids, reply_ids).token_ids
            before = [*messages, message]
            merged = builder.merge_context_tokens(before, [*before, *following], ids, tools=tools or None)
            assert merged.token_ids[: len(ids)] == ids, "verl has changed the tokens so far"
            added = merged.token_ids[len(ids) :]
            turn = {"message": message, "reply_ids": reply_ids, "messages": following, "added_ids": added}
            result["turns"].append(turn)
            messages, ids = [*before, *following], merged.token_ids
    except (ValueError, TemplateError) as error:
        result["refused"] = f"{type(error).__name__}: {error}"
    return result


if __name__ == "__main__":
    main()
