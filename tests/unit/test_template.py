import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fire_times import instant
from tickd import template
from tickd.calendar import zone
from tickd.tick import Tick


VALUES = template.values(Tick("a", instant("2026-05-04T22:30Z")), zone("UTC"))


@pytest.mark.parametrize(
    "text",
    ["{graph.name}", "{graph[0]}", "{graph!r}", "{graph:>10}", "{0}", "{}", "{nope}", "{" + "x" * 500 + "}"],
)
def test_only_the_names_of_a_tick_are_known(text):
    """str.format's reach into attributes and items is no business of a schedule."""
    with pytest.raises(ValueError, match="is not one of") as refusal:
        template.check(text)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("text", ["{", "}", "{graph", "a } b", "{{}"])
def test_a_brace_without_its_partner_is_refused_with_how_to_write_one(text):
    """Prompts are full of braces."""
    with pytest.raises(ValueError, match="for a literal brace write"):
        template.check(text)


@given(st.text(alphabet="{}$\\ ab\u00e6\n:!"))
def test_an_escaped_text_comes_back_as_it_is(text):
    """What the environment inserts passes through the template unchanged, whatever it is."""
    escaped = template.escape(text)
    template.check(escaped)
    assert template.fill(escaped, VALUES) == text


@given(st.text(alphabet="{}[]!:.graph_time0 "))
def test_what_is_checked_can_be_filled(text):
    """A template fails when the file is read, or never."""
    try:
        template.check(text)
    except ValueError:
        return
    assert isinstance(template.fill(text, VALUES), str)
