"""A virtual environment for each peer that needs packages, under .cache/peers in the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.roster import ENVIRONMENTS, Peer
from benchmarks.report import log

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "peers"


def python_of(peer: Peer) -> str:
    return peer.python or (str(CACHE / peer.environment / "bin" / "python") if peer.environment else sys.executable)


def installed(peer: Peer) -> bool:
    return not peer.environment or (CACHE / peer.environment / "complete").exists()


def install(names: list[str]) -> int:
    """Makes the environments of these names, or all; how many failed."""
    unknown = set(names) - set(ENVIRONMENTS)
    if unknown:
        raise SystemExit(f"no environment named {', '.join(sorted(unknown))}; there are: {', '.join(ENVIRONMENTS)}")
    failed = 0
    for name in names or ENVIRONMENTS:
        folder = CACHE / name
        log(f"{folder}: {' '.join(ENVIRONMENTS[name])}")
        make = (sys.executable, "-m", "venv", str(folder))
        fill = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "numpy", *ENVIRONMENTS[name])
        if all(subprocess.run(command).returncode == 0 for command in (make, fill)):
            (folder / "complete").touch()
        else:
            log(f"{name} could not be installed; see above")
            failed += 1
    return failed


def path_of_benchmarks() -> str:
    """A folder to import `benchmarks` from, and nothing else: one of the peers is called batch_inference, too."""
    link = ROOT / ".cache" / "path" / "benchmarks"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(ROOT / "benchmarks", target_is_directory=True)
    return str(link.parent)
