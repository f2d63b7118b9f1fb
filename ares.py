"""Ares: an optimizer that reads its rank from the gradient. Also the parts it is made of, and gradient spectra.

For every weight matrix W (m, n) with gradient G:

    1  U, S, V  leading singular triplets of G by randomized block power iteration: Q <- orth(G^T G [last V, random columns]),
                then Rayleigh-Ritz on Q: G Q = U S W^T, V = Q W
    2  r_hat  = exp(- sum_i p_i ln p_i),   p_i = S_i^2 / sum_{j <= rank_max} S_j^2          in [1, rank_max]
    3  r_bar <- rank_ema r_bar + (1 - rank_ema) r_hat;   r = clip(round(r_bar), rank_min, rank_max)
    4  G_hat  = U_r S_r V_r^T
    5  D      = Adam's direction of G_hat: M1 / (1 - b1^t) / (sqrt(M2 / (1 - b2^t)) + eps), moments in full space
    6  W     <- W - lr (Delta + weight_decay W);   Delta = D ("literal")   or   U_r U_r^T D V_r V_r^T ("projected")

Source: an article about "Adaptive Rank-Effective Spectral Optimization" (Renmin University, 2026). The paper itself is not
public: the article names the steps 1 to 5 and that one-dimensional parameters use AdamW, and no constant. Every value here is ours:
paper: energies of which singular values, rank limit, EMA weight, power iterations, oversampling, warm start, where the moments
       live, treatment of embeddings and head, learning rate and the rest of Adam are not stated;
we:    S^2 of the leading rank_max values, as "energy" says and as only then a flat spectrum gives the limit; 64; 0.9; 1 (and one
       more on the first step); 8; yes; in full space ("literal" is the article's wording; "projected" is the variant whose step
       really has rank r); AdamW, as Muon does. At the top-32 shares that the article shows (8 to 18 % of the energy) the entropy
       moves r_hat by 12 to 20 % of rank_max only: rank_max decides most of the rank.

Precision: moments, basis and all products in float32 (float64 for float64 weights). bfloat16 and float16 weights get a float32 master
copy in the state: at a learning rate of 1e-6 the update is far below their spacing, so that most steps would round away.
A copy rather than stochastic rounding: exact, the same on every rank, and it resumes bit for bit; it costs 4 bytes a parameter.

Sharding: under DDP every rank does the same. Under FSDP2 (DTensor, split along the first dimension) G stays where it is: products are
local, and what travels is the factor G^T G Q, (n, rank_max + oversample), and small Gram matrices. Expert stacks (E, m, n) are split
by expert and need nothing. Nothing gathers a matrix.
"""

import functools
import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from layer_clip import layer_of, wide

# --- spectra ----------------------------------------------------------------------------------------------------------


def _work(x):
    """float32 or better, as every product here needs it."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def effective_rank(singular_values, power=2):
    """exp of the Shannon entropy of sigma_i^power / sum sigma^power: k equal values -> k, one value -> 1, none -> 0.

    singular_values (..., k) -> (...). power=2: shares of the energy; power=1: the effective rank of Roy and Vetterli (2007).
    """
    values = _work(singular_values).abs()
    top = values.amax(-1, keepdim=True)
    energy = (values / torch.where(top > 0, top, 1.0)).pow(power)  # relative first: squares of 1e-20 would vanish
    total = energy.sum(-1, keepdim=True)
    entropy = torch.special.entr(energy / torch.where(total > 0, total, 1.0)).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), 0.0)


@functools.lru_cache(maxsize=64)
def _gaussian_once(rows, columns, seed, device, dtype):
    return _gaussian(rows, columns, seed, torch.empty((), device=device, dtype=dtype))


def _gaussian(rows, columns, seed, like):
    """Standard normal (rows, columns) that depends on `seed` alone: the same on every rank, device and resumed run."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(rows, columns, generator=generator).to(like.device, like.dtype)


