"""routing.py against plain loops in float64, the models' own routing, and planted faults."""

import contextlib
import copy
import functools
import importlib
import math
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrap
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, load_balancing_loss_func

import routing
from routing import (
    agreeing_rows,
    compact_routes,
    empty_routes,
    place_routes,
    record_routing,
    recorded_rows,
    replay_routing,
    route_bytes_per_token,
    routes_dtype,
    routing_agreement,
    routing_shape,
    signed_routes,
)

VOCAB, PAD, E, K = 60, 0, 8, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": PAD,
}
MOE = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LOCAL = {"num_local_experts": E, "num_experts_per_tok": K}
FAMILIES = {
    "Qwen3Moe": {**MOE, "norm_topk_prob": True, "head_dim": 16},
    "Qwen3Moe raw": {**MOE, "norm_topk_prob": False, "head_dim": 16},
    "Qwen2Moe": {**SHARED, "decoder_sparse_step": 1},
    "Qwen3Next": {**SHARED, **LINEAR},
    "Qwen3_5Moe": {**SHARED, **LINEAR},
    "Mixtral": LOCAL,
    "DeepseekV3": {**DEEPSEEK, **LATENT},
    "DeepseekV2": {**DEEPSEEK, **LATENT, "topk_method": "group_limited_greedy"},
    "Glm4Moe": DEEPSEEK,
    "GptOss": {**LOCAL, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "head_dim": 16},
    "Olmoe": {"num_experts": E, "num_experts_per_tok": K},
}


def build(name="Qwen3Moe", seed=0, **changes):
    family = name.split()[0]
    text = "TextConfig" if family == "Qwen3_5Moe" else "Config"
    config = getattr(transformers, family + text)(**{**SIZES, **FAMILIES[name], **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, family + "ForCausalLM")(config)
    with torch.no_grad():
        for module in model.modules():
            if "e_score_correction_bias" in module._buffers:
                module.e_score_correction_bias.normal_(std=0.3)  # so that choice and weight differ
    return model


def tokens(n=3, s=7, seed=0):
    return torch.randint(2, VOCAB, (n, s), generator=torch.Generator().manual_seed(seed))


def record(model, ids, **inputs):
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids, **inputs)
    return recorder.routes


def drifted(model, ids, seed=5):
    """Valid routes that differ from the model's own at most tokens."""
    n, s = ids.shape
    layers, top_k, experts = routing_shape(model)
    rng = random.Random(seed)
    rows = [rng.sample(range(experts), top_k) for _ in range(n * s * layers)]
    return compact_routes(torch.tensor(rows).view(n, s, layers, top_k), experts)


def gradients(model, logits):
    """Of a loss with another weight at each logit, as router gradients vanish in symmetric ones."""
    model.zero_grad()
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits).sin()).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(a, b):
    assert a.keys() == b.keys() and a
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a, b, **tolerance):
    assert a.keys() == b.keys() and a
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ---------------------------------------------------------------- every family


