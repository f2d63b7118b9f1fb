"""The documents under docs/: every name they give exists, every value they quote is the default, every derivation holds in float64."""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from ares import effective_rank
from rlvr_common import aggregate, minirl_loss, support_logps

REPO = Path(__file__).resolve().parents[1]
DOCS = sorted((REPO / "docs").glob("*.md"))


@functools.cache
def names_of(path):
    """Functions, classes and methods that a Python file defines."""
    tree = ast.parse((REPO / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def anchors_of(path):
    """The anchors that GitHub gives the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("doc", DOCS, ids=lambda d: d.name)
def test_named_code_and_linked_files_exist(doc):
    text = doc.read_text()
    for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        assert (REPO / path).is_file(), path
        assert name in names_of(path), f"{path}::{name}"
    for link in re.findall(r"\]\(([^):]+)\)", text):
        file, _, anchor = link.partition("#")
        assert (doc.parent / file).exists(), link
        assert not anchor or anchor in anchors_of(doc.parent / file), link


def test_every_derivation_names_its_code_and_a_test():
    sections = (REPO / "docs" / "derivations.md").read_text().split("\n## ")[1:]
    assert len(sections) == 5
    for section in sections:
        code, tests = section.split("\nCode: ")[1].split("\nTests: ")
        assert "::" in code and "`tests/" in tests, section[:40]


# --- where papers are silent ------------------------------------------------------------------------------------------


def not_stated_rows():
    """[(cell "we", [files of cell "where"])] of docs/not_stated.md; a pattern of configs stands for all of them."""
    rows = []
    for line in (REPO / "docs" / "not_stated.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "not stated":
            pattern = re.search(r"`([^`:]+)", cells[3]).group(1)
            files = sorted(REPO.glob(pattern))
            assert files, f"{pattern} of {line[:60]} names no file"
            rows.append((cells[1], files))
    return rows


def default_of(module, owner, name):
    """The default of a dataclass field, or of an argument of a function or class."""
    thing = getattr(importlib.import_module(module), owner)
    if dataclasses.is_dataclass(thing):
        return {f.name: f.default for f in dataclasses.fields(thing)}[name]
    return inspect.signature(thing).parameters[name].default


def test_every_value_is_the_default():
    compared = 0
    for we, files in not_stated_rows():
        for left, value in re.findall(r"`([\w.]+) = ([^`]+)`", we):
            for file in files:
                if file.suffix == ".yaml":
                    actual = yaml.safe_load(file.read_text())[left]
                else:
                    actual = default_of(file.stem, *left.split("."))
                actual = float(actual) if isinstance(ast.literal_eval(value), float) else actual
                assert actual == ast.literal_eval(value), f"{file.name}: {left} is {actual}, the table says {value}"
                compared += 1
    assert compared > 80


def test_every_line_that_says_not_stated_has_its_row():
    rows = not_stated_rows()
    for source in sorted([*REPO.glob("*.py"), *(REPO / "recipes").glob("*.py")]):
        marked = [x for x in source.read_text().splitlines() if "not stated" in x and 'we: ..."' not in x]
        assert len(marked) <= sum(source in files for _, files in rows), f"{source.name}: {marked}"
    for config in sorted((REPO / "recipes" / "configs").glob("*.yaml")):
        for key in re.findall(r"^(\w+):.*# ours", config.read_text(), re.MULTILINE):
            assert any(config in files and f"`{key} = " in we for we, files in rows), f"{config.name}: {key}"


# --- 1. token and sequence objective ----------------------------------------------------------------------------------

VOCAB, LONGEST = 3, 3  # token 0 ends a sequence


def sequences():
    """Every sequence of at most LONGEST tokens: it ends with token 0 or at the limit."""
    for length in range(1, LONGEST + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] == 0 or length == LONGEST
            if ends and 0 not in tokens[:-1]:
                yield tokens


def table_logps(logits):
    """logits {prefix: (VOCAB,)} stacked as (prefixes, VOCAB) -> per-token log-probs of all sequences (N, LONGEST) and mask."""
    rows = [tokens[:t] for tokens in sequences() for t in range(len(tokens))]
    prefixes = {prefix: i for i, prefix in enumerate(dict.fromkeys(rows))}
    table, every = logits.log_softmax(-1), list(sequences())
    zero = table.new_zeros(())
    logps = [[table[prefixes[y[:t]], y[t]] if t < len(y) else zero for t in range(LONGEST)] for y in every]
    mask = torch.tensor([[t < len(y) for t in range(LONGEST)] for y in every])
    return torch.stack([torch.stack(row) for row in logps]), mask


def test_token_objective_is_the_first_order_of_the_sequence_objective():
    """Expectations over all sequences of a small policy. Gradients agree where pi = mu; apart, their gap is linear in the distance."""
    g = torch.Generator().manual_seed(0)
    prefixes = 1 + (VOCAB - 1) + (VOCAB - 1) ** 2
    mu_logits, direction = (torch.randn(prefixes, VOCAB, generator=g, dtype=torch.float64) for _ in range(2))
    rollout_logps, mask = table_logps(mu_logits)
    probability = rollout_logps.sum(1, keepdim=True).exp()  # (N, 1)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-12)
    rewards = torch.randn(len(mask), 1, generator=g, dtype=torch.float64)
    lengths = mask.sum(1, keepdim=True)

    def gradients(distance, how="seq_sum", baseline=0.0):
        logits = (mu_logits + distance * direction).requires_grad_()
        logps, _ = table_logps(logits)
        loss = minirl_loss(logps, logps.detach(), rollout_logps, rewards - baseline, math.inf, math.inf, math.inf)
        token = aggregate(probability * loss, mask, how, 1.0)
        weight = (logps - rollout_logps).sum(1, keepdim=True).exp()
        sequence = -(probability * weight * rewards).sum()
        return [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (token, sequence)]

    def gap(distance):
        token, sequence = gradients(distance)
        return (token - sequence).norm().item()

    token, sequence = gradients(0.0)
    torch.testing.assert_close(token, sequence, rtol=1e-12, atol=1e-12)
    assert gap(1e-3) / gap(5e-4) == pytest.approx(2.0, rel=0.01) and gap(0.5) > 1e-2
    normed, _ = gradients(0.0, "seq_mean_token_mean")
    assert (normed - sequence).norm() > 1e-2  # 1/|y| is another objective already at equal policies
    torch.testing.assert_close(gradients(0.5)[0], gradients(0.5, baseline=0.7)[0], rtol=1e-12, atol=1e-12)

    def values(distance):
        omega = (table_logps(mu_logits + distance * direction)[0] - rollout_logps).exp()
        omega = torch.where(mask, omega, 0.0)
        token = (probability * rewards * omega.sum(1, keepdim=True)).sum()
        constant = (probability * rewards * (lengths - 1)).sum()
        product = (probability * rewards * torch.where(mask, omega, 1.0).prod(1, keepdim=True)).sum()
        return abs((product - (token - constant)).item())

    assert values(1e-2) / values(5e-3) == pytest.approx(4.0, rel=0.05)  # what is left out is of second order


# --- 4. sampling mask -------------------------------------------------------------------------------------------------


def test_without_the_sampling_mask_a_constant_reward_has_a_gradient():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, 8, generator=g, dtype=torch.float64).requires_grad_()
    kept = logits.detach().flatten().topk(3).indices
    support = (kept, torch.tensor([0, 3]))
    pi = logits.detach().flatten().softmax(0)
    mu = pi[kept] / pi[kept].sum()

    def expected(logps_of):  # E_mu of the gradient, reward 1 everywhere
        return torch.autograd.grad(sum(m * logps_of(a) for m, a in zip(mu, kept, strict=True)), logits)[0].flatten()

    without = expected(lambda a: logits.log_softmax(-1)[0, 0, a])
    (of_mass,) = torch.autograd.grad(logits.softmax(-1)[0, 0, kept].sum().log(), logits)
    torch.testing.assert_close(without, of_mass.flatten(), rtol=1e-12, atol=1e-12)
    assert (without[kept] > 0).all() and without.norm() > 0.1
    with_mask = expected(lambda a: support_logps(logits, a.view(1, 1), support).sum())
    torch.testing.assert_close(with_mask, torch.zeros_like(with_mask), rtol=0, atol=1e-12)
    (of_one,) = torch.autograd.grad(support_logps(logits, kept[:1].view(1, 1), support).sum(), logits)
    outside = [a for a in range(8) if a not in kept.tolist()]
    assert not of_one.flatten()[outside].any() and of_one.flatten()[kept].abs().min() > 0


# --- 5. rank from entropy ---------------------------------------------------------------------------------------------


def power_law(share, n=2048, top=32):
    """Singular values with energies i^-a whose `top` largest hold `share` of the energy. (n,)"""
    low, high, ranks = 0.0, 4.0, torch.arange(1, n + 1, dtype=torch.float64)
    for _ in range(60):
        a = (low + high) / 2
        energy = ranks**-a
        low, high = (a, high) if energy[:top].sum() / energy.sum() < share else (low, a)
    return energy.sqrt()


def test_the_entropy_rank_of_signal_and_rest_and_of_the_articles_shares():
    text = (REPO / "docs" / "derivations.md").read_text()
    for k, q, share in ((4, 64, 0.9), (4, 64, 0.6), (1, 8, 0.5)):
        energy = torch.cat([torch.full((k,), share / k), torch.full((q - k,), (1 - share) / (q - k))]).double()
        formula = (k / share) ** share * ((q - k) / (1 - share)) ** (1 - share)
        assert effective_rank(7 * energy.sqrt()).item() == pytest.approx(formula, rel=1e-6)
        if k == 4:
            assert f" as {formula:.1f}" in text
    ranks = [effective_rank(power_law(share)[:64]).item() for share in (0.08, 0.18)]
    assert f"from {ranks[0]:.1f} to {ranks[1]:.1f}" in text and (ranks[0] - ranks[1]) / 64 == pytest.approx(
        1 / 7, abs=0.02
    )
