"""Output: what commands print for people."""

import pytest

from tickd.cli.output import print_table


NAME = "n" * 100
ROW = {"graph": NAME, "fire_time": "2026-05-04T10:00:00Z", "outcome": "timed_out", "error_type": "E[/]"}


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_a_table_is_whole_however_narrow_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Through a pipe there is no terminal at all, and half a name or outcome is of no use to anybody."""
    monkeypatch.setenv("COLUMNS", columns)

    print_table(list(ROW), [ROW, {**ROW, "graph": "[red]x[/red]\x1b[2J"}])

    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["graph", "fire", "time", "outcome", "error", "type"]
    assert first.split() == [NAME, "2026-05-04", "10:00:00", "timed_out", "E[/]"]
    assert second.startswith("[red]x[/red]")
    assert "\x1b" not in second
