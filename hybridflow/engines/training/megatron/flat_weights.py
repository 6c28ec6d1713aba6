"""The distributed optimizer's flat buffer of weights, there during an optimizer step alone."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


class FlatWeights:
    """Weights stay in tensors of their own, and can be views of the rollout's; the buffer is filled for a step.

    Megatron-Core moves all weights into one buffer, in which ranks exchange the ranges that each has moved. Here the
    weights are given their own tensors back, the buffer's memory is freed, and taken again for each step: the largest
    cost is one more copy of this rank's weights during the step, and none while the rollout generates. Without the
    distributed optimizer there is no buffer and nothing to do.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel], own: Mapping[nn.Parameter, Tensor]) -> None:
        self._buffers = [
            buffer
            for module in modules
            for buffer in (*vars(module)["buffers"], *module.expert_parallel_buffers)
            if buffer.param_data is not None
        ]
        self._flat = {parameter: parameter.data for buffer in self._buffers for parameter in buffer.params}
        self._bytes = [buffer.param_data.untyped_storage().nbytes() for buffer in self._buffers]
        for parameter in self._flat:
            parameter.data = own[parameter]
        self._free()

    @torch.no_grad()
    def fill(self) -> None:
        """Takes the memory, and copies the weights that the optimizer moves in place: those in float32."""
        for buffer, size in zip(self._buffers, self._bytes, strict=True):
            buffer.param_data.untyped_storage().resize_(size)
        for parameter, flat in self._flat.items():
            if parameter.dtype is torch.float32:
                flat.copy_(parameter)

    def target(self, parameter: nn.Parameter) -> Tensor:
        """Where the values that the optimizer has found for a parameter go: the buffer, or the parameter itself."""
        return self._flat.get(parameter, parameter).detach()

    @torch.no_grad()
    def empty(self) -> None:
        """Copies the moved weights into their own tensors, and frees the memory."""
        if self._flat:
            torch._foreach_copy_([parameter.data for parameter in self._flat], [*self._flat.values()])
        self._free()

    def _free(self) -> None:
        for buffer in self._buffers:
            buffer.param_data.untyped_storage().resize_(0)
