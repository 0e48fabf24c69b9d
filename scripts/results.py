"""What benchmarks found, and the table of it: medians over rounds, and the rounds' ratios."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Results:
    """Tokens a second of each test and side over the rounds."""

    found: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, test: str, side: str, tok_s: float) -> None:
        self.found[test, side].append(tok_s)
        print(f"  {test:44} {side:10} {tok_s:9.1f}", flush=True)

    def median(self, test: str, side: str) -> float | None:
        values = self.found.get((test, side))
        return statistics.median(values) if values else None

    def ratio(self, test: str, side: str, other: str) -> float:
        """The median of the rounds' ratios: what slows a round slows both sides of it."""
        pairs = zip(self.found[test, side], self.found[test, other], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def add_exo(self, label: str, side: str, rows: Iterable[dict[str, Any]]) -> None:
        """The results of `exo bench --json`."""
        for row in rows:
            if row["test"] == "prefill":
                test = f"prefill {row['n_tokens']}"
            elif row["batch"] == 1:
                test = f"decode @{row['context']}"
            else:
                test = f"batch of {row['batch']}"
            self.add(f"{label} {test}", side, float(row["tok_s"]))

    def add_llama(self, label: str, rows: Iterable[dict[str, Any]]) -> None:
        """What llama-bench says with `-o json`."""
        for row in rows:
            of_prompt = f"prefill {row['n_prompt']}" if row["n_prompt"] else ""
            test = of_prompt or f"decode @{row['n_depth']}"
            self.add(f"{label} {test}", "llama.cpp", float(row["avg_ts"]))

    def table(self, machine: str, rounds: int, others: Sequence[str]) -> str:
        """`others`: whom exo is compared with."""
        known = {side for _, side in self.found}
        others = [side for side in others if side in known]
        sides = [*(side for side in others if side != "one node"), "exo"]
        header = ["test", *sides, *(f"exo / {side}" for side in others)]
        lines = [
            f"\n{machine}, medians of {rounds} rounds, also of their ratios\n",
            f"| {' | '.join(header)} |",
            f"|{'---|' * len(header)}",
        ]
        for test in dict.fromkeys(test for test, _ in self.found):
            speeds = [self.median(test, side) for side in sides]
            ratios = [
                f"{self.ratio(test, 'exo', side):.2f}" if (test, side) in self.found else ""
                for side in others
            ]
            cells = ["" if speed is None else f"{speed:.1f}" for speed in speeds] + ratios
            lines.append(f"| {test} | {' | '.join(cells)} |")
        return "\n".join(lines)
