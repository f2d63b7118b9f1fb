"""LayerClip: clip every decoder layer by its own history, so that one exploding layer cannot freeze the others.

    tau_l  = alpha * R_l(t-1),  alpha > 1                                   threshold: the statistic before this step
    f_l    = tau_l / (n_l + eps) where n_l > tau_l, else 1,   n_l = ||grad_l(t)||   factor on the layer's gradient
    R_l(t) = beta R_l(t-1) + (1 - beta) min(n_l, tau_l)                     "ema"
           = (1 - 1/t) R_l(t-1) + (1/t) min(n_l, tau_l)                     "mean"

Source: GradLoc blog, layer-wise gradient heterogeneity (type B): shallow layers spike while deep ones stay calm, parts
of one layer spike together, and global clipping, set by the exploding layer, shrinks every healthy one.
Differs from the formula as printed in two places. There the threshold uses R_l(t), which holds the current norm: with
alpha (1 - beta) >= 1 it can never clip. And R_l takes the unclipped norm: one spike raises the bar for the next.

Also here, for GradLoc: which layer and which kind of module a parameter belongs to, and gradient norms per parameter.
"""

import math
import re

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

# --- which layer, which kind ------------------------------------------------------------------------------------------

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # DDP, compile, FSDP
OUTSIDE = re.compile(r"^(vision|visual|audio|image|multi_modal|mm_|mtp$)")  # towers with layers of their own numbering
CONTAINERS = {"layers", "h", "blocks", "block", "layer"}
EMBEDDINGS = re.compile(r"^(embed_(tokens|in|positions)|wte|wpe|(word|tok|token|position)_embeddings?(_layernorm)?)$")
HEADS = {"lm_head", "embed_out", "output", "score", "head", "v_head", "value_head"}
NORM = re.compile(r"norm|^ln(_|\d|$)")


def _parts(name):
    return [part for part in name.split(".") if part not in WRAPPERS]


def layer_of(name):
    """Part of the model: "embeddings" | "layer 7" | "final norm" | "head" | "other". Wrappers and adapters do not matter.

    "other" is, for example, the layers of a vision tower or a prediction head beside the decoder.
    """
    parts = _parts(name)
    if any(OUTSIDE.search(part) for part in parts):
        return "other"
    for container, number in zip(parts, parts[1:], strict=False):
        if container in CONTAINERS and number.isdecimal():
            return f"layer {int(number)}"
    if any(EMBEDDINGS.search(part) for part in parts):
        return "embeddings"
    if any(part in HEADS for part in parts):
        return "head"
    return "final norm" if any(NORM.search(part) for part in parts) else "other"


def kind_of(name):
    """Kind of module: "attention" | "mlp" | "experts" | "router" | "norm" | "embeddings" | "head" | "other".

    Norms inside attention (q_norm) are norms; shared experts are experts; the gate of a shared expert is a router.
    """
    parts = [part.lower() for part in _parts(name)]
    if any(NORM.search(part) for part in parts):
        return "norm"
    layer = layer_of(name)
    if layer in ("embeddings", "head"):
        return layer
    if any("attn" in part or "attention" in part for part in parts):
        return "attention"
    if any(part in ("gate", "router", "shared_expert_gate") for part in parts):
        return "router"
    if any("expert" in part for part in parts):
        return "experts"
    if any(part in ("mlp", "feed_forward", "ffn", "fc1", "fc2", "block_sparse_moe") for part in parts):
        return "mlp"
    return "other"


# --- norms ------------------------------------------------------------------------------------------------------------


def wide(device):
    """The dtype that squares are summed in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def _local_grad(parameter, grad):
    """The gradient, or this rank's shard of it, as a plain tensor that shares its memory."""
    if not isinstance(grad, DTensor):
        return grad
    if grad.placements != parameter.placements:  # tensor parallelism can leave a sum that is still to be reduced
        grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()


def parameter_norms(parameters):
    """2-norm of each parameter's `.grad`: `gradient_norms` of what the backward left. -> (P,)"""
    parameters = list(parameters)
    return gradient_norms(parameters, [p.grad for p in parameters])


