"""Quantized linear layers on an NVIDIA card: whichever kernel is fastest for so many rows.

Rows of all sequences are one matrix, where mlx-lm's batches would have each read the weights. Up to
32 are multiplied with a matrix as it is (`packed_products`), several matrices that are given the
same rows at once; more rows with a copy of it that is unpacked for them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from exo.inference.mlx import packed_products

logger = logging.getLogger(__name__)

ONE_BY_ONE = 7
"""Up to so many rows MLX multiplies one after the other (`QuantizedMatmul::eval_gpu` there); for
more it compiles a kernel, where a matrix can be unpacked as fast."""

IN_FLIGHT_BYTES = 512 * 2**20
"""Of unpacked matrices at once. MLX would begin a whole prompt's products one after the other, and
free nothing before its card has come to it."""


class _Alone:
    """A layer whose rows are multiplied by themselves."""

    def __init__(self, module: Any) -> None:
        self._matrices = packed_products.Matrices([module])

    def product(self, module: Any, x: mx.array, rows: int) -> mx.array:
        return self._matrices.multiply(x, rows)[0]


class _Seen(_Alone):
    """The same, and that it was given these rows is remembered."""

    def __init__(self, module: Any, calls: list[tuple[Any, mx.array]]) -> None:
        super().__init__(module)
        self._calls = calls

    def product(self, module: Any, x: mx.array, rows: int) -> mx.array:
        self._calls.append((module, x))
        return super().product(module, x, rows)


class _Together:
    """Layers that are given the same rows one after the other: the first has all products computed
    at once."""

    def __init__(self, modules: list[Any]) -> None:
        self._ids = [id(module) for module in modules]
        self._matrices = packed_products.Matrices(modules)
        self._x: mx.array | None = None
        self._products: dict[int, mx.array] = {}

    def product(self, module: Any, x: mx.array, rows: int) -> mx.array:
        if x is not self._x or id(module) not in self._products:
            products = self._matrices.multiply(x, rows)
            self._products = dict(zip(self._ids, products, strict=True))
            self._x = x
        product = self._products.pop(id(module))
        if not self._products:
            self._x = None
        return product


class _InFlight:
    """A model's unpacked matrices, of which a few only may be there at once."""

    def __init__(self) -> None:
        self._begun_bytes = 0
        self._before: mx.array | None = None

    def make_room(self, x: mx.array, needed_bytes: int) -> None:
        """For a matrix to multiply rows x with, which earlier products went into, as those of all
        layers do: some of these are computed now."""
        self._begun_bytes += needed_bytes
        if 2 * self._begun_bytes > IN_FLIGHT_BYTES:
            mx.async_eval(x)  # type: ignore[no-untyped-call]
            if self._before is not None:
                mx.eval(self._before)
            self._before, self._begun_bytes = x, needed_bytes


def multiply_fast(modules: Iterable[nn.Module], run: Callable[[], object]) -> None:
    """Have quantized linear layers, and embeddings as head, take the rows of all sequences as one
    matrix, by the kernel that is fastest for so many. `run` computes a token: those that are given
    the same rows, as the projections of queries, keys and values are, are multiplied at once."""
    fitting: list[Any] = []
    have_kernels: dict[object, bool] = {}
    in_flight = _InFlight()
    for module in modules:
        base: Any = type(module)
        if base not in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            continue
        fits = packed_products.fits(module)
        if fits:
            kind = packed_products.kind_of(module)
            if kind not in have_kernels:
                have_kernels[kind] = _work(module)
            fits = have_kernels[kind]
        module.__class__ = _flat_class(base, module.scales.dtype if fits else None)
        object.__setattr__(module, "_exo_in_flight", in_flight)
        if fits:
            fitting.append(module)
    calls: list[tuple[Any, mx.array]] = []
    for module in fitting:
        object.__setattr__(module, "_exo_company", _Seen(module, calls))
    run()
    for module in fitting:
        object.__setattr__(module, "_exo_company", _Alone(module))
    for together in _given_the_same(calls):
        company = _Together(together)
        for module in together:
            object.__setattr__(module, "_exo_company", company)


def _work(module: nn.Module) -> bool:
    why = packed_products.why_not(module)
    if why:
        logger.warning(
            "exo's kernels for %d bits do not run on this card, MLX's do: %s", module.bits, why
        )
    return not why


def _given_the_same(calls: list[tuple[Any, mx.array]]) -> Iterator[list[Any]]:
    of_rows: dict[int, list[Any]] = {}
    for module, x in calls:
        of_rows.setdefault(id(x), []).append(module)
    times = Counter(id(module) for module, _ in calls)
    for modules in of_rows.values():
        once = [module for module in modules if times[id(module)] == 1]
        while once:
            alike = [m for m in once if packed_products.are_alike(m, once[0])]
            alike = alike[: packed_products.MOST_MATRICES]
            once = [m for m in once if not any(m is taken for taken in alike)]
            if len(alike) > 1:
                yield alike


@cache
def _flat_class(base: Any, dtype: mx.Dtype | None) -> Any:
    """`dtype`: of the rows for which there are kernels of ours."""
    method = "__call__" if base is nn.QuantizedLinear else "as_linear"
    multiply = getattr(base, method)

    def flat(self: Any, x: mx.array) -> mx.array:
        cols = x.shape[-1]
        rows = x.size // cols
        here = dtype is not None and x.dtype == dtype
        if here and rows <= packed_products.MOST_ROWS:
            product = self._exo_company.product(self, x, rows)
            return product + self["bias"] if "bias" in self else product
        *outer, _ = x.shape
        matrix = x.reshape(rows, cols)
        if rows <= ONE_BY_ONE:
            return multiply(self, matrix).reshape(*outer, -1)
        self._exo_in_flight.make_room(matrix, self.scales.shape[0] * matrix.nbytes // rows)
        dense = packed_products.unpack(self) if here else _dense(self, x.dtype)
        product = matrix @ dense.T
        if "bias" in self:
            product = product + self["bias"]
        return product.reshape(*outer, -1)

    return type(base.__name__, (base,), {method: flat})


def _dense(module: Any, dtype: mx.Dtype) -> mx.array:
    return mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        module.group_size,
        module.bits,
        module.mode,
        dtype=dtype,
    )
