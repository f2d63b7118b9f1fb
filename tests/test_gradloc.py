"""GradLoc against plain loops: the identity, exact norms, search, trigger, values that are not finite, causes."""

import math
import random
import statistics
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import gradloc
import gradloc_causes
import gradloc_methods
from gradloc import GradLoc, Trigger, token_contributions
from gradloc_causes import diagnose
from gradloc_methods import Call, Step, coefficients, confirm, search
from gradloc_report import check_report
from rlvr_common import AGGREGATIONS, aggregate, ppo_clip_loss, token_clip, unbiased_kl, weighted_logp_loss

N, P, T, VOCAB = 4, 3, 6, 40  # sequences, prompt and completion columns

# --- small models and batches -----------------------------------------------------------------------------------------


def qwen(dtype=torch.float64, moe=False, attention="sdpa", seed=0, **changes):
    options = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
        "initializer_range": 0.2, "tie_word_embeddings": False, "use_cache": False, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    if moe:
        extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
        config = Qwen3MoeConfig(**options | extra | changes)
    else:
        config = Qwen3Config(**options | changes)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the fused one has no float64
    return (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config).to(dtype)


def make_batch(n=N, t=T, seed=1, dtype=torch.float64):
    """Prompts padded on the left, completions on the right; advantages a token, log-probs of the engine near the model's."""
    draw = torch.Generator().manual_seed(seed)

    def noise(scale, *shape):
        return (scale * torch.randn(*shape, generator=draw, dtype=torch.float64)).to(dtype)

    ids = torch.randint(1, VOCAB, (n, P + t), generator=draw)
    attention = torch.ones(n, P + t, dtype=torch.long)
    for i in range(n):
        attention[i, : i % P] = 0
        attention[i, P + t - (2 * i) % t :] = 0
    ids[attention == 0] = 0
    return {
        "input_ids": ids, "attention_mask": attention, "completion_mask": attention[:, P:],
        "advantages": noise(1.0, n, t), "drift": noise(0.05, n, t), "staleness": noise(0.05, n, t),
    }  # fmt: skip


def planted(row=1, column=3, size=300.0, **options):
    batch = make_batch(**options)
    batch["advantages"][row, column] = size
    return batch


def logps_fn(model, batch):
    ids, t = batch["input_ids"], batch["completion_mask"].shape[1]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, -t - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(-1, ids[:, -t:, None]).squeeze(-1)


def logps_and_entropy(model, batch):
    ids, t = batch["input_ids"], batch["completion_mask"].shape[1]
    out = model(input_ids=ids, attention_mask=batch["attention_mask"], output_router_logits=batch.get("router", None))
    every = out.logits[:, -t - 1 : -1].log_softmax(-1)
    named = {"logps": every.gather(-1, ids[:, -t:, None]).squeeze(-1), "entropy": -(every.exp() * every).sum(-1)}
    return named | ({"aux_loss": out.aux_loss} if batch.get("router") else {})


def autocast_logps(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return logps_fn(model, batch)


def objective(how="token_mean", policy="plain", entropy=0.0, beta=0.0, aux=0.0):
    def loss_of(outputs, batch):
        logps = outputs["logps"] if isinstance(outputs, dict) else outputs
        mask, advantages = batch["completion_mask"], batch["advantages"]
        old, rollout = logps.detach() + batch["staleness"], logps.detach() + batch["drift"]
        if policy == "ppo":
            loss = ppo_clip_loss(logps, old, advantages, 0.02, 0.02)
        elif policy == "icepop":
            loss = weighted_logp_loss(token_clip(logps, old, rollout, "icepop", 0.96, 1.5), advantages, logps)
        else:
            loss = -advantages * logps
        if beta:
            loss = loss + beta * unbiased_kl(logps, old, logps.detach() + batch["drift"])
        if entropy:
            loss = loss - entropy * outputs["entropy"]
        count = batch.get("tokens", int(mask.sum())) if how == "token_mean" else batch.get("sequences", len(mask))
        total = aggregate(loss, mask, how, count)
        return total + aux * outputs["aux_loss"] if aux else total

    return loss_of


# --- plain-loop reference ---------------------------------------------------------------------------------------------


def reference(model, batch, function=logps_fn, loss_of=None):
    """Backward of each token alone, in one batch without any cut. -> (names, ||g||, {(row, column): (g_t, c_t)})."""
    names, params = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    outputs = function(model, batch)
    named = outputs if isinstance(outputs, dict) else {"logps": outputs}
    loss = (loss_of or objective())(outputs, batch)
    whole = gradients(loss, params)
    arrived = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    weights = {name: weight for name, weight in zip(named, arrived, strict=True) if weight is not None}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole))
    tokens = {}
    for row, column in batch["completion_mask"].nonzero().tolist():
        alone = sum(
            weights[k][row, column] * v[row, column] for k, v in named.items() if k in weights and v.dim() == 2
        )
        g = gradients(alone, params)
        dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(g, whole, strict=True))
        tokens[row, column] = g, dot / norm
    return names, norm, tokens


def gradients(loss, params):
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]


