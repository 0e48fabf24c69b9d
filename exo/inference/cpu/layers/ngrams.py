"""What several tokens bring together: the tensors of it, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.ngrams import Ngrams
from exo.inference.cpu.layers.recurrent import convolution
from exo.inference.cpu.packing import Packer, as_list

TABLE = "model.ngram_embedding"
_NORMS = {"key_norm": "norm_key", "query_norm": "norm_query", "convolution_norm": "norm_conv"}


def tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.{name}.weight" for name in (*_NORMS.values(), "conv1d"))
    for name in ("key_proj", "value_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def table_tensors(checkpoint: CanonicalCheckpoint) -> list[str]:
    """What is not read as a whole."""
    return checkpoint.parts(TABLE)


def check(checkpoint: CanonicalCheckpoint, prefix: str, sizes: Ngrams) -> None:
    """Raises ModelUnsupported where the table is not as large as its configuration says."""
    rows, cols = checkpoint.shape(f"{TABLE}.weight")
    parts, read = len(sizes.sizes), checkpoint.shape(f"{prefix}.key_proj.weight")[1]
    if rows < sizes.rows or parts * cols != read:
        raise ModelUnsupported(
            f"a table of {rows} rows of {cols} where {parts} of up to {sizes.rows} are read as "
            f"{read} numbers"
        )


def build(packer: Packer, lasting: Packer, prefix: str, sizes: Ngrams) -> native.Ngrams:
    """The table stays where it is: `lasting` reads rows of it as steps ask for them."""
    found = native.Ngrams()
    found.rows = lasting.rows_of(TABLE)
    found.multipliers, found.end = list(sizes.multipliers), sizes.end
    found.sizes, found.starts = list(sizes.sizes), list(sizes.starts)
    found.key, found.value = (packer.matrix(f"{prefix}.{part}_proj") for part in ("key", "value"))
    for place, name in _NORMS.items():
        setattr(found, place, as_list(packer.floats(f"{prefix}.{name}.weight").reshape(-1)))
    found.convolution, found.dilation = convolution(packer, f"{prefix}.conv1d"), sizes.dilation
    return found
