"""LayerClip against plain loops in float64, the printed formula's two traps, real parameter names, DDP and FSDP2."""

import io
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import layer_clip
from layer_clip import (
    LayerClip,
    group_norms,
    kind_of,
    layer_correlation,
    layer_factors,
    layer_of,
    layer_thresholds,
    parameter_norms,
)

NAN, INF = math.nan, math.inf


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.self_attn = nn.Linear(width, width)
        self.input_layernorm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.mlp(torch.tanh(self.self_attn(self.input_layernorm(x))))


class Toy(nn.Module):
    """A decoder in names and shape; width 5 does not divide by two ranks."""

    def __init__(self, layers=3, width=5, tied=False, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 7, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(dtype)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def give_grads(model, seed, scales=None, scale=1.0):
    """Random gradients of unit size times `scales[group]`; the generator is per parameter, so order does not matter."""
    for name, p in model.named_parameters():
        g = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
        draw = torch.randn(p.shape, generator=g, dtype=torch.float64)
        p.grad = (draw * scale * (scales or {}).get(layer_of(name), 1.0)).to(p.dtype)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- the equation


def loops(history, alpha, beta, warmup, statistic, eps):
    """[{group: norm} per step] -> [{group: factor} per step], {group: R}. Python floats, one group at a time."""
    value, seen, out = {}, {}, []
    for norms in history:
        factors = {}
        for group, n in norms.items():
            factors[group] = 1.0
            if math.isnan(n) or math.isinf(n) or n == 0:
                continue
            kept, t = n, seen.get(group, 0)
            if t >= warmup and t > 0 and n > alpha * value[group]:
                factors[group] = alpha * value[group] / (n + eps)
                kept = alpha * value[group]
            seen[group] = t = t + 1
            if t == 1:
                value[group] = kept
            elif statistic == "ema":
                value[group] = beta * value[group] + (1 - beta) * kept
            else:
                value[group] = (1 - 1 / t) * value[group] + kept / t
        out.append(factors)
    return out, value


@pytest.mark.parametrize("mode", ["layer", "tensor"])
@pytest.mark.parametrize("statistic", ["ema", "mean"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_thirty_steps_equal_plain_loops(mode, statistic, warmup):
    model, rng = Toy(), random.Random(1)
    clip = LayerClip(model, alpha=1.5, beta=0.7, warmup=warmup, mode=mode, statistic=statistic, eps=1e-3)
    names = [name for name, _ in model.named_parameters()]
    assert clip.names == names and len(names) == 19
    label = layer_of if mode == "layer" else str
    assert len(clip.groups) == len({label(n) for n in names}) == (6 if mode == "layer" else 19)
    history, got, clipped = [], [], 0
    for step in range(30):
        groups = ("embeddings", "layer 0", "layer 1", "layer 2", "final norm", "head")
        scales = {g: rng.choice((1, 1, 1, 0.3, 2, 40)) for g in groups}
        scales["layer 1"] = {3: 0.0, 7: NAN, 8: INF}.get(step, scales["layer 1"])
        give_grads(model, step, scales)
        before = grads(model)
        norms = {}
        for name in names:
            squares = sum(v * v for v in before[name].flatten().tolist())
            norms[label(name)] = norms.get(label(name), 0.0) + squares
        history.append({group: math.sqrt(total) for group, total in norms.items()})
        metrics = clip.clip_()
        wanted = loops(history, 1.5, 0.7, warmup, statistic, 1e-3)[0][-1]
        for name, after in grads(model).items():
            if wanted[label(name)] == 1:
                assert torch.equal(after.view(torch.int64), before[name].view(torch.int64))  # NaN too
            else:
                torch.testing.assert_close(after, before[name] * wanted[label(name)], rtol=1e-12, atol=0)
                clipped += 1
        assert metrics["layer_clip/clipped_frac"] == pytest.approx(sum(f < 1 for f in wanted.values()) / len(wanted))
        broken = sum(not math.isfinite(n) for n in history[-1].values())
        assert metrics["layer_clip/nonfinite"] == broken
        assert broken == ((1 if mode == "layer" else 5) if step in (7, 8) else 0)
        total = math.sqrt(sum(n * n for n in history[-1].values()))
        after = math.sqrt(sum((n * wanted[g]) ** 2 for g, n in history[-1].items()))
        for name, value in (("norm_before", total), ("norm_after", after)):
            assert metrics[f"layer_clip/{name}"] == pytest.approx(value, rel=1e-12, nan_ok=True)
        if mode == "layer":
            for group in wanted:
                key = group.replace(" ", "_")
                assert metrics[f"layer_clip/factor/{key}"] == pytest.approx(wanted[group], rel=1e-12)
                assert metrics[f"layer_clip/norm/{key}"] == pytest.approx(history[-1][group], rel=1e-12, nan_ok=True)
        else:
            assert metrics["layer_clip/factor/min"] == pytest.approx(min(wanted.values()), rel=1e-12)
            if not broken:
                assert metrics["layer_clip/norm/max"] == pytest.approx(max(history[-1].values()), rel=1e-12)
            assert len(metrics) <= 8
        assert all(type(v) is float for v in metrics.values())
        got.append(wanted)
    assert clipped > 60
    value = loops(history, 1.5, 0.7, warmup, statistic, 1e-3)[1]
    assert clip.state_dict()["statistic"].tolist() == pytest.approx([value[g] for g in clip.groups], rel=1e-12)
    assert not any(f < 1 for step in got[:warmup] for f in step.values())


def test_pure_functions():
    assert layer_thresholds(torch.tensor([1.0, 2.0]), 1.5).tolist() == [1.5, 3.0]
    norms = torch.tensor([1.0, 1.5, 3.0, NAN, INF, 0.0], dtype=torch.float64)
    limits = torch.full((6,), 1.5, dtype=torch.float64)
    assert layer_factors(norms, limits, 0.5).tolist() == [1.0, 1.0, 1.5 / 3.5, 1.0, 1.0, 1.0]
    tiny = layer_factors(norms * 1e-9, limits * 1e-9)  # no eps near the norms: the factor is the same at any scale
    assert tiny[2].item() == pytest.approx(0.5, rel=1e-3) and tiny[0] == 1
    assert layer_factors(norms, torch.full_like(norms, INF)).tolist() == [1.0] * 6


def printed(norms, alpha, beta):
    """The formula as printed: the current, unclipped norm enters the statistic that judges it. -> clipped norms."""
    value, out = norms[0], []
    for n in norms:
        value = beta * value + (1 - beta) * n
        out.append(n * min(1.0, alpha * value / (n + 1e-6)))
    return out


def ours(norms, alpha, beta, warmup=1, statistic="ema"):
    model = nn.Linear(1, 1, bias=False).double()
    clip = LayerClip(model, alpha=alpha, beta=beta, warmup=warmup, statistic=statistic)
    out = []
    for n in norms:
        model.weight.grad = torch.full((1, 1), float(n), dtype=torch.float64)
        clip.clip_()
        out.append(model.weight.grad.item())
    return out


def test_the_printed_formula_never_clips_and_ours_does():
    norms = [1.0] * 10 + [1e6]  # alpha (1 - beta) = 1
    assert printed(norms, alpha=2, beta=0.5)[-1] == pytest.approx(1e6)
    assert ours(norms, alpha=2, beta=0.5)[-1] == pytest.approx(2.0)
    assert ours(norms, alpha=2, beta=0.5, statistic="mean")[-1] == pytest.approx(2.0)


def test_a_spike_does_not_raise_the_bar_for_the_next():
    norms = [1.0] * 10 + [100.0, 1.0, 100.0]
    theirs, here = printed(norms, alpha=2, beta=0.9), ours(norms, alpha=2, beta=0.9)
    assert theirs[-1] > 35 and theirs[-1] > 1.5 * theirs[-3]
    assert here[-3] == pytest.approx(2.0) and here[-1] == pytest.approx(2 * (0.9 * 1.1 + 0.1))
    assert here[:10] == norms[:10]


def test_a_lasting_change_is_followed_at_the_stated_speed():
    here = ours([1.0] * 30 + [10.0] * 60, alpha=2.0, beta=0.95, warmup=20)
    assert here[30:40] == pytest.approx([2 * 1.05**k for k in range(10)])
    assert here[-1] == 10.0  # ln 5 / ln 1.05 = 33 steps later it is the usual norm


# ---------------------------------------------------------------- invariances


def run(model, steps=12, scale=1.0, **options):
    clip = LayerClip(model, **({"alpha": 1.2, "warmup": 2, "beta": 0.8} | options))
    out = []
    for step in range(steps):
        give_grads(model, step, {"layer 0": 30.0 if step in (5, 9) else 1.0, "head": 1.0 + step % 3}, scale)
        metrics = clip.clip_()
        out.append((metrics, grads(model)))
    assert any(0 < m["layer_clip/clipped_frac"] < 1 for m, _ in out)
    return out


@pytest.mark.parametrize("scale", [1e-6, 2.0**-20, 1e4])
@pytest.mark.parametrize("statistic", ["ema", "mean"])
def test_scaling_every_gradient_scales_everything(scale, statistic):
    for (a, grads_a), (b, grads_b) in zip(
        run(Toy(), statistic=statistic), run(Toy(), scale=scale, statistic=statistic), strict=True
    ):
        for key, value in a.items():
            factor = scale if "norm" in key.split("/")[1] else 1.0
            assert b[key] == pytest.approx(value * factor, rel=1e-5), key
        for name in grads_a:
            torch.testing.assert_close(grads_a[name] * scale, grads_b[name], rtol=1e-5, atol=0)


def test_the_order_of_parameters_does_not_matter():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            inner = Toy()
            for name in ("lm_head", "norm", "layers", "embed_tokens"):
                self.add_module(name, getattr(inner, name))

    assert next(iter(Backwards().state_dict())) == "lm_head.weight"
    for (a, grads_a), (b, grads_b) in zip(run(Toy()), run(Backwards()), strict=True):
        assert a == pytest.approx(b, rel=1e-12)
        assert all(torch.allclose(grads_a[n], grads_b[n], rtol=1e-12, atol=0) for n in grads_a)


def test_gradient_accumulation_does_not_matter():
    torch.manual_seed(1)
    data = torch.randint(0, 7, (6, 8, 4))
    results = []
    for parts in (1, 2, 8):
        model = Toy()
        clip = LayerClip(model, alpha=1.05, beta=0.5, warmup=1)
        results.append([])
        for ids in data:
            model.zero_grad()
            for part in ids.chunk(parts):
                (model(part).logsumexp(-1).square().sum() / ids.numel()).backward()
            results[-1].append((clip.clip_(), grads(model)))
    assert any(m["layer_clip/clipped_frac"] > 0 for m, _ in results[0])
    for other in results[1:]:
        for (a, grads_a), (b, grads_b) in zip(results[0], other, strict=True):
            assert a == pytest.approx(b, rel=1e-9)
            assert all(torch.allclose(grads_a[n], grads_b[n], rtol=1e-9, atol=1e-15) for n in grads_a)


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_exploding_layer_leaves_the_others_alone(dtype):
    model = Toy(dtype=dtype)
    clip = LayerClip(model, warmup=5)
    for step in range(6):
        give_grads(model, step)
        assert clip.clip_()["layer_clip/clipped_frac"] == 0
    give_grads(model, 6, {"layer 1": 500.0})
    before = grads(model)
    for p, g in zip(model.parameters(), before.values(), strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    globally = grads(model)
    for p, g in zip(model.parameters(), before.values(), strict=True):
        p.grad = g.clone()
    metrics, after = clip.clip_(), grads(model)
    for name in before:
        assert not torch.equal(globally[name], before[name])  # global clipping shrinks every layer ...
        assert globally[name].float().norm() < 0.01 * before[name].float().norm()
        assert torch.equal(after[name], before[name]) == (layer_of(name) != "layer 1"), name  # ... ours only one
    assert metrics["layer_clip/clipped_frac"] == pytest.approx(1 / 6)
    norm = math.sqrt(sum(after[n].double().square().sum().item() for n in after if layer_of(n) == "layer 1"))
    assert norm == pytest.approx(2 * clip_value_before(clip, "layer 1"), rel=1e-2 if dtype != torch.float32 else 1e-5)
    assert metrics["layer_clip/norm_after"] < 0.02 * metrics["layer_clip/norm_before"]


def clip_value_before(clip, group):
    """R(t-1) out of R(t) after a clipped step: R(t) = R(t-1) (beta + (1 - beta) alpha)."""
    return clip.state_dict()["statistic"][clip.groups.index(group)].item() / (0.95 + 0.05 * 2)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_broken_layer_stays_visible_and_poisons_nothing(bad):
    model = Toy()
    clip = LayerClip(model, alpha=1.5, warmup=1)
    for step in range(10):
        give_grads(model, step)
        clip.clip_()
    held = clip.state_dict()
    give_grads(model, 10, {"head": 100.0})
    model.layers[1].mlp.weight.grad[2, 3] = bad
    before, metrics = grads(model), clip.clip_()
    i = clip.groups.index("layer 1")
    for name, grad in grads(model).items():
        same = torch.equal(grad.view(torch.int64), before[name].view(torch.int64))
        assert same == (layer_of(name) != "head")
    assert metrics["layer_clip/nonfinite"] == 1 and metrics["layer_clip/factor/layer_1"] == 1
    assert not math.isfinite(metrics["layer_clip/norm/layer_1"])
    assert not math.isfinite(metrics["layer_clip/norm_before"]) and not math.isfinite(metrics["layer_clip/norm_after"])
    now = clip.state_dict()
    assert now["statistic"][i] == held["statistic"][i] and now["count"][i] == held["count"][i]
    assert torch.equal(now["history"], held["history"]) and math.isfinite(metrics["layer_clip/corr_mean"])
    assert (now["count"] - held["count"]).tolist() == [int(g != "layer 1") for g in clip.groups]
    give_grads(model, 11, {"layer 1": 100.0})
    assert clip.clip_()["layer_clip/factor/layer_1"] < 0.1  # and still clips afterwards


def test_a_step_without_signal_counts_nowhere():
    model = Toy()
    clip = LayerClip(model, warmup=3)
    give_grads(model, 0)
    clip.clip_()
    held = clip.state_dict()
    for _ in range(5):
        give_grads(model, 1, scale=0.0)
        metrics = clip.clip_()
        assert metrics["layer_clip/norm_before"] == 0 and metrics["layer_clip/clipped_frac"] == 0
    assert all(torch.equal(held[k], clip.state_dict()[k]) for k in ("statistic", "count", "history"))
    for step in (1, 2):
        give_grads(model, step)
        clip.clip_()
    give_grads(model, 3, {"layer 2": 50.0})
    assert clip.clip_()["layer_clip/factor/layer_2"] < 0.1


def test_frozen_parameters_and_a_gradient_that_comes_later():
    model = Toy()
    model.embed_tokens.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    clip = LayerClip(model, warmup=2)
    assert clip.groups == ["layer 1", "layer 2", "final norm", "head"]
    late = list(model.layers[2].parameters())
    for step in range(12):
        give_grads(model, step, {"layer 2": 60.0 if step == 11 else 1.0})
        frozen = model.layers[0].mlp.weight.grad.clone()
        for p in late if step < 4 else late[:1] if step < 6 else []:
            p.grad = None
        metrics = clip.clip_()
        assert torch.equal(model.layers[0].mlp.weight.grad, frozen)
        assert (metrics["layer_clip/norm/layer_2"] == 0) == (step < 4)
        assert (metrics["layer_clip/factor/layer_2"] < 1) == (step == 11), step
    assert clip.state_dict()["count"].tolist() == [12, 8, 12, 12]


def test_tied_head_is_the_embeddings():
    model = Toy(tied=True)
    clip = LayerClip(model, warmup=1)
    assert clip.groups == ["embeddings", "layer 0", "layer 1", "layer 2", "final norm"]
    assert len(clip.parameters) == len({id(p) for p in clip.parameters}) == 18
    for step in range(2):
        give_grads(model, step, {"embeddings": 1 + 9 * step})
        before = model.lm_head.weight.grad.clone()
        metrics = clip.clip_()
    factor = metrics["layer_clip/factor/embeddings"]
    assert factor < 1
    torch.testing.assert_close(model.lm_head.weight.grad, before * factor, rtol=1e-12, atol=0)  # once, not twice


def test_infinite_alpha_only_measures():
    assert not any(metrics["layer_clip/clipped_frac"] for metrics in measure(math.inf))
    assert any(metrics["layer_clip/clipped_frac"] for metrics in measure(2.0))


def measure(alpha):
    model = Toy()
    clip = LayerClip(model, alpha=alpha, warmup=1)
    for step in range(9):
        give_grads(model, step, {"layer 0": 10.0**step})
        yield clip.clip_()


# ---------------------------------------------------------------- heterogeneity


def pearson(x, y):
    mx, my = sum(x) / len(x), sum(y) / len(y)
    sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return sxy / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def test_correlation_is_pearson_over_pairs_of_layers():
    g = torch.Generator().manual_seed(0)
    history = torch.rand(20, 5, generator=g, dtype=torch.float64)
    history[:, 3] = 0.25  # constant: left out
    columns = [history[:, i].tolist() for i in (0, 1, 2, 4)]
    pairs = [pearson(columns[i], columns[j]) for i in range(4) for j in range(i)]
    mean, low = layer_correlation(history)
    assert mean == pytest.approx(sum(pairs) / 6) and low == pytest.approx(min(pairs))
    assert layer_correlation(history[:, 2:4]) is None
    assert layer_correlation(history[:, :1].expand(20, 3) * torch.tensor([1.0, 7.0, 1e-6])) == pytest.approx((1, 1))


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_correlation_covers_the_window_of_raw_layer_norms(mode):
    model = Toy()
    clip = LayerClip(model, alpha=1.1, beta=0.5, warmup=1, mode=mode, window=10)
    rows = []
    for step in range(16):
        give_grads(model, step, {"layer 0": 1.0 + step % 4, "layer 1": 1.0 + step % 5, "head": 100.0 * step})
        rows.append([])
        for layer in model.layers:
            rows[-1].append(math.sqrt(sum(p.grad.square().sum().item() for p in layer.parameters())))
        metrics = clip.clip_()
        assert ("layer_clip/corr_mean" in metrics) == ("layer_clip/corr_min" in metrics) == (step >= 7)
    columns = list(zip(*rows[-10:], strict=True))
    pairs = [pearson(columns[i], columns[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert metrics["layer_clip/corr_mean"] == pytest.approx(sum(pairs) / 3)
    assert metrics["layer_clip/corr_min"] == pytest.approx(min(pairs))


# ---------------------------------------------------------------- resume, arguments


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_resume_is_exact(mode):
    whole = run(Toy(), mode=mode)
    model = Toy()
    clip = LayerClip(model, alpha=1.2, warmup=2, beta=0.8, mode=mode)
    for step, (metrics, wanted) in enumerate(whole):
        if step == 7:
            file = io.BytesIO()
            torch.save(clip.state_dict(), file)
            give_grads(model, 99, scale=1e3)
            clip.clip_()  # must not reach into the saved state
            file.seek(0)
            clip = LayerClip(model, alpha=1.2, warmup=2, beta=0.8, mode=mode)
            clip.load_state_dict(torch.load(file, weights_only=True))
        give_grads(model, step, {"layer 0": 30.0 if step in (5, 9) else 1.0, "head": 1.0 + step % 3})
        assert clip.clip_() == metrics
        assert all(torch.equal(g, wanted[n]) for n, g in grads(model).items())


def test_state_is_a_copy():
    model = Toy()
    clip = LayerClip(model)
    give_grads(model, 0)
    clip.clip_()
    state = clip.state_dict()
    other = LayerClip(model)
    other.load_state_dict(state)
    before = {k: v.clone() for k, v in state.items() if k != "groups"}
    give_grads(model, 1)
    clip.clip_(), other.clip_()
    assert all(torch.equal(state[k], v) for k, v in before.items())


def test_loading_refuses_other_groups():
    clip = LayerClip(Toy(layers=3))
    with pytest.raises(ValueError, match=r"only saved: layer 3, layer 4, layer 5 and 1 more; only here: none"):
        clip.load_state_dict(LayerClip(Toy(layers=7)).state_dict())
    with pytest.raises(ValueError, match=r"only saved: none; only here: head"):
        clip.load_state_dict(LayerClip(Toy(layers=3, tied=True)).state_dict())
    with pytest.raises(ValueError, match="only here: embeddings, layer 0"):
        clip.load_state_dict(LayerClip(Toy(layers=3), mode="tensor").state_dict())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alpha": 1.0}, "alpha=1.0"),
        ({"alpha": NAN}, "alpha=nan"),
        ({"beta": 1.0}, "beta=1.0"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": NAN}, "beta=nan"),
        ({"warmup": -1}, "warmup=-1"),
        ({"warmup": 2.5}, "warmup=2.5"),
        ({"mode": "block"}, "mode='block'"),
        ({"statistic": "median"}, "statistic='median'"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"window": 7}, "window=7"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LayerClip(Toy(), **options)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="no trainable parameter"):
        LayerClip(Toy().requires_grad_(False))
    clip = LayerClip(Toy())
    with pytest.raises(RuntimeError, match="no gradient on any parameter"):
        clip.clip_()
    model = Toy()
    clip = LayerClip(model)
    give_grads(model, 0)
    with pytest.raises(ValueError, match=r"\(3,\).*19 trainable"):
        clip.clip_(norms=torch.ones(3))


# ---------------------------------------------------------------- norms


def test_parameter_norms():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (3, 4, 5), (6,), (2, 2), (300, 300))]
    parameters[3] = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    for i in (0, 1, 4):
        parameters[i].grad = torch.randn_like(parameters[i]) * 10.0 ** (3 * i)
    parameters[3].grad = torch.full((2, 2), 1.5, dtype=torch.bfloat16)
    norms = parameter_norms(iter(parameters))
    assert norms.dtype == torch.float32 and norms.shape == (5,) and norms[2] == 0 and norms[3] == 3
    for i in (0, 1, 4):
        assert norms[i].item() == pytest.approx(parameters[i].grad.double().norm().item(), rel=1e-6)
    fine = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    fine.grad = torch.full_like(fine, 0.01)  # a bfloat16 sum would stop growing
    assert parameter_norms([fine]).item() == pytest.approx(100 * fine.grad[0].item(), rel=1e-5)
    parameters[0] = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameters[0].grad = torch.tensor([1.0, 1e-9, 0.0], dtype=torch.float64)
    assert parameter_norms(parameters).dtype == torch.float64
    parameters[4].grad[7, 7] = NAN
    assert parameter_norms(parameters).isnan().tolist() == [False, False, False, False, True]
    huge = nn.Parameter(torch.zeros(2))
    huge.grad = torch.full((2,), 1e19)
    assert group_norms(parameter_norms([huge] * 8), [0] * 8, 1).item() == pytest.approx(
        4e19
    )  # squares overflow float32


def test_norms_given_are_norms_used():
    model, other = Toy(), Toy()
    clip, same = LayerClip(model, alpha=1.2, warmup=1), LayerClip(other, alpha=1.2, warmup=1)
    for step in range(5):
        give_grads(model, step, {"layer 0": 1.0 + step})
        give_grads(other, step, {"layer 0": 1.0 + step})
        assert clip.clip_(norms=parameter_norms(clip.parameters)) == same.clip_()
        assert all(torch.equal(g, grads(other)[n]) for n, g in grads(model).items())


def test_group_norms_keep_nan_in_its_group():
    norms = torch.tensor([3.0, 4.0, NAN, 2.0, INF])
    assert group_norms(norms, torch.tensor([0, 0, 1, 3, 2]), 5).nan_to_num(-1.0, INF).tolist() == [
        5.0,
        -1.0,
        INF,
        2.0,
        0.0,
    ]
    assert group_norms(norms, [1, 1, -1, 0, -1], 2).tolist() == [2.0, 5.0]


def test_norms_never_wait_for_the_device():
    """A meta tensor has no data: reading a value on the host would raise."""
    parameters = [nn.Parameter(torch.zeros(3, 4, device="meta", dtype=d)) for d in (torch.float32, torch.bfloat16)] * 2
    for p in parameters[:2]:
        p.grad = torch.zeros_like(p)
    norms = parameter_norms(parameters)
    assert norms.device.type == "meta" and group_norms(norms, [0, 1, 1, 0], 2).shape == (2,)


# ---------------------------------------------------------------- names


NAMES = {
    "model.layers.7.self_attn.q_proj.weight": ("layer 7", "attention"),
    "module.model.layers.7.self_attn.q_norm.weight": ("layer 7", "norm"),
    "_orig_mod.module.model.layers.12._checkpoint_wrapped_module.mlp.gate_proj.weight": ("layer 12", "mlp"),
    "model._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.mlp.gate.weight": ("layer 0", "router"),
    "model.layers.3.mlp.experts.7.w1.weight": ("layer 3", "experts"),
    "model.layers.3.block_sparse_moe.experts.7.w1.weight": ("layer 3", "experts"),
    "model.layers.3.block_sparse_moe.gate.weight": ("layer 3", "router"),
    "model.layers.3.mlp.shared_expert_gate.weight": ("layer 3", "router"),
    "model.layers.3.mlp.shared_experts.up_proj.weight": ("layer 3", "experts"),
    "model.layers.3.mlp.router.bias": ("layer 3", "router"),
    "model.layers.0.post_attention_layernorm.weight": ("layer 0", "norm"),
    "base_model.model.model.layers.5.mlp.down_proj.lora_A.default.weight": ("layer 5", "mlp"),
    "base_model.model.model.layers.5.self_attn.v_proj.base_layer.weight": ("layer 5", "attention"),
    "base_model.model.model.embed_tokens.lora_embedding_A.default": ("embeddings", "embeddings"),
    "base_model.model.lm_head.modules_to_save.default.weight": ("head", "head"),
    "transformer.h.11.attn.c_attn.weight": ("layer 11", "attention"),
    "transformer.h.11.mlp.c_fc.bias": ("layer 11", "mlp"),
    "transformer.h.11.ln_2.weight": ("layer 11", "norm"),
    "transformer.wpe.weight": ("embeddings", "embeddings"),
    "transformer.ln_f.bias": ("final norm", "norm"),
    "gpt_neox.embed_in.weight": ("embeddings", "embeddings"),
    "embed_out.weight": ("head", "head"),
    "model.norm.weight": ("final norm", "norm"),
    "model.decoder.final_layer_norm.weight": ("final norm", "norm"),
    "lm_head.bias": ("head", "head"),
    "model.visual.blocks.3.attn.qkv.weight": ("other", "attention"),
    "model.vision_tower.encoder.layers.3.mlp.fc1.weight": ("other", "mlp"),
    "mtp.layers.0.mlp.up_proj.weight": ("other", "mlp"),
    "temperature": ("other", "other"),
}


def test_names():
    assert {name: (layer_of(name), kind_of(name)) for name in NAMES} == NAMES


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
MOE = {"attention", "experts", "router", "norm", "embeddings", "head"}
DENSE = {"attention", "mlp", "norm", "embeddings", "head"}


@pytest.mark.parametrize(
    "kind, options, kinds, tied",
    [
        ("qwen3", GROUPED, DENSE, False),
        ("qwen3_moe", {**GROUPED, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}, MOE, False),
        ("llama", {**SMALL, "num_key_value_heads": 1}, DENSE, False),
        ("mixtral", {**SMALL, "num_key_value_heads": 1, "num_local_experts": 4}, MOE, False),
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}, DENSE, True),
        ("gemma3_text", GROUPED, DENSE, True),
        ("gpt_neox", SMALL, DENSE, False),
        ("gpt_oss", {**GROUPED, "num_local_experts": 4}, MOE, False),
    ],
)
def test_every_parameter_of_a_real_model_has_its_place(kind, options, kinds, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=1, pad_token_id=0, **options)
    model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    assert {kind_of(name) for name in names} == (kinds - {"head"} if tied else kinds)
    layers = ["embeddings", "layer 0", "layer 1", "final norm"] + ([] if tied else ["head"])
    assert LayerClip(model).groups == layers
    norms = [name for name in names if kind_of(name) == "norm"]
    assert norms == [name for name in names if "norm" in name or ".ln_" in name]


def test_lora_adapters_are_grouped_by_layer():
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", bos_token_id=0, eos_token_id=1, **GROUPED))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj", "embed_tokens"]))
    clip = LayerClip(model, warmup=2)
    assert clip.groups == ["embeddings", "layer 0", "layer 1"] and len(clip.parameters) == 10
    assert {kind_of(name) for name in clip.names} == {"attention", "mlp", "embeddings"}
    ids = torch.tensor([[3, 4, 5, 6]])
    for step in range(4):
        model.zero_grad()
        (model(input_ids=ids, labels=ids).loss * (50 if step == 3 else 1)).backward()
        metrics = clip.clip_()
        assert metrics["layer_clip/clipped_frac"] == (1 if step == 3 else 0)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen and all(p.grad is None for p in frozen)


