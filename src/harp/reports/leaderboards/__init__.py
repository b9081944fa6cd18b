"""Submission files for public leaderboards: a folder of files, and what is left to a person.

`apb` is the Adversarial Pruning Benchmark, `robustbench` is RobustBench. Each has `prepare`, which writes the folder,
and `validate`, which checks it again from its files.
"""

from harp.reports.leaderboards import apb, robustbench
from harp.reports.leaderboards.submission import Submission

__all__ = ["Submission", "apb", "robustbench"]
