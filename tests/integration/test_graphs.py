"""Graphs: what a reference in the schedule may lead to, and in which words everything else is refused."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tickd.errors import Unusable
from tickd.graphs import LoadedGraph, Reference, load_graph, resolve_all


HEAD = """
from contextlib import asynccontextmanager, contextmanager
from typing import TypedDict
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

class State(TypedDict, total=False):
    seen: str

def node(state):
    return {"seen": "it ran"}

builder = StateGraph(State).add_node("node", node).add_edge(START, "node").add_edge("node", END)
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a module beside the schedule and returns its file's name; forgets all it imported afterwards."""
    path, modules = sys.path[:], set(sys.modules)

    def write(body: str, name: str = "shop.py") -> str:
        (tmp_path / name).write_text(HEAD + textwrap.dedent(body))
        return name

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


async def load(directory: Path, *references: Reference) -> dict[str, LoadedGraph]:
    """Load the graphs and run each of them once, while what their factories hold open is open."""
    async with AsyncExitStack() as stack:
        loaded = {each.name: await load_graph(each, directory, stack) for each in references}
        for each in loaded.values():
            assert (await each.graph.ainvoke({}))["seen"] == "it ran"
    return loaded


async def refusal(directory: Path, graph: str, make_input: str | None = None) -> str:
    """Return the words with which one reference is refused."""
    with pytest.raises(Unusable) as refused:
        await load(directory, Reference("restock_plan", graph, make_input))
    return str(refused.value)


FORMS = {
    "compiled": "graph = builder.compile()",
    "builder": "graph = builder",
    "function": "def graph():\n    return builder.compile()",
    "function that makes a builder": "def graph():\n    return builder",
    "function of a config": "def graph(config):\n    assert config == {'configurable': {}}\n    return builder",
    "function with defaults": "def graph(model='small', *, size=3, **rest):\n    return builder",
    "coroutine function": "async def graph():\n    return builder.compile()",
    "async context manager": "@asynccontextmanager\nasync def graph():\n    yield builder.compile()",
    "context manager": "@contextmanager\ndef graph():\n    yield builder",
    "callable object": "class Make:\n    def __call__(self):\n        return builder\n\ngraph = Make()",
    "attribute of a class": "class Shop:\n    class graphs:\n        graph = builder.compile()\n\ngraph = Shop.graphs.graph",
}


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in FORMS.items()])
async def test_every_form_of_a_graph_is_loaded(tmp_path: Path, module: Callable[..., str], body: str):
    """Compiled, not yet compiled, or made by a factory of whatever kind."""
    loaded = await load(tmp_path, Reference("restock_plan", f"./{module(body)}:graph"))

    assert loaded["restock_plan"].warnings == ()


async def test_an_attribute_may_be_a_path(tmp_path: Path, module: Callable[..., str]):
    """Graphs are often kept in a namespace."""
    module("class Shop:\n    graph = builder")

    await load(tmp_path, Reference("restock_plan", "./shop.py:Shop.graph"))


async def test_a_module_beside_the_schedule_is_found_by_its_name(tmp_path: Path, module: Callable[..., str]):
    """The schedule is where it is edited, and not where the process was started."""
    module("graph = builder", "warehouse_audit.py")

    await load(tmp_path, Reference("pack_audit", "warehouse_audit:graph"))


async def test_a_file_called_like_a_package_shadows_nothing(tmp_path: Path, module: Callable[..., str]):
    """People call it langgraph.py, and every import of the real one would then find theirs."""
    import langgraph.graph  # noqa: PLC0415  # what must not be replaced

    module("graph = builder", "langgraph.py")

    await load(tmp_path, Reference("restock_plan", "./langgraph.py:graph"))

    assert sys.modules["langgraph.graph"] is langgraph.graph


async def test_entries_of_one_file_share_its_module(tmp_path: Path, module: Callable[..., str]):
    """What it does when it is imported, it does once."""
    module("imported = globals().get('imported', 0) + 1\none = builder.compile()\ntwo = builder.compile()")
    before = set(sys.modules)

    await load(tmp_path, Reference("one", "./shop.py:one"), Reference("two", "./shop.py:two"))

    (name,) = {name for name in set(sys.modules) - before if "shop" in name}
    assert sys.modules[name].imported == 1


async def test_a_graph_may_be_taken_from_langgraphs_own_project_file(
    tmp_path: Path, module: Callable[..., str]
):
    """Who has one already need not say it all twice; both of its forms are known."""
    (tmp_path / "app").mkdir()
    module("graph = builder", "app/shop.py")
    (tmp_path / "app" / "langgraph.json").write_text(
        '{"graphs": {"plan": "./shop.py:graph", "audit": {"path": "./shop.py:graph", "description": "x"}}}'
    )

    await load(
        tmp_path,
        Reference("plan", "app/langgraph.json#plan"),
        Reference("audit", "app/langgraph.json#audit"),
    )


async def test_what_a_factory_holds_open_is_closed_at_the_end(tmp_path: Path, module: Callable[..., str]):
    """An HTTP client or a pool lives as long as its graph can run, and no longer."""
    module(
        """
        events = []

        @asynccontextmanager
        async def graph():
            events.append("opened")
            try:
                yield builder.compile()
            finally:
                events.append("closed")
        """
    )

    before = set(sys.modules)
    async with AsyncExitStack() as stack:
        await load_graph(Reference("restock_plan", "./shop.py:graph"), tmp_path, stack)
        (shop,) = [sys.modules[name] for name in set(sys.modules) - before if "shop" in name]
        assert shop.events == ["opened"]
    assert shop.events == ["opened", "closed"]


