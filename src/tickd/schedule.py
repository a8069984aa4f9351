"""The schedule file: a text becomes graph entries, or every fault of it with file, line and column."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tickd import placeholder
from tickd.document import Fault, Faults, Items, Node, Place, Scalar, Tree, read
from tickd.entry import Entry, GraphKeys, Keep, Retries, RunConfig, default_grace
from tickd.errors import Unusable
from tickd.meaning import Meaning, is_null
from tickd.tick import Tick, lock_key


__all__ = ["Entry", "Fault", "Keep", "Retries", "RunConfig", "Schedule", "ScheduleError", "parse"]

TOP_KEYS: Final = ("timezone", "defaults", "graphs")
TRIGGERS: Final = ("cron", "every", "at")
NESTED: Final[Mapping[str, type[RunConfig | Retries | Keep]]] = {
    "config": RunConfig,
    "retries": Retries,
    "keep": Keep,
}
FREE: Final = frozenset({("input",), ("context",), ("config", "metadata"), ("config", "configurable")})
LONGEST_NAME: Final = 100
SYNONYMS: Final = {
    "misfire_grace_time": "grace",
    "startingDeadlineSeconds": "grace",
    "schedule": "cron",
    "crontab": "cron",
    "interval": "every",
    "run_date": "at",
    "tz": "timezone",
    "max_instances": "overlap",
    "concurrencyPolicy": "overlap",
    "coalesce": "missed",
    "suspend": "enabled",
    "args": "input",
    "kwargs": "input",
    "retention": "keep",
}
# Where the search for a first fire time begins, for tickd is no older; and a tick that shows which threads graphs share.
SOME_INSTANT: Final = datetime(2026, 1, 1, tzinfo=UTC)

Pairs = Mapping[str, tuple[Place, Node]]


@dataclass(frozen=True)
class Schedule:
    """The graphs of a file, by name, and what in it is allowed but doubtful."""

    path: str
    entries: Mapping[str, Entry]
    warnings: tuple[Fault, ...] = ()

    def fault(self, graph: str, message: str) -> Fault:
        """Return a fault of what a graph's `graph` key refers to, at its place in the file."""
        place = self.entries[graph].place
        return Fault(self.path, place.line, place.column, f"graph {graph!r}: {message}")


class ScheduleError(Unusable):
    """The schedule cannot be used; its text is one line per fault, in the order of the file.

    `readable` is what could be read all the same, for whoever wants to find more faults in it, and for nothing else.
    """

    def __init__(self, faults: tuple[Fault, ...], readable: Schedule) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults
        self.readable = readable


def parse(text: str, *, path: str, environment: Mapping[str, str]) -> Schedule:
    """Return the schedule that a text holds; ScheduleError with all of its faults when it has any."""
    faults = Faults(path)
    root = read(text, faults)
    reader = _Reader(environment, faults, Faults(path))
    if root is not None:
        reader.top(root)
    elif not len(faults):
        faults.add(Place(1, 1), "the file is empty: it needs at least 'graphs:' with one graph")
    schedule = Schedule(path, reader.entries, reader.warnings.in_order())
    if len(faults):
        raise ScheduleError(faults.in_order(), schedule)
    return schedule


