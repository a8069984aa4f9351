"""check, next, schema and init, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.replicas import ROOT
from tests.sessions import Session, forget
from tickd.cli import main
from tickd.errors import Unusable
from tickd.schedule_file import read


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: object
    stdout: str
    stderr: str


GRAPH = """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph

class State(TypedDict, total=False):
    done: bool

builder = StateGraph(State)
builder.add_node("work", lambda state: {"done": True})
builder.add_edge(START, "work")
builder.add_edge("work", END)
graph = builder.compile()
nothing = None

def make():
    return builder

async def make_later():
    return builder.compile()

def breaks():
    raise RuntimeError("no model today")

def make_input(tick):
    return {}

loose = StateGraph(State)
loose.add_edge(START, "nowhere")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a file of graphs of every sort."""
    (tmp_path / "graphs.py").write_text(GRAPH)
    (tmp_path / "broken.py").write_text("import json\n\nraise RuntimeError('supplier feed down')\n")
    (tmp_path / "chatty.py").write_text("print('hello from the graph')\n" + GRAPH)
    (tmp_path / "own_saver.py").write_text(
        GRAPH
        + "from langgraph.checkpoint.memory import InMemorySaver\ngraph = builder.compile(checkpointer=InMemorySaver())\n"
    )
    return tmp_path


def tickd(*arguments: str, cwd: Path = ROOT, code: int = 0, **environment: str) -> Done:
    """Run a command; fail when it leaves with another code, or with a traceback."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TICKD_")} | environment
    command = [sys.executable, "-m", "tickd", *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)
    return checked(Done(done.returncode, done.stdout, done.stderr), code)