@pytest.mark.parametrize("name", FAMILIES)
def test_replaying_own_routes_changes_no_bit_and_other_routes_do(name):
    model, ids = build(name), tokens()
    native = model(input_ids=ids).logits
    wanted = gradients(model, native)
    routes = record(model, ids)
    layers = 1 if name in ("DeepseekV3", "DeepseekV2", "Glm4Moe") else 2  # their first layer is dense
    assert routing_shape(model) == (layers, K, E)
    assert routes.shape == (3, 7, layers, K) and routes.dtype == torch.uint8
    assert all(len(set(row)) == K for row in routes.flatten(0, 2).tolist())
    with replay_routing(model, routes) as replay:
        logits = model(input_ids=ids).logits
    assert torch.equal(logits, native) and replay.replayed == 3 * 7 * layers
    assert_equal(gradients(model, logits), wanted)

    other = drifted(model, ids)
    assert routing_agreement(other, routes, torch.ones(3, 7)) < 0.3
    with replay_routing(model, other), record_routing(model) as used, record_routing(model, native=True) as own:
        logits = model(input_ids=ids).logits
    assert torch.equal(used.routes, other)
    assert torch.equal(own.routes[:, :, 0], routes[:, :, 0])  # the first layer's inputs are what they were
    assert not torch.allclose(logits, native, atol=1e-3)
    after = gradients(model, logits)
    routers = [name for name in after if re.search(r"\.(gate|router)\.weight", name)]
    assert len(routers) == layers and all(after[name].abs().max() > 0 for name in routers)
    assert torch.equal(model(input_ids=ids).logits, native)  # nothing stays behind


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_records_prefill_and_steps(name):
    model, ids = build(name).eval(), tokens(2, 5)
    mask = torch.ones_like(ids)
    if "linear_num_key_heads" not in FAMILIES[name]:  # padding runs through the state of linear attention
        mask[0, :2] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with record_routing(model) as recorder:
        whole = model.generate(ids, attention_mask=mask, **options)
    assert whole.shape == (2, 11) and recorder.routes.shape[:2] == (2, 10)  # the last token was never fed
    assert [p.shape[1] for p in recorder.passes] == [5, 1, 1, 1, 1, 1]
    for row, keep, routes in zip(whole, mask, recorder.routes, strict=True):
        start = 5 - int(keep.sum())
        assert torch.equal(record(model, row[None, start:-1])[0], routes[start:])
    with record_routing(model) as again:
        model.generate(ids[:1], **options)
        model.generate(ids, attention_mask=mask, **options)  # a new generation starts anew
    assert torch.equal(again.routes, recorder.routes)


def router_class(name):
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        if f"class {name}(" in path.read_text():
            return getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)
    raise AssertionError(f"{name} does not exist in this version of transformers")


CONFIG = {
    "num_experts_per_tok": 3,
    "num_experts": 12,
    "num_local_experts": 12,
    "hidden_size": 6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "greedy",
}


def weights_by_loops(rule, logits, ids, normalise, scale):
    """Gate weights of one token, plain Python floats, by the formulas of the papers."""
    if rule is routing._sigmoid:
        chosen = [1 / (1 + math.exp(-logits[i])) for i in ids]
    elif rule is routing._softmax_of_chosen:
        total = math.fsum(math.exp(logits[i]) for i in ids)
        return [math.exp(logits[i]) / total for i in ids]
    else:
        total = math.fsum(map(math.exp, logits))
        chosen = [math.exp(logits[i]) / total for i in ids]
    always = rule in (routing._softmax_renormalised, routing._softmax_renormalised_float)
    if always or (normalise and rule is not routing._softmax_scaled):
        chosen = [w / math.fsum(chosen) for w in chosen]
    return [w * (scale if rule in (routing._sigmoid, routing._softmax_scaled) else 1) for w in chosen]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", sorted(routing.RULES))
def test_every_rule_is_its_routers_and_the_formula(name, normalise):
    rule, cls = routing.RULES[name], router_class(name)
    torch.manual_seed(0)
    router = cls(SimpleNamespace(**{**CONFIG, "norm_topk_prob": normalise}))
    nn.init.normal_(router.weight)
    for dtype in (torch.float32, torch.bfloat16):
        logits, weights, ids = router.to(dtype)(torch.randn(20, 6, dtype=dtype))
        again = rule(router, logits, ids)
        assert torch.equal(again, weights) and again.dtype == weights.dtype, dtype
    other = torch.stack([torch.randperm(12)[:3] for _ in range(20)])
    logits = logits.detach().float().requires_grad_()
    weights, pull = rule(router, logits, other), torch.randn(20, 3)
    (weights * pull).sum().backward()
    scale = 2.5
    for t in range(20):
        row, chosen = logits[t].double().tolist(), other[t].tolist()
        by_loops = functools.partial(weights_by_loops, rule, ids=chosen, normalise=normalise, scale=scale)
        assert weights[t].tolist() == pytest.approx(by_loops(row), rel=1e-5)
        for j in range(12):
            sides = []
            for step in (1e-5, -1e-5):
                moved = by_loops([x + step * (i == j) for i, x in enumerate(row)])
                sides.append(math.fsum(p * w for p, w in zip(pull[t].tolist(), moved, strict=True)))
            assert logits.grad[t, j].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=2e-5)


