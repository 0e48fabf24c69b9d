"""Continuous batching: who runs, and what of whom goes into the next step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import msgspec

from exo.errors import ExoError, PromptTooLong
from exo.inference.batch import PAGE_TOKENS, Slice
from exo.networking.calls.messages import GenerationEvent
from exo.orchestration.serving.kv_memory import KVMemory
from exo.orchestration.serving.pace import Pace
from exo.orchestration.serving.sequence import Sequence, by_rank
from exo.orchestration.serving.waiting import WaitingLine
from exo.shard import RingPlan

logger = logging.getLogger(__name__)


MOMENT_BEFORE_END = 16
"""Tokens at a prompt's end that its next turn may not have: what begins an answer differs from what
one looks like in the conversation, in templates of models that think."""


class Part(msgspec.Struct, frozen=True):
    """A sequence's tokens in a step."""

    sequence: Sequence
    slice: Slice
    token_ids: list[int]


class Batcher:
    """Sequences run while the ring's KV cache has room for them. When it has none left the youngest
    gives its pages back and begins again later: what it has said stays said.

    With `speculates`, what can be guessed is computed ahead. `on_end` is called for a sequence that
    can go no further.
    """

    def __init__(
        self,
        plan: RingPlan,
        line: WaitingLine,
        memory: KVMemory,
        pace: Pace,
        on_end: Callable[[Sequence, GenerationEvent | ExoError], None],
        *,
        speculates: bool,
    ) -> None:
        self.running: dict[str, Sequence] = {}
        self.preempted = 0
        """Times that a sequence gave its pages to older ones."""
        self.reused = 0
        """Tokens that were computed before for others."""
        self._plan = plan
        self._depth = len(plan.members)
        self._line = line
        self._memory = memory
        self._pace = pace
        self._on_end = on_end
        self._speculates = speculates

    def admit(self) -> None:
        """Let run who finds room, as many as make the batch better."""
        while len(self.running) < self._pace.best_batch():
            sequence = self._line.next(self.running.values())
            if sequence is None:
                return
            if self.running and not self._memory.fits(
                sequence.id, sequence.tokens, [*self.running]
            ):
                return
            self._line.remove(sequence)
            self.running[sequence.id] = sequence

    def check_length(self, tokens: int) -> None:
        """Raises PromptTooLong if so many, and one more, never find room."""
        if not self._memory.can_ever_hold(tokens + 1):
            raise self._too_long(tokens)

    def _too_long(self, tokens: int) -> PromptTooLong:
        pages = self._memory.ledger.told or 0
        return PromptTooLong(
            f"the prompt has {tokens} tokens, and the KV cache of {self._plan.model_id} has room "
            f"for {pages * PAGE_TOKENS} on the member of the ring that has least; shorten it, or "
            "give that node more memory"
        )

    def next_parts(self, *, nothing_else_runs: bool) -> tuple[list[Part], list[Part]]:
        """What goes into the next step: of sequences that decode, and of prompts. Both are empty
        if there is nothing to do before something comes back."""
        while True:
            decoding = self._decoding_parts()
            prompts = self._prompt_parts(len(decoding))
            if decoding or prompts or not nothing_else_runs or not self._make_way():
                return decoding, prompts

    def sent(self, parts: list[Part]) -> None:
        """The step is on its way: what is sent from now on finds computed what is in it."""
        self._memory.step_is_sent()
        for sequence, part in ((each.sequence, each.slice) for each in parts):
            if sequence.may_reuse:
                count, keeps = sequence.scheduled, part.keeps
                self._memory.computed(sequence.id, sequence.tokens, count, keeps=keeps)
            if part.takes_over:
                self.reused += part.start
                if part.moves:
                    self._memory.supersede(part.takes_over)

    def _made(self, sequence: Sequence, part: Slice, drafts: Iterable[int] = ()) -> Part:
        """Count it as sent."""
        certain = part.end - part.drafts
        made = Part(sequence, part, [*sequence.tokens[part.start : certain], *drafts])
        sequence.scheduled = certain
        sequence.in_flight += 1
        return made

    def _decoding_parts(self) -> list[Part]:
        """Of all that decode a share for each member of the ring, so that every one has some to
        work on; the oldest first, which the younger ones make room for."""
        ready = [sequence for sequence in self.running.values() if sequence.can_decode]
        decoding = sum(sequence.is_decoding for sequence in self.running.values())
        parts = []
        for sequence in sorted(ready, key=by_rank)[: math.ceil(decoding / self._depth)]:
            if sequence.id not in self.running:
                continue  # it has made way
            drafts = self._drafts(sequence, decoding)
            part = sequence.next_slice(sequence.left, drafts=len(drafts))
            while not self._memory.reserve(sequence.id, part.start, part.length):
                if drafts:
                    drafts, part = [], sequence.next_slice(sequence.left)
                    continue
                if not self._make_way() or sequence.id not in self.running:
                    break
            else:
                parts.append(self._made(sequence, part, drafts))
        return parts

    def may_draft(self, sequence: Sequence) -> bool:
        """Only where a token that is computed among others is what it would be alone, and never
        where a grammar decides."""
        memory = self._memory
        can_take_back = memory.ledger.is_paged and not memory.keeps_moments
        return self._speculates and can_take_back and sequence.may_draft

    def looked_up(self, sequence: Sequence, decoding: int) -> list[int]:
        """Guesses from what came before that are worth a row each."""
        worth = self._pace.draft_worth(math.ceil(decoding / self._depth))
        return sequence.lookup.draft(worth, sequence.max_tokens_left - 1)

    def _drafts(self, sequence: Sequence, decoding: int) -> list[int]:
        if not self.may_draft(sequence):
            return []
        if guess := sequence.guess[: max(0, sequence.max_tokens_left - 1)]:
            return guess
        return self.looked_up(sequence, decoding)

    def _prompt_parts(self, decoding: int) -> list[Part]:
        """A chunk of prompts: half of it for the oldest, so that it is never kept waiting by those
        that come after, the rest for whoever has least left."""
        prompts = sorted((s for s in self.running.values() if s.can_prefill), key=by_rank)
        ready = [sequence for sequence in prompts if not self._waits_for_another(sequence, prompts)]
        if not self._memory.ledger.is_paged:
            shares = _cut_shares(ready, self._pace.cut(decoding))
        else:
            left = sum(sequence.left for sequence in ready)
            before = ready[0].scheduled if ready else 0
            shares = _shares(ready, self._pace.chunk(decoding, left, before))
        parts = (self._prompt_part(sequence, tokens, prompts) for sequence, tokens in shares)
        return [part for part in parts if part is not None]

    def _prompt_part(self, sequence: Sequence, tokens: int, prompts: list[Sequence]) -> Part | None:
        memory = self._memory
        if sequence.moments is None and memory.keeps_moments:
            sequence.moments = self._moments(sequence, prompts)
        if not sequence.has_begun and sequence.may_reuse:
            source, start = memory.source_of(sequence.id, sequence.tokens)
            length, keeps = _to_moment(sequence, start, tokens)
            moves = memory.is_superseded(source, start)
            # Where there is no room beside it, the source gives its own.
            if source and self._reserve(sequence, start, length, source, keeps=keeps):
                sequence.scheduled = start
                sequence.cached = sequence.cached or min(start, len(sequence.request.prompt))
                return self._made(sequence, sequence.next_slice(length, source, moves=moves))
        length, keeps = _to_moment(sequence, sequence.scheduled, tokens)
        if not self._reserve(sequence, sequence.scheduled, length, keeps=keeps):
            return None
        return self._made(sequence, sequence.next_slice(length))

    def _reserve(
        self, sequence: Sequence, start: int, length: int, source: str = "", *, keeps: bool
    ) -> bool:
        """What others might come back to is given up before what is needed now."""
        if self._memory.reserve(sequence.id, start, length, source, keeps=keeps):
            return True
        if not keeps:
            return False
        sequence.moments = ()
        return self._memory.reserve(sequence.id, start, length, source)

    def _moments(self, sequence: Sequence, prompts: list[Sequence]) -> tuple[int, ...]:
        """Where a cache cannot be cut back: after how much of a prompt its state is kept. Near the
        end, where the chat's next turn, or another answer, leaves what was computed; and where it
        leaves what others began with, as those will who have the same instructions."""
        if not sequence.may_reuse:
            return ()
        # Never beside the borders that prompts are cut at, where what is computed depends on them.
        unit = PAGE_TOKENS
        if not self._memory.ledger.is_paged:
            unit = max(unit, self._pace.usual_chunk)
        shared = self._memory.shared_pages(sequence.id, sequence.tokens) * PAGE_TOKENS
        waiting = (sequence.shares_with(other) for other in prompts if other is not sequence)
        shared = max([shared, *waiting]) // unit
        end = max(0, len(sequence.tokens) - MOMENT_BEFORE_END) // unit
        return tuple(units * unit for units in sorted({shared, end}) if 0 < units <= end)

    def _waits_for_another(self, sequence: Sequence, prompts: list[Sequence]) -> bool:
        """Whether an older one is about to compute what this one begins with."""
        if sequence.has_begun or not sequence.may_reuse:
            return False
        for other in prompts:
            if other is sequence:
                return False
            if other.may_reuse and sequence.shares_with(other) >= max(
                PAGE_TOKENS, self._memory.holds(other.id) + 1
            ):
                return True
        return False

    def _make_way(self) -> bool:
        """What comes next finds no room: the youngest begins again later, or, where it is alone,
        has come to its end. Whether there is more to try."""
        if not self.running:
            return False
        youngest = self._youngest()
        if len(self.running) > 1:
            self.preempt(youngest)
            return True
        if youngest.done:
            return False
        if self._memory.ledger.trust_again():
            return True
        if self._memory.ledger.moments_of(youngest.id):  # their room is its own
            self._memory.drop(youngest.id)
            youngest.begin_again()
            youngest.moments = ()
            return True
        self._end_full(youngest)
        return False

    def _end_full(self, sequence: Sequence) -> None:
        """Not even alone does it find room to go on."""
        if sequence.is_decoding or len(sequence.tokens) > len(sequence.request.prompt):
            sequence.done = True
            self._on_end(sequence, GenerationEvent(finish_reason="length"))
        else:
            sequence.fail()
            self._on_end(sequence, self._too_long(len(sequence.tokens)))

    def _youngest(self) -> Sequence:
        """Whoever is to make way first: one that has ended, and whose client has not heard it yet,
        does not mind."""
        return max(self.running.values(), key=lambda sequence: (sequence.done, sequence.rank))

    def preempt(self, sequence: Sequence) -> None:
        """Take its pages; it begins again when there is room."""
        del self.running[sequence.id]
        self._memory.drop(sequence.id)
        if not sequence.done:
            logger.info("%s: sequence %s makes way", self._plan.model_id, sequence.id)
            self.preempted += 1
            sequence.begin_again()
            self._line.put_back(sequence)