@pytest.fixture
def here(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a command as `tickd` does, in the directory of the graphs, in this process: for those that import no graph."""
    monkeypatch.chdir(directory)
    monkeypatch.delenv("TICKD_SCHEDULE", raising=False)

    def run(*arguments: str, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["tickd", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return checked(Done(end.value.code, output.out, output.err), code)

    return run


def checked(done: Done, code: int) -> Done:
    """Return what a command did, if it is what was expected of it."""
    assert done.code == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


def lines(done: Done) -> list[dict[str, Any]]:
    """Return what a command printed as JSON, one object a line."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def write(directory: Path, text: str) -> str:
    """Write a schedule and return its name."""
    (directory / "schedule.yaml").write_text(text)
    return "schedule.yaml"


# check


def test_a_schedule_that_is_right_is_said_to_be(directory):
    """Exit code 0 is what a pipeline waits for."""
    file = write(
        directory,
        "graphs:\n  a: {graph: ./graphs.py:graph, every: 1s}\n  b: {graph: 'graphs:make', every: 1s, input: 'graphs:make_input'}\n",
    )
    done = tickd("check", file, cwd=directory)
    assert (done.stdout, done.stderr) == ("schedule.yaml: 2 graphs, nothing wrong\n", "")
    assert lines(tickd("check", file, "--json", cwd=directory)) == [
        {"event": "schedule.loaded", "file": "schedule.yaml", "graphs": 2, "warnings": []}
    ]


def test_a_factory_that_breaks_down_is_said_of_its_graph_and_no_traceback(directory):
    """Whether it does so when it is opened or when it is closed; the graphs after it are looked at all the same."""
    (directory / "tools.py").write_text(
        "import asyncio\n"
        "from contextlib import asynccontextmanager\n"
        "from graphs import graph\n"
        "async def gives_up():\n"
        "    raise asyncio.CancelledError\n"
        "@asynccontextmanager\n"
        "async def loses_its_server():\n"
        "    async with asyncio.TaskGroup() as group:\n"
        "        async def child():\n"
        "            raise ConnectionError('tool server went away')\n"
        "        group.create_task(child())\n"
        "        yield graph\n"
    )
    file = write(
        directory,
        "graphs:\n"
        "  a: {graph: ./tools.py:loses_its_server, every: 1s}\n"
        "  b: {graph: ./tools.py:gives_up, every: 1s}\n"
        "  c: {graph: ./graphs.py:nope, every: 1s}\n",
    )
    done = tickd("check", file, cwd=directory, code=2)
    cancelled, missing = done.stderr.splitlines()
    assert "graph 'b': its factory raised CancelledError" in cancelled
    assert "graph 'c'" in missing

    file = write(directory, "graphs:\n  a: {graph: ./tools.py:loses_its_server, every: 1s}\n")
    warning, verdict = tickd("check", file, cwd=directory).stdout.splitlines()
    assert (
        "graph 'a': what its factory held open could not be closed: ConnectionError: tool server went away"
        in warning
    )
    assert verdict == "schedule.yaml: 1 graph, nothing wrong"


def test_faults_of_the_file_and_of_its_graphs_are_reported_together(directory):
    """Exit code 2, one line each, in the order of the file; nothing is left for the second try."""
    file = write(
        directory,
        "timezon: UTC\n"
        "graphs:\n"
        "  attribute: {graph: ./graphs.py:nope, every: 1s}\n"
        "  module: {graph: nopkg.mod:g, every: 1s}\n"
        "  file: {graph: ./nope.py:g, every: 1s}\n"
        "  raises: {graph: ./broken.py:graph, every: 1s}\n"
        "  none: {graph: ./graphs.py:nothing, every: 1s}\n"
        "  loose: {graph: ./graphs.py:loose, every: 1s}\n"
        "  factory: {graph: ./graphs.py:breaks, every: 1s}\n"
        "  function: {graph: ./graphs.py:graph, every: 1s, input: 'graphs:nope'}\n"
        "  colon: {graph: graphs, every: 1s}\n"
        "  later: {graph: ./graphs.py:make_later, every: 1s, timeout: 1}\n"
        "  off: {graph: ./nope.py:g, every: 1s, enabled: false}\n",
    )
    done = tickd("check", file, cwd=directory, code=2)
    assert done.stdout == ""
    faults = done.stderr.splitlines()
    assert [fault.split(":")[1] for fault in faults] == [
        "1",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "9",
        "10",
        "11",
        "12",
    ]
    for fault, words in zip(
        faults,
        ["unknown key 'timezon'", "'nope'", "No module named 'nopkg'", "there is no file", "supplier feed down", "NoneType", "cannot be compiled",
         "its factory raised RuntimeError: no model today", "'graphs:nope' is not a function", "has no ':'", "'1' is not a duration"],
        strict=True,
    ):  # fmt: skip
        assert words in fault
    (rejected,) = lines(tickd("check", file, "--json", cwd=directory, code=2))
    assert (rejected["event"], rejected["file"], rejected["error"]) == (
        "schedule.rejected",
        "schedule.yaml",
        done.stderr.rstrip("\n"),
    )
    assert rejected["faults"][1] == {
        "file": "schedule.yaml", "line": 3, "column": 22, "message": faults[1].removeprefix("schedule.yaml:3:22: "),
    }  # fmt: skip


def test_doubts_are_warnings_and_no_reason_to_stop(directory):
    """They are printed where they stand; the exit code is 0."""
    file = write(
        directory,
        "graphs:\n"
        "  a: {graph: ./own_saver.py:graph, cron: '*/7 * * * *'}\n"
        "  b: {graph: ./graphs.py:graph, at: 2020-01-01T00:00:00Z}\n",
    )
    done = tickd("check", file, cwd=directory)
    first, second, third, last = done.stdout.splitlines()
    assert first.startswith(
        "schedule.yaml:2:14: warning: graph 'a': it was compiled with a checkpointer of its own"
    )
    assert second.startswith("schedule.yaml:2:42: warning: graph 'a': cron: minute '*/7': 7 does not divide")
    assert (
        third
        == "schedule.yaml:3:14: warning: graph 'b': its last fire time is over: it does not fire any more"
    )
    assert last == "schedule.yaml: 2 graphs, nothing wrong"
    (loaded,) = lines(tickd("check", file, "--json", cwd=directory))
    assert [warning["line"] for warning in loaded["warnings"]] == [2, 2, 3]


def test_what_a_graph_prints_at_import_does_not_spoil_the_json(directory):
    """Programs read our stdout."""
    file = write(directory, "graphs: {a: {graph: ./chatty.py:graph, every: 1s}}\n")
    done = tickd("check", file, "--json", cwd=directory)
    assert [line["event"] for line in lines(done)] == ["schedule.loaded"]
    assert "hello from the graph" in done.stderr


def test_a_graph_of_langgraphs_own_project_file_needs_one_line(directory):
    """An existing project names its graphs already."""
    (directory / "langgraph.json").write_text(
        json.dumps(
            {
                "dependencies": ["."],
                "graphs": {"agent": "./graphs.py:graph", "later": {"path": "./graphs.py:make"}},
            }
        )
    )
    file = write(
        directory,
        "graphs:\n  a: {graph: langgraph.json#agent, every: 1s}\n  b: {graph: langgraph.json#later, every: 1s}\n",
    )
    assert tickd("check", file, cwd=directory).stdout == "schedule.yaml: 2 graphs, nothing wrong\n"
    file = write(
        directory,
        "graphs:\n  a: {graph: langgraph.json#agnt, every: 1s}\n  b: {graph: nope.json#x, every: 1s}\n",
    )
    first, second = tickd("check", file, cwd=directory, code=2).stderr.splitlines()
    assert first.startswith("schedule.yaml:2:14: graph 'a': ")
    assert "'agnt'" in first
    assert "agent, later" in first
    assert "nope.json cannot be read: No such file or directory" in second


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "graphs:\n",
        "graphs: {}\n",
        "graphs: []\n",
        "cron: * * * * *\n",
        "a: !!python/object:os.system x\n",
    ],
)
def test_a_file_that_says_nothing_is_refused_in_one_line(directory, here, text):
    """No traceback, and the line names the file."""
    file = write(directory, text)
    done = here("check", file, code=2)
    assert done.stderr.startswith("schedule.yaml:1:")
    assert done.stderr.count("\n") in (1, 2, 3)
    assert lines(here("check", file, "--json", code=2))[0]["event"] == "schedule.rejected"


