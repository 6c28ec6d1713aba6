"""Checkpoints at a URL, such as `s3://bucket/runs/x`: written so that only complete ones are found, read, and deleted.

s3://bucket/runs/x/step_40/manifest.json   written last and deleted first, so that it marks a complete checkpoint
s3://bucket/runs/x/step_40/...             the files of `run_dir/checkpoints/step_40`
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fsspec import available_protocols
from fsspec.core import url_to_fs

from hybridflow.config.loop import Trainer
from hybridflow.config.paths import is_storage_url
from hybridflow.elastic.checkpoint import (
    Checkpoint,
    CheckpointStore,
    evaluation_of,
    named_step,
    saved_config,
    step_name,
)
from hybridflow.elastic.manifest import DRIVER_STATE, MANIFEST, Manifest, parsed_manifest
from hybridflow.elastic.storage import delete, write_aside
from hybridflow.errors import CheckpointError, HybridflowError
from hybridflow.observability.redaction import redacted_text, without_login
from hybridflow.parallel.file_records import in_threads, record_files

logger = logging.getLogger(__name__)

_LOCAL = ("file", "local")
"""Protocols of directories on this machine."""

_THREADS = 8
"""Number of files that are copied at the same time; the packages for the protocols copy large ones in several parts."""


class RemoteCheckpoints:
    """The checkpoints of one run below a URL of any protocol of fsspec.

        remote = RemoteCheckpoints("s3://bucket/runs/x")
        remote.upload(run_dir / "checkpoints" / "step_40", manifest, remote.complete())
        remote.complete()  # {40: manifest}

    All errors of the protocol's package are raised as `CheckpointError`. Only one run at a time may write to a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._protocol = self.url.partition("://")[0]
        with self._explained("cannot be used"):
            options = {"auto_mkdir": True} if self._protocol in _LOCAL else {}
            self._files, self._root = url_to_fs(self.url, use_listings_cache=False, **options)

    def check(self) -> None:
        """Writes a small file and deletes it; raises `CheckpointError` if that is not possible.

        Creates no directory: if one does not exist on this machine, writes to the nearest parent that does.
        """
        place = self._root
        while self._protocol in _LOCAL and not Path(place).exists():
            place = str(Path(place).parent)
        target = f"{place}/.hybridflow-check"
        with self._explained("cannot be written to"), tempfile.NamedTemporaryFile() as file:
            self._files.put_file(file.name, target)
            self._files.rm_file(target)

    def place(self, step: int) -> str:
        """The URL of the checkpoint of a step."""
        return f"{self.url}/{step_name(step)}"

    def complete(self) -> dict[int, Manifest]:
        """The manifests of the complete checkpoints, by step, in order. Skips damaged ones with a warning."""
        found: dict[int, Manifest] = {}
        for step in sorted(self._steps()):
            if (text := self._manifest_text(step)) is None:
                continue
            try:
                found[step] = self._parsed(text, step)
            except CheckpointError as error:
                logger.warning("checkpoint=%s is skipped: %s", self.place(step), error.message)
        return found

    def evaluation(self, step: int) -> dict[str, float]:
        """The metrics of the evaluation at the step of a checkpoint; empty if there was none."""
        with tempfile.TemporaryDirectory() as folder:
            return evaluation_of(self.described(step, Path(folder)).path)

    def upload(self, directory: Path, manifest: Manifest, others: Mapping[int, Manifest]) -> None:
        """Copies a complete checkpoint to the URL, in place of any that is there under the same name.

        Files that one of the other checkpoints at the URL has too, by their SHA-256, are copied there.
        """
        self.delete(manifest.step)
        target = self._of(manifest.step)
        same = {
            name: f"{self._of(step)}/{name}"
            for step, other in others.items()
            for name, record in other.files.items()
            if step != manifest.step and manifest.files.get(name) == record
        }

        def put(name: str) -> None:
            if name in same:
                with suppress(Exception):  # whatever a storage package raises, the file can be sent
                    self._files.cp_file(same[name], f"{target}/{name}")
                    if self._files.size(f"{target}/{name}") == manifest.files[name].bytes:
                        return
            self._files.put_file(str(directory / name), f"{target}/{name}")

        with self._explained("cannot be written to"):
            in_threads(put, list(manifest.files), threads=_THREADS)
            there = self._files.find(target, detail=True)
            sizes = {path.removeprefix(target).lstrip("/"): about["size"] for path, about in there.items()}
            if wrong := [name for name, record in manifest.files.items() if sizes.get(name) != record.bytes]:
                raise OSError(f"{wrong[0]} has {sizes.get(wrong[0])} bytes there, not {manifest.files[wrong[0]].bytes}")
            self._files.put_file(str(directory / MANIFEST), f"{target}/{MANIFEST}")

    def newest_config(self) -> dict[str, object]:
        """The settings in the newest checkpoint; empty if there is none."""
        with tempfile.TemporaryDirectory() as folder:
            newest = self.newer_described(Path(folder), than=0)
            return {} if newest is None else saved_config(newest.path)

    def newer(self, store: CheckpointStore, *, than: int) -> Checkpoint | None:
        """Copies the newest checkpoint after a step into the store of a run; None if there is none.

        Skips damaged ones with a warning. Raises errors of the connection: the run must not begin at an earlier step
        because of them.
        """
        for step, manifest in reversed(self.complete().items()):
            if step <= than:
                break
            logger.info("checkpoint=%s is copied to %s", self.place(step), store.directory)
            path, is_there = store.place(step), False
            try:
                with write_aside(path) as partial:
                    self._read([*manifest.files, MANIFEST], step, partial)
                is_there = True
                return store.open(path)
            except CheckpointError as error:
                if is_there:
                    delete(path)
                elif not isinstance(error.__cause__, FileNotFoundError):
                    raise
                logger.warning("checkpoint=%s is skipped: %s", self.place(step), error.message)
        return None

    def newer_described(self, directory: Path, *, than: int) -> Checkpoint | None:
        """The newest checkpoint after a step, as `described` returns it; None if there is none.

        Skips those whose driver's state is damaged with a warning; does not see other damage.
        """
        for step, manifest in reversed(self.complete().items()):
            if step <= than:
                break
            described = self.described(step, directory)
            if record_files(directory, [DRIVER_STATE])[DRIVER_STATE] == manifest.files[DRIVER_STATE]:
                return described
            logger.warning("checkpoint=%s is skipped: its %s is damaged", self.place(step), DRIVER_STATE)
        return None

    def described(self, step: int, directory: Path) -> Checkpoint:
        """A checkpoint of which only the manifest and the driver's state are copied, to `directory`."""
        self._read([MANIFEST, DRIVER_STATE], step, directory)
        return Checkpoint(directory, self._parsed((directory / MANIFEST).read_text(), step))

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, complete or not; nothing if there is none."""
        target = self._of(step)
        with self._explained("cannot be written to"):
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{target}/{MANIFEST}")
            with suppress(FileNotFoundError):
                self._files.rm(target, recursive=True)

    def delete_incomplete(self) -> None:
        """Deletes what interrupted uploads have left behind."""
        for step in self._steps():
            if self._manifest_text(step) is None:
                self.delete(step)

    def _of(self, step: int) -> str:
        return f"{self._root}/{step_name(step)}"

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, complete or not."""
        with self._explained("cannot be read"):
            try:
                names = self._files.ls(self._root, detail=False)
            except FileNotFoundError:  # no checkpoint has been written yet
                return []
        steps = (named_step(name.rstrip("/").rpartition("/")[2]) for name in names)
        return [step for step in steps if step is not None]

    def _read(self, names: Sequence[str], step: int, target: Path) -> None:
        """Copies files of a checkpoint into a directory."""
        for folder in {(target / name).parent for name in names}:
            folder.mkdir(parents=True, exist_ok=True)
        with self._explained("cannot be read"):
            in_threads(
                lambda name: self._files.get_file(f"{self._of(step)}/{name}", str(target / name)),
                names,
                threads=_THREADS,
            )

    def _manifest_text(self, step: int) -> str | None:
        """The text of a checkpoint's manifest; None if it has none, so that it is incomplete.

        Reads the file without asking whether it exists, which packages deny if they cannot connect.
        """
        with self._explained("cannot be read"), suppress(FileNotFoundError):
            return self._files.cat_file(f"{self._of(step)}/{MANIFEST}").decode(errors="replace")
        return None

    def _parsed(self, text: str, step: int) -> Manifest:
        manifest = parsed_manifest(text, self.place(step))
        outside = [name for name in manifest.files if name.startswith("/") or ".." in name.split("/")]
        if manifest.step != step or outside:
            found = f"has the file {outside[0]!r}" if outside else f"says step {manifest.step}"
            raise CheckpointError(
                f"{self.place(step)} is damaged: its manifest {found}.", remedy="Use another checkpoint."
            )
        return manifest

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except HybridflowError:
            raise
        except Exception as error:
            why = redacted_text(without_login(" ".join(str(error).split()), self.url)) or "no reason is given"
            raise CheckpointError(
                f"trainer.checkpoint_url={redacted_text(self.url)} {what}: {type(error).__name__}: {why}.",
                remedy=self._remedy,
            ) from error

    @property
    def _remedy(self) -> str:
        if self._protocol in _LOCAL:
            return "Check the path, and that this process may read, write and delete there."
        if self._protocol not in available_protocols():
            return "Use a protocol that fsspec knows, such as s3://bucket/runs/x or file:///mnt/backup/x."
        aws = " (AWS_ACCESS_KEY_ID and the other variables and files that the aws command reads)"
        return (
            "Check the URL, that its bucket or directory exists, and that this process has credentials that may read,"
            f" write and delete there{aws if self._protocol in ('s3', 's3a') else ''}."
        )


def remote_checkpoints(trainer: Trainer) -> RemoteCheckpoints | None:
    """The checkpoints at `trainer.checkpoint_url`; None without a valid one, and for a run that does not train."""
    url = trainer.checkpoint_url if trainer.total_steps else None
    return RemoteCheckpoints(url) if url is not None and is_storage_url(url) else None
