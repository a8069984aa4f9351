"""The project's own files: what they pin, what they promise, and what must not stand in them."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked() -> list[Path]:
    """Return the files that are committed, or about to be."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def lines_with(pattern: str, *, under: str = "") -> list[str]:
    """Return `file:line: text` for each line of the tracked files that the pattern finds."""
    found = []
    for path in tracked():
        name = str(path.relative_to(ROOT))
        if name.startswith(under):
            text = path.read_text(errors="replace")
            found += [
                f"{name}:{n}: {line}"
                for n, line in enumerate(text.splitlines(), 1)
                if re.search(pattern, line)
            ]
    return found


def requirement(name: str) -> Requirement:
    """Return the project's requirement of one package."""
    (found,) = [r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == name]
    return found


@pytest.mark.parametrize(
    ("version", "allowed"), [("3.11.2", False), ("3.11.3", True), ("3.12.0", True), ("4.0.0", False)]
)
def test_apscheduler_is_one_that_computes_waits_from_timestamps(version: str, *, allowed: bool):
    """B12: Before 3.11.3 a timer slept an hour too long across the spring night; 4 is another library."""
    assert requirement("apscheduler").specifier.contains(version) is allowed


@pytest.mark.parametrize(("version", "allowed"), [("3.10.14", False), ("3.11.0", True), ("3.13.1", True)])
def test_python_is_one_whose_tasks_carry_context(version: str, *, allowed: bool):
    """LangGraph's nodes lose their config in sync nodes before 3.11, and TaskGroup is younger too."""
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(version) is allowed


def test_the_time_zones_come_with_the_package():
    """A slim image has no zone files, and then even UTC cannot be found."""
    assert requirement("tzdata").marker is None


def pins() -> dict[str, str]:
    """Return the pinned version of each package, by its normal name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_to_a_version_it_allows():
    """Two clones made on different days must get the same versions."""
    required = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["embedded"],
        *PROJECT["dependency-groups"]["dev"],
        *PROJECT["build-system"]["requires"],
    ]
    pinned = pins()

    for each in map(Requirement, required):
        assert each.specifier.contains(pinned[canonicalize_name(each.name)]), (
            f"{each} is not pinned: run make pins"
        )


def test_a_pin_is_a_plain_version():
    """A local version, a URL or an option would tie the file to one machine's registry."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]

    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []


def test_no_file_names_a_package_registry():
    """Where packages come from is the machine's business, and a mirror's address helps nobody else."""
    hosts = [
        r"pypi\.(org|python)",
        r"python" + r"hosted\.org",
        r"deb\.debian" + r"\.org",
        r"security\.debian" + r"\.org",
    ]
    options = ["--(extra-)?index" + "-url", "--find" + "-links", "--trusted" + "-host"]

    assert lines_with("|".join(hosts + options)) == []


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    """A path that exists on one machine only is a bug everywhere else."""
    here = [str(ROOT)] + [f"{home}/" for home in [str(Path.home())] if home != "/"]

    assert lines_with("|".join(map(re.escape, here))) == []


def test_nothing_is_left_to_be_done():
    """Unfinished work belongs in the issue tracker, where somebody looks."""
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"]

    assert lines_with(r"\b(" + "|".join(words) + r")\b") == []


def test_no_test_is_skipped_and_nothing_is_mocked():
    """A skipped test of a lock proves nothing, and neither does a Postgres that is not one."""
    words = [r"pytest\.mark\." + "skip", r"pytest\." + r"skip\(", "Magic" + "Mock", "unittest" + r"\.mock"]

    assert lines_with("|".join(words), under="tests/") == []


def test_the_readme_names_the_commands_that_the_makefile_has():
    """The two commands are the first thing that a newcomer types."""
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()

    for target in ["dev", "test"]:
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("script", [".ci/run", "scripts/install-debian", "scripts/make-venv", "scripts/pin"])
def test_a_script_is_valid_bash_and_may_be_run(script: str):
    """A script that is seldom run breaks unseen."""
    path = ROOT / script

    assert path.stat().st_mode & 0o100
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_arrays_are_sent_as_bytes():
    """As text, psycopg looks through every value for quotes: fifty small states in one statement take it 9 ms."""
    assert lines_with(r"%(\(\w+\))?s::\w+\[\]|ANY\(%(\(\w+\))?s\)", under="src/tickd/") == []
