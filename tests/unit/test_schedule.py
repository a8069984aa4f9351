import textwrap
from datetime import timedelta

import pytest

from tickd.schedule import Schedule, ScheduleError, parse


def _parse(text: str, **environment: str) -> Schedule:
    return parse(textwrap.dedent(text), path="s.yaml", environment=environment)


def _faults(text: str, **environment: str) -> list[str]:
    with pytest.raises(ScheduleError) as refusal:
        _parse(text, **environment)
    assert str(refusal.value) == "\n".join(str(fault) for fault in refusal.value.faults)
    return [str(fault).removeprefix("s.yaml:") for fault in refusal.value.faults]


def _graph(*lines: str, name: str = "a") -> str:
    """Return a schedule of one graph that is right but for the given lines, which begin on line 5."""
    given = "".join(f"    {line}\n" for line in lines)
    return f"graphs:\n  {name}:\n    graph: a:b\n    every: 10m\n{given}"


def test_a_schedule_becomes_entries_with_defaults_filled_in():
    """The file of DESIGN, as the daemon gets it."""
    schedule = _parse(
        """
        timezone: Europe/Oslo
        defaults:
          timeout: 10m
          config: {tags: [all], recursion_limit: 50}
        graphs:
          restock_plan:
            graph: ./graphs/restock.py:graph
            cron: "*/5 * * * *"
            input: {feed_down: false}
          pack_audit:
            graph: warehouse.audit:graph
            every: 30s
            timeout: 1m
            timezone: UTC
            config: {tags: audit}
        """
    )
    restock, audit = schedule.entries.values()
    assert (restock.name, restock.graph, restock.timeout, restock.input) == (
        "restock_plan", "./graphs/restock.py:graph", timedelta(minutes=10), {"feed_down": False},
    )  # fmt: skip
    assert (restock.timezone.key, audit.timezone.key) == ("Europe/Oslo", "UTC")
    assert (audit.every, audit.timeout) == (timedelta(seconds=30), timedelta(minutes=1))
    assert (restock.config.tags, restock.config.recursion_limit) == (("all",), 50)
    assert (audit.config.tags, audit.config.recursion_limit) == (("audit",), 50)
    assert (restock.mode, restock.missed, restock.overlap, restock.lock, restock.hold) == (
        "skip",
        "skip",
        "skip",
        "postgres",
        "dedicated",
    )
    assert (restock.thread, restock.enabled, restock.jitter, restock.durability) == (
        "per_tick",
        True,
        timedelta(0),
        None,
    )
    assert schedule.warnings == ()


def test_every_fault_is_reported_together_with_its_place():
    """Mending one fault per start of the daemon is no way to spend an afternoon."""
    assert _faults(
        """\
        timezon: Europe/Oslo
        defaults: {timeout: 10}
        graphs:
          a:
            graph: ./a.py
            cron: ["*/5 * * * *", "61 * * * *"]
            input: {down: no, at: "{fire_tim}", when: {fire_time}}
            mode: enqueue
          b:
            misfire_grace_time: 3
            every: 10
          c: 3
          d:
            graph: a:b
            cron:
          e: {graph: a:b, cron: "0 0 31 2 *"}
          plumless: {graph: a:b, every: 1s}
          buckeroo: {graph: a:b, every: 1s}
        """
    ) == [
        "1:1: unknown key 'timezon'; did you mean 'timezone'?",
        "2:21: defaults: timeout: '10' is not a duration such as 500ms, 30s, 10m, 2h or 1d",
        "5:12: graph 'a': graph: './a.py' has no ':': write ./file.py:attribute, package.module:attribute or langgraph.json#name",
        "6:27: graph 'a': cron: minute: '61' is out of range; 0-59 is the range",
        "7:19: graph 'a': input: 'no' means one thing in YAML 1.1 and another in 1.2: write true or false, or put it in quotes",
        "7:27: graph 'a': input: {fire_tim} is not one of {graph}, {fire_time}, {fire_date}, {local_time}, {local_date}; did you mean {fire_time}? For a literal brace write {{ or }}",
        "7:48: graph 'a': input: YAML reads {fire_time} as a mapping: put it in quotes, '{fire_time}'",
        "8:11: graph 'a': mode: 'enqueue' is not built yet; what there is: skip, claim",
        "9:3: graph 'b': the key 'graph' is missing: ./file.py:attribute or package.module:attribute",
        "10:5: graph 'b': unknown key 'misfire_grace_time'; did you mean 'grace'?",
        "11:12: graph 'b': every: '10' is not a duration such as 500ms, 30s, 10m, 2h or 1d",
        "12:3: graph 'c': a mapping was expected, with 'graph' and one of cron, every, at",
        "15:5: graph 'd': 'cron' has no value",
        "16:25: graph 'e': cron: '0 0 31 2 *' never fires: no month of it has such a day",
        "18:3: graphs 'plumless' and 'buckeroo' share the lock key -841282523: rename one of them",
    ]  # fmt: skip