def test_router_gradient_is_the_masked_softmax_formula():
    """R3's formula g_i = 1[i in I] exp(s_i) / sum_j 1[j in I] exp(s_j): dL/ds_j = g_j (p_j - sum_i p_i g_i) for j in I
    and 0 outside, with p_i the gradient that arrives at g_i."""
    model, ids = build(num_hidden_layers=1), tokens()
    router, seen = model.model.layers[0].mlp.gate, {}
    routes = drifted(model, ids)

    def watch(module, args, output):
        seen.update(inputs=args[0], logits=output[0], weights=output[1])
        output[0].retain_grad()
        output[1].retain_grad()

    with replay_routing(model, routes):
        handle = router.register_forward_hook(watch)
        logits = model(input_ids=ids).logits
    handle.remove()
    grads = gradients(model, logits)
    own, moved = torch.zeros(E, 32, dtype=torch.float64), 0
    chosen = routes.flatten(0, 2).tolist()
    for t, row in enumerate(seen["logits"].tolist()):
        total = math.fsum(math.exp(row[i]) for i in chosen[t])
        g = {i: math.exp(row[i]) / total for i in chosen[t]}
        pull = dict(zip(chosen[t], seen["weights"].grad[t].tolist(), strict=True))
        mean = math.fsum(pull[i] * g[i] for i in g)
        slope = [g[j] * (pull[j] - mean) if j in g else 0.0 for j in range(E)]
        assert seen["logits"].grad[t].tolist() == pytest.approx(slope, abs=1e-5)
        native = sorted(range(E), key=lambda i: -row[i])[:K]
        if not set(native) & set(chosen[t]):
            moved += 1
            assert seen["logits"].grad[t].abs().max() > 0  # the chosen are outside the native top-k, and still learn
        own += torch.tensor(slope, dtype=torch.float64)[:, None] * seen["inputs"][t].double()
    assert moved >= 3
    torch.testing.assert_close(grads["model.layers.0.mlp.gate.weight"].double(), own, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- rows: S, S - 1, -1, padding


def test_last_row_may_lack_and_missing_rows_are_native():
    model, ids = build(num_hidden_layers=1), tokens()
    own, other = record(model, ids), drifted(model, ids)
    with replay_routing(model, other[:, :-1]) as replay, record_routing(model) as used:
        model(input_ids=ids)
    assert torch.equal(used.routes[:, :-1], other[:, :-1]) and torch.equal(used.routes[:, -1], own[:, -1])
    assert replay.replayed == 3 * 6
    some = other.clone()
    some[1, 2:5] = 255
    signed = signed_routes(some)
    assert signed.dtype == torch.int16 and signed[1, 3].tolist() == [[-1, -1]]
    for routes in (some, signed, signed.long(), signed.int().numpy()):
        with replay_routing(model, routes) as replay, record_routing(model) as used:
            model(input_ids=ids)
        assert torch.equal(used.routes[1, 2:5], own[1, 2:5]) and replay.replayed == 3 * 7 - 3
        kept = recorded_rows(some)
        assert torch.equal(used.routes[kept], other[kept])


def test_padding_side_does_not_matter():
    model = build().eval()
    lengths, width = [4, 7, 6], 7
    rows = [tokens(1, length, seed=length)[0] for length in lengths]
    routes = [drifted(model, row[None], seed=len(row))[0] for row in rows]
    routes = [r[: len(r) - drop] for r, drop in zip(routes, (1, 0, 1), strict=True)]
    alone = []
    for row, r in zip(rows, routes, strict=True):
        with replay_routing(model, r[None]), torch.no_grad():
            alone.append(model(input_ids=row[None]).logits[0])
    for left in (True, False):
        ids, mask = torch.full((3, width), PAD), torch.zeros(3, width, dtype=torch.long)
        for i, row in enumerate(rows):
            where = slice(width - len(row), None) if left else slice(len(row))
            ids[i, where], mask[i, where] = row, 1
        placed = place_routes(routes, mask)
        assert placed.shape == (3, width, 2, K) and placed.dtype == torch.uint8
        assert recorded_rows(placed).all(-1).sum(1).tolist() == [3, 7, 5]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with replay_routing(model, placed) as replay, torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        assert replay.replayed == (3 + 7 + 5) * 2
        for i in range(3):
            torch.testing.assert_close(logits[i][mask[i].bool()], alone[i], atol=1e-5, rtol=1e-4)


def test_micro_batches_take_their_slice():
    model, ids = build(), tokens(6)
    routes = drifted(model, ids)
    with replay_routing(model, routes):
        whole = model(input_ids=ids).logits
    for part in (slice(0, 2), slice(2, 6)):
        with replay_routing(model, routes[part]):
            torch.testing.assert_close(model(input_ids=ids[part]).logits, whole[part], atol=1e-5, rtol=1e-4)


def test_place_routes_refuses_what_does_not_line_up():
    rows = [torch.zeros(4, 2, 2, dtype=torch.uint8), torch.zeros(3, 2, 2, dtype=torch.uint8)]
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    assert place_routes(rows, mask).shape == (2, 4, 2, 2)
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens but 4 rows of routes: give 2"):
        place_routes([rows[0], rows[0]], mask)
    with pytest.raises(ValueError, match="sequence 0 has 4 tokens but 2 rows"):
        place_routes([rows[0][:2], rows[1]], mask)
    with pytest.raises(ValueError, match="routes of 1 sequences for a batch of 2"):
        place_routes(rows[:1], mask)
    with pytest.raises(ValueError, match="differ in layers"):
        place_routes([rows[0], rows[1][:, :1]], mask)
    assert place_routes([r.short() for r in rows], mask)[1, 0].tolist() == [[-1, -1]] * 2


# ---------------------------------------------------------------- what is refused


def spoil(routes, position, value):
    routes = signed_routes(routes).clone()
    routes[position] = torch.as_tensor(value, dtype=routes.dtype)
    return routes


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: r[:, :, :1], r"shape \(3, 7, 1, 2\) do not fit the model: need \(N, S, 2 MoE layers, 2 experts"),
        (lambda r: r[..., :1], r"shape \(3, 7, 2, 1\) do not fit"),
        (lambda r: r[0], r"shape \(7, 2, 2\) do not fit"),
        (lambda r: r.float(), r"routes are torch.float32"),
        (
            lambda r: spoil(r, (1, 4, 1), [3, 8]),
            r"sequence 1, position 4, MoE layer 1: \[3, 8\] lies outside of \[0, 8\)",
        ),
        (lambda r: spoil(r, (0, 0, 0), [-2, 1]), r"sequence 0, position 0, MoE layer 0: \[-2, 1\] lies outside"),
        (
            lambda r: spoil(r, (2, 6, 0), [5, 5]),
            r"sequence 2, position 6, MoE layer 0: \[5, 5\] names an expert twice",
        ),
        (lambda r: spoil(r, (2, 6, 0), [-1, 5]), r"\[-1, 5\] is recorded in part"),
        (lambda r: spoil(r, (2, 6, 1), [5, -1]), r"position 6, MoE layer 1: \[5, -1\] is recorded in part"),
        (lambda r: r[:, :-2], r"5 rows of routes replayed in a forward of 7 positions: give 7 rows, or 6"),
        (lambda r: torch.cat((r, r[:, :1]), 1), r"8 rows of routes replayed in a forward of 7 positions"),
        (lambda r: r[:2], r"routes of 2 sequences replayed in a forward of 3: slice the routes"),
        (lambda r: r.reshape(7, 3, 2, 2), r"routes of 7 sequences replayed in a forward of 3"),
    ],
)
def test_wrong_routes_are_refused(change, words):
    model, ids = build(), tokens()
    with pytest.raises(ValueError, match=words), replay_routing(model, change(drifted(model, ids))):
        model(input_ids=ids)
    with replay_routing(model, drifted(model, ids)):  # and nothing stays behind
        model(input_ids=ids)


