"""The steps of one live shard: graphs are built first, of all sequences, and evaluated at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.mlx import ahead
from exo.inference.mlx import caches as kv
from exo.inference.mlx.sequences import ShardSequences
from exo.shard import Shard

if TYPE_CHECKING:
    from exo.inference.mlx.cut_model import CutModel


class ShardSteps:
    """Runs on the engine's thread. `looks_ahead`: where the shard is a whole model, the step after
    each is begun before it is asked for."""

    def __init__(
        self, shard: Shard, model: CutModel, sequences: ShardSequences, *, looks_ahead: bool
    ) -> None:
        self.sequences = sequences
        self._shard = shard
        self._model = model
        self._looks_ahead = looks_ahead and shard.is_first and shard.is_last
        self._final: list[tuple[slice, mx.array]] = []
        """Of the step computed last: rows of the slices that pool, and their final states."""

    def compute(
        self, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        self._final = []
        by_row: dict[int, mx.array] = {}
        parts: list[tuple[Slice, slice]] = []
        for part, rows in batch:
            arrived = self.sequences.arrived(part, int(batch.token_ids[rows.start]))
            if arrived is None:
                parts.append((part, rows))
            else:
                by_row[rows.start] = arrived
        received = None if hidden_states is None else _to_mlx(hidden_states)
        states = self._run(parts, mx.array(batch.token_ids), received, by_row)
        outputs = [by_row[row] for row in sorted(by_row)]
        finals = [final for _, final in self._final]
        if self._looks_ahead:
            mx.async_eval(outputs, states, finals)  # type: ignore[no-untyped-call]
            states = []  # whoever held them would have the next step copy whole caches
            self._go_ahead(batch, by_row)
        mx.eval(outputs, states, finals)
        for part in batch.slices:
            self.sequences.remember(part)
        if self._shard.is_last:
            if not outputs:
                return np.zeros((0, 0), np.float32)
            return np.concatenate([np.array(rows.astype(mx.float32)) for rows in outputs])
        return _to_numpy(outputs[0] if len(outputs) == 1 else mx.concatenate(outputs))

    def _run(
        self,
        parts: list[tuple[Slice, slice]],
        token_ids: mx.array,
        received: mx.array | None,
        by_row: dict[int, mx.array],
    ) -> list[mx.array]:
        """Begin these slices, whose rows in `token_ids` and in what was received are given; those
        that decode in company together. What comes out of each goes to `by_row`, by its first row.
        Returns what to evaluate with it."""
        start, end = self._shard.start_layer, self._shard.end_layer
        states: list[mx.array] = []
        of_id = {part.sequence_id: (part, rows.start) for part, rows in parts}
        for company in self.sequences.companies(part for part, _ in parts):
            chosen = [of_id[sequence_id][1] for sequence_id in company.ids]
            these = mx.array(chosen)
            rows_in = None if received is None else received[these]
            output = self._model.forward_together(
                start, end, token_ids[these], rows_in, company.caches
            )
            states += kv.arrays(company.caches)
            for index, sequence_id in enumerate(company.ids):
                by_row[chosen[index]] = output[index : index + 1]
                self.sequences.advance(sequence_id, of_id[sequence_id][0].end)
        for part, rows in parts:
            if rows.start in by_row:
                continue
            caches = self.sequences.at_start(part)
            alone = self._model.forward(
                start,
                end,
                token_ids[rows],
                None if received is None else received[rows],
                caches,
                logits=part.logits,
                want_states=part.pools,
            )
            self.sequences.advance(part.sequence_id, part.end)
            states += kv.arrays(caches)
            if part.pools and self._shard.is_last:
                assert alone is not None
                self._final.append((rows, alone))
            elif alone is not None:
                by_row[rows.start] = alone
        return states

    def _go_ahead(self, batch: ForwardBatch, by_row: dict[int, mx.array]) -> None:
        """Begin the step after this one, where all that decode in it can be foreseen."""
        asked = [
            (part, part.sampling, rows.start) for part, rows in batch if part.sampling is not None
        ]
        if not asked or any(part.keeps or not ahead.is_foreseen(part) for part, *_ in asked):
            return
        after = [Slice(part.sequence_id, part.end, 1, how) for part, how, _ in asked]
        before = self.sequences.moments_before(after)
        if before is None:
            return
        tokens = mx.stack(
            [ahead.next_token(by_row[row][-1], how, part.end) for part, how, row in asked]
        )
        found: dict[int, mx.array] = {}
        numbered = [(part, slice(i, i + 1)) for i, part in enumerate(after)]
        states = self._run(numbered, tokens, None, found)
        mx.async_eval(tokens, found, states)  # type: ignore[no-untyped-call]
        for index, part in enumerate(after):
            moment = before.get(part.sequence_id)
            self.sequences.went_ahead(part.sequence_id, tokens[index], found[index], moment)

    def final_states(self) -> npt.NDArray[np.float32]:
        """See `InferenceEngine.final_states`."""
        parts = [(rows, np.array(final.astype(mx.float32))) for rows, final in self._final]
        found = np.zeros((max(rows.stop for rows, _ in parts), parts[0][1].shape[1]), np.float32)
        for rows, final in parts:
            found[rows] = final
        return found


def _to_mlx(rows: npt.NDArray[Any]) -> mx.array:
    if rows.dtype == ml_dtypes.bfloat16:
        return mx.array(rows.view(np.uint16)).view(mx.bfloat16)
    return mx.array(rows)


def _to_numpy(rows: mx.array) -> npt.NDArray[Any]:
    if rows.dtype == mx.bfloat16:
        return np.array(rows.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(rows)