@dataclass
class _Reader:
    environment: Mapping[str, str]
    faults: Faults
    warnings: Faults
    entries: dict[str, Entry] = field(default_factory=dict)

    def top(self, root: Node) -> None:
        """Read the whole file."""
        if not isinstance(root, Tree):
            self.faults.add(root.place, "a mapping was expected, with the key 'graphs'")
            return
        for key, (place, _) in root.pairs.items():
            if key not in TOP_KEYS and not key.startswith("x-"):
                self.faults.add(place, _unknown(key, TOP_KEYS))
        defaults = self._defaults(root)
        graphs = self._graphs(root)
        for name, (place, node) in graphs.items():
            self._graph(name, place, node, defaults)
        self._collisions(graphs)
        if self.entries and not any(entry.enabled for entry in self.entries.values()):
            self.warnings.add(root.pairs["graphs"][0], "every graph is disabled: nothing will run")

    def _graphs(self, root: Tree) -> Pairs:
        if "graphs" not in root.pairs:
            self.faults.add(root.place, "the key 'graphs' is missing: it names the graphs to run")
            return {}
        place, node = root.pairs["graphs"]
        if isinstance(node, Tree) and node.pairs:
            return node.pairs
        self.faults.add(
            place, "'graphs' names no graph: write at least one, as a mapping from its name to its keys"
        )
        return {}

    def _defaults(self, root: Tree) -> Pairs:
        """Return what every graph starts from: the file's time zone and `defaults`, without what is wrong with them."""
        top = {"timezone": root.pairs["timezone"]} if "timezone" in root.pairs else {}
        own: Pairs = {}
        if "defaults" in root.pairs:
            place, node = root.pairs["defaults"]
            if isinstance(node, Tree):
                own = node.pairs
            elif not is_null(node) and not (isinstance(node, Scalar) and node.empty):
                self.faults.add(place, "'defaults' takes a mapping of keys that a graph may have")
        return {**self._usable(top, root.place, of=""), **self._usable(own, root.place, of="defaults: ")}

    def _usable(self, pairs: Pairs, place: Place, *, of: str) -> Pairs:
        keys = self._keys(Tree(_without_nulls(pairs), place), of=of)
        return {key: pair for key, pair in pairs.items() if key in keys.model_fields_set}

    def _graph(self, name: str, place: Place, node: Node, defaults: Pairs) -> None:
        of = f"graph {name!r}: "
        if problem := _bad_name(name):
            self.faults.add(place, problem)
        elif not isinstance(node, Tree):
            self.faults.add(place, "a mapping was expected, with 'graph' and one of cron, every, at", of=of)
        else:
            tree = Tree(_without_nulls(_merged(defaults, node.pairs)), place)
            self._triggers(tree, of=of)
            keys = self._keys(tree, of=of)
            reference = tree.pairs["graph"][1] if "graph" in tree.pairs else tree
            entry = Entry.model_construct(
                keys.model_fields_set, **self._settled(keys, tree, of=of), name=name, place=reference.place
            )
            self.entries[name] = entry
            self._fire_times(entry, tree, of=of)

    def _settled(self, keys: GraphKeys, tree: Tree, *, of: str) -> dict[str, Any]:
        """Return the keys with the defaults that hang on other keys."""
        values = dict(keys)
        if "grace" not in keys.model_fields_set:
            values["grace"] = default_grace(keys)
        if keys.mode == "claim":
            # Work that must not be lost waits for its turn, and every finished node is on disk before the next.
            values["overlap"] = keys.overlap if "overlap" in keys.model_fields_set else "queue"
            values["durability"] = keys.durability or "sync"
        elif keys.overlap == "queue":
            message = (
                "'queue' needs 'mode: claim': in skip mode a tick that finds its graph running is skipped"
            )
            self.faults.add(tree.pairs["overlap"][1].place, message, of=f"{of}overlap: ")
        return values

    def _triggers(self, tree: Tree, *, of: str) -> None:
        """Check what no key can know by itself: that there is a graph, and one way to say when."""
        if "graph" not in tree.pairs:
            self.faults.add(
                tree.place,
                "the key 'graph' is missing: ./file.py:attribute or package.module:attribute",
                of=of,
            )
        found = [key for key in TRIGGERS if key in tree.pairs]
        if not found:
            self.faults.add(
                tree.place, "one of cron, every, at is missing: nothing says when it fires", of=of
            )
        for key in found[1:]:
            self.faults.add(
                tree.pairs[key][0],
                f"{found[0]!r} and {key!r} stand together: a graph has one of cron, every, at",
                of=of,
            )
        if "anchor" in tree.pairs and "every" not in tree.pairs:
            self.faults.add(
                tree.pairs["anchor"][0],
                "'anchor' is from where 'every' counts, and there is no 'every'",
                of=of,
            )

    def _keys(self, tree: Tree, *, of: str) -> GraphKeys:
        """Return the keys, validated; one that is wrong is reported, and stands at what it is when left out."""
        known = self._known(tree, GraphKeys, (), of=of)
        try:
            return GraphKeys.model_validate(known)
        except ValidationError as error:
            for each in error.errors(include_url=False, include_input=False):
                self._invalid(tree, each["loc"], _said(each), of=of)
                known.pop(str(each["loc"][0]), None)
        return GraphKeys.model_validate(known)

    def _known(self, tree: Tree, model: type[Any], path: tuple[str, ...], *, of: str) -> dict[str, Any]:
        """Return the values of a mapping's known keys."""
        values = {}
        for key, (place, node) in tree.pairs.items():
            if key not in model.model_fields:
                self.faults.add(place, _unknown(key, tuple(model.model_fields)), of=of)
            elif isinstance(node, Scalar) and node.empty:
                self.faults.add(place, f"{key!r} has no value", of=of)
            else:
                values[key] = self._value(node, (*path, key), of=f"{of}{key}: ")
        return {key: value for key, value in values.items() if value is not None}

    def _value(self, node: Node, path: tuple[str, ...], *, of: str) -> Any:
        meaning = Meaning(self.environment, self.faults, of)
        if path in FREE and not isinstance(node, Scalar):
            return meaning.free(node, templates=path == ("input",))
        if isinstance(node, Scalar):
            return meaning.template(node) if path == ("thread",) else meaning.text(node)
        if isinstance(node, Items):
            return [self._value(each, path, of=of) for each in node.nodes]
        if path[-1] in NESTED:
            return self._known(Tree(_without_nulls(node.pairs), node.place), NESTED[path[-1]], path, of=of)
        return {}

    def _invalid(self, tree: Tree, location: tuple[str | int, ...], message: str, *, of: str) -> None:
        """Report what a validator said, where the value stands; what came from the environment is not shown."""
        node: Node = tree
        for step in location:
            if isinstance(node, Tree) and step in node.pairs:
                node = node.pairs[str(step)][1]
                of = f"{of}{step}: "
            elif isinstance(node, Items) and isinstance(step, int):
                node = node.nodes[step]
        if isinstance(node, Scalar) and placeholder.has_placeholder(node.text):
            if self.faults.any_at(node.place):
                return  # it could not even be filled
            message = f"what {node.text!r} stands for cannot be used here"
        self.faults.add(node.place, message, of=of)

    def _fire_times(self, entry: Entry, tree: Tree, *, of: str) -> None:
        """Refuse a graph that never fires, and say what is doubtful about one that does."""
        if entry.cron and entry.series.after(SOME_INSTANT) is None:
            self.faults.add(
                tree.pairs["cron"][1].place,
                "it never fires: no day and time of the calendar match",
                of=f"{of}cron: ",
            )
        if entry.cron:
            node = tree.pairs["cron"][1]
            for cron, each in zip(
                entry.cron, node.nodes if isinstance(node, Items) else (node,), strict=True
            ):
                for doubt in cron.doubts():
                    self.warnings.add(each.place, doubt, of=f"{of}cron: ")

    def _collisions(self, graphs: Pairs) -> None:
        """Refuse two graphs that would exclude each other, and two that would write to one thread."""
        keys: dict[int, str] = {}
        threads: dict[str, str] = {}
        for name, (place, _) in graphs.items():
            key = lock_key(name)
            other = keys.setdefault(key, name)
            if other != name:
                self.faults.add(
                    place, f"graphs {other!r} and {name!r} share the lock key {key}: rename one of them"
                )
        for name, entry in self.entries.items():
            place = graphs[name][0]
            thread = entry.thread_id(Tick(name, SOME_INSTANT))
            other = threads.setdefault(thread, name)
            if other != name:
                self.faults.add(
                    place,
                    f"graphs {other!r} and {name!r} would write to the same threads: name {{graph}} in 'thread'",
                )