def test_repeated_experts_are_found_at_any_distance():
    model, ids = build(num_experts_per_tok=4), tokens()
    good = drifted(model, ids)
    for row in ([3, 3, 1, 2], [3, 1, 3, 2], [3, 1, 2, 3], [1, 2, 3, 3]):
        with pytest.raises(ValueError, match=re.escape(f"position 2, MoE layer 1: {row} names an expert twice")):
            replay_routing(model, spoil(good, (1, 2, 1), row))


def test_models_without_a_known_router_are_refused_by_name():
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16))
    assert routing_shape(dense) is None
    granite = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**SIZES, **LOCAL))
    for context in (record_routing, lambda model: replay_routing(model, torch.zeros(1, 1, 2, 2))):
        with pytest.raises(ValueError, match="Qwen3ForCausalLM has no mixture-of-experts router"):
            context(dense)
        with pytest.raises(ValueError, match="GraniteMoeTopKRouter is not known.*MixtralTopKRouter.*routing.RULES"):
            context(granite)


def test_a_router_that_weighs_otherwise_than_the_table_is_noticed(monkeypatch):
    monkeypatch.setitem(routing.RULES, "Qwen3MoeTopKRouter", routing._softmax_renormalised)
    model, ids = build("Qwen3Moe raw"), tokens()
    words = "Qwen3MoeTopKRouter weighs its own choice otherwise than _softmax_renormalised"
    with pytest.raises(RuntimeError, match=words), replay_routing(model, record(model, ids)):
        model(input_ids=ids)


