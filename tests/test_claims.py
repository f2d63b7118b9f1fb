"""The tables of claims and recipes are what the evidence says."""

import pytest

from results import claims, reproduce


def test_tables_are_those_that_the_evidence_gives():
    """Red after new evidence or another rule: `python results/reproduce.py table` writes them again."""
    for path, text in claims.written().items():
        assert path.read_text() == text, f"{path.name} is stale: python results/reproduce.py table"


def test_every_claim_names_its_evidence_and_there_are_enough():
    ids = [row.id for row in claims.CLAIMS]
    assert len(ids) == len(set(ids)) >= 30
    known = {prefix for _, _, prefixes, _ in claims.RECIPES.values() for prefix in prefixes}
    for row in claims.CLAIMS:
        assert row.evidence in reproduce.RUNS | reproduce.SCRIPTS and row.id.split("-")[0] in known


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.2, 0.9], "seen"),
        ([-1.0, -1.2, -0.9], "opposite"),
        ([1.0, -1.0, 0.2], "not seen"),
        ([0.0, 0.0, 0.0], "not seen"),
    ],
)
def test_verdict_is_two_standard_errors(values, verdict):
    assert claims.rises(values) == verdict


def test_marks_that_are_gone_are_named():
    with pytest.raises(ValueError, match="page.md has lost its marks"):
        claims.fill("no marks", claims.MARKS["claims"], ["| a |"], "page.md")
