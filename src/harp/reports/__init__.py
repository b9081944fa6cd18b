"""Pages, cards, plots, tables, and files for leaderboards."""

__all__ = ["card", "html", "leaderboards", "plots", "tables"]
