"""Pages, cards, plots, tables, and files for leaderboards."""

__all__ = ["card", "claims", "html", "leaderboards", "names", "pictures", "plots", "tables"]
