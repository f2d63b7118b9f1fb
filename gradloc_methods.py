r"""Where a gradient comes from: the two methods of GradLoc as functions on recorded model calls.

A `Call` is one micro-batch of an optimizer step as it happened: what the model was called with, the per-token outputs it
returned, and the gradient w = dLoss/d(output) that arrived at them in the real backward (every scaling of the loss,
accumulation included, is in it). The gradient of the step is then, with W data-parallel ranks,

    g = 1/W sum_t w_t grad logp_t(theta)                                                                      (1)

directional   c_t = w_t / W * d/d_eps logp_t(theta + eps g/||g||) at 0,   sum_t c_t = ||g||                   (2)
              exact by (1); one forward-mode pass, or two plain forwards with the weights moved by +-eps g/||g||.
search        norms of g restricted to a set of tokens (w zeroed elsewhere), bisected over micro-batches, ranks,
              sequences and tokens against tau sqrt(sum_t a_t^2), a_t = the weight that the loss aggregation gives token t.
              With token-mean, a_t = 1/N: tau / sqrt(N) for the step, as in the GradLoc blog (its table of phases).
confirmation  g restricted to one token of one sequence, truncated after it (causality): norm, share, norm per layer.

Source: Tencent Hunyuan, "GradLoc" blog, 2026-02 (search, thresholds). The directional identity is ours.
"""

import math
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from layer_clip import gradient_norms

# --- processes --------------------------------------------------------------------------------------------------------


def world_size():
    """Processes of the run; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    """Number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_ranks(tensor):
    """In place; returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_objects(item):
    """One list of every rank's item, in rank order."""
    if world_size() == 1:
        return [item]
    items = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def inner_module(model):
    """The module under DistributedDataParallel (its forward would start a reduction); anything else as it is."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def local(tensor):
    """This rank's part of a (possibly sharded) tensor, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- a recorded model call --------------------------------------------------------------------------------------------


def named_outputs(outputs):
    """What a logps_fn returned, as {"logps": (N, T), ...}: a tensor, a tuple (logps first), or a mapping with "logps"."""
    if isinstance(outputs, torch.Tensor):
        outputs = {"logps": outputs}
    elif isinstance(outputs, Mapping):
        outputs = {k: v for k, v in outputs.items() if v is not None}
    else:
        names = ["logps", *(f"output_{i}" for i in range(1, len(outputs)))]
        outputs = {k: v for k, v in zip(names, outputs, strict=True) if v is not None}
    if "logps" not in outputs or outputs["logps"].dim() != 2:
        shapes = {k: tuple(v.shape) for k, v in outputs.items()}
        raise ValueError(f"logps_fn returned {shapes}: GradLoc needs (N, T) log-probs, first or under the key 'logps'")
    return outputs