def test_what_can_be_read_of_a_faulty_file_is_kept_for_further_checks():
    """`tickd check` imports its graphs too, so that their faults come in the same breath."""
    with pytest.raises(ScheduleError) as refusal:
        _parse(_graph("timeout: 1"))
    assert refusal.value.readable.entries["a"].graph == "a:b"


# Names


@pytest.mark.parametrize(
    "name", ["on", "off", "no", "yes", "null", "007", "1.10", "2026-05-04", "'a b'", "naïve", "a/b"]
)
def test_a_name_stays_what_is_written(name):
    """YAML 1.1 makes flags, numbers and dates of them, and of two names one."""
    assert list(_parse(_graph(name=name)).entries) == [name.strip("'")]


def test_no_and_off_are_two_graphs():
    """Where they are one flag, the second silently wins."""
    assert list(
        _parse("graphs:\n  no: {graph: a:b, every: 1s}\n  off: {graph: a:b, every: 1s}\n").entries
    ) == ["no", "off"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("''", "2:3: '' is no name for a graph: it is empty, or has spaces around it"),
        ("' a'", "2:3: ' a' is no name for a graph: it is empty, or has spaces around it"),
        ('"a\\nb"', "2:3: 'a\\nb' is no name for a graph: use at most 100 printable characters"),
        ("x" * 101, f"2:3: '{'x' * 40}' is no name for a graph: use at most 100 printable characters"),
        ("${NAME}", "2:3: '${NAME}' is no name for a graph: placeholders are filled in values, not in names"),
    ],
)
def test_a_name_that_would_hurt_in_logs_and_threads_is_refused(name, fault):
    """The name is the lock key, the thread id and a field of every line."""
    assert _faults(_graph(name=name)) == [fault]


@pytest.mark.parametrize(
    ("one", "two", "key"),
    [("evening_churn_trim", "core_ticket_export_v2", 1416145555), ("plumless", "buckeroo", -841282523)],
)
def test_two_names_with_one_lock_key_are_refused(one, two, key):
    """C8: Unrelated graphs would skip each other now and then, and no log would say why."""
    assert _faults(f"graphs:\n  {one}: {{graph: a:b, every: 1s}}\n  {two}: {{graph: a:b, every: 1s}}\n") == [
        f"3:3: graphs {one!r} and {two!r} share the lock key {key}: rename one of them"
    ]


def test_a_name_whose_hash_is_above_int4_is_as_good_as_any():
    """Half of all names are; crc32 of restock_plan is 3052243121."""
    assert list(_parse(_graph(name="restock_plan")).entries) == ["restock_plan"]


@pytest.mark.parametrize(
    ("one", "two"),
    [("thread: 'all/{fire_time}'", "thread: 'all/{fire_time}'"), ("thread: b", "thread: per_graph"), ("thread: x", "thread: 'x'")],
)  # fmt: skip
def test_two_graphs_on_one_thread_are_refused(one, two):
    """Their locks differ, so nothing else would keep them from writing to it at once."""
    assert _faults(
        f"graphs:\n  a: {{graph: a:b, every: 1s, {one}}}\n  b: {{graph: a:b, every: 1s, {two}}}\n"
    ) == ["3:3: graphs 'a' and 'b' would write to the same threads: name {graph} in 'thread'"]


