"""How scores become probabilities: what every strategy and backend is told besides the mask."""

from __future__ import annotations

from dataclasses import dataclass

from cpmoe.attention.dropout import Dropout


@dataclass(frozen=True)
class Scores:
    """s = (q · k) · scale, and with a softcap c > 0: c · tanh(s / c), so that |s| < c (Gemma 2, arXiv
    2408.00118). Softmax is over these, and `dropout` drops some of what it gives.

    Raises ValueError for a softcap below 0.
    """

    scale: float
    softcap: float = 0.0
    dropout: Dropout | None = None

    def __post_init__(self) -> None:
        if self.softcap < 0:
            raise ValueError(f"softcap = {self.softcap}: must be above 0, or 0 for none")