def length(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def by_label(names, grads, label_of):
    sums = {}
    for name, g in zip(names, grads, strict=True):
        label = label_of(name)
        sums[label] = sums.get(label, 0.0) + float(g.double().square().sum())
    return {label: math.sqrt(total) for label, total in sums.items()}


def layer(name):
    if ".layers." in name:
        return f"layer {int(name.split('.layers.')[1].split('.')[0])}"
    return "embeddings" if "embed_tokens" in name else "head" if "lm_head" in name else "final norm"


def kind(name):
    if "norm" in name:
        return "norm"
    for part, label in (("self_attn", "attention"), ("experts", "experts"), ("gate.weight", "router"), ("mlp", "mlp")):
        if part in name:
            return label
    return "embeddings" if "embed_tokens" in name else "head"


def as_step(model, batch, function=logps_fn, loss_of=None):
    calls, parameters, gradient, _ = gradloc._backward(model, batch, function, loss_of or objective())
    return Step(model, calls, parameters, gradient)


def assert_values(result, tokens, rel):
    largest = max(abs(c) for _, c in tokens.values())
    for (row, column), (_, c) in tokens.items():
        assert float(result.values[row, column]) == pytest.approx(c, abs=rel * largest), (row, column)
    counted = torch.zeros_like(result.values, dtype=torch.bool)
    for place in tokens:
        counted[place] = True
    assert not result.values[~counted].any()  # padding adds nothing


# --- 1. the identity, and exact norms ---------------------------------------------------------------------------------

OBJECTIVES = {
    "token_mean": {},
    "seq_mean": {"how": "seq_mean_token_mean"},
    "seq_sum": {"how": "seq_sum"},
    "ppo": {"policy": "ppo"},
    "icepop": {"policy": "icepop", "how": "seq_mean_token_mean"},
    "kl": {"beta": 2.0},
    "entropy": {"entropy": 0.7},
}


@pytest.mark.parametrize("options", OBJECTIVES.values(), ids=OBJECTIVES)
def test_contributions_equal_one_backward_a_token(options):
    model, batch = qwen(), make_batch()
    function = logps_and_entropy if "entropy" in options else logps_fn
    _, norm, tokens = reference(model, batch, function, objective(**options))
    for method, rel in (("jvp", 1e-6), ("finite_difference", 1e-3)):
        result = token_contributions(model, batch, function, objective(**options), method)
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        assert float(result.values.sum()) == pytest.approx(norm, rel=rel)
        assert result.certificate == pytest.approx(abs(float(result.values.sum()) / norm - 1), abs=1e-12)
        assert result.remainder == 0 and method.split("_")[0] in result.method.replace("forward mode", "jvp")
        assert_values(result, tokens, rel)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_float32_within_a_percent_in_every_form_of_the_model(attention, tied):
    model = qwen(torch.float32, attention=attention, tie_word_embeddings=tied)
    batch = planted(dtype=torch.float32)
    _, norm, tokens = reference(model, batch)
    for method, rel in (("jvp", 1e-4), ("finite_difference", 1e-2)):
        result = token_contributions(model, batch, logps_fn, objective(), method)
        assert float(result.values.sum()) == pytest.approx(norm, rel=rel)
        assert_values(result, tokens, rel)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_confirmed_norms_equal_one_backward_a_token(how):
    model, batch = qwen(), make_batch()
    names, norm, tokens = reference(model, batch, loss_of=objective(how))
    places = [(0, 0, row, column) for row, column in tokens]  # all: several of one sequence, first, last, left-padded
    step = as_step(model, batch, loss_of=objective(how))
    found = confirm(step, places)
    assert [(f.rank, f.call, f.row, f.column) for f in found] == places
    for f in found:
        g, c = tokens[f.row, f.column]
        assert f.grad_norm == pytest.approx(length(g), rel=1e-6)
        assert f.share == pytest.approx(c / norm, abs=1e-9)
        assert f.norms.tolist() == pytest.approx([length([x]) for x in g], rel=1e-5, abs=1e-9)
    report = GradLoc(confirm=3, quiet=True).explain(model, batch, logps_fn, objective(how))
    assert [t.grad_norm is None for t in report.tokens[:5]] == [False] * 3 + [True] * 2
    for t in report.tokens[:3]:
        g, c = tokens[t.sequence, t.position]
        assert t.share == pytest.approx(c / norm, rel=1e-5)
        assert t.grad_norm_share == pytest.approx(length(g) / norm, rel=1e-5)
        assert t.layers == pytest.approx(by_label(names, g, layer), rel=1e-4)
        assert t.kinds == pytest.approx(by_label(names, g, kind), rel=1e-4)
    order = sorted(tokens, key=lambda place: -abs(tokens[place][1]))
    assert [(t.sequence, t.position) for t in report.tokens] == order[:20]


def test_only_the_sequence_up_to_the_token_is_run_again(monkeypatch):
    model, batch = qwen(), make_batch()
    step, shapes = as_step(model, batch), []
    model.register_forward_hook(lambda m, a, k, o: shapes.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    confirm(step, [(0, 0, 3, 1), (0, 0, 0, 0), (0, 0, 0, 2)])
    assert shapes == [(1, P + 3), (1, P + 2)]  # tokens 0 and 2 of sequence 0 share one, then token 1 of sequence 3


def test_a_batch_whose_cut_is_not_understood_is_run_whole():
    def flipped(model, batch):  # columns in reverse: a cut from the right would cut the prompt
        ids = batch["reversed"].flip(1)
        return logps_fn(model, batch | {"input_ids": ids, "attention_mask": batch["seen"].flip(1)})

    model, batch = qwen(), make_batch()
    batch |= {"reversed": batch.pop("input_ids").flip(1), "seen": batch.pop("attention_mask").flip(1)}
    _, norm, tokens = reference(model, batch, flipped)
    step = as_step(model, batch, flipped)
    for f in confirm(step, [(0, 0, row, column) for row, column in tokens]):
        assert f.grad_norm == pytest.approx(length(tokens[f.row, f.column][0]), rel=1e-6)
    assert step.calls[0].whole


def test_everything_is_as_it_was():
    model, batch = qwen(torch.float32), planted(dtype=torch.float32)
    torch.manual_seed(3)
    (logps_fn(model, batch)[:, 0].sum()).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    noise = torch.get_rng_state()

    def drawing(model, batch):  # a function that uses up random numbers by itself
        torch.rand(3)
        return logps_fn(model, batch)

    for method in ("jvp", "finite_difference"):
        token_contributions(model, batch, drawing, objective(), method)
        assert torch.equal(torch.get_rng_state(), noise)
    for options in ({}, {"method": "search"}, {"differentiation": "finite_difference"}):
        GradLoc(quiet=True, **options).explain(model, batch, drawing, objective())
    for p, (value, grad) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, grad)
    assert torch.equal(torch.get_rng_state(), noise)


def test_wrong_arguments_are_named():
    model, batch = qwen(), make_batch()
    with pytest.raises(ValueError, match="method='exact' is unknown: use auto, jvp or finite_difference"):
        token_contributions(model, batch, logps_fn, objective(), "exact")
    zero = batch | {"advantages": torch.zeros(N, T, dtype=torch.float64)}
    with pytest.raises(ValueError, match="the gradient norm is 0.0: there are no contributions"):
        token_contributions(model, zero, logps_fn, objective())
    broken = batch | {"advantages": batch["advantages"] * math.nan}
    with pytest.raises(ValueError, match="the gradient norm is nan"):
        token_contributions(model, broken, logps_fn, objective())
    with pytest.raises(ValueError, match=r"logps_fn returned .*: GradLoc needs \(N, T\) log-probs"):
        token_contributions(model, batch, lambda m, b: logps_fn(m, b).sum(1), lambda logps, b: logps.sum())
    for options, message in (
        ({"method": "fast"}, "method='fast' is unknown: use 'directional' or 'search'"),
        ({"aggregation": "mean"}, "aggregation='mean' is unknown"),
        ({"confirm": -1}, "confirm=-1"),
        ({"budget": 0}, "budget=0"),
        ({"tolerance": 0}, "tolerance=0"),
    ):
        with pytest.raises(ValueError, match=message):
            GradLoc(**options)
    with pytest.raises(ValueError, match="aggregation='mean' is unknown"):
        coefficients([Call(None, {}, {"logps": torch.zeros(1, 2)}, torch.ones(1, 2))], "mean")


def test_a_gradient_of_zero_is_a_report_without_tokens():
    model, batch = qwen(), make_batch()
    batch["advantages"].zero_()
    report = GradLoc(quiet=True).explain(model, batch, logps_fn, objective())
    assert report.tokens == [] and "exactly zero" in report.note and report.grad_norm == 0
    check_report(report.to_dict())


# --- 3. kinds of model ------------------------------------------------------------------------------------------------


def test_mixture_of_experts_with_the_routers_own_loss():
    model, batch = qwen(moe=True), make_batch() | {"router": True}
    loss_of = objective(aux=3.0)
    names, norm, tokens = reference(model, batch, logps_and_entropy, loss_of)
    result = token_contributions(model, batch, logps_and_entropy, loss_of)
    assert result.certificate < 1e-3
    assert abs(result.remainder) > 0.01 * norm  # the routers' loss does matter here
    assert float(result.values.sum()) + result.remainder == pytest.approx(norm, rel=1e-3)
    assert_values(result, tokens, 1e-3)
    report = GradLoc(quiet=True).explain(model, batch, logps_and_entropy, loss_of)
    assert report.remainder == pytest.approx(result.remainder / norm, abs=1e-6)
    top = report.tokens[0]
    assert top.kinds == pytest.approx(by_label(names, tokens[top.sequence, top.position][0], kind), rel=1e-4)
    assert {"router", "experts"} <= set(top.kinds)


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_lora_with_dropout_replays_the_recorded_noise(method):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.4)
    model = get_peft_model(qwen(), config).double().train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    batch = make_batch()
    torch.manual_seed(9)
    names, norm, tokens = reference(model, batch)
    torch.manual_seed(9)
    result = token_contributions(model, batch, logps_fn, objective(), method)
    assert result.grad_norm == pytest.approx(norm, rel=1e-9) and all("lora" in name for name in names)
    assert_values(result, tokens, 1e-3)
    torch.manual_seed(9)
    step = as_step(model, batch)
    for f in confirm(step, [(0, 0, row, column) for row, column in tokens]):
        assert f.grad_norm == pytest.approx(length(tokens[f.row, f.column][0]), rel=1e-6)
    torch.manual_seed(10)
    assert reference(model, batch)[1] != pytest.approx(norm, rel=1e-2)  # other noise, other gradient


def test_gradient_checkpointing_and_autocast():
    model = qwen(torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = planted(dtype=torch.float32)
    norm = reference(model, batch)[1]
    result = token_contributions(model, batch, logps_fn, objective())
    assert result.certificate < 0.01 and float(result.values.sum()) == pytest.approx(norm, rel=0.01)
    for method in ("auto", "finite_difference"):
        result = token_contributions(model, batch, autocast_logps, objective(), method)
        assert result.certificate < 0.1
        assert divmod(int(result.values.abs().argmax()), T) == (1, 3)
    report = GradLoc(quiet=True, tolerance=0.1).explain(model, batch, autocast_logps, objective())
    assert (report.tokens[0].sequence, report.tokens[0].position) == (1, 3) and report.tokens[0].share > 0.8


def test_half_precision_weights_fall_back_to_search_and_say_so():
    model, batch = qwen(torch.bfloat16), planted(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradloc_ = GradLoc(quiet=True, differentiation="finite_difference", tolerance=1e-3)
        report = gradloc_.explain(model, batch, logps_fn, objective())
    assert report.method == "search" and "fell back to search" in report.note and report.certificate > 1e-3
    assert (report.tokens[0].sequence, report.tokens[0].position) == (1, 3)
    check_report(report.to_dict())


# --- 4. when the certificate misses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_wrong_weight_is_noticed_and_the_token_still_found(monkeypatch, how):
    arrived = Call._arrived
    monkeypatch.setattr(Call, "_arrived", lambda self, name, grad: arrived(self, name, 0.5 * grad))
    model, batch = qwen(), planted()
    report = GradLoc(quiet=True, aggregation=how).explain(model, batch, logps_fn, objective(how))
    assert report.certificate == pytest.approx(0.5, abs=1e-6) and report.method == "search"
    assert "only within 50 % (limit 5 %): fell back to search" in report.note
    assert (report.tokens[0].sequence, report.tokens[0].position) == (1, 3)
    assert report.search["probes"] > 0 and not report.search["exhausted"]


def test_a_loss_that_goes_around_the_log_probs_misses_the_certificate():
    model, batch = qwen(), planted()

    def with_decay(outputs, part):
        return objective()(outputs, part) + 3 * sum(p.square().sum() for p in model.parameters())

    result = token_contributions(model, batch, logps_fn, with_decay)
    share = float(result.values.sum()) / result.grad_norm
    assert result.certificate == pytest.approx(abs(1 - share)) and result.certificate > 0.1
    report = GradLoc(quiet=True).explain(model, batch, logps_fn, with_decay)
    assert report.method == "search" and "fell back" in report.note
    assert (report.tokens[0].sequence, report.tokens[0].position) == (1, 3)


class Wave(torch.nn.Module):
    """logps = sin(50 x.w) + offset: steep and curved, so that a step that is too long shows."""

    def __init__(self, offset=0.0, dtype=torch.float64, size=1e6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1e-6, 2e-6], dtype=dtype))
        self.large = torch.nn.Parameter(torch.full((1,), size, dtype=dtype))  # makes ||theta|| say nothing
        self.offset = offset

    def forward(self, batch):
        return (50 * batch["x"] @ self.weight).sin() + self.offset + 0 * self.large


