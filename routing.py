"""Routing replay: record which experts a mixture-of-experts model used, and make another forward use the same ones.

A MoE trainer and its rollout engine disagree on about one routing decision in ten, and every update moves more of
them; each flip is a jump in the log-probs. Replay (R2: of the training engine's own choice, GSPO; R3: of the rollout
engine's choice, arXiv:2510.11370; both as in MiniRL, arXiv:2512.01374 section 3.2) takes the *ids* from elsewhere and
nothing more: gate weights are recomputed from the live logits by the router's own rule, so the router keeps learning
how to weigh the experts it was given. Replaying a model's own routes changes no bit of logits or gradients.

    with record_routing(model) as recorder:
        model(input_ids)                                  # or model.generate(...)
    with replay_routing(model, recorder.routes) as replay:
        loss = loss_of(model(input_ids))                  # one context a forward, routes sliced as the batch is
    loss.backward()                                       # inside or outside of the context

Routes are (N, S, L, K): expert ids of N sequences, S positions, L MoE layers in order, K experts a token. Stored as
uint8 where the model has at most 255 experts, else as int16: L * K or 2 * L * K bytes a token. A row that was not
recorded (padding, a lost prefix) is -1 in signed types and 255 in uint8 and keeps the model's native routing;
`recorded_rows`, `compact_routes` and `signed_routes` know the difference. An engine never computes the routing of the
last token that it samples, so replay takes S - 1 rows as well as S.

Load-balancing loss: `transformers` computes it from the router logits, which replay leaves alone.
paper: not stated (R3 trains without it); we: it goes on seeing the live logits and the router's own top-k of them,
because it shall balance the choice that the router would make, and the replayed choice has no gradient.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers.cache_utils import Cache

UINT8_EXPERTS = 255  # ids 0..254 fit beside the sentinel
UINT8_NOT_RECORDED = 255

# ---------------------------------------------------------------- gate weights of given experts, by family


def _softmax_of_all(router: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts, renormalised over the chosen if the model does. logits (T, E), ids (T, K) -> (T, K)."""
    weights = logits.softmax(-1, dtype=torch.float).gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _softmax_renormalised(router: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(-1, dtype=torch.float).gather(1, ids)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)