# Empty files


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "1:1: the file is empty: it needs at least 'graphs:' with one graph"),
        ("# only this\n", "1:1: the file is empty: it needs at least 'graphs:' with one graph"),
        (
            "graphs:",
            "1:1: 'graphs' names no graph: write at least one, as a mapping from its name to its keys",
        ),
        (
            "graphs: {}",
            "1:1: 'graphs' names no graph: write at least one, as a mapping from its name to its keys",
        ),
        (
            "graphs: []",
            "1:1: 'graphs' names no graph: write at least one, as a mapping from its name to its keys",
        ),
        ("- a", "1:1: a mapping was expected, with the key 'graphs'"),
        ("hello", "1:1: a mapping was expected, with the key 'graphs'"),
        ("timezone: UTC", "1:1: the key 'graphs' is missing: it names the graphs to run"),
    ],
)
def test_a_file_with_nothing_to_do_is_refused_in_a_sentence(text, fault):
    """A daemon that starts and does nothing looks well."""
    assert _faults(text) == [fault]


def test_a_file_whose_graphs_are_all_disabled_is_warned_about():
    """It may be meant, for a while; but it is worth a line."""
    schedule = _parse(_graph("enabled: false"))
    assert [str(warning) for warning in schedule.warnings] == [
        "s.yaml:1:1: every graph is disabled: nothing will run"
    ]