def test_a_step_that_starts_far_too_long_is_shortened():
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 500.0, -500.0]], dtype=torch.float64)  # two cancel: ||g|| says nothing of slopes
    batch = {"x": x, "mask": torch.ones(1, 3), "advantages": advantages}
    tries = []

    class Counting(Wave):
        def forward(self, batch):
            tries.append(0)
            return super().forward(batch)

    model = Counting()
    loss_of = lambda logps, b: -(b["advantages"] * logps).sum()  # noqa: E731
    result = token_contributions(model, batch, lambda m, b: m(b), loss_of, "finite_difference")
    assert result.certificate < 0.05 and len(tries) > 3  # the first pair of forwards was not enough
    exact = token_contributions(model, batch, lambda m, b: m(b), loss_of, "jvp")
    assert float(result.values[0, 0]) == pytest.approx(float(exact.values[0, 0]), rel=0.05)


def test_a_step_that_starts_far_too_short_is_lengthened():
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    batch = {"x": x, "mask": torch.ones(1, 2), "advantages": torch.tensor([[1.0, 0.2]])}
    model = Wave(offset=8.0, dtype=torch.float32, size=1e-9)  # 1e-4 ||theta|| moves nothing that float32 can hold
    result = token_contributions(
        model, batch, lambda m, b: m(b), lambda logps, b: -(b["advantages"] * logps).sum(), "finite_difference"
    )
    assert result.certificate < 0.05
    assert float(result.values[0, 0]) == pytest.approx(50 / math.sqrt(1 + 0.2**2), rel=0.05)


# --- 5. search --------------------------------------------------------------------------------------------------------


class Linear(torch.nn.Module):
    """logps = x.w: token t's gradient is its weight times x_t, whatever the others do."""

    def __init__(self, dim):
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(dim, dtype=torch.float64))])

    def forward(self, batch):
        return batch["x"] @ self.layers[0]


