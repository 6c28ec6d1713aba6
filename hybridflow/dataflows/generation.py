"""Responses to prompts as rows: the columns of the prompts' file, and what was generated."""

from collections.abc import Callable, Iterable, Mapping

import torch

from hybridflow.batch import Batch
from hybridflow.dataflows.evaluation import Decode
from hybridflow.dataflows.roles import Sampler

Row = dict[str, object]
Write = Callable[[list[Row]], None]
"""Writes the rows of one part."""

_ANSWERED = ("prompt_ids", "uid")
_OWN = ("response", "responses", "tokens", "is_cut_off", "uid", "prompt_text", "response_ids")
"""Columns of a row that are written here."""


def generate_responses(
    rollout: Sampler,
    parts: Iterable[Batch],
    *,
    samples_per_prompt: int,
    ranks: int,
    rows_of: Callable[[Batch, Batch], list[Row]],
    write: Write,
    done: int = 0,
) -> None:
    """Samples responses to prompts and writes them, one part after the other; the first `done` prompts are skipped.

    A part of fewer prompts than `ranks` is filled up with copies of its last one, whose responses are not used.
    """
    for part in parts:
        skipped = min(done, len(part))
        done -= skipped
        prompts = part.slice(skipped, len(part))
        if len(prompts) == 0:
            continue
        filled = torch.arange(max(len(prompts), ranks)).clamp(max=len(prompts) - 1)
        asked = prompts.only(_ANSWERED).select(filled).repeat(samples_per_prompt)
        answered = rollout.generate(asked, purpose="eval").fetch(["response_ids", "truncated"])
        write(rows_of(prompts, answered.slice(0, len(prompts) * samples_per_prompt)))


def rows_of_responses(
    prompts: Batch, answered: Batch, decode: Decode, *, token_ids: bool, by_prompt: bool
) -> list[Row]:
    """A row for each response, or for each prompt with lists of its responses.

    `prompts` has the columns of its file as `written`; one that has the name of a generated column is called
    `given_<name>`. The text that the model read, without special tokens, is `prompt_text`, unless it is the prompt
    itself.
    """
    ids = answered.tokens("response_ids")
    texts, cut = decode(ids), answered.row("truncated").tolist()
    found: list[Row] = []
    for text, tokens, is_cut in zip(texts, ids.rows(), cut, strict=True):
        found.append({"response": text, "tokens": len(tokens), "is_cut_off": bool(is_cut)})
        found[-1] |= {"response_ids": tokens.tolist()} if token_ids else {}
    rows: list[Row] = []
    asked = [_of_prompt(*row) for row in zip(
        prompts.object("prompt"), prompts.object("answer"), prompts.object("data_source"), prompts.object("written"),
        decode(prompts.tokens("prompt_ids")), prompts.row("uid").tolist(), strict=True,
    )]  # fmt: skip
    each = len(found) // len(asked)
    for place, first in enumerate(asked):
        samples = found[place * each : (place + 1) * each]
        if by_prompt:
            rows.append(first | {_PLURAL.get(name, name): [sample[name] for sample in samples] for name in samples[0]})
        else:
            rows += [first | sample for sample in samples]
    return rows


_PLURAL = {"response": "responses"}
"""Names of lists; `responses` as verl writes it."""


def _of_prompt(
    prompt: object, answer: object, source: object, written: Mapping[str, object], text: str, uid: int
) -> Row:
    row: Row = {"prompt": prompt}
    row |= {f"given_{name}" if name in _OWN else name: value for name, value in written.items()}
    row |= {"data_source": source} | ({} if answer is None or "answer" in written else {"answer": answer})
    return row | ({} if text == prompt else {"prompt_text": text}) | {"uid": uid}