# Keys


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("timezon: UTC", "5:5: graph 'a': unknown key 'timezon'; did you mean 'timezone'?"),
        ("misfire_grace_time: 1s", "5:5: graph 'a': unknown key 'misfire_grace_time'; did you mean 'grace'?"),
        ("max_instances: 1", "5:5: graph 'a': unknown key 'max_instances'; did you mean 'overlap'?"),
        ("tags: [x]", "5:5: graph 'a': unknown key 'tags'; it is a key of 'config'"),
        ("name: x", "5:5: graph 'a': unknown key 'name'; known are graph, cron,"),
        ("place: x", "5:5: graph 'a': unknown key 'place'"),
        ("config: {recursion_limits: 5}", "5:14: graph 'a': config: unknown key 'recursion_limits'; did you mean 'recursion_limit'?"),
        ("keep: {thread: 1d}", "5:12: graph 'a': keep: unknown key 'thread'; did you mean 'threads'?"),
        ("cron: '0 9 * * *'", "4:5: graph 'a': 'cron' and 'every' stand together: a graph has one of cron, every, at"),
        ("at: 2026-05-04T10:00:00Z", "5:5: graph 'a': 'every' and 'at' stand together: a graph has one of cron, every, at"),
    ],
)  # fmt: skip
def test_a_key_that_is_not_known_is_refused_with_the_one_that_was_meant(line, fault):
    """A misspelt key that is ignored is a setting that does nothing."""
    (found,) = _faults(_graph(line))
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("timeout: 10", "timeout: '10' is not a duration such as 500ms, 30s, 10m, 2h or 1d"),
        ("timeout: 0s", "timeout: '0s' is shorter than 1ms"),
        ("timeout: 99999d", "timeout: '99999d' is longer than 36500d"),
        ("timeout: [1m]", "timeout: a text was expected, not a list or a mapping"),
        ("timeout: ''", "timeout: it is empty"),
        ("timeout:", "'timeout' has no value"),
        ("grace: 0", "grace: '0' is not a duration such as 500ms, 30s, 10m, 2h or 1d"),
        ("grace: 0s", "grace: '0s' is shorter than 1ms"),
        ("timezone: Europe/Berln", "timezone: 'Europe/Berln' is not an IANA time zone; did you mean 'Europe/Berlin'?"),
        ("timezone: utc", "timezone: 'utc' is not an IANA time zone; did you mean 'UTC'?"),
        ("timezone: ../etc/passwd", "timezone: '../etc/passwd' is not an IANA time zone, such as Europe/Oslo or UTC"),
        ("timezone: ''", "timezone: it is empty"),
        ("enabled: no", "enabled: 'no' is neither true nor false"),
        ("enabled: 1", "enabled: '1' is neither true nor false"),
        ("mode: clam", "mode: 'clam' is not one of: skip, claim; did you mean 'claim'?"),
        ("mode: enqueue", "mode: 'enqueue' is not built yet; what there is: skip, claim"),
        ("lock: redis", "lock: 'redis' is not built yet; what there is: postgres"),
        ("lock: etcd", "lock: 'etcd' is not built yet; what there is: postgres"),
        ("durability: always", "durability: 'always' is not one of: sync, async, exit"),
        ("overlap: queue", "overlap: 'queue' needs 'mode: claim': in skip mode a tick that finds its graph running is skipped"),
        ("max_backlog: 0", "max_backlog: '0' is not a whole number of at least 1"),
        ("max_backlog: 1_000", "max_backlog: '1_000' is not a whole number of at least 1"),
        ("anchor: 2026-05-04", "anchor: '2026-05-04' is not an instant such as 2026-05-04T10:00:00Z (date, time and offset)"),
        ("anchor: 2026-05-04T10:00:00", "anchor: '2026-05-04T10:00:00' is not an instant such as 2026-05-04T10:00:00Z (date, time and offset)"),
        ("anchor: 0001-01-01T00:00:00Z", "anchor: '0001-01-01T00:00:00Z' is not within the years 1970 to 2999"),
        ("anchor: 0001-01-01T00:00:00+23:00", "anchor: '0001-01-01T00:00:00+23:00' is before the year 1 or after the year 9999 in UTC"),
        ("anchor: 9999-12-31T23:59:59-23:00", "anchor: '9999-12-31T23:59:59-23:00' is before the year 1 or after the year 9999 in UTC"),
        ("keep: forever", "keep: 'forever' is not a duration such as 500ms, 30s, 10m, 2h or 1d"),
        ("config: x", "config: a mapping was expected"),
        ("config: {tags: [{}]}", "config: tags: a text was expected, not a list or a mapping"),
        ("config: {tags: []}", "config: tags: the list is empty"),
        ("config: {recursion_limit: many}", "config: recursion_limit: 'many' is not a whole number of at least 1"),
        ("config: {metadata: {tickd_x: 1}}", "config: metadata: 'tickd_x': names that begin with tickd_ are written by tickd"),
        ("config: {metadata: x}", "config: metadata: a mapping was expected"),
        ("config: {configurable: {thread_id: x}}", "config: configurable: 'thread_id' is set by tickd, tick by tick; the key 'thread' says which thread a tick runs on"),
        ("retries: {backoff: 1s}", "retries: the key 'attempts' is missing"),
        ("retries: 3", "retries: a mapping was expected"),
        ("context: x", "context: a mapping was expected"),
        ("context: [x]", "context: a mapping was expected"),
        ("input: x", "input: a mapping was expected, or package.module:function that makes one from the tick"),
        ("input: [x]", "input: a mapping was expected, or package.module:function that makes one from the tick"),
        ("thread: {graph}", "thread: a text was expected: without quotes, YAML reads {graph} as a mapping"),
        ("thread: 'x{y}'", "thread: {y} is not one of {graph}, {fire_time}, {fire_date}, {local_time}, {local_date} For a literal brace write {{ or }}"),
        ("thread: 'x{'", "thread: a brace without its partner; for a literal brace write {{ or }}"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_with_what_was_expected(line, fault):
    """Strictly: nothing is guessed, rounded or cut."""
    (found,) = _faults(_graph(line))
    assert found.split(": ", 1)[1] == f"graph 'a': {fault}"


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("pkg.mod", "'pkg.mod' has no ':'"),
        ("./file.py", "'./file.py' has no ':'"),
        ("pkg.mod:", "'pkg.mod:' names no graph"),
        (":g", "':g' names no graph"),
        ("pkg/mod:g", "'pkg/mod:g' names no graph"),
        ("./a.py:g()", "'./a.py:g()' names no graph"),
        ("langgraph.json", "'langgraph.json' has no ':'"),
        ("langgraph.json#", "'langgraph.json#' names no graph"),
    ],
)
def test_a_reference_that_cannot_be_imported_is_refused_before_it_is_tried(reference, fault):
    """What is missing is named: mostly it is the attribute."""
    (found,) = _faults(f"graphs:\n  a: {{every: 1s, graph: '{reference}'}}")
    assert (
        found
        == f"2:25: graph 'a': graph: {fault}: write ./file.py:attribute, package.module:attribute or langgraph.json#name"
    )


