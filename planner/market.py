"""Where a scenario's prices come from, and how far they are trusted.

Source: docs/operations.md, The market.
"""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import Field, PositiveFloat, model_validator

from planner.strict import Strict

SNAPSHOT = "snapshot"  # the shipped prices
AWS = "aws"
# Providers in gpuhunt's catalogue (0.1.34), AWS apart, which is asked itself.
PROVIDERS = (
    "azure", "cloudrift", "gcp", "lambdalabs", "nebius", "oci", "runpod", "verda",
)  # fmt: skip
FILE_ENDINGS = (".csv", ".parquet")
# Prices of a live source are renewed every few minutes, those of a catalogue a few times a day.
STALE_AFTER_MINUTES = {AWS: 60.0}
CATALOGUE_STALE_AFTER_MINUTES = 24 * 60.0


class MarketSpec(Strict):
    """Sources in order of preference, and limits on what they say.

    Of each domain and market (spot, on demand) the first source that has prices there gives them
    all. A source is `snapshot`, `aws`, a provider of gpuhunt such as `gcp`, or a file.
    """

    sources: Annotated[tuple[str, ...], Field(min_length=1)] = (SNAPSHOT,)  # the best first
    aws_regions: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # all enabled ones
    gpuhunt_folder: str | None = None  # catalogues as gpuhunt has them, in place of a download
    deadline_s: PositiveFloat = 60.0  # of one source in one refresh
    stale_after_minutes: dict[str, PositiveFloat] = Field(default_factory=dict)  # by source
    largest_jump: Annotated[float, Field(gt=1.0)] = 5.0  # a price that moves more is seen twice
    avoid_minutes: float = Field(default=15.0, ge=0.0)  # after a launch that found no capacity

    @model_validator(mode="after")
    def _each_source_once(self) -> MarketSpec:
        known = (SNAPSHOT, AWS, *PROVIDERS)
        for source in self.sources:
            if source not in known and not is_file(source):
                near = difflib.get_close_matches(source, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown source {source!r}; {hint}, or a .csv or .parquet file")
            if self.sources.count(source) > 1:
                raise ValueError(f"source {source!r} is there twice; keep one")
        for source in self.stale_after_minutes:
            if source not in self.sources:
                raise ValueError(f"stale_after_minutes names {source!r}, which is no source here")
        return self

    def stale_after(self, source: str) -> float | None:
        """Minutes after which a source's prices are called stale; None for those that never are."""
        if source in self.stale_after_minutes:
            return self.stale_after_minutes[source]
        if source == SNAPSHOT or is_file(source):
            return None
        return STALE_AFTER_MINUTES.get(source, CATALOGUE_STALE_AFTER_MINUTES)


def is_file(source: str) -> bool:
    """Whether a source is a file of offers."""
    return source.lower().endswith(FILE_ENDINGS)
