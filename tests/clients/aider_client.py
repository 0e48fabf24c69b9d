"""aider in a scratch repository: it edits a file as it is told, and commits."""
# needs: aider-chat==0.86.2

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
OPTIONS = ["--yes-always", "--no-check-update", "--no-analytics", "--no-pretty", "--no-gitignore"]
OPTIONS += ["--no-show-model-warnings", "--edit-format", "whole", "--map-tokens", "0"]

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", *who, *arguments]
        return subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (folder / "hello.py").write_text("print('hello')\n")
    git("add", ".")
    git("commit", "-qm", "first")
    # What the model is to say is in agents.json.
    task = ["--message", "aider-task: greet in Italian", "hello.py"]
    done = subprocess.run(
        [sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", *OPTIONS, *task],
        cwd=folder,
        env=os.environ | {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none", "HOME": name},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (folder / "hello.py").read_text()
    assert text == "print('ciao')\n", done.stdout + done.stderr
    assert len(git("log", "--oneline").splitlines()) == 2, done.stdout
    print(json.dumps(text))