@torch.no_grad()
def gradient_norms(parameters, grads):
    """2-norm of each parameter's gradient, 0 where it is None. -> (P,), on the first gradient's device, no host sync.

    grads: one tensor or None a parameter, of its shape (and its sharding).

    float32, float64 if any gradient is; half-precision gradients are summed in float32. The norm of the whole tensor
    also where it is sharded (FSDP2): the squared sums of all shards travel in one all-reduce over the dimensions of the
    mesh that shard, so replicas (HSDP) count once. All ranks then get the same bits. Plain gradients need no collective:
    under DDP they are equal on all ranks. A collective where anything is sharded: all ranks call it.
    """
    grads = [None if g is None else _local_grad(p, g) for p, g in zip(parameters, grads, strict=True)]
    present = [grad for grad in grads if grad is not None]
    device = present[0].device if present else parameters[0].device
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in present) else torch.float32
    squares = [torch.zeros((), dtype=wide(device), device=device)] * len(parameters)
    for i, grad in enumerate(grads):
        if grad is not None:
            norm = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
            squares[i] = norm.to(device, wide(device)).square()
    sharded = {}  # keyed by the parameter, not its gradient, which one rank alone may lack: the ranks' calls must match
    for i, p in enumerate(parameters):
        if isinstance(p, DTensor):
            dims = tuple(dim for dim, placement in enumerate(p.placements) if not placement.is_replicate())
            sharded.setdefault((p.device_mesh, dims), []).append(i)
    for (mesh, dims), members in sharded.items():
        total = torch.stack([squares[i] for i in members]).to(mesh.device_type)  # the shard may lie on the host
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        for i, value in zip(members, total.to(device).unbind(), strict=True):
            squares[i] = value
    return torch.stack(squares).sqrt().to(dtype)


def group_norms(norms, groups, num_groups):
    """Norms of groups of parameters: sqrt of the sum of squares. norms (P,), groups (P,) indices -> (num_groups,).

    Sums in float64 and in a fixed order (no atomic adds), so that equal inputs give equal bits on every rank.
    """
    groups = torch.as_tensor(groups, device=norms.device)
    member = groups.unsqueeze(0) == torch.arange(num_groups, device=norms.device).unsqueeze(1)
    squares = norms.to(wide(norms.device)).square()
    return torch.where(member, squares, 0.0).sum(1).sqrt().to(norms.dtype)


# --- the equation -----------------------------------------------------------------------------------------------------


def layer_thresholds(statistic, alpha):
    """tau_l = alpha * R_l(t-1). statistic (groups,), as it was before this step -> (groups,)."""
    return alpha * statistic


def layer_factors(norms, thresholds, eps=1e-12):
    """tau_l / (n_l + eps) where the norm is above its threshold, else exactly 1. (groups,), (groups,) -> (groups,).

    A norm that is not finite gives 1: its gradient stays as broken as it is, for the caller to see.

    paper: min(1, tau / (n + eps)), eps not stated; we: divide only above the threshold and 1e-12, because an eps near
    the norms themselves would shrink healthy layers of a loss that is divided by a large constant.
    """
    return torch.where((norms > thresholds) & norms.isfinite(), thresholds / (norms + eps), 1.0)


def layer_correlation(history):
    """Pearson correlation over steps between the norms of each two layers. (steps, layers) -> (mean, min) over pairs.

    The heterogeneity measure of the GradLoc blog: near 1 where layers spike together, not near 1 for type B. A layer
    whose norm never changes has no correlation and is left out; None where fewer than two layers are left.
    """
    series = history.T[history.amax(0) > history.amin(0)]
    if len(series) < 2:
        return None
    pairs = torch.corrcoef(series)[tuple(torch.triu_indices(len(series), len(series), offset=1))]
    return pairs.mean().item(), pairs.min().item()


# --- the clip ---------------------------------------------------------------------------------------------------------

MIN_STEPS = 8  # a correlation over fewer is noise


