"""The optimizer of `--optim_method`: Ares and the baselines that it is compared with, each with its usual parameter groups.

AdamW, SGD and RMSprop are torch's; Muon and GaLore pytorch-optimizer's, because torch's Muon takes matrices only and has no GaLore.
"""

import torch

from ares import Ares
from layer_clip import kind_of, layer_of

OPTIMIZERS = {  # name -> options that it reads beside --learning_rate, --weight_decay, --adam_*
    "ares": {"rank_max", "rank_min", "rank_ema", "power_iters", "ares_step", "rank_mode", "no_low_rank"},
    "adamw": set(),
    "muon": {"momentum"},
    "galore": {"rank_max", "galore_gap", "galore_scale"},
    "sgd": {"momentum"},
    "rmsprop": {"momentum"},
}


def check_options(args):
    """Raises ValueError for an unknown --optim_method, and for an option that the chosen one never reads."""
    defaults = {f.name: f.default for f in args.__dataclass_fields__.values()}
    if args.optim_method is not None and args.optim_method not in OPTIMIZERS:
        raise ValueError(f"--optim_method {args.optim_method} is unknown: use one of {', '.join(OPTIMIZERS)}")
    read = OPTIMIZERS[args.optim_method] if args.optim_method else set()
    chosen = f"--optim_method {args.optim_method}" if args.optim_method else "--optim alone"
    for name in sorted(set().union(*OPTIMIZERS.values()) - read):
        if getattr(args, name) != defaults[name]:
            raise ValueError(f"--{name} {getattr(args, name)} is set, but {chosen} never reads it: remove it")
    if args.optim_method and args.optim != defaults["optim"]:
        raise ValueError(
            f"--optim {args.optim} is not read beside --optim_method {args.optim_method}: remove one of the two"
        )
    if args.rank_max is not None and not args.rank_max >= args.rank_min:
        raise ValueError(f"--rank_max {args.rank_max} must be at least {args.rank_min} (--rank_min), or unset")


def default_rank(model):
    """64, or a quarter of the smallest side of the layers' matrices where that is less (routers apart); at least 1."""
    sides = [
        min(p.shape[-2:])
        for name, p in model.named_parameters()
        if p.requires_grad
        and p.dim() in (2, 3)
        and layer_of(name).startswith("layer ")
        and kind_of(name) not in ("norm", "router")
    ]
    return max(1, min([64, *(side // 4 for side in sides)]))


def make_optimizer(model, args):
    """The optimizer of --optim_method with its usual groups: matrices of the layers apart from embeddings, head, norms and biases."""
    decay, lr = args.weight_decay, args.learning_rate
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    rank = args.rank_max or default_rank(model)
    if args.optim_method == "ares":
        return Ares(
            Ares.param_groups(model, weight_decay=decay, rank_max=rank), lr=lr, **adam, rank_min=args.rank_min,
            rank_ema=args.rank_ema, power_iters=args.power_iters, step=args.ares_step, rank_mode=args.rank_mode,
            low_rank=not args.no_low_rank, seed=args.seed,
        )  # fmt: skip
    matrices, tables, bare = [], [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            inside = p.dim() > 1 and layer_of(name) not in ("embeddings", "head")
            (matrices if inside else tables if p.dim() > 1 else bare).append(p)
    groups = [{"params": matrices + tables, "weight_decay": decay}, {"params": bare, "weight_decay": 0.0}]
    if args.optim_method == "adamw":
        return torch.optim.AdamW(groups, lr=lr, **adam)
    if args.optim_method == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9 if args.momentum is None else args.momentum)
    if args.optim_method == "rmsprop":
        return torch.optim.RMSprop(groups, lr=lr, momentum=args.momentum or 0.0)
    stack = next((name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 2), None)
    if stack is not None:  # the package's Muon would make one matrix of all experts, its GaLore leave them to Adam
        raise ValueError(
            f"--optim_method {args.optim_method} is defined for matrices, and {stack} is a stack of experts: use ares or adamw"
        )
    import pytorch_optimizer  # a second of start-up that other runs are spared
    from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

    if args.optim_method == "muon":  # the update of torch.optim.Muon, and AdamW for the rest in the same object
        rest, momentum = {"lr": lr, "use_muon": False, **adam}, 0.95 if args.momentum is None else args.momentum
        return pytorch_optimizer.Muon(
            [
                {"params": matrices, "lr": lr, "weight_decay": decay, "use_muon": True, "momentum": momentum, "use_adjusted_lr": True},
                {"params": tables, "weight_decay": decay, **rest},
                {"params": bare, "weight_decay": 0.0, **rest},
            ]
        )  # fmt: skip
    torch.serialization.add_safe_globals([GaLoreProjector])  # part of the optimizer's state, which resuming reads
    low_rank = {"rank": rank, "update_proj_gap": args.galore_gap, "scale": args.galore_scale, "projection_type": "std"}
    return pytorch_optimizer.GaLore(
        [
            {"params": matrices, "weight_decay": decay, **low_rank},
            {"params": tables, "weight_decay": decay},
            {"params": bare, "weight_decay": 0.0},
        ],
        lr=lr,
        **adam,
    )
