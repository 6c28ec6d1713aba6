"""The names of the package: few, found by notebooks, documented, and imported only when they are used."""

import subprocess
import sys

import pytest

import hybridflow
from docs.reference_pages import python_page


def test_every_name_is_listed_documented_and_is_what_its_module_defines():
    page = python_page()
    for name in hybridflow.__places__:
        assert name in dir(hybridflow)
        assert f"## hybridflow.{name}\n" in page
        assert hybridflow.__getattr__(name) is vars(sys.modules[hybridflow.__places__[name]])[name]
    for words in (
        "- `to_pandas()`: The rows",
        "- `tokenizer`: The tokenizer",
        "Returned by a callback",
        "- `load(*files, **objects)`: The experiment of",
        "- `objects`: `model`, `data`",
        "- `warnings`: Settings that will not",
        "## Ending\n",
        "run(algorithm='ppo'",
    ):
        assert words in page


def test_a_notebook_completes_the_public_names_and_no_others():
    assert {name for name in dir(hybridflow) if not name.startswith("__")} == set(hybridflow.__places__)


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hybridflow' has no attribute 'trian'"):
        hybridflow.__getattr__("trian")


def test_the_package_is_imported_without_the_names():
    code = (
        "import sys, hybridflow; assert 'torch' not in sys.modules; hybridflow.STOP; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
