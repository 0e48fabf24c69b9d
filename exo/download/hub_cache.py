"""The Hugging Face cache on disk: snapshots of repos whose files are links to blobs.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. What other tools fetched is
used here, and what exo fetches serves them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from huggingface_hub import constants

from exo import json_text
from exo.download.gguf_repo import chosen_gguf, quantizations
from exo.errors import ModelUnsupported
from exo.models.weight_files import INDEX, chosen_weights

DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A commit, git's sha1 of a file, or a sha256."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LISTING_VERSION = 1


@dataclass(frozen=True)
class RepoFile:
    """One file of a repo. `git_sha1` is git's id of what the repo stores: the file, or for a large
    one (LFS) a pointer to it; then `sha256` is the file's own."""

    path: str
    size: int
    git_sha1: str
    sha256: str | None = None
    xet_hash: str | None = None

    @property
    def digest(self) -> str:
        """What the content is verified by, and the name of its blob."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True)
class Listing:
    """What a repo holds at a commit."""

    repo: str
    commit: str
    files: tuple[RepoFile, ...]


class RepoName(NamedTuple):
    """ "org/name:quantization@revision", of which the last two may be left out."""

    repo: str
    revision: str = "main"
    quantization: str = ""

    @classmethod
    def of(cls, text: str) -> RepoName:
        name, _, revision = text.partition("@")
        repo, _, quantization = name.partition(":")
        return cls(repo, revision or "main", quantization)


def holds_gguf(names: Collection[str], quantization: str) -> bool:
    """Whether what is wanted of a repo with these files is GGUF: it holds nothing else, or a
    quantization is named."""
    return any(n.endswith(".gguf") for n in names) and (
        quantization != "" or "config.json" not in names
    )


def needed_files(listing: Listing, quantization: str = "") -> list[RepoFile]:
    """The files that exo reads: configuration, tokenizer, safetensors; small ones first. Of a repo
    of GGUF files those of one quantization.

    Raises:
        ModelUnsupported: the repo has no configuration, no safetensors, or not all of them; or
            several quantizations and none is named.
    """
    sizes = {file.path: file.size for file in listing.files}
    if holds_gguf(sizes, quantization):
        chosen = chosen_gguf(listing.repo, sizes, quantization)
        return sorted((f for f in listing.files if f.path in chosen), key=lambda f: f.path)
    if quantization:
        raise ModelUnsupported(f"{listing.repo} has no GGUF files; name it without :{quantization}")
    if "config.json" not in sizes:
        raise ModelUnsupported(f"{listing.repo} is not a model exo can run: {_holds(sizes)}")
    try:
        weights = chosen_weights(sizes)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{listing.repo}: {error.message}") from error
    if not weights:
        raise ModelUnsupported(
            f"{listing.repo} has no model*.safetensors: {_holds(sizes)}; pickled weights are not "
            "read"
        )
    files = [f for f in listing.files if f.path in weights or _is_read(f.path)]
    return sorted(files, key=lambda file: (file.size, file.path))


def left_out(listing: Listing, quantization: str = "") -> dict[str, list[RepoFile]]:
    """Files of a repo that `needed_files` does not name, by the reason."""
    needed = set(needed_files(listing, quantization))
    found: dict[str, list[RepoFile]] = {}
    for file in listing.files:
        if file not in needed:
            kinds = (why for pattern, why in _NOT_READ if pattern.search(file.path))
            found.setdefault(next(kinds, "not read by exo"), []).append(file)
    return found


def _holds(names: Collection[str]) -> str:
    """What is in a repo that is no model, for who named it."""
    kinds = sorted({Path(name).suffix for name in names} & _OTHER_WEIGHTS)
    if "config.json" not in names:
        return "it has no config.json" + (f", only {', '.join(kinds)}" if kinds else "")
    return f"only {', '.join(kinds)}" if kinds else "it has no weights"


def _is_read(path: str) -> bool:
    """Configuration and tokenizer, whatever they are called; folders hold other formats, but for
    what sentence-transformers says of embeddings."""
    is_small = _SMALL.fullmatch(path) and not _NOT_READ_EITHER.fullmatch(path)
    return bool(is_small) or path == POOLING


POOLING = "1_Pooling/config.json"

_SMALL = re.compile(r"[^/]+\.(json|txt|jinja|model|tiktoken)")
_NOT_READ_EITHER = re.compile(
    r"(pytorch_model|tf_model|flax_model|consolidated|adapter_)[^/]*\.json|"
    r"(trainer_state|\w+_results|params|tekken)\.json|(LICENSE|requirements|README)\.txt",
    re.IGNORECASE,
)
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_NOT_READ = [
    (re.compile(r"\.(bin|pt|pth|pkl|ckpt)$"), "pickled"),
    (re.compile(r"\.(onnx|onnx_data|h5|msgpack|tflite|ot|gguf|mlmodel)$"), "another format"),
    (re.compile(r"\.safetensors$"), "the same weights again"),
    (re.compile(r"\.(png|jpe?g|gif|svg|webp|mp4|pdf)$"), "pictures"),
]


def cache_folder() -> Path:
    """HF_HUB_CACHE, or HF_HOME/hub."""
    return Path(constants.HF_HUB_CACHE)


def cached_repos() -> list[str]:
    """Repos of which something is in the cache."""
    folders = cache_folder().glob("models--*--*")
    return sorted(f.name.removeprefix("models--").replace("--", "/", 1) for f in folders)


class RepoCache:
    """One repo's part of the cache. Nothing here touches the network."""

    def __init__(self, repo: str, quantization: str = "") -> None:
        self.repo = repo
        self.quantization = quantization
        name = "models--" + repo.replace("/", "--")
        self.folder = cache_folder() / name
        self._locks = cache_folder() / ".locks" / name

    def commit(self, revision: str) -> str | None:
        """The commit a revision meant when it was last looked up."""
        if _COMMIT.fullmatch(revision):
            return revision
        ref = self.folder / "refs" / revision
        return ref.read_text("utf-8").strip() if ref.is_file() else None

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, file: RepoFile) -> Path:
        return self.folder / "blobs" / file.digest

    def complete_snapshot(self, revision: str) -> Path | None:
        """The folder of a revision if all that exo reads of it is there."""
        commit = self.commit(revision)
        if commit is None or not self.snapshot(commit).is_dir():
            return None
        listing = self.listing(commit)
        try:
            if listing is None:  # fetched by a tool that keeps none
                return self._found(self.snapshot(commit))
            needed = needed_files(listing, self.quantization)
            if not all(self.has(commit, file) for file in needed):
                return None
            return self.folder_of(commit, [file.path for file in needed])
        except ModelUnsupported:
            return None  # not for exo; who asks for it is told why when it is fetched

    def folder_of(self, commit: str, files: Sequence[str]) -> Path:
        """What an engine loads, where all `files` of a commit are here: the snapshot, or of GGUF
        files a folder that is made of their metadata.

        Raises:
            ModelUnsupported: exo does not read these GGUF files; the message says why.
        """
        first = self.snapshot(commit) / files[0]
        if first.suffix != ".gguf":
            return self.snapshot(commit)
        made = self._made(commit, first)
        if not (made / "config.json").is_file():
            from exo.models.gguf.folder import make_folder, parts_of  # late: imports tokenizers

            try:
                make_folder(parts_of(first), made)
            except OSError:
                # Another process may have been faster.
                if not (made / "config.json").is_file():
                    raise
        return made

    def _found(self, snapshot: Path) -> Path | None:
        """The folder of what another tool fetched, if that looks whole."""
        sizes = {
            str(file.relative_to(snapshot)): file.stat().st_size
            for file in snapshot.rglob("*")
            if file.is_file()
        }
        if holds_gguf(sizes, self.quantization):
            files = chosen_gguf(self.repo, sizes, self.quantization)
            return self.folder_of(snapshot.name, files)
        if self.quantization or "config.json" not in sizes:
            return None
        return snapshot if looks_whole(snapshot) else None

    def quantizations_here(self, revision: str) -> list[str]:
        """Of the repo's GGUF files, the quantizations of which all is here."""
        commit = self.commit(revision)
        if commit is None:
            return []
        names = {
            str(file.relative_to(self.snapshot(commit))): file.is_file()
            for file in self.snapshot(commit).rglob("*.gguf")
        }
        parts = quantizations(names)
        return [one for one, files in parts.items() if all(map(names.get, files))]

    def remove_quantization(self, revision: str) -> bool:
        """Delete the files of the quantization; False if none of them is here."""
        commit = self.commit(revision)
        if commit is None:
            return False
        snapshot = self.snapshot(commit)
        files = quantizations(str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf"))
        for name in files.get(self.quantization.upper(), []):
            blob = (snapshot / name).resolve()
            shutil.rmtree(self._made(commit, snapshot / name), ignore_errors=True)
            (snapshot / name).unlink()
            blob.unlink(missing_ok=True)
        return self.quantization.upper() in files

    def _made(self, commit: str, file: Path) -> Path:
        """The folder that is made of a GGUF file's metadata."""
        return self.folder / "gguf" / f"{commit}-{file.stem}"

    def has(self, commit: str, file: RepoFile) -> bool:
        return (self.snapshot(commit) / file.path).is_file()

    def link(self, commit: str, file: RepoFile) -> None:
        """Give a blob that is whole its name in the snapshot."""
        set_link(self.snapshot(commit) / file.path, self.blob(file))

    def lock(self, file: RepoFile) -> FileLock:
        """The lock other tools take as well while they fetch this file."""
        self._locks.mkdir(parents=True, exist_ok=True)
        return FileLock(self._locks / f"{file.digest}.lock")

    def listing(self, commit: str) -> Listing | None:
        """What the repo holds, as it was saved; None if that is not here or not readable."""
        file = self._listing_file(commit)
        try:
            saved = json_text.object_in(file)
            if saved["format_version"] != _LISTING_VERSION:
                return None
            files = tuple(_file_of(path, entry) for path, entry in saved["files"].items())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            # Another program's file, half written or of a later version: the hub is asked again.
            return None
        return Listing(self.repo, commit, files)

    def listings(self) -> list[Listing]:
        """What the repo holds at every commit that is known here."""
        commits = [file.stem for file in self.folder.glob("trees/*.json")]
        return [found for commit in commits if (found := self.listing(commit)) is not None]

    def save(self, listing: Listing, revision: str) -> None:
        """Keep a listing, in huggingface_hub's own format, and what the revision means now."""
        entries = {file.path: _entry_of(file) for file in listing.files}
        whole = {"format_version": _LISTING_VERSION, "files": entries}
        _write(self._listing_file(listing.commit), json.dumps(whole, indent=1))
        if revision != listing.commit:
            _write(self.folder / "refs" / revision, listing.commit)

    def _listing_file(self, commit: str) -> Path:
        return self.folder / "trees" / f"{commit}.json"


def set_link(link: Path, target: Path) -> None:
    """Make `link` lead to `target`, wherever it led before."""
    link.parent.mkdir(parents=True, exist_ok=True)
    relative = os.path.relpath(target, link.parent)
    if link.is_symlink() and str(link.readlink()) == relative:
        return
    fresh = link.with_name(f".{link.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(relative)
    fresh.replace(link)


def _file_of(path: str, entry: dict[str, Any]) -> RepoFile:
    sha256 = entry.get("lfs_sha256")
    size = entry["lfs_size"] if sha256 else entry["size"]
    return RepoFile(path, int(size), str(entry["blob_id"]), sha256, entry.get("xet_hash"))


def _entry_of(file: RepoFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"size": file.size, "blob_id": file.git_sha1}
    if file.sha256:
        entry |= {"lfs_sha256": file.sha256, "lfs_size": file.size}
    if file.xet_hash:
        entry["xet_hash"] = file.xet_hash
    return entry


def check_index(folder: Path, listing: Listing) -> None:
    """Raises ModelUnsupported if the index names weight files that the repo does not have."""
    known = {file.path for file in listing.files}
    if missing := sorted(set(_indexed(folder)) - known):
        raise ModelUnsupported(
            f"{listing.repo}: its index names {missing[0]}, which is not there: the upload of this "
            "model is not complete"
        )


def _indexed(folder: Path) -> list[str]:
    """The weight files a checkpoint's index names; none where there is no index that can be
    read."""
    try:
        return sorted(set(json_text.object_in(folder / INDEX)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []


def looks_whole(snapshot: Path) -> bool:
    """Whether a folder has all weight files of a checkpoint, by its index or their names."""
    names = [file.name for file in snapshot.iterdir()]
    try:
        wanted = _indexed(snapshot) or chosen_weights(names)
    except ModelUnsupported:
        return False
    return bool(wanted) and all((snapshot / name).is_file() for name in wanted)


def _write(file: Path, text: str) -> None:
    """All of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)