@pytest.mark.parametrize(
    "reference", ["./a.py:g", "../up/a b.py:g.h", "/abs/a.py:make", "pkg:g", "pkg.mod:Class.graph", "langgraph.json#agent", "./app/langgraph.json#the-agent"]
)  # fmt: skip
def test_a_reference_is_kept_as_written(reference):
    """The loader reads it, relative to the schedule."""
    assert _parse(f"graphs:\n  a: {{every: 1s, graph: '{reference}'}}").entries["a"].graph == reference


def test_an_expression_that_only_ever_falls_into_the_gap_is_refused():
    """New York's clocks skip 2 o'clock on each second Sunday of March."""
    assert _faults("graphs:\n  a: {graph: a:b, timezone: America/New_York, cron: '*/5 2 * 3 0#2'}") == [
        "2:53: graph 'a': cron: it never fires: no day and time of the calendar match"
    ]


def test_an_expression_whose_days_never_meet_is_refused():
    """With a star in one of them both day fields must match, and no fifth Monday is the 1st or the 30th of February."""
    assert _faults("graphs:\n  a: {graph: a:b, cron: '*/5 * */29 2 mon#5'}") == [
        "2:25: graph 'a': cron: it never fires: no day and time of the calendar match"
    ]


def test_doubtful_expressions_are_warned_about_where_they_stand():
    """They are legal; each of a list has its own place."""
    schedule = _parse("graphs:\n  a:\n    graph: a:b\n    cron:\n      - '*/7 * * * *'\n      - 0 9 13 * 5\n")
    assert [str(warning).split(": ")[0:3] for warning in schedule.warnings] == [
        ["s.yaml:5:9", "graph 'a'", "cron"],
        ["s.yaml:6:9", "graph 'a'", "cron"],
    ]


# Defaults, merge keys, null


def test_the_trigger_of_a_graph_replaces_that_of_the_defaults():
    """Otherwise no graph could fire otherwise than the defaults say."""
    schedule = _parse(
        """
        defaults: {every: 1h, anchor: 2026-01-01T00:30:00Z, graph: a:b}
        graphs:
          one: {}
          two: {cron: "@daily"}
          three: {anchor: 2026-01-01T00:40:00Z}
        """
    )
    one, two, three = schedule.entries.values()
    assert (one.every, two.every, two.cron[0].text, three.every) == (
        timedelta(hours=1),
        None,
        "@daily",
        timedelta(hours=1),
    )
    assert one.anchor != three.anchor


def test_null_takes_back_what_the_defaults_say():
    """A graph without a time-out, among those with one."""
    schedule = _parse(
        """
        defaults: {timeout: 1m, cron: "@daily", config: {recursion_limit: 5, tags: x}}
        graphs:
          a: {graph: a:b, timeout: null, cron: ~, every: 1s, config: {recursion_limit: null}}
        """
    )
    entry = schedule.entries["a"]
    assert (entry.timeout, entry.cron, entry.config.recursion_limit, entry.config.tags) == (
        None,
        (),
        None,
        ("x",),
    )


@pytest.mark.parametrize(
    ("default", "own", "threads", "ticks"),
    [("7d", "{threads: 1d}", 1, 7), ("{ticks: 7d}", "{threads: 1d}", 1, 7), ("{ticks: 7d}", "1d", 1, 1), ("~", "{ticks: 1d}", None, 1)],
)  # fmt: skip
def test_a_graph_takes_over_what_it_does_not_say_of_keep_itself(default, own, threads, ticks):
    """In either form: a duration is short for both."""
    keep = (
        _parse(f"defaults: {{keep: {default}}}\ngraphs: {{a: {{graph: a:b, every: 1s, keep: {own}}}}}")
        .entries["a"]
        .keep
    )
    assert (keep.threads, keep.ticks) == (
        threads and timedelta(days=threads),
        ticks and timedelta(days=ticks),
    )


