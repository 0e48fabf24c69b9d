import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts" / "gen_proto", tmp_path],
        check=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    committed = ROOT / "exo" / "networking" / "generated"
    for fresh in tmp_path.iterdir():
        assert fresh.read_text() == (committed / fresh.name).read_text(), (
            f"{fresh.name} is stale: run scripts/gen_proto"
        )
