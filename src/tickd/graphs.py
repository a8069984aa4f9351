"""Graphs: from a reference in the schedule to something that can be invoked.

A reference is `package.module:attr`, `./file.py:attr` (relative to the schedule), or `langgraph.json#name`. What it
names may be a compiled graph, a builder that is not compiled yet, or a factory of either: a function, a coroutine
function, or a (async) context manager. Whatever is wrong with one is an Unusable with the graph's name and the cause.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.types import StateSnapshot

from tickd.entry import Entry
from tickd.errors import Unusable


SaverT = TypeVar("SaverT", bound=BaseCheckpointSaver[Any])


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A graph that can run: compiled, with what was noticed about it when it was loaded."""

    name: str
    graph: Pregel[Any, Any, Any, Any]
    make_input: Callable[..., Any] | None
    warnings: tuple[str, ...]


def bind(graph: Pregel[Any, Any, Any, Any], saver: SaverT) -> tuple[Pregel[Any, Any, Any, Any], SaverT]:
    """Return the graph with the saver as its checkpointer, and the saver that it really has.

    With LANGGRAPH_STRICT_MSGPACK set, a compiled graph knows which types of its state may come back from a checkpoint, and
    `copy` forgets it: without the list, a resumed run would find plain dicts where it left its own models.
    """
    allowlist = getattr(graph, "_serde_allowlist", None)
    if allowlist is not None:
        saver = cast("SaverT", saver.with_allowlist(allowlist))  # a clone of the same class
    return graph.copy({"checkpointer": saver}), saver


async def invoke(
    graph: Pregel[Any, Any, Any, Any], given: Any, config: Any, **options: Any
) -> tuple[Any, ...]:
    """Run the graph until it ends or waits; return what it waits for: its questions, or the breakpoints it stopped at.

    `ainvoke` returns from a breakpoint as from the end. The updates, of which it is made, tell of one at any depth.
    """
    waits = False
    questions: list[Any] = []
    async for update in graph.astream(given, config, stream_mode="updates", **options):
        if "__interrupt__" in update:
            waits = True
            questions += [question.value for question in update["__interrupt__"]]
    if questions or not waits:
        return tuple(questions)
    return await breakpoints(graph, config)


async def breakpoints(graph: Pregel[Any, Any, Any, Any], config: Any) -> tuple[str, ...]:
    """Return where a graph stands that asks nothing, named as LangGraph names subgraphs; nothing after the last step."""
    # A remote graph would be asked over the network for a thread that it does not have.
    here = all(isinstance(subgraph, Pregel) for _, subgraph in graph.get_subgraphs(recurse=True))
    return tuple(_places(graph, await graph.aget_state(config, subgraphs=here)))


def _places(graph: Pregel[Any, Any, Any, Any], state: StateSnapshot, above: str = "") -> Iterator[str]:
    subgraphs = dict(graph.get_subgraphs())
    stops_itself = graph.interrupt_before_nodes or graph.interrupt_after_nodes
    for task in state.tasks:
        if task.name not in state.next or task.result is not None:
            continue  # done, beside those that are not
        name = above + task.name
        inside = task.state if isinstance(task.state, StateSnapshot) and task.state.metadata else None
        if inside is not None and inside.next:
            yield from _places(cast("Pregel[Any, Any, Any, Any]", subgraphs[task.name]), inside, f"{name}|")
        else:
            # What a node calls without LangGraph's knowledge is seen neither here nor in the state.
            yield f"{'before' if stops_itself and inside is None else 'in'} {name}"


def resolve(name: str, reference: str, directory: Path) -> Any:
    """Import what the reference of the graph `name` points to; raises Unusable.

    `directory` is the schedule's. It is put last on the import path, so that a file there called like a package
    (`langgraph.py`) cannot take its place.
    """
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    if "#" in reference:
        reference, directory = _from_langgraph_json(name, reference, directory)
    target, separator, attribute = reference.rpartition(":")
    if not separator or not target or not attribute:
        raise Unusable(
            f"graph {name}: {reference!r} has no ':': write package.module:attribute or ./file.py:attribute"
        )
    module = _import(name, target, directory)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Unusable(
                f"graph {name}: {target} has no attribute {attribute!r}{_near(module, part)}"
            ) from None
    _refuse_what_cannot_run(name, reference, found)
    return found