def test_a_file_that_cannot_be_read_is_refused_in_one_line(directory, here):
    """Missing, a directory, unreadable, not text: each a plain sentence."""
    (directory / "folder").mkdir()
    (directory / "bytes.yaml").write_bytes(b"graphs:\n  \xff: 1\n")
    for name, words in {
        "missing.yaml": "missing.yaml: there is no such file; `tickd init` writes a schedule to start from\n",
        "folder": "folder: this is a directory; name the schedule file itself\n",
        "bytes.yaml": "bytes.yaml:2:3: this is not UTF-8: save the file as UTF-8\n",
        "x" * 300: f"{'x' * 300}: cannot be read: File name too long\n",
    }.items():
        for command in ("check", "next"):
            assert here(command, name, code=2).stderr == words
        (rejected,) = lines(here("check", name, "--json", code=2))
        assert (rejected["event"], rejected["error"] + "\n") == ("schedule.rejected", words)


def test_an_unreadable_file_is_refused_in_one_line(directory):
    """Root reads everything, so for a moment we are somebody else."""
    file = directory / write(directory, "graphs: {}\n")
    file.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(Unusable) as refusal:
            read(file, {})
    finally:
        os.seteuid(user)
    assert str(refusal.value) == f"{file}: cannot be read: Permission denied"


def test_the_schedule_is_found_in_the_environment_or_by_its_usual_name(directory, here, monkeypatch):
    """TICKD_SCHEDULE names it for every command alike."""
    write(directory, "graphs: {a: {graph: a:b, every: 1s}}\n")
    (directory / "other.yaml").write_text("graphs: {b: {graph: a:b, every: 1s}}\n")
    assert {line["graph"] for line in lines(here("next", "--json"))} == {"a"}
    monkeypatch.setenv("TICKD_SCHEDULE", "other.yaml")
    assert {line["graph"] for line in lines(here("next", "--json"))} == {"b"}


def test_the_schedule_is_found_in_the_dot_env_file_as_a_replica_finds_it(directory, here):
    """Whatever else is wrong there: these commands need no database."""
    write(directory, "graphs: {a: {graph: a:b, every: 1s}}\n")
    (directory / "other.yaml").write_text("graphs: {b: {graph: a:b, every: 1s}}\n")
    (directory / ".env").write_text("TICKD_SCHEDULE=other.yaml\nTICKD_LOCK_SPACE=seven\n")
    assert {line["graph"] for line in lines(here("next", "--json"))} == {"b"}


