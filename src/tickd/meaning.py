"""What the nodes of a tree mean: placeholders filled, and free values read as YAML 1.2 reads them.

The keys of a schedule take texts, and their own validators read them. `input`, `context` and the free parts of `config`
hold whatever a graph wants; there a plain scalar is null, true, a number or a text. What YAML 1.1 read otherwise
(`no`, `0777`, `12:30`) is a fault, because the writer's meaning cannot be known.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tickd import placeholder, template
from tickd.document import Faults, Items, Node, Place, Scalar, Tree


NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
FLAGS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER: Final = re.compile(r"[-+]?[0-9]{1,300}")
BASED_INTEGER: Final = re.compile(r"0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
DECIMAL: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
HIDDEN: Final = " "  # no name has a space in it
AMBIGUOUS: Final = re.compile(
    r"(?i:yes|no|on|off)|[-+]?0[0-9]+|[-+]?[0-9]+_[0-9_]*(?:\.[0-9_]*)?|[-+]?[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?"
)


def is_null(node: Node) -> bool:
    """Whether a node says null; one that says nothing at all is not asked."""
    return isinstance(node, Scalar) and node.plain and node.text in NULL and not node.empty


@dataclass(frozen=True, slots=True)
class Meaning:
    """Reads nodes with an environment; what is wrong goes to `faults`, as a fault `of` whom it is read for."""

    environment: Mapping[str, str]
    faults: Faults
    of: str

    def text(self, node: Scalar, *, insert: Callable[[str], str] = str) -> str | None:
        """Return a scalar's text with its placeholders filled; None when they cannot be."""
        try:
            return placeholder.fill(node.text, self.environment, insert=insert)
        except ValueError as error:
            self.faults.add(node.place, str(error), of=self.of)
            return None

    def free(self, node: Node, *, templates: bool) -> Any:
        """Return a node as the mapping, list, number, flag, text or None that it is; `templates` checks its texts."""
        if isinstance(node, Tree):
            return self._tree(node, templates=templates)
        if isinstance(node, Items):
            return [self.free(each, templates=templates) for each in node.nodes]
        if node.plain and not placeholder.has_placeholder(node.text):
            value = self._plain(node.text, node.place)
            if not isinstance(value, str):
                return value
        if not templates:
            return self.text(node)
        return self.template(node)

    def template(self, node: Scalar) -> str | None:
        """Return a scalar's text with its placeholders filled; a brace that came with them is a brace, not a template."""
        text = self.text(node, insert=template.escape)
        if text is None:
            return None
        try:
            template.check(text)
        except ValueError:
            self._bad_template(node)
        return text

    def _bad_template(self, node: Scalar) -> None:
        # In braces of the file's own, what came from the environment would be a name, and names are shown.
        shown = placeholder.fill(node.text, self.environment, insert=lambda _: HIDDEN)
        try:
            template.check(shown)
        except ValueError as error:
            self.faults.add(node.place, str(error), of=self.of)

    def _tree(self, node: Tree, *, templates: bool) -> dict[str, Any]:
        if templates and len(node.pairs) == 1:
            ((key, (place, value)),) = node.pairs.items()
            if key in template.NAMES and isinstance(value, Scalar) and value.plain and not value.text:
                self.faults.add(
                    place, f"YAML reads {{{key}}} as a mapping: put it in quotes, '{{{key}}}'", of=self.of
                )
        for key, (place, _) in node.pairs.items():
            if placeholder.has_placeholder(key):
                self.faults.add(place, f"{key!r}: placeholders are filled in values, not in keys", of=self.of)
        return {key: self.free(value, templates=templates) for key, (_, value) in node.pairs.items()}

    def _plain(self, text: str, place: Place) -> Any:
        if text in NULL:
            return None
        if text in FLAGS:
            return FLAGS[text]
        if AMBIGUOUS.fullmatch(text):
            # A number may be a password, so it is not shown.
            what, hint = (
                (repr(text), "true or false") if text.isalpha() else ("this number", "its digits alone")
            )
            message = (
                f"{what} means one thing in YAML 1.1 and another in 1.2: write {hint}, or put it in quotes"
            )
            self.faults.add(place, message, of=self.of)
            return text
        return self._number(text, place)

    def _number(self, text: str, place: Place) -> Any:
        if INTEGER.fullmatch(text):
            return int(text)
        if BASED_INTEGER.fullmatch(text):
            return int(text, 0)
        if DECIMAL.fullmatch(text) or NOT_FINITE.fullmatch(text):
            number = math.inf if NOT_FINITE.fullmatch(text) else float(text)
            if not math.isfinite(number):
                self.faults.add(place, "this number cannot be written in JSON: put it in quotes", of=self.of)
            return number
        return text
