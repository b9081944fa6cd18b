"""Findings by their verdict."""

from harp.evaluation.model_checks import Finding


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in findings}


def suspicious(findings: list[Finding]) -> dict[str, str]:
    return {check: verdict for check, verdict in verdicts(findings).items() if verdict != "good"}
