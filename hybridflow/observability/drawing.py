"""Colors and type of SVG drawings, in light and dark."""

from collections.abc import Iterable, Sequence

from hybridflow.observability.role_colors import DARK, LIGHT

_STYLE = """
  .page { fill: #fbfbfd; } .band { fill: #f1f2f7; stroke: #dcdfe9; } .card { fill: #ffffff; stroke: #c9cddb; }
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
         font-size: 12px; fill: #1c2030; }
  .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 11px; }
  .title { font-size: 19px; font-weight: 650; } .name { font-size: 13px; font-weight: 650; }
  .soft { fill: #5c6378; } .middle { text-anchor: middle; }
"""
_DARK_STYLE = """
  .page { fill: #12141b; } .band { fill: #191c26; stroke: #2b3040; } .card { fill: #222633; stroke: #414759; }
  text { fill: #e9ebf3; } .soft { fill: #a1a8bd; }
"""


def styles(numbers: Iterable[int], light: str = "", dark: str = "") -> str:
    """The style element: what every drawing has, its own rules, and strokes `sN` and fills `fN` of numbered colors."""
    numbers = list(numbers)

    def colors(of: Sequence[str]) -> str:
        return "\n".join(f"  .s{n} {{ stroke: {of[n]}; }} .f{n} {{ fill: {of[n]}; }}" for n in numbers)

    return (
        f"<style>{_STYLE}{light}{colors(LIGHT)}\n"
        f"  @media (prefers-color-scheme: dark) {{{_DARK_STYLE}{dark}{colors(DARK)}\n  }}\n</style>"
    )
