"""Whatever has happened to a checkpoint's files, it is passed over, and the one before it is used."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.errors import CheckpointError
from hybridflow.parallel.file_records import files_below
from tests.unit.elastic.victim import store_with

SAVED = Path(__file__).parents[2] / "checkpoints" / "format_2"
DAMAGES_PER_KIND = 50

Damage = Callable[[Path, list[Path], random.Random], None]


def truncated(path: Path, others: list[Path], chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def with_a_bit_flipped(path: Path, others: list[Path], chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def with_zeros(path: Path, others: list[Path], chance: random.Random) -> None:
    """A range of zeros, as after a crash of the machine, over at least one byte that was not zero."""
    data = bytearray(path.read_bytes())
    place = chance.choice([place for place, byte in enumerate(data) if byte])
    end = min(len(data), place + chance.randrange(1, 4096))
    data[place:end] = bytes(end - place)
    path.write_bytes(data)


def swapped(path: Path, others: list[Path], chance: random.Random) -> None:
    other = chance.choice([other for other in others if other.read_bytes() != path.read_bytes()])
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def missing(path: Path, others: list[Path], chance: random.Random) -> None:
    path.unlink()


def longer(path: Path, others: list[Path], chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 64)))


@pytest.mark.parametrize("damage", [truncated, with_a_bit_flipped, with_zeros, swapped, missing, longer])
def test_none_of_300_damaged_checkpoints_is_accepted_and_none_ends_the_run(damage: Damage, tmp_path):
    store = store_with(tmp_path, 1)
    path, chance = store.directory / "step_2", random.Random(f"damage {damage.__name__}")
    for number in range(DAMAGES_PER_KIND):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(SAVED, path)
        assert number or store.open(path).step == 2
        files = [path / name for name in files_below(path)]
        damage(files[number % len(files)], files, chance)
        with pytest.raises(CheckpointError):
            store.open(path)
        latest = store.latest()
        assert latest is not None and latest.step == 1, f"damage {number}"
