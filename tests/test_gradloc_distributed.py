"""GradLoc on two processes (gloo), DDP and FSDP2: the token is found on either rank, and the answer is one process's."""

import math
import warnings

import pytest
import torch
from test_gradloc import Plain
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradloc import GradLoc, LayerClip, token_contributions

ROWS, PROMPT, T, MICRO = 4, 5, 12, 2  # sequences a micro-batch, tokens, micro-batches a rank


def build():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def micro_batch(rank, index, planted=(), broken=()):
    """planted, broken: (rank, micro-batch, row, position) of a huge omega, of a NaN."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    ids = torch.randint(3, 64, (ROWS, PROMPT + T), generator=generator)
    lengths = torch.randint(4, T + 1, (ROWS, 1), generator=generator)
    lengths[3] = T
    weight = torch.ones(ROWS, T)
    rollout = torch.full((ROWS, T), -4.0)
    for r, m, row, position in planted:
        if (r, m) == (rank, index):
            weight[row, position] = 1e4
    for r, m, row, position in broken:
        if (r, m) == (rank, index):
            rollout[row, position] = math.nan
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mask": (torch.arange(T) < lengths).float(),
        "advantages": torch.randn(ROWS, 1, generator=generator), "weight": weight, "rollout_logps": rollout,
    }  # fmt: skip


def logps_fn(model, batch):
    t = batch["mask"].shape[1]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, -t - 1 : -1]
    return logits.log_softmax(-1).gather(2, batch["input_ids"][:, -t:, None]).squeeze(2)


def objective(logps, batch, scale=1.0):
    weight = batch["weight"] + 0.0 * batch["rollout_logps"]  # a NaN log-prob of the engine reaches the loss
    return -torch.where(batch["mask"].bool(), weight * batch["advantages"] * logps, 0.0).sum() / 100 * scale


CASES = {
    "rank 0": {"planted": [(0, 1, 3, 7)]},
    "rank 1": {"planted": [(1, 0, 3, 2)]},
    "both": {"planted": [(0, 0, 3, 9), (1, 1, 3, 4)]},
    "nan": {"broken": [(1, 1, 3, 3)]},
}


def train_step(model, gradloc, ranks, **case):
    """Forward and backward of a step as a plain loop does it; `ranks`: those that this process stands for."""
    for p in model.parameters():
        p.grad = None
    for index in range(MICRO):
        for rank in ranks:
            batch = micro_batch(rank, index, **case)
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = index == MICRO - 1
            logps = gradloc.watch(model, batch, logps_fn)
            objective(logps, batch, 1 / len(ranks)).backward()  # two processes average their gradients


def outcome_of(report, grads):
    return {
        "tokens": [
            (t.rank, t.micro_batch, t.sequence, t.position, t.share, t.grad_norm, t.layers) for t in report.tokens[:6]
        ],
        "norm": report.grad_norm, "certificate": report.certificate, "method": report.method, "cause": report.cause,
        "offender": report.offender, "layers": report.layers, "counts": (report.num_tokens, report.num_sequences),
        "untouched": grads, "texts": len(report.sequences), "remainder": report.remainder,
    }  # fmt: skip


def run_cases(model, ranks):
    results = {}
    for name, case in CASES.items():
        for method in ("directional", "search"):
            gradloc = GradLoc(None, method=method, every_n_steps=1, quiet=True)
            train_step(model, gradloc, ranks, **case)
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            weights = [p.detach().clone() for p in model.parameters()]
            state = torch.get_rng_state()
            report = gradloc.check(model)

            def same(a, b):
                a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (a, b))
                return torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))

            untouched = (
                all(same(p.grad, b) for p, b in zip(model.parameters(), before, strict=True) if b is not None)
                and all(same(p.detach(), w) for p, w in zip(model.parameters(), weights, strict=True))
                and torch.equal(state, torch.get_rng_state())
            )
            results[name, method] = outcome_of(report, untouched)
    batch = micro_batch(ranks[0], 0, planted=[(1, 0, 3, 2)])
    part = token_contributions(model, batch, logps_fn, objective)
    results["contributions"] = (float(part.values.sum()), part.grad_norm, part.certificate)
    return results


def with_dense_mask(model, batch):
    t = batch["mask"].shape[1]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["mask4"]).logits[:, -t - 1 : -1]
    return logits.log_softmax(-1).gather(2, batch["input_ids"][:, -t:, None]).squeeze(2)


def odd_cases(model, rank):
    """What must neither hang nor end training: a batch that cannot be cut, no forward mode, ranks with unlike calls."""
    found = {}
    batch = micro_batch(rank, 0, planted=[(1, 0, 3, 2)])
    s = batch["input_ids"].shape[1]
    batch["mask4"] = torch.ones(s, s, dtype=torch.bool).tril()[None, None].expand(ROWS, 1, s, s)
    gradloc = GradLoc(None, quiet=True)
    report = gradloc.explain(model, batch, with_dense_mask, objective)
    found["dense mask"] = (report.tokens[0].rank, report.tokens[0].position, report.tokens[0].grad_norm is not None)
    norm = (model.module if hasattr(model, "module") else model).model.norm
    handle = norm.register_forward_hook(lambda module, args, output: Plain.apply(output))
    found["no forward mode"] = gradloc.explain(model, batch, with_dense_mask, objective).method
    handle.remove()
    lonely = GradLoc(None, quiet=True, every_n_steps=1)
    objective(lonely.watch(model, batch, logps_fn) if rank == 0 else logps_fn(model, batch), batch).backward()
    found["unlike calls"] = lonely.check(model)
    broken = micro_batch(rank, 0, broken=[(1, 0, 3, 3)])
    found["nan on one rank"] = gradloc.explain(model, broken, logps_fn, objective).offender["tensor"]
    return found


def worker(rank, store, kind, results):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert sum(type(p).__name__ == "DTensor" for p in model.parameters()) > 10
    results[rank] = run_cases(model, [rank]) | {"odd": odd_cases(model, rank)}
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_process():
    return run_cases(build(), [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_find_what_one_finds(kind, one_process, tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(worker, (str(tmp_path / "store"), kind, results), nprocs=2)
        results = dict(results)
    assert set(results) == {0, 1}
    compared = 0
    for (name, method), one in ((k, v) for k, v in one_process.items() if k not in ("contributions", "odd")):
        two = results[0][name, method]
        assert repr(two) == repr(results[1][name, method]), (name, method)  # every rank holds the whole report
        assert two["untouched"] and results[1][name, method]["untouched"], (name, method)
        assert two["cause"] == one["cause"] and two["counts"] == one["counts"], (name, method)
        if name == "nan":
            where = [(t[0], t[1], t[2], t[3]) for t in two["tokens"]]
            assert where == [(1, 1, 3, 3)] and two["cause"] == "N" and two["offender"]["tensor"] == "rollout_logps"
            continue
        assert two["norm"] == pytest.approx(one["norm"], rel=1e-5), (name, method)
        assert two["method"].startswith(method), (name, method, two["method"])
        if method == "directional":
            assert two["certificate"] < 0.02, (name, two["certificate"])
        # one process numbers its calls micro-batch by micro-batch: call 2 m + rank is rank's micro-batch m
        ours = {(t[0], t[1], t[2], t[3]): t[4:] for t in two["tokens"]}
        theirs = {(t[1] % 2, t[1] // 2, t[2], t[3]): t[4:] for t in one["tokens"]}
        planted = CASES[name]["planted"]
        assert list(ours)[0] in planted and set(list(ours)[: len(planted)]) == set(planted), (name, method, ours)
        for place in planted:
            share, norm, layers = ours[place]
            assert share == pytest.approx(theirs[place][0], abs=2e-3), (name, method)
            assert norm == pytest.approx(theirs[place][1], rel=1e-4), (name, method)
            assert layers == pytest.approx(theirs[place][2], rel=1e-4), (name, method)
            compared += 1
        assert {k: v["norm"] for k, v in two["layers"].items()} == pytest.approx(
            {k: v["norm"] for k, v in one["layers"].items()}, rel=1e-4
        )
    assert compared == 8
    odd = {
        "dense mask": (1, 2, True),
        "no forward mode": "directional: finite difference",
        "unlike calls": None,
        "nan on one rank": "rollout_logps",
    }
    assert results[0]["odd"] == results[1]["odd"] == odd
    total = results[0]["contributions"][0] + results[1]["contributions"][0]
    assert total == pytest.approx(results[0]["contributions"][1], rel=0.02)
    assert (
        results[0]["contributions"][2] == pytest.approx(results[1]["contributions"][2])
        and results[0]["contributions"][2] < 0.02
    )


def test_layer_clip_is_importable_from_here():
    assert LayerClip.__module__ == "layer_clip"