def test_replay_that_replays_nothing_is_an_error():
    model, ids = build(), tokens()
    routes = record(model, ids)
    with pytest.raises(RuntimeError, match=r"MoE layers \[0, 1\] replayed no row"), replay_routing(model, routes):
        pass
    with (
        pytest.raises(RuntimeError, match=r"MoE layers \[1\] replayed no row"),
        replay_routing(model, routes),
    ):
        model.model.layers[0](
            model.model.embed_tokens(ids),
            position_embeddings=model.model.rotary_emb(ids.float(), torch.arange(7)[None]),
        )
    with (
        pytest.raises(RuntimeError, match="every row of the routes is -1"),
        replay_routing(model, empty_routes(routes.shape, E)),
    ):
        model(input_ids=ids)
    with pytest.raises(KeyError, match="as it was"), replay_routing(model, routes):
        raise KeyError("as it was")
    with (
        pytest.raises(ValueError, match="under replay_routing already"),
        replay_routing(model, routes),
        replay_routing(model, routes),
    ):
        pass
    with pytest.raises(ValueError, match="continues a cache of 7 tokens"), replay_routing(model, routes):
        model.eval().generate(ids, max_new_tokens=2, eos_token_id=None)
    layers = torch.tensor([1, 0]).bool()
    half = torch.where(layers[None, None, :, None], routes, 255)
    with replay_routing(model, half) as replay:  # a layer without any recorded row has nothing to replay
        model(input_ids=ids)
    assert replay.replayed == 3 * 7


def test_records_that_cannot_be_lined_up_are_refused():
    model, ids = build().eval(), tokens()
    with record_routing(model) as recorder, torch.no_grad():
        with pytest.raises(ValueError, match="no routes were recorded"):
            _ = recorder.routes
        cache = model(input_ids=ids, use_cache=True).past_key_values
        assert recorder.routes.shape == (3, 7, 2, K)
        model(input_ids=ids[:, :1], cache=cache)
        assert recorder.routes.shape == (3, 8, 2, K)
        cache.crop(-3)
        with pytest.raises(ValueError, match="the cache holds 5 tokens where 8 were expected"):
            model(input_ids=ids[:, :1], cache=cache)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        cache.batch_select_indices(torch.tensor([2, 0]))
        model(input_ids=ids[:2, :1], cache=cache)
        with pytest.raises(ValueError, match="the batch changed its size"):
            _ = recorder.routes
        assert recorder.take().shape == (2, 1, 2, K)
        model(input_ids=ids[:2, :1], cache=cache)
        assert recorder.take().shape == (2, 1, 2, K)
        with pytest.raises(ValueError, match="no routes were recorded"):
            recorder.take()


# ---------------------------------------------------------------- checkpointing


CHECKPOINTS = ["none", "gradient_checkpointing_enable", "reentrant", "CheckpointWrapper"]


def checkpointed(kind):
    model = build()
    if kind in ("gradient_checkpointing_enable", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()
    elif kind == "CheckpointWrapper":
        wrapper = functools.partial(wrap, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Qwen3MoeDecoderLayer)
        )
    return model.train()


def plain_names(grads):
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in grads.items()}


