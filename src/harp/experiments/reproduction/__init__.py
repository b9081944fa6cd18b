"""The paper's claims, the experiments that test them, and verdicts by intervals."""

__all__ = ["claim", "evidence", "judge", "verdict"]
