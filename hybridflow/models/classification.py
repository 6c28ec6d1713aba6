"""Reward models: their descriptions, and sequence-classification models that `transformers` runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridflow.batch.iterate import microbatches
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError
from hybridflow.models.loading import load_pretrained, read_description
from hybridflow.models.names.rules import MODEL_TYPES
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.models.tokenizers import pad_id

_HEAD, _BIAS = "score.weight", "score.bias"
_NO_LIMIT = 1 << 30
"""Tokenizers without a maximum length have a `model_max_length` above this."""


@dataclass(frozen=True)
class RewardModelDescription:
    """A model that scores a sequence."""

    directory: Path
    labels: tuple[str, ...]
    """With one label, its logit is the score; with two, the score is the log-odds of the second."""

    max_positions: int | None
    is_decoder: bool
    """Whether it is a causal model, which computes the score at the last token."""

    is_value_model: bool
    """Whether it is a decoder with a head of one output, as in `models/heads.py`, which training engines can run.
    `transformers` has no bias in such heads, so a head with a bias was trained here."""


def describe_reward_model(directory: Path, *, key: str, trust_remote_code: bool = False) -> RewardModelDescription:
    """Describes the reward model in a directory; raises `ConfigError` if it does not compute a score.

    Reward models are the models trained here, and any `*ForSequenceClassification` with one or two labels. `key` is the
    setting that names the directory, for errors.
    """
    config = read_description(directory, trust_remote_code=trust_remote_code)
    shapes = saved_shapes(directory) if any(directory.glob("*.safetensors")) else {}
    architectures = [str(name) for name in config.architectures or []]
    if _HEAD not in shapes and not any(name.endswith("ForSequenceClassification") for name in architectures):
        found = architectures[0] if architectures else config.model_type
        raise ConfigError(
            f"{key}={directory}: {found} has no head that computes a score.",
            remedy="Train a reward model from it: hybridflow reward-model"
            f" model.path={directory}. Or name a sequence-classification model.",
        )
    hidden = config.get_text_config().to_dict().get("hidden_size")
    is_known = config.model_type in MODEL_TYPES or _BIAS in shapes
    is_value_model = is_known and shapes.get(_HEAD) == (1, hidden)
    count = int(shapes[_HEAD][0] if _HEAD in shapes else config.num_labels or 0)
    names = {int(number): str(label) for number, label in (config.id2label or {}).items()}
    labels = tuple(names.get(number, f"LABEL_{number}") for number in range(count))
    if len(labels) > 2:
        raise ConfigError(
            f"{key}={directory} has {len(labels)} labels ({', '.join(labels[:5])}): none of them is the score.",
            remedy="Give a model with one label, or with two (the score is then the log-odds of the second).",
        )
    positions = config.get_text_config().to_dict().get("max_position_embeddings")
    return RewardModelDescription(
        directory, labels, positions, is_decoder=_HEAD in shapes, is_value_model=is_value_model
    )


class Classifier:
    """An unsharded sequence-classification model of `transformers`, run on padded microbatches.

    classifier = Classifier(description, tokenizer, dtype=torch.float32, device=device, microbatch_tokens=8192)
    scores = classifier(Ragged.from_rows(ids))
    """

    def __init__(
        self,
        description: RewardModelDescription,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype,
        device: torch.device,
        microbatch_tokens: int,
        trust_remote_code: bool = False,
    ) -> None:
        self._model = load_pretrained(
            AutoModelForSequenceClassification,
            description.directory,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            key="reward.model.path",
            kind="sequence-classification model",
        )
        self._pad = pad_id(tokenizer)
        # A decoder finds the last token of a row by its configuration's padding token.
        self._model.config.get_text_config().pad_token_id = self._pad
        self._device = device
        self._budget = microbatch_tokens

    @torch.no_grad()
    def __call__(self, sequences: Ragged) -> Tensor:
        """Scores [B], float32 on the CPU: the logit of a single label, or the log-odds of the second of two."""
        scores = torch.zeros(len(sequences))
        for rows in microbatches(sequences.lengths, budget_tokens=self._budget):
            part = sequences.select(rows)
            ids = part.padded(self._pad).to(self._device)
            mask = (torch.arange(ids.shape[1]) < part.lengths[:, None]).long().to(self._device)
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float().cpu()
            scores[rows] = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return scores


def reads_same_tokens(writer: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same token ids to the same text or conversation.

    The reader may have additional tokens, such as a padding token, and need not have a chat template.
    """
    known = reader.get_vocab()
    return (
        all(known.get(token) == number for token, number in writer.get_vocab().items())
        and _segmentation(writer) == _segmentation(reader)
        and reader.chat_template in (None, writer.chat_template)
    )


def longest_input(description: RewardModelDescription, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The maximum number of its own tokens that the model can read; None if no limit is known."""
    limits = [limit for limit in (description.max_positions, tokenizer.model_max_length) if limit and limit < _NO_LIMIT]
    return min(limits, default=None)


def _segmentation(tokenizer: PreTrainedTokenizerBase) -> Sequence[object]:
    """How a tokenizer splits text, apart from its vocabulary: normalization, pre-tokenization and merges."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return [type(tokenizer).__name__]
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {name: value for name, value in parts["model"].items() if name != "vocab"}
    return [parts["normalizer"], parts["pre_tokenizer"], model]