@pytest.mark.parametrize("kind", CHECKPOINTS[1:])
def test_recompute_replays_the_rows_of_its_forward(kind):
    """Two forwards with different routes; backward in the other order, after both contexts; then inside a third."""
    batches = [tokens(seed=1), tokens(seed=2)]
    outcome = []
    for how in ("none", kind):
        model, logits = checkpointed(how), []
        original = [dict(module.__dict__) for module in model.modules()]
        for i, ids in enumerate(batches):
            with replay_routing(model, drifted(model, ids, seed=i)) as replay, record_routing(model) as used:
                logits.append(model(input_ids=ids).logits)
            assert torch.equal(used.routes, drifted(model, ids, seed=i))
        assert all(
            now.__dict__.get(name) is was.get(name)
            for now, was in zip(model.modules(), original, strict=True)
            for name in ("_gradient_checkpointing_func", "checkpoint_fn")
        )
        with record_routing(model) as idle:
            grads = [gradients(model, logits[1]), gradients(model, logits[0])]
        assert not idle.passes and replay.replayed == 3 * 7 * 2  # recomputes are neither recorded nor counted
        third = model(input_ids=batches[0]).logits
        with replay_routing(model, drifted(model, batches[1])):
            fourth = model(input_ids=batches[1]).logits
            grads.append(gradients(model, fourth))
        grads.append(gradients(model, third))
        outcome.append([plain_names(g) for g in grads])
    for with_checkpoints, without in zip(*outcome, strict=True):
        assert_close(with_checkpoints, without, atol=1e-5, rtol=1e-5)


def test_other_checkpoints_replay_inside_and_refuse_outside():
    model, ids = build(), tokens()
    routes = drifted(model, ids)
    with replay_routing(model, routes):
        wanted = gradients(model, model(input_ids=ids).logits)
    run = functools.partial(checkpoint, lambda ids: model(input_ids=ids).logits, ids, use_reentrant=False)
    with replay_routing(model, routes) as replay:
        assert_equal(gradients(model, run()), wanted)
    assert replay.replayed == 3 * 7 * 2
    with replay_routing(model, routes):
        logits = run()
    with pytest.raises(RuntimeError, match="recomputes a replayed forward after its replay_routing context was left"):
        gradients(model, logits)
    gradients(model, run())  # a native forward afterwards is free to recompute
    logits = run()
    with replay_routing(model, routes), torch.no_grad():
        model(input_ids=ids)
    gradients(model, logits)  # and stays so when something is replayed without gradients in between


# ---------------------------------------------------------------- experts, precision, wrappers


def test_experts_implementations_agree():
    ids, outcome = tokens(), {}
    for kind in ("eager", "grouped_mm", "batched_mm"):
        model = build()
        model.set_experts_implementation(kind)
        own = record(model, ids)
        native = model(input_ids=ids).logits
        with replay_routing(model, own):
            assert torch.equal(model(input_ids=ids).logits, native)
        with replay_routing(model, drifted(model, ids)):
            logits = model(input_ids=ids).logits
        outcome[kind] = {"logits": logits.detach(), **gradients(model, logits)}
    assert_close(outcome["grouped_mm"], outcome["eager"], atol=1e-4, rtol=1e-4)
    assert_close(outcome["batched_mm"], outcome["eager"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss"])
def test_zero_perturbation_under_bfloat16(name):
    ids = tokens()
    for context in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)):
        model = build(name)
        if context is contextlib.nullcontext:
            model = model.to(torch.bfloat16)
        with context():
            native = model(input_ids=ids).logits
            wanted = gradients(model, native)
            with record_routing(model) as recorder:
                model(input_ids=ids)
            with replay_routing(model, recorder.routes):
                logits = model(input_ids=ids).logits
            assert_equal(gradients(model, logits), wanted)
        assert torch.equal(logits, native)


def test_wrapped_models_and_adapters():
    ids = tokens()
    model = build()
    routes = drifted(model, ids)
    lora = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    for options in ({}, {"modules_to_save": ["gate"]}, {"target_parameters": ["gate.weight"]}):
        peft = get_peft_model(build(), LoraConfig(task_type="CAUSAL_LM", **lora, **options))
        wrapped = nn.DataParallel(peft)  # `.module` as DDP has it
        assert routing_shape(wrapped) == (2, K, E), options
        with replay_routing(wrapped, routes) as replay, record_routing(peft) as used:
            wrapped.module(input_ids=ids).logits.sum().backward()
        assert replay.replayed == 3 * 7 * 2 and torch.equal(used.routes, routes), options
        trained = [name for name, p in peft.named_parameters() if "gate" in name and p.grad is not None]
        assert bool(trained) == bool(options), options


