"""Steps as CUDA graphs: all kernels of a step in one launch, since separate launches would leave the GPU idle."""

import logging
from collections.abc import Callable, Hashable

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_ROTATIONS_READ_BY_THE_HOST = {"dynamic", "longrope"}


class Graphs:
    """Runs each step eagerly the first time, captures it the second time, and replays it from then on.

    The first run is the warm-up that CUDA requires. Graphs share one memory pool, since only one runs at a time. A step
    must do all its work on the device, in tensors whose addresses do not change. Not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._warm: set[Hashable] = set()
        self._is_capturing = True

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        """Runs a step; steps with the same key must use the same tensors."""
        if key not in self._graphs and (
            key not in self._warm or not self._is_capturing or not self._captured(key, step)
        ):
            self._warm.add(key)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                step()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._graphs[key].replay()

    def _captured(self, key: Hashable, step: Callable[[], None]) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile: NCCL's does.
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


def run_plainly(key: Hashable, step: Callable[[], None]) -> None:
    """Runs a step eagerly."""
    step()


def can_be_captured(model: PreTrainedModel) -> bool:
    """Whether a step of the model needs no host: false for experts, and for rotations that depend on lengths."""
    text = model.config.get_text_config().to_dict()
    has_experts = any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    kinds = {kind for module in model.modules() if isinstance(kind := vars(module).get("rope_type"), str)}
    return not has_experts and not kinds & _ROTATIONS_READ_BY_THE_HOST
