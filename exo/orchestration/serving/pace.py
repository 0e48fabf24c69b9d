"""How long steps take, measured as they pass, and what follows for how many tokens go into one."""

from __future__ import annotations

import math

from exo.orchestration.serving.step_costs import SURPRISE, Line, PromptCosts

PREFILL_CHUNK = 256
"""Tokens of prompts in one step, until it is known how long they take."""

RING_PREFILL_CHUNK = 32
"""The same where the plan has several members, who work on different chunks at once: a prompt of n
chunks keeps m members busy n / (n + m - 1) of the time."""

ALONE_CHUNK = 32
"""So many tokens at least while nobody decodes: with fewer what a step takes in any case, as over a
slow link, is more of each token's time, which would ask for fewer still."""

MIN_CHUNK = 8
"""The same beside who decodes; fewer waste what is read of weights. With 16 the pauses of a small
model's stream were a third longer."""

MAX_CHUNK = 512
"""More is no faster on a CPU, and takes memory."""

LONGEST_CUT = 2048
"""What fills a GPU."""

CHUNK_S = 0.25
"""A chunk takes at most so long, as who comes next waits for it."""

LONG_PROMPT = 2048
"""Tokens of a prompt that is worth being fast at, where it goes through a ring."""

CUT_BESIDE = 4
"""Where what is computed depends on the cut, a chunk is so many times shorter beside others."""

CHUNK_STEPS = 2.0
"""While others decode a chunk takes at most as long as so many of their steps: with the one that it
is part of their pause is three."""

WORTH_ALONE = 0.75
"""So much of what a chunk takes should be its tokens', not what reading weights for it takes, or
links that it passes over: a mixture's experts are read for 32 tokens nearly as for 500."""

WORTH_BESIDE = 1 / 3
"""The same while others decode, who wait for it."""

ASKED_S = 2.0
"""So long may a chunk take that is only to tell what longer ones take."""

FIRST_BATCH = 16
"""Sequences at once, until it is known what more of them cost."""

SMALLEST_BATCH = 8

ENOUGH = 0.9
"""Of the throughput of an endless batch: more sequences at once would gain nobody anything, and
all of them would wait longer."""

FIRST_WORTH = 0.3
"""How likely a guess has to be right, until it is known what a row costs."""

CAUTION = 1.35
"""So many times as likely as would just pay: a row among many costs more than one among few, and
what is believed of guesses is too good where they are many."""

LEAST_WORTH = 0.1
"""Where a row costs nearly nothing."""


