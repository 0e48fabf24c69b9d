"""An engine without arithmetic: deterministic tokens, delays and failures on demand, for tests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import InvalidRequest
from exo.inference.batch import PAGE_TOKENS, CacheRoom, ForwardBatch, Slice
from exo.inference.dummy.script import Script
from exo.inference.engine import InferenceEngine, OnProgress, cache_miss
from exo.inference.sampling import SampledToken
from exo.models.description import ModelDescription
from exo.models.tokenizer import ByteTokenizer, Tokenizer
from exo.shard import Shard

N_LAYERS = 8
VOCABULARY = 258  # bytes, then beginning and end of text
HIDDEN = 4
CONTEXT_LENGTH = 4096
CACHE_PAGES = 4096
SLOW = 20
LAYER_BYTES = 1_000_000
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"


@dataclass
class Faults:
    """What goes wrong, and when. Written as `load=1,forward=3,sample=1,encode=2,delay=0.05`:
    the number says which call fails, once; `delay` is seconds per step, `load_delay` per load. A
    step takes twenty times as long while the file `slow_while` exists."""

    load: int = 0
    forward: int = 0
    sample: int = 0
    encode: int = 0
    delay: float = 0.0
    load_delay: float = 0.0
    slow_while: str = ""
    seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Raises InvalidRequest for a fault that does not exist."""
        faults = cls()
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if name in ("load", "forward", "sample", "encode"):
                setattr(faults, name, int(value))
            elif name in ("delay", "load_delay"):
                setattr(faults, name, float(value))
            elif name == "slow_while":
                faults.slow_while = value
            else:
                raise InvalidRequest(f"unknown dummy fault {name!r}")
        return faults

    @property
    def step_s(self) -> float:
        slow = self.slow_while and Path(self.slow_while).exists()
        return self.delay * SLOW if slow else self.delay

    def hit(self, name: str) -> bool:
        """Count a call of `name`; True on the one that is to fail."""
        self.seen[name] = self.seen.get(name, 0) + 1
        return self.seen[name] == int(getattr(self, name))


class DummyEngine(InferenceEngine):
    """Hidden states are [token, position, layers passed, sum of the cached tokens].

    The next token is a letter chosen by the sum of the whole sequence, so a token lost, doubled
    or taken from another sequence anywhere in the ring changes everything that follows.
    """

    name = "dummy"

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__()
        self._faults = faults or Faults.parse(os.environ.get("EXO_DUMMY_FAULTS", ""))
        self._caches: dict[tuple[Shard, str], list[int]] = {}
        self._script = Script.read(os.environ.get("EXO_DUMMY_SCRIPT", ""))
        self._final = np.zeros((0, HIDDEN), np.float32)

    def describe_model(self, model_id: str, path: Path) -> ModelDescription:
        return ModelDescription(
            model_id=model_id,
            model_type="dummy",
            checkpoint="dummy",
            layer_bytes=(LAYER_BYTES,) * N_LAYERS,
            first_bytes=LAYER_BYTES,
            last_bytes=LAYER_BYTES,
            context_length=int(os.environ.get("EXO_DUMMY_CONTEXT", CONTEXT_LENGTH)),
        )

    def tensors_of_shard(self, shard: Shard, path: Path) -> frozenset[str]:
        return frozenset()

    def load_shard(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        if self._faults.hit("load"):
            raise RuntimeError("dummy fault in load")
        for done in range(shard.layer_count + 1):
            on_progress(done * LAYER_BYTES, shard.layer_count * LAYER_BYTES)
            time.sleep(self._faults.load_delay / (shard.layer_count + 1))

    def hold_shard(self, shard: Shard, path: Path) -> None:
        """There is nothing to read."""

    def unload_shard(self, shard: Shard) -> None:
        self._caches = {key: kept for key, kept in self._caches.items() if key[0] != shard}

    def compute(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        if self._faults.hit("forward"):
            raise RuntimeError("dummy fault in forward")
        time.sleep(self._faults.step_s)
        states = np.zeros((len(batch.token_ids), HIDDEN), np.float32)
        states[:, 0] = batch.token_ids
        if hidden_states is not None:
            states = np.array(hidden_states)
        logits = []
        for part, rows in batch:
            cache = self._caches.setdefault((shard, part.sequence_id), [])
            if len(cache) < part.start:
                raise cache_miss(part, len(cache))
            cache[part.start :] = states[rows, 0].astype(int).tolist()
            states[rows, 1] = np.arange(part.start, part.end)
            states[rows, 2] += shard.layer_count
            for end in range(part.end - part.logits + 1, part.end + 1) if shard.is_last else ():
                assert states[rows.stop - 1, 2] == N_LAYERS, "a layer was skipped or run twice"
                row = np.zeros(VOCABULARY, np.float32)
                token = self._script.next_token(part.sequence_id, cache[:end])
                if token is None:
                    token = _LETTERS[sum(cache[:end]) * (end + 7) % len(_LETTERS)]
                row[token] = 10.0
                logits.append(row)
        if shard.is_last:
            self._final = states
            return np.stack(logits) if logits else np.zeros((0, VOCABULARY), np.float32)
        # float64 does not travel: the tensor codec refuses it.
        return states.astype(np.float64) if self._faults.hit("encode") else states

    def sample(
        self, shard: Shard, logits: npt.NDArray[np.float32], part: Slice, history: Sequence[int]
    ) -> SampledToken:
        if self._faults.hit("sample"):
            raise RuntimeError("dummy fault in sampling")
        return super().sample(shard, logits, part, history)

    def tokenizer_of(self, model_id: str) -> Tokenizer:
        return ByteTokenizer()

    def measure_read_rate(self) -> float:
        return 1e12  # nothing is read

    def final_states(self, shard: Shard) -> npt.NDArray[np.float32]:
        return self._final

    def take_over(self, shard: Shard, part: Slice) -> None:
        held = self._caches.get((shard, part.takes_over), [])
        if len(held) < part.start:
            raise cache_miss(part, len(held))
        self._caches[shard, part.sequence_id] = held[: part.start]

    def cache_room(self, shard: Shard) -> CacheRoom:
        held = [kept for key, kept in self._caches.items() if key[0] == shard]
        pages = int(os.environ.get("EXO_DUMMY_PAGES", CACHE_PAGES))
        return CacheRoom(pages, sum(-(-len(kept) // PAGE_TOKENS) for kept in held), is_paged=True)

    def release_sequences(self, sequence_ids: Sequence[str]) -> None:
        gone = set(sequence_ids)
        self._caches = {key: kept for key, kept in self._caches.items() if key[1] not in gone}
        self._script.forget(sequence_ids)

    @property
    def sequence_count(self) -> int:
        """Sequences that still have a KV cache here."""
        return len({sequence_id for _, sequence_id in self._caches} | set(self._histories))