def test_tapped_models_copy_and_pickle():
    model, ids = build(), tokens()
    routes = record(model, ids)
    with replay_routing(model, routes):
        wanted = model(input_ids=ids).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with record_routing(twin) as recorder, replay_routing(twin, drifted(twin, ids)):
            twin(input_ids=ids)
            assert torch.equal(model(input_ids=ids).logits, wanted)  # the original is not under replay
        assert torch.equal(recorder.routes, drifted(twin, ids))


def test_two_models_at_once_keep_apart():
    """The engine's copy records while the trainer replays."""
    ids, trainer, engine = tokens(), build(), build(seed=1)
    with record_routing(engine) as recorder, replay_routing(trainer, drifted(trainer, ids)) as replay:
        engine(input_ids=ids)
        trainer(input_ids=ids)
    assert torch.equal(recorder.routes, record(engine, ids)) and replay.replayed == 3 * 7 * 2


def test_forward_mode_derivatives_run_under_replay():
    model, ids = build(), tokens()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    name = "model.layers.0.mlp.gate.weight"
    weight = model.get_parameter(name).detach()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))

    def logits_of(weight):
        return torch.func.functional_call(model, {name: weight}, kwargs={"input_ids": ids, "use_cache": False}).logits

    with replay_routing(model, drifted(model, ids)):
        _, tangent = torch.func.jvp(logits_of, (weight,), (direction,))
        with torch.no_grad():
            sides = [logits_of(weight + step * direction) for step in (1e-3, -1e-3)]
    torch.testing.assert_close(tangent, (sides[0] - sides[1]) / 2e-3, atol=2e-2, rtol=2e-2)
    assert tangent.abs().max() > 0.1


def test_load_balancing_loss_sees_live_logits_and_the_native_choice():
    model, ids = build(num_hidden_layers=1, output_router_logits=True), tokens()
    native = model(input_ids=ids)
    with replay_routing(model, drifted(model, ids)):
        replayed = model(input_ids=ids)
    assert torch.equal(replayed.router_logits[0], native.router_logits[0])
    assert torch.equal(replayed.aux_loss, native.aux_loss)
    assert torch.equal(replayed.aux_loss, load_balancing_loss_func(replayed.router_logits, E, K))


# ---------------------------------------------------------------- format and agreement


def test_format():
    assert [routes_dtype(e) for e in (8, 255, 256, 1000)] == [torch.uint8, torch.uint8, torch.int16, torch.int16]
    for experts in (255, 256):
        ids = torch.tensor([[[experts - 1, 0]], [[-1, -1]], [[254, 3]]])
        stored = compact_routes(ids, experts)
        assert stored.dtype == routes_dtype(experts)
        assert torch.equal(signed_routes(stored).long(), ids)
        assert recorded_rows(stored).squeeze(1).tolist() == [True, False, True]
        assert route_bytes_per_token(stored) == 1 * 2 * (1 if experts == 255 else 2)
        assert torch.equal(compact_routes(stored, experts), stored)
    with pytest.raises(ValueError, match=r"routes\[0, 0, 1\] is 8: expert ids lie in \[0, 8\), or -1"):
        compact_routes(torch.tensor([[[1, 8]]]), 8)
    assert (
        not recorded_rows(torch.tensor([[[-1, 3]]])).any() and not recorded_rows(empty_routes((2, 3, 4, 2), 8)).any()
    )
    assert empty_routes((1, 1), 300).dtype == torch.int16
    routes = empty_routes((2, 3, 4, 2), 8)
    assert route_bytes_per_token(routes) == 4 * 2 == routes.numel() // 6


def test_more_than_255_experts():
    model, ids = build(num_experts=300, moe_intermediate_size=4), tokens()
    native = model(input_ids=ids).logits
    routes = record(model, ids)
    assert routes.dtype == torch.int16 and routes.max() > 255 and routes.min() >= 0
    with replay_routing(model, routes):
        assert torch.equal(model(input_ids=ids).logits, native)
    other = drifted(model, ids)
    other[0, 0] = -1
    with replay_routing(model, other) as replay, record_routing(model) as used:
        model(input_ids=ids)
    assert replay.replayed == (3 * 7 - 1) * 2 and torch.equal(used.routes[1:], other[1:])
    with_255 = torch.tensor([255, 3], dtype=torch.uint8).expand(3, 7, 2, 2)  # an expert, not the mark, in such a model
    with replay_routing(model, with_255), record_routing(model) as used:
        model(input_ids=ids)
    assert used.routes.unique().tolist() == [3, 255]