def _softmax_renormalised_float(router: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = logits.float().softmax(-1).gather(1, ids)
    return weights / weights.sum(-1, keepdim=True)


def _softmax_scaled(router: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1, dtype=torch.float).gather(1, ids) * router.routed_scaling_factor


def _softmax_of_chosen(router: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, ids).softmax(1, dtype=logits.dtype)


def _sigmoid(router: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores of the chosen; correction bias and expert groups steer the choice only, never the weight."""
    weights = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


# Every router below returns (logits (T, E), weights (T, K), ids (T, K)) and carries `top_k` and `num_experts`. The
# first replay of each router checks its rule against the weights that the router gave its own choice.
RULES: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Qwen2MoeTopKRouter": _softmax_of_all,
    "Qwen3MoeTopKRouter": _softmax_of_all,
    "Qwen3NextTopKRouter": _softmax_of_all,
    "OlmoeTopKRouter": _softmax_of_all,
    "FlexOlmoTopKRouter": _softmax_of_all,
    "Qwen3_5MoeTopKRouter": _softmax_renormalised,
    "Qwen3VLMoeTextTopKRouter": _softmax_renormalised,
    "MixtralTopKRouter": _softmax_renormalised_float,
    "MiniMaxTopKRouter": _softmax_renormalised_float,
    "GptOssTopKRouter": _softmax_of_chosen,
    "DeepseekV2TopkRouter": _softmax_scaled,
    "DeepseekV3TopkRouter": _sigmoid,
    "DeepseekV32TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
    "Glm4MoeLiteTopkRouter": _sigmoid,
    "Glm4vMoeTextTopkRouter": _sigmoid,
    "GlmMoeDsaTopkRouter": _sigmoid,
    "Dots1TopkRouter": _sigmoid,
    "KimiLinearTopkRouter": _sigmoid,
    "MiMoV2FlashTopkRouter": _sigmoid,
    "SolarOpenTopkRouter": _sigmoid,
}

# ---------------------------------------------------------------- the format of routes


class RoutingShape(NamedTuple):
    """What a model's routes look like: L MoE layers, K experts a token, out of E experts."""

    layers: int
    top_k: int
    experts: int


def routes_dtype(experts: int) -> torch.dtype:
    """uint8 for at most 255 experts, else int16."""
    return torch.uint8 if experts <= UINT8_EXPERTS else torch.int16


def empty_routes(size: Sequence[int], experts: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Routes of the given size (..., L, K) in which no row is recorded."""
    dtype = routes_dtype(experts)
    return torch.full(tuple(size), UINT8_NOT_RECORDED if dtype == torch.uint8 else -1, dtype=dtype, device=device)


def signed_routes(routes: torch.Tensor) -> torch.Tensor:
    """Routes in a signed type, -1 = not recorded: uint8 becomes int16, signed integers stay what they are.

    Raises ValueError for any other type: an unsigned 16-bit id has no agreed mark for "not recorded".
    """
    if routes.dtype == torch.uint8:
        return torch.where(routes == UINT8_NOT_RECORDED, -1, routes.to(torch.int16))
    if routes.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(
            f"routes are {routes.dtype}: give expert ids as uint8 (255 = not recorded) or signed integers"
        )
    return routes


def compact_routes(routes: torch.Tensor, experts: int) -> torch.Tensor:
    """Routes in the smallest type, whatever integers they came in; -1 (255 in uint8) stays "not recorded".

    Raises ValueError where an id is not in [-1, experts), since it would wrap around.
    """
    signed = signed_routes(routes)
    outside = ((signed < -1) | (signed >= experts)).nonzero()
    if len(outside):
        place = tuple(outside[0].tolist())
        raise ValueError(f"routes{list(place)} is {int(signed[place])}: expert ids lie in [0, {experts}), or -1")
    if routes_dtype(experts) == torch.int16:
        return signed.to(torch.int16)
    return torch.where(signed < 0, UINT8_NOT_RECORDED, signed).to(torch.uint8)


def recorded_rows(routes: torch.Tensor) -> torch.Tensor:
    """(..., L, K) routes -> (..., L) bool, True where the K ids are recorded."""
    return (routes != UINT8_NOT_RECORDED if routes.dtype == torch.uint8 else routes >= 0).all(-1)


def place_routes(rows: Sequence[torch.Tensor], token_mask: torch.Tensor) -> torch.Tensor:
    """Lays ragged routes under a padded batch.

    rows[i] (R_i, L, K), one row a token in order, for all tokens of sequence i or all but the last; token_mask (N, S),
    1 at tokens and 0 at padding, on whichever side. -> (N, S, L, K) on the mask's device, padding and missing last
    rows not recorded. Raises ValueError where rows and tokens do not match.
    """
    mask = token_mask.bool()
    if len(rows) != len(mask):
        raise ValueError(f"routes of {len(rows)} sequences for a batch of {len(mask)}: give one entry a sequence")
    if len({(row.shape[1:], row.dtype) for row in rows}) != 1:
        raise ValueError(
            "routes differ in layers, experts a token or type between sequences: record them in one engine"
        )
    mark = UINT8_NOT_RECORDED if rows[0].dtype == torch.uint8 else -1
    placed = torch.full((*mask.shape, *rows[0].shape[1:]), mark, dtype=rows[0].dtype, device=mask.device)
    for i, (row, tokens) in enumerate(zip(rows, mask, strict=True)):
        columns = tokens.nonzero().squeeze(1)
        if len(row) not in (len(columns), len(columns) - 1):
            raise ValueError(
                f"sequence {i} has {len(columns)} tokens but {len(row)} rows of routes: give {len(columns) - 1} (all but the "
                f"last token, as engines return) or {len(columns)}"
            )
        placed[i, columns[: len(row)]] = row.to(mask.device)
    return placed


def route_bytes_per_token(routes: torch.Tensor) -> int:
    """Bytes that the routes (..., L, K) of one token take."""
    return routes.shape[-2] * routes.shape[-1] * routes.element_size()


# ---------------------------------------------------------------- agreement


def agreeing_rows(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (L,) float64 twice: rows under the mask with equal expert sets, and all that both sides recorded.

    a, b (N, S, L, K); mask (N, S). Sums of both over parts of a batch give the agreement of the whole. Raises ValueError
    for shapes that do not match.
    """
    if a.shape != b.shape or a.dim() != 4 or mask.shape != a.shape[:2]:
        raise ValueError(
            f"routes of shapes {tuple(a.shape)} and {tuple(b.shape)} with a mask of {tuple(mask.shape)}: need (N, S, L, K) "
            "twice and (N, S); `place_routes` lays routes under a batch"
        )
    counted = mask.bool().unsqueeze(-1) & recorded_rows(a) & recorded_rows(b)  # (N, S, L)
    # Compared as int64: the types of a and b may differ, and the sentinel is left out already.
    equal = (a.long().sort(-1).values == b.long().sort(-1).values).all(-1) & counted
    return equal.sum((0, 1)).double(), counted.sum((0, 1)).double()


def routing_agreement(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> float:
    """Share of (token, layer) whose expert sets are equal, over the tokens of the mask.

    a, b (N, S, L, K); mask (N, S). Order within the K ids is ignored. A row that either side did not record is left
    out; NaN if none is left. Raises ValueError for shapes that do not match.
    """
    equal, counted = agreeing_rows(a, b, mask)
    return float(equal.sum() / counted.sum())


# ---------------------------------------------------------------- finding the routers


def _rule(module: nn.Module) -> Callable | None:
    # Along the bases, as FSDP2 puts a class of its own in front.
    return next((RULES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in RULES), None)


def _walk(module: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Every module with its ancestors, outermost first; of a PEFT `modules_to_save` pair only the one that runs."""
    yield module, above
    children = module.children()
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters
        children = [module.modules_to_save[active[0]] if active else module.original_module]
    for child in children:
        yield from _walk(child, (*above, module))


class _Site(NamedTuple):
    """One router and the modules around it, outermost first."""

    router: nn.Module
    above: tuple[nn.Module, ...]

    @property
    def backbone(self) -> nn.Module:
        """The module that owns the stack of decoder layers: its forward runs once a forward of the model."""
        stacks = [i for i, module in enumerate(self.above) if isinstance(module, nn.ModuleList)]
        return self.above[stacks[0] - 1 if stacks else 0]


def _sites(model: nn.Module) -> list[_Site]:
    sites, blocks = [], []
    for module, above in _walk(model):
        if _rule(module) is not None:
            sites.append(_Site(module, above))
        elif "experts" in module._modules:
            blocks.append(module)
    served = {id(module) for site in sites for module in site.above}
    for block in blocks:
        if id(block) not in served:
            router = block._modules.get("gate", block._modules.get("router", block))
            raise ValueError(
                f"router class {type(router).__name__} is not known to routing replay: known are {', '.join(sorted(RULES))}; "
                "add its rule for gate weights to routing.RULES"
            )
    return sites


def routing_shape(model: nn.Module) -> RoutingShape | None:
    """Layers, experts a token and experts of a model, wrapped or not; None for a dense one.

    Raises ValueError for a mixture of experts whose router is not known, naming its class.
    """
    return _shape(_sites(model))


def moe_layer_numbers(model: nn.Module) -> list[int]:
    """Which decoder layers, counted from 0, are the L MoE layers: engines that also count dense layers need it."""
    numbers = []
    for site in _sites(model):
        path = (*site.above, site.router)
        stack = next(i for i, module in enumerate(path) if isinstance(module, nn.ModuleList))
        numbers.append(next(n for n, layer in enumerate(path[stack]) if layer is path[stack + 1]))
    return numbers


def _shape(sites: list[_Site]) -> RoutingShape | None:
    shapes = {(site.router.top_k, site.router.num_experts) for site in sites}
    if len(shapes) > 1:
        raise ValueError(
            f"layers differ in (experts a token, experts): {sorted(shapes)}; routes need one shape for all"
        )
    return RoutingShape(len(sites), *shapes.pop()) if shapes else None


# ---------------------------------------------------------------- hooks


class _Tap:
    """Forward hook of one router. It stays once installed: idle it costs a microsecond, and it is what notices a
    checkpoint's recompute that would run without its routes."""

    def __init__(self, layer: int, rule: Callable):
        self.layer, self.rule = layer, rule
        self.table: _Table | None = None  # what to replay
        self.bound = False  # inside a checkpointed function that carries its table with it
        self.at_risk = False  # the last forward with gradients was replayed; a recompute would not know its table
        self.checked = False
        self.recorders: list[Recorder] = []

    def __call__(self, router: nn.Module, args: tuple, output: tuple) -> tuple:
        logits, weights, ids = output
        native, again, table = ids, _in_backward(), self.table
        if table is not None:
            ids = table.ids(self.layer, native)
            if not self.checked:
                self._check(router, logits, weights, native)
            output = logits, self.rule(router, logits, ids), ids
            if not again:
                table.replay.count(self.layer)
        elif again and self.at_risk:
            raise RuntimeError(
                "a checkpoint recomputes a replayed forward after its replay_routing context was left, and would route it "
                "natively: call backward inside the context, or checkpoint with model.gradient_checkpointing_enable()"
            )
        if not again:
            if torch.is_grad_enabled():
                self.at_risk = table is not None and not self.bound
            for recorder in self.recorders:
                recorder._add(self.layer, native if recorder.native else ids)
        return output

    @torch.no_grad()
    def _check(self, router: nn.Module, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        if not torch.allclose(self.rule(router, logits, ids), weights, rtol=0, atol=0, equal_nan=True):
            raise RuntimeError(
                f"{type(router).__name__} weighs its own choice otherwise than {self.rule.__name__} of routing.RULES: this "
                "version of transformers has another rule; correct the table"
            )
        self.checked = True


def _in_backward() -> bool:
    # What torch.utils.checkpoint itself asks; a forward that runs during backward is a recompute.
    return torch._C._current_graph_task_id() != -1


def _tap(site: _Site, layer: int) -> _Tap:
    for hook in site.router._forward_hooks.values():
        if isinstance(hook, _Tap):
            hook.layer = layer
            return hook
    tap = _Tap(layer, _rule(site.router))
    site.router.register_forward_hook(tap)
    return tap


class _Context:
    """What recording and replaying share: the routers' taps, and a hook that sees each forward of the model start."""

    def __init__(self, model: nn.Module):
        self._where = _sites(model)
        shape = _shape(self._where)
        if shape is None:
            raise ValueError(
                f"{type(model).__name__} has no mixture-of-experts router: routing can be recorded and replayed for MoE "
                "models only; switch it off for a dense model"
            )
        self.shape: RoutingShape = shape
        self._taps = [_tap(site, layer) for layer, site in enumerate(self._where)]
        self._exit = contextlib.ExitStack()

    def _watch(self) -> None:
        handle = self._where[0].backbone.register_forward_pre_hook(self._started, with_kwargs=True)
        self._exit.callback(handle.remove)

    def _started(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if _in_backward():
            return
        named = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        inputs = next(value for value in named if isinstance(value, torch.Tensor))  # (N, S) or (N, S, width)
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        self._begin(inputs.shape[0], inputs.shape[1], int(caches[0].get_seq_length()) if caches else 0)

    def _begin(self, sequences: int, positions: int, cached: int) -> None:
        raise NotImplementedError


# ---------------------------------------------------------------- recording


class Recorder(_Context):
    """See `record_routing`. `passes`: one (N, s, L, K) tensor for each forward since the last one without a cache."""

    def __init__(self, model: nn.Module, native: bool):
        super().__init__(model)
        self.native = native
        self.passes: list[torch.Tensor] = []
        self._size = (0, 0)
        self._ids: list[torch.Tensor] = []
        self._expected = 0  # tokens that the cache holds when the next pass continues these

    def __enter__(self) -> "Recorder":
        self._watch()
        for tap in self._taps:
            tap.recorders.append(self)
            self._exit.callback(tap.recorders.remove, self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def _begin(self, sequences: int, positions: int, cached: int) -> None:
        if cached == 0:
            self.passes.clear()
        elif self.passes and cached != self._expected:
            raise ValueError(
                f"the cache holds {cached} tokens where {self._expected} were expected: it was cropped or filled elsewhere, and "
                "its routes cannot be lined up; record a whole generation without speculation"
            )
        self._expected = cached + positions
        self._size, self._ids = (sequences, positions), []

    def _add(self, layer: int, ids: torch.Tensor) -> None:
        if layer != len(self._ids):
            raise RuntimeError(
                f"MoE layer {layer} ran where layer {len(self._ids)} was due: routes cannot be lined up"
            )
        self._ids.append(ids.detach())
        if layer + 1 == self.shape.layers:
            stacked = torch.stack(self._ids, 1).to(routes_dtype(self.shape.experts))  # (N * s, L, K)
            self.passes.append(stacked.view(*self._size, *stacked.shape[1:]))
            self._ids = []

    def take(self) -> torch.Tensor:
        """(N, s, L, K) of the last forward alone, then forgotten: for loops that reorder or drop rows in between."""
        routes = self._recorded()[-1]
        self.passes.clear()
        return routes

    @property
    def routes(self) -> torch.Tensor:
        """(N, S, L, K) of the last forward, or of the last generation from its prefill on, one row a position.

        Padding is recorded like any token. Raises ValueError if nothing was recorded or the batch changed in between.
        """
        passes = self._recorded()
        if len({len(routes) for routes in passes}) > 1:
            raise ValueError("the batch changed its size during the generation: read each forward with take()")
        return torch.cat(passes, 1)

    def _recorded(self) -> list[torch.Tensor]:
        if not self.passes:
            raise ValueError(
                "no routes were recorded: run the model inside the context; a compiled model or fused MoE kernels "
                "bypass the routers"
            )
        return self.passes


def record_routing(model: nn.Module, native: bool = False) -> Recorder:
    """Context manager: `with record_routing(model) as rec: model(...)`, then `rec.routes` (N, S, L, K).

    model   a MoE model, plain or wrapped (DDP, FSDP2, LoRA)
    native  under `replay_routing`: record what the router itself would choose instead of what is replayed

    A forward replaces what the last one recorded, one that continues a KV cache appends to it, a checkpoint's
    recompute is not recorded. uint8 up to 255 experts, int16 beyond. Raises ValueError for a dense model or an unknown
    router.
    """
    return Recorder(model, native)


# ---------------------------------------------------------------- replaying


class _Table:
    """Routes laid out as the routers see a forward over (N, S) positions."""

    def __init__(self, replay: "Replay", routes: torch.Tensor, recorded: torch.Tensor):
        self.replay = replay
        self._ids = routes.permute(2, 0, 1, 3).flatten(1, 2).contiguous()  # (L, N * S, K)
        self._recorded = recorded.permute(2, 0, 1).flatten(1).unsqueeze(-1).contiguous()  # (L, N * S, 1)

    def ids(self, layer: int, native: torch.Tensor) -> torch.Tensor:
        """native (N * S, K) int64 -> the same with recorded rows replaced."""
        return torch.where(
            self._recorded[layer].to(native.device), self._ids[layer].to(native.device, native.dtype), native
        )


def _repeats(routes: torch.Tensor, distance: int) -> torch.Tensor:
    """(..., K - distance) bool: the id stands again `distance` places on in its row. Cheaper than sorting rows."""
    ids = routes[..., distance:]
    return (ids == routes[..., :-distance]) & (ids >= 0)


class Replay(_Context):
    """See `replay_routing`. `replayed` counts the (token, layer) rows replayed so far, recomputes left out."""

    def __init__(self, model: nn.Module, routes: torch.Tensor):
        super().__init__(model)
        self.replayed = 0
        self._routes, self._recorded, self._rows = self._validated(routes)
        self._ran = [False] * self.shape.layers
        self._tables: dict[int, _Table] = {}  # by number of positions: S - 1 rows or S

    def _validated(self, routes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """-> routes on the model's device, recorded rows (N, S, L) bool, their number a layer. One wait for the device."""
        layers, top_k, experts = self.shape
        routes = torch.as_tensor(routes)  # engines return arrays
        if routes.dim() != 4 or routes.shape[2:] != (layers, top_k):
            raise ValueError(
                f"routes of shape {tuple(routes.shape)} do not fit the model: need (N, S, {layers} MoE layers, {top_k} experts "
                "a token)"
            )
        routes = routes.to(self._where[0].router.weight.device)
        # With more than 255 experts, 255 in uint8 is an expert: those ids were stored without a mark for missing rows.
        mark = routes.dtype != torch.uint8 or experts <= UINT8_EXPERTS
        signed = signed_routes(routes) if mark else routes.to(torch.int16)
        missing = signed < 0
        recorded = ~missing.all(-1)  # (N, S, L)
        low, high = signed.aminmax()
        partial = missing.sum() + recorded.sum() * top_k != missing.numel()
        twice = torch.stack([_repeats(signed, distance).any() for distance in range(1, top_k)] or [low < low])
        faults = torch.stack(((low < -1) | (high >= experts), partial, twice.any()))
        outside, partial, twice, *rows = torch.cat((faults.long(), recorded.sum((0, 1)))).tolist()
        if outside:
            self._refuse(signed, (signed < -1) | (signed >= experts), f"lies outside of [0, {experts}), and is not -1")
        if partial:
            self._refuse(
                signed, recorded.unsqueeze(-1) & missing, "is recorded in part: give all ids of a row or none"
            )
        if twice:
            again = torch.stack([_repeats(signed, distance).any(-1) for distance in range(1, top_k)], -1)
            self._refuse(signed, again, "names an expert twice")
        return signed, recorded, rows

    def _refuse(self, routes: torch.Tensor, wrong: torch.Tensor, words: str) -> None:
        sequence, position, layer, _ = wrong.nonzero()[0].tolist()
        ids = routes[sequence, position, layer].tolist()
        raise ValueError(f"routes of sequence {sequence}, position {position}, MoE layer {layer}: {ids} {words}")

    def __enter__(self) -> "Replay":
        if any(tap.table is not None for tap in self._taps):
            raise ValueError(
                "the model is under replay_routing already: leave that context first, one serves one forward"
            )
        self._watch()
        owners: dict[nn.Module, list[_Tap]] = {}
        for site, tap in zip(self._where, self._taps, strict=True):
            for module in site.above:
                owners.setdefault(module, []).append(tap)
        for module, taps in owners.items():
            name = "checkpoint_fn" if isinstance(module, CheckpointWrapper) else "_gradient_checkpointing_func"
            if name in module.__dict__:
                original = module.__dict__[name]
                setattr(module, name, _carrying_tables(original, taps))
                self._exit.callback(setattr, module, name, original)
        self._exit.callback(self._set_tables, None)
        self._set_tables(self._table(self._routes.shape[1]))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._exit.close()
        if kind is not None:
            return
        if not any(self._rows):
            raise RuntimeError("replay is on but every row of the routes is -1 (not recorded): nothing was replayed")
        idle = [layer for layer, rows in enumerate(self._rows) if rows and not self._ran[layer]]
        if idle:
            raise RuntimeError(
                f"replay is on but MoE layers {idle} replayed no row: run the forward of this model inside the context; a "
                "compiled model or fused MoE kernels bypass the routers"
            )

    def _begin(self, sequences: int, positions: int, cached: int) -> None:
        n, rows = self._routes.shape[:2]
        if cached:
            raise ValueError(
                f"this forward continues a cache of {cached} tokens: replay needs the whole sequences at once"
            )
        if sequences != n:
            raise ValueError(
                f"routes of {n} sequences replayed in a forward of {sequences}: slice the routes as the batch is sliced"
            )
        if positions not in (rows, rows + 1):
            raise ValueError(
                f"{rows} rows of routes replayed in a forward of {positions} positions: give {positions} rows, or {positions - 1} "
                "without the last token's"
            )
        self._set_tables(self._table(positions))

    def _table(self, positions: int) -> _Table:
        if positions not in self._tables:
            routes, recorded, missing = self._routes, self._recorded, positions - self._routes.shape[1]
            if missing:
                routes = nn.functional.pad(routes, (0, 0, 0, 0, 0, missing), value=-1)
                recorded = nn.functional.pad(recorded, (0, 0, 0, missing), value=False)
            self._tables[positions] = _Table(self, routes, recorded)
        return self._tables[positions]

    def _set_tables(self, table: _Table | None) -> None:
        for tap in self._taps:
            tap.table = table

    def count(self, layer: int) -> None:
        """A tap replayed this layer's rows once."""
        self.replayed += self._rows[layer]
        self._ran[layer] = True


def _carrying_tables(checkpoint: Callable, taps: list[_Tap]) -> Callable:
    """The checkpoint function, except that what it checkpoints brings its tables along: the recompute, whenever it
    comes and whatever is replayed by then, routes as the forward did."""

    def carrying(function: Callable, *args: Any, **kwargs: Any) -> Any:
        tables = [tap.table for tap in taps]

        def with_tables(*inner_args: Any, **inner_kwargs: Any) -> Any:
            before = [(tap.table, tap.bound) for tap in taps]
            for tap, table in zip(taps, tables, strict=True):
                tap.table, tap.bound = table, True
            try:
                return function(*inner_args, **inner_kwargs)
            finally:
                for tap, (table, bound) in zip(taps, before, strict=True):
                    tap.table, tap.bound = table, bound

        return checkpoint(with_tables, *args, **kwargs)

    return carrying


def replay_routing(model: nn.Module, routes: torch.Tensor) -> Replay:
    """Context manager: forwards of the model inside it use the experts in `routes`; gate weights come from live logits.

    model   a MoE model, plain or wrapped (DDP, FSDP2, LoRA), with any experts_implementation
    routes  (N, S, L, K) or (N, S - 1, L, K) for a forward over (N, S) positions, padding included; a row of -1 (255 in
            uint8) keeps the router's own choice for that token in that layer

    Every forward inside runs over the same N sequences, so take one context for each micro-batch. The backward may
    come later: `gradient_checkpointing_enable` and torch's CheckpointWrapper carry the routes into the recompute; any
    other checkpoint needs the backward inside, and an error says so. The context object counts `replayed` (token,
    layer) rows.

    Raises ValueError for a dense model, an unknown router, routes of another number of layers or experts a token, ids
    out of range, twice in a row or recorded in part, and in the forward for another number of sequences or positions.
    Raises RuntimeError on exit if a layer that has routes replayed none.
    """
    return Replay(model, routes)