@pytest.mark.parametrize(
    "text",
    [
        "graphs: {a: {graph: ./graphs.py:graph, cron: * * * * *}}\n",
        "graphs: {a: {graph: ./graphs.py:graph, every: 1s, timezon: UTC}}\n",
        "graphs: {a: {graph: ./graphs.py:graph, every: 1s}, a: {graph: ./graphs.py:graph, every: 1s}}\n",
        "graphs: {a: {graph: ./graphs.py:nope, every: 1s}}\n",
    ],
)
def test_a_replica_refuses_what_check_refuses(directory, text):
    """One verdict: exit code 2, a line for people, and schedule.rejected for programs."""
    file = write(directory, text)
    fault = tickd("check", file, cwd=directory, code=2).stderr.split(": ", 1)[1].removeprefix("graph 'a': ")
    done = tickd(
        "run",
        file,
        "--json",
        cwd=directory,
        code=2,
        TICKD_DATABASE_URL="postgresql://tickd@127.0.0.1:1/tickd",
    )
    (rejected,) = [line for line in lines(done) if line["event"] == "schedule.rejected"]
    assert fault.strip() in rejected["error"]
    assert fault in done.stderr


# next


MIDNIGHT = "timezone: America/New_York\ngraphs:\n  G: {graph: a:b, cron: '0 0 * * *'}\n  off: {graph: a:b, every: 1h, enabled: false}\n"


def test_fire_times_are_printed_one_json_object_a_line(directory):
    """The night of the spring change is in between, and no tick is lost."""
    file = write(directory, MIDNIGHT)
    found = lines(
        tickd(
            "next",
            file,
            "--graph",
            "G",
            "--after",
            "2026-03-07T06:00:00Z",
            "--count",
            "3",
            "--json",
            cwd=directory,
        )
    )
    assert [(line["graph"], line["fire_time"]) for line in found] == [
        ("G", "2026-03-08T05:00:00Z"),
        ("G", "2026-03-09T04:00:00Z"),
        ("G", "2026-03-10T04:00:00Z"),
    ]
    assert found[1] == {
        "graph": "G", "fire_time": "2026-03-09T04:00:00Z", "local_time": "2026-03-09T00:00:00-04:00", "timezone": "America/New_York", "start_delay_ms": 0.0,
    }  # fmt: skip


def test_fire_times_of_several_graphs_are_merged_in_order(directory, here):
    """What happens next, whichever graph it is."""
    file = write(directory, "graphs:\n  b: {graph: a:b, every: 10m}\n  a: {graph: a:b, every: 15m}\n")
    done = here("next", file, "--after", "2026-05-04T10:00:00Z", "--until", "2026-05-04T10:30:00Z")
    assert done.stdout.splitlines() == [
        "2026-05-04T10:10:00Z  Mon 2026-05-04 10:10:00 +0000  b",
        "2026-05-04T10:15:00Z  Mon 2026-05-04 10:15:00 +0000  a",
        "2026-05-04T10:20:00Z  Mon 2026-05-04 10:20:00 +0000  b",
        "2026-05-04T10:30:00Z  Mon 2026-05-04 10:30:00 +0000  a",
        "2026-05-04T10:30:00Z  Mon 2026-05-04 10:30:00 +0000  b",
    ]
    assert len(lines(here("next", file, "--json"))) == 10
    assert {
        line["graph"] for line in lines(here("next", file, "--json", "--graph", "a", "--count", "2"))
    } == {"a"}


def test_a_disabled_graph_is_shown_only_when_it_is_named(directory, here):
    """It does not fire; but one may ask when it would."""
    file = write(directory, MIDNIGHT)
    assert {line["graph"] for line in lines(here("next", file, "--json"))} == {"G"}
    assert {line["graph"] for line in lines(here("next", file, "--json", "--graph", "off"))} == {"off"}