def _to_moment(sequence: Sequence, start: int, tokens: int) -> tuple[int, bool]:
    """How many tokens from `start` on go into a step, at most `tokens`, none beyond a moment that
    is to be kept; and whether it comes to one."""
    moments = sequence.moments or ()
    end = min([start + tokens, len(sequence.tokens), *(m for m in moments if m > start)])
    return end - start, end in moments


def _shares(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """How many tokens of which prompt go into a step; `prompts` by age."""
    if not prompts:
        return []
    oldest, others = prompts[0], sorted(prompts[1:], key=lambda sequence: sequence.left)
    kept_for_oldest = min(oldest.left, (budget + 1) // 2)
    free = budget - kept_for_oldest
    shares = []
    for sequence in others:
        if free > 0:
            shares.append((sequence, min(sequence.left, free)))
            free -= shares[-1][1]
    return [(oldest, kept_for_oldest + free), *shares]


def _cut_shares(prompts: list[Sequence], chunk: int) -> list[tuple[Sequence, int]]:
    """The same where what is computed depends on the cut: at multiples of `chunk`."""
    shares: list[tuple[Sequence, int]] = []
    free = chunk
    for sequence in prompts:
        tokens = min(chunk - sequence.scheduled % chunk, sequence.left)
        if tokens <= free:
            shares.append((sequence, tokens))
            free -= tokens
    return shares