def test_a_default_of_another_form_does_not_get_in_the_way():
    """It is a fault of its own, told once."""
    assert _faults("defaults: {config: 1}\ngraphs: {a: {graph: a:b, every: 1s, config: {tags: x}}}") == [
        "1:20: defaults: config: a mapping was expected"
    ]


def test_a_fault_of_the_defaults_is_reported_once():
    """Not once per graph."""
    graphs = "".join(f"  g{i}: {{graph: a:b, every: 1s}}\n" for i in range(5))
    assert _faults(f"defaults: {{timeout: 5, keeep: 1d}}\ngraphs:\n{graphs}") == [
        "1:21: defaults: timeout: '5' is not a duration such as 500ms, 30s, 10m, 2h or 1d",
        "1:24: defaults: unknown key 'keeep'; did you mean 'keep'?",
    ]


def test_a_fault_of_the_files_own_zone_is_reported_once():
    """It is neither a graph's nor that of the defaults."""
    assert _faults(f"timezone: Europe/Berln\n{_graph()}") == [
        "1:11: timezone: 'Europe/Berln' is not an IANA time zone; did you mean 'Europe/Berlin'?"
    ]
    assert _faults(f"timezone:\n{_graph()}") == ["1:1: 'timezone' has no value"]


def test_a_fault_behind_an_alias_is_reported_once():
    """It is mended once, too."""
    assert _faults(
        "x-d: &d {timeout: 5}\ngraphs:\n  a: {<<: *d, graph: a:b, every: 1s}\n  b: {<<: *d, graph: a:b, every: 1s}\n"
    ) == ["1:19: graph 'a': timeout: '5' is not a duration such as 500ms, 30s, 10m, 2h or 1d"]


def test_anchors_and_merge_keys_work_and_their_home_is_no_graph():
    """`x-` keys at the top are for them; a graph's own keys win."""
    schedule = _parse(
        """
        x-defaults: &d {timezone: Europe/Berlin, timeout: 1m}
        graphs:
          a: {<<: *d, graph: a:b, every: 1s}
          b: {<<: *d, graph: a:b, every: 1s, timezone: UTC}
        """
    )
    assert [(entry.timezone.key, entry.timeout) for entry in schedule.entries.values()] == [
        ("Europe/Berlin", timedelta(minutes=1)),
        ("UTC", timedelta(minutes=1)),
    ]


def test_duplicate_keys_are_refused_with_both_lines():
    """A second entry of one name would silently replace the first."""
    assert _faults("graphs:\n  a: {graph: a:b, every: 1s}\n  a: {graph: c:d, every: 1s}\n") == [
        "3:3: key 'a' stands twice: it is on line 2 already"
    ]


# Free values


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("12", 12), ("-3", -3), ("0x1F", 31), ("0o17", 15),
        ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), ("'no'", "no"), ('"12"', "12"), ("2026-05-04", "2026-05-04"),
        ("2026-05-04T10:00:00Z", "2026-05-04T10:00:00Z"), ("hello", "hello"), ("[1, a]", [1, "a"]), ("{b: {c: 1}}", {"b": {"c": 1}}),
        ("1.2.3", "1.2.3"), ("0", 0), ("y", "y"), ("|\n        a\n        b", "a\nb\n"),
    ],
)  # fmt: skip
def test_free_values_are_what_yaml_1_2_says(written, meant):
    """`input` is the graph's own; it gets numbers, flags and texts, and no dates it never asked for."""
    entry = _parse(_graph("input:", f"  x: {written}")).entries["a"]
    assert entry.input == {"x": meant}
    assert type(entry.input["x"]) is type(meant)


