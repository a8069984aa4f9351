"""The reader against input that nobody would write: it answers in faults, soon, and in bounded memory."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tickd.errors import Unusable
from tickd.schedule import ScheduleError, parse
from tickd.schedule_file import read


SECOND = 1.0
GOOD = Path("config/schedule.yaml")
ENVIRONMENT = {"A": "a", "BRACES": "{}{{", "QUOTES": "'\"", "LINES": "a\nb: c", "EMPTY": ""}
ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / GOOD).read_text(encoding="utf-8")
# What means something to YAML, to cron, to a template or to a placeholder, and what is at the edge of a number.
TOKENS = [
    *"{}[]*&!|>%@`'\"#,:-?~\\\t\n ", ": ", "- ", "? ", "<<: ", "<<: *a\n", "&a ", "*a", "!!str ", "!!python/object:os.system ", "--- ", "...\n", "%YAML 1.1\n",
    "\n  ", "\n    ", "${", "${A}", "${BRACES}", "${LINES}", "$${A}", "${NO:-x}", "${A:-${B}}", "{graph}", "{fire_time}", "{{", "}}", "{x!r:>9}",
    "null", "true", "no", "0777", "1_000", "1e999", ".nan", "9" * 50, "-0", "0x", "12:30", "2026-05-04", "@reboot", "@hourly", "*/0", "*/7", "L/2", "mon#9", "0 0 31 2 *",
    "graphs:\n", "graphs: ", "defaults: ", "timezone: ", "  a:\n", "    graph: a:b\n", "    cron: ", "    every: ", "    at: ", "    input: ", "    config: ", "    keep: ", "    retries: ",
    "\x00", "\x07", "\x85", "\u2028", "\ufeff", "\ufffe", "\ud800", "\u00a0", "\U0001f600", "é",
]  # fmt: skip


def answer(text: str) -> None:
    """Read a text; fail unless the answer is a schedule, or faults that a person can use, within a second."""
    begin = time.process_time()
    try:
        parse(text, path="s.yaml", environment=ENVIRONMENT)
    except ScheduleError as error:
        lines = len(text.splitlines()) + 1
        for fault in error.faults:
            assert 1 <= fault.line <= lines
            assert fault.column >= 1
            assert fault.message
            assert "\n" not in str(fault)
            assert len(str(fault)) < 1000
            assert not any(
                word in fault.message for word in ("Traceback", "pydantic", "Input should", "object at 0x")
            )
    assert time.process_time() - begin < SECOND


@given(st.text(max_size=300))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_answered(text):
    """No input whatever gives a traceback."""
    answer(text)


@given(st.lists(st.sampled_from(TOKENS), max_size=60).map("".join))
@settings(max_examples=400, deadline=None)
def test_any_pile_of_tokens_is_answered(text):
    """Random text rarely gets past the scanner; these do."""
    answer(text)


@given(
    st.lists(
        st.tuples(st.integers(0, len(EXAMPLE)), st.integers(0, 30), st.sampled_from(["", *TOKENS])),
        max_size=8,
    )
)
@settings(max_examples=400, deadline=None)
def test_any_mutilated_schedule_is_answered(cuts):
    """Close to a real file is where the reader's own code is."""
    text = EXAMPLE
    for position, length, token in cuts:
        text = text[:position] + token + text[position + length :]
    answer(text)


KEYS = ["graph", "cron", "every", "anchor", "at", "timezone", "jitter", "enabled", "input", "context", "config", "thread", "timeout",
        "grace", "retries", "mode", "missed", "catch_up", "max_backlog", "overlap", "lock", "hold", "keep", "durability", "nope"]  # fmt: skip
