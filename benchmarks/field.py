"""A field to try replicas in: a throwaway cluster with one database, its witness, and room for a fleet."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quantiles import spread
from tests.cluster import Cluster
from tests.database import Database, Server
from tests.replicas import Fleet
from tests.witness import Witness


@dataclass(frozen=True, slots=True)
class Field:
    """What a try needs: the database's cluster, the oracle, and the replicas."""

    cluster: Cluster
    database: Database
    witness: Witness
    fleet: Fleet


@contextmanager
def cluster_with_database(settings: Mapping[str, str] | None = None) -> Iterator[tuple[Cluster, Database]]:
    """Start a cluster and make a database in it; both are gone at the end."""
    cluster = Cluster(settings)
    try:
        cluster.init()
        cluster.start()
        server = Server(cluster.admin_dsn("postgres"))
        server.make_owner()
        database = Database(server)
        database.create()
        yield cluster, database
        database.connection.close()
    finally:
        cluster.remove()


@contextmanager
def field(settings: Mapping[str, str] | None = None) -> Iterator[Field]:
    """Lay out a field whose witness is in the database itself."""
    with cluster_with_database(settings) as (cluster, database), tempfile.TemporaryDirectory() as home:
        witness = Witness(database.admin_dsn)
        os.environ["WITNESS_DSN"] = witness.dsn
        with Fleet(Path(home), database.dsn) as fleet:
            yield Field(cluster, database, witness, fleet)
        witness.close()


def rounded(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the quantiles of measured seconds as facts of this name."""
    return {f"{name}_{quantile}_s": round(value or 0, 3) for quantile, value in spread(seconds).items()}


def tell(facts: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print the facts, as one JSON object or a line each."""
    width = max(map(len, facts)) + 2
    text = (
        json.dumps(facts)
        if options.json
        else "\n".join(f"{name:{width}}{fact}" for name, fact in facts.items())
    )
    sys.stdout.write(text + "\n")