@pytest.mark.parametrize(
    "written", ["yes", "No", "on", "OFF", "0777", "-012", "1_000", "1234_5678", "12:30", "1:30:00", "1_0.5"]
)
def test_what_yaml_1_1_read_otherwise_has_to_be_said_clearly(written):
    """Writers and tools still think in 1.1; the wrong guess is silent."""
    shown = repr(written) if written.isalpha() else "this number"
    (fault,) = _faults(_graph("input:", f"  x: {written}"))
    assert fault.startswith(
        f"6:10: graph 'a': input: {shown} means one thing in YAML 1.1 and another in 1.2: write "
    )
    assert _parse(_graph("input:", f"  x: '{written}'")).entries["a"].input == {"x": written}


@pytest.mark.parametrize("written", [".inf", "-.inf", ".nan", "1e999", "9" * 400])
def test_numbers_that_json_does_not_know_are_refused(written):
    """They could be neither checkpointed nor logged."""
    assert _faults(_graph("input:", f"  x: {written}")) == [
        "6:10: graph 'a': input: this number cannot be written in JSON: put it in quotes"
    ]


def test_a_free_key_is_a_text():
    """JSON knows no others; 1 and '1' would be one key."""
    assert _parse(_graph("input: {1: a, true: b, 007: c}")).entries["a"].input == {
        "1": "a",
        "true": "b",
        "007": "c",
    }


# Placeholders


def test_placeholders_are_filled_from_the_environment_in_values_everywhere():
    """A file for every stage, one environment each."""
    schedule = _parse(
        """
        timezone: ${ZONE:-UTC}
        graphs:
          a:
            graph: ${MODULE}:graph
            every: ${EVERY:-1m}
            input: {url: "https://${HOST}/x", n: 1, literal: "$${HOST}"}
            config: {tags: ["${STAGE:-dev}"], recursion_limit: "${LIMIT}"}
            context: {key: '${KEY}'}
        """,
        MODULE="pkg.mod", HOST="h", STAGE="", LIMIT="7", KEY="12345678",
    )  # fmt: skip
    entry = schedule.entries["a"]
    assert (entry.timezone.key, entry.graph, entry.every) == ("UTC", "pkg.mod:graph", timedelta(minutes=1))
    assert entry.input == {"url": "https://h/x", "n": 1, "literal": "${{HOST}}"}
    assert (entry.config.tags, entry.config.recursion_limit, entry.context) == (
        ("dev",),
        7,
        {"key": "12345678"},
    )


@pytest.mark.parametrize(
    "value",
    [
        "{x: 1}",
        "[1]",
        "a: b",
        "# no",
        "*x",
        "&x",
        "!t",
        "'",
        '"',
        "\n  y: 1",
        "{graph}",
        "{",
        "true",
        "12",
        "null",
    ],
)
def test_what_is_inserted_is_text_and_never_structure(value):
    """An environment that can add keys is an injection."""
    for written in ("${V}", "'${V}'", "p${V}s"):
        entry = _parse(_graph("input:", f"  x: {written}"), V=value).entries["a"]
        filled = written.strip("'").replace("${V}", value)
        assert entry.input == {"x": filled.replace("{", "{{").replace("}", "}}")}


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("${NOPE}", "the environment has no NOPE: set it, or write ${NOPE:-default}"),
        ("x${}", "a placeholder is ${NAME} or ${NAME:-default}, not nested; for a literal ${ write $${"),
        ("${1A}", "a placeholder is ${NAME} or"),
        ("${A-b}", "a placeholder is ${NAME} or"),
        ("${A", "a placeholder is ${NAME} or"),
        ("${A:-${B}}", "a placeholder is ${NAME} or"),
        ("${BYTES}", "BYTES of the environment holds bytes that are not text"),
    ],
)
def test_a_placeholder_that_cannot_be_filled_is_said_where_it_stands(written, fault):
    """An empty text in its place would be a fault much later."""
    for line in (f"input: {{x: '{written}'}}", f"timeout: '{written}'", f"thread: '{written}'"):
        (found,) = _faults(_graph(line), BYTES="\udcff")
        assert fault in found
        assert found.startswith("5:")