def resolve_function(name: str, reference: str, directory: Path) -> Callable[..., Any]:
    """Import the function that makes the input of the graph `name`; raises Unusable."""
    target, _, attribute = reference.rpartition(":")
    function = getattr(_import(name, target, directory), attribute, None)
    if not callable(function):
        raise Unusable(f"graph {name}: input {reference!r} is not a function")
    return function  # type: ignore[no-any-return]  # callable() was asked


def is_made(found: Any) -> bool:
    """Say whether what `resolve` found is a graph already, and no factory of one."""
    return isinstance(found, Pregel | StateGraph)


async def open_graph(
    name: str, found: Any, make_input: Callable[..., Any] | None, stack: AsyncExitStack
) -> LoadedGraph:
    """Turn what `resolve` found into a compiled graph; factories run here, context managers stay open in `stack`."""
    try:
        made = await _made(found, stack)
    except (Exception, SystemExit) as error:
        raise Unusable(f"graph {name}: its factory raised {cause(error)}") from error
    if isinstance(made, StateGraph):
        try:
            made = made.compile(name=name)
        except Exception as error:
            raise Unusable(f"graph {name}: it cannot be compiled: {cause(error)}") from error
    if not isinstance(made, Pregel):
        raise Unusable(
            f"graph {name}: its factory made a {type(made).__name__}, and a LangGraph graph was expected"
        )
    warnings = []
    if made.checkpointer not in (None, True, False):
        warnings.append(
            f"it was compiled with a checkpointer of its own ({type(made.checkpointer).__name__}), which tickd replaces by "
            "the Postgres one; compile it without"
        )
    return LoadedGraph(name, made, make_input, tuple(warnings))


async def _made(found: Any, stack: AsyncExitStack) -> Any:
    if is_made(found):
        return found
    made = found(*_arguments(found))
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, AbstractAsyncContextManager):
        return await stack.enter_async_context(made)
    if isinstance(made, AbstractContextManager):
        return stack.enter_context(made)
    return made


def _arguments(factory: Callable[..., Any]) -> list[Any]:
    """Return the arguments of a factory: none, or an empty config where it asks for one, as LangGraph's own server does."""
    return [{"configurable": {}}] if _needs(factory) == 1 else []


def _needs(factory: Callable[..., Any]) -> int:
    """Return how many arguments a factory has to be given; 0 for one that does not say, like some built-in functions."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:
        return 0
    return sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )


def _refuse_what_cannot_run(name: str, reference: str, found: Any) -> None:
    if is_made(found):
        return
    if inspect.isclass(found) or not callable(found):
        raise Unusable(
            f"graph {name}: {reference} is {'a class' if inspect.isclass(found) else f'of type {type(found).__name__}'}; "
            "expected a compiled graph, a StateGraph, or a function that makes one"
        )
    if _needs(found) > 1:
        raise Unusable(
            f"graph {name}: the factory {reference} needs several arguments; it may take none, or one config"
        )


def _import(name: str, target: str, directory: Path) -> Any:
    try:
        if target.endswith(".py"):
            return _import_file(name, (directory / target).resolve())
        return importlib.import_module(target)
    except Unusable:
        raise
    except (Exception, SystemExit) as error:
        raise Unusable(f"graph {name}: importing {target} failed: {cause(error)}") from error


def _import_file(name: str, path: Path) -> Any:
    if not path.is_file():
        raise Unusable(f"graph {name}: there is no file {path}")
    # One module per file, however many entries name it; a name of its own, so that it shadows nothing.
    module_name = f"tickd_graph_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018  # a .py file has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _from_langgraph_json(name: str, reference: str, directory: Path) -> tuple[str, Path]:
    """Return the reference that LangGraph's project file gives the graph, and the directory it is relative to."""
    file, _, key = reference.partition("#")
    path = (directory / file).resolve()
    try:
        project = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"graph {name}: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Unusable(f"graph {name}: {path} is not valid JSON") from None
    graphs = project.get("graphs") if isinstance(project, dict) else None
    if not isinstance(graphs, dict) or key not in graphs:
        known = ", ".join(graphs) if isinstance(graphs, dict) and graphs else "no graph"
        raise Unusable(f"graph {name}: {path} does not name a graph {key!r}; it names {known}")
    found = graphs[key].get("path") if isinstance(graphs[key], dict) else graphs[key]
    if not isinstance(found, str):
        raise Unusable(f"graph {name}: {path} gives {key!r} no path such as './agent.py:graph'")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # LangGraph's own command takes `./src/agent.py:graph` and `src/agent.py:graph` alike.
    return found, path.parent


