"""Datasets of the Hugging Face hub, folders laid out like them: `owner/name?config=main&split=test`; saved datasets."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import user_path
from hybridflow.errors import ConfigError, DataError
from hybridflow.optional import require

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".parquet", ".csv", ".tsv", ".txt", ".arrow")
_OPTIONS = ("config", "split")
_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubName:
    """A dataset or folder, with its configuration and split if the name gives them."""

    path: str
    config: str | None = None
    split: str | None = None


def hub_name(name: str) -> HubName | None:
    """The parts of `owner/name` or `owner/name?config=main&split=test`; None if the name is not a dataset's.

    A file or folder that exists is not a dataset of the hub, nor is a missing one in a folder that exists. With
    options, the name may also be that of a folder. Raises `ConfigError` for unknown options.
    """
    path, mark, query = name.partition("?")
    if user_path(name).exists():
        return None
    is_repository = bool(_NAME.fullmatch(path)) and Path(path).suffix not in _FILE_SUFFIXES
    is_folder = bool(mark) and user_path(path).is_dir()
    if is_folder or (is_repository and (mark or not Path(path).parent.exists())):
        return HubName(path, **_options(name, query)) if mark else HubName(path)
    return None


class Dataset(Protocol):
    """The used methods of `datasets.Dataset`, which keeps its rows in files and reads them on demand."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, rows: list[int] | slice) -> dict[str, list]:
        """The columns of some rows."""
        ...

    def with_format(self, type: str) -> "Dataset":
        """The same rows in another format."""
        ...

    def to_dict(self) -> dict[str, list]:
        """The columns of all rows."""
        ...


def check_splits_named(files: Sequence[str], *, key: str) -> None:
    """Raises `ConfigError` for held-out data without a split, which would be the split used for training."""
    for name in files:
        found = hub_name(name)
        if found is not None and found.split is None:
            named = f"{found.path}?{f'config={found.config}&' if found.config else ''}split=test"
            typed = f"{key} '{named}'" if key.startswith("--") else f"'{key}=[\"{named}\"]'"
            raise ConfigError(
                f"{key}: '{name}' is read as a Hugging Face dataset because no such file exists, but no split is given"
                " for evaluation.",
                remedy=f"Add the split: {typed}; or correct the path.",
            )


def load_hub(name: str, found: HubName) -> Dataset:
    """A dataset's split, which is `train` if none is named."""
    # Imported only here: `datasets` takes a second to import, and most runs read plain files.
    datasets = require("datasets")
    try:
        folder = user_path(found.path)
        if folder.is_dir():
            return datasets.load_dataset(str(folder), found.config, split=found.split or "train")
        with _offline_if_unreachable():
            return datasets.load_dataset(found.path, found.config, split=found.split or "train")
    except Exception as error:  # a download and files of any kind fail in as many ways
        missing = f"No such file or directory: '{name}'; and no dataset of that name could be loaded from the hub"
        refused = missing if name == found.path else f"'{name}' cannot be read as a dataset"
        reason = " ".join(str(error).split())[:400] or "no reason given"
        raise DataError(
            f"{refused} ({type(error).__name__}: {reason}).",
            remedy=f"Correct the path, name a configuration and a split that the dataset has"
            f" ('{found.path}?config=main&split=test'), or download it and give one of its files.",
        ) from error


def load_saved(name: str, folder: Path) -> Dataset:
    """A dataset in a directory that `save_to_disk` wrote."""
    datasets = require("datasets")
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # it may be files of any kind, which fail in as many ways
        raise DataError(f"'{name}' is a damaged Hugging Face dataset: {error}", remedy="Save it again.") from error


def revision(found: HubName) -> str:
    """The commit of a dataset's repository on the hub that is read."""
    with _offline_if_unreachable():
        return str(require("datasets").load_dataset_builder(found.path, found.config).hash)


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Sets the hub's offline mode for a block if the hub does not answer: copies on this machine are used at once.

    Otherwise the libraries retry each file six times, for 38 seconds. Their own log handlers are removed, so that a
    warning is printed once.
    """
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).handlers.clear()  # each adds one of its own to those of the root
    hub, datasets = vars(require("huggingface_hub.constants")), vars(require("datasets.config"))
    before = hub["HF_HUB_OFFLINE"], datasets["HF_HUB_OFFLINE"]
    try:
        if not any(before):
            require("huggingface_hub").get_session().head(hub["ENDPOINT"], timeout=_SECONDS)
    except Exception as error:  # noqa: BLE001 (of the network or its settings: the warning names it)
        logger.warning("%s cannot be reached (%s): only data on this machine can be read", hub["ENDPOINT"], error)
        hub["HF_HUB_OFFLINE"] = datasets["HF_HUB_OFFLINE"] = True
    try:
        yield
    finally:
        hub["HF_HUB_OFFLINE"], datasets["HF_HUB_OFFLINE"] = before


def _options(name: str, query: str) -> dict[str, str]:
    given = {}
    for option in query.split("&"):
        key, _, value = option.partition("=")
        if key not in _OPTIONS or not value:
            is_known = key in _OPTIONS
            fault = f"the option '{key}' has no value" if is_known else f"a dataset has no option '{key}'"
            hint = "" if is_known else did_you_mean(key, _OPTIONS)
            raise ConfigError(
                f"'{name}': {fault}.", remedy=f"{hint}Write {name.partition('?')[0]}?config=main&split=test."
            )
        given[key] = value
    return given
