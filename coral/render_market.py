"""What `coral market` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from coral.console import make_console, print_rows

if TYPE_CHECKING:
    from tasks.market.history import History
    from tasks.market.refresh import Refreshed
    from tasks.market.show import Shown

SHOWN = 6  # of a list of sentences


def refresh_summary(found: Refreshed) -> dict[str, Any]:
    """The JSON object of a refresh."""
    return {
        "at": found.at.isoformat(),
        "seconds": round(found.seconds, 3),
        "sources": {
            one.feed: {
                "prices": one.prices,
                "changed": one.changed,
                "withdrawn": one.withdrawn,
                "rejected": one.rejected,
                "new_instance_types": list(one.new_types),
                "not_answered": [
                    {"domain": part.domain, "part": part.of.value, "why": part.failed}
                    for part in one.parts
                    if part.failed
                ],
            }
            for one in found.landed
        },
        "failed": {source: str(error) for source, error in found.failed.items()},
    }


def print_refresh(found: Refreshed) -> None:
    """A line per source, and what did not answer."""
    console = make_console()
    if found.landed:
        table = Table(title=f"Market at {found.at:%Y-%m-%d %H:%M} UTC", title_justify="left")
        table.add_column("source")
        for name in ("prices", "changed", "no longer listed", "rejected", "new types"):
            table.add_column(name, justify="right")
        for one in found.landed:
            figures = (one.prices, one.changed, one.withdrawn, sum(one.rejected.values()))
            table.add_row(one.feed, *(f"{value:,}" for value in figures), str(len(one.new_types)))
        console.print(table)
    for one in found.landed:
        for reason, count in one.rejected.items():
            console.print(f"{one.feed}: {count:,} rejected, {reason}.")
    missing: dict[tuple[str, str, str], list[str]] = {}
    for feed, domain, part, why in found.partly:
        missing.setdefault((feed, part, why), []).append(domain)
    for (feed, part, why), domains in missing.items():
        where = domains[0] if len(domains) == 1 else f"{len(domains)} domains"
        console.print(
            f"[yellow]{feed}: no {part.replace('_', ' ')} of {where}, the last ones stay: "
            f"{why}[/yellow]"
        )
    for source, error in found.failed.items():
        console.print(f"[bold red]{source} failed, its last prices stay:[/bold red] {error}")
    if not found.landed and not found.failed:
        console.print(
            "The shipped snapshot is the only source: nothing to ask. Name others with --source, "
            "or under `market: {sources: [aws, snapshot]}` in a scenario."
        )
    else:
        console.print(f"{found.seconds:.1f} s. `coral market show` has the prices.")


def shown_summary(found: Shown) -> dict[str, Any]:
    """The JSON object of the market."""
    return {
        "columns": found.columns,
        "rows": [list(row) for row in found.rows],
        "found": found.found,
        "sources": {
            one.feed: {
                "offers": one.offers,
                "oldest_seen_at": one.seen_at.isoformat() if one.seen_at else None,
                "stale": one.feed in found.stale,
                "rejected": one.rejected,
            }
            for one in found.sources
        },
        "not_answered": found.failures,
        "avoided": found.avoided,
    }


def print_shown(found: Shown) -> None:
    """Offers, then the sources that they are from."""
    console = make_console()
    print_rows(found.columns, found.rows)
    if found.found > len(found.rows):
        console.print(f"{found.found:,} match: --limit shows more, --gpu and --domain fewer.")
    for one in found.sources:
        refused = sum(one.rejected.values())
        seen = f"{one.seen_at:%Y-%m-%d %H:%M} UTC" if one.seen_at else "never"
        stale = " [yellow](stale)[/yellow]" if one.feed in found.stale else ""
        console.print(
            f"{one.feed}: {one.offers:,} offers, the oldest seen {seen}{stale}; "
            f"{refused:,} rejected."
        )
    for line in found.failures[:SHOWN]:
        console.print(f"[yellow]Not answered the last time: {line}[/yellow]")
    if len(found.failures) > SHOWN:
        console.print(f"[yellow]and {len(found.failures) - SHOWN} more[/yellow]")
    if found.avoided:
        console.print(f"Avoided for now: {found.avoided}.")


def history_summary(found: History) -> dict[str, Any]:
    """The JSON object of a history."""
    names = ("source", "domain", "part", "from", "to", "minutes", "why")
    return {
        "columns": found.columns,
        "rows": [list(row) for row in found.rows],
        "found": found.found,
        "gaps": [dict(zip(names, gap, strict=True)) for gap in found.gaps],
        "plot": str(found.plot) if found.plot else None,
    }


def print_history(found: History) -> None:
    """Changes, gaps, the plot."""
    console = make_console()
    print_rows(found.columns, found.rows)
    if found.found > len(found.rows):
        console.print(f"{found.found:,} changes: --limit shows more, --hours looks further back.")
    for source, domain, part, start, end, minutes, why in found.gaps[:SHOWN]:
        until = f"{end:%Y-%m-%d %H:%M}" if end else "now"
        console.print(
            f"[yellow]{source} {domain} {part}: not seen from {start:%Y-%m-%d %H:%M} to {until} "
            f"({minutes:.0f} min), {why}[/yellow]"
        )
    if len(found.gaps) > SHOWN:
        console.print(f"[yellow]and {len(found.gaps) - SHOWN} more gaps (FROM market_gap)[/yellow]")
    if found.plot:
        console.print(f"Drawn: {found.plot}")