def _near(module: Any, attribute: str) -> str:
    graphs = [key for key, value in vars(module).items() if isinstance(value, Pregel | StateGraph)]
    return f"; it has {', '.join(graphs)}" if graphs and attribute not in graphs else ""


def cause(error: BaseException) -> str:
    """Return the error in one line, with the place in the user's own code that raised it; of a group, what is in it."""
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(map(cause, error.exceptions))
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(("<", str(Path(__file__).parent)))
    ]
    place = (
        f" ({frames[-1].filename}:{frames[-1].lineno})"
        if frames and not isinstance(error, ModuleNotFoundError)
        else ""
    )
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    return f"{type(error).__name__}: {error}".removesuffix(": ") + place


@dataclass(frozen=True, slots=True)
class Reference:
    """What the schedule says of one graph's code: its name, its graph, and the function that makes its input, if any."""

    name: str
    graph: str
    make_input: str | None = None

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Return the reference of an entry; an input that is a mapping is none of it."""
        return cls(entry.name, entry.graph, entry.input if isinstance(entry.input, str) else None)


def resolve_all(references: Iterable[Reference], directory: Path) -> dict[str, Any]:
    """Import what every reference points to, without running a factory; raises one Unusable that names all faults."""
    found: dict[str, Any] = {}
    faults: list[str] = []
    for reference in references:
        try:
            found[reference.name] = resolve(reference.name, reference.graph, directory)
            if reference.make_input is not None:
                resolve_function(reference.name, reference.make_input, directory)
        except Unusable as fault:
            faults.append(str(fault))
    if faults:
        raise Unusable("\n".join(faults))
    return found


async def load_graph(reference: Reference, directory: Path, stack: AsyncExitStack) -> LoadedGraph:
    """Resolve and open one graph on the loop where it will run; raises Unusable."""
    name, function = reference.name, reference.make_input
    found = resolve(name, reference.graph, directory)
    make_input = None if function is None else resolve_function(name, function, directory)
    return await open_graph(name, found, make_input, stack)


async def hold_open(
    reference: Reference, directory: Path, opening: asyncio.Future[LoadedGraph], closing: asyncio.Event
) -> None:
    """Load a graph, enter what its factory opens, and leave it at the close: an anyio scope has to be left by the task that entered it.

    In a task of its own per graph, because a task group that a factory yields from cancels this task when a child of it
    fails, and because what a run raises is no news for the factory.
    """
    async with AsyncExitStack() as stack:
        try:
            graph = await load_graph(reference, directory, stack)
        except Unusable as fault:
            opening.set_exception(fault)
            return
        except BaseException as error:  # noqa: BLE001  # a cancellation too: nobody but the factory cancels this task
            opening.set_exception(Unusable(f"graph {reference.name}: its factory raised {cause(error)}"))
            return
        opening.set_result(graph)
        await closing.wait()
        return
    # Only when the factory has swallowed the exception that ended the wait.
    raise RuntimeError("it ended by itself")
