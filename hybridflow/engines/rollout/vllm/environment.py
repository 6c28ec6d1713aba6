"""Environment variables that vLLM reads when it is imported. Variables that the user has set take precedence."""

import logging
import os

import torch

from hybridflow.optional import require

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, where the weights are
    "VLLM_CONFIGURE_LOGGING": "0",  # our handlers stay the only ones
    "VLLM_NO_USAGE_STATS": "1",
}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind"  # would pin training's threads as well
}


def import_vllm(device: torch.device) -> None:
    """Imports vLLM (seconds) with the settings that an engine inside a training process needs.

    Raises `MissingExtraError` if it is not installed.
    """
    settings = _ALWAYS | (_ON_CPU if device.type == "cpu" else {})
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # vLLM logs its whole configuration at INFO, and choices that we make at WARNING.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper())
    require("vllm")