def linear_batch(n=8, t=4, dim=64, seed=0):
    x = torch.randn(n, t, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": x / math.sqrt(dim), "mask": torch.ones(n, t)}


def weighted_sum(how="token_mean", tokens=None, sequences=None):
    def loss_of(logps, batch):
        mask = batch["mask"]
        count = (tokens or int(mask.sum())) if how == "token_mean" else (sequences or len(mask))
        return aggregate(logps, mask, how, count)

    return loss_of


def linear_step(batch, how="token_mean", **counts):
    batches = batch if isinstance(batch, list) else [batch]
    model = Linear(batches[0]["x"].shape[-1])
    counts = counts or {
        "tokens": sum(int(b["mask"].sum()) for b in batches), "sequences": sum(len(b["mask"]) for b in batches),
    }  # fmt: skip
    return as_step(model, batch, lambda m, b: m(b), weighted_sum(how, **counts))


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_thresholds_at_every_level_by_hand(how):
    batches = [linear_batch(4, 4), linear_batch(4, 4, seed=1)]
    for batch in batches:
        batch["mask"][1, 2:] = 0  # unequal lengths: 4, 2, 4, 4
    batches[1]["x"][3, 1] *= 400
    step = linear_step(batches, how)
    tau = 3.0
    result = search(step, coefficients(step.calls, how), tau)
    lengths = [4, 2, 4, 4]
    a = {
        "token_mean": [[1 / 28] * k for k in lengths], "seq_sum": [[1 / 8] * k for k in lengths],
        "seq_mean_token_mean": [[1 / (8 * k)] * k for k in lengths],
    }[how]  # fmt: skip
    squares = [sum(x * x for x in row) for row in a]
    expected = [
        ("step", 28, 2 * sum(squares)), ("micro-batch 0", 14, sum(squares)), ("micro-batch 1", 14, sum(squares)),
        ("sequences 0-1", 6, squares[0] + squares[1]), ("sequences 2-3", 8, squares[2] + squares[3]),
        ("sequences 2-2", 4, squares[2]), ("sequences 3-3", 4, squares[3]),
        ("tokens 0-1", 2, squares[3] / 2), ("tokens 2-3", 2, squares[3] / 2),
        ("tokens 0-0", 1, squares[3] / 4), ("tokens 1-1", 1, squares[3] / 4),
    ]  # fmt: skip
    assert [(t["level"], t["tokens"]) for t in result.trace] == [(level, tokens) for level, tokens, _ in expected]
    for item, (level, _, square) in zip(result.trace, expected, strict=True):
        assert item["threshold"] == pytest.approx(tau * math.sqrt(square), rel=1e-9), level
    (found,) = result.found
    assert (found.rank, found.call, found.row, found.column) == (0, 1, 3, 1) and not result.exhausted
    g = a[3][1] * batches[1]["x"][3, 1]
    assert found.grad_norm == pytest.approx(float(g.norm()), rel=1e-6)
    assert found.norms.tolist() == pytest.approx([float(g.norm())], rel=1e-6)
    assert found.share == pytest.approx(float(g @ step.gradient[0]) / step.norm**2, rel=1e-6)


def test_one_token_among_two_thousand_takes_few_probes():
    for row, column in ((0, 0), (17, 31), (63, 5)):
        batch = linear_batch(64, 32)
        batch["x"][row, column] *= 2000
        step = linear_step(batch)
        result = search(step, coefficients(step.calls, "token_mean"), tau=20.0)
        assert [(f.row, f.column) for f in result.found] == [(row, column)]
        assert result.probes <= 2 * math.log2(64 * 32) + 4


def test_two_tokens_in_different_micro_batches_past_a_decoy():
    batches = [linear_batch(8, 8, seed=s) for s in range(3)]
    batches[0]["x"][1, 2] *= 900
    batches[2]["x"][6, 7] *= 500
    # many equal tokens that point one way: together far above the bar, none of them alone
    batches[2]["x"][0:4] = 0
    batches[2]["x"][0:4, :, 0] = 45.0
    step = linear_step(batches)
    result = search(step, coefficients(step.calls, "token_mean"), tau=60.0)
    assert [(f.call, f.row, f.column) for f in result.found] == [(0, 1, 2), (2, 6, 7)]
    assert not result.exhausted
    norms = {t["level"]: t["norm"] for t in result.trace}
    assert norms["micro-batch 2"] > norms["micro-batch 0"] and norms["sequences 0-3"] > norms["sequences 4-7"]
    limits = {t["level"]: t["threshold"] for t in result.trace}
    assert norms["sequences 0-3"] > limits["sequences 0-3"]  # the larger branch was entered first, and left again
    assert [f.grad_norm for f in result.found] == sorted((f.grad_norm for f in result.found), reverse=True)


@pytest.mark.parametrize("budget", [1, 2, 5, 9])
def test_a_budget_that_ends_is_reported(budget):
    batch = linear_batch(16, 16)
    step = linear_step(batch)
    tau = 0.1 * step.norm / math.sqrt(float(coefficients(step.calls, "token_mean")[0].square().sum()))
    result = search(step, coefficients(step.calls, "token_mean"), tau, budget)
    assert result.exhausted and result.probes <= budget
    report = GradLoc(method="search", quiet=True, budget=budget).explain(
        Linear(64), batch, lambda m, b: m(b), weighted_sum()
    )
    assert report.search["exhausted"] and report.search["budget"] == budget and report.search["probes"] <= budget
    check_report(report.to_dict())


def test_nothing_above_the_bar_is_a_result():
    batch = linear_batch()
    step = linear_step(batch)
    result = search(step, coefficients(step.calls, "token_mean"), tau=1e3)
    assert result.found == [] and result.probes == 0 and not result.exhausted and len(result.trace) == 1
    # a spike without a token: all tokens grow together and point one way
    watcher = GradLoc(method="search", quiet=True, warmup=4)
    model = Linear(64)
    for i in range(9):
        part = linear_batch(seed=i)
        if i == 8:
            part["x"] = torch.zeros_like(part["x"])
            part["x"][:, :, 0] = 0.8
        backward(watcher, model, part)
        report = watcher.check(model)
    assert report.trigger["reason"] == "adaptive" and report.tokens == [] and not report.search["exhausted"]
    assert "no token stands out" in report.sentence
    check_report(report.to_dict())


def backward(watcher, model, batch, loss_of=None, scale=1.0):
    model.zero_grad()
    logps = watcher.watch(model, batch, lambda m, b: m(b))
    loss = scale * (loss_of or weighted_sum())(logps, batch)
    loss.backward()
    return loss


def test_the_papers_trigger_is_tau_over_root_n_and_starts_the_search():
    model, batch = Linear(64), linear_batch(8, 4)
    batch["mask"][5, 3] = 0
    batch["x"][4, 2] *= 300
    watcher = GradLoc(method="search", quiet=True, trigger="paper", tau=7.0)
    backward(watcher, model, batch)
    report = watcher.check(model)
    root = 7.0 / math.sqrt(31)
    assert report.trigger["reason"] == "paper" and report.trigger["threshold"] == pytest.approx(root, rel=1e-9)
    assert report.search["trace"][0]["threshold"] == pytest.approx(root, rel=1e-9)
    assert [(t.sequence, t.position) for t in report.tokens] == [(4, 2)]
    backward(watcher, model, linear_batch(8, 4))
    assert watcher.check(model) is None


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_search_and_directional_name_the_same_token(how, seed):
    draw = random.Random(seed)
    row = draw.randrange(N)
    batch = make_batch(seed=seed)
    column = draw.randrange(int(batch["completion_mask"][row].sum()))
    batch["advantages"][row, column] = -200.0
    model = qwen(seed=seed)
    reports = [
        GradLoc(method=method, aggregation=how, quiet=True).explain(model, batch, logps_fn, objective(how))
        for method in ("directional", "search")
    ]
    for report in reports:
        assert (report.tokens[0].sequence, report.tokens[0].position) == (row, column)
    assert reports[1].tokens[0].share == pytest.approx(reports[0].tokens[0].share, rel=1e-5)
    assert reports[1].tokens[0].grad_norm == pytest.approx(reports[0].tokens[0].grad_norm, rel=1e-6)
    assert reports[1].tokens[0].layers == pytest.approx(reports[0].tokens[0].layers, rel=1e-4)


def test_search_of_a_router_loss_does_not_take_the_sibling_for_the_rest():
    """A term that is no token's belongs to no half: the right half is not the whole minus the left."""
    model, batch = qwen(moe=True), planted() | {"router": True}
    step = as_step(model, batch, logps_and_entropy, objective(aux=3.0))
    _, _, tokens = reference(model, batch, logps_and_entropy, objective(aux=3.0))
    tau = 0.5 * step.norm / math.sqrt(float(coefficients(step.calls, "token_mean")[0].square().sum()))
    result = search(step, coefficients(step.calls, "token_mean"), tau)
    assert (result.found[0].row, result.found[0].column) == (1, 3)
    for f in result.found:
        assert f.grad_norm == pytest.approx(length(tokens[f.row, f.column][0]), rel=1e-6)


# --- 6. gradient accumulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("method", ["directional", "search"])
def test_gradient_accumulation_changes_only_the_numbering(how, method):
    model, whole = qwen(), planted(row=5, column=1, n=8)
    counts = {"tokens": int(whole["completion_mask"].sum()), "sequences": 8}
    answers = []
    for parts in (1, 2, 8):
        size = 8 // parts
        batches = [
            {k: v[i : i + size] for k, v in whole.items()} | counts for i in range(0, 8, size)
        ]  # fmt: skip
        report = GradLoc(method=method, aggregation=how, quiet=True).explain(model, batches, logps_fn, objective(how))
        report.tokens = [t for t in report.tokens if abs(t.share) > 1e-9]
        places = [(t.micro_batch * size + t.sequence, t.position) for t in report.tokens]
        assert places[0] == (5, 1)
        answers.append((report, dict(zip(places, report.tokens, strict=True))))
    first, tokens = answers[0]
    for report, others in answers[1:]:
        assert list(others) == list(tokens) and report.grad_norm == pytest.approx(first.grad_norm, rel=1e-9)
        assert report.cause == first.cause and report.num_tokens == first.num_tokens
        assert report.num_sequences == first.num_sequences == 8
        for place, token in tokens.items():
            assert others[place].share == pytest.approx(token.share, abs=1e-5)
            assert others[place].weight == pytest.approx(token.weight, rel=1e-9)
        assert others[5, 1].layers == pytest.approx(tokens[5, 1].layers, rel=1e-5)
        sums = [{(s["micro_batch"], s["sequence"]): s["share"] for s in r.sequences} for r in (first, report)]
        assert list(sums[1].values()) == pytest.approx(list(sums[0].values()), abs=1e-5)


# --- 7. trigger -------------------------------------------------------------------------------------------------------


def feed(trigger, norms, **options):
    return [trigger.decide(norm, **options)[0] for norm in norms]


def lognormal(count, seed=0, spread=0.3):
    draw = random.Random(seed)
    return [math.exp(draw.gauss(0, spread)) for _ in range(count)]


def test_adaptive_is_silent_on_two_thousand_ordinary_norms_and_finds_a_spike():
    for seed in range(5):
        trigger = Trigger()
        assert feed(trigger, lognormal(2000, seed)) == [None] * 2000
        assert trigger.suppressed == 0
        assert feed(trigger, [12.0]) == ["adaptive"]


def test_adaptive_threshold_by_hand_and_warm_up():
    trigger = Trigger(warmup=5, window=8, factor=2.0, z=6.0, cooldown=0)
    assert feed(trigger, [1.0, 1.1, 0.9, 1000.0]) == [None] * 4  # too early to say
    trigger = Trigger(warmup=5, window=8, factor=2.0, z=6.0, cooldown=0)
    norms = [1.0, 1.1, 0.9, 1.2, 0.8]
    feed(trigger, norms)
    logs = [math.log(n) for n in norms]
    spread = statistics.median(abs(x - statistics.median(logs)) for x in logs)
    expected = max(2.0, math.exp(6 * 1.4826 * spread))
    assert trigger.threshold() == pytest.approx(expected, rel=1e-12) and expected > 2.0
    assert trigger.decide(expected * 1.0001) == ("adaptive", pytest.approx(expected), 1.0)
    assert trigger.norms[-1] == pytest.approx(expected)  # enters as the threshold
    constant = Trigger(warmup=4, factor=3.0)
    assert feed(constant, [2.0] * 8) == [None] * 8 and constant.threshold() == pytest.approx(6.0)
    assert feed(constant, [5.9, 6.1]) == [None, "adaptive"]
    short = Trigger(warmup=2, window=4, factor=2.0)
    feed(short, [1.0] * 4 + [1.5] * 4)
    assert list(short.norms) == [1.5] * 4


def test_a_collapse_lifts_the_bar_slowly_and_a_new_level_is_forgiven():
    trigger = Trigger(cooldown=0)
    feed(trigger, lognormal(64))
    bar = trigger.threshold()
    assert feed(trigger, [1e6] * 10) == ["adaptive"] * 10
    assert trigger.threshold() < 3 * bar
    trigger = Trigger(cooldown=0)
    feed(trigger, [1.0] * 64)
    reasons = feed(trigger, [5.0] * 300)
    assert reasons[0] == "adaptive" and reasons[-200:] == [None] * 200
    assert trigger.threshold() == pytest.approx(15.0)


def test_steps_without_gradient_are_left_out():
    trigger = Trigger(warmup=4)
    feed(trigger, [1.0] * 10)
    assert feed(trigger, [0.0] * 200) == [None] * 200
    assert trigger.threshold() == pytest.approx(3.0) and feed(trigger, [4.0]) == ["adaptive"]
    assert feed(Trigger(every_n_steps=1), [0.0]) == [None]


def test_not_finite_always_triggers_once_and_spikes_have_their_own_cooldown():
    trigger = Trigger(cooldown=3, warmup=4)
    assert trigger.decide(math.nan) == ("non-finite", None, None)  # no warm-up needed
    trigger = Trigger(cooldown=3, warmup=4)
    feed(trigger, [1.0] * 8)
    assert feed(trigger, [10.0, 10.0]) == ["adaptive", None] and trigger.suppressed == 1
    assert feed(trigger, [math.inf]) == ["non-finite"]  # inside the cooldown of spikes
    assert trigger.decide(1.0, finite=False)[0] is None and trigger.suppressed == 2
    assert feed(trigger, [1.0, 1.0, 10.0]) == [None, None, "adaptive"]
    assert feed(trigger, [math.nan]) == ["non-finite"]
    assert all(math.isfinite(n) for n in trigger.norms)


def test_cooldown_counts_steps():
    trigger = Trigger(cooldown=3, warmup=4, window=64)
    feed(trigger, [1.0] * 40)
    assert feed(trigger, [10.0] * 9) == ["adaptive", None, None, None] * 2 + ["adaptive"]
    assert trigger.suppressed == 6


def test_every_n_steps():
    trigger = Trigger(every_n_steps=3)
    assert feed(trigger, [1.0] * 7) == [None, None, "every_n_steps"] * 2 + [None]
    assert feed(Trigger(every_n_steps=1, warmup=2), [1.0, 1.0, 9.0, math.nan]) == [
        "every_n_steps", "every_n_steps", "adaptive", "non-finite",
    ]  # fmt: skip


def test_paper_threshold():
    trigger = Trigger("paper", tau=640.0, cooldown=0)
    assert trigger.threshold(1 / 6400) == pytest.approx(8.0)
    assert feed(trigger, [7.9, 8.1], squares=1 / 6400) == [None, "paper"]


def test_state_round_trip():
    norms = [*lognormal(30), 50.0, 60.0, math.nan, *lognormal(20, 1), 40.0, 0.0, 9.0]
    for cut in (5, 31, 33, 40):
        whole = Trigger(warmup=8, cooldown=4, every_n_steps=7)
        expected = feed(whole, norms)
        first = Trigger(warmup=8, cooldown=4, every_n_steps=7)
        reasons = feed(first, norms[:cut])
        second = Trigger(warmup=8, cooldown=4, every_n_steps=7)
        second.load_state_dict(first.state_dict())
        first.norms.clear()  # the state is a copy
        assert reasons + feed(second, norms[cut:]) == expected
        assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trigger": "fixed"}, "trigger='fixed' is unknown"),
        ({"trigger": "paper"}, "trigger='paper' needs tau > 0"),
        ({"trigger": "paper", "tau": -1.0}, "got tau=-1.0"),
        ({"window": 3}, "window=3"),
        ({"warmup": 1}, "warmup=1"),
        ({"window": 8, "warmup": 9}, "warmup=9"),
        ({"factor": 1.0}, "factor=1.0"),
        ({"z": 0}, "z=0"),
        ({"cooldown": -1}, "cooldown=-1"),
        ({"every_n_steps": -2}, "every_n_steps=-2"),
    ],
)
def test_bad_options_of_the_trigger_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Trigger(**options)
    with pytest.raises(ValueError, match=message):
        GradLoc(**options)


