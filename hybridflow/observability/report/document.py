"""A page as one HTML file without other resources, which can refresh itself."""

from collections.abc import Iterable
from importlib.resources import files

from hybridflow.observability.printable import shown

_REFRESH_SECONDS = 5


def html_page(title: str, body: str, *, is_renewed: bool = False) -> str:
    """The page with its style and its script; with `is_renewed` it loads itself again every few seconds."""
    refresh = f' data-refresh="{_REFRESH_SECONDS}"' if is_renewed else ""
    script = _asset("page.js") + (_asset("refresh.js") if is_renewed else "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown(title)}</title><style>{_asset('page.css')}</style></head>"
        f"<body{refresh}><main>{body}</main><script>{script}</script></body></html>\n"
    )


def html_table(kind: str, titles: Iterable[str], rows: Iterable[str]) -> str:
    """A card with a table that scrolls; each row is the HTML of its cells, and titles are texts."""
    head = "".join(f"<th>{shown(title)}</th>" for title in titles)
    return (
        f'<div class="card scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table></div>"
    )


def _asset(name: str) -> str:
    return (files("hybridflow.observability.report") / "assets" / name).read_text(encoding="utf-8")
