"""Tokenizers of twelve model families: their chat templates and special tokens, with a small byte-level vocabulary."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[2] / "chat_templates"
CORPUS = ("The maze has a door. Go north, then south.", "guess 50: lower or higher?\n\n", '{"name": "add", "a": 12}')


@dataclass(frozen=True)
class Family:
    """The special tokens of a family, and how its template continues a conversation."""

    name: str
    end: str
    continuation: str
    begin: str | None = None
    further: tuple[str, ...] = ()
    detail: str = ""
    drops_thoughts: bool = False


_BAR, _LOW = "\uff5c", "\u2581"
_IM = ("<|im_start|>", "<|endoftext|>")
FAMILIES = {
    family.name: family
    for family in (
        Family("llama2", "</s>", "append", "<s>"),
        Family("llama3", "<|eot_id|>", "append", "<|begin_of_text|>", ("<|start_header_id|>", "<|end_header_id|>")),
        Family("qwen2_5", "<|im_end|>", "bridge", None, _IM, detail=r"'\n'"),
        Family("qwen3", "<|im_end|>", "bridge", None, (*_IM, "<think>", "</think>"), r"'\n'", drops_thoughts=True),
        Family("mistral", "</s>", "append", "<s>", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]")),
        Family("gemma3", "<end_of_turn>", "bridge", "<bos>", ("<start_of_turn>",), r"'\n'"),
        Family("phi3_5", "<|end|>", "bridge", None, ("<|user|>", "<|assistant|>", "<|endoftext|>"), r"'\n'"),
        Family(
            "deepseek_v3",
            f"<{_BAR}end{_LOW}of{_LOW}sentence{_BAR}>",
            "append",
            f"<{_BAR}begin{_LOW}of{_LOW}sentence{_BAR}>",
        ),
        Family("gemma4", "<turn|>", "bridge", "<bos>", ("<|turn>", "<|tool_response>"), r"'\n'"),
        Family("lfm2", "<|im_end|>", "bridge", "<|startoftext|>", _IM[:1], r"'\n'"),
        Family("smollm2", "<|im_end|>", "bridge", "<|im_start|>", (), r"'\n'"),
        Family("chatml", "<|im_end|>", "bridge", None, _IM, r"'\n'"),
    )
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """The family's tokenizer, whose vocabulary is trained on a few sentences."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")  # as the tokenizers of Llama 3 and Qwen do
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS * 9, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    special = dict.fromkeys([family.end, *family.further, *([family.begin] if family.begin else [])])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.end, pad_token=family.end, bos_token=family.begin
    )
    fast.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return fast


def end_id(name: str) -> int:
    """The token that ends a turn."""
    found = tokenizer_of(name).convert_tokens_to_ids(FAMILIES[name].end)
    assert isinstance(found, int), f"{name}: {found!r}"
    return found