def test_check_without_a_recorded_call_warns_and_goes_on():
    model, batch = Linear(8), linear_batch(2, 2, dim=8)
    weighted_sum()(model(batch), batch).backward()
    watcher = GradLoc(quiet=True, every_n_steps=1)
    with pytest.warns(UserWarning, match="the model calls recorded by rank are 0.* use GradLoc.watch"):
        assert watcher.check(model) is None


# --- 8. values that are not finite ------------------------------------------------------------------------------------


def icepop(outputs, batch):
    mask, advantages, logps = batch["completion_mask"], batch["advantages"], outputs
    weight = token_clip(logps, logps, batch["rollout_logps"], "icepop")
    return aggregate(weighted_logp_loss(weight, advantages, logps), mask, "token_mean", int(mask.sum()))


def explain_broken(model, batch, loss_of=None):
    """The report of a broken step, with everything else found unchanged."""
    rollout = {"rollout_logps": logps_fn(model, batch).detach()} | batch
    before = [p.detach().clone() for p in model.parameters()]
    noise = torch.get_rng_state()
    report = GradLoc(quiet=True).explain(model, rollout, logps_fn, loss_of or icepop)
    assert all(torch.equal(p.nan_to_num(7), b.nan_to_num(7)) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), noise)
    assert report.cause == "N" and report.trigger["reason"] == "non-finite" and report.method == "non-finite"
    check_report(report.to_dict())
    assert report.offender["rank"] == 0
    return report, report.offender


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_rollout_log_prob_is_named(value):
    model, batch = qwen(), make_batch()
    rollout = logps_fn(model, batch).detach()
    rollout[3, 4] = value
    rollout[0, 0] = value
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["completion_mask"][0, 0] = 0  # a broken value that does not count is no offender
    report, offender = explain_broken(model, batch | {"rollout_logps": rollout}, broken_ratio)
    assert offender["where"] == "loss" and offender["tensor"] == "rollout_logps" and offender["module"] is None
    assert (offender["row"], offender["column"]) == (3, 4)
    assert [(t.sequence, t.position) for t in report.tokens] == [(3, 4)]
    assert "rollout_logps is not finite there" in report.sentence and "token 4" in report.sentence


def broken_ratio(logps, batch):
    mask = batch["completion_mask"].bool()
    weight = torch.where(mask, torch.exp(batch["rollout_logps"] - logps.detach()), 0.0)  # no clamp: infinity stays
    return (-weight * batch["advantages"] * logps).sum() / int(mask.sum())


@pytest.mark.parametrize("per_token", [True, False])
def test_an_infinite_advantage_is_named(per_token):
    model, batch = qwen(), make_batch()
    if per_token:
        batch["advantages"][1, 2] = math.inf
    else:
        batch["advantages"] = batch["advantages"][:, :1].clone()
        batch["advantages"][1] = -math.inf
    _, offender = explain_broken(model, batch)
    assert offender["where"] == "loss" and offender["tensor"] == "advantages"
    assert (offender["row"], offender["column"]) == (1, 2 if per_token else 0)


@pytest.mark.parametrize("module", ["model.layers.1.mlp", "model.layers.0.self_attn.v_proj", "lm_head"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 1), (3, 4)])
def test_a_module_whose_forward_breaks_is_named(module, row, column):
    model, batch = qwen(), make_batch()
    position = P - 1 + column  # the hidden state that predicts completion token `column`

    def poison(module, args, output):
        first = batch["input_ids"][row]
        here = [i for i, ids in enumerate(seen[-1]) if torch.equal(ids, first[: len(ids)])]
        output = output.clone()
        for i in here:
            output[i, position if output.shape[1] > position else -1] = math.nan
        return output

    seen = []
    model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"]), with_kwargs=True)
    handle = model.get_submodule(module).register_forward_hook(poison)
    rollout = torch.zeros(N, T, dtype=torch.float64)
    report, offender = explain_broken(model, batch | {"rollout_logps": rollout})
    assert offender["where"] == "forward" and offender["module"] == module
    assert (offender["row"], offender["column"]) == (row, column)
    assert [(t.sequence, t.position) for t in report.tokens] == [(row, column)]
    assert f"module {module} is the first with a non-finite output from finite inputs" in report.sentence
    handle.remove()


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row, position):
        ctx.place = row, position
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        row, position = ctx.place
        grad = grad.clone()
        if grad.shape[0] > row and grad.shape[1] > position:
            grad[row, position, 0] = math.inf
        return grad, None, None


@pytest.mark.parametrize("module", ["model.layers.1.mlp", "model.layers.0.mlp.down_proj", "model.layers.0"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 3)])
def test_a_module_whose_backward_breaks_is_named(module, row, column):
    model, batch = qwen(), make_batch()
    broken = model.get_submodule(module)
    forward = broken.forward

    def patched(x, *args, **kwargs):
        return forward(BreaksBackward.apply(x, row, P - 1 + column), *args, **kwargs)

    broken.forward = patched
    report, offender = explain_broken(model, batch, objective())
    assert offender["where"] == "backward" and offender["module"] == module
    assert (offender["row"], offender["column"]) == (row, column)
    assert "backward makes a non-finite gradient" in report.sentence


def test_attention_spreads_a_broken_gradient_over_its_sequence_and_no_token_is_blamed():
    model, batch = qwen(), make_batch()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def patched(*args, **kwargs):
        output, rest = forward(*args, **kwargs)
        return BreaksBackward.apply(output, 3, P - 1 + 2), rest

    attention.forward = patched
    report, offender = explain_broken(model, batch, objective())
    assert offender["where"] == "backward" and offender["module"] == "model.layers.1.self_attn"
    assert (offender["row"], offender["column"], offender["position"]) == (3, None, None) and report.tokens == []
    assert report.sentence.endswith("somewhere in sequence 3 on rank 0")


