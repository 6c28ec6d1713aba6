"""Files become batches: read `prompts.py` for the path of a row, `loader.py` for the order of rows in a run."""

from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.loader import PromptLoader, eval_batches
from hybridflow.data.prompts import load_prompts

__all__ = ["PromptLoader", "eval_batches", "load_demonstrations", "load_prompts"]