@torch.no_grad()
def block_power_iteration(grad, rank, iters=2, oversample=8, basis=None, seed=0):
    """Leading `rank` singular triplets of grad (..., m, n). -> (U (..., m, rank), S (..., rank), V (..., n, rank)), S falling.

    Q = orth([basis, random columns]), then `iters` times Q <- orth(grad^T orth(grad Q)), then Rayleigh-Ritz: the exact triplets of
    P P^T grad with P = orth(grad Q). (Halko, Martinsson, Tropp 2011, algorithm 4.4.) basis (..., n, k): right singular vectors of a
    matrix nearby, say of the last step; only the columns beyond it, at least `oversample`, are drawn, from `seed` alone.
    A rank above min(m, n) is min(m, n). Raises ValueError for a grad of less than two dimensions or a rank below 1.
    """
    if grad.dim() < 2 or rank < 1:
        raise ValueError(
            f"grad of shape {tuple(grad.shape)} and rank={rank}: give a matrix (or a stack) and at least 1"
        )
    grad = _work(grad)
    m, n = grad.shape[-2:]
    rank, columns = min(rank, m, n), min(rank + oversample, m, n)
    right = _start(basis, n, columns, oversample, seed, grad)
    for _ in range(iters):
        right = torch.linalg.qr(_multiplied(grad, right)).Q
    left = torch.linalg.qr(grad @ right).Q
    right, corner = torch.linalg.qr((left.mT @ grad).mT)
    u, s, vh = torch.linalg.svd(corner.mT)  # P^T grad = corner^T right^T
    return (left @ u)[..., :rank], s[..., :rank], (right @ vh.mT)[..., :rank]


def _start(basis, n, columns, oversample, seed, like):
    """(..., n, columns): the basis without what does not fit, and random columns, at least `oversample` of them."""
    if basis is None:
        return _gaussian(n, columns, seed, like).expand(*like.shape[:-2], n, columns)
    kept = basis[..., : max(columns - oversample, 0)].to(like.dtype)
    fresh = _gaussian(n, columns - kept.shape[-1], seed, like)
    return torch.cat([kept, fresh.expand(*kept.shape[:-2], *fresh.shape)], -1)


def _multiplied(grad, right, group=None):
    """grad^T grad @ right, (..., n, q), up to a factor for each column. `group`: the processes that hold the other rows of grad."""
    left = grad @ right  # (..., m, q)
    # columns of norm 1 are enough for half an iteration to keep them apart, and against under- and overflow
    left = left / _divisor(_sum(left.square().sum(-2, keepdim=True), group).sqrt())
    return _sum(left.mT @ grad, group).mT  # in this order: the faster product


def _divisor(norms):
    return torch.where(norms > 0, norms, 1.0)


def _sum(x, group):
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _cholesky_factors(grams, loose):
    """For each Gram matrix X^T X (..., q, q) an upper T (..., q, q) with X T orthonormal, and cholesky's status, 0 where it went well.

    All of one size in one call. Columns are scaled to norm 1 and the diagonal is raised by q float epsilons (`loose`) or 4, so that a
    nearly singular one passes. X T is orthonormal to rounding times the square of X's condition: between power iterations, where the
    span alone counts, one loose pass does; a second pass over X T, not loose, is exact where X had a condition up to about 1e5
    (float32). Beyond, directions that are lost in the rounding of X may come out shorter than 1: they hold no gradient.
    """
    equal = defaultdict(list)
    for i, gram in enumerate(grams):
        equal[gram.shape[-1], gram.dtype, gram.device].append(i)
    factors, status = [None] * len(grams), [None] * len(grams)
    for (q, dtype, device), places in equal.items():
        gram = torch.cat([grams[i].reshape(-1, q, q) for i in places])
        divisor = _divisor(gram.diagonal(dim1=-2, dim2=-1).sqrt())
        gram = gram / divisor.unsqueeze(-1) / divisor.unsqueeze(-2)
        gram.diagonal(dim1=-2, dim2=-1).add_((q if loose else 4) * torch.finfo(dtype).eps)
        lower, info = torch.linalg.cholesky_ex(gram)
        identity = torch.eye(q, dtype=dtype, device=device).expand_as(lower)
        upper = torch.linalg.solve_triangular(lower, identity, upper=False).mT / divisor.unsqueeze(-1)
        counts = [grams[i].numel() // q**2 for i in places]
        for i, factor, code in zip(places, upper.split(counts), info.split(counts), strict=True):
            factors[i], status[i] = factor.reshape(grams[i].shape), code
    return factors, status


def _energies(grad):
    """Squared singular values of grad (..., m, n), falling, float64. Of the smaller Gram matrix: exact to 1e-15 of the largest."""
    grad = grad.to(wide(grad.device))
    gram = grad.mT @ grad if grad.shape[-1] <= grad.shape[-2] else grad @ grad.mT
    return torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1)