def test_a_broken_weight_is_named():
    model, batch = qwen(), make_batch()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = math.nan
    report, offender = explain_broken(model, batch)
    assert offender["where"] == "weights" and offender["tensor"] == "model.layers.1.mlp.up_proj.weight"
    assert report.tokens == [] and "up_proj.weight are already not finite" in report.sentence


def test_a_broken_value_in_the_second_micro_batch():
    model = qwen()
    parts = [make_batch(seed=1), make_batch(seed=2)]
    parts = [p | {"rollout_logps": logps_fn(model, p).detach()} for p in parts]
    parts[1]["rollout_logps"][2, 1] = math.nan
    report = GradLoc(quiet=True).explain(model, parts, logps_fn, icepop)
    place = {k: report.offender[k] for k in ("where", "tensor", "call", "row", "column")}
    assert place == {"where": "loss", "tensor": "rollout_logps", "call": 1, "row": 2, "column": 1}
    assert (report.tokens[0].micro_batch, report.tokens[0].sequence, report.tokens[0].position) == (1, 2, 1)


# --- 9. causes --------------------------------------------------------------------------------------------------------


def tokens_with(*pairs):
    return [{"share": share, "omega": omega} for share, omega in pairs]


CALM = [{"share": 0.9, "rho": 1.001, "log_rho_z": 0.5}]
LEVEL = {name: {"norm": 1.0, "median": 1.0, "ratio": 1.0} for name in ("layer 0", "layer 1", "layer 2")}


def test_token_mismatch():
    cause, evidence, missing = diagnose(tokens_with((0.8, 3e4), (0.1, 1.0)), CALM, LEVEL)
    assert cause == "A.1" and missing == []
    assert "1 of the 2 listed tokens" in evidence[0] and "89 %" in evidence[0] and "3e+04" in evidence[0]
    assert diagnose(tokens_with((-0.8, 0.49), (0.1, 1.0)), CALM, LEVEL)[0] == "A.1"  # a negative share counts as much
    assert diagnose(tokens_with((0.8, 5.01), (0.1, 1.0)), CALM, LEVEL)[0] == "A.1"
    for inside in (0.51, 4.99):
        assert diagnose(tokens_with((0.8, inside)), CALM, LEVEL)[0] == "unclassified"
    cause, evidence, _ = diagnose(tokens_with((0.3, 9.0), (0.7, 1.0)), CALM, LEVEL)
    assert cause == "unclassified" and "only 30 %" in evidence[0]
    assert diagnose(tokens_with((0.8, 3.0)), CALM, LEVEL, token_band=(0.5, 2.0))[0] == "A.1"


def test_sequence_mismatch():
    drift = [{"share": 0.8, "rho": 1.02, "log_rho_z": 9.0}, {"share": 0.1, "rho": 1.0, "log_rho_z": 0.1}]
    cause, evidence, _ = diagnose(tokens_with((0.1, 1.02)), drift, LEVEL)
    assert (
        cause == "A.2" and "1.02" in evidence[-1] and "9 robust deviations" in evidence[-1] and "89 %" in evidence[-1]
    )
    usual = [drift[0] | {"log_rho_z": 1.0}, drift[1]]  # every sequence drifts: it does not make this one special
    cause, evidence, _ = diagnose(tokens_with((0.1, 1.02)), usual, LEVEL)
    assert cause == "unclassified" and "1 of 2 listed sequences" in evidence[1]
    assert diagnose(tokens_with((0.1, 1.0)), [drift[0] | {"log_rho_z": None}], LEVEL)[0] == "A.2"
    small = [drift[0] | {"share": 0.1}, drift[1] | {"share": -0.8}]
    assert diagnose(tokens_with((0.1, 1.0)), small, LEVEL)[0] == "unclassified"
    assert diagnose(tokens_with((0.9, 20.0)), drift, LEVEL)[0] == "A.1"  # the token explains it: not the sequence
    assert diagnose(tokens_with((0.1, 1.0)), drift, LEVEL, seq_band=(0.9, 1.1))[0] == "unclassified"


def test_layers():
    def ratios(**values):
        return {f"layer {k[1:]}": {"norm": v, "median": 1.0, "ratio": v} for k, v in values.items()}

    cause, evidence, _ = diagnose(tokens_with((0.5, 1.0)), CALM, ratios(l0=40.0, l1=1.1, l2=0.9))
    assert (
        cause == "B" and "layer 0 is at 40.0 times" in evidence[-1] and "median layer is at 1.1 times" in evidence[-1]
    )
    cause, evidence, _ = diagnose(tokens_with((0.5, 1.0)), CALM, ratios(l0=40.0, l1=38.0, l2=39.0))
    assert cause == "unclassified" and "layers move together" in evidence[-1]
    assert diagnose(tokens_with((0.5, 1.0)), CALM, ratios(l0=4.9, l1=1.0, l2=1.0))[0] == "unclassified"
    assert diagnose(tokens_with((0.5, 1.0)), CALM, ratios(l0=5.1, l1=1.0, l2=1.0))[0] == "B"


def test_what_cannot_be_judged_is_named():
    none = {name: value | {"median": None, "ratio": None} for name, value in LEVEL.items()}
    sequences = [{"share": 1.0, "rho": None, "log_rho_z": None}]
    cause, _, missing = diagnose(tokens_with((0.9, None)), sequences, none)
    assert cause == "unclassified" and len(missing) == 2
    assert missing[0].startswith("A.1 and A.2") and "rollout_logps" in missing[0] and missing[1].startswith("B:")
    spread = {name: value | {"ratio": 30.0 if name == "layer 1" else 1.0} for name, value in LEVEL.items()}
    cause, _, missing = diagnose(tokens_with((0.9, None)), sequences, spread)
    assert cause == "B" and len(missing) == 1  # what can be judged still is


def explode(module, args, output):
    """The output's value, 300 times the gradient of this module's weight, and no more for what lies before it."""
    extra = torch.nn.functional.linear(args[0].detach(), module.weight)
    return output + 300 * (extra - extra.detach())


@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        ("token", "A.1", "--token_clip icepop"),
        ("sequence", "A.2", "--seq_clip_low 0.995 --seq_clip_high 1.005"),
        ("layer", "B", "--layer_clip"),
        ("nothing", "unclassified", ""),
    ],
)
def test_causes_of_planted_faults(fault, cause, remedy):
    """Ten ordinary steps, then one with the fault: the report of a watched loop names it."""
    model, watcher = qwen(), GradLoc(quiet=True, warmup=4)
    for i in range(11):
        batch = make_batch(n=8, seed=i)
        batch["rollout_logps"] = logps_fn(model, batch).detach() + 1e-4 * batch["drift"]
        if i == 10:
            if fault == "token":
                batch["rollout_logps"][5, 1] -= 9.0
                batch["advantages"][5, 1] = 3.0
            elif fault == "sequence":
                batch["rollout_logps"][6] -= 0.02
                batch["advantages"][6] *= 300.0
            elif fault == "layer":
                model.model.layers[1].mlp.up_proj.register_forward_hook(explode)
            else:
                batch["advantages"] *= 30.0
        model.zero_grad()
        logps = watcher.watch(model, batch, logps_fn)
        weight = torch.exp(logps.detach() - batch["rollout_logps"])
        mask = batch["completion_mask"]
        aggregate(-weight * batch["advantages"] * logps, mask, "token_mean", int(mask.sum())).backward()
        report = watcher.check(model)
        assert (report is not None) == (i == 10), i
    if fault == "layer":
        assert report.layers["layer 1"]["ratio"] > 10 > 3 > report.layers["layer 0"]["ratio"]
        assert report.certificate < 1e-6 and "layer 1 at" in report.sentence
    assert report.cause == cause and report.remedy == remedy
    assert report.trigger["reason"] == "adaptive" and report.trigger["threshold"] < report.grad_norm
    assert report.sentence.endswith(f": {remedy}" if remedy else "no known cause")
    check_report(report.to_dict())
    if fault == "token":
        top = report.tokens[0]
        assert (top.sequence, top.position) == (5, 1) and top.omega == pytest.approx(math.exp(9.0), rel=1e-2)
        assert top.advantage == pytest.approx(3.0) and top.weight == pytest.approx(
            -3.0 * top.omega / report.num_tokens, rel=1e-6
        )
    if fault == "sequence":
        assert report.sequences[0]["sequence"] == 6
        assert report.sequences[0]["rho"] == pytest.approx(math.exp(0.02), rel=1e-3)


# --- the report's numbers ---------------------------------------------------------------------------------------------