def test_one_expert_a_token():
    model, ids = build(num_experts_per_tok=1, norm_topk_prob=False), tokens()
    native = model(input_ids=ids).logits
    with replay_routing(model, record(model, ids)):
        assert torch.equal(model(input_ids=ids).logits, native)


def test_agreement_against_loops():
    rng = random.Random(0)
    n, s, layers, k = 4, 6, 3, 3
    rows = [[rng.sample(range(5), k) for _ in range(n * s * layers)] for _ in range(2)]
    a, b = (torch.tensor(r).view(n, s, layers, k) for r in rows)
    a[:, 1:3, 2], b[2, 3] = -1, -1
    mask = torch.tensor([[rng.random() < 0.7 for _ in range(s)] for _ in range(n)])
    hits, total = [0] * layers, [0] * layers
    for i in range(n):
        for t in range(s):
            for layer in range(layers):
                x, y = a[i, t, layer].tolist(), b[i, t, layer].tolist()
                if mask[i, t] and -1 not in x and -1 not in y:
                    total[layer] += 1
                    hits[layer] += set(x) == set(y)
    assert 0 < sum(hits) < sum(total) and len(set(total)) > 1
    for x in (a, compact_routes(a, 5)):
        for y in (b.short(), compact_routes(b, 5)):
            assert routing_agreement(x, y, mask) == pytest.approx(sum(hits) / sum(total))
            assert routing_agreement(y, x, mask.long()) == pytest.approx(sum(hits) / sum(total))
            wanted = [h / t for h, t in zip(hits, total, strict=True)]
            equal, counted = agreeing_rows(x, y, mask)
            assert (equal / counted).tolist() == pytest.approx(wanted)
    assert routing_agreement(a, a.flip(-1), mask) == 1.0  # order within a row does not count
    assert math.isnan(routing_agreement(a, b, torch.zeros(n, s)))
    assert isinstance(routing_agreement(a, b, mask), float)
    with pytest.raises(ValueError, match=r"need \(N, S, L, K\)"):
        routing_agreement(a, b[:, :-1], mask)
    with pytest.raises(ValueError, match="with a mask of"):
        routing_agreement(a, b, mask[:, :-1])


# ---------------------------------------------------------------- two processes


def two_process_worker(rank, store, results):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ids, outcome = tokens(4), {}
    mine = slice(2 * rank, 2 * rank + 2)
    for kind in ("ddp", "ddp checkpointed", "fsdp2", "fsdp2 checkpointed"):
        reference, model = build(), build()
        routes = drifted(reference, ids)
        with replay_routing(reference, routes):
            (reference(input_ids=ids).logits.square().sum() / 4).backward()
        if "checkpointed" in kind:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        if "fsdp2" in kind:
            for layer in model.model.layers:
                fully_shard(layer)
            wrapped = fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
        with replay_routing(wrapped, routes[mine]) as replay, record_routing(wrapped) as used:
            loss = wrapped(input_ids=ids[mine]).logits.square().sum() / 2
        loss.backward()
        assert replay.replayed == 2 * 7 * 2 and torch.equal(used.routes, routes[mine])
        worst = 0.0
        for wanted, parameter in zip(reference.parameters(), model.parameters(), strict=True):
            got = parameter.grad.full_tensor() if "fsdp2" in kind else parameter.grad
            worst = max(worst, float((got - wanted.grad).abs().max() / wanted.grad.abs().max()))
        outcome[kind] = worst
    results[rank] = outcome
    dist.destroy_process_group()


@pytest.mark.slow  # two interpreters start
def test_two_processes_equal_one(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(two_process_worker, (str(tmp_path / "store"), results), nprocs=2)
        assert set(results.keys()) == {0, 1}
        for outcome in results.values():
            assert len(outcome) == 4 and max(outcome.values()) < 1e-4, outcome