def _said(error: ErrorDetails) -> str:
    """Return what a validator said; pydantic itself only misses keys and refuses what is no mapping."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return (
        f"the key {error['loc'][-1]!r} is missing" if error["type"] == "missing" else "a mapping was expected"
    )


def _merged(defaults: Pairs, own: Pairs) -> Pairs:
    """Return a graph's keys over the defaults: nested keys one by one, the triggers all or none."""
    dropped = {*TRIGGERS, "anchor"} if any(key in own for key in TRIGGERS) else set()
    merged = {key: pair for key, pair in defaults.items() if key not in dropped} | dict(own)
    for key in NESTED.keys() & defaults.keys() & own.keys():
        default, (place, node) = _spread(key, defaults[key][1]), own[key]
        if isinstance(default, Tree) and isinstance(node, Tree):
            merged[key] = (place, Tree({**default.pairs, **node.pairs}, node.place))
    return merged


def _spread(key: str, node: Node) -> Node:
    """Return the long form of `keep: 7d`, so that a graph can take over a part of it."""
    if key == "keep" and isinstance(node, Scalar):
        return Tree(dict.fromkeys(Keep.model_fields, (node.place, node)), node.place)
    return node


def _without_nulls(pairs: Pairs) -> Pairs:
    """Return the pairs without those that say null, which is how a graph takes back what `defaults` says."""
    return {key: (place, node) for key, (place, node) in pairs.items() if not is_null(node)}


def _unknown(key: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key[:64], known, n=1)
    home = next((name for name, model in NESTED.items() if name in known and key in model.model_fields), None)
    if SYNONYMS.get(key) in known:
        hint = f"did you mean {SYNONYMS[key]!r}?"
    elif home:
        hint = f"it is a key of {home!r}"
    else:
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown key {key[:64]!r}; {hint}"


def _bad_name(name: str) -> str | None:
    if not name or name != name.strip():
        return f"{name!r} is no name for a graph: it is empty, or has spaces around it"
    if placeholder.has_placeholder(name):
        return f"{name!r} is no name for a graph: placeholders are filled in values, not in names"
    if not name.isprintable() or len(name) > LONGEST_NAME:
        return f"{name[:40]!r} is no name for a graph: use at most {LONGEST_NAME} printable characters"
    return None
