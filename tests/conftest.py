"""Shared by all tests: no test takes the user's node id or models, and none leaves loopback."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The machine may be busy with other tests: time says nothing about the code.
settings.register_profile("exo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("exo")


# MLX on a CPU has g++ compile each chain of elementwise operations it meets: 75 of them, a second
# or two each on a new machine.
os.environ["MLX_DISABLE_COMPILE"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as exo itself does
os.environ["MLX_ENABLE_TF32"] = "0"  # on an NVIDIA card: tests compare more digits than it has
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def pytest_collection_finish() -> None:
    gc.freeze()  # 2,000 tests and all that they import, which every full collection would look at


def pytest_sessionfinish() -> None:
    gc.collect()
    gc.freeze()  # pytest collects five times more, after which it would find nothing either


@pytest.fixture(scope="session")
def exo_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder for the whole session: the default model is fetched and converted once."""
    home = Path(os.environ.get("EXO_TEST_HOME") or tmp_path_factory.mktemp("exo"))
    before = os.environ.get("EXO_HOME")
    os.environ["EXO_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["EXO_HOME"]
    else:
        os.environ["EXO_HOME"] = before


@pytest.fixture(scope="session")
def checkpoint(exo_home: Path) -> Path:
    """The default model, real weights."""
    from exo.download.store import ModelStore, default_sources

    models = exo_home / "models"
    store = ModelStore(models, default_sources(models))
    return asyncio.run(store.ensure("smollm2-135m", lambda progress: None))
