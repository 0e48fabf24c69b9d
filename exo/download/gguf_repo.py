"""GGUF files of repos that hold a model several times over, a quantization a file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from exo.errors import ModelUnsupported

_QUANTIZATION = re.compile(
    r"(?:^|[-_./])((?:UD-)?(?:I?Q\d\w*|P?T?Q\d_\d|BF16|F16|F32|MXFP4\w*|NVFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf",
    re.IGNORECASE,
)
_PART = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_NO_MODEL = re.compile(
    r"mmproj|^imatrix|[-_.]imatrix\.gguf$|^mtp-|(^|[-_.])(dspark|eagle3?|dflash\d?)[-_.]",
    re.IGNORECASE,
)
"""Names of files that go with a model: its eyes, what it was quantized by, what guesses its tokens
(`mtp-` as llama.cpp's converter names it)."""

_NO_MODELS = "mtp"
"""A folder of such files. A file that says MTP elsewhere in its name may have both."""


def quantizations(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each quantization, by its name as in Q4_K_M; in parts, all of them in order.
    Where a name tells none, or several models of a repo have the same, it stands for it itself."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        file = PurePosixPath(name).name
        folders = {part.lower() for part in PurePosixPath(name).parts[:-1]}
        if file.endswith(".gguf") and not _NO_MODEL.search(file) and _NO_MODELS not in folders:
            said, model = _QUANTIZATION.search(file), _PART.sub("", name)
            known = said[1].upper() if said else _PART.sub("", file)
            found[known][model].append(name)
    return {
        known if len(models) == 1 else model: files
        for known, models in found.items()
        for model, files in models.items()
    }


def chosen_gguf(repo: str, sizes: Mapping[str, int], wanted: str) -> list[str]:
    """The files of quantization `wanted`, or of the only one there is where it is "". `sizes`: of
    the repo's files, by name.

    Raises:
        ModelUnsupported: there is none of that name, or several and none is named; the message
            lists them.
    """
    known = quantizations(sizes)
    if not wanted and len(known) == 1:
        return next(iter(known.values()))
    for name in (wanted.upper(), f"UD-{wanted.upper()}", wanted):
        if name in known:
            return known[name]
    some = ", ".join(
        f"{name} ({sum(sizes[file] for file in files) / 1e9:.1f} GB)"
        for name, files in sorted(known.items(), key=lambda one: sum(map(sizes.get, one[1])))  # type: ignore[arg-type]
    )
    example = "Q4_K_M" if "Q4_K_M" in known else next(iter(known), "Q4_K_M")
    if wanted:
        raise ModelUnsupported(f"{repo} has no quantization {wanted!r}, but {some or 'none'}")
    raise ModelUnsupported(
        f"{repo} holds {len(known)} quantizations: {some}; name one, as in {repo}:{example}"
    )
