import time

import pytest
import yaml

from tickd import document
from tickd.document import Faults, Items, Node, Place, Scalar, Tree, read


def _read(text: str) -> tuple[Node | None, list[str]]:
    faults = Faults("s.yaml")
    root = read(text, faults)
    return root, [str(fault) for fault in faults.in_order()]


def _plain(node: Node | None) -> object:
    if isinstance(node, Tree):
        return {key: _plain(value) for key, (_, value) in node.pairs.items()}
    if isinstance(node, Items):
        return [_plain(each) for each in node.nodes]
    return node.text if node else None


def test_every_key_and_value_knows_its_line_and_column():
    """Faults are only useful where the editor can jump to."""
    root, faults = _read("graphs:\n  a:\n    cron: '0 9 * * *'\n    at: [x, y]\n")
    assert faults == []
    assert isinstance(root, Tree)
    graph = root.pairs["graphs"][1]
    assert isinstance(graph, Tree)
    place, keys = graph.pairs["a"]
    assert isinstance(keys, Tree)
    assert place == Place(2, 3)
    assert keys.pairs["cron"] == (Place(3, 5), Scalar("0 9 * * *", plain=False, place=Place(3, 11)))
    assert keys.pairs["at"][1] == Items(
        (Scalar("x", plain=True, place=Place(4, 10)), Scalar("y", plain=True, place=Place(4, 13))),
        Place(4, 9),
    )


@pytest.mark.parametrize(
    "name", ["on", "off", "no", "yes", "null", "007", "1.10", "2026-05-04", "0x1F", "1_000", "~", "12:30"]
)
def test_a_scalar_stays_the_text_that_was_written(name):
    """YAML 1.1 loaders turn these into flags, numbers and dates, and `no` and `off` into one key."""
    root, faults = _read(f"{name}: {name}\nother: 1")
    assert (_plain(root), faults) == ({name: name, "other": "1"}, [])


def test_no_and_off_are_two_keys():
    """A loader that makes flags of them drops one graph without a word."""
    root, faults = _read("no: a\noff: b\n")
    assert (_plain(root), faults) == ({"no": "a", "off": "b"}, [])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("graphs:\n  a:\n    cron: * * * * *\n", "3:11"),
        ("graphs:\n  a:\n    cron: */5 * * * *\n", "3:11"),
        ("graphs:\n  a:\n    cron: @hourly\n", "3:11"),
        ("graphs:\n  a:\n    cron: [*/5 * * * *]\n", "3:12"),
        ("graphs:\n  a:\n    cron:\n      - */5 * * * *\n", "4:9"),
        ("graphs:\n  a: {cron: @daily}\n", "2:13"),
    ],
)  # fmt: skip
def test_an_unquoted_star_or_at_sign_is_found_and_the_quotes_are_suggested(text, place):
    """It is the first mistake of everybody who pastes a crontab line."""
    root, faults = _read(text)
    assert root is None
    assert len(faults) == 1
    assert faults[0].startswith(f"s.yaml:{place}: ")
    assert "quotes" in faults[0]
    assert '"*/5 * * * *"' in faults[0]


def test_an_unquoted_expression_that_starts_with_a_digit_is_fine():
    """Only what YAML itself gives a meaning needs quotes."""
    root, faults = _read("cron: 0 9 * * *")
    assert (_plain(root), faults) == ({"cron": "0 9 * * *"}, [])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: b: c", "s.yaml:1:5: a ': ' too many on this line: quote the value, or check the indentation"),
        ("a: 'x", "s.yaml:1:4: a quote is opened and never closed"),
        ("a: [1, 2\nb: 3\n", "s.yaml:2:2: inside [ ] or { } a comma or the closing bracket is missing; a text with brackets, ${NAME} too, needs quotes there"),
        ("a: [1\n", "s.yaml:1:4: inside [ ] or { } a comma or the closing bracket is missing; a text with brackets, ${NAME} too, needs quotes there"),
        ("a: {b: ${N}}", "s.yaml:1:9: inside [ ] or { } a comma or the closing bracket is missing; a text with brackets, ${NAME} too, needs quotes there"),
        ("a:\n\tb: 1", "s.yaml:2:1: this character cannot start a value: quote the value; indent with spaces, not tabs"),
        ("a: 1\n b: 2", "s.yaml:2:3: a ': ' too many on this line: quote the value, or check the indentation"),
        ("a:\n  - 1\n  b: 2", "s.yaml:3:3: this does not fit what stands above it: check the indentation, or quote the value"),
        ("thread: {graph}/x", "s.yaml:1:16: this does not fit what stands above it: check the indentation, or quote the value"),
        ("abc\ndef: 1\n", "s.yaml:2:4: a ': ' too many on this line: quote the value, or check the indentation"),
        ("a:\n  b\n  c\n- d", "s.yaml:4:1: this does not fit what stands above it: check the indentation, or quote the value"),
        ("%FOO\n---\na: 1", "s.yaml:1:5: a line that starts with % is for YAML itself: remove it"),
        ("a: |x\n b", "s.yaml:1:5: this is not YAML: check quotes, brackets and indentation here"),
        ("a: \x07", "s.yaml:1:4: the character U+0007 may not stand in YAML: remove it"),
        ("a: 1\nb: 'x\ud800'", "s.yaml:2:6: the character U+D800 may not stand in YAML: remove it"),
    ],
)  # fmt: skip
def test_what_is_not_yaml_is_said_with_its_place_and_what_to_do(text, fault):
    """A parser's own words ("while scanning a simple key") help nobody."""
    assert _read(text) == (None, [fault])


