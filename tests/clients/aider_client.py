"""aider in a scratch repository: it asks, and shows what it is told."""
# needs: aider-chat==0.86.2

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
with tempfile.TemporaryDirectory() as folder:
    # The dummy engine goes on until somebody stops it.
    settings = f"- name: openai/{MODEL}\n  extra_params: {{stop: [c], max_tokens: 99}}\n"
    (Path(folder) / "models.yml").write_text(settings)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "aider",
            "--model",
            f"openai/{MODEL}",
            "--model-settings-file",
            "models.yml",
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
    whole = "Tokens:" in done.stdout and "hit a token limit" not in done.stdout
    assert done.returncode == 0 and whole, done.stdout + done.stderr
    print(json.dumps(whole))
