"""Steps as CUDA graphs, which launch all kernels of a step at once; separate launches would leave the GPU idle."""

import logging
from collections.abc import Callable, Hashable

import torch
from transformers import PreTrainedModel

from hybridflow.models.packed_attention import length_dependent_rotations

logger = logging.getLogger(__name__)


class Graphs:
    """Runs each step eagerly the first time, captures it the second time, and then replays it.

    The first run is the warm-up that CUDA requires. Graphs share one memory pool, since only one runs at a time. A step
    must do all its work on the device, in tensors whose addresses do not change.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._warm: set[Hashable] = set()
        self._is_capturing = True

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        """Runs a step; steps with the same key must use the same tensors."""
        if key in self._graphs or (key in self._warm and self._is_capturing and self._captured(key, step)):
            self._graphs[key].replay()
            return
        self._warm.add(key)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _captured(self, key: Hashable, step: Callable[[], None]) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, may use CUDA during the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            self._is_capturing = False
            logger.warning(
                "rollout.engine=transformers: this model cannot be captured as a CUDA graph, so decoding is slower: %s",
                str(error).partition("\n")[0],
            )
            return False
        self._graphs[key] = graph
        return True


def run_eagerly(key: Hashable, step: Callable[[], None]) -> None:
    """Runs a step eagerly."""
    step()


def can_be_captured(model: PreTrainedModel) -> bool:
    """Whether a step of the model runs without the host: false with experts, and with length-dependent rotations."""
    text = model.config.get_text_config().to_dict()
    has_experts = any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return not has_experts and not length_dependent_rotations(model)