@pytest.mark.parametrize("secret", ["p@ss\\word", "s3cr\\Zet", "\\ud800", "\\xZZ"])
def test_a_bad_escape_is_said_without_the_text_it_stands_in(secret):
    """That text may be a password, and a log is no place for one."""
    root, (fault,) = _read(f'a:\n  password: "{secret}"')
    assert root is None
    assert fault.startswith("s.yaml:2:")
    assert "write \\\\, or use single quotes" in fault
    assert not any(secret[i : i + 4] in fault for i in range(len(secret) - 3))


def test_duplicate_keys_are_refused_with_both_lines():
    """The last one would win in silence."""
    root, faults = _read("a:\n  cron: 1\n  every: 2\n  cron: 3\na: 4\n")
    assert faults == [
        "s.yaml:4:3: key 'cron' stands twice: it is on line 2 already",
        "s.yaml:5:1: key 'a' stands twice: it is on line 1 already",
    ]
    assert _plain(root) == {"a": {"cron": "1", "every": "2"}}


def test_a_merge_key_brings_what_is_not_written_and_earlier_sources_win():
    """Anchors are how schedules avoid repetition; overriding is the point of them."""
    root, faults = _read("x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  <<: [*x, *y]\n  a: 3\n")
    assert faults == []
    assert _plain(root) == {
        "x": {"a": "1", "b": "1"},
        "y": {"b": "2", "c": "2"},
        "z": {"a": "3", "b": "1", "c": "2"},
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a:\n  <<: 1", "s.yaml:2:7: << takes an alias of a mapping, or a list of them"),
        ("x: &x {}\na:\n  <<: *x\n  <<: *x", "s.yaml:4:3: << stands twice: write one, with a list of aliases"),
        ("a: *b", "s.yaml:1:4: *b is an alias of nothing: no &b stands before it; a text that starts with * needs quotes"),
        ("a: &b [*b]", "s.yaml:1:8: *b is an alias of nothing: no &b stands before it; a text that starts with * needs quotes"),
        ("? [a]\n: 1", "s.yaml:1:3: a key is a text, not a list or a mapping: a text that starts with { or [ needs quotes"),
        ("a: !!python/object:os.system x", f"s.yaml:1:4: {document.TAGS}"),
        ("a: !!binary x", f"s.yaml:1:4: {document.TAGS}"),
        ("a: !e!x 1", f"s.yaml:1:4: {document.TAGS}"),
        ("--- a\n--- b", "s.yaml:2:1: a second YAML document starts here: a schedule is one document"),
        ("%YAML 1.1\n---\na: on", "s.yaml:1:1: this file is read as YAML 1.2: remove the %YAML line"),
        ('a: "\\0"', "s.yaml:1:4: the character U+0000 cannot be stored by Postgres: remove it"),
        ("- " * 80 + "a", "s.yaml:1:129: nested more than 64 levels deep"),
        ("[" * 5000, "s.yaml:1:1001: nested far too deep"),
    ],
)  # fmt: skip
def test_what_yaml_allows_and_a_schedule_does_not(text, fault):
    """Each of these either means something else than it seems to, or is an attack."""
    assert _read(text)[1] == [fault]


def test_faults_after_the_first_are_found_too():
    """All faults are reported together; only the parser itself may give up."""
    assert [fault.split(":")[1] for fault in _read("a: *x\nb: !t 1\nb: 2\n? {}\n: 3\n")[1]] == [
        "1",
        "2",
        "3",
        "4",
    ]


def test_an_alias_bomb_is_refused_at_once():
    """Nine lines would stand for five million values."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    for one, two in zip("abcdefg", "bcdefgh", strict=True):
        bomb += f"{two}: &{two} [{','.join([f'*{one}'] * 9)}]\n"
    begin = time.perf_counter()
    root, faults = _read(bomb)
    assert time.perf_counter() - begin < 1
    assert root is None
    assert faults == ["s.yaml:5:8: the aliases of this file stand for far more than is written in it"]


def test_aliases_may_stand_for_as_much_as_is_written():
    """A thousand graphs that share their defaults are no bomb."""
    text = "x-d: &d {timeout: 1m, grace: 1m, keep: 1d, durability: sync}\n"
    text += "".join(f"graph_{i}: {{<<: *d, graph: 'a:b', every: 1m}}\n" for i in range(2_000))
    assert _read(text)[1] == []


@pytest.mark.parametrize("text", ["", "# only a comment\n", "\n\n", "\ufeff"])
def test_a_text_without_content_has_no_root(text):
    """It is for the schedule to say what is missing."""
    assert _read(text) == (None, [])


def test_a_byte_order_mark_is_no_fault():
    """Windows editors write one."""
    root, faults = _read("\ufeffa: 1")
    assert (_plain(root), faults) == ({"a": "1"}, [])


def test_the_parser_in_python_reads_the_same(monkeypatch):
    """A PyYAML built without libyaml has no other."""
    text = "x: &x {a: 1, b: 'on'}\ny: [*x, no, \"z\\n\"]\nz:\n  <<: *x\n  c: |\n    long\n"
    with_libyaml = _read(text)
    monkeypatch.setattr(document, "LOADER", yaml.SafeLoader)
    assert _read(text) == with_libyaml