@torch.no_grad()
def spectral_stats(grad, top=32, levels=(0.5, 0.7, 0.9), exact=None, sketch=256):
    """How concentrated a gradient matrix (m, n) is. -> {"top_share", "rank@<level>" for each level, "entropy_rank"}, plain numbers.

    top_share        share of the energy sum sigma^2 in the `top` largest singular values
    rank@0.5         fewest singular values that hold half of the energy, and so on
    entropy_rank     `effective_rank` of all singular values

    Exact where min(m, n) is at most 2048 (`exact` decides otherwise). Above, from the leading `sketch` triplets: top_share is then a
    lower bound, and "top_share_upper" is an upper one (Ky Fan: what the sketch missed can add no more than its own energy); rank@level is
    an upper bound, infinite where the sketch does not reach the level; entropy_rank is NaN. A zero matrix has share and ranks 0.
    Raises ValueError unless grad is a matrix of finite values.
    """
    if grad.dim() != 2:
        raise ValueError(f"grad of shape {tuple(grad.shape)}: spectral_stats takes one matrix (m, n)")
    total = grad.to(wide(grad.device)).square().sum().item()
    if not math.isfinite(total):
        raise ValueError(f"grad of shape {tuple(grad.shape)} holds a value that is not finite: it has no spectrum")
    exact = min(grad.shape) <= 2048 if exact is None else exact
    if exact:
        energies = _energies(grad)
    else:
        energies = block_power_iteration(grad, max(sketch, 2 * top), iters=3, oversample=16)[1].double().square()
    held = energies.cumsum(-1)
    stats = {"top_share": _share(held[min(top, len(held)) - 1].item(), total)}
    if not exact:
        missed = max(total - held[-1].item(), 0.0)
        stats["top_share_upper"] = min(1.0, _share(held[min(top, len(held)) - 1].item() + missed, total))
    for level in levels:
        # a rounding below the level must not cost a rank: k equal values reach k' / k at k' exactly
        short = int((held < level * total * (1 - 1e-12)).sum())
        stats[f"rank@{level:g}"] = 0 if total == 0 else math.inf if short == len(held) else short + 1
    stats["entropy_rank"] = effective_rank(energies.sqrt()).item() if exact else math.nan
    return stats


def _share(part, total):
    return part / total if total else 0.0


# --- the optimizer ----------------------------------------------------------------------------------------------------

STACK_ELEMENTS = 2**18  # matrices up to this size are stacked: below, calls cost more than the copy
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices of torch's fused AdamW
NOISE = 8  # singular values below this many float epsilons of the largest are rounding: they count as 0


