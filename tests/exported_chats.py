"""Conversations as tinychat exports them: what has to be drawn, and what must not run."""

from __future__ import annotations

import json

NASTY = """
# A *title*

| a | b |
|---|--:|
| 1 | `x < y` |

3. one
4. two

```python
def f(x): return "<b>" # no
```

<img src=x onerror="window.hurt=1"> <script>window.hurt=2</script>
[good](https://example.org) [bad](javascript:window.hurt=3) ![pixel](https://evil.example/x.png)
<svg onload=window.hurt=4> <a href="data:text/html,<script>window.hurt=5</script>">d</a>
<style>body{display:none}</style> <iframe srcdoc="<script>parent.hurt=6</script>"></iframe>
[x](data:text/html;base64,PHNjcmlwdD4=) <form action=//evil.example><input name=q></form>
"""

FORMULAS = r"""
The area is $\pi r^2$, or \(\frac{a}{b}\) of it; it costs $5 and $6.

$$
\int_0^1 x^2\,dx

= \frac{1}{3}
$$

\[ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \]

So $\boxed{42}$, `$code$`, $\nosuch{x}$ and \\$.

```
$x$
```
"""


def exported(*answers: str) -> bytes:
    """A file as the page exports it."""
    conversations = []
    for number, text in enumerate(answers):
        messages = {
            "m0": {"id": "m0", "parent": None, "role": "user", "content": "?"},
            "m1": {"id": "m1", "parent": "m0", "role": "assistant", "content": text},
        }
        conversations.append(
            {"id": f"c{number}", "title": f"t{number}", "updated": number, "head": "m1"}
            | {"settings": {}, "messages": messages}
        )
    whole = {"format": "tinychat-conversations-1", "conversations": conversations}
    return json.dumps(whole).encode()