def test_an_explanation_has_the_words_the_zone_the_local_times_and_each_change_of_the_clocks(directory, here):
    """Cron surprises on two nights a year; here they are pointed out beforehand."""
    file = write(
        directory,
        "timezone: America/New_York\ngraphs:\n  G: {graph: a:b, cron: ['30 2 * * *', '*/30 3 * * *'], jitter: 5m}\n",
    )
    done = here("next", file, "--explain", "--after", "2026-03-07T12:00:00Z", "--count", "4")
    assert done.stdout.splitlines() == [
        "G, in America/New_York",
        '  cron "30 2 * * *": At 02:30 every day',
        '  cron "*/30 3 * * *": Every 30th minute from 03:00 through 03:59',
        "  each tick starts up to 5m later, the same on every replica",
        '  2026-03-08T07:00:00Z  -- clocks go forward from 02:00:00 to 03:00:00: of "30 2 * * *" a time in between fires once, at the end of the gap; of "*/30 3 * * *" nothing fires in between',
        "  2026-03-08T07:00:00Z  Sun 2026-03-08 03:00:00 -0400",
        "  2026-03-08T07:30:00Z  Sun 2026-03-08 03:30:00 -0400",
        "  2026-03-09T06:30:00Z  Mon 2026-03-09 02:30:00 -0400",
        "  2026-03-09T07:00:00Z  Mon 2026-03-09 03:00:00 -0400",
    ]  # fmt: skip
    (explained,) = lines(
        here(
            "next",
            file,
            "--explain",
            "--json",
            "--after",
            "2026-10-31T12:00:00Z",
            "--count",
            "2",
        )
    )
    assert explained["triggers"][0] == {"written": 'cron "30 2 * * *"', "words": "At 02:30 every day"}
    assert [change["instant"] for change in explained["clock_changes"]] == ["2026-11-01T06:00:00Z"]
    assert explained["clock_changes"][0]["from"] == "02:00:00"
    assert [time["local_time"] for time in explained["fire_times"]] == [
        "2026-11-01T02:30:00-05:00",
        "2026-11-01T03:00:00-05:00",
    ]


def test_an_explanation_of_intervals_and_instants(directory, here):
    """They have words, too, and no clock changes anything."""
    file = write(
        directory,
        "timezone: Europe/Oslo\ngraphs:\n"
        "  a: {graph: a:b, every: 90m, anchor: 2026-01-01T00:30:00Z, enabled: false}\n"
        "  b: {graph: a:b, at: [2026-10-26T00:00:00Z]}\n",
    )
    done = here(
        "next",
        file,
        "--graph",
        "a",
        "--graph",
        "b",
        "--explain",
        "--after",
        "2026-10-24T12:00:00Z",
        "--until",
        "2026-10-24T14:00:00Z",
    )
    assert done.stdout.splitlines() == [
        "a (disabled: it does not fire), in Europe/Oslo",
        "  every 90m: Every 90m of elapsed time, counted from 2026-01-01T00:30:00Z",
        "  2026-10-24T12:30:00Z  Sat 2026-10-24 14:30:00 +0200",
        "  2026-10-24T14:00:00Z  Sat 2026-10-24 16:00:00 +0200",
        "b, in Europe/Oslo",
        "  at: 2026-10-26T00:00:00Z",
        "  nothing fires after 2026-10-24T12:00:00Z until 2026-10-24T14:00:00Z",
    ]
    done = here("next", file, "--graph", "b", "--explain", "--after", "2026-10-24T12:00:00Z")
    assert "-- clocks go back from 03:00:00 to 02:00:00: elapsed time goes on, nothing changes" in done.stdout


def test_nothing_to_come_is_said(directory, here):
    """An empty answer looks like a broken command."""
    file = write(directory, "graphs: {a: {graph: a:b, at: 2020-01-01T00:00:00Z}}")
    assert (
        here("next", file, "--after", "2026-01-01T00:00:00Z").stdout
        == "nothing fires after 2026-01-01T00:00:00Z\n"
    )
    assert here("next", file, "--json").stdout == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--graph", "GG"), "schedule.yaml has no graph 'GG'; did you mean 'G'?"),
        (("--graph", "xyz"), "schedule.yaml has no graph 'xyz'; it has G, off"),
        (("--after", "tomorrow"), "--after: 'tomorrow' is not an instant such as 2026-05-04T10:00:00Z (date, time and offset)"),
        (("--after", "2026-05-04T10:00:00"), "--after: '2026-05-04T10:00:00' is not an instant such as"),
        (("--until", "9999-12-31T00:00:00Z"), "--until: '9999-12-31T00:00:00Z' is not within 1970 to 9000"),
        (("--after", "0001-01-01T00:00:00+14:00"), "--after: "),
        (("--count", "0"), "should be greater than or equal to 1"),
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_answered_in_a_sentence(directory, here, options, words):
    """Exit code 2, as for everything that the user gave and that cannot be used."""
    file = write(directory, MIDNIGHT)
    assert words in " ".join(here("next", file, *options, code=2).stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "environment", [{"TZ": "UTC"}, {"TZ": "America/New_York"}, {"TZ": "Europe/Rome", "PYTHONTZPATH": ""}, {"TZ": "No/Such", "PYTHONTZPATH": "/nonexistent"}]
)  # fmt: skip
def test_the_hosts_zone_and_zone_files_change_nothing(directory, environment):
    """A file without a zone means UTC on every host, and named zones work on a bare image."""
    file = write(
        directory,
        "graphs:\n  a: {graph: a:b, cron: 0 9 * * *}\n  b: {graph: a:b, cron: 0 9 * * *, timezone: Europe/Berlin}\n",
    )
    found = lines(
        tickd(
            "next",
            file,
            "--json",
            "--after",
            "2026-05-04T00:00:00Z",
            "--count",
            "2",
            cwd=directory,
            **environment,
        )
    )
    assert [line["fire_time"] for line in found] == ["2026-05-04T07:00:00Z", "2026-05-04T09:00:00Z"]


