"""Simon Willison's llm, by an extra-models file."""
# needs: llm==0.36

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
with tempfile.TemporaryDirectory() as folder:
    models = f"- model_id: mine\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
    (Path(folder) / "extra-openai-models.yaml").write_text(models)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "mine",
            "-o",
            "max_tokens",
            "8",
            "-o",
            "temperature",
            "0",
            "--no-log",
            "--key",
            "none",
            "hello",
        ],
        env=os.environ | {"LLM_USER_PATH": folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    print(json.dumps(done.stdout.strip()))