SCALARS = st.one_of(
    st.sampled_from(["a:b", "'0 9 * * *'", "1s", "2026-01-01T00:00:00Z", "UTC", "true", "skip", "claim", "null", "~", "''", "'{graph}'", "'${A}'"]),
    st.sampled_from(TOKENS).map(lambda token: repr(token).replace("\\'", "''")),
    st.integers().map(str),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]"),
        st.dictionaries(
            st.sampled_from(["threads", "tags", "attempts", "metadata", "recursion_limit", "x"]),
            inner,
            max_size=3,
        ).map(lambda each: "{" + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}"),
    ),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), max_size=3),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_any_value_of_any_key_is_answered(graphs, defaults):
    """Each key meets each kind of value, in the graph and in the defaults."""
    text = "defaults:\n" + "".join(f"  {key}: {value}\n" for key, value in defaults.items()) + "graphs:\n"
    for number, keys in enumerate(graphs):
        text += f"  g{number}:\n" + "".join(f"    {key}: {value}\n" for key, value in keys.items())
    answer(text)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_answered(tmp_path, data):
    """A file is bytes before it is text."""
    path = tmp_path / "s.yaml"
    path.write_bytes(data)
    with pytest.raises(Unusable):
        read(path, ENVIRONMENT)


def _bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines)


def _merge_bomb() -> str:
    lines = ["x-0: &m0 {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}", "graphs:"]
    return "\n".join(lines + [f"  g{n}: {{<<: *m0}}" for n in range(2000)])


NASTY = {
    "alias bomb": _bomb(),
    "merge bomb": _merge_bomb(),
    "brackets": "[" * 200_000,
    "braces": "{a: " * 50_000,
    "dashes": "- " * 100_000,
    "question marks": "? " * 100_000,
    "indentation": "".join(" " * n + "a:\n" for n in range(600)),
    "one long text": "graphs: {a: {graph: a:b, every: 1s, input: {x: '" + "y" * 1_000_000 + "'}}}",
    "one long key": "x" * 900 + ": 1\n" + "'" + "y" * 100_000 + "': 1",
    "one long cron": "graphs: {a: {graph: a:b, cron: '" + "1," * 50_000 + " * * * *'}}",
    "one long number": "graphs: {a: {graph: a:b, every: 1s, input: {x: " + "9" * 200_000 + "}}}",
    "one long duration": "graphs: {a: {graph: a:b, every: " + "9" * 200_000 + "s}}",
    "one long reference": "graphs: {a: {every: 1s, graph: '" + "a." * 50_000 + "'}}",
    "one long template": "graphs: {a: {graph: a:b, every: 1s, thread: '" + "{graph}" * 20_000 + "{'}}",
    "many placeholders": "graphs: {a: {graph: a:b, every: 1s, thread: '" + "${" * 50_000 + "'}}",
    "many anchors": "\n".join(f"a{n}: &a{n} 1" for n in range(5_000)),
    "many documents": "--- a\n" * 50_000,
    "many duplicates": "a: 1\n" * 10_000,
    "many comments": "# x\n" * 100_000,
    "many unknown keys": "graphs:\n  a:\n" + "".join(f"    key{n}: 1\n" for n in range(1_000)),
    "never-ending gap": "graphs: {a: {graph: a:b, timezone: America/New_York, cron: '*/5 2 * 3 0#2'}}",
    "quotes": "'" * 100_001,
    "escapes": '"' + "\\x41" * 50_000 + '"',
    "carriage returns": "a: 1\r" * 20_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", NASTY)
def test_what_was_made_to_hurt_is_answered(kind):
    """Each of these has stopped some YAML reader somewhere."""
    answer(NASTY[kind])


def test_nothing_of_all_this_needs_much_memory(tmp_path):
    """A bomb that is refused must not have been expanded before."""
    paths = []
    for number, text in enumerate(NASTY.values()):
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(text)
    code = (
        "import resource, sys\n"
        "from tickd.errors import Unusable\n"
        "from tickd.schedule_file import read\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n        read(path, {})\n    except Unusable:\n        pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    limit = 1024**3
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert int(done.stdout) < 200 * 1024