class LayerClip:
    """Clips the gradients of `model` group by group, in place: `clip_()` after backward, before the optimizer step.

    Groups: every decoder layer; embeddings (a tied head is the embeddings), final norm, head, and what is left over as
    "other". mode="tensor": every parameter by itself, the unit of AdaGC (arXiv:2502.11034), as a baseline. Groups and
    parameters are taken here, once: build it on the prepared (wrapped, sharded) model, after freezing. Gradients must be
    unscaled (fp16). Works beside global clipping (before it) or instead of it; needs no collective under DDP.

    A group is not clipped in the first `warmup` steps that gave it a gradient. A step whose norm is 0, or below a thousandth of
    the usual (no advantage in the whole batch), counts neither there nor in the statistic; nor does one whose norm is not finite, of
    which nothing is scaled. alpha=math.inf measures and never clips.

    paper: alpha, beta, EMA or mean, warm-up and grouping not stated; we: alpha 2, because a spike is several-fold while
    in 80 healthy steps of the tiny Qwen3 a group's norm varied by 40-50 %, 16 of 360 norms after warm-up lay above 1.5 R
    and 1 above 2 R; EMA with beta 0.95, because norms drift over tens of steps, and a layer that stays above its
    threshold then moves it by at most 1 + (1 - beta)(alpha - 1) = 5 % a step; warm-up 20 = 1 / (1 - beta) steps, the
    memory of that EMA, whose first value is the first norm. The mean never forgets: after t steps it moves by 1/t.

    Raises ValueError for an argument out of range, a model without trainable parameters or wrapped in FSDP1.
    """

    def __init__(self, model, alpha=2.0, beta=0.95, warmup=20, mode="layer", statistic="ema", eps=1e-12, window=64):
        if not alpha > 1:
            raise ValueError(
                f"LayerClip alpha={alpha}: the threshold is alpha times the usual norm, use a value above 1"
            )
        if not 0 <= beta < 1:
            raise ValueError(f"LayerClip beta={beta} is no EMA weight of the past: use a value in [0, 1)")
        if warmup < 0 or warmup != int(warmup):
            raise ValueError(f"LayerClip warmup={warmup}: use a whole number of steps, 0 or more")
        if mode not in ("layer", "tensor"):
            raise ValueError(f"LayerClip mode={mode!r} is unknown: use 'layer' or 'tensor'")
        if statistic not in ("ema", "mean"):
            raise ValueError(f"LayerClip statistic={statistic!r} is unknown: use 'ema' or 'mean'")
        if not 0 <= eps < math.inf:
            raise ValueError(f"LayerClip eps={eps}: use a small number, 0 or more")
        if window < MIN_STEPS:
            raise ValueError(f"LayerClip window={window}: the correlation needs at least {MIN_STEPS} steps")
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ValueError(
                "LayerClip cannot see the layers inside FSDP1's flat parameters: use FSDP2 (fsdp_version 2)"
            )
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise ValueError(
                "LayerClip found no trainable parameter: unfreeze some, or add adapters, before building it"
            )
        self.alpha, self.beta, self.warmup = alpha, beta, int(warmup)
        self.mode, self.statistic, self.eps, self.window = mode, statistic, eps, window
        self.names = [".".join(_parts(name)) for name, _ in trainable]
        self.parameters = [p for _, p in trainable]
        layers = [layer_of(name) for name in self.names]
        self.groups = sorted(set(layers), key=_rank) if mode == "layer" else list(self.names)
        self._group = torch.tensor(
            [self.groups.index(layer) for layer in layers] if mode == "layer" else range(len(layers))
        )  # (P,)
        decoder = sorted({label for label in layers if label.startswith("layer ")}, key=_rank)
        self._layer = torch.tensor([decoder.index(label) if label in decoder else -1 for label in layers])  # (P,)
        # float64 on the host: a few hundred numbers, and the same bits on every rank
        self._value = torch.zeros(len(self.groups), dtype=torch.float64)  # R_l
        self._count = torch.zeros(len(self.groups), dtype=torch.int64)  # t of each group
        self._history = torch.zeros(0, len(decoder), dtype=torch.float64)  # (steps <= window, layers)

    @torch.no_grad()
    def clip_(self, norms=None):
        """Clip, update the statistic, return the metrics as floats. One host sync: the norms.

        norms: (P,) from `parameter_norms(self.parameters)`, if already computed (they say then what is clipped).

        layer_clip/norm/<group>      before clipping                      layer_clip/factor/<group>   1 = untouched
        layer_clip/clipped_frac      share of groups clipped              layer_clip/nonfinite        groups with NaN or Inf
        layer_clip/norm_before, norm_after                                of the whole gradient
        layer_clip/corr_mean, corr_min      `layer_correlation` of the last `window` steps; absent before 8 steps
        In mode "tensor" norm/max and factor/min stand for the groups.

        Raises RuntimeError where no parameter has a gradient, ValueError for norms of another length.
        """
        if all(p.grad is None for p in self.parameters):
            raise RuntimeError(
                "LayerClip found no gradient on any parameter: call clip_() between backward and the optimizer step, on a "
                "LayerClip built from the prepared model (FSDP2 replaces parameters; DeepSpeed keeps gradients elsewhere)"
            )
        if norms is None:
            norms = parameter_norms(self.parameters)
        elif norms.shape != (len(self.parameters),):
            raise ValueError(
                f"norms of shape {tuple(norms.shape)}: give one for each of the {len(self.parameters)} trainable parameters"
            )
        norms = norms.to("cpu").double()  # the host sync
        before = norms if self.mode == "tensor" else group_norms(norms, self._group, len(self.groups))
        ready = self._count >= max(self.warmup, 1)
        thresholds = torch.where(ready, layer_thresholds(self._value, self.alpha), math.inf)
        factors = layer_factors(before, thresholds, self.eps)
        for parameter, factor in zip(self.parameters, factors[self._group].tolist(), strict=True):
            if factor != 1 and parameter.grad is not None:
                grad = parameter.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
        self._update(torch.minimum(before, thresholds), before.isfinite() & (before > 1e-3 * self._value))
        return self._metrics(before, factors, group_norms(norms, self._layer, self._history.shape[1]))

    def _update(self, kept, counted):
        """R_l from the norm that was let through; `minimum` instead of factor * norm, so that eps cannot erode it."""
        self._count += counted
        if self.statistic == "ema":
            new = torch.where(self._count == 1, kept, self.beta * self._value + (1 - self.beta) * kept)
        else:
            share = 1 / self._count.clamp(min=1).double()
            new = (1 - share) * self._value + share * kept
        self._value = torch.where(counted, new, self._value)

    def _metrics(self, before, factors, layers):
        out = {
            "layer_clip/clipped_frac": (factors < 1).double().mean().item(),
            "layer_clip/norm_before": before.square().sum().sqrt().item(),
            "layer_clip/norm_after": (before * factors).square().sum().sqrt().item(),
            "layer_clip/nonfinite": float((~before.isfinite()).sum()),
        }
        if self.mode == "tensor":
            out |= {"layer_clip/norm/max": before.max().item(), "layer_clip/factor/min": factors.min().item()}
        else:
            for group, norm, factor in zip(self.groups, before.tolist(), factors.tolist(), strict=True):
                name = group.replace(" ", "_")
                out |= {f"layer_clip/norm/{name}": norm, f"layer_clip/factor/{name}": factor}
        if layers.isfinite().all() and layers.any():  # zeros of a step without signal would correlate all layers
            self._history = torch.cat([self._history, layers.unsqueeze(0)])[-self.window :]
        if len(self._history) >= MIN_STEPS and (correlation := layer_correlation(self._history)) is not None:
            out["layer_clip/corr_mean"], out["layer_clip/corr_min"] = correlation
        return out

    def state_dict(self):
        """Everything a resumed run needs to go on bit for bit: tensors on the host and the names of the groups."""
        return {
            "groups": list(self.groups),
            "statistic": self._value.clone(),
            "count": self._count.clone(),
            "history": self._history.clone(),
        }

    def load_state_dict(self, state):
        """Raises ValueError where the state was saved for other groups."""
        if state["groups"] != self.groups:
            only_saved = [g for g in state["groups"] if g not in self.groups]
            only_here = [g for g in self.groups if g not in state["groups"]]
            raise ValueError(
                f"the saved LayerClip state has other groups (only saved: {_some(only_saved)}; only here: "
                f"{_some(only_here)}): resume with the same model, trainable parameters and mode"
            )
        self._value, self._count = (state[key].to("cpu", copy=True) for key in ("statistic", "count"))
        self._history = state["history"][-self.window :].to("cpu", copy=True)


def _rank(group):
    """Sort key: from the input of the model to its output."""
    kind, _, number = group.partition(" ")
    return ("embeddings", "layer", "final", "head", "other").index(kind), int(number) if kind == "layer" else 0


def _some(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