class Pace:
    """A step in which n sequences decode takes `a + c n` seconds. What is left of a step that holds
    tokens of prompts as well is theirs."""

    def __init__(
        self, members: int, *, routed_share: float = 1.0, reads_experts: bool = False
    ) -> None:
        """`routed_share`: of a mixture's experts, those that a token is routed to. `reads_experts`:
        members read experts from disk. A chunk asks for nearly all of them, however short it is, so
        it is as long as can be."""
        self._members = members
        self._routed_share = routed_share
        self._reads_experts = reads_experts
        self._decoding = Line()
        self._prompts = PromptCosts()
        self._prompt_token_s: float | None = None
        self._longest = 0
        """Tokens of the longest chunk of late: half as many with every one after it."""
        self._cut = self.usual_chunk

    @property
    def usual_chunk(self) -> int:
        return PREFILL_CHUNK if self._members == 1 else RING_PREFILL_CHUNK

    @property
    def _is_mixture(self) -> bool:
        return self._routed_share < 1

    def took(self, seconds: float, decoded: int, prefilled: int, attended: float = 0.0) -> None:
        """A step took so long, from leaving the head to its return; `attended`: to how many earlier
        tokens those of prompts attend in all."""
        if not prefilled:
            self._decoding.add(decoded, seconds)
            return
        beside = self._decoding.at(decoded) if decoded else 0.0
        if prefilled < MIN_CHUNK or beside is None:
            return
        each = max(seconds - beside, 0.1 * seconds) / prefilled
        known = self._prompt_token_s
        if known is None:
            self._prompt_token_s = each
        else:
            self._prompt_token_s = known + 0.3 * (min(each, SURPRISE * known) - known)
        if self._members == 1 or not decoded:
            # In a ring a step waits for others, which are as long as it where nobody decodes.
            self._prompts.add(prefilled, attended, self._asked(prefilled), each * prefilled)
        self._longest = max(prefilled, self._longest // 2)
        self._mend_cut()

    def _asked(self, tokens: int) -> float:
        """How much of the weights so many tokens ask for."""
        return 1 - (1 - self._routed_share) ** tokens

    def _mend_cut(self) -> None:
        """Twice as long while that takes no longer than a chunk may, half where it takes twice as
        long: a power of two that hardly ever changes, and what is computed with it."""
        assert self._prompt_token_s is not None
        longest = min(CHUNK_S / max(self._prompt_token_s, 1e-9), LONGEST_CUT)
        if self._is_mixture:
            longest = max(longest, self._enough(WORTH_ALONE, 0, LONGEST_CUT))
        if self._members > 1:
            longest = min(longest, self._best_in_a_ring(LONG_PROMPT, 0, LONGEST_CUT))
        if longest >= 2 * self._cut:
            self._cut *= 2
        elif longest < self._cut / 2 and self._cut > self.usual_chunk:
            self._cut //= 2

    def _best_in_a_ring(self, left: int, before: int, most: int) -> int:
        """Tokens of a chunk with which so many are through soonest; 0 where that is not known. Of t
        tokens and n in a chunk, t / n + m - 1 chunks pass m members one after the other."""
        if not self._prompts.tells:
            return 0

        def seconds(n: int) -> float:
            return (left / n + self._members - 1) * sum(self._costs(n, before + left / 2))

        return min(range(RING_PREFILL_CHUNK, most + 1, RING_PREFILL_CHUNK), key=seconds)

    def _costs(self, n: int, before: float) -> tuple[float, float]:
        """Seconds of n tokens of a prompt, and of the weights that they ask for."""
        return self._prompts.seconds(n, n * (before + n / 2), self._asked(n))

    def cut(self, decoding: int) -> int:
        """Tokens at whose multiples prompts are cut where what is computed depends on the cut, as
        on a GPU, beside so many that decode."""
        return max(self._cut // (CUT_BESIDE if decoding else 1), self.usual_chunk)

    def decode_cost(self) -> tuple[float, float]:
        """Seconds of a step in which sequences decode, and of each of its rows besides; 0 where it
        is not known."""
        return self._decoding.coefficients() if self._decoding.at(1) is not None else (0.0, 0.0)

    def draft_worth(self, rows: int) -> float:
        """How likely a guess has to be right for its row to gain more than it costs in a step of so
        many: as likely as the share of such a step that grows with its rows."""
        if not self._decoding.has_slope:
            return FIRST_WORTH
        a, c = self._decoding.coefficients()
        return max(CAUTION * c * rows / max(a + c * rows, 1e-9), LEAST_WORTH)

    def best_batch(self) -> int:
        """Sequences at once that reach nearly all of what an endless batch would."""
        if not self._decoding.has_slope:
            return FIRST_BATCH
        a, c = self._decoding.coefficients()
        # n / (a + c n) comes near 1 / c
        enough = ENOUGH / (1 - ENOUGH) * a / max(c, 1e-9) * self._members
        return max(SMALLEST_BATCH, math.ceil(enough))

    def chunk(self, decoding: int, left: int, before: int) -> int:
        """Tokens of prompts that the next step may hold beside so many that decode; `left`: of how
        many in all, `before`: how many of the oldest prompt are computed."""
        if self._reads_experts:
            return MAX_CHUNK
        if self._prompt_token_s is None:
            return self.usual_chunk
        seconds = CHUNK_S
        if decoding and (step := self._decoding.at(decoding)) is not None:
            seconds = min(CHUNK_STEPS * step, CHUNK_S)
        tokens = int(seconds / self._prompt_token_s) // MIN_CHUNK * MIN_CHUNK
        largest = MAX_CHUNK if self._members == 1 else self.usual_chunk
        least = MIN_CHUNK if decoding else ALONE_CHUNK
        # Never more than twice what was measured: times are noisy.
        worth = min(self._worth_a_step(decoding, left, before), 2 * self._longest)
        return max(min(tokens, largest), least, worth // MIN_CHUNK * MIN_CHUNK)

    def _worth_a_step(self, decoding: int, left: int, before: int) -> int:
        """Tokens with less of which too much of a chunk's time would not be theirs."""
        if not self._prompts.tells:  # all were of one length
            longer = 2 * self._longest
            takes = longer * (self._prompt_token_s or 0.0)
            limit = ASKED_S if self._is_mixture else 2 * CHUNK_S
            return longer if not decoding and longer <= PREFILL_CHUNK and takes <= limit else 0
        if decoding:
            return self._enough(WORTH_BESIDE, before, MAX_CHUNK)
        enough = self._enough(WORTH_ALONE, before, MAX_CHUNK)
        if self._members == 1:
            return enough
        return min(enough, self._best_in_a_ring(left, before, MAX_CHUNK))

    def _enough(self, share: float, before: int, most: int) -> int:
        """The fewest tokens of which so much of a chunk's time is theirs; 0 where that is not
        known."""
        if not self._prompts.tells:
            return 0

        def is_enough(n: int) -> bool:
            own, weights = self._costs(n, before)
            is_long = own >= CHUNK_S + weights and not self._is_mixture
            return is_long or (1 - share) * own >= share * weights

        return next(filter(is_enough, range(MIN_CHUNK, most, MIN_CHUNK)), most)