class Call:
    """One model call of the step on this rank, replayable on some of its rows and up to some token.

    function    (model, batch) -> named outputs; deterministic given the RNG state
    batch       mapping; tensors and lists whose first dimension is N belong to the sequences
    outputs     detached values, {"logps": (N, T), ...}; outputs of another shape (a router's auxiliary loss) are no token's
    weights     dLoss/d output, same keys, filled by the backward (absent = the loss does not read it)
    mask        (N, T) bool: tokens that the loss counts
    ids         (N, T) token ids, or None
    extras      {name: (N, T') tensor}, aligned with the last T' columns, or (N,): rollout_logps, advantages, ...
    offset      column of the first completion token: position in the completion = column - offset
    rng         RNG state before the call when dropout is active: then rows cannot be cut out, their noise would change
    """

    def __init__(self, function, batch, outputs, mask=None, ids=None, rng=None, forward_mode=True):
        self.function, self.batch, self.rng, self.forward_mode = function, batch, rng, forward_mode
        self.outputs = {k: v.detach() for k, v in outputs.items()}
        self.weights, self.extras, self.offset = {}, {}, 0
        self._mask, self.ids = mask, ids
        self.whole = rng is not None  # True: always replay the whole batch
        self.faithful = True  # False: a replay with the same weights gave other log-probs

    @property
    def shape(self):
        """(N, T) of the call's log-probs."""
        return tuple(self.outputs["logps"].shape)

    @property
    def mask(self):
        """(N, T) bool: tokens that count; without a mask of the batch those whose log-prob the loss reads."""
        if self._mask is not None:
            return self._mask.bool()
        if "logps" not in self.weights:  # no backward reached it
            return torch.zeros(self.shape, dtype=torch.bool, device=self.outputs["logps"].device)
        return self.weights["logps"] != 0  # NaN != 0 is True: a broken weight counts

    def per_token(self):
        """Names of the outputs that belong to tokens."""
        return [k for k, v in self.outputs.items() if k in self.weights and tuple(v.shape) == self.shape]

    def watch(self, outputs):
        """Let the coming backward leave dLoss/d output in `weights`."""
        for name, tensor in outputs.items():
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, name=name: self._arrived(name, grad))

    def _arrived(self, name, grad):
        if grad is None:
            return  # DDP passes every output through one node: those the loss does not read get no gradient
        grad = grad.detach()
        self.weights[name] = self.weights[name] + grad if name in self.weights else grad.clone()

    def replay(self, model, rows=None, end=None, sharded=False):
        """Outputs of the call on `rows` (list; None = all) up to column `end`. Falls back to the whole batch where a cut
        changes the values (a batch whose layout we do not understand): the values are known, so it is seen.
        -> (outputs, rows, end) as run."""
        n, t = self.shape
        if self.whole or (rows is None and end in (None, t)):
            with replayed_rng(self.rng):
                return named_outputs(self.function(model, self.batch)), None, t
        rows = list(range(n)) if rows is None else rows
        end = t if end is None else end
        outputs = None
        try:
            outputs = named_outputs(self.function(model, cut(self.batch, n, t, rows, end)))
        except (ValueError, IndexError, KeyError, RuntimeError, TypeError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
        if outputs is not None and (sharded or self._agrees(outputs["logps"], rows, end)):
            if sharded and not self._agrees(outputs["logps"], rows, end):
                self.faithful = False  # a second forward would be this rank's alone
            return outputs, rows, end
        if sharded:
            raise RuntimeError("a part of the batch could not be run by itself under FSDP2")
        self.whole = True
        return self.replay(model)

    def _agrees(self, logps, rows, end):
        if tuple(logps.shape) != (len(rows), end):
            return False
        known = self.outputs["logps"][rows][:, :end]
        seen = self.mask[rows][:, :end]
        low = torch.is_autocast_enabled(known.device.type) or known.dtype in (torch.bfloat16, torch.float16)
        tolerance = 0.3 if low else 1e-2  # another batch shape rounds differently; another token differs by far more
        difference = (logps.detach().float() - known.float()).abs()
        close = difference <= tolerance * (1 + known.float().abs())
        counted = difference[seen & known.isfinite()]
        typical = float(counted.median()) if len(counted) else 0.0
        return bool((close | ~seen | ~known.isfinite()).all()) and typical <= 0.05


def cut(batch, n, t, rows, end):
    """The rows of a batch, each tensor of t or more columns shortened on the right by t - end; prompts stay whole."""

    def one(name, value):
        if isinstance(value, list | tuple) and len(value) == n:
            return [value[i] for i in rows]
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != n:
            return value
        value = value[rows]
        if value.dim() > 1 and value.shape[1] >= t and not str(name).startswith("prompt"):
            value = value[:, : value.shape[1] - (t - end)]
        return value

    return {name: one(name, value) for name, value in batch.items()}


LAYOUT = ("input_ids", "attention_mask", "labels", "position_ids", "routes")  # (N, S): cut with the sequence


def known_layout(batch, n, t):
    """Can rows and columns surely be cut out of this batch? With sharded weights a failed try would leave the ranks in
    different collectives, so there a batch of unknown layout is always replayed whole."""
    if not isinstance(batch, Mapping):
        return False
    width = batch["input_ids"].shape[1] if isinstance(batch.get("input_ids"), torch.Tensor) else None
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.shape[0] != n or (value.dim() > 2 and name != "routes"):
            return False
        if value.dim() > 1 and value.shape[1] not in (1, t) and not (name in LAYOUT and value.shape[1] == width):
            if not str(name).startswith("prompt"):
                return False
    return True


def same_rng_state(a, b):
    """Are two states of `rng_state` the same, bit for bit?"""
    return torch.equal(a[0], b[0]) and (a[1] is None or torch.equal(a[1], b[1]))


def rng_state():
    """(CPU state, state of the current GPU or None)."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def replayed_rng(state):
    """Run under a recorded RNG state (None: as it is); the current one is back afterwards."""
    if state is None:
        yield
        return
    now = rng_state()
    try:
        set_rng_state(state)
        yield
    finally:
        set_rng_state(now)


def set_rng_state(state):
    """Goes back to a state of `rng_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


# --- the step ---------------------------------------------------------------------------------------------------------


class Step:
    """One optimizer step: model, calls, and its gradient (mean over ranks), read only.

    gradient: one tensor (or None) a parameter, aligned with `parameters`; `.grad` itself is never kept changed.
    """

    def __init__(self, model, calls, parameters, gradient):
        self.model, self.calls = inner_module(model), calls
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.gradient = gradient
        self.sharded = any(isinstance(p, DTensor) for p in self.parameters)
        if self.sharded:
            for call in calls:
                call.whole = call.whole or not known_layout(call.batch, *call.shape)
        self.scale = 1.0 / world_size()  # DDP and FSDP average over ranks
        self.norms = gradient_norms(self.parameters, gradient)  # (P,)
        self.norm = float(self.norms.double().square().sum().sqrt())
        self._graph = None  # (key, outputs): the last forward, kept for several backwards

    @property
    def device(self):
        """Where the parameters (of a sharded one this rank's part) lie."""
        return local(self.parameters[0]).device

    # vector-Jacobian products

    def restricted(self, index, rows=None, end=None, select=None):
        """Share of the step's gradient from this rank's tokens of call `index` where `select` (N, T) holds (None: all
        of the call, outputs that are no token's included). index None: this rank adds nothing; a sharded model still needs
        its forward for the collectives, the shortest there is. -> list of tensors or None, aligned with `parameters`."""
        if index is None and not self.sharded:
            return None
        with torch.enable_grad():
            weighted = self._weighted(0 if index is None else index, rows, end, select, idle=index is None)
        if self.sharded:
            return self._backward(weighted)
        grads = torch.autograd.grad(weighted, self.parameters, allow_unused=True, retain_graph=self._graph is not None)
        return [None if g is None else g * self.scale for g in grads]

    def _weighted(self, index, rows, end, select, idle=False):
        call = self.calls[index]
        if idle:
            rows, end = [0], min(call.shape[1], 2 + call.offset)
        reuse = rows is not None and len(rows) == 1 and not self.sharded
        key = (index, tuple(rows) if rows else None, end)
        if reuse and self._graph is not None and self._graph[0] == key:
            outputs, rows, end = self._graph[1]
        else:
            self.forget()
            self._reshard()
            outputs, rows, end = call.replay(self.model, rows, end, self.sharded)
            if rows is None and not idle:
                call.faithful &= call._agrees(outputs["logps"], list(range(call.shape[0])), end)
            if reuse:
                self._graph = key, (outputs, rows, end)
        total = 0.0
        for name, weight in call.weights.items():
            out = outputs[name]
            if tuple(call.outputs[name].shape) == call.shape:
                keep = torch.ones(call.shape, dtype=torch.bool, device=out.device) if select is None else select
                if rows is not None:
                    weight, keep = weight[rows], keep[rows]
                total = total + torch.where(keep[:, :end], weight[:, :end] * out, 0.0).sum()
            elif select is None:
                total = total + (weight * out).sum()
        return total * 0.0 if idle else total

    def forget(self):
        """Drop the kept forward graph."""
        self._graph = None

    def close(self):
        """Leave the model as an optimizer step expects it: FSDP's parameters in shards, nothing kept."""
        self.forget()
        self._reshard()

    def _reshard(self):
        if self.sharded:  # a root that stayed gathered after the last forward would hide moved weights
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _backward(self, loss):
        """FSDP reduces into `.grad`: set it aside, run the backward, take the result, put it back."""
        aside = [p.grad for p in self.parameters]
        try:
            for p in self.parameters:
                p.grad = None
            loss.backward()
            return [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, aside, strict=True):
                p.grad = grad

    def reduce(self, grads):
        """Sum over ranks of a restricted gradient of an unsharded model (None = zero); sharded ones are sums already."""
        if self.sharded or world_size() == 1:
            return grads
        full = []
        for i, p in enumerate(self.parameters):
            grad = None if grads is None else grads[i]
            full.append(sum_over_ranks(torch.zeros_like(p) if grad is None else grad.contiguous()))
        return full

    def measure(self, grads):
        """(norm, norms per parameter (P,), share of the step's norm <g_S, g>/||g||^2) of a restricted gradient."""
        norms = gradient_norms(self.parameters, grads)
        dot = self.norms.new_zeros((), dtype=torch.float64)
        for mine, whole in zip(grads, self.gradient, strict=True):
            if mine is not None and whole is not None:
                dot += (local(mine).double() * local(whole).double()).sum()
        if self.sharded:
            sum_over_ranks(dot)
        norm = float(norms.double().square().sum().sqrt())
        return norm, norms, float(dot) / self.norm**2 if self.norm else 0.0

    # weights moved along the gradient

    @contextmanager
    def movable_weights(self):
        """Yields move(alpha): weights = theta + alpha g/||g||. On exit the weights are theta again, bit for bit."""
        pairs = [
            (local(p.detach()), local(g)) for p, g in zip(self.parameters, self.gradient, strict=True) if g is not None
        ]
        saved = [p.clone() for p, _ in pairs]

        def move(alpha):
            self._reshard()
            with torch.no_grad():
                for (p, g), origin in zip(pairs, saved, strict=True):
                    torch.add(origin, g, alpha=alpha / self.norm, out=p)

        try:
            yield move
        finally:
            with torch.no_grad():
                for (p, _), origin in zip(pairs, saved, strict=True):
                    p.copy_(origin)
            self._reshard()


# --- directional ------------------------------------------------------------------------------------------------------


@dataclass
class Contributions:
    """values (N, T): each token's c_t, in units of the gradient norm's own (they sum to grad_norm); a list of such
    tensors for a step of several calls. certificate: |sum c_t + remainder - grad_norm| / grad_norm, over all ranks."""

    values: torch.Tensor | list
    grad_norm: float
    certificate: float
    remainder: float = 0.0  # the part of loss terms that are no token's
    method: str = ""


def _collect(step, slopes):
    """Per-call {name: d output / d eps} -> per-token values, remainder, certificate (over all ranks)."""
    values, remainder = [], torch.zeros((), dtype=torch.float64, device=step.device)
    total = torch.zeros((), dtype=torch.float64, device=step.device)
    for call, slope in zip(step.calls, slopes, strict=True):
        value = torch.zeros(call.shape, dtype=torch.float64, device=step.device)
        for name, weight in call.weights.items():
            part = torch.where(weight == 0, 0.0, weight.double() * slope[name].double()) * step.scale
            if tuple(weight.shape) == call.shape:
                value += part
            else:
                remainder += part.sum()
        values.append(value)
        total += value.sum()
    total, remainder = sum_over_ranks(torch.stack([total, remainder])).tolist()
    gap = abs(total + remainder - step.norm) / step.norm
    return values, remainder, gap if math.isfinite(gap) else math.inf


def forward_slopes(step):
    """d output / d eps of every call by forward-mode differentiation, this rank's; fused attention is replaced by its plain
    form for this pass. -> [{name: tensor}]

    Raises NotImplementedError or RuntimeError where an operation of the model has no forward derivative.
    """

    class Caller(torch.nn.Module):
        def __init__(self, model, call):
            super().__init__()
            self.model, self.call = model, call

        def forward(self):
            return self.call.replay(self.model)[0]

    slopes = []
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {
            f"model.{name}": forward_ad.make_dual(p.detach(), (g / step.norm).to(p.dtype))
            for name, p, g in zip(step.names, step.parameters, step.gradient, strict=True)
            if g is not None
        }
        for call in step.calls:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs = functional_call(Caller(step.model, call), duals, ())
            slope = {}
            for name in call.weights:
                tangent = forward_ad.unpack_dual(outputs[name]).tangent
                slope[name] = torch.zeros_like(outputs[name]) if tangent is None else tangent
            slopes.append(slope)
    return slopes


SHIFT = 0.03  # aimed change of a log-prob, nats: rounding of 1e-6 is 1e-4 of it, curvature enters at its square


def finite_difference(step, tolerance=0.05, tries=3):
    """Equation (2) by two forwards at theta +- eps g/||g||. eps adapts until the certificate is below `tolerance`.

    eps starts at the smaller of 1e-4 ||theta|| and the step that moves one token's log-prob by SHIFT if it alone made the
    gradient (||g|| <= sum |w| max |slope|); a miss rescales it by what the log-probs were seen to move.
    """
    weights = torch.zeros((), dtype=torch.float64, device=step.device)
    for call in step.calls:
        weights += call.weights["logps"].double().abs().sum() if "logps" in call.weights else 0.0
    total_weight = float(sum_over_ranks(weights)) * step.scale
    theta = float(
        gradient_norms(step.parameters, [p.detach() for p in step.parameters]).double().square().sum().sqrt()
    )
    eps = 1e-4 * theta
    if total_weight > 0:
        eps = min(eps, SHIFT * total_weight / step.norm)
    best = None
    with step.movable_weights() as move, torch.no_grad():
        for _ in range(tries):
            sides = []
            for sign in (1, -1):
                move(sign * eps)
                sides.append([call.replay(step.model)[0] for call in step.calls])
            slopes = [
                {name: (plus[name].double() - minus[name].double()) / (2 * eps) for name in call.weights}
                for call, plus, minus in zip(step.calls, *sides, strict=True)
            ]
            values, remainder, certificate = _collect(step, slopes)
            if best is None or certificate < best.certificate:
                best = Contributions(values, step.norm, certificate, remainder, "directional: finite difference")
            if certificate <= tolerance:
                break
            moved = _typical_move(step, slopes, values) * eps
            if moved == 0:  # lost in rounding
                eps *= 64.0
            else:
                eps *= min(max(SHIFT / moved, 1 / 64), 64.0) if abs(moved / SHIFT - 1) > 0.5 else 1 / 8
    return best


def _typical_move(step, slopes, values):
    """Slope of the log-probs that carry the norm: mean of |slope| weighted by |c_t|, over all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=step.device)
    for value, slope in zip(values, slopes, strict=True):
        if "logps" in slope:
            weight = torch.nan_to_num(value.abs())
            sums += torch.stack([(weight * torch.nan_to_num(slope["logps"].double().abs())).sum(), weight.sum()])
    total, weight = sum_over_ranks(sums).tolist()
    return total / weight if weight else 0.0


def contributions(step, method="auto", tolerance=0.05):
    """Equation (2) for a whole step. method: "auto" (forward mode where the model allows it, else finite differences), "jvp",
    "finite_difference". Raises ValueError for another name or a gradient that is zero or not finite."""
    if method not in ("auto", "jvp", "finite_difference"):
        raise ValueError(f"method={method!r} is unknown: use auto, jvp or finite_difference")
    if not (math.isfinite(step.norm) and step.norm > 0):
        raise ValueError(f"the gradient norm is {step.norm}: there are no contributions to a zero or non-finite norm")
    plain = not step.sharded and all(call.forward_mode for call in step.calls)
    if method == "jvp" or (method == "auto" and all(gather_objects(plain))):
        slopes, failure = None, None
        try:
            slopes = forward_slopes(step)
        except (NotImplementedError, RuntimeError) as error:
            failure = error
        if all(x is None for x in gather_objects(None if failure is None else str(failure))):
            values, remainder, certificate = _collect(step, slopes)
            return Contributions(values, step.norm, certificate, remainder, "directional: forward mode")
        if method == "jvp" or isinstance(failure, torch.OutOfMemoryError):
            raise failure or RuntimeError("another rank has no forward mode")
        for call in step.calls:
            call.forward_mode = False
    return finite_difference(step, tolerance)


# --- search -----------------------------------------------------------------------------------------------------------


def coefficients(calls, aggregation):
    """a_t, the weight that the loss aggregation gives each token's term, for every call: list of (N, T) float64.

    token_mean 1/N; seq_mean_token_mean 1/(sequences |o_i|); seq_sum 1/sequences; counted over all calls and ranks.
    """
    masks = [call.mask for call in calls]
    counts = torch.zeros(2, dtype=torch.float64, device=masks[0].device)
    for mask in masks:
        counts += torch.stack([mask.sum(), mask.any(1).sum()]).double()
    tokens, sequences = sum_over_ranks(counts).tolist()
    result = []
    for mask in masks:
        m = mask.double()
        if aggregation == "token_mean":
            result.append(m / max(tokens, 1))
        elif aggregation == "seq_mean_token_mean":
            result.append(m / m.sum(1, keepdim=True).clamp(min=1) / max(sequences, 1))
        elif aggregation == "seq_sum":
            result.append(m / max(sequences, 1))
        else:
            raise ValueError(f"aggregation={aggregation!r} is unknown: use token_mean, seq_mean_token_mean or seq_sum")
    return result


@dataclass
class Found:
    """One token with its exact gradient. share = <g_t, g>/||g||^2, signed; norms: per parameter (P,)."""

    rank: int
    call: int
    row: int
    column: int
    grad_norm: float
    share: float
    norms: torch.Tensor


@dataclass
class Search:
    """What a bisection found: [(place, norm)], backward passes made, and the segments that it looked into, in order."""

    found: list = field(default_factory=list)
    probes: int = 0
    exhausted: bool = False  # the budget ended first
    trace: list = field(default_factory=list)


@dataclass
class _Node:
    level: str
    norm: float
    call: int | None = None
    ranks: tuple = (0, 1)
    rows: list | None = None
    columns: list | None = None
    vector: list | None = None  # its gradient, while it is at hand: the sibling is the parent minus this


def search(step, coefficient, tau, budget=128):
    """Depth-first search for the tokens whose own gradient exceeds tau a_t. Follows the larger branch first, comes back
    to the other, prunes a branch whose norm is below tau sqrt(sum a_t^2). budget: backward passes. -> Search.

    Against the published code: thresholds hold for every aggregation and any accumulation (w carries the scale), a sequence
    level, one backward a split (the sibling is parent minus half), no forward of a rank that is not searched, several
    micro-batches and ranks are followed, nothing found is a result.
    """
    result = Search()
    totals = [float(c.square().sum()) for c in coefficient]
    table = gather_objects(totals)  # [rank][call] sum of a_t^2
    counts = gather_objects([int(call.mask.sum()) for call in step.calls])

    def limit(squares):
        return tau * math.sqrt(squares)

    def note(level, tokens, norm, threshold):
        result.trace.append({"level": level, "tokens": tokens, "norm": norm, "threshold": threshold})
        return norm > threshold

    def probe(index, rows=None, end=None, select=None):
        result.probes += 1
        return step.restricted(index, rows, end, select)

    def push(stack, nodes):
        stack.extend(sorted(nodes, key=lambda node: node.norm))
        for node in stack[:-1]:
            node.vector = None  # one gradient copy at a time

    world = world_size()
    stack = []
    if note("step", sum(map(sum, counts)), step.norm, limit(sum(map(sum, table)))):
        if len(step.calls) == 1:
            # without its vector: terms of the loss that are no token's would count as the last token's
            stack.append(_Node("micro-batch", step.norm, 0, (0, world)))
        else:
            nodes = []
            for m in range(len(step.calls)):
                grads = step.reduce(probe(m))
                norm = step.measure(grads)[0]
                if note(f"micro-batch {m}", sum(c[m] for c in counts), norm, limit(sum(t[m] for t in table))):
                    nodes.append(_Node("micro-batch", norm, m, (0, world)))
            push(stack, nodes)
    while stack:
        node = stack.pop()
        low, high = node.ranks
        if high - low == 1:
            _search_rank(step, coefficient, node, tau, budget, result)
        elif result.probes + (1 if node.vector is not None else 2) > budget:
            result.exhausted = True
            break
        else:
            middle, me = (low + high) // 2, rank()
            left = step.reduce(probe(node.call if low <= me < middle else None))
            vectors = [left, _minus(node.vector, left)]
            if vectors[1] is None:
                vectors[1] = step.reduce(probe(node.call if middle <= me < high else None))
            nodes = []
            for (a, b), vector in zip([(low, middle), (middle, high)], vectors, strict=True):
                norm = step.measure(vector)[0]
                squares = sum(table[r][node.call] for r in range(a, b))
                tokens = sum(counts[r][node.call] for r in range(a, b))
                if note(f"ranks {a}-{b - 1}", tokens, norm, limit(squares)):
                    nodes.append(_Node("ranks", norm, node.call, (a, b), vector=vector))
            push(stack, nodes)
        if result.exhausted:
            break
    step.forget()
    result.found.sort(key=lambda found: -found.grad_norm)
    return result


def _minus(whole, part):
    """whole - part, or None where whole is not at hand."""
    if whole is None:
        return None
    return [w if p is None else (-p if w is None else w - p) for w, p in zip(whole, part, strict=True)]


def _search_rank(step, coefficient, node, tau, budget, result):
    """The sequences and tokens of one call on one rank. That rank decides and probes; with sharded weights the others run
    the shortest possible forward and backward beside each probe, with unsharded ones they wait for the result."""
    owner = node.ranks[0]
    state = [None]
    if rank() == owner:
        state[0] = _bisect(step, coefficient[node.call], node, tau, budget - result.probes, owner)
        if step.sharded and world_size() > 1:
            _announce(step, owner, False)
    elif step.sharded:
        while _announce(step, owner, None):
            step.measure(step.restricted(None))
    if world_size() > 1:
        for found in state[0].found if state[0] else []:
            found.norms = found.norms.cpu()
        dist.broadcast_object_list(state, src=owner)
    part = state[0]
    result.found += part.found
    result.trace += part.trace
    result.probes += part.probes
    result.exhausted = part.exhausted


def _announce(step, owner, more):
    """The owner says whether another probe follows; the others hear it."""
    flag = torch.tensor([int(bool(more))], device=step.device)
    dist.broadcast(flag, src=owner)
    return bool(flag.item())


def _bisect(step, coefficient, node, tau, budget, owner):
    part, call, m = Search(), step.calls[node.call], node.call
    mask = call.mask
    together = step.sharded and world_size() > 1

    def probe(rows, columns):
        """(vector, norm, norms, share) of the given rows, or of the given columns of one row."""
        part.probes += 1
        select = torch.zeros_like(mask)
        if columns is None:
            select[rows] = mask[rows]
            end = None
        else:
            select[rows[0], columns] = True
            last = mask[rows[0]].nonzero()
            end = int(last.max()) + 1 if not step.sharded else max(columns) + 1
        if together:
            _announce(step, owner, True)
        grads = step.restricted(m, rows, end, select)
        return grads, *step.measure(grads)

    first = node.vector if not together else None
    rows = [i for i in range(call.shape[0]) if bool(mask[i].any())]
    stack = [_Node("sequences", node.norm, m, rows=rows, vector=first)] if rows else []
    while stack:
        node = stack.pop()
        if len(node.rows) == 1 and node.columns is None:  # a sequence becomes its tokens, its gradient is the same
            columns = mask[node.rows[0]].nonzero().squeeze(1).tolist()
            node = _Node("tokens", node.norm, m, rows=node.rows, columns=columns, vector=node.vector)
        if node.columns is not None and len(node.columns) == 1:
            if part.probes >= budget and node.vector is None:
                part.exhausted = True
                break
            measured = (
                step.measure(node.vector) if node.vector is not None and not together
                else probe(node.rows, node.columns)[1:]
            )  # fmt: skip
            norm, norms, share = measured
            part.found.append(Found(owner, m, node.rows[0], node.columns[0], norm, share, norms))
            continue
        if part.probes + (1 if node.vector is not None and not together else 2) > budget:
            part.exhausted = True
            break
        items = node.rows if node.columns is None else node.columns
        halves = [items[: len(items) // 2], items[len(items) // 2 :]]
        if node.columns is None:
            children = [(half, None) for half in halves]
        else:
            children = [(node.rows, half) for half in halves]
        left = probe(*children[0])
        vector = None if together else _minus(node.vector, left[0])
        right = (vector, *step.measure(vector)) if vector is not None else probe(*children[1])
        nodes = []
        for (rows, columns), (vector, norm, _, _) in zip(children, (left, right), strict=True):
            chosen = coefficient[rows] if columns is None else coefficient[rows[0], columns]
            threshold = tau * math.sqrt(float(chosen.square().sum()))
            level = f"sequences {rows[0]}-{rows[-1]}" if columns is None else f"tokens {columns[0]}-{columns[-1]}"
            tokens = int(mask[rows].sum()) if columns is None else len(columns)
            part.trace.append({"level": level, "tokens": tokens, "norm": norm, "threshold": threshold})
            if norm > threshold:
                nodes.append(_Node(level, norm, m, rows=rows, columns=columns, vector=None if together else vector))
        stack.extend(sorted(nodes, key=lambda child: child.norm))
        for waiting in stack[:-1]:
            waiting.vector = None
    return part


# --- exact confirmation -----------------------------------------------------------------------------------------------


def confirm(step, places):
    """Exact gradients of single tokens. places: [(rank, call, row, column)], the same list on every rank. -> [Found].

    Each on its own sequence, cut after the last of its tokens; tokens of one sequence share the forward. Ranks work on
    their own tokens at the same time, unless the weights are sharded: then all take part in each.
    """
    last = {}
    for place in places:
        last[place[:3]] = max(last.get(place[:3], -1), place[3])
    done = {}
    for place in sorted(places):
        owner, m, row, column = place
        mine = owner == rank()
        if not (mine or step.sharded):
            continue
        if mine:
            select = torch.zeros(step.calls[m].shape, dtype=torch.bool, device=step.device)
            select[row, column] = True
            end = column + 1 if step.sharded else last[place[:3]] + 1
            try:
                grads = step.restricted(m, [row], end, select)
            except RuntimeError as error:
                if step.sharded or isinstance(error, torch.OutOfMemoryError):
                    raise
                done[place] = None
                continue
        else:
            grads = step.restricted(None)
        norm, norms, share = step.measure(grads)
        if mine:
            done[place] = Found(owner, m, row, column, norm, share, norms.cpu())
    step.forget()
    everywhere = {}
    for part in gather_objects(done):
        everywhere |= part
    return [everywhere[place] for place in places]


# --- values that are not finite ---------------------------------------------------------------------------------------


@dataclass
class Offender:
    """The first place where a value stopped being finite. where: weights | forward | loss | backward."""

    where: str
    module: str | None = None
    tensor: str | None = None
    rank: int = 0
    call: int | None = None
    row: int | None = None
    column: int | None = None
    broken: int = 0  # where = loss: tokens of the call whose dLoss/dlogp is not finite, and tokens of the call
    tokens: int = 0


def first_nonfinite(step):
    """Locate NaN and Inf: in the weights, in a module's forward, in the loss, or in a module's backward. -> Offender | None.

    forward   the first module (in order of execution) with a non-finite output from finite inputs
    loss      log-probs are finite but dLoss/dlogp is not: names the token and the recorded tensor that is not finite there
    backward  the first module (in order of the backward) whose input gradient or weight gradient is not finite although its
              output gradient is
    All ranks look at the same time and the first rank that found something answers.
    """
    offender = _broken_weights(step) or _broken_forward(step) or _broken_loss(step)
    offenders = [o for o in gather_objects(offender) if o is not None]
    if not offenders:  # forward and loss are fine on every rank
        offenders = [o for o in gather_objects(_broken_backward(step)) if o is not None]
    return offenders[0] if offenders else None


def _finite(tensor):
    return bool(torch.isfinite(local(tensor)).all())


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, list | tuple) or hasattr(value, "__iter__"):
        return [t for item in value for t in _tensors(item)] if not isinstance(value, str) else []
    return []


def _broken_weights(step):
    for name, p in zip(step.names, step.parameters, strict=True):
        if not _finite(p.detach()):
            return Offender("weights", tensor=name, rank=rank())
    return None


def _place(tensor, shape, sole=False):
    """(row, column) of the first sequence position that is not finite in a (N, S, ...) or (N*S, ...) tensor; column None where
    it cannot be told. sole: also where several of the row are broken (attention's backward spreads one to all)."""
    n, t = shape
    bad = ~torch.isfinite(tensor.detach())
    bad = bad.flatten(2).any(2) if bad.dim() > 2 else bad
    if bad.shape[0] != n:
        if bad.shape[0] % n or bad.shape[0] == 0:
            return None, None
        bad = (bad.any(1) if bad.dim() > 1 else bad).view(n, -1)
    if bad.dim() == 1:
        return int(bad.nonzero()[0]), None
    row = int(bad.any(1).nonzero()[0])
    columns = bad[row].nonzero().squeeze(1)
    if sole and len(columns) > 1:
        return row, None
    before = max(bad.shape[1] - 1 - t, 0)  # positions that predict no column: logps may cover completions only
    return row, min(max(int(columns[0]) - before, 0), t - 1)


@contextmanager
def _hooks(model, on_forward):
    handles = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, name=name: on_forward(name, module, args, kwargs, output),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _broken_forward(step):
    """Every rank runs every call: with sharded weights the forwards are collective."""
    found = None
    for index, call in enumerate(step.calls):
        seen = []

        def look(name, module, args, kwargs, output, seen=seen):
            if not seen:
                outputs = _tensors(output)
                broken = next((t for t in outputs if not _finite(t)), None)
                if broken is not None and all(_finite(t) for t in _tensors([args, kwargs])):
                    seen.append((name, broken.detach()))

        if not step.sharded and all(map(_finite, call.outputs.values())):
            continue
        step._reshard()
        with _hooks(step.model, look), torch.no_grad():
            outputs = call.replay(step.model)[0]
        if found is not None or all(_finite(outputs[name]) for name in call.outputs):
            continue
        logps = outputs["logps"].detach()
        bad = (~torch.isfinite(logps) & call.mask).nonzero()
        row, column = bad[0].tolist() if len(bad) else (None, None)
        name = seen[0][0] if seen else "language model head"
        if seen and row is None:
            row, column = _place(seen[0][1], call.shape)
        elif seen:
            place = (
                _place(seen[0][1][row : row + 1], (1, call.shape[1]))[1]
                if seen[0][1].shape[0] == call.shape[0]
                else None
            )
            column = column if place is None else max(place, call.offset)
        found = Offender("forward", name or "model", None, rank(), index, row, column)
    return found


def _broken_loss(step):
    for index, call in enumerate(step.calls):
        for name, weight in call.weights.items():
            if _finite(weight):
                continue
            if tuple(weight.shape) != call.shape:
                return Offender("loss", tensor=name, rank=rank(), call=index)
            bad = (~torch.isfinite(weight)).nonzero()
            row, column = bad[0].tolist()
            tensor, tokens = _broken_extra(call, row, column), int(call.mask.sum())
            if tensor is None and tokens == len(bad) > 1:
                row = column = None  # the whole loss is broken: no token is to blame
            return Offender("loss", None, tensor, rank(), index, row, column, len(bad), tokens)
        for name, value in call.extras.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2:
                counted = call.mask[:, call.shape[1] - value.shape[1] :]
                bad = (~torch.isfinite(value) & counted).nonzero()
                if len(bad):
                    row, column = bad[0].tolist()
                    column += call.shape[1] - value.shape[1]
                    tokens = int(call.mask.sum())
                    return Offender("loss", None, name, rank(), index, row, column, len(bad), tokens)
    return None


def _broken_extra(call, row, column):
    """Name of the recorded tensor that is not finite at a token; None when the loss itself made the value."""
    batch = call.batch if isinstance(call.batch, Mapping) else {}
    for name, value in (call.extras | dict(batch)).items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape[:1] != call.shape[:1]:
            continue
        if value.dim() > 2 or (value.dim() == 2 and value.shape[1] > call.shape[1]):
            continue
        shift = call.shape[1] - value.shape[1] if value.dim() == 2 and value.shape[1] > 1 else None
        item = value[row].reshape(-1)[0] if shift is None else value[row, column - shift]
        if not torch.isfinite(item):
            return name
    return None


def _broken_backward(step):
    found = None
    for index, call in enumerate(step.calls):
        events, finite = [], {}

        def look(name, module, args, kwargs, output, events=events, finite=finite):
            def arrived(grad, kind):
                if events:
                    return
                if kind == "output":
                    finite[name] = finite.get(name, True) and _finite(grad)
                elif finite.get(name, False) and not _finite(grad):  # its backward ran on a finite gradient
                    events.append((name, grad.detach()))

            for tensor in _tensors([args, kwargs]):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: arrived(grad, "input"))
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: arrived(grad, "output"))

        step.forget()
        step._reshard()
        with _hooks(step.model, look):
            grads = step.restricted(index)
        broken = [n for n, g in zip(step.names, grads, strict=True) if g is not None and not _finite(g)]
        if found is not None or not (events or broken):
            continue
        if events:
            name, bad = events[0]
            row, column = _place(bad, call.shape, sole=True)
            found = Offender("backward", name or "model", None, rank(), index, row, column)
        else:
            found = Offender("backward", broken[-1].rpartition(".")[0], broken[-1], rank(), index)
    return found