# ---------------------------------------------------------------- several processes


STEPS, SPIKE = 7, 5


def train(model, unwrapped, rank=0, world=1):
    """SGD with a planted explosion of layer 0. -> [(metrics, clipped whole gradients)]"""
    g = torch.Generator().manual_seed(3)
    batches = torch.randint(0, 7, (STEPS, 4 * world // math.gcd(4, world), 4), generator=g)
    clip, out = LayerClip(model, alpha=1.5, beta=0.8, warmup=2), []
    for step, ids in enumerate(batches):
        model.zero_grad()
        model(ids.chunk(world)[rank]).logsumexp(-1).square().mean().backward()
        if step == SPIKE:
            for p in unwrapped.layers[0].parameters():
                p.grad.mul_(100.0)
        metrics = clip.clip_()
        found = {}
        for name, p in unwrapped.named_parameters():
            found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.05)
        out.append((metrics, found))
    return out


def same(a, b):
    compared = 0
    for (metrics, grads_a), (other, grads_b) in zip(a, b, strict=True):
        assert metrics == pytest.approx(other, rel=1e-9)
        for name in grads_a:
            torch.testing.assert_close(grads_a[name], grads_b[name], rtol=1e-8, atol=1e-12)
            compared += 1
    assert compared == STEPS * 19
    assert a[SPIKE][0]["layer_clip/factor/layer_0"] < 0.05
    assert [m["layer_clip/clipped_frac"] > 0 for m, _ in a].count(True) < 4


def counting(calls):
    def all_reduce(tensor, group):
        calls.append(len(tensor))
        torch.distributed.all_reduce(tensor, group=group)

    return SimpleNamespace(all_reduce=all_reduce)


def worker(rank, world, store):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    reference = Toy()
    wanted = train(reference, reference)

    ddp = nn.parallel.DistributedDataParallel(Toy())
    assert LayerClip(ddp, mode="tensor").groups == [name for name, _ in reference.named_parameters()]
    same(wanted, train(ddp, ddp.module, rank, world))

    layouts = [(world,), (1, world), (world, 1)] + ([(2, 2)] if world == 4 else [])
    for shape in layouts:  # FSDP2, and HSDP with (replicas, shards)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = Toy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        calls = []
        layer_clip.dist = counting(calls)
        got = train(model, model, rank, world)
        assert calls == [19] * STEPS, calls  # one all-reduce a step, for all parameters together
        same(wanted, got)

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(5)
    placements = [[Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)]]
    parameters, exact = [], []
    for placement in placements:
        whole = torch.randn(3, 5, dtype=torch.float64)
        p = nn.Parameter(distribute_tensor(torch.zeros(3, 5, dtype=torch.float64), mesh, placement))
        p.grad = distribute_tensor(whole, mesh, placement)
        parameters.append(p)
        exact.append(whole.norm().item())
    parameters.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))  # plain: equal on all ranks
    parameters[-1].grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    parameters.append(nn.Parameter(distribute_tensor(torch.zeros(4, dtype=torch.float64), mesh, placements[1])))
    if rank == 0:  # a gradient that one rank alone has must not desynchronise the collectives
        parameters[-1].grad = distribute_free(parameters[-1], DTensor)
    half = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=torch.float64), mesh, placements[0]))
    half.grad = DTensor.from_local(torch.full((4,), 1.0, dtype=torch.float64), mesh, [Partial(), Replicate()])
    parameters.append(half)  # a sum over dimension "a" that is still to be taken: 2 in each element
    norms = parameter_norms(parameters).tolist()
    assert norms[:5] == pytest.approx(exact + [5.0], rel=1e-12) and norms[6] == pytest.approx(4.0)
    assert norms[5] == pytest.approx(math.sqrt(2) if world == 2 or rank % 2 == 0 else 0.0)

    flat = FullyShardedDataParallel(Toy(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP2"):
        LayerClip(flat)
    dist.barrier()
    dist.destroy_process_group()


def distribute_free(parameter, DTensor):
    """A DTensor gradient made without any collective."""
    local = torch.ones_like(parameter.to_local())
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_equal_one(tmp_path, world):
    torch.multiprocessing.spawn(worker, (world, str(tmp_path / "store")), nprocs=world)
