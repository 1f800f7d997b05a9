"""What `score` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SiteScore:
    """What happens to the model when this one site is quantized and all else is float."""

    site: str
    format: str
    #: Of the numbers at the site itself, in dB; None for all sites together.
    sqnr_db: float | None
    #: The mean of the squared errors at the site itself; None for all sites together.
    mse: float | None
    #: ‖y − ŷ‖/‖y‖ of the model's outputs.
    output_error: float
    #: 1 − cos(y, ŷ).
    cosine_distance: float
    #: Of the loss, if there is one.
    loss_change: float | None

    @property
    def operator(self) -> str:
        """The operator that the site belongs to."""
        return self.site.rpartition(":")[0]

    @property
    def suffering(self) -> float:
        """What sites are sorted by: the loss if there is one, else the outputs' error."""
        return self.output_error if self.loss_change is None else self.loss_change


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The sites, worst first."""

    sites: tuple[SiteScore, ...]
    #: The same for all sites at once.
    together: SiteScore
    samples: int
    #: The share of the work of separate runs that was taken from shared partial results instead.
    shared: float
    #: Bytes of the partial results of the largest batch.
    kept_bytes: int

    def operators(self) -> list[tuple[str, float]]:
        """Operators with the sum over their sites, worst first."""
        sums: dict[str, float] = {}
        for site in self.sites:
            sums[site.operator] = sums.get(site.operator, 0.0) + site.suffering
        return sorted(sums.items(), key=lambda item: -item[1])