def test_placeholders_come_from_the_environment_of_the_command(directory):
    """The same file, another stage."""
    file = write(directory, "graphs: {a: {graph: a:b, every: '${EVERY:-1h}'}}")
    options = ("next", file, "--json", "--after", "2026-01-01T00:00:00Z", "--count", "1")
    assert lines(tickd(*options, cwd=directory))[0]["fire_time"] == "2026-01-01T01:00:00Z"
    assert lines(tickd(*options, cwd=directory, EVERY="5m"))[0]["fire_time"] == "2026-01-01T00:05:00Z"


# schema, init


def test_the_schema_is_printed_as_it_is_checked_in(here):
    """`tickd schema` > config/schedule.schema.json renews it."""
    printed = here("schema").stdout
    assert printed == (ROOT / "config" / "schedule.schema.json").read_text(encoding="utf-8")
    assert here("schema", "--json").stdout == printed


def test_init_writes_a_schedule_that_is_right_and_names_its_schema(directory):
    """The first minute with tickd: what it writes has to work as it is."""
    new = directory / "new" / "place"
    done = tickd("init", str(new), "--json", cwd=directory)
    assert lines(done) == [
        {
            "written": [
                str(new / name) for name in ("graphs/greeting.py", "schedule.yaml", "schedule.schema.json")
            ]
        }
    ]
    assert tickd("check", "schedule.yaml", cwd=new).stdout == "schedule.yaml: 1 graph, nothing wrong\n"
    assert (new / "schedule.yaml").read_text().splitlines()[
        0
    ] == "# yaml-language-server: $schema=schedule.schema.json"
    assert json.loads((new / "schedule.schema.json").read_text())["title"] == "tickd schedule"
    assert lines(tickd("next", "schedule.yaml", "--json", "--count", "1", cwd=new))[0]["graph"] == "greeting"


def test_dev_runs_what_init_writes_as_it_is(directory):
    """From nothing to three replicas in two commands."""
    new = directory / "new"
    tickd("init", str(new), cwd=directory)
    try:
        with Session(new / "schedule.yaml") as session:
            session.wait_for(" ran in ", timeout=60)
            session.wait_for(" skipped: ")
            session.signal(signal.SIGINT)
            assert session.wait() == 0
            assert session.stderr == []
    finally:
        forget(new)


def test_init_overwrites_nothing(directory, here):
    """Not even when only one of its files is there."""
    write(directory, "mine: true\n")
    done = here("init", code=2)
    assert (
        done.stderr
        == "schedule.yaml: there already, and `tickd init` overwrites nothing; name another directory\n"
    )
    assert (directory / "schedule.yaml").read_text() == "mine: true\n"
    assert not (directory / "graphs").exists()


def test_init_says_what_it_cannot_write(directory, here):
    """A path that is a file is no directory."""
    done = here("init", str(directory / "graphs.py" / "x"), code=2)
    assert done.stderr.startswith(str(directory / "graphs.py" / "x"))
    assert done.stderr.endswith("cannot be written: Not a directory\n")


def test_what_init_writes_says_hello_when_it_is_run(directory):
    """The graph that people start from runs, on any checkpointer."""
    tickd("init", "new", cwd=directory)
    code = "import asyncio; from greeting import graph; print(asyncio.run(graph.ainvoke({'name': 'world'}))['text'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory / "new" / "graphs",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "Hello, world\n"
