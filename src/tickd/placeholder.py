"""`${NAME}` and `${NAME:-default}`: values of the environment, inserted into texts that YAML has read already."""

import re
from collections.abc import Callable, Mapping


PLACEHOLDER = re.compile(r"\$?\$\{([^}]*)(\})?")
NAME_AND_DEFAULT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def has_placeholder(text: str) -> bool:
    """Whether filling would change the text."""
    return "${" in text


def fill(text: str, environment: Mapping[str, str], *, insert: Callable[[str], str] = str) -> str:
    """Return the text with its placeholders filled, `insert` applied to what comes from the environment.

    `$${NAME}` stands for `${NAME}` itself. ValueError when a variable is not set and has no default, or when what stands
    between the braces is not a name; it never quotes a value of the environment.
    """

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return insert(match[0][1:])
        return insert(_value(match[1], closed=match[2] is not None, environment=environment))

    return PLACEHOLDER.sub(value, text)


def _value(inside: str, *, closed: bool, environment: Mapping[str, str]) -> str:
    match = NAME_AND_DEFAULT.fullmatch(inside)
    if match is None or not closed or "${" in inside:
        raise ValueError(
            "a placeholder is ${NAME} or ${NAME:-default}, not nested; for a literal ${ write $${"
        )
    name, default = match[1], match[2]
    found = environment.get(name)
    if default is not None and not found:
        return default
    if found is None:
        raise ValueError(f"the environment has no {name}: set it, or write ${{{name}:-default}}")
    if "\0" in found or re.search("[\ud800-\udfff]", found):
        raise ValueError(f"{name} of the environment holds bytes that are not text")
    return found
