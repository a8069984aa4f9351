"""A YAML text as a tree in which every key and every value knows its line and column.

Nothing is interpreted here: a scalar is the text as written and whether it was quoted, so that `on`, `007` and `1.10` stay
what they are. The tree is built from the parser's events on a stack of its own, so no input can exhaust Python's; what
aliases may add is bounded by the length of the text. Every fault is collected, except the one at which the
parser itself gives up.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml


# libyaml's parser is some twenty times faster than any in Python; a PyYAML built without it has only the latter.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEEPEST = 64  # levels of nesting; no schedule needs ten
UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|\ufeff")
LONGEST_MESSAGE = 400
ALIAS_ALLOWANCE = 10_000  # nodes that aliases may stand for in however short a text


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A line and a column, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in a file, and where."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


@dataclass(slots=True)
class Faults:
    """The faults of a file so far; one that several graphs share (in defaults, behind an alias) is kept once."""

    file: str
    _found: dict[tuple[Place, str], Fault] = field(default_factory=dict)
    _places: set[Place] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, place: Place, message: str, *, of: str = "") -> None:
        """Take down a fault; `of` says whose it is, and does not make it another fault."""
        if len(message) > LONGEST_MESSAGE:  # it quotes the file, and there a text can have any length
            message = f"{message[:LONGEST_MESSAGE]}..."
        self._places.add(place)
        self._found.setdefault((place, message), Fault(self.file, place.line, place.column, of + message))

    def any_at(self, place: Place) -> bool:
        """Whether something is wrong at this very place."""
        return place in self._places

    def in_order(self) -> tuple[Fault, ...]:
        """Return them in the order of the file."""
        return tuple(sorted(self._found.values(), key=lambda fault: (fault.line, fault.column)))


@dataclass(frozen=True, slots=True)
class Scalar:
    """A text as written, escapes resolved; `plain` when it stood without quotes."""

    text: str
    plain: bool
    place: Place

    @property
    def empty(self) -> bool:
        """Whether nothing was written at all, as in `cron:` followed by the end of the line."""
        return self.plain and not self.text


@dataclass(frozen=True, slots=True)
class Tree:
    """A mapping: each key with its own place and its value."""

    pairs: Mapping[str, tuple[Place, "Node"]]
    place: Place


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence."""

    nodes: tuple["Node", ...]
    place: Place


Node = Scalar | Tree | Items


def read(text: str, faults: Faults) -> Node | None:
    """Return the root of a YAML text, None when it is empty or unreadable; whatever is wrong is added to `faults`."""
    text = text.removeprefix("\ufeff")
    odd = UNPRINTABLE.search(text)
    if odd:
        faults.add(
            _place_of(odd.start(), text),
            f"the character U+{ord(odd[0]):04X} may not stand in YAML: remove it",
        )
        return None
    builder = _Builder(faults, allowance=ALIAS_ALLOWANCE + len(text))
    try:
        for event in yaml.parse(text, Loader=LOADER):
            builder.take(event)
    except _GiveUp:
        pass
    except yaml.MarkedYAMLError as error:
        faults.add(*_syntax_fault(error, text))
        return None
    return builder.root


