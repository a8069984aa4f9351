"""What the fence costs: a chain of nodes with the guard on against off, in one run, medians over many.

    python -m benchmarks.fence_cost [--rounds 200] [--steps 20] [--node-ms 0 20] [--durability sync] [--fsync] [--json]

`off` is LangGraph's own saver in a database without the guard; `on` is the fenced saver in one with it; `fenced` is the
fenced saver without the guard, and `control` is `off` once more, which shows how far the machine can be trusted.
Each round runs all of them once, in an order of chance, on threads of their own. A ratio is the median over rounds of
what the variant took to what `off` took in the same round. Times are wall-clock; `cpu` is what client and server process
worked, which a busy machine disturbs less. Without --fsync a commit waits for no disk, and the fence weighs the most.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import START, StateGraph
from psycopg import AsyncConnection, sql
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from tests.cluster import Cluster
from tickd.fence import FencedSaver
from tickd.guard import install_guard
from tickd.migrations import STEPS


SPACE, GRAPH, TOKEN = 7301, "bench", 5
VARIANTS = {"off": (False, False), "fenced": (True, False), "on": (True, True), "control": (False, False)}
ADMIT = "INSERT INTO tickd.threads (thread_id, space, graph, token) VALUES (%s, %s, %s, %s)"
WARM_UP = 5


class State(TypedDict, total=False):
    """What a node of nothing leaves alone."""

    number: int


@dataclass(slots=True)
class Variant:
    """One way of saving checkpoints, and what its runs took (seconds)."""

    name: str
    pool: AsyncConnectionPool[Any]
    backend: int
    fenced: bool
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def saver(self) -> AsyncPostgresSaver:
        """Make a saver for one run."""
        if self.fenced:
            return FencedSaver(self.pool, space=SPACE, graph=GRAPH, token=TOKEN)
        return AsyncPostgresSaver(self.pool)

    def spent(self) -> float:
        """Return the seconds of processor time that client and server have used so far."""
        server = int(Path(f"/proc/{self.backend}/schedstat").read_text().split()[0]) / 1e9
        return server + time.process_time()


def chain(steps: int, node: Callable[[State], Awaitable[State]]) -> Any:
    """Return the builder of a chain of equal nodes."""
    builder: Any = StateGraph(State)
    for i in range(steps):
        builder.add_node(f"n{i}", node)
        builder.add_edge(f"n{i - 1}" if i else START, f"n{i}")
    return builder


async def open_variant(stack: AsyncExitStack, cluster: Cluster, name: str) -> Variant:
    """Make a variant's database and open its one connection, as a replica's pool does."""
    fenced, guarded = VARIANTS[name]
    async with await AsyncConnection.connect(cluster.admin_dsn("postgres"), autocommit=True) as admin:
        await admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(f"cost_{name}")))
    parameters = {"autocommit": True, "row_factory": dict_row, "prepare_threshold": 0}
    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
        cluster.admin_dsn(f"cost_{name}"), kwargs=parameters, min_size=1, max_size=1, open=False
    )
    await stack.enter_async_context(pool)
    await AsyncPostgresSaver(pool).setup()
    async with pool.connection() as connection:
        for step in STEPS:
            await connection.execute(
                resources.files("tickd").joinpath("sql", step).read_bytes(), prepare=False
            )
        if guarded:
            await install_guard(connection)
        return Variant(name, pool, connection.info.backend_pid, fenced)


async def run_once(variant: Variant, builder: Any, thread: str, durability: Any) -> tuple[float, float]:
    """Run the graph once on a new thread and return what it took, by the clock and in processor time."""
    async with variant.pool.connection() as connection:
        await connection.execute(ADMIT, [thread, SPACE, GRAPH, TOKEN])
    graph = builder.compile(checkpointer=variant.saver())
    config = {"configurable": {"thread_id": thread}, "recursion_limit": 1000}
    gc.collect()
    spent, began = variant.spent(), time.perf_counter()
    await graph.ainvoke({"number": 1}, config, durability=durability)
    return time.perf_counter() - began, variant.spent() - spent


async def measure(cluster: Cluster, options: argparse.Namespace, node_ms: float) -> dict[str, Any]:
    """Run all variants round by round, and sum up."""

    async def node(_: State) -> State:
        if node_ms:
            await asyncio.sleep(node_ms / 1000)  # the node's work is to take this long
        return {}

    builder = chain(options.steps, node)
    chance = random.Random(1)  # noqa: S311  # an order of chance, and the same in each measurement
    async with AsyncExitStack() as stack:
        variants = [await open_variant(stack, cluster, name) for name in VARIANTS]
        for round_ in range(-WARM_UP, options.rounds):
            for variant in chance.sample(variants, len(variants)):
                wall, cpu = await run_once(variant, builder, f"{GRAPH}/{round_}", options.durability)
                if round_ >= 0:
                    variant.wall.append(wall)
                    variant.cpu.append(cpu)
    off = variants[0]
    return {
        variant.name: {
            "wall_ms": round(statistics.median(variant.wall) * 1000, 2),
            "wall_ratio": ratio(variant.wall, off.wall),
            "cpu_ms": round(statistics.median(variant.cpu) * 1000, 2),
            "cpu_ratio": ratio(variant.cpu, off.cpu),
        }
        for variant in variants
    }


def ratio(ones: list[float], others: list[float]) -> float:
    """Return the median of the ratios of what was measured in the same round."""
    return round(statistics.median(a / b for a, b in zip(ones, others, strict=True)), 3)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--node-ms", type=float, nargs="+", default=[0, 20])
    parser.add_argument("--durability", choices=["sync", "async", "exit"], default="sync")
    parser.add_argument(
        "--fsync", action="store_true", help="let commits wait for the disk, as in production"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, and print one table per kind of node."""
    options = parse()
    for node_ms in options.node_ms:
        cluster = Cluster({"fsync": "on" if options.fsync else "off"})
        try:
            cluster.init()
            cluster.start()
            result = asyncio.run(measure(cluster, options, node_ms))
        finally:
            cluster.remove()
        if options.json:
            sys.stdout.write(json.dumps({"node_ms": node_ms, **vars(options), "result": result}) + "\n")
            continue
        sys.stdout.write(
            f"{options.steps} nodes of {node_ms:g} ms, durability {options.durability}, {options.rounds} rounds\n"
            f"{'':10}{'wall ms':>10}{'ratio':>8}{'cpu ms':>10}{'ratio':>8}\n"
        )
        for name, row in result.items():
            sys.stdout.write(f"{name:10}" + "{:10.2f}{:8.3f}{:10.2f}{:8.3f}\n".format(*row.values()))


if __name__ == "__main__":
    main()