@pytest.mark.parametrize(
    "line",
    [
        "timeout: ${S}",
        "timezone: '${S}'",
        "mode: ${S}",
        "thread: '{x${S}}'",
        "thread: '{${S}}'",
        "input: {x: '{${S}}'}",
        "input: {x: '{graph:${S}}'}",
        "config: {recursion_limit: '${S}'}",
        "graph: ${S}",
        "keep: ${S}",
    ],
)
def test_what_a_placeholder_stands_for_is_never_shown(line):
    """It may be a password in the wrong place."""
    text = _graph(line) if not line.startswith("graph") else f"graphs:\n  a:\n    every: 1s\n    {line}\n"
    for secret in ("hunter2-secret", "hunter2_secret"):  # the second could be a name
        faults = "\n".join(_faults(text, S=secret))
        assert "S}" in faults or "brace" in faults or "{graph}" in faults
        assert not any(secret[i : i + 4] in faults for i in range(len(secret) - 3))


def test_a_placeholder_of_a_list_that_cannot_be_filled_is_one_fault():
    """That the rest of the list is read all the same must not bring a second one."""
    assert _faults("graphs: {a: {graph: a:b, cron: ['${NOPE}', '61 * * * *', '@daily']}}") == [
        "1:33: graph 'a': cron: the environment has no NOPE: set it, or write ${NOPE:-default}",
        "1:44: graph 'a': cron: minute: '61' is out of range; 0-59 is the range",
    ]


def test_placeholders_are_not_filled_in_keys():
    """A key from the environment would be structure."""
    assert _faults(_graph("input: {'${K}': 1}"), K="k") == [
        "5:13: graph 'a': input: '${K}': placeholders are filled in values, not in keys"
    ]


def test_a_long_text_is_not_repeated_in_full():
    """A fault is a line for people, not a copy of the file."""
    (fault,) = _faults(_graph(f"timeout: '{'x' * 100_000}'"))
    assert len(fault) < 600


# What hangs on other keys


@pytest.mark.parametrize(
    ("trigger", "grace"),
    [
        ("cron: '*/5 * * * *'", 30), ("cron: '*/10 * * * * *'", 10), ("every: 5s", 5), ("every: 1h", 30), ("cron: ['0 * * * * *', '20 * * * * *']", 30),
        ("at: [2026-01-01T00:00:00Z, 2026-01-01T00:00:07Z, 2027-01-01T00:00:00Z]", 7), ("every: 5s, grace: 1m", 60),
    ],
)  # fmt: skip
def test_grace_is_30_seconds_or_the_period_if_that_is_less(trigger, grace):
    """APScheduler's one second drops ticks whenever the loop is busy."""
    assert _parse(f"graphs: {{a: {{graph: a:b, {trigger}}}}}").entries["a"].grace == timedelta(seconds=grace)


def test_claim_mode_queues_and_writes_checkpoints_in_step_unless_told_otherwise():
    """Work that must not be lost waits for its turn, and is on disk before the next node."""
    plain, told = _parse(
        """
        graphs:
          a: {graph: a:b, every: 1s, mode: claim}
          b: {graph: a:b, every: 1s, mode: claim, overlap: cancel, durability: async}
        """
    ).entries.values()
    assert (plain.overlap, plain.durability) == ("queue", "sync")
    assert (told.overlap, told.durability) == ("cancel", "async")


def test_keep_is_one_duration_for_both_or_one_each():
    """Most want one number."""
    both, each, none = _parse(
        """
        graphs:
          a: {graph: a:b, every: 1s, keep: 7d}
          b: {graph: a:b, every: 1s, keep: {threads: 1d}}
          c: {graph: a:b, every: 1s}
        """
    ).entries.values()
    week, day = timedelta(days=7), timedelta(days=1)
    assert [(entry.keep.threads, entry.keep.ticks) for entry in (both, each, none)] == [
        (week, week),
        (day, None),
        (None, None),
    ]


def test_a_fault_can_be_added_for_a_graph_where_it_is_named():
    """The loader finds what is wrong with the graph itself; the line is still the schedule's."""
    schedule = _parse(_graph())
    assert str(schedule.fault("a", "importing a failed")) == "s.yaml:3:12: graph 'a': importing a failed"