def test_a_report_carries_the_batchs_own_numbers():
    model, batch = qwen(), planted()
    logps = logps_fn(model, batch).detach()
    batch |= {
        "old_logps": logps + 0.25, "rollout_logps": logps - 0.5, "ref_logps": logps + 1.0,
        "rewards": torch.arange(4.0), "version": torch.tensor([5, 6, 7, 8]),
    }  # fmt: skip
    report = GradLoc(quiet=True).explain(model, batch, logps_fn, objective())
    top = report.tokens[0]
    assert (top.sequence, top.position, top.token_id) == (1, 3, int(batch["input_ids"][1, P + 3]))
    assert top.logp == pytest.approx(float(logps[1, 3])) and top.reward == 1.0 and top.version == 6
    assert top.ratio == pytest.approx(math.exp(-0.25)) and top.mismatch == pytest.approx(math.exp(0.75))
    assert top.omega == pytest.approx(math.exp(0.5)) and top.rho == pytest.approx(math.exp(0.5))
    assert top.ref_logp == pytest.approx(float(logps[1, 3]) + 1) and top.advantage == 300.0
    mask = batch["completion_mask"]
    assert report.num_tokens == int(mask.sum()) and report.num_sequences == N
    (sequence,) = [s for s in report.sequences if s["sequence"] == 1]
    assert sequence["length"] == int(mask[1].sum()) == len(sequence["tokens"]) and sequence["first_position"] == 0
    assert sequence["shares"][3] == pytest.approx(top.share) and sequence["share"] == pytest.approx(
        sum(sequence["shares"])
    )
    prompt = batch["input_ids"][1, :P][batch["attention_mask"][1, :P] != 0].tolist()
    again = batch | {"input_ids": batch["input_ids"].clone()}
    again["input_ids"][1, P:] = 2  # another completion, the same prompt
    other = GradLoc(quiet=True).explain(model, again, logps_fn, objective())
    assert other.tokens[0].prompt_id == top.prompt_id and len(prompt) == P - 1
    assert len({t.prompt_id for t in report.tokens}) == len({t.sequence for t in report.tokens})
    assert report.top10_share == pytest.approx(sum(abs(t.share) for t in report.tokens[:10]))
    assert report.top1_share == abs(top.share)


def test_search_shares_lie_at_their_own_tokens():
    model, batch = qwen(), planted(row=0, column=4)
    report = GradLoc(quiet=True, method="search").explain(model, batch, logps_fn, objective())
    (sequence,) = [s for s in report.sequences if s["sequence"] == 0]
    assert sequence["shares"][4] == report.tokens[0].share
    assert sum(1 for share in sequence["shares"] if share) == sum(t.sequence == 0 for t in report.tokens)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plain_loop_is_watched_without_a_trace(accumulation):
    """watch and check leave the training bit for bit, and see what explain sees."""

    def train(watcher):
        model = qwen(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(0)
        reports = []
        for step in range(6):
            for part in range(accumulation):
                batch = make_batch(seed=10 * step + part, dtype=torch.float32)
                if step == 4 and part == accumulation - 1:
                    batch["advantages"][1, 2] = 400.0
                logps = logps_fn(model, batch) if watcher is None else watcher.watch(model, batch, logps_fn)
                (objective()(logps, batch) / accumulation).backward()
            if watcher is not None:
                reports.append(watcher.check(model))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), reports

    plain, noise, _ = train(None)
    for options in ({}, {"method": "search"}, {"differentiation": "finite_difference"}):
        watched, after, reports = train(GradLoc(quiet=True, warmup=4, every_n_steps=2, **options))
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)) and torch.equal(noise, after)
        assert [r is not None for r in reports] == [False, True, False, True, True, True]
        assert [r.trigger["reason"] for r in reports[3:]] == ["every_n_steps", "adaptive", "every_n_steps"]
        top = reports[4].tokens[0]
        assert (top.micro_batch, top.sequence, top.position) == (accumulation - 1, 1, 2)
        assert [r.step for r in reports if r] == [2, 4, 5, 6] and reports[3].remedy == ""
        assert reports[4].sentence.startswith("step 5: ") and "no spike, looked at in turn" in reports[3].sentence


def test_a_loss_in_two_backwards_counts_twice():
    model, batch = qwen(), planted()
    whole = GradLoc(quiet=True).explain(model, batch, logps_fn, objective(beta=1.0))
    watcher = GradLoc(quiet=True, every_n_steps=1)
    logps = watcher.watch(model, batch, logps_fn)
    first = objective()(logps, batch)
    first.backward(retain_graph=True)
    (objective(beta=1.0)(logps, batch) - objective()(logps, batch)).backward()
    report = watcher.check(model)
    assert report.certificate < 1e-6 and report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    assert [t.share for t in report.tokens] == pytest.approx([t.share for t in whole.tokens], abs=1e-6)


def test_deterministic():
    model, batch = qwen(torch.float32), planted(dtype=torch.float32)
    reports = [GradLoc(quiet=True).explain(model, batch, logps_fn, objective()).to_dict() for _ in range(2)]
    for report in reports:
        del report["seconds"], report["time"]
    assert reports[0] == reports[1] and reports[0]["tokens"]


def test_a_layer_is_named_where_no_token_stands_out():
    """A factor that a layer's gradient got after the backward is no token's: nothing is found, the layer still is."""
    model, watcher = qwen(), GradLoc(quiet=True, warmup=4)
    for i in range(10):
        batch = make_batch(seed=i)
        model.zero_grad()
        objective()(watcher.watch(model, batch, logps_fn), batch).backward()
        if i == 9:
            for p in model.model.layers[1].parameters():
                p.grad *= 1e4
        report = watcher.check(model)
    assert report.method == "search" and report.tokens == [] and report.cause == "B"
    assert "no token stands out" in report.not_judged[0] and "no token stands out" in report.sentence
    assert report.sentence.endswith("(layer heterogeneity): --layer_clip")
    check_report(report.to_dict())


def test_methods_know_only_their_names():
    assert set(gradloc.CAUSES) == set(gradloc_causes.REMEDIES)
    assert gradloc_methods.world_size() == 1 and gradloc_methods.rank() == 0


def spike_evidence(omega=1.0, rho=1.0, z=0.0, furthest=1.0):
    tokens = [{"share": 0.9, "omega": omega}, {"share": 0.1, "omega": 1.0}]
    sequences = [{"share": 0.9, "rho": rho, "log_rho_z": z}, {"share": 0.1, "rho": 1.0, "log_rho_z": 0.1}]
    layers = {f"layer {i}": {"norm": 1.0, "median": 1.0, "ratio": furthest if i == 1 else 1.2} for i in range(4)}
    return tokens, sequences, layers


@pytest.mark.parametrize(
    "evidence, cause",
    [
        ({"rho": 1.03, "z": 9.0}, "A.2"),
        ({"rho": 1.03, "z": 9.0, "furthest": 100.0}, "B"),  # a factor of 1.03 does not make one layer explode
        ({"omega": 6.0, "furthest": 100.0}, "B"),
        ({"omega": 1e4, "furthest": 100.0}, "A.1"),
        ({"omega": 6.0}, "A.1"),
        ({"furthest": 6.0}, "B"),
        ({"furthest": 4.0}, "unclassified"),
    ],
)
def test_a_layer_far_out_alone_outweighs_a_small_mismatch(evidence, cause):
    assert diagnose(*spike_evidence(**evidence))[0] == cause


@pytest.mark.parametrize(
    "token, cause",
    [
        ({"omega": 1.5, "ratio": 9.5, "boost": 9.5}, "A.1"),  # r and pi_old/mu cancel in omega; the loss takes r
        ({"omega": 1.5, "ratio": 9.5, "boost": 1.0}, "unclassified"),  # a loss on omega does not
        ({"omega": 1.5, "ratio": 9.5}, "unclassified"),
        ({"omega": None, "ratio": 9.5, "boost": 9.5}, "A.1"),
        ({"omega": 1.5, "ratio": 1.5, "boost": 9.5}, "unclassified"),
    ],
)
def test_a_stale_token_that_the_loss_weighs_by_its_ratio_is_a_token_mismatch(token, cause):
    _, sequences, layers = spike_evidence()
    found, evidence, _ = diagnose([token | {"share": 0.9}], sequences, layers)
    assert found == cause
    assert any("pi_theta/pi_old = 9.5" in line for line in evidence) == (cause == "A.1")