class Ares(torch.optim.Optimizer):
    """Adam on the leading singular directions of each gradient matrix, as many as the gradient's own entropy asks for.

    params            as for torch.optim; `Ares.param_groups(model)` makes the groups. A group with "spectral": False is plain AdamW
                      (bit for bit torch's fused one); without the key every parameter of 2 or 3 dimensions is spectral, a
                      stack (E, m, n) as E matrices.
    rank_max, rank_min     limits of the rank; a matrix smaller than rank_max has its own size as limit
    rank_ema          weight of the past in the rank; 0 = no smoothing
    power_iters       power iterations a step, two products with the gradient each (Rayleigh-Ritz and G_hat are one more each); one
                      more on a matrix's first step
    oversample        random columns drawn anew each step
    step              "literal": Adam's direction as it is; "projected": projected onto the current r directions on both sides
    rank_mode         "dynamic", or "fixed": r = rank_max
    low_rank          False: no truncation, plain AdamW (ablation)
    energy_power      2: entropy of sigma^2; 1: of sigma
    nonfinite         "raise": RuntimeError before anything is changed; "skip": the whole step is left out and counted in `skipped`
    seed              of the random columns; torch's random state is never touched

    p.grad is never changed. The host waits for the device once a step. State: exp_avg, exp_avg_sq (as the weight), basis
    (n, rank_max), rank, step, and master for half-precision weights. ValueError for an argument out of range, a
    sparse or complex gradient, or a sharding that is not along the first dimension.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        rank_max=64,
        rank_min=1,
        rank_ema=0.9,
        power_iters=1,
        oversample=8,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        step="literal",
        rank_mode="dynamic",
        low_rank=True,
        energy_power=2,
        nonfinite="raise",
        seed=0,
    ):
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f"Ares nonfinite={nonfinite!r} is unknown: use 'raise' or 'skip'")
        self.nonfinite = nonfinite
        self.fallbacks = 0  # times that Cholesky could not orthogonalise a stack of matrices
        defaults = {
            "lr": lr, "rank_max": rank_max, "rank_min": rank_min, "rank_ema": rank_ema, "power_iters": power_iters,
            "oversample": oversample, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "step": step,
            "rank_mode": rank_mode, "low_rank": low_rank, "energy_power": energy_power, "spectral": None, "seed": seed,
            "skipped": 0,
        }  # fmt: skip
        super().__init__(params, defaults)

    @property
    def skipped(self):
        """Steps left out because of a gradient that was not finite; saved with the state."""
        return self.param_groups[0]["skipped"]

    def add_param_group(self, param_group):
        """As torch's; raises ValueError for an option out of range."""
        _check_options(self.defaults | param_group)
        super().add_param_group(param_group)

    @staticmethod
    def param_groups(model, weight_decay=0.0, rank_max=64, **options):
        """Groups for `Ares(groups, ...)`: spectral for matrices and expert stacks of the layers; AdamW for the rest.

        The rest is: one-dimensional parameters (norms, biases: also without weight decay), embeddings, head, and matrices with a
        side of at most 2 rank_max, in which a rank of rank_max cuts nothing worth its cost (routers, small adapters).
        paper: one-dimensional parameters only; we: embeddings and head too, as their gradients are sparse by rows.
        options (lr, betas, ...) go into every group. LoRA: an adapter matrix counts as any other, with its rank as a side.
        Raises ValueError where no matrix is left to be spectral.
        """
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        spectral, plain, bare, largest = [], [], [], 0
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            inside = id(p) not in tables and layer_of(name) not in ("embeddings", "head")
            side = min(p.shape[-2:]) if p.dim() in (2, 3) and inside else 0
            largest = max(largest, side)
            chosen = spectral if side > 2 * rank_max else plain if p.dim() > 1 else bare
            chosen.append((name, p))
        if not spectral:
            raise ValueError(
                f"Ares with rank_max={rank_max} finds no matrix to treat: the largest smaller side is {largest} and it must exceed "
                f"{2 * rank_max}; use a smaller rank_max (with LoRA: below half of the adapters' rank) or AdamW"
            )
        kinds = ((spectral, True, weight_decay), (plain, False, weight_decay), (bare, False, 0.0))
        return [
            {"params": named, "spectral": flag, "weight_decay": decay, "rank_max": rank_max, **options}
            for named, flag, decay in kinds
            if named
        ]

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient. closure: as for every torch optimizer, evaluated once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets, plain = self._collect()
        _sketch(buckets)
        if not self._check_finite(buckets, plain):
            self.param_groups[0]["skipped"] += 1
            return loss
        _rayleigh_ritz(buckets)
        for bucket in buckets:
            bucket.update()
        for members in plain:
            _adamw(members, [m.grad for m in members])
        for members in [bucket.members for bucket in buckets] + plain:
            for member in members:
                member.finish()
        return loss

    def _collect(self):
        """This step's parameters: _Bucket of equal matrices for the spectral update, lists of _Member for AdamW."""
        equal, plain = defaultdict(list), []
        for index, group in enumerate(self.param_groups):
            members = []
            for position, p in enumerate(group["params"]):
                if p.grad is not None:
                    name = group["param_names"][position] if "param_names" in group else f"{position} of group {index}"
                    members.append(_Member(p, self.state[p], group, name))
            for member in members:
                if member.spectral:
                    equal[(index, *member.kind())].append(member)
            rest = [member for member in members if not member.spectral]
            if rest:
                plain.append(rest)
        buckets = []
        for members in equal.values():  # sizes by the whole matrix, not the shard: all ranks make the same buckets
            p = members[0].p
            size = 1 if p.dim() == 3 else max(1, STACK_ELEMENTS // p.numel())
            buckets += [_Bucket(members[i : i + size]) for i in range(0, len(members), size)]
        return buckets, plain

    def _check_finite(self, buckets, plain):
        """True if every gradient is finite. Here the host waits for the device. What Cholesky failed on is done again on the way."""
        rest = [m for members in plain for m in members]
        flags = [bucket.broken() for bucket in buckets]
        if rest:
            flags.append(~torch.nn.utils.get_total_norm([m.grad for m in rest]).isfinite())
        if not flags:
            return True
        groups = list(
            {m.shards: None for members in [*(b.members for b in buckets), rest] for m in members if m.shards}
        )
        broken = _reduced(torch.stack([flag.to(flags[0].device) for flag in flags]).float(), groups).tolist()
        if not any(broken):
            return True
        again = [bucket for bucket, flag in zip(buckets, broken, strict=False) if flag]
        suspects = [m for bucket in again for m in bucket.members] + rest
        names = [m.name for m in suspects if not torch.isfinite(m.grad).all()]
        if not _reduced(torch.tensor(float(len(names)), device=flags[0].device), groups):
            for bucket in again:
                bucket.sketch_by_householder()
            self.fallbacks += len(again)
            return True
        if self.nonfinite == "skip":
            return False
        some = (
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            if names
            else "on another rank"
        )
        raise RuntimeError(
            f"Ares: the gradient of parameter {some} is not finite; nothing was changed. Find the cause (--gradloc directional), or "
            "leave such steps out (nonfinite='skip')"
        )

    def metrics(self):
        """{"ares/rank/mean", "ares/rank/min", "ares/rank/max"} of the smoothed rank over this process's matrices, "ares/skipped"."""
        ranks = [_own(state["rank"]).reshape(-1) for state in self.state.values() if "rank" in state]
        out = {"ares/skipped": float(self.skipped)}
        if ranks:
            values = torch.cat(ranks)
            for name in ("mean", "min", "max"):
                out[f"ares/rank/{name}"] = getattr(values, name)().item()
        return out

    def load_state_dict(self, state_dict):
        """As torch's, but every tensor keeps its precision: torch rounds the state of a bfloat16 weight to bfloat16."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[p][name] = value.to("cpu" if name == "step" else p.device, copy=True)


def _check_options(group):
    """Raise ValueError for the first option of a parameter group that is out of range."""
    checks = (
        ("lr", not isinstance(group["lr"], torch.Tensor) and group["lr"] >= 0, "a number, 0 or above"),
        ("rank_max", group["rank_max"] >= 1, "at least 1"),
        ("rank_min", 1 <= group["rank_min"] <= group["rank_max"], "between 1 and rank_max"),
        ("rank_ema", 0 <= group["rank_ema"] < 1, "a weight of the past in [0, 1)"),
        ("power_iters", group["power_iters"] >= 0, "0 or more"),
        ("oversample", group["oversample"] >= 1, "at least 1"),
        ("betas", all(0 <= beta < 1 for beta in group["betas"]) and len(group["betas"]) == 2, "two values in [0, 1)"),
        ("eps", group["eps"] >= 0, "0 or above"),
        ("weight_decay", group["weight_decay"] >= 0, "0 or above"),
        ("step", group["step"] in ("literal", "projected"), "'literal' or 'projected'"),
        ("rank_mode", group["rank_mode"] in ("dynamic", "fixed"), "'dynamic' or 'fixed'"),
        ("energy_power", group["energy_power"] in (1, 2), "2 (energies) or 1"),
    )
    for name, good, need in checks:
        if not good:
            raise ValueError(f"Ares {name}={group[name]!r}: use {need}")


def _own(x):
    """The tensor, or this rank's shard of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def _reduced(x, groups):
    for group in groups:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


class _Member:
    """One parameter in one step: this rank's part of weight, gradient and state."""

    def __init__(self, p, state, group, name):
        if p.grad.is_sparse or p.is_complex():
            raise ValueError(
                f"Ares: parameter {name} has a sparse gradient or complex values: give it to another optimizer"
            )
        self.p, self.state, self.group, self.name = p, state, group, name
        wanted = group["spectral"] is not False and group["low_rank"] and p.dim() in (2, 3) and p.numel() > 0
        self.spectral = wanted
        self.shards = _shard_group(p, name)  # the processes that hold other parts of this parameter
        self.rows = self.shards if p.dim() == 2 else None  # an expert stack is split between matrices, not within
        self.half = p.dtype not in (torch.float32, torch.float64)
        self._start()
        grad = p.grad
        # tensor parallelism can leave a sum to be reduced
        if isinstance(grad, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)
        self._grad = _own(grad)
        self.step = int(state["step"]) + 1  # on the host

    def _start(self):
        """Empty state, also for what an option that was switched on since lacks."""
        p, state = self.p, self.state
        dtype = torch.float32 if self.half else p.dtype
        if "step" not in state:
            state["step"] = torch.zeros(())  # on the host, as torch's own optimizers keep it
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype), torch.zeros_like(p, dtype=dtype)
            if self.half:
                state["master"] = p.detach().clone().to(dtype)
        if self.spectral and "basis" not in state:
            m, n = p.shape[-2:]
            stack, size = tuple(_own(p).shape[:-2]), min(self.group["rank_max"], m, n)
            state["basis"] = self._whole(torch.zeros(*stack, n, size, dtype=dtype, device=p.device))
            state["rank"] = self._whole(torch.zeros(stack, device=p.device))

    def _whole(self, local):
        """State of a sharded expert stack is sharded with it; that of a matrix is the same on every rank."""
        if not isinstance(self.p, DTensor) or self.p.dim() == 2:
            return local
        shape = (self.p.shape[0], *local.shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.p.device_mesh, self.p.placements, run_check=False, shape=shape, stride=stride
        )

    def kind(self):
        """Members of equal kind and group share one bucket."""
        return tuple(self.p.shape), self.p.dtype, self.p.device, self.shards, self.step, self.state["basis"].shape[-1]

    @property
    def grad(self):
        """This rank's gradient, in the precision of the state; a copy for half-precision weights only."""
        return self._grad.to(self.state["exp_avg"].dtype)

    @property
    def weight(self):
        """What the update changes: the weight, or its float32 master."""
        return _own(self.state["master"] if self.half else self.p)

    def sync_master(self):
        """Take over a weight that was changed from outside (loaded, merged) since the last step."""
        if self.half:
            master, local = self.weight, _own(self.p)
            master.copy_(torch.where(master.to(local.dtype) == local, master, local.to(master.dtype)))

    def finish(self):
        if self.half:
            _own(self.p).copy_(self.weight)
        self.state["step"] += 1


