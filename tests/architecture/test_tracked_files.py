"""Rules for every file of the repository, whatever its language."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import ROOT, Violation, tracked_files

MOST_LINES_OF_A_YAML = 39
MOST_BYTES = 5_000_000
WHERE_ASSETS_ARE_SET = ".ci/run"

# Written in parts, so that this file keeps its own rules.
MACHINE_PATH = re.compile(r"(?<![\w.\-/])/(?:" + "|".join(["work", "root", "farm", "opt/wheels", "opt/pypi"]) + r")\b")
HOME_PATH = re.compile(r"(?<![\w.\-/])/(?:" + "|".join(["home", "Users"]) + r")/\w+")
ASSETS_VALUE = re.compile("HYBRIDFLOW_" + r"ASSETS[\"']?\]?\s*(?:[:?+]?=(?!=)\s*\S|,\s*[\"'][/.~$]|:\s*[\"']?[/.$~])")
CONFLICT_MARKERS = ("<" * 7 + " ", ">" * 7 + " ")
SIBLING = re.compile(r"\.\./" + r"shared\b")


def violations(path: str, text: str) -> Iterator[Violation]:
    """What is wrong with a text file of this path."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern in (MACHINE_PATH, HOME_PATH):
            if match := pattern.search(line):
                yield Violation("machine-path", f"{path}:{number}", match.group())
        if path != WHERE_ASSETS_ARE_SET and (ASSETS_VALUE.search(line) or SIBLING.search(line)):
            yield Violation("assets", f"{path}:{number}", line.strip()[:80])
        if line.startswith(CONFLICT_MARKERS):
            yield Violation("conflict", f"{path}:{number}", line[:80])
    if path.startswith("trainer_configs/") and path.endswith((".yaml", ".yml")):
        lines = len(text.splitlines())
        if lines > MOST_LINES_OF_A_YAML:
            yield Violation("yaml-length", path, f"{lines} lines, at most {MOST_LINES_OF_A_YAML}")


def text_of(path: str) -> str:
    """The file's text; empty where it is not text."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_the_repository_keeps_its_rules():
    found = [violation for path in tracked_files() for violation in violations(path, text_of(path))]
    assert not found, "\n".join(f"{violation.subject}: {violation.found}" for violation in found)


def broken_links(path: str, text: str) -> list[str]:
    """Relative links of a Markdown file that lead nowhere."""
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    return [target for target in targets if target and not (ROOT / path).parent.joinpath(target).exists()]


def test_links_of_the_front_pages_lead_somewhere():
    # Those inside docs/ are checked by `make docs`, which also writes the pages that are generated.
    pages = [path for path in tracked_files() if path.endswith(".md") and not path.startswith("docs/")]
    assert "README.md" in pages
    assert not {path: broken_links(path, text_of(path)) for path in pages if broken_links(path, text_of(path))}
    assert broken_links("README.md", "[a](gone.md) [b](LICENSE#x) [c](https://example.org/gone.md)") == ["gone.md"]


def test_a_page_that_links_to_a_generated_page_says_at_the_first_link_what_writes_it():
    for path in (path for path in tracked_files() if path.startswith("docs/") and path.endswith(".md")):
        missing = broken_links(path, text_of(path))
        lines = [line for line in text_of(path).splitlines() if missing and f"]({missing[0]}" in line]
        assert not missing or "`make docs`" in lines[0], f"{path}: {missing}"


def test_the_step_in_the_readme_is_the_one_of_ppo():
    (printed,) = re.findall(r"```python\n(class PPO.*?)```", text_of("README.md"), re.DOTALL)
    names = ("collect", "learn")
    shown, own = (
        {node.name: ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
        for text in (printed, text_of("hybridflow/dataflows/ppo.py"))
    )
    assert shown == {name: own[name] for name in names}


def test_no_file_is_too_large():
    sizes = {path: (ROOT / path).stat().st_size for path in tracked_files()}
    assert not {path: size for path, size in sizes.items() if size >= MOST_BYTES}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/a.md", "cd /" + "work/main"),
        ("a.json", '{"venv": "/' + 'root/.cache"}'),
        ("docs/a.md", "open /" + "home/ada/run"),
        ("docs/a.md", "open /" + "Users/ada/run"),
        ("Makefile", "HYBRIDFLOW_" + "ASSETS = ../assets"),
        ("tests/a.py", 'monkeypatch.setenv("HYBRIDFLOW_' + 'ASSETS", "/data")'),
        ("tests/a.py", 'os.environ["HYBRIDFLOW_' + 'ASSETS"] = "x"'),
        ("docs/a.md", "models lie in ../" + "shared/models"),
        ("docs/a.md", "<" * 7 + " HEAD"),
        ("a.py", "x = 1\n" + ">" * 7 + " branch"),
        ("trainer_configs/a.yaml", "a: 1\n" * 40),
    ],
)
def test_a_violation_is_seen(path, text):
    assert list(violations(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (WHERE_ASSETS_ARE_SET, "HYBRIDFLOW_" + 'ASSETS="$(cd ../' + 'shared && pwd)"'),
        ("tests/a.py", 'os.environ.get("HYBRIDFLOW_' + 'ASSETS")'),
        ("docs/a.md", "see docs/work/flow.md, network/farm and https://example.org/root/x"),
        ("trainer_configs/a.yaml", "a: 1\n" * 39),
    ],
)
def test_what_is_fine_passes(path, text):
    assert not list(violations(path, text))