@pytest.mark.parametrize(
    "ratio, mismatch, name, remedy",
    [
        (9.0, 0.9, "stale token: the policy has moved since sampling",
         "fewer updates a sampling, or a smaller --learning_rate, or --token_clip icepop"),
        (0.9, 9.0, "token-level mismatch, training against sampling", "--token_clip icepop"),
        (None, None, "token-level mismatch, training against sampling", "--token_clip icepop"),
    ],
)  # fmt: skip
def test_name_remedy_evidence_and_sentence_of_a_token_agree(ratio, mismatch, name, remedy):
    """The token that decides is the largest of those outside the band, not the largest of all."""

    def token(position, share, omega, ratio, mismatch):
        return gradloc.TokenReport(0, 0, 0, position, 7, "x", share, omega=omega, ratio=ratio, mismatch=mismatch)

    tokens = [token(0, 0.45, 1.0, 30.0, 1 / 30), token(1, 0.4, 8.1, ratio, mismatch), token(2, 0.1, 8.1, 8.1, 1.0)]
    report = gradloc.SpikeReport(3, "", {"reason": "adaptive"}, 5.0, "", "", tokens)
    gradloc_causes.diagnose_into(report, (0.5, 5.0), (0.995, 1.005))
    report.cause_name = gradloc_causes.cause_name(report, (0.5, 5.0))
    text, is_stale = gradloc_causes.sentence(report, (0.5, 5.0), (0.995, 1.005)), name.startswith("stale")
    assert (report.cause, report.cause_name, report.remedy) == ("A.1", name, remedy)
    assert text.endswith(f"({'stale token' if is_stale else 'token mismatch'}): {remedy}")
    treats = [line for line in report.evidence if "it is stale" in line]
    assert bool(treats) == is_stale
    if is_stale:  # the same three, in the same order
        for words in (treats[0], remedy):
            places = [words.index(way) for way in ("fewer updates", "learning")]
            assert places == sorted(places) and "clip" in words[places[1] :]
    assert report.to_dict()["cause_name"] == name
    gradloc_causes.diagnose_into(report, (0.5, 5.0), (0.995, 1.005), "grpo_tokenclip.py")
    assert report.remedy == f"{remedy} of grpo_tokenclip.py"


def test_what_was_not_judged_is_not_called_unknown():
    report = gradloc.SpikeReport(3, "", {"reason": "adaptive"}, 5.0, "", "")
    gradloc_causes.diagnose_into(report, (0.5, 5.0), (0.995, 1.005))
    assert gradloc_causes.cause_name(report, (0.5, 5.0)) == "cause not judged" and report.remedy == ""
    assert "cause not judged" in gradloc_causes.sentence(report, (0.5, 5.0), (0.995, 1.005))
    report.not_judged = []
    assert gradloc_causes.cause_name(report, (0.5, 5.0)) == "no known cause"


# --- what reviewers broke ---------------------------------------------------------------------------------------------


class Plain(torch.autograd.Function):
    """An operation without a forward derivative, as fused kernels are."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_an_operation_without_forward_mode_falls_back_to_finite_differences():
    model = qwen()
    model.model.norm.register_forward_hook(lambda module, args, output: Plain.apply(output))
    report = GradLoc(quiet=True).explain(model, make_batch(), logps_fn, objective())
    assert report.method == "directional: finite difference" and report.certificate < 0.05


def test_a_batch_that_cannot_be_cut_is_replayed_whole():
    def with_mask(model, batch):
        t = batch["completion_mask"].shape[1]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["mask4"]).logits[:, -t - 1 : -1]
        return logits.log_softmax(-1).gather(2, batch["input_ids"][:, -t:, None]).squeeze(2)

    model, batch = qwen(), make_batch()
    n, s = batch["input_ids"].shape
    batch["mask4"] = torch.ones(s, s, dtype=torch.bool).tril()[None, None].expand(n, 1, s, s)
    report = GradLoc(quiet=True).explain(model, batch, with_mask, objective())
    assert report.tokens[0].grad_norm is not None and report.certificate < 0.05


def test_a_loss_that_edits_log_probs_in_place_is_followed():
    def in_place(logps, batch):
        logps.mul_(batch["completion_mask"])
        return -(logps * batch["advantages"]).sum()

    model, batch = qwen(), make_batch()
    plain = token_contributions(
        model, batch, logps_fn, lambda x, b: -(x * b["completion_mask"] * b["advantages"]).sum()
    )
    edited = token_contributions(model, batch, logps_fn, in_place)
    assert edited.certificate < 1e-3 and torch.allclose(plain.values, edited.values)
    watcher = GradLoc(quiet=True, every_n_steps=1)
    in_place(watcher.watch(model, batch, logps_fn), batch).backward()
    assert watcher.check(model).certificate < 0.05


def test_random_numbers_outside_dropout_modules_are_replayed():
    """HF's attention_dropout is a function, NEFTune a hook: no module says that the forward is random."""
    model, batch = qwen().train(), make_batch()
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: out + 0.3 * torch.randn_like(out))
    torch.manual_seed(7)
    report = GradLoc(quiet=True, method="search").explain(model, batch, logps_fn, objective())
    torch.manual_seed(7)
    again = token_contributions(model, batch, logps_fn, objective())
    assert again.certificate < 0.05 and report.note == ""


def test_a_failure_inside_is_contained_in_training_and_raised_in_a_notebook():
    class Broken:
        def decode(self, ids):
            raise ZeroDivisionError("no text")

    model, batch = qwen(), make_batch()
    watcher = GradLoc(quiet=True, every_n_steps=1, tokenizer=Broken())
    objective()(watcher.watch(model, batch, logps_fn), batch).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="could not look into it .ZeroDivisionError: no text.; training goes on"):
        assert watcher.check(model) is None
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(ZeroDivisionError):
        watcher.explain(model, batch, logps_fn, objective())


def test_buffers_that_count_forwards_are_put_back():
    model, batch = qwen(), make_batch()
    model.register_buffer("calls", torch.zeros(()))

    def count(module, args):
        module.calls.add_(1)

    model.register_forward_pre_hook(count)
    watcher = GradLoc(quiet=True, every_n_steps=1)
    objective()(watcher.watch(model, batch, logps_fn), batch).backward()
    assert watcher.check(model) is not None and model.calls == 1


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model": "frozen"}, "no trainable parameter"),
        ({"batch": torch.ones(2, 3)}, "batch holds Tensor: give a dict"),
        ({"batch": [torch.ones(2, 3)]}, "batch holds Tensor: give a dict"),
        ({"objective": lambda logps, batch: 1.0}, "objective_fn returned float"),
        ({"objective": lambda logps, batch: logps}, "must return the scalar loss"),
        ({"objective": lambda logps, batch: logps.detach().sum()}, "value without gradient"),
        (
            {"objective": lambda logps, batch: torch.ones((), requires_grad=True) * 2},
            "does not depend on the log-probs",
        ),
    ],
)
def test_wrong_use_of_explain_is_one_sentence(change, sentence):
    model = qwen()
    if "model" in change:
        model.requires_grad_(False)
    with pytest.raises(ValueError, match=sentence):
        GradLoc(quiet=True).explain(
            model, change.get("batch", make_batch()), logps_fn, change.get("objective", objective())
        )


def test_unknown_options_name_the_known_ones():
    with pytest.raises(ValueError, match="GradLoc has no option every; the trigger's are .*every_n_steps"):
        GradLoc(every=3)


def test_explain_under_no_grad_still_explains():
    with torch.no_grad():
        assert GradLoc(quiet=True).explain(qwen(), make_batch(), logps_fn, objective()).tokens


def test_a_call_without_backward_is_left_out():
    model, batch = qwen(), make_batch()
    watcher = GradLoc(quiet=True, every_n_steps=1)
    watcher.watch(model, batch, logps_fn)  # its loss is skipped
    objective()(watcher.watch(model, batch, logps_fn), batch).backward()
    report = watcher.check(model)
    assert report.num_micro_batches == 1 and report.certificate < 0.05


def test_a_spike_in_its_cooldown_is_no_ordinary_look():
    trigger = Trigger(every_n_steps=1, cooldown=5)
    for _ in range(20):
        trigger.decide(1.0)
    assert [trigger.decide(norm)[0] for norm in (1.0, 50.0, 50.0)] == ["every_n_steps", "adaptive", "adaptive"]


def test_the_sentence_names_whose_weight_it_is_and_what_opposes():
    report = spike_report(tokens=[(0, 0, 7, 0.4, 1.0), (1, 1, 7, 0.39, 3e3), (2, 0, 1, -0.9, 1.0)])
    assert report.cause == "unclassified" or "omega" in report.sentence
    assert report.sentence.startswith(
        "step 3: 40 % of the gradient norm is token 7 ('x') of sequence 0, micro-batch 0, on rank 0"
    )
    assert "of sequence 1, micro-batch 1, on rank 0 (token mismatch)" in report.sentence or report.cause != "A.1"


def spike_report(tokens):
    import gradloc as module

    report = module.SpikeReport(3, "search", {"reason": "adaptive"}, 9.0, "A.1", "", num_micro_batches=2)
    report.tokens = [module.TokenReport(0, m, s, p, 1, "x", share, omega=omega) for s, m, p, share, omega in tokens]
    report.sentence = gradloc_causes.sentence(report, (0.5, 5.0), (0.995, 1.005))
    return report
