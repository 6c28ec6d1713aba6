"""Hugging Face causal language models: finds them by name or path, loads them, and saves them to a directory."""

import difflib
import logging
import math
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Dtype
from hybridflow.config.paths import builtin_path, user_path
from hybridflow.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_OURS = ["original/*", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot"]
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_LONGEST_REASON = 400
Head = Literal["language", "value"]
_ARCHITECTURES = {
    "language": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "value": MODEL_MAPPING_NAMES | MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


@dataclass
class _Quiet:
    """The output of transformers before the first of several overlapping blocks hid it; the last one restores it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: int = 0
    verbosity: int = 0
    has_bars: bool = False


_QUIET = _Quiet()
_DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def torch_dtype(dtype: Dtype | None) -> torch.dtype:
    """The torch dtype of a configured one; None is float32."""
    return _DTYPES[dtype or Dtype.float32]


def resolve_tokenizer_path(path: str, *, key: str = "model.tokenizer_path") -> Path:
    """The directory of a tokenizer's path, which may hold a model as well; otherwise like `resolve_model_path`."""
    directory = user_path(path, key=key)
    if any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return directory.resolve()
    return resolve_model_path(path, key=key)


def resolve_model_path(path: str, *, key: str = "model.path") -> Path:
    """The directory of a model's path: `builtin:<name>`, a directory, or a name on the Hugging Face hub.

    `key` is the setting of the path, for errors.
    """
    if not path:
        raise ConfigError(f"{key} is empty.", remedy="Give a Hugging Face directory, or builtin:calculator.", key=key)
    if path.startswith("builtin:"):
        return builtin_path(path)
    directory = user_path(path, key=key)
    if (directory / "config.json").is_file():
        return directory.resolve()
    if directory.exists():
        raise EngineError(
            f"{key}={path} has no config.json, so it is not a Hugging Face model directory.", remedy=_nearest(directory)
        )
    if not is_hub_name(path):
        raise EngineError(f"{key}={path} does not exist.", remedy=_nearest(directory))
    return _from_hub(path, key)


def is_hub_name(path: str) -> bool:
    """Whether a text has the form of a name on the Hugging Face Hub, `OWNER/NAME`."""
    return _HUB_NAME.fullmatch(path) is not None


def read_description(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration in a model directory, read by transformers; raises `EngineError` if it cannot be read."""
    try:
        read_json_object(directory / "config.json")
        with quiet_transformers():
            return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers checks little, and fails in as many ways as a file can be wrong
        raise EngineError(
            f"The model's description in {directory} cannot be read: {one_line(error)}.",
            remedy=_remedy(error, "It must hold the config.json of a model that transformers knows."),
        ) from error


def one_line(error: Exception) -> str:
    """A library's error message in one line, with the error's type unless the message reads well without it."""
    words = " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".")
    return words if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {words}"


def load_causal_lm(
    directory: Path, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads the causal language model in a directory, in evaluation mode; a missing weight is an error.

    Parameters are new, aligned tensors instead of views of the mapped file: results must not depend, even in the last
    bit, on a weight's position in a file.
    """
    return load_pretrained(
        AutoModelForCausalLM, directory, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )


def load_backbone(
    directory: Path, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads the model without its language head: token ids in, hidden states out."""
    key = "model.path (for a critic, critic.model.path)"
    return load_pretrained(
        AutoModel, directory, dtype=dtype, device=device, trust_remote_code=trust_remote_code, key=key
    )


def load_pretrained(
    factory: type[AutoModel] | type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification],
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool,
    key: str = "model.path",
    kind: str = "causal language model",
) -> PreTrainedModel:
    """Loads and checks the model in a directory, in evaluation mode; `key` and `kind` describe it in errors."""
    try:
        with quiet_transformers():
            loaded = factory.from_pretrained(
                directory,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers checks little, and fails in as many ways as a file can be wrong
        needed = f"{key} must hold config.json and the weights of a {kind} (model.safetensors)."
        raise EngineError(
            f"The model in {directory} cannot be loaded: {one_line(error)}.", remedy=_remedy(error, needed)
        ) from error
    model, loading = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    if loading["missing_keys"]:
        names = sorted(loading["missing_keys"])
        raise EngineError(
            f"The model in {directory} lacks {len(names)} weights of its config.json, first '{names[0]}'.",
            remedy=f"Give a complete Hugging Face directory as {key}.",
        )
    if loading["unexpected_keys"] and factory is not AutoModel:
        names = sorted(loading["unexpected_keys"])
        logger.warning("model=%s has %d weights that it does not use (first: %s)", directory, len(names), names[0])
    for name, weight in model.named_parameters():
        check_finite(name, weight, directory)
    nn.Module.to(model, device)
    _own_memory(model)
    if model.can_generate():
        _mend_generation_config(cast(GenerationConfig, model.generation_config))
    return model.eval()


def save_causal_lm(model: PreTrainedModel, directory: Path, *, tokenizer_from: Path) -> None:
    """Writes `config.json`, `model.safetensors` and the tokenizer's files, for `transformers` to load."""
    directory.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(directory)
    copy_tokenizer(tokenizer_from, directory)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files and chat templates from one model directory to another."""
    for pattern in _TOKENIZER_FILES:
        for found in source.glob(pattern):
            copy = shutil.copytree if found.is_dir() else shutil.copyfile
            copy(found, target / found.name)


def copy_description(
    source: Path, target: Path, *, head: Head, dtype: torch.dtype, tokenizer_from: Path, trust_remote_code: bool = False
) -> None:
    """Writes the files that `transformers` saves with the weights of the model in `source`, for this head and dtype."""
    target.mkdir(parents=True, exist_ok=True)
    config = read_description(source, trust_remote_code=trust_remote_code)
    config.dtype = str(dtype).removeprefix("torch.")
    architecture = _ARCHITECTURES[head].get(config.model_type)
    if isinstance(architecture, str):
        config.architectures = [architecture]
    if head == "value":
        config.num_labels = 1
    config.save_pretrained(target)
    if head == "language":
        has_own = (source / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(source) if has_own else GenerationConfig.from_model_config(config)
        _mend_generation_config(generation)
        generation.save_pretrained(target)
    if trust_remote_code:
        for code in source.glob("*.py"):
            shutil.copyfile(code, target / code.name)
    copy_tokenizer(tokenizer_from, target)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_finite(name: str, weight: Tensor, place: Path) -> None:
    """Raises `EngineError` for a weight with NaN or infinite elements; `place` is its file or directory.

    One pass over the weight, without a copy. Integers and 8-bit floats are not checked.
    """
    if weight.numel() == 0 or weight.dtype not in _FLOATS or weight.is_meta:
        return
    low, high = weight.detach().aminmax()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise EngineError(
            f"The weight '{name}' in {place} is not finite: it has NaN or infinite elements.",
            remedy="The file is damaged, or comes from a run that diverged; use other weights.",
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bars and loading reports; the relevant parts of them are checked here."""
    with _QUIET.lock:
        _QUIET.blocks += 1
        if _QUIET.blocks == 1:
            _QUIET.verbosity = transformers_logging.get_verbosity()
            _QUIET.has_bars = transformers_logging.is_progress_bar_enabled()
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        with _QUIET.lock:
            _QUIET.blocks -= 1
            if _QUIET.blocks == 0:
                transformers_logging.set_verbosity(_QUIET.verbosity)
                if _QUIET.has_bars:
                    transformers_logging.enable_progress_bar()


def _remedy(error: Exception, otherwise: str) -> str:
    if "trust_remote_code" in str(error):
        return "Set model.trust_remote_code=true if you trust the Python code that comes with the model."
    if "size mismatch" in str(error) or "mismatched" in str(error):
        return "Its config.json does not match its weights; give files that belong together."
    if isinstance(error, ImportError):
        return "Install the package that the model's config.json needs, or use a model that does not need it."
    return otherwise


def _from_hub(name: str, key: str) -> Path:
    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if (cached / "config.json").is_file() and any(cached.glob("*.safetensors")):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    logger.info("model=%s downloading from the Hugging Face hub", name)
    try:
        return Path(snapshot_download(name, ignore_patterns=_NOT_OURS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EngineError(
            f"{key}={name} is neither a directory nor in the Hugging Face cache, and cannot be downloaded from the hub"
            f" ({type(error).__name__}: {str(error).splitlines()[0]}).",
            remedy=_nearest(Path(name)),
        ) from error


def _nearest(wanted: Path) -> str:
    """Advice for a path that is not a model directory: the nearest one that is."""
    around = wanted if wanted.is_dir() else wanted.absolute().parent
    while not around.is_dir():
        around = around.parent
    models = {found.parent.name: found.parent for found in sorted(around.glob("*/config.json"))}
    close = difflib.get_close_matches(wanted.name, models, n=1) or list(models)[: wanted.is_dir()]
    advice = "Give a Hugging Face directory, a hub name (owner/name), or builtin:calculator"
    return f"{advice}. Nearest model directory: {models[close[0]]}." if close else f"{advice}."


def _own_memory(module: nn.Module) -> None:
    """Moves each parameter and buffer to its own memory, in place; tied parameters stay tied."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _mend_generation_config(config: GenerationConfig) -> None:
    """Sets do_sample if transformers would not save the configuration: many published models set only a temperature."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
