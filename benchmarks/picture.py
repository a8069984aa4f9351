"""The pictures: how late each contender starts its tasks, and what tickd costs as entries and replicas grow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.page import NAMES, Results


mpl.use("svg")
from matplotlib import pyplot as plt  # the back end has to be chosen first
from matplotlib import ticker


TITLES = {"A": "A: one graph a second", "B": "B: 200 due at once", "C": "C: 2,000 due at once"}

SIZES: dict[str, Callable[[dict[str, Any]], float]] = {
    "lateness p50 and p99, ms": lambda one: one["late_ms"]["p50"],
    "processor per replica, % of a core": lambda one: one["replica_cpu"] * 100,
    "memory per replica, MiB": lambda one: one["resident_mb"],
    "statements a second per replica": lambda one: one["statements"],
    "connections of all replicas": lambda one: one["connections"],
}


def draw_sizes(results: Results, path: Path) -> None:
    """Draw each cost against the number of entries and of replicas, and write it as SVG."""
    figures = results.of("K")
    plt.rcParams.update({"svg.hashsalt": "tickd", "svg.fonttype": "none", "font.size": 9})
    figure, panels = plt.subplots(2, len(SIZES), figsize=(3 * len(SIZES), 4.4))
    for row, (name, points) in zip(
        panels, (("entries", figures["by_entries"]), ("replicas", figures["by_replicas"])), strict=True
    ):
        sizes = [one[name] for one in points]
        for panel, (title, cost) in zip(row, SIZES.items(), strict=True):
            panel.plot(sizes, [cost(one) for one in points], "o-")
            if title.startswith("lateness"):
                panel.plot(sizes, [one["late_ms"]["p99"] for one in points], "|--")
            panel.set(xscale="log", xlabel=name, title=title)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.xaxis.set_minor_locator(ticker.NullLocator())
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(results: Results, path: Path) -> None:
    """Draw p50 to p99 of every contender, one panel per workload, and write it as SVG; the same bytes for the same figures."""
    letters = [letter for letter in TITLES if letter in results.letters()]
    plt.rcParams.update({"svg.hashsalt": "tickd", "svg.fonttype": "none", "font.size": 9})
    figure, panels = plt.subplots(
        1, len(letters), figsize=(4.2 * len(letters), 2.6), squeeze=False, sharey=True
    )
    for panel, letter in zip(panels[0], letters, strict=True):
        rows = {
            name: f["late_ms"]
            for name, f in results.contests(letter).items()
            if f.get("late_ms", {}).get("p50")
        }
        heights = [list(NAMES).index(name) for name in rows]
        panel.hlines(
            heights, [late["p50"] for late in rows.values()], [late["p99"] for late in rows.values()], lw=2
        )
        panel.plot([late["p50"] for late in rows.values()], heights, "o", label="p50")
        panel.plot([late["p99"] for late in rows.values()], heights, "|", label="p99")
        panel.set(xscale="log", title=TITLES[letter], xlabel="ms after the fire time")
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        panel.xaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_yticks(range(len(NAMES)), [name.strip("*").replace("`", "") for name in NAMES.values()])
        panel.set_ylim(len(NAMES) - 0.5, -0.5)
        panel.grid(axis="x", which="both", alpha=0.3)
    panels[0][0].legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
