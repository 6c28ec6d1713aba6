"""The norm of the Llama family."""

from megatron.core.transformer import TransformerConfig
from torch import nn


class RmsNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv:1910.07467) whose gradient Megatron-Core sums over ranks that divide the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
