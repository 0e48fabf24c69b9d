"""aider in a scratch repository: it asks, and shows what it is told."""
# needs: aider-chat==0.86.2
# python: 3.12

import json
import os
import subprocess
import sys
import tempfile

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
with tempfile.TemporaryDirectory() as folder:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "aider",
            "--model",
            f"openai/{MODEL}",
            "--message",
            "hello",
            "--yes-always",
            "--no-auto-commits",
            "--no-check-update",
            "--no-analytics",
            "--no-pretty",
            "--no-show-model-warnings",
            "--no-gitignore",
            "--edit-format",
            "ask",
        ],
        cwd=folder,
        env=os.environ | {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none", "HOME": folder},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout + done.stderr
    print(json.dumps("Tokens:" in done.stdout))
