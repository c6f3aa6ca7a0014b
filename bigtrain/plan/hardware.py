"""What a plan is held against."""

from __future__ import annotations

from dataclasses import dataclass, field

from bigtrain.plan.predict import Plan
from bigtrain.plan.roofline import Rates


@dataclass(frozen=True)
class Hardware:
    """The smallest card and host of a run, and what they do in a second.

    Attributes:
        gpu_bytes, host_bytes: of one card and of one host; None: no limit.
        rates: for the times.
    """

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    rates: Rates = field(default_factory=Rates)

    def holds(self, plan: Plan) -> bool:
        """Whether the plan fits, with its margins."""
        return plan.fits(self.gpu_bytes, self.host_bytes)