class _GiveUp(Exception):
    """The text nests or multiplies beyond what a schedule can need."""


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _place_of(index: int, text: str) -> Place:
    return Place(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read yet."""

    place: Place
    mapping: bool
    anchor: str | None
    size: int = 1
    nodes: list[Node] = field(default_factory=list)
    pairs: dict[str, tuple[Place, Node]] = field(default_factory=dict)
    merged: Node | None = None
    key: Scalar | None = None
    key_lost: bool = False


@dataclass(slots=True)
class _Builder:
    faults: Faults
    allowance: int
    root: Node | None = None
    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, tuple[Node, int]] = field(default_factory=dict)
    documents: int = 0

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._start_document(event)
        elif isinstance(event, yaml.NodeEvent):
            self._start_node(event, _place(event.start_mark))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close()

    def _start_document(self, event: yaml.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            self.faults.add(
                _place(event.start_mark), "a second YAML document starts here: a schedule is one document"
            )
            raise _GiveUp
        if event.version not in (None, (1, 2)):
            self.faults.add(_place(event.start_mark), "this file is read as YAML 1.2: remove the %YAML line")

    def _start_node(self, event: yaml.NodeEvent, place: Place) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._alias(str(event.anchor), place)
            return
        if getattr(event, "tag", None) is not None:
            self.faults.add(place, TAGS)
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, place)
            return
        self.open.append(_Open(place, isinstance(event, yaml.MappingStartEvent), event.anchor))
        if len(self.open) > DEEPEST:
            self.faults.add(place, f"nested more than {DEEPEST} levels deep")
            self.root = None
            raise _GiveUp

    def _scalar(self, event: yaml.ScalarEvent, place: Place) -> None:
        bad = re.search("[\0\ud800-\udfff]", event.value)
        if bad:
            self.faults.add(
                place, f"the character U+{ord(bad[0]):04X} cannot be stored by Postgres: remove it"
            )
        node = Scalar(event.value, not event.style, place)
        if event.anchor:
            self.anchors[event.anchor] = (node, 1)
        self._place(node, 1)

    def _alias(self, name: str, place: Place) -> None:
        if name not in self.anchors:
            self.faults.add(
                place,
                f"*{name} is an alias of nothing: no &{name} stands before it; a text that starts with * needs quotes",
            )
            self._place(Scalar("", plain=False, place=place), 1)
            return
        node, size = self.anchors[name]
        self.allowance -= size
        if self.allowance < 0:
            self.faults.add(place, "the aliases of this file stand for far more than is written in it")
            self.root = None
            raise _GiveUp
        self._place(node, size)

    def _close(self) -> None:
        done = self.open.pop()
        if done.mapping:
            self._merge(done)
        node: Node = Tree(done.pairs, done.place) if done.mapping else Items(tuple(done.nodes), done.place)
        if done.anchor:
            self.anchors[done.anchor] = (node, done.size)
        self._place(node, done.size)

    def _place(self, node: Node, size: int) -> None:
        """Put a finished node where it belongs: the root, an item, a key or a value."""
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        parent.size += size
        if not parent.mapping:
            parent.nodes.append(node)
        elif parent.key is None and not parent.key_lost:
            self._key(parent, node)
        else:
            self._value(parent, node)

    def _key(self, parent: _Open, node: Node) -> None:
        if isinstance(node, Scalar):
            parent.key = node
            return
        parent.key_lost = True
        self.faults.add(
            node.place,
            "a key is a text, not a list or a mapping: a text that starts with { or [ needs quotes",
        )

    def _value(self, parent: _Open, node: Node) -> None:
        key, parent.key, parent.key_lost = parent.key, None, False
        if key is None:
            return
        if key.plain and key.text == "<<":
            if parent.merged is not None:
                self.faults.add(key.place, "<< stands twice: write one, with a list of aliases")
            parent.merged = node
        elif key.text in parent.pairs:
            first = parent.pairs[key.text][0]
            self.faults.add(key.place, f"key {key.text!r} stands twice: it is on line {first.line} already")
        else:
            parent.pairs[key.text] = (key.place, node)

    def _merge(self, done: _Open) -> None:
        """Add what `<<` brings; a key of the mapping's own wins, then the earlier source."""
        if done.merged is None:
            return
        sources = done.merged.nodes if isinstance(done.merged, Items) else (done.merged,)
        for source in sources:
            if isinstance(source, Tree):
                done.pairs = {**source.pairs, **done.pairs}
            else:
                self.faults.add(done.merged.place, "<< takes an alias of a mapping, or a list of them")


def _syntax_fault(error: yaml.MarkedYAMLError, text: str) -> tuple[Place, str]:
    lines = text.rstrip().split("\n")
    place = _place(error.problem_mark or error.context_mark)
    if error.context_mark and (place.line > len(lines) or "end of stream" in str(error.problem)):
        place = _place(error.context_mark)  # what is never closed is best looked for where it was opened
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    unquoted = UNQUOTED.match(line)
    if unquoted:
        example = 'for instance cron: "*/5 * * * *" or "@hourly"'
        return Place(
            place.line, len(unquoted[1]) + 1
        ), f"a text that starts with {unquoted[2]} needs quotes, {example}"
    return place, _plainly(str(error.problem))


# A value that starts with a character that YAML keeps for itself, behind any dashes, a key and an opening bracket.
UNQUOTED = re.compile(r"""(\s*(?:-\s+|[^\s:#"']+:\s+)*(?:[\[{]\s*)?)([*@`]|%(?=.)(?<!^%))""")
TAGS = "YAML tags (!...) are not used in a schedule: remove the tag, or quote a text that starts with !"
SYNTAX = (
    (r"cannot start any token", "this character cannot start a value: quote the value; indent with spaces, not tabs"),
    (r"mapping values are not allowed", "a ': ' too many on this line: quote the value, or check the indentation"),
    (r"could not find expected ':'", "a key without its ': '"),
    (r"escape|hexdecimal", "a \\ inside double quotes starts an escape: write \\\\, or use single quotes"),
    (r"end of stream|document indicator", "a quote is opened and never closed"),
    (r"expected ',' or", "inside [ ] or { } a comma or the closing bracket is missing; a text with brackets, ${NAME} too, needs quotes there"),
    (r"expected (key|'-')", "this does not fit what stands above it: check the indentation, or quote the value"),
    (r"depth", "nested far too deep"),
    (r"tag", TAGS),
    (r"directive|incompatible", "a line that starts with % is for YAML itself: remove it"),
)  # fmt: skip


def _plainly(problem: str) -> str:
    """Return a parser's complaint in words that say what to do, with nothing of the text in them."""
    for pattern, plain in SYNTAX:
        if re.search(pattern, problem):
            return plain
    return "this is not YAML: check quotes, brackets and indentation here"
