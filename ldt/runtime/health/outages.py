"""Links between sites that are down: counts outages that end, describes those that do not."""

from __future__ import annotations

import logging
import time

from ldt.runtime.common.rank_info import RankInfo
from ldt.site import Site

__all__ = ["LEAST_SECONDS", "Outages"]

logger = logging.getLogger(__name__)

LEAST_SECONDS = 3.0  # shorter silence is no outage: busy machines answer late


class Outages:
    """The outages that this rank has seen: silence of a rank of another site, or of the store if that is there.

    Unless outages are ``expected``, all silence is that of ranks.
    """

    def __init__(self, rank_info: RankInfo, expected: bool) -> None:
        self._expected = expected
        self._count = 0
        self._taken = 0
        self._rank_info = rank_info
        self._last_end = 0.0

    def take(self) -> int:
        """How many there were since the last call of this."""
        count = self._count  # another thread may add to it
        before, self._taken = self._taken, count
        return count - before

    def site_of(self, rank: int) -> Site | None:
        """The site of a global rank if it is another one than this rank's, and the link to it may be down."""
        if not self._expected or rank not in self._rank_info.ranks:
            return None
        site = self._rank_info.site_of(rank)
        return None if site == self._own else site

    def ranks_of(self, site: Site) -> set[int]:
        """The global ranks of a site."""
        return {rank for rank in self._rank_info.ranks if self._rank_info.site_of(rank) == site}

    def other_sites(self) -> dict[Site, int]:
        """The other sites to which the link may be down, each with its first rank."""
        sites = {self.site_of(rank): rank for rank in reversed(self._rank_info.ranks)}
        return {site: rank for site, rank in sites.items() if site is not None}

    def answered(self, rank: int, silent: float) -> None:
        """Count an outage if ``rank``, of another site, was silent for long. Called by one thread."""
        site = self.site_of(rank)
        if site is None or silent < LEAST_SECONDS:
            return
        now = time.monotonic()
        if now - silent > self._last_end:  # the store and a heartbeat are late together
            self._count += 1
            logger.warning("the link to site %s was down, or a rank was stopped, for %.1f s", site, silent)
        self._last_end = now

    @property
    def _own(self) -> Site:
        return self._rank_info.site_of(self._rank_info.global_rank)

    def text(self, site: Site, silent: float, limit: float) -> str:
        """For a link to ``site`` that does not come back."""
        store = self.site_of(self._rank_info.store_rank)  # heartbeats come from there
        end = self._own if store in (None, site) else store
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
        return (
            f"the link between site {end} and site {site} has been down since {since}, or all ranks there are gone: "
            f"nothing came for {silent:.0f} s. If it may be down so long, pass connect a longer outage "
            f"(heartbeat_timeout and twice outage are {limit:g} s)"
        )
