"""What the driver itself holds of the data."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.experiment import Experiment
from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.loader import PromptLoader, eval_batches
from hybridflow.data.prompts import load_prompts
from hybridflow.dataflows.interface import Dataflow
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.launch.roles import is_evaluated, policy_model
from hybridflow.models.tokenizers import decode_responses, load_tokenizer


@dataclass(frozen=True)
class DrivenData:
    """What the driver itself holds: the training stream, the held-out prompts, and how tokens become text."""

    loader: PromptLoader
    held_out: Batch | None
    tokenizer: PreTrainedTokenizerBase
    judged_columns: list[str]
    """Columns of all that reward functions will see."""

    def decode(self, ids: Ragged) -> list[str]:
        """Texts of token ids, one a row."""
        return decode_responses(self.tokenizer, ids)


def load_data(config: Experiment, dataflow: type[Dataflow]) -> DrivenData:
    """Reads and checks all data files; raises before any process is started."""
    model = policy_model(config)
    tokenizer = load_tokenizer(tokenizer_directory(model), pad_token=model.pad_token)
    is_imitation = dataflow.data == "demonstrations"
    load = load_demonstrations if is_imitation else load_prompts
    loader = PromptLoader(
        load(config.data.train_files, config.data, tokenizer),
        config.data.batch_size,
        seed=config.trainer.seed,
        shuffle=config.data.shuffle,
    )
    judged = [] if is_imitation else [loader.columns]
    held_out = None
    if is_evaluated(config):
        table = load_prompts(config.data.eval_files, config.data, tokenizer)
        held_out = next(iter(eval_batches(table, len(table), limit=config.data.eval_limit)))
        judged.append([*held_out.columns])
    common = [name for name in judged[0] if all(name in columns for columns in judged)] if judged else []
    return DrivenData(loader, held_out, tokenizer, common)
