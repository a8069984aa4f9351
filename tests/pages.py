"""The pages of the documentation, as far as tests run them."""

import re
from pathlib import Path


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """Return the blocks that a line with a file's name announces: name → contents."""
    return dict(
        re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    )
