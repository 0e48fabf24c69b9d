"""Imported first, this runs a script in the repository's own environment, made if there is none."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv/bin/python"

if Path(sys.prefix) != PYTHON.parents[1]:
    subprocess.run([ROOT / "scripts/setup", "dev"], check=True)
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