def _shard_group(p, name):
    """The process group that p is split over along its first dimension; None where it is whole on this rank."""
    if not isinstance(p, DTensor):
        return None
    split = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]
    if not split:
        return None
    if len(split) > 1 or p.placements[split[0]] != Shard(0):
        raise ValueError(
            f"Ares: parameter {name} is laid out as {p.placements}, and only a split along the first dimension (FSDP2's own) over one "
            "dimension of the mesh is supported: use FSDP2 without tensor parallelism, or another optimizer"
        )
    return p.device_mesh.get_group(split[0])


def _same_layout(*tensors):
    """Do the tensors, of one shape, fill their memory without gaps and in one and the same order of dimensions?"""
    if all(x.is_contiguous() for x in tensors):
        return True
    sizes, strides = tensors[0].shape, {x.stride() for x in tensors}
    return len(strides) == 1 and sum((n - 1) * s for n, s in zip(sizes, *strides, strict=True)) == sizes.numel() - 1


def _adamw(members, grads):
    """torch's AdamW on weights and moments of `members`, which share a group, with `grads` in the place of their own."""
    group = members[0].group
    for member in members:
        member.sync_master()
    device = members[0].weight.device
    weights = [m.weight for m in members]
    first, second = ([_own(m.state[name]) for m in members] for name in ("exp_avg", "exp_avg_sq"))
    # torch's fused kernel pairs values by their place in memory, whatever the strides say
    aligned = all(_same_layout(*tensors) for tensors in zip(weights, grads, first, second, strict=True))
    adamw(
        weights,
        grads,
        first,
        second,
        [],
        [torch.full((), float(m.step - 1), device=device) for m in members],  # made on the device: no wait
        fused=device.type in FUSED and aligned,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _Bucket:
    """Matrices of one shape, treated at once: (..., m, n) is one matrix, a stack of small ones (b, m, n), or one expert stack."""

    def __init__(self, members):
        self.members, self.group = members, members[0].group
        self.single = len(members) == 1  # one matrix, or one expert stack, as it is; else stacked (b, m, n)
        self.rows = members[0].rows
        self.status = []  # of the factorisations so far, 0 where one went well

    def _stack(self, tensors):
        return tensors[0] if self.single else torch.stack(tensors)

    @functools.cached_property
    def _stacked(self):
        return torch.stack([m.grad for m in self.members])

    @property
    def grad(self):
        """(..., m, n), this rank's rows. A large half-precision one is converted anew each time: its copies would add up to the model."""
        return self.members[0].grad if self.single else self._stacked

    def start(self):
        """(..., n, q): the last basis and fresh columns. Sets `turns`, the number of power iterations."""
        group, first = self.group, self.members[0]
        m, n = first.p.shape[-2:]
        basis = self._stack([_own(member.state["basis"]) for member in self.members])  # (..., n, k)
        columns = min(group["rank_max"] + group["oversample"], m, n)
        cold = first.step == 1
        self.turns = group["power_iters"] + cold
        if not cold:  # a gradient of lower rank left columns without direction
            filler = _gaussian_once(n, basis.shape[-1], group["seed"], basis.device, basis.dtype)
            basis = torch.where(basis.square().sum(-2, keepdim=True) > 0.25, basis, filler)
        # one draw a step for all matrices: their gradients differ, it need not
        seed = group["seed"] + 1_000_003 * first.step
        return _start(None if cold else basis, n, columns, group["oversample"], seed, basis)

    def broken(self):
        """() bool: a factorisation failed, or something is not finite."""
        return ~self.core.isfinite().all() | (torch.cat(self.status) != 0).any()

    def finish_sketch(self, right, mix):
        """Keep X = right (..., n, q) and T = mix (..., q, q) with Q = X T orthonormal, G X, and the core (G Q)^T G Q in float64.

        From its eigenvalues to G's singular triplets see `_rayleigh_ritz`. Squaring in float64 loses nothing that float32 held.
        """
        self.right, self.mix = right, mix
        self.left = self.grad @ right  # (..., m, q)
        left, mix = self.left.to(wide(right.device)), mix.to(wide(right.device))
        self.core = mix.mT @ _sum(left.mT @ left, self.rows) @ mix  # (..., q, q)

    def sketch_by_householder(self):
        right = self.start()
        for _ in range(self.turns):
            right = torch.linalg.qr(_multiplied(self.grad, right, self.rows)).Q
        right = torch.linalg.qr(right).Q
        identity = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        self.finish_sketch(right, identity.expand(*right.shape[:-2], *identity.shape))

    def update(self):
        """Rank, truncation, Adam, weights. Needs `values`, `vectors` and `estimate` from `_rayleigh_ritz`."""
        group, members = self.group, self.members
        basis = [_own(m.state["basis"]) for m in members]
        k = basis[0].shape[-1]
        values, inner = self.values[..., :k], self.mix @ self.vectors[..., :k]  # (..., k), (..., q, k)
        scaled, v = self.left @ inner, self.right @ inner  # U S: (..., m, k), and V: (..., n, k)
        keep = (torch.arange(k, device=v.device) < self._ranks(k).unsqueeze(-1)).unsqueeze(-2)  # (..., 1, k)
        for i, old in enumerate(basis):
            old.copy_(v if self.single else v[i])
        truncated = scaled @ (v * keep).mT  # (..., m, n): G_hat
        parts = [truncated] if self.single else list(truncated.unbind())
        if group["step"] == "literal":
            _adamw(members, parts)
        else:
            u = scaled * keep / torch.where(values > 0, values, math.inf).unsqueeze(-2)
            self._projected(truncated, parts, u, v * keep)

    def _ranks(self, limit):
        """Update the smoothed ranks, return the ranks in force, at most `limit`: (...) whole numbers as floats."""
        group = self.group
        olds = [_own(m.state["rank"]) for m in self.members]
        old = self._stack(olds)
        estimate = self.estimate.to(old.dtype)
        smooth = group["rank_ema"] * old + (1 - group["rank_ema"]) * estimate
        new = torch.where(estimate == 0, old, torch.where(old == 0, estimate, smooth))  # no gradient says nothing
        for i, o in enumerate(olds):
            o.copy_(new if self.single else new[i])
        return (
            torch.full_like(new, limit)
            if group["rank_mode"] == "fixed"
            else new.round().clamp(min(group["rank_min"], limit), limit)
        )

    def _projected(self, truncated, parts, u, v):
        """W <- (1 - lr wd) W - lr U U^T D V V^T; D takes the place of G_hat in memory."""
        group = self.group
        beta1, beta2 = group["betas"]
        for member, part in zip(self.members, parts, strict=True):
            member.sync_master()
            first, second = _own(member.state["exp_avg"]), _own(member.state["exp_avg_sq"])
            first.lerp_(part, 1 - beta1)
            second.mul_(beta2).addcmul_(part, part, value=1 - beta2)
            torch.sqrt(second, out=part).div_(math.sqrt(1 - beta2**member.step)).add_(group["eps"])
            torch.div(first, part, out=part).div_(1 - beta1**member.step)
        inner = _sum(u.mT @ (truncated @ v), self.rows)  # (..., k, k)
        torch.matmul(u @ inner, v.mT, out=truncated)
        for member, part in zip(self.members, parts, strict=True):
            member.weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(part, alpha=group["lr"])


def _sketch(buckets):
    """`finish_sketch` of all buckets. Large products one by one, what is small for all in one call. No state changes."""
    rights = [bucket.start() for bucket in buckets]

    def orthonormalise(places, loose):
        grams = [rights[i].mT @ rights[i] for i in places]
        found, status = _cholesky_factors(grams, loose)
        for i, code in zip(places, status, strict=True):
            buckets[i].status.append(code)
        return found

    for turn in range(max((bucket.turns for bucket in buckets), default=0)):
        some = [i for i, bucket in enumerate(buckets) if turn < bucket.turns]
        for i in some:
            rights[i] = _multiplied(buckets[i].grad, rights[i], buckets[i].rows)
        for i, factor in zip(some, orthonormalise(some, loose=True), strict=True):
            rights[i] = rights[i] @ factor
    for bucket, right, mix in zip(buckets, rights, orthonormalise(range(len(buckets)), loose=False), strict=True):
        bucket.finish_sketch(right, mix)


def _rayleigh_ritz(buckets):
    """`values` (..., q) falling, `vectors` (..., q, q) and `estimate` (...) of all buckets, in one call for each size.

    Of core = (G Q)^T G Q = W S^2 W^T; then G's triplets are G Q W / S, S, Q W. `estimate` is the entropy rank of the leading ones.
    """
    equal = defaultdict(list)
    for bucket in buckets:
        core, group = bucket.core, bucket.group
        limit = bucket.members[0].state["basis"].shape[-1]
        equal[core.shape[-1], core.device, bucket.left.dtype, limit, group["energy_power"]].append(bucket)
    for (size, _, dtype, limit, power), members in equal.items():
        squares, vectors = torch.linalg.eigh(torch.cat([bucket.core.reshape(-1, size, size) for bucket in members]))
        values, vectors = squares.clamp(min=0).sqrt().flip(-1), vectors.flip(-1)
        noise = max(NOISE * torch.finfo(dtype).eps, 1e-7)  # their squares are exact to float64's epsilon
        values = torch.where(values > noise * values[..., :1], values, 0.0)
        estimate = effective_rank(values[..., :limit], power)
        counts = [bucket.core.numel() // size**2 for bucket in members]
        found = zip(*(x.to(dtype).split(counts) for x in (values, vectors, estimate)), strict=True)
        for bucket, (some, right, rank) in zip(members, found, strict=True):
            stack = bucket.core.shape[:-2]
            bucket.values, bucket.vectors = some.reshape(*stack, size), right.reshape(*stack, size, size)
            bucket.estimate = rank.reshape(stack)
