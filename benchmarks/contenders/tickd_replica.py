"""tickd itself: `tickd run` on a schedule made from the plan, with default settings but for how much runs at once."""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.plan import Plan, read_plan


def schedule_of(plan: Plan) -> str:
    """Return the schedule file (JSON is YAML)."""
    graphs = {
        name: {
            "graph": "benchmarks.graphs:graph",
            "every": f"{plan.period(number)}s",
            "anchor": datetime.fromtimestamp(plan.phase(number), UTC).isoformat(),
            "durability": plan.durability,
            "hold": os.environ.get("BENCHMARK_HOLD", "dedicated"),
        }
        for number, name in enumerate(plan.names())
    }
    return json.dumps({"graphs": graphs})


def main() -> None:
    """Write the schedule, or become a replica of it."""
    plan, argument = read_plan(), sys.argv[1]
    schedule = Path(plan.home) / "schedule.yaml"
    environment = {
        **os.environ,
        "TICKD_DATABASE_URL": plan.dsn,
        "TICKD_REPLICA": argument,
        "TICKD_MAX_RUNNING": str(plan.width),
    }
    if argument == "set_up":
        schedule.write_text(schedule_of(plan))
        os.execve(sys.executable, [sys.executable, "-m", "tickd", "migrate"], environment)
    module = os.environ.get("BENCHMARK_TICKD", "tickd")
    os.execve(sys.executable, [sys.executable, "-m", module, "run", str(schedule), "--json"], environment)


if __name__ == "__main__":
    main()
