"""The environment of the peers: a virtual one beside the project's, made when a peer is first run."""

import subprocess
import sys
from functools import cache
from pathlib import Path


ROOT = Path(__file__).parent.parent
HOME = ROOT / ".venv-peers"
PINS = Path(__file__).parent / "peers.txt"


@cache
def peers_python() -> Path:
    """Return the Python that has every peer installed as `peers.txt` pins it."""
    python, installed = HOME / "bin" / "python", HOME / "installed.txt"
    if not installed.exists() or installed.read_text() != PINS.read_text():
        print(f"Installing the peers into {HOME}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--requirement", str(PINS)], check=True)
        installed.write_text(PINS.read_text())
    return python
