"""`data.prompt_template`: a text with the names of columns in braces."""

from string import Formatter

from hybridflow.errors import ConfigError

_KEY = "data.prompt_template"
_EXAMPLE = f"""'{_KEY}="{{Body}} {{Question}}"'"""


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Texts, each followed by the name of a column or by None; `{{` and `}}` are braces.

    Raises `ConfigError` for braces that do not match, for a conversion or a format, and for a text without columns.
    """
    shown = f"{_KEY}={template[:200]!r}"
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:
        raise ConfigError(
            f"{shown}: {error}.", remedy="Write columns as {Body}, and braces that are text as {{ and }}."
        ) from error
    for _, name, form, conversion in parts:
        if name is not None and (not name.strip() or form or conversion):
            extra = f":{form}" if form else f"!{conversion}"
            raise ConfigError(
                f"{shown}: braces may hold only the name of a column, not a format or a conversion ('{extra}')."
                if name.strip()
                else f"{shown}: the braces are empty.",
                remedy=f"Write {{{name}}}; to format values, use data.map."
                if name.strip()
                else f"Put the name of a column in them, as in {_EXAMPLE}.",
            )
    found = [(text, name) for text, name, _, _ in parts]
    if not any(name for _, name in found):
        raise ConfigError(
            f"{shown} names no column, so all prompts would be the same.",
            remedy=f"Write the names of columns in braces, as in {_EXAMPLE}.",
        )
    return found