async def test_checking_runs_no_factory(tmp_path: Path, module: Callable[..., str]):
    """`tickd check` runs on a laptop, where a factory's database is not to be had."""
    module("def graph():\n    raise AssertionError('it was run')")

    found = resolve_all([Reference("restock_plan", "./shop.py:graph")], tmp_path)

    assert callable(found["restock_plan"])


async def test_a_checkpointer_of_its_own_is_replaced_and_said_so(tmp_path: Path, module: Callable[..., str]):
    """Kept, each tick's state would be lost with the process, and no other replica could go on."""
    module("graph = builder.compile(checkpointer=InMemorySaver(), name='g')")

    async with AsyncExitStack() as stack:
        loaded = await load_graph(Reference("restock_plan", "./shop.py:graph"), tmp_path, stack)

    (warning,) = loaded.warnings
    assert "InMemorySaver" in warning
    assert "compile it without" in warning


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("graph = None", "./shop.py:graph is of type NoneType; expected a compiled graph"),
        ("graph = 7", "./shop.py:graph is of type int"),
        ("class graph:\n    pass", "./shop.py:graph is a class"),
        ("def graph(a, b):\n    return builder", "needs several arguments"),
        ("def graph():\n    raise ValueError('no model')", "its factory raised ValueError: no model ("),
        ("async def graph():\n    raise ValueError('no model')", "its factory raised ValueError: no model ("),
        ("def graph():\n    raise SystemExit(3)", "its factory raised SystemExit: 3"),
        (
            "def graph():\n    raise ExceptionGroup('two', [ValueError('no model'), KeyError()])",
            "its factory raised ValueError: no model, KeyError",
        ),
        ("def graph():\n    return node", "its factory made a function, and a LangGraph graph was expected"),
        ("async def graph():\n    yield builder", "its factory made a async_generator"),
        ("graph = StateGraph(State)", "it cannot be compiled: ValueError"),
        ("plan = builder.compile()", "has no attribute 'graph'; it has builder, plan"),
        ("raise RuntimeError('no feed')", "importing ./shop.py failed: RuntimeError: no feed ("),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("graph = (", "importing ./shop.py failed: SyntaxError: "),
        ("raise SystemExit('bye')", "importing ./shop.py failed: SystemExit: bye"),
        ("graph = max", "graph restock_plan: its factory raised TypeError"),
    ],
)
async def test_what_is_no_graph_is_refused_with_the_cause(
    tmp_path: Path, module: Callable[..., str], body: str, said: str
):
    """With the graph's name, and the place in the user's own code where it went wrong."""
    module(body)

    refused = await refusal(tmp_path, "./shop.py:graph")

    assert refused.startswith("graph restock_plan: ")
    assert said in refused
    if "raised" in said or "failed" in said:
        assert "tickd/graphs.py" not in refused
    if said.endswith("("):
        assert f"{tmp_path}/shop.py:" in refused


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("shop", "'shop' has no ':': write package.module:attribute or ./file.py:attribute"),
        ("shop:", "has no ':'"),
        (":graph", "has no ':'"),
        ("nopkg.mod:graph", "importing nopkg.mod failed: ModuleNotFoundError: No module named 'nopkg'"),
        ("./none.py:graph", "there is no file"),
        ("langgraph.json#plan", "langgraph.json cannot be read: No such file"),
        ("broken.json#plan", "broken.json is not valid JSON"),
        ("list.json#plan", "it names no graph"),
        ("other.json#plan", "does not name a graph 'plan'; it names audit"),
        ("other.json#audit", "gives 'audit' no path"),
    ],
)
async def test_a_reference_that_leads_nowhere_says_where_it_ended(
    tmp_path: Path, module: Callable[..., str], reference: str, said: str
):
    """D14: the words of the exception alone would not name the entry."""
    module("graph = builder")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"graphs": {"audit": {"path": 3}}}')

    assert said in await refusal(tmp_path, reference)


async def test_all_that_cannot_be_loaded_is_said_at_once(tmp_path: Path, module: Callable[..., str]):
    """One start, one list of things to mend."""
    module("def graph():\n    raise ValueError('no model')")
    references = [
        Reference("one", "./shop.py:nope"),
        Reference("two", "./none.py:graph"),
        Reference("three", "./shop.py:graph", "./shop.py:node"),
    ]

    with pytest.raises(Unusable) as resolved:
        resolve_all(references, tmp_path)

    assert [line.split(":")[0] for line in str(resolved.value).splitlines()] == ["graph one", "graph two"]


async def test_an_input_may_be_made_by_a_function(tmp_path: Path, module: Callable[..., str]):
    """It is looked up with the graph, so that a misspelt one is found before the first tick."""
    module("graph = builder\n\ndef make(tick):\n    return {'seen': str(tick)}\n\nnothing = 7")

    loaded = await load(tmp_path, Reference("restock_plan", "./shop.py:graph", "./shop.py:make"))
    made: Any = loaded["restock_plan"].make_input
    assert made("a tick") == {"seen": "a tick"}

    for name in ("nothing", "nope"):
        refused = await refusal(tmp_path, "./shop.py:graph", f"./shop.py:{name}")
        assert refused == f"graph restock_plan: input './shop.py:{name}' is not a function"
