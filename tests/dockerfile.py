"""The Dockerfile, read as far as the tests need it."""

import json
import re
from pathlib import Path


DOCKERFILE = Path(__file__).parent.parent / "Dockerfile"


def instructions() -> list[dict[str, list[str]]]:
    """Return, for each stage, its instructions: name → the arguments of each time it stands there."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    stages: list[dict[str, list[str]]] = []
    for line in re.sub(r"\\\n", "", text).splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append({})
        if name:
            stages[-1].setdefault(name, []).append(rest.strip())
    return stages


def exec_form(arguments: str) -> list[str]:
    """Return the words of an instruction in exec form; anything else is an error, for a shell would run it."""
    words = json.loads(arguments)
    assert isinstance(words, list)
    assert all(isinstance(word, str) for word in words)
    return words


def health_command() -> list[str]:
    """Return the command of the image's health check."""
    (check,) = instructions()[-1]["HEALTHCHECK"]
    return exec_form(check.partition("CMD ")[2])
